"""`offload bench`: one command per question, each a `main` in a file that is imported only when it is called.

Invariant: this file imports nothing heavy, since `offload --help` passes through it. `python -m offload.bench.suite` is
the same from a checkout where nothing is installed.
"""

import runpy
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from offload.errors import UserError

EXIT_TERMINATED = 128 + signal.SIGTERM
COMMANDS = {  # name: file, what it answers
    "passes": ("latency.passes", "seconds of a forward of target and draft against its rows, beside link and memory"),
    "decode": ("latency.decode", "tokens per second and latencies: prompts x temperatures x trees x rules"),
    "gate": ("latency.exact", "whether every tree writes the ids of transformers, every layer streamed"),
    "main-job": ("latency.main_job", "the promises of the main job: streaming, memory, speed, prompt and start"),
    "prediction": ("latency.prediction", "what the plan promises beside what the paper measured on an L40"),
    "device": ("gpu.promised", "each promise of the device path: gate, passes, trees, memory, accelerate"),
    "kernels": ("gpu.kernels", "each kernel against what runs without it, on a CUDA device"),
    "peers": ("peers.peers", "other programs on the same files and prompts in the same memory"),
    "choice": ("studies.choice", "whether the tree of --tree auto is the best one, really streamed"),
    "compare": ("harness.compare", "two stored results: what has become slower beyond noise"),
}


class LazyCommands(TyperGroup):
    """A group that knows its commands by name and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in COMMANDS.items()])


def load_command(name: str) -> Any:
    """The parser of one command. Raises `UserError` where a library for measuring is missing."""
    try:
        main = import_module(f"offload.bench.{COMMANDS[name][0]}").main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "offload":
            raise
        raise UserError(f"bench {name} needs {error.name.split('.')[0]}: pip install 'offload[bench]'") from None
    parser = typer.Typer(rich_markup_mode=None, add_completion=False)
    parser.command(epilog=getattr(main, "epilog", None))(main)
    return typer.main.get_command(parser)


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
    sys.argv = ["offload", "bench", *sys.argv[1:]]
    runpy.run_module("offload", run_name="__main__")
