"""A server from its socket to its end: bound first, then the model is loaded while it answers that
it loads.

Invariant: a port that is taken, a key that is missing and a model that cannot be served are refused
before a weight is read; and however it ends, texts under way get their grace, requests that wait
are told, and nothing is left behind.
"""

from threading import Event, Timer

from offload.checkpoint.generation_config import served_sampling
from offload.cli.console import Console
from offload.cli.libraries import Loading
from offload.cli.live_line import plural
from offload.cli.sampling import sampling_words
from offload.engine.request import Request
from offload.engine.service import ASK_LATER, Closing, Engine
from offload.errors import UserError
from offload.options import ServerOptions
from offload.server.app import create_app
from offload.server.listening import EarlyAnswers
from offload.server.network import Listening
from offload.server.protocol import ServerSettings


def serve_model(
    loading: Loading,
    console: Console,
    server: ServerOptions,
    keys: tuple[str, ...],
    max_body_bytes: int,
    early: EarlyAnswers,
) -> None:
    """Serve until a signal ends it. Raises `UserError` and `RunError`.

    Args:
        keys: any of them lets in; none asks for none.
        early: has the socket, and answers on it until this server can.
    """
    sampling = served_sampling(str(loading.options.config or loading.model))
    settings = ServerSettings(
        model_id=loading.names.model,
        sampling=sampling,
        aliases=tuple(server.alias or ()),
        host=server.host,
        origins=tuple(server.cors or ()),
        api_keys=keys,
        max_body_bytes=max_body_bytes,
    )
    app = create_app(None, settings)
    brake = Event()

    def check() -> None:
        if brake.is_set():
            raise Closing(ASK_LATER)

    with (
        Listening(app, early.hand_over(), console.say) as listening,
        loading.open(console, Request(sampling=sampling), check) as decoder,
    ):
        if decoder.tokenizer is None:
            rule = "a server needs the model's tokenizer"
            raise UserError(f"{rule}: put its tokenizer.json beside it")
        console.open(loading.names, decoder, decoder.tree_choice(sampling))
        console.say(f"a request that does not say how to draw gets {sampling_words(sampling)}")
        with Engine(decoder, max_waiting=server.queue) as engine:
            app.state.engine = engine
            console.say(serving_lines(settings.model_id, listening.address))
            _wait(listening, engine, console, server.grace, brake)


def serving_lines(name: str, address: str) -> str:
    """Return what a user opens, what a program is given, and how the server ends."""
    lines = [f"serving {name}, Ctrl-C ends it"]
    return "\n".join([*lines, f"  chat page  {address}/", f"  API        {address}/v1"])


def _wait(
    server: Listening, engine: Engine, console: Console, grace_s: float, brake: Event
) -> None:
    """Wait until a signal ends it; a pass that outlasts the grace ends at its next layer."""
    try:
        server.wait()
    # of SIGINT, SIGTERM and SIGHUP: the way to end a server, and no failure
    except (KeyboardInterrupt, SystemExit):
        figures = engine.figures()
        if figures.num_active:
            texts = plural(figures.num_active, "text")
            console.say(f"ending: {texts} under way, at most {grace_s:g} s more")
        clock = Timer(grace_s, brake.set)
        clock.start()
        try:
            engine.close(grace_s)
        # again: a user who asks twice has no patience for a pass
        except (KeyboardInterrupt, SystemExit):
            brake.set()
        finally:
            clock.cancel()
