"""The suffix index finds what looking everywhere finds, and draws without bias; tries count prefixes."""

from collections import Counter
from itertools import pairwise
from typing import Any

import brute_force
import numpy as np
import pytest
from brute_force import Documents, paths_of, random_documents, rows_of
from scipy.stats import chisquare

from offload.datastore import index as suffix_index
from offload.datastore.index import CorpusChunk, SuffixIndex, heaviest
from offload.errors import UserError

WIDE = 1 << 17  # such a vocabulary takes four bytes a token
SIZES = (5, WIDE, 2**16 - 1, 2**16)  # the third is the largest that two bytes hold beside the separator


def index_of(documents: Documents, vocab_size: int, cuts: list[int]) -> SuffixIndex:
    """In as many chunks as there are cuts, and one more."""
    bounds = [0, *cuts, len(documents)]
    parts = [documents[lo:hi] for lo, hi in pairwise(bounds)]
    return SuffixIndex([CorpusChunk.from_documents(part, vocab_size) for part in parts], vocab_size)


def letters(vocab_size: int) -> np.ndarray:
    """Four tokens whose bytes are alike, so that what begins within one looks like another; two of them the last."""
    return np.array([0, 1, vocab_size - 2, vocab_size - 1])


def compare(seed: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    named = letters(vocab_size)
    documents = [named[document].tolist() for document in random_documents(rng, 4)]
    index = index_of(documents, vocab_size, sorted(rng.integers(len(documents) + 1, size=rng.integers(3)).tolist()))
    assert index.num_tokens == sum(map(len, documents))
    for _ in range(8):
        context = named[rng.integers(4, size=rng.integers(8))].tolist()
        most, least, length = (int(rng.integers(*bounds)) for bounds in ((1, 7), (0, 4), (1, 5)))
        wanted = brute_force.longest(documents, context, most, least, length)
        result = index.longest(context, most, least)
        assert (result.length, result.count) == (wanted.length, len(wanted.continuations))
        assert rows_of(index.continuations(result, length)) == wanted.continuations


@pytest.mark.parametrize("vocab_size", SIZES)
def test_finds_what_looking_everywhere_finds(vocab_size: int) -> None:
    for seed in range(60):
        compare(seed, vocab_size)


def test_edges() -> None:
    index = SuffixIndex.in_memory([[1, 2, 3, 1, 2, 9, 3, 1, 2]], 10)
    result = index.longest([1, 2, 3, 1, 2, 9, 3, 1, 2])
    # The end of a text is always found in the text itself, and nothing follows there: an earlier place counts.
    assert result.length == 3 and rows_of(index.continuations(result)) == [(9, 3, 1, 2)]
    assert index.longest([4, 5]).count == 0 and index.longest([4, 2], least=1).count == 2, "and once it is the end"
    index = SuffixIndex.in_memory([[1, 2, 2], [3], [2]], 10)
    for result in (index.longest([], least=0), index.longest([7], least=0), index.longest([1, 2, 3], most=0, least=0)):
        assert Counter(index.continuations(result, 1)[:, 0].tolist()) == Counter([1, 2, 2, 3, 2]), "every token once"
    index = SuffixIndex.in_memory([[1, 2, 3, 1, 2, 4]], 5)
    assert index.longest([2]) == index.longest([]) == (0, ()), "shorter than the least"
    assert index.longest([1, 2, 99]) == index.longest([1, 2, -1]) == index.longest([2**40]) == (0, ())
    assert index.longest([99, 1, 2]).length == 2, "what stands before it does not matter"
    assert index.longest(np.array([7, 1, 2])).count == 2
    for empty in (SuffixIndex.in_memory([], 5), SuffixIndex.in_memory([[], []], 5), SuffixIndex([], 5)):
        assert empty.num_tokens == 0 and empty.longest([1, 2], least=0) == (0, ())
        assert empty.continuations(empty.longest([1, 2])).shape == (0, 10)


@pytest.mark.parametrize(("tokens", "vocab_size", "words"), [
    *(([3, token], 5, rf"tokens must lie in \[0, 5\), got {token}: ") for token in (-1, 5, 65535, 2**40)),
    *(([0], vocab_size, "`vocab_size` must lie in") for vocab_size in (0, -1, 2**32)),
])  # fmt: skip
def test_impossible_tokens_and_vocabularies_are_refused(tokens: list[int], vocab_size: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SuffixIndex.in_memory([[0], tokens], vocab_size)


def spread() -> SuffixIndex:
    """Forty places of the same two tokens, in three chunks of unequal size, each followed by another token."""
    documents = [[0, 1, 2 + number] for number in range(40)]
    return index_of(documents, 50, [3, 20])


def p_value(index: SuffixIndex) -> float:
    """Return the p-value of all places being drawn equally often, when seven of them are drawn each time."""
    result, drawn = index.longest([0, 1]), Counter[int]()
    for seed in range(400):
        rows_MC = index.continuations(result, 1, most=7, seed=seed)
        assert len({*rows_MC[:, 0].tolist()}) == 7, "no place twice"
        drawn.update(rows_MC[:, 0].tolist())
    return float(chisquare([drawn[2 + number] for number in range(40)]).pvalue)


def test_matches_are_drawn_without_bias_and_the_same_seed_draws_the_same() -> None:
    assert p_value(spread()) > 1e-3
    index = spread()
    result = index.longest([0, 1])
    draws = [index.continuations(result, 2, most=7, seed=seed) for seed in (3, 3, 4)]
    assert np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])
    assert len(index.continuations(result, 2, most=40)) == 40


