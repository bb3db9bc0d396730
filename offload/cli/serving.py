"""A server from its socket to its end: it listens first, and reports that the model loads.

Invariant: a port in use, a missing key and a model that cannot be served are refused before a
weight is read. However the server ends, running texts get their grace period, waiting requests are
answered, and nothing is left behind.
"""

import signal
from contextlib import ExitStack
from threading import Event, Timer

from offload.cli.console import Console
from offload.cli.loading import Loading
from offload.cli.sampling import sampling_words
from offload.engine.request import Request
from offload.engine.service import ASK_LATER, Closing, Engine
from offload.errors import UserError
from offload.interrupts import heard_by
from offload.server.app import create_app
from offload.server.http_server import HttpServer
from offload.server.listening import EarlyAnswers
from offload.server.settings import ServerSettings
from offload.units import plural

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve_model(
    loading: Loading,
    console: Console,
    settings: ServerSettings,
    early: EarlyAnswers,
    *,
    num_waiting: int,
    grace_s: float,
) -> None:
    """Serve until a signal ends it. Raises `UserError` and `RunError`.

    Args:
        early: owns the socket, and answers on it until this server can.
        num_waiting: requests that may wait for a place.
        grace_s: seconds that running texts get when the server ends.
    """
    app = create_app(None, settings)
    first = Request(sampling=settings.sampling)
    brake = Event()

    def check() -> None:
        if brake.is_set():
            raise Closing(ASK_LATER)

    with (
        ExitStack() as ending,
        HttpServer(app, early.hand_over(), console.say) as server,
        loading.open(console, first, check=check) as decoder,
    ):
        if decoder.tokenizer is None:
            requirement = "a server needs the model's tokenizer"
            raise UserError(f"{requirement}: put its tokenizer.json beside it")
        console.say(
            f"a request that does not say how to draw gets {sampling_words(settings.sampling)}"
        )
        with Engine(decoder, max_waiting=num_waiting) as engine:
            app.state.engine = engine
            console.say(serving_lines(settings.model_id, server.address))
            _wait(server, engine, console, grace_s, brake, ending)


def serving_lines(name: str, address: str) -> str:
    """Return lines on the page to open, the address for programs, and the end of the server."""
    return f"serving {name}, Ctrl-C ends it\n  chat page  {address}/\n  API        {address}/v1"


def _wait(
    server: HttpServer,
    engine: Engine,
    console: Console,
    grace_s: float,
    brake: Event,
    ending: ExitStack,
) -> None:
    """Wait for a signal to end the server; a pass beyond the grace period ends at its next layer.

    So does it at a second signal, which raises nothing any more: whatever it broke off might hold a
    lock that the end waits for. `ending` lasts as long as the server.
    """
    try:
        server.wait()
    # SIGINT, SIGTERM and SIGHUP are how a server is ended, and no failure
    except (KeyboardInterrupt, SystemExit):
        ending.enter_context(heard_by(lambda *_: brake.set(), *_ENDS))
        figures = engine.figures()
        if figures.num_active:
            texts = plural(figures.num_active, "text")
            console.say(f"ending: {texts} under way, at most {grace_s:g} s more")
        clock = Timer(grace_s, brake.set)
        clock.start()
        try:
            engine.close(grace_s)
        finally:
            clock.cancel()
