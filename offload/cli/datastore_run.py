"""Building a datastore as a person sees it: a tokenizer, a corpus, how far it is, and what came of
it.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offload.cli.console import Console
from offload.cli.progress import plural
from offload.datastore.build import Coder, Corpus, Messages, OnPhase, joined
from offload.datastore.index import TokenWidth
from offload.datastore.store import Store
from offload.engine.text import Tokenizer, load_tokenizer, render_chat
from offload.errors import UserError, reason
from offload.machine import peak_rss_bytes
from offload.units import format_bytes

Write = Callable[[Iterator[str], Coder, int, OnPhase], Store]


class StoreResult(NamedTuple):
    """A store that was just written to, and what it took."""

    store: Store
    corpus: Corpus
    num_new_tokens: int
    elapsed_s: float
    ram_bytes: int
    peak_rss_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """From the first file's first byte to the last one's safe place on disk."""
        return self.num_new_tokens / self.elapsed_s

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        own = {name: getattr(self, name) for name in (*self._fields[2:], "tokens_per_s")}
        seen = {
            name: getattr(self.corpus, name)
            for name in ("num_files", "num_binary", "num_hidden", "bad")
        }
        return {**self.store.as_dict(), **own, **seen}

    def lines(self, *, is_decimal: bool) -> str:
        """Return what a person wants to know, with what was passed over first."""
        peak, budget = (
            format_bytes(size, is_decimal=is_decimal)
            for size in (self.peak_rss_bytes, self.ram_bytes)
        )
        passed = [f"{self.corpus.num_hidden} hidden"] if self.corpus.num_hidden else []
        passed += [f"{self.corpus.num_binary} binary"] if self.corpus.num_binary else []
        notes = [f"skipped: {line}" for line in self.corpus.bad]
        notes += [f"passed over in folders: {', '.join(passed)}"] if passed else []
        speed = f"{plural(self.num_new_tokens, 'new token')}, {self.tokens_per_s:,.0f} a second"
        closing = f"{speed}; peak memory {peak} of {budget} allowed"
        return "\n".join([*notes, store_line(self.store, is_decimal=is_decimal), closing])


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
) -> StoreResult:
    """Write what a corpus holds by `write`, one of the two functions of `offload.datastore.build`.

    The tokenizer of `model` lies in `place`.
    """
    console.wait(f"reading the tokenizer of {model}")
    coder, render = load_coder(model, place)
    progress = _Progress(corpus, console)
    started_s = time.monotonic()
    num_new_tokens = 0

    def counted(texts: list[str]) -> Iterator[Any]:
        nonlocal num_new_tokens
        for ids in coder.encode(texts):
            num_new_tokens += len(ids)
            yield ids

    documents = progress.documents(corpus.documents(render))
    store = write(documents, coder._replace(encode=counted), ram_bytes, progress.wait)
    console.clear()
    return StoreResult(
        store, corpus, num_new_tokens, time.monotonic() - started_s, ram_bytes, peak_rss_bytes()
    )


class _Progress:
    """How much of the corpus is encoded since something else was last under way.

    Counted like that, what is left is foretold well.
    """

    def __init__(self, corpus: Corpus, console: Console) -> None:
        self._corpus = corpus
        self._console = console
        self._since_bytes = 0

    def documents(self, texts: Iterator[str]) -> Iterator[str]:
        for text in texts:
            done_bytes, total_bytes = (
                n - self._since_bytes for n in (self._corpus.done_bytes, self._corpus.num_bytes)
            )
            self._console.bytes_landed(done_bytes, total_bytes, "encoding")
            yield text

    def wait(self, label: str) -> None:
        self._since_bytes = self._corpus.done_bytes
        self._console.wait(label)


def load_coder(model: str, folder: Path) -> tuple[Coder, Callable[[Messages], str]]:
    """Return a model's tokenizer, and what makes one text of a conversation.

    The tokenizer lies in a folder or GGUF file. Raises `UserError`.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer: name the model that the store is for")
    is_folder = Path(model).expanduser().exists()
    coder = Coder(
        str(folder.absolute()) if is_folder else model, tokenizer.get_vocab(), _encoder(tokenizer)
    )
    return coder, (
        lambda messages: _in_template(tokenizer, messages)
    ) if tokenizer.chat_template else joined


def _encoder(tokenizer: Tokenizer) -> Callable[[list[str]], Iterator[list[int]]]:
    """Return what encodes all texts of a batch at once, on all cores where the tokenizer can."""
    if not tokenizer.is_fast:
        return lambda texts: iter(
            tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        )
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return lambda texts: (
        found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)
    )


def _in_template(tokenizer: Tokenizer, messages: Messages) -> str:
    try:
        return render_chat(tokenizer, messages)
    except Exception as error:  # of any kind: a template is a stranger's program
        raise UserError(f"does not fit into the chat template ({reason(error)})") from None
