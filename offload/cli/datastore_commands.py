"""The commands that make and look after datastores, corpora that drafts are looked up in."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.terminal import print_result
from offload.errors import UserError, reason
from offload.machine import available_ram_bytes, peak_rss_bytes
from offload.options import OutputOptions
from offload.units import format_bytes, parse_size, plural

if TYPE_CHECKING:
    from offload.datastore.build import Coder, OnPhase
    from offload.datastore.corpus import Corpus, Messages
    from offload.datastore.store import Store
    from offload.engine.conversation import Tokenizer

    Write = Callable[[Iterator[str], Coder, int, OnPhase], Store]

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
Files = Annotated[
    list[Path], typer.Argument(metavar="FILES|DIR|JSONL...", parser=flags.path, help=_FILES_HELP)
]
Folder = Annotated[
    Path, typer.Argument(metavar="STORE", parser=flags.path, help="folder of a datastore")
]
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
    out: Annotated[Path, typer.Option(metavar="STORE", parser=flags.path, help="folder to make")],
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
    store: Folder,
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

    read = read_store(store)
    write = partial(building.append, read.path)
    _write(write, tokenizer or read.tokenizer, files, ram, skip_bad, output)


@flags.command(
    datastore,
    short_help="What is in a store?",
    epilog="""Examples:

    offload datastore info python.store

    offload datastore info python.store --json""",
)
def info(store: Folder, output: OutputOptions) -> None:
    """What is in a store, which tokenizer it is for, and how much memory sorting its largest chunk took."""
    from offload.datastore.store import read_store

    read = read_store(store)
    print_result(_info_lines(read), read.as_dict(), as_json=output.as_json)


@flags.command(
    datastore,
    short_help="Is a store whole?",
    epilog="""Examples:

    offload datastore verify python.store

    offload datastore verify python.store --json""",
)
def verify(store: Folder, output: OutputOptions) -> None:
    """Read every byte of a store: sizes, checksums, tokens, and the order of every position."""
    from offload.datastore.store import read_store
    from offload.datastore.store import verify as check

    read = read_store(store)
    with Console(output) as console:
        check(read, partial(console.bytes_landed, label="reading"))
    figures = {**read.as_dict(), "is_sound": True}
    print_result(f"{_store_line(read)}: sound", figures, as_json=output.as_json)


def _store_line(store: "Store", *, is_decimal: bool = False) -> str:
    """Return the size of a store in words."""
    amounts = f"{plural(store.num_tokens, 'token')} of {plural(store.num_documents, 'document')}"
    size = format_bytes(store.num_bytes, is_decimal=is_decimal)
    return f"{store.path}: {amounts} in {plural(len(store.chunks), 'chunk')}, {size}"


def _info_lines(store: "Store") -> str:
    """Return lines on a store's size and tokenizer, and on the memory that building it took."""
    ids = f"{store.vocab_size:,} ids in {store.token_bytes} bytes each, sha256 {store.tokenizer_sha256[:12]}"
    sorting = f"sorting its largest chunk took {format_bytes(store.sorting_bytes)} beside the process's own memory"
    return "\n".join([_store_line(store), f"tokenizer of {store.tokenizer}: {ids}", sorting])


