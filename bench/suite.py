"""`offload bench`: one command per question, each in a file of its own that is imported only when it is called.

A command's file has `app`, a typer application, or `main`, a function that typer understands. Files that are not there
are not offered. Invariant: this file imports nothing heavy, since `offload --help` passes through it.

    offload bench decode --quick
    python -m offload.bench.decode --quick          the same
"""

import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from offload.errors import UserError

EXIT_TERMINATED = 128 + signal.SIGTERM
COMMANDS = {  # name: file, what it answers
    "link": ("link", "how fast bytes arrive: threads, block sizes, the stream without computing"),
    "sweep": ("sweep", "seconds of a sweep against the size of its tree, beside the link"),
    "draft": ("draft", "seconds of drafting, and how deep its guesses hold"),
    "decode": ("decode", "tokens per second and latencies: prompts x temperatures x trees x rules"),
    "peers": ("peers", "other programs on the same files and prompts in the same memory"),
    "kernels": ("kernels", "each kernel against what runs without it, on a CUDA device"),
    "grown": ("grown_trees", "grown trees against fixed ones of the same size"),
    "device": ("device", "what a CUDA device gives: copies, sweeps, drafts, trees, memory, accelerate"),
    "prediction": ("prediction", "what the plan promises beside what was measured: this machine, and the paper's L40"),
    "tree": ("studies", "Sequoia's studies of trees and rules"),
    "main-job": ("main_job", "the promises of the main job: streaming, memory, speed, prompt and start"),
    "tree-choice": ("tree_choice", "the chosen tree against a grid, traces against decoding"),
    "report": ("report", "Markdown and pictures from stored results"),
    "compare": ("compare", "two stored results: what has become slower beyond noise"),
}


class LazyCommands(TyperGroup):
    """A group that knows its commands by name and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (file, _) in COMMANDS.items() if find_spec(f"offload.bench.{file}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def load_command(name: str) -> Any:
    """The parser of one command. Raises `UserError` where a library for measuring is missing."""
    try:
        module = import_module(f"offload.bench.{COMMANDS[name][0]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "offload":
            raise
        raise UserError(f"bench {name} needs {error.name.split('.')[0]}: pip install 'offload[bench]'") from None
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    parser = typer.Typer(rich_markup_mode=None, add_completion=False)
    parser.command()(module.main)
    return typer.main.get_command(parser)


def run_alone(name: str) -> None:
    """`python -m offload.bench.FILE` as `offload bench NAME`: the same flags, the same errors, the same endings."""
    from offload.cli.main import main

    sys.argv = ["offload", "bench", name, *sys.argv[1:]]
    main()


app = typer.Typer(
    cls=LazyCommands,
    help="Measure: every figure beside its ceiling, no speed for a wrong token.",
    epilog="Start here: offload bench decode --quick",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure: every figure beside its ceiling, no speed for a wrong token."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    before = signal.signal(signal.SIGTERM, _leave)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _leave(*_: object) -> NoReturn:
    """As an exception, so that no child, no memory group and no half-written file is left."""
    sys.exit(EXIT_TERMINATED)


if __name__ == "__main__":
    run_alone(sys.argv.pop(1) if len(sys.argv) > 1 else "--help")
