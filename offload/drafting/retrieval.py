"""Guesses from a datastore: continuations of the text's end (REST, 2311.08252), and n-gram counts.

The longest end of the text that occurs in the corpus gives its continuations there. Where a path
has left all matches, bigrams and unigrams still give the next token (Leviathan et al., 2211.17192,
section 4.1 and Table 3: a draft that costs nothing). An index of suffixes has these counts, so a
datastore serves as a bigram model as it is. `open_sources` returns all sources that the options
name: the text itself, a datastore, counts of a text file or of a store.

Invariant: a store is read and never changed, so any number of texts and programs may share it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from offload.datastore.corpus import Corpus
from offload.datastore.index import SuffixIndex, heaviest
from offload.datastore.store import open_datastore
from offload.drafting.lookup import Copying, GuessSources, Source, Tokens, TrieGuesses
from offload.errors import UserError, require
from offload.planning.load_options import LoadOptions
from offload.trees.spec import MatchLength, parse_match_length
from offload.units import format_bytes

MOST_CONTINUATIONS = 128  # most continuations considered; of more a sample is taken
LONGEST = 16  # tokens of a continuation; REST takes 10
SHORT = 3  # tokens of the second, shorter match
_MOST_COUNTED = 4096  # most occurrences of a token that are counted; of more a sample is taken
_NUM_CHILDREN = 8
# tokens whose followers are cached, about 4 MiB
_NUM_KEPT = 1 << 12

# Most bytes of text counted in memory, which no plan includes: a tenth of a runtime's own.
MOST_TEXT_BYTES = 1 << 20


class Retrieval:
    """Continuations of matches in a corpus."""

    name = "datastore"

    def __init__(self, index: SuffixIndex, match: MatchLength) -> None:
        self._index = index
        self._match = match

    def opinions(self, token_T: Tokens, num_nodes: int, depth: int) -> Iterator[TrieGuesses]:
        """Yield continuations of the longest match, perhaps a coincidence, then of a short one."""
        least, bound = self._match
        while bound >= least:
            matches = self._index.longest(token_T[-bound:].tolist(), bound, least)
            if not matches.count:
                return
            token_CM = self._index.continuations(
                matches, min(depth, LONGEST), MOST_CONTINUATIONS, len(token_T)
            )
            yield TrieGuesses(self.name, matches.length, heaviest(token_CM, num_nodes))
            bound = SHORT if matches.length > SHORT else 0


# by the last tokens: what follows, and how often
SharesAfter = Callable[[tuple[int, ...]], Mapping[int, float]]


class NgramGuesses:
    """Counts of tokens after the last one (length 1), or of all tokens; a state is the last token."""

    source = "ngram"

    def __init__(self, shares_after: SharesAfter, length: int, token: int) -> None:
        self.length = length
        self._shares_after = shares_after
        self._token = token

    def length_at(self, depth: int) -> int:
        """Return the same length at every depth."""
        return self.length

    def start(self) -> int:
        """Return the last token of the text."""
        return self._token

    def shares(self, state: int) -> Mapping[int, float]:
        """Return the shares of the tokens that came next."""
        return self._shares_after((state,) if self.length else ())

    def follow(self, state: int, token: int) -> int:
        """Return the token itself: only the last one counts."""
        return token


class Ngrams:
    """Bigrams first, then unigrams."""

    name = "ngram"

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._shares_after = lru_cache(maxsize=_NUM_KEPT)(self._count)

    def _count(self, tokens: tuple[int, ...]) -> Mapping[int, float]:
        """Return the tokens that follow these, most frequent first, with their shares."""
        matches = self._index.longest(tokens, len(tokens), len(tokens))
        trie = heaviest(self._index.continuations(matches, 1, _MOST_COUNTED), _NUM_CHILDREN)
        counts = zip(trie.token_R.tolist(), trie.count_R.tolist(), strict=True)
        return {token: count / trie.num_continuations for token, count in counts}

    def opinions(self, token_T: Tokens, num_nodes: int, depth: int) -> Iterator[NgramGuesses]:
        """Yield two opinions on every path: after the last token, and regardless of it."""
        for length in (1, 0):
            yield NgramGuesses(self._shares_after, length, int(token_T[-1]))


def open_sources(options: LoadOptions, tokenizer: Any, vocab_size: int) -> GuessSources:
    """Return all sources except the draft. Raises `UserError` for files that cannot be used."""
    length = parse_match_length(options.lookup_length)
    sources = list[Source]()
    if options.looks_up:
        sources.append(Copying(length))
    if options.datastore is not None:
        sources.append(
            Retrieval(_open_store("datastore", options.datastore, tokenizer, vocab_size), length)
        )
    if options.ngram is not None:
        open_counts = _open_store if options.ngram_is_store else _count_text
        sources.append(Ngrams(open_counts("ngram", options.ngram, tokenizer, vocab_size)))
    return GuessSources(sources)


def _open_store(
    argument: str, path: str | os.PathLike[str], tokenizer: Any, vocab_size: int
) -> SuffixIndex:
    return open_datastore(path, _known(tokenizer, argument).get_vocab(), vocab_size)


def _count_text(
    argument: str, path: str | os.PathLike[str], tokenizer: Any, vocab_size: int
) -> SuffixIndex:
    """Return an index of a text file's tokens. Raises `UserError` for an empty or a large one."""
    encode = _known(tokenizer, argument)
    corpus = Corpus([Path(path)])
    size = corpus.num_bytes
    requirement = f"`{argument}` must be text of 1 byte to {format_bytes(MOST_TEXT_BYTES)}"
    remedy = f"name another file than {path}, or make a store of it with offload datastore build"
    require(0 < size <= MOST_TEXT_BYTES, requirement, format_bytes(size), remedy)
    texts = (encode(text, add_special_tokens=False)["input_ids"] for text in corpus.documents())
    return SuffixIndex.in_memory(
        ([token for token in text if token < vocab_size] for text in texts), vocab_size
    )


def _known(tokenizer: Any, argument: str) -> Any:
    if tokenizer is None:
        raise UserError(
            f"`{argument}` is made of text, and this checkpoint has no tokenizer: leave it out"
        )
    return tokenizer
