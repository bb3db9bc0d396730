"""`offload bench`: one command per question, each a `main` in a file imported when it is called.

Invariant: this file imports nothing heavy, since `offload --help` passes through it. `python -m
offload.bench.suite` is the same from a checkout where nothing is installed.
"""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from offload.errors import UserError, did_you_mean

EXIT_TERMINATED = 128 + signal.SIGTERM
# name: what it measures
MEASURES = {
    "decode": "tokens per second and latencies, for prompts, temperatures, trees and rules",
    "prompts": "time to the first token of a prompt whose beginning was read before",
    "many": "tokens per second over many texts, written at a time and one after another",
    "peers": "other programs on the same files and prompts in the same memory",
    "passes": "seconds that a forward of target and draft takes by its rows, beside link and memory",
    "memory": "peak memory of fresh processes beside --ram, post by post, and growth over texts",
    "lookup": "guesses without a model: copies, a datastore and counts, alone and beside a draft",
    "drafts": "a token with each way to draft, and which of them --draft auto takes",
    "copy": "a copy in 4 bits as a draft in tiers and as half of the file; which tree is chosen; packing",
    "quantised": "a pass and a token with the same target in bf16, fp8 and int4",
    "experts": "tokens per second with experts on demand beside whole layers, by room and tree",
    "beside": "this checkout beside another one, or with other flags: whole processes, in turns",
    "compare": "two stored results: what has become slower beyond noise",
}
STUDIES = {
    "gate": "whether every tree writes the ids of transformers, every layer streamed",
    "soak": "whether anything drifts in hours of a server, its clients, what they leave, and restarts",
    "device": "each promise of the device path: gate, experts, passes, trees, memory, accelerate",
    "kernels": "each kernel against what runs without it, on a CUDA device",
    "moe-pair": "trains the mixture of experts and its draft that other commands measure with",
    "mtp-pair": "tokens a pass of the packaged MTP layer beside the small draft, and with lookup",
    "block-pair": "tokens a pass of the packaged block drafter, ranked with and without noise",
}
COMMANDS = {**MEASURES, **STUDIES}
# files of commands that do not lie in `latency` under their own names
_HOMES = {
    "peers": "peers.peers",
    "compare": "harness.record",
    "gate": "latency.exact",
    "soak": "soak.soak",
    "device": "gpu.promised",
    "kernels": "gpu.kernels",
    "moe-pair": "pairs.moe_pair",
    "mtp-pair": "pairs.mtp_pair",
    "block-pair": "pairs.block_pair",
}


class LazyCommands(TyperGroup):
    """A group that knows its commands by name and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            meant = did_you_mean(args[0], COMMANDS)
            raise UserError(f"No such command {args[0]!r:.80}{meant} (see offload bench --help)")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from typer.core import CompletionItem

        items = COMMANDS.items()
        return [
            CompletionItem(name, help=help_text)
            for name, help_text in items
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        studies = "Studies, by which this program is developed"
        for title, commands in (("Commands", MEASURES), (studies, STUDIES)):
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


def _home(name: str) -> str:
    return f"offload.bench.{_HOMES.get(name, 'latency.' + name.replace('-', '_'))}"


def load_command(name: str) -> Any:
    """Return the parser of one command. Raises `UserError` where a library is missing."""
    try:
        with _announced(name):
            main = import_module(_home(name)).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "offload":
            raise
        library = error.name.split(".")[0]
        raise UserError(f"bench {name} needs {library}: pip install 'offload[bench]'") from None
    parser = typer.Typer(rich_markup_mode=None, add_completion=False)
    parser.command(epilog=getattr(main, "epilog", None))(main)
    return typer.main.get_command(parser)


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Tell a terminal what is under way, since the imports of a bench take seconds."""
    from tqdm import tqdm

    can_redraw = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    is_off = not can_redraw or "_OFFLOAD_COMPLETE" in os.environ
    line = f"importing what bench {name} needs"
    with tqdm(desc=line, bar_format="{desc}{bar}", leave=False, dynamic_ncols=True, disable=is_off):
        yield


app = typer.Typer(
    cls=LazyCommands,
    help="Measure speeds. Each stands beside its ceiling, and none is told for a wrong token.",
    epilog="Start here: offload bench decode --quick",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure speeds. Each stands beside its ceiling, and none is told for a wrong token."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    before = signal.signal(signal.SIGTERM, _leave)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _leave(*_: object) -> NoReturn:
    """Exit by an exception, so that no child, memory group or half-written file is left."""
    sys.exit(EXIT_TERMINATED)


if __name__ == "__main__":
    sys.argv = ["offload", "bench", *sys.argv[1:]]
    runpy.run_module("offload", run_name="__main__")
