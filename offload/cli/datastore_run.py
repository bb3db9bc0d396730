"""Building a datastore as a person sees it: a tokenizer, a corpus, how far it is, and what came of
it.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offload.cli.console import Console
from offload.cli.live_line import plural
from offload.datastore.build import Coder, Corpus, Messages, OnPhase, joined
from offload.datastore.index import TokenWidth
from offload.datastore.store import Store
from offload.engine.text import Tokenizer, load_tokenizer, render_chat
from offload.errors import UserError, reason
from offload.machine import peak_rss_bytes
from offload.units import format_bytes

Write = Callable[[Iterator[str], Coder, int, OnPhase], Store]


def store_line(store: Store, *, is_decimal: bool = False) -> str:
    """Return how large a store is."""
    amounts = f"{plural(store.num_tokens, 'token')} of {plural(store.num_documents, 'document')}"
    size = format_bytes(store.num_bytes, is_decimal=is_decimal)
    return f"{store.path}: {amounts} in {plural(len(store.chunks), 'chunk')}, {size}"


def info_lines(store: Store) -> str:
    """Return what a store is for, and what it takes to build one like it."""
    width = TokenWidth.of(store.vocab_size).num_bytes
    ids = f"{store.vocab_size:,} ids in {width} bytes each, sha256 {store.tokenizer_sha256[:12]}"
    sorting = f"sorting its largest chunk took {format_bytes(store.sorting_bytes)} beside the process's own memory"
    return "\n".join([store_line(store), f"tokenizer of {store.tokenizer}: {ids}", sorting])


def write_store(
    write: Write, corpus: Corpus, model: str, place: Path, ram_bytes: int, console: Console
) -> tuple[dict[str, Any], str]:
    """Write what a corpus holds by `write`, one of the two functions of `offload.datastore.build`.

    The tokenizer of `model` lies in `place`. Returns what `--json` prints, and lines for a person.
    """
    console.wait(f"reading the tokenizer of {model}")
    tokenizer = load_tokenizer(place)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer: name the model that the store is for")
    encode = _encoder(tokenizer)
    started_s = time.monotonic()
    num_new_tokens = 0
    since_bytes = 0  # when something else was last under way: what is left is foretold well

    def counted(texts: list[str]) -> Iterator[list[int]]:
        nonlocal num_new_tokens
        for ids in encode(texts):
            num_new_tokens += len(ids)
            yield ids

    def render(messages: Messages) -> str:
        if not tokenizer.chat_template:
            return joined(messages)
        try:
            return render_chat(tokenizer, messages)
        except Exception as error:  # of any kind: a template is a stranger's program
            raise UserError(f"does not fit into the chat template ({reason(error)})") from None

    def documents() -> Iterator[str]:
        for text in corpus.documents(render):
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
    told = {
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
    return told, _written_lines(store, corpus, told, is_decimal=console.is_decimal)


def _written_lines(store: Store, corpus: Corpus, told: dict[str, Any], *, is_decimal: bool) -> str:
    """Return what a person wants to know, with what was passed over first."""
    peak = format_bytes(told["peak_rss_bytes"], is_decimal=is_decimal)
    budget = format_bytes(told["ram_bytes"], is_decimal=is_decimal)
    passed = [f"{corpus.num_hidden} hidden"] if corpus.num_hidden else []
    passed += [f"{corpus.num_binary} binary"] if corpus.num_binary else []
    notes = [f"skipped: {line}" for line in corpus.bad]
    notes += [f"passed over in folders: {', '.join(passed)}"] if passed else []
    speed = f"{plural(told['num_new_tokens'], 'new token')}, {told['tokens_per_s']:,.0f} a second"
    closing = f"{speed}; peak memory {peak} of {budget} allowed"
    return "\n".join([*notes, store_line(store, is_decimal=is_decimal), closing])


def _encoder(tokenizer: Tokenizer) -> Callable[[list[str]], Iterator[list[int]]]:
    """Return what encodes all texts of a batch at once, on all cores where the tokenizer can."""
    how = {"add_special_tokens": False}
    if not tokenizer.is_fast:
        return lambda texts: iter(tokenizer(texts, verbose=False, **how)["input_ids"])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return lambda texts: (found.ids for found in backend.encode_batch_fast(texts, **how))
