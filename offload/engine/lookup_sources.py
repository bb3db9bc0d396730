"""Sources of guesses as options name them: the text itself, a datastore, counts of a text file or of a store."""

import os
from pathlib import Path

from offload.config import format_bytes, require
from offload.datastore.corpus import Corpus
from offload.datastore.store import open_datastore
from offload.datastore.suffix_index import SuffixIndex
from offload.drafting.copying import Copying
from offload.drafting.ngram import Ngrams
from offload.drafting.retrieval import Retrieval
from offload.drafting.sources import Source, Sources
from offload.engine.text import Tokenizer
from offload.errors import UserError
from offload.planning.options import LoadOptions
from offload.tree.spec import parse_match_length

MOST_TEXT_BYTES = 8 << 20  # of a file that is counted in memory, for which no plan has room


def open_sources(options: LoadOptions, tokenizer: Tokenizer | None, vocab_size: int, *, has_draft: bool) -> Sources:
    """What is asked besides the draft. Raises `UserError` for files that cannot serve."""
    length, found = parse_match_length(options.lookup_length), list[Source]()
    if options.looks_up(has_draft=has_draft):
        found.append(Copying(length))
    if options.datastore is not None:
        found.append(Retrieval(_open_store("datastore", options.datastore, tokenizer, vocab_size), length))
    if options.ngram is not None:
        is_store = os.path.isdir(os.path.expanduser(options.ngram))
        open_counts = _open_store if is_store else _count_text
        found.append(Ngrams(open_counts("ngram", options.ngram, tokenizer, vocab_size)))
    return Sources(found)


def _open_store(
    argument: str, path: str | os.PathLike[str], tokenizer: Tokenizer | None, vocab_size: int
) -> SuffixIndex:
    index = open_datastore(path, _known(tokenizer, argument).get_vocab())
    index.vocab_size = min(index.vocab_size, vocab_size)  # a tokenizer may know more tokens than its model
    return index


def _count_text(
    argument: str, path: str | os.PathLike[str], tokenizer: Tokenizer | None, vocab_size: int
) -> SuffixIndex:
    encode, corpus = _known(tokenizer, argument), Corpus([Path(path)])
    rule = f"`{argument}` counts text of at most {format_bytes(MOST_TEXT_BYTES)}"
    require(corpus.num_bytes <= MOST_TEXT_BYTES, rule, path, "make a store of it with offload datastore build")
    texts = [encode(text, add_special_tokens=False)["input_ids"] for text in corpus.documents()]
    return SuffixIndex.in_memory([[token for token in text if token < vocab_size] for text in texts], vocab_size)


def _known(tokenizer: Tokenizer | None, argument: str) -> Tokenizer:
    if tokenizer is None:
        raise UserError(f"`{argument}` is made of text, and this checkpoint has no tokenizer: leave it out")
    return tokenizer
