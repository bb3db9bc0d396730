"""The program and its groups of commands; each command registers itself from a file of its own."""

from typing import Annotated

import typer

from offload import __version__

app = typer.Typer(
    help="Decode with models that do not fit into memory: one sweep over the weights, many tokens.",
    epilog="Start here: offload demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"offload {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass
