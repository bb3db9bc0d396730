"""`offload serve`: a model for many callers, over OpenAI's or Anthropic's protocol."""

import re
from importlib.util import find_spec
from pathlib import Path

from offload.checkpoint.files import read_text
from offload.checkpoint.generation_config import served_sampling
from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.loading import Loading
from offload.errors import UserError, installing, require
from offload.options import ModelOptions, OutputOptions, ServerOptions, TalkingModels
from offload.server.listening import EarlyAnswers, bind
from offload.server.settings import ServerSettings, is_loopback
from offload.units import parse_size


@flags.command(
    app,
    epilog="""Examples:

    offload serve -m Llama-3.1-70B-Instruct -d Llama-3.2-1B-Instruct --ram 32GiB

    offload serve --demo    # a packaged toy, when there is no model at hand

    offload serve -m big -d small --port 8000 --queue 16

    offload serve -m big --host 0.0.0.0 --api-key-file keys.txt""",
)
def serve(
    models: TalkingModels, model_options: ModelOptions, server: ServerOptions, output: OutputOptions
) -> None:
    """Answer OpenAI's and Anthropic's protocols until SIGTERM or Ctrl-C."""
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        remedy = installing("offload[serve]")
        raise UserError(f"offload serve needs {' and '.join(missing)}: {remedy}")
    loading = Loading.from_options(models, model_options)
    keys = read_keys(server.api_key_file, server.host)
    max_body_bytes = parse_size(server.max_body, "`max_body`")
    require(all(server.alias or ()), "`alias` must be a name", "''", "leave it out")
    for origin in server.cors or ():
        is_origin = re.fullmatch(r"https?://[a-z0-9.-]+(:\d+)?", origin) is not None
        requirement = "`cors` must be an origin, with no path and no capitals"
        require(is_origin, requirement, f"{origin!r:.80}", "try --cors http://localhost:3000")
    early_answers = EarlyAnswers(bind(server.host, server.port))
    with Console(output, *model_options.budgets) as console, early_answers as early:
        console.say(f"{early.address} answers 503 until the model is loaded")
        with libraries(console):
            from offload.cli.serving import serve_model

            made = loading.made(console)
            settings = ServerSettings(
                model_id=Path(made.options.model).absolute().name,
                sampling=served_sampling(made.config_place),
                aliases=tuple(server.alias or ()),
                host=server.host,
                origins=tuple(server.cors or ()),
                api_keys=keys,
                max_body_bytes=max_body_bytes,
            )
            serve_model(
                made,
                console,
                settings,
                early,
                num_waiting=server.queue,
                grace_s=server.grace,
            )


def read_keys(file: Path | None, host: str) -> tuple[str, ...]:
    """Return the keys in a file, one a line. Raises `UserError` for none if others can connect."""
    if file is None:
        if not is_loopback(host):
            requirement = f"`host` {host} can be reached by others"
            raise UserError(f"{requirement}: give --api-key-file, or leave --host out")
        return ()
    lines = read_text(file, "the keys").split("\n")
    keys = tuple(line.strip() for line in lines if line.strip())
    # otherwise a comment, or a line of another file, would be a key
    if not keys or not all(re.fullmatch(r"[!-\"$-~][!-~]*", key) for key in keys):
        requirement = "must hold a key of printable ASCII a line, without spaces and comments"
        raise UserError(f"{file} {requirement}: try head -c 24 /dev/urandom | base64")
    return keys
