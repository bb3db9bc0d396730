"""Sources of guesses as options name them: the text itself, a datastore, counts of a text file or
of a store.
"""

import os
from pathlib import Path

from offload.datastore.build import Corpus
from offload.datastore.index import SuffixIndex
from offload.datastore.store import open_datastore
from offload.drafting.lookup import Copying, GuessSources, Source
from offload.drafting.retrieval import Ngrams, Retrieval
from offload.engine.text import Tokenizer
from offload.errors import UserError, require
from offload.planning.load_options import LoadOptions
from offload.trees.spec import parse_match_length
from offload.units import format_bytes

# Text that is counted in memory, which no plan has: a tenth of what runtimes take.
MOST_TEXT_BYTES = 1 << 20


def open_sources(
    options: LoadOptions, tokenizer: Tokenizer | None, vocab_size: int, *, has_draft: bool
) -> GuessSources:
    """Return what is asked besides the draft. Raises `UserError` for files that cannot serve."""
    length = parse_match_length(options.lookup_length)
    found = list[Source]()
    if options.looks_up(has_draft=has_draft):
        found.append(Copying(length))
    if options.datastore is not None:
        found.append(
            Retrieval(_open_store("datastore", options.datastore, tokenizer, vocab_size), length)
        )
    if options.ngram is not None:
        is_store = os.path.isdir(os.path.expanduser(options.ngram))
        open_counts = _open_store if is_store else _count_text
        found.append(Ngrams(open_counts("ngram", options.ngram, tokenizer, vocab_size)))
    return GuessSources(found)


def _open_store(
    argument: str, path: str | os.PathLike[str], tokenizer: Tokenizer | None, vocab_size: int
) -> SuffixIndex:
    return open_datastore(path, _known(tokenizer, argument).get_vocab(), vocab_size)


def _count_text(
    argument: str, path: str | os.PathLike[str], tokenizer: Tokenizer | None, vocab_size: int
) -> SuffixIndex:
    encode = _known(tokenizer, argument)
    corpus = Corpus([Path(path)])
    size = corpus.num_bytes
    rule = f"`{argument}` must be text of 1 byte to {format_bytes(MOST_TEXT_BYTES)}"
    remedy = f"name another file than {path}, or make a store of it with offload datastore build"
    require(0 < size <= MOST_TEXT_BYTES, rule, format_bytes(size), remedy)
    texts = (encode(text, add_special_tokens=False)["input_ids"] for text in corpus.documents())
    return SuffixIndex.in_memory(
        ([token for token in text if token < vocab_size] for text in texts), vocab_size
    )


def _known(tokenizer: Tokenizer | None, argument: str) -> Tokenizer:
    if tokenizer is None:
        raise UserError(
            f"`{argument}` is made of text, and this checkpoint has no tokenizer: leave it out"
        )
    return tokenizer