def first_ones(matches: suffix_index.Matches, most: int, seed: int) -> np.ndarray:
    return np.arange(matches.count)[:most]


def first_range_twice_as_often(matches: suffix_index.Matches, most: int, seed: int) -> np.ndarray:
    first, rng = matches.ranges[0], np.random.default_rng(seed)
    weights = np.where(np.arange(matches.count) < first.hi - first.lo, 2.0, 1.0)
    return np.sort(rng.choice(matches.count, most, replace=False, p=weights / weights.sum()))


@pytest.mark.parametrize("mistake", [first_ones, first_range_twice_as_often])
def test_a_biased_draw_is_noticed(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "_drawn_indices", mistake)
    assert p_value(spread()) < 1e-6


def test_files_of_strangers_are_read_within_their_bounds() -> None:
    """Any positions, any tokens: what is found may be nonsense, but is made of tokens of the vocabulary."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        tokens_B = rng.integers(2**16, size=rng.integers(1, 20)).astype(">u2")
        tokens_B[rng.random(len(tokens_B)) < 0.8] %= 3
        position_M = rng.integers(-(2**31), 2**31, size=9).astype(np.int32)
        position_M[rng.random(9) < 0.7] %= len(tokens_B)
        index = SuffixIndex([CorpusChunk(tokens_B.tobytes(), tokens_B, position_M)], 3)
        result = index.longest(rng.integers(3, size=5).tolist(), least=int(rng.integers(3)))
        rows_MC = index.continuations(result)
        assert len(rows_MC) == result.count and rows_MC.min(initial=0) >= -1 and rows_MC.max(initial=0) < 3


def random_rows(rng: np.random.Generator) -> np.ndarray:
    """Continuations that share prefixes, each ending anywhere; what stands behind an end means nothing."""
    rows_MC = rng.integers(4, size=(rng.integers(30), rng.integers(1, 6)))
    rows_MC = np.array([0, 1, 255, 2**32 - 3])[rows_MC]
    ends_M = rng.integers(rows_MC.shape[1] + 2, size=len(rows_MC))
    for row, end in zip(rows_MC, ends_M, strict=True):
        row[end : end + 1] = -1
    return rows_MC


def cut(rows_MC: np.ndarray) -> list[list[int]]:
    return [row[: next((at for at, token in enumerate(row) if token < 0), None)] for row in rows_MC.tolist()]


@pytest.mark.parametrize("num_nodes", [0, 1, 5, 1000])
def test_nodes_are_those_that_counting_gives(num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    for _ in range(100):
        rows_MC = random_rows(rng)
        trie = heaviest(rows_MC, num_nodes)
        assert paths_of(trie) == brute_force.heaviest(cut(rows_MC), num_nodes)
        assert trie.num_continuations == len(rows_MC)
        shuffled = heaviest(rng.permutation(rows_MC), num_nodes)
        assert all(np.array_equal(left, other) for left, other in zip(trie, shuffled, strict=True))
