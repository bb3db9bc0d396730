"""The commands that make and look after datastores, corpora that drafts are looked up in."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.live_line import fitted
from offload.machine import available_ram_bytes
from offload.options import OutputOptions
from offload.units import parse_size

if TYPE_CHECKING:
    from offload.cli.datastore_run import Write

_RAM_BYTES = 2 << 30

datastore = typer.Typer(
    help="Make a store of text or code, in which --datastore looks up guesses; see docs/datastore.md.",
    epilog="Start here: offload datastore build --help",
    rich_markup_mode=None,
    invoke_without_command=True,
)
app.add_typer(datastore, name="datastore")

_MODEL_HELP = "folder or hub id of the model that the store is for"
_OTHER_HELP = "folder or hub id of the tokenizer; default: where it lay"
_FILES_HELP = "UTF-8 text, folders of it, or .jsonl of samples"
_RAM_HELP = "memory to build with; default: 2GiB, or 3/4 of what is free if that is less"
_SKIP_HELP = "pass over bad files and lines, and name them"
Files = Annotated[list[Path], typer.Argument(metavar="FILES|DIR|JSONL...", help=_FILES_HELP)]
Store = Annotated[Path, typer.Argument(metavar="STORE", help="folder of a datastore")]
Ram = Annotated[str | None, typer.Option(metavar="SIZE", help=_RAM_HELP)]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help=_SKIP_HELP)]


@datastore.callback()
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@flags.command(
    datastore,
    short_help="Make a store.",
    epilog="""Examples:

    offload datastore build --tokenizer big --out code.store src/

    offload datastore build --tokenizer big --out s.store a.jsonl notes/""",
)
def build(
    files: Files,
    tokenizer: Annotated[str, typer.Option(metavar="MODEL", help=_MODEL_HELP)],
    out: Annotated[Path, typer.Option(metavar="STORE", help="folder to make")],
    output: OutputOptions,
    ram: Ram = None,
    skip_bad: SkipBad = False,
) -> None:
    """Make a store of text, code or chats. A line of a .jsonl file has text, messages,
    conversations or a prompt.
    """
    from offload.datastore import build as building

    building.require_new(out.expanduser())
    write = partial(building.build, out.expanduser())
    _write(write, tokenizer, files, ram, skip_bad, output)


@flags.command(
    datastore,
    short_help="Add to a store.",
    epilog="""Examples:

    offload datastore append python.store site-packages/numpy

    offload datastore append chats.store today.jsonl --skip-bad --json""",
)
def append(
    store: Store,
    files: Files,
    output: OutputOptions,
    tokenizer: Annotated[str | None, typer.Option(metavar="MODEL", help=_OTHER_HELP)] = None,
    ram: Ram = None,
    skip_bad: SkipBad = False,
) -> None:
    """Add text to a store, in chunks of its own. A program that has the store open goes on with
    what it has opened.
    """
    from offload.datastore import build as building
    from offload.datastore.store import read_store

    found = read_store(store)
    write = partial(building.append, found.path)
    _write(write, tokenizer or found.tokenizer, files, ram, skip_bad, output)


@flags.command(
    datastore,
    short_help="What is in a store?",
    epilog="""Examples:

    offload datastore info python.store

    offload datastore info python.store --json""",
)
def info(store: Store, output: OutputOptions) -> None:
    """What is in a store, which tokenizer it is for, and how much memory sorting its largest chunk took."""
    from offload.cli.datastore_run import info_lines
    from offload.datastore.store import read_store

    found = read_store(store)
    print(json.dumps(found.as_dict()) if output.as_json else fitted(info_lines(found), sys.stdout))


@flags.command(
    datastore,
    short_help="Is a store whole?",
    epilog="""Examples:

    offload datastore verify python.store

    offload datastore verify python.store --json""",
)
def verify(store: Store, output: OutputOptions) -> None:
    """Read every byte of a store: sizes, checksums, tokens, and the order of every position."""
    from offload.cli.datastore_run import store_line
    from offload.datastore.store import read_store
    from offload.datastore.store import verify as check

    found = read_store(store)
    with Console(output) as console:
        check(found, partial(console.bytes_landed, label="reading"))
    sound = json.dumps({**found.as_dict(), "is_sound": True})
    print(sound if output.as_json else f"{store_line(found)}: sound")


def _write(
    write: "Write",
    model: str,
    files: list[Path],
    ram: str | None,
    skip_bad: bool,
    output: OutputOptions,
) -> None:
    from offload.datastore.build import Corpus
    from offload.engine.precheck import tokenizer_place

    with Console(output, ram) as console:
        ram_bytes = min(_RAM_BYTES, available_ram_bytes() * 3 // 4)
        if ram:
            ram_bytes = parse_size(ram, "--ram")
        corpus = Corpus(files, skips_bad=skip_bad, or_else=", or pass over it with --skip-bad")
        console.wait(f"looking for the tokenizer of {model}")
        place = tokenizer_place(model)
        with libraries(console):
            from offload.cli.datastore_run import write_store

            told, lines = write_store(write, corpus, model, place, ram_bytes, console)
        console.say(lines)
    if output.as_json:
        print(json.dumps(told))
