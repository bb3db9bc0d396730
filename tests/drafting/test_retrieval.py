"""What a corpus says: continuations of the longest match first, and counts of what follows on a token."""

import numpy as np
import pytest

from offload.datastore.index import SuffixIndex
from offload.drafting.lookup import Guesses, GuessRequest, SourceWeights
from offload.drafting.retrieval import Ngrams, Retrieval
from offload.trees.spec import MatchLength

VOCAB_SIZE = 32
DOCUMENTS = [[1, 2, 3, 4, 5, 6, 7], [9, 3, 4, 8], [9, 3, 4, 8], [3, 4, 10]]


def index() -> SuffixIndex:
    return SuffixIndex.in_memory(DOCUMENTS, VOCAB_SIZE)


def test_the_longest_match_then_shorter_ones() -> None:
    source = Retrieval(index(), MatchLength(2, 16))
    tiers = list(source.tiers([0, 1, 2, 3, 4], GuessRequest(16, 3), source.new_state()))
    assert [tier.length for tier in tiers] == [4, 3] and tiers[0].shares(0) == {5: 1.0}
    (short,) = Retrieval(index(), MatchLength(2, 2)).tiers([3, 4], GuessRequest(16, 3), source.new_state())
    assert short.length == 2 and short.shares(0) == {8: 0.5, 5: 0.25, 10: 0.25}
    found = Guesses([*tiers, short], SourceWeights()).best(16, 3)
    assert {guess.token for guess in found if guess.depth == 1} == {5, 8, 10} and found[0].token == 5


@pytest.mark.parametrize("context", [[20, 21], [7], [4, 10], []])
def test_nothing_follows_what_is_not_there(context: list[int]) -> None:
    source = Retrieval(index(), MatchLength(2, 16))
    assert list(source.tiers(context, GuessRequest(16, 3), source.new_state())) == []


def test_the_second_match_is_short_and_no_shorter_than_allowed() -> None:
    for length, wanted in ((MatchLength(2, 16), [4, 3]), (MatchLength(4, 16), [4]), (MatchLength(2, 3), [3])):
        source = Retrieval(index(), length)
        tiers = source.tiers([1, 2, 3, 4], GuessRequest(8, 3), source.new_state())
        assert [tier.length for tier in tiers] == wanted


def test_bigrams_then_unigrams() -> None:
    tokens = [token for document in DOCUMENTS for token in document]
    bigram, unigram = Ngrams(index()).tiers([0, 3], GuessRequest(16, 3), Ngrams(index()).new_state())
    assert bigram.shares(bigram.start()) == {4: 1.0}
    assert bigram.shares(bigram.follow(3, 4)) == {8: 0.5, 5: 0.25, 10: 0.25}
    assert not bigram.shares(30)
    shares = unigram.shares(30)
    assert list(shares)[:2] == [3, 4] and shares == unigram.shares(3)
    assert all(np.isclose(share, tokens.count(token) / len(tokens), atol=0.08) for token, share in shares.items())


def test_a_chain_of_bigrams_is_the_likeliest_path() -> None:
    guesses = Guesses(Ngrams(index()).tiers([1], GuessRequest(16, 3), Ngrams(index()).new_state()), SourceWeights())
    chance = guesses.children(guesses.root)[0][2]
    assert chance == guesses.children(guesses.follow(guesses.root, 2))[0][3], "a count is not worth more further down"
    assert max(guess.chance for guess in guesses.best(16, 2) if guess.depth == 2) >= chance**2
