"""Decoders on ranks that are threads of this process."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from in_memory import Delay, InMemory, in_memory

from offload.engine.decoder import Decoder
from offload.engine.hooks import Hooks
from offload.engine.load import open_decoder
from offload.errors import UserError
from offload.planning.load_options import LoadOptions

_NOBODY = Hooks()
Options = Callable[[int], dict[str, Any]]  # of `LoadOptions`, by rank


class _Others:
    """All ranks but the head, and what has ended each of them."""

    def __init__(self, transports: Sequence[InMemory], load: Callable[[InMemory], Any]) -> None:
        self.errors: list[BaseException | None] = [None] * len(transports)
        self._threads = [threading.Thread(target=self._run, args=(transport, load)) for transport in transports]
        for thread in self._threads:
            thread.start()

    def _run(self, transport: InMemory, load: Callable[[InMemory], Any]) -> None:
        torch.set_num_threads(1)
        try:
            load(transport)
        except BaseException as error:
            self.errors[transport.rank - 1] = error
            if not isinstance(error, SystemExit):
                transport.close(str(error), is_refusal=isinstance(error, UserError))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank does not end"


@contextmanager
def rank_threads(
    num_ranks: int, target: Path, draft: Path | None, options: Options, delay: Delay = lambda *_: 0.0,
    hooks: Hooks = _NOBODY,
) -> Iterator[Decoder]:  # fmt: skip
    """The head's decoder, and its hooks, as torchrun starts it. On leaving, the others have ended as they should."""
    transports = in_memory(num_ranks, delay)

    def load(transport: InMemory) -> Decoder:
        rank_hooks = hooks if transport.rank == 0 else _NOBODY
        wanted = LoadOptions(target, draft, **options(transport.rank))
        return open_decoder(wanted, transport=transport, hooks=rank_hooks)

    with pytest.MonkeyPatch.context() as patch:  # what options look for; which rank a thread is, its transport says
        for name, value in {"RANK": 0, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
            patch.setenv(name, str(value))
        others = _Others(transports[1:], load)
        try:
            with load(transports[0]) as decoder:
                yield decoder
        except BaseException:
            transports[0].close()
            raise
        finally:
            others.join()
    assert all(isinstance(error, SystemExit) for error in others.errors), others.errors
