"""A real server over a real socket for tests, in a thread, and the tokens that its models know."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from reciting import before_steps, open_decoder
from waiting import PATIENCE_S

from offload.engine.decoder import Decoder
from offload.engine.service import Engine
from offload.server.app import create_app
from offload.server.http_server import HttpServer
from offload.server.listening import bind
from offload.server.settings import ServerSettings

MODEL_ID = "reciter"
HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0.0}


class Served(NamedTuple):
    """A server that answers, and what it is made of."""

    address: str
    port: int
    engine: Engine
    decoder: Decoder
    clients: ExitStack

    def client(self, key: str = "none") -> openai.OpenAI:
        opened = openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)
        return self.clients.enter_context(opened)

    def is_idle(self) -> bool:
        figures = self.engine.figures()
        return (figures.num_active, figures.num_waiting) == (0, 0)

    def rests(self) -> bool:
        """It is idle, and all that was done is counted: the engine's thread sleeps until it is asked."""
        return bool(self.engine._changed._waiters) and self.is_idle()  # type: ignore[attr-defined]


@contextmanager
def serving(model: Path | Decoder, *, max_waiting: int = 8, **settings: Any) -> Iterator[Served]:
    said, opened = list[str](), open_decoder(model) if isinstance(model, Path) else model
    with opened as decoder, Engine(decoder, max_waiting=max_waiting) as engine:
        app = create_app(engine, ServerSettings(model_id=MODEL_ID, **settings))
        with HttpServer(app, bind("127.0.0.1", 0), said.append) as server, ExitStack() as clients:
            yield Served(server.address, server.bound.getsockname()[1], engine, decoder, clients)
            engine.close()
    assert not said, f"the server failed: {said}"


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the one for all tests: servers of modules read while others begin."""
    monkeypatch.setattr("offload.machine.num_cores", lambda: 1)
    torch.set_num_threads(1)


@contextmanager
def held_passes() -> Iterator[threading.Event]:
    """No pass ends before this does; gives an event that is set once one has begun."""
    begun, let_go = threading.Event(), threading.Event()
    with before_steps(lambda: begun.set() or let_go.wait()):
        try:
            yield begun
        finally:
            let_go.set()