def _write(
    write: "Write",
    model: str,
    files: list[Path],
    ram: str | None,
    skip_bad: bool,
    output: OutputOptions,
) -> None:
    """Make or extend a store with `write`, and print its figures."""
    from offload.datastore.corpus import Corpus
    from offload.engine.precheck import tokenizer_place

    with Console(output, ram) as console:
        ram_bytes = min(_RAM_BYTES, available_ram_bytes() * 3 // 4)
        if ram:
            ram_bytes = parse_size(ram, "--ram")
        corpus = Corpus(files, skips_bad=skip_bad, or_else=", or pass over it with --skip-bad")
        console.wait(f"looking for the tokenizer of {model}")
        place = tokenizer_place(model)
        with libraries(console):
            figures = _write_store(write, corpus, model, place, ram_bytes, console)
    if output.as_json:
        print(json.dumps(figures))


def _write_store(
    write: "Write", corpus: "Corpus", model: str, place: Path, ram_bytes: int, console: Console
) -> dict[str, Any]:
    """Write a corpus by `write`, one of the two functions of `offload.datastore.build`, and say so.

    The tokenizer of `model` lies in `place`. Returns what `--json` prints.
    """
    from offload.datastore.build import Coder
    from offload.engine.tokenizer import load_tokenizer

    console.wait(f"reading the tokenizer of {model}")
    tokenizer = load_tokenizer(place)
    assert tokenizer is not None, "its files are there"
    encode = _encoder(tokenizer)
    started_s = time.monotonic()
    num_new_tokens = 0
    since_bytes = 0  # when something else was last under way: what is left is foretold well

    def counted(texts: list[str]) -> Iterator[list[int]]:
        nonlocal num_new_tokens
        for ids in encode(texts):
            num_new_tokens += len(ids)
            yield ids

    def documents() -> Iterator[str]:
        for text in corpus.documents(partial(_rendered, tokenizer)):
            done_bytes = corpus.done_bytes - since_bytes
            console.bytes_landed(done_bytes, corpus.num_bytes - since_bytes, "encoding")
            yield text

    def wait(label: str) -> None:
        nonlocal since_bytes
        since_bytes = corpus.done_bytes
        console.wait(label)

    name = str(place.absolute()) if Path(model).expanduser().exists() else model
    coder = Coder(name, tokenizer.get_vocab(), counted)
    store = write(documents(), coder, ram_bytes, wait)
    console.clear()
    elapsed_s = time.monotonic() - started_s
    figures = {
        **store.as_dict(),
        "num_new_tokens": num_new_tokens,
        "elapsed_s": elapsed_s,
        "ram_bytes": ram_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
        # from the first file's first byte to the last one's safe place on disk
        "tokens_per_s": num_new_tokens / elapsed_s,
        "num_files": corpus.num_files,
        "num_binary": corpus.num_binary,
        "num_hidden": corpus.num_hidden,
        "bad": corpus.bad,
    }
    console.say(_written_lines(store, corpus, figures, is_decimal=console.is_decimal))
    return figures


def _rendered(tokenizer: "Tokenizer", messages: "Messages") -> str:
    from offload.datastore.corpus import joined
    from offload.engine.conversation import render_chat

    if not tokenizer.chat_template:
        return joined(messages)
    try:
        return render_chat(tokenizer, messages)
    except Exception as error:  # of any kind: a template is a stranger's program
        raise UserError(f"does not fit into the chat template ({reason(error)})") from None


def _written_lines(
    store: "Store", corpus: "Corpus", figures: dict[str, Any], *, is_decimal: bool
) -> str:
    """Return a summary for a person, which names first all that was passed over."""
    peak = format_bytes(figures["peak_rss_bytes"], is_decimal=is_decimal)
    budget = format_bytes(figures["ram_bytes"], is_decimal=is_decimal)
    passed = [f"{corpus.num_hidden} hidden"] if corpus.num_hidden else []
    passed += [f"{corpus.num_binary} binary"] if corpus.num_binary else []
    notes = [f"skipped: {line}" for line in corpus.bad]
    notes += [f"passed over in folders: {', '.join(passed)}"] if passed else []
    speed = (
        f"{plural(figures['num_new_tokens'], 'new token')}, {figures['tokens_per_s']:,.0f} a second"
    )
    closing = f"{speed}; peak memory {peak} of {budget} allowed"
    return "\n".join([*notes, _store_line(store, is_decimal=is_decimal), closing])


def _encoder(tokenizer: "Tokenizer") -> Callable[[list[str]], Iterator[list[int]]]:
    """Return an encoder of all texts of a batch at once, on all cores where the tokenizer can."""
    settings = {"add_special_tokens": False}
    if not tokenizer.is_fast:
        return lambda texts: iter(tokenizer(texts, verbose=False, **settings)["input_ids"])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return lambda texts: (encoding.ids for encoding in backend.encode_batch_fast(texts, **settings))
