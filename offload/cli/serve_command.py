"""`offload serve`: a model for many callers, over OpenAI's protocol."""

from importlib.util import find_spec

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.errors import UserError
from offload.options import ModelChoice, ModelOptions, OutputOptions, ServerOptions


@flags.command(
    app,
    short_help="Serve a model larger than memory over OpenAI's protocol.",
    epilog="""Examples:

    offload serve -m Llama-3.1-70B-Instruct -d Llama-3.2-1B-Instruct --ram 32GiB

    offload serve -m big -d small --port 8000 --queue 16

    offload serve -m big --host 0.0.0.0 --api-key-file keys.txt    # others are let in with a key alone""",
)
def serve(
    names: ModelChoice, load: ModelOptions, server: ServerOptions, output: OutputOptions
) -> None:
    """Answer OpenAI's protocol with a model larger than memory, until SIGTERM or Ctrl-C."""
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise UserError(
            f"offload serve needs {' and '.join(missing)}: pip install 'offload[serve]'"
        )
    from offload.planning.options import LoadOptions
    from offload.planning.precheck import check_run

    model, draft = names.given
    options = LoadOptions.of(load)
    check_run(model, draft, options)
    shown = Console(is_quiet=output.quiet, is_verbose=output.verbose, sizes_like=load.ram)
    with shown as console, libraries(console):
        from offload.cli.serving import serve_model

        serve_model(model, draft, options, console, server)
