"""Sources of guesses as options name them: the text itself, a datastore, counts of a text file or a store."""

import os
from pathlib import Path

from offload.datastore.suffix_index import SuffixIndex
from offload.drafting.copying import Copying
from offload.drafting.ngram import Ngrams
from offload.drafting.retrieval import Retrieval
from offload.drafting.sources import Source, Sources
from offload.engine.text import Tokenizer
from offload.errors import UserError
from offload.planning.options import LoadOptions
from offload.tree.spec import parse_match_length

MOST_TEXT_BYTES = 16 << 20  # of a file that is counted in memory: some 100 MiB with its index


def open_sources(options: LoadOptions, tokenizer: Tokenizer | None, vocab_size: int, *, has_draft: bool) -> Sources:
    """What is asked besides the draft. Raises `UserError` for files that cannot serve."""
    match, found = parse_match_length(options.lookup_length), list[Source]()
    if options.looks_up(has_draft=has_draft):
        found.append(Copying(match))
    if options.datastore is not None:
        found.append(Retrieval(_open_store(options.datastore, tokenizer, vocab_size), match))
    if options.ngram is not None:
        found.append(Ngrams(_counted(options.ngram, tokenizer, vocab_size)))
    return Sources(found)


def _open_store(path: str | os.PathLike[str], tokenizer: Tokenizer | None, vocab_size: int) -> SuffixIndex:
    raise NotImplementedError


def _read(path: Path) -> str:
    return path.read_text()


def _counted(path: str | os.PathLike[str], tokenizer: Tokenizer | None, vocab_size: int) -> SuffixIndex:
    """A store as it stands, or a text file read whole."""
    if Path(path).is_dir():
        return _open_store(path, tokenizer, vocab_size)
    if tokenizer is None:
        raise UserError("`ngram` counts tokens of text, and this checkpoint has no tokenizer: leave it out")
    return SuffixIndex.in_memory([tokenizer(_read(Path(path)), add_special_tokens=False)["input_ids"]], vocab_size)
