"""`offload serve`: a model for many callers, over OpenAI's protocol."""

from functools import partial
from importlib.util import find_spec

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.errors import UserError
from offload.options import ModelOptions, OutputOptions, ServerOptions, TalkingModels


@flags.command(
    app,
    short_help="Serve a model larger than memory over OpenAI's protocol.",
    epilog="""Examples:

    offload serve -m Llama-3.1-70B-Instruct -d Llama-3.2-1B-Instruct --ram 32GiB

    offload serve --demo    # a packaged toy, when there is no model at hand

    offload serve -m big -d small --port 8000 --queue 16

    offload serve -m big --host 0.0.0.0 --api-key-file keys.txt    # others are let in with a key alone""",
)
def serve(
    names: TalkingModels, load: ModelOptions, server: ServerOptions, output: OutputOptions
) -> None:
    """Answer OpenAI's protocol with a model larger than memory, until SIGTERM or Ctrl-C."""
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise UserError(
            f"offload serve needs {' and '.join(missing)}: pip install 'offload[serve]'"
        )
    from offload.planning.options import LoadOptions, check_models

    model, draft = names.given
    options = LoadOptions.of(load)
    check_models(model, draft, options)
    shown = Console(is_quiet=output.quiet, is_verbose=output.verbose, sizes_like=load.ram)
    with shown as console, libraries(console):
        from offload.cli.serving import serve_model

        if names.demo:
            from offload.cli.demo import packaged_chat

            landed = partial(console.bytes_landed, label="making the target")
            model, options = packaged_chat(options, landed)
        serve_model(model, draft, options, console, server)
