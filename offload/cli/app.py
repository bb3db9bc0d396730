"""The program and its groups of commands; each command registers itself from a file of its own.

Invariant: that file is imported where its command is called, or all are asked for: `--help` of the
program has the names and what they do from here.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from offload import __version__
from offload.errors import UserError

# name: its file, what --help says of it; in the order of --help
COMMANDS = {
    "generate": ("generate_command", "Write text with a model larger than memory."),
    "chat": ("chat_command", "Chat with a model larger than memory."),
    "plan": ("plan_command", "Will it fit, and how fast will it be?"),
    "tune": ("tune_command", "Measure a pair of models on this machine."),
    "list": ("list_command", "Which models are here?"),
    "demo": ("demo_command", "See it work on a packaged model, here and now."),
    "pack": ("pack_commands", "Make a bf16 model a quarter smaller, without loss."),
    "unpack": ("pack_commands", "Give back the model that a packed one was made from."),
    "verify": ("verify_command", "Is a model whole?"),
    "serve": ("serve_command", "Serve a model by OpenAI's and Anthropic's protocols."),
    "launch": ("launch", "Run a command on many ranks."),
    # `offload.commands` knows it
    "bench": ("", "Measure speeds, each beside its ceiling."),
    "datastore": ("datastore_commands", "Make a store of text, in which guesses are looked up."),
}


# what other programs call it: what to do here
_ELSEWHERE = {
    "run": "offload chat -m MODEL",
    "pull": "generate, chat and serve download what -m ORG/NAME names",
    "download": "generate, chat and serve download what -m ORG/NAME names",
    "ls": "offload list",
    "models": "offload list",
    "help": "offload --help",
    "version": "offload --version",
}


class _Program(TyperGroup):
    """The group of all commands, which knows them by name and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            import_module(f"offload.cli.{COMMANDS[cmd_name][0]}")
            self.commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if meant := _ELSEWHERE.get(args[0]):
            raise UserError(f"No such command '{args[0]}': {meant}")
        if args[0] not in COMMANDS:
            self.commands = every_command()  # one of them may be meant
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


app = typer.Typer(
    cls=_Program,
    help="Decode with models that do not fit into memory: one pass over the weights, many tokens.",
    epilog="Start here: offload demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def every_command() -> dict[str, Any]:
    """Return the functions that the option parser runs, by name."""
    for file in dict.fromkeys(file for file, _ in COMMANDS.values() if file):
        import_module(f"offload.cli.{file}")
    group: Any = typer.main.get_command(app)
    return {name: group.commands[name] for name in COMMANDS if name in group.commands}


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"offload {__version__}")
        raise typer.Exit


_VERSION = typer.Option(
    "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
)


@app.callback()
def _program(version: Annotated[bool, _VERSION] = False) -> None:
    pass
