"""What the text has said before: matches against a search without any cleverness, loops, and texts that are cut."""

import numpy as np
import pytest

from offload.drafting.lookup import Copying, GrowingText, GuessRequest
from offload.trees.spec import MatchLength

ASKED = GuessRequest(64, 6)


ANY_LENGTH = MatchLength(1, 8)


def said(tokens: list[int], match: MatchLength = ANY_LENGTH, state: GrowingText | None = None) -> dict[int, set]:
    """By the length of the match all the first tokens that are guessed, with their shares."""
    source = Copying(match)
    tiers = source.tiers(tokens, ASKED, state or source.new_state())
    return {tier.length: {(token, round(share, 6)) for token, share in tier.shares(0).items()} for tier in tiers}


def found_slowly(tokens: list[int], length: int) -> list[int]:
    """What followed on each earlier place where the last `length` tokens stand."""
    ends = range(length, len(tokens))
    return [tokens[end] for end in ends if tokens[end - length : end] == tokens[len(tokens) - length :]]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab_size", [2, 5])
def test_matches_are_all_there_are(seed: int, vocab_size: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, vocab_size, 60).tolist()
    got, most = said(tokens), max((n for n in range(1, 9) if found_slowly(tokens, n)), default=0)
    assert max(got, default=0) == most
    for length, shares in got.items():
        after = found_slowly(tokens, length)
        assert shares == {(token, round(after.count(token) / len(after), 6)) for token in set(after)}


def test_shorter_matches_follow_by_halves() -> None:
    tokens = [9, 1, 2, 3, 4, 5, 6, 7, 8, 0] * 3
    assert list(said(tokens, MatchLength(2, 16))) == [16, 8, 4, 2]


def test_a_loop_goes_on() -> None:
    source, tokens = Copying(MatchLength(2, 16)), [5, 1, 2, 3, 1, 2, 3, 1, 2]
    tier = next(iter(source.tiers(tokens, GuessRequest(64, 9), source.new_state())))
    place, path = tier.start(), []
    while tier.shares(place):
        (token,) = tier.shares(place)
        path.append(token)
        place = tier.follow(place, token)
    assert path == [3, 1, 2] * 3


@pytest.mark.parametrize("tokens", [[7], [1, 2, 3, 4], [1, 1]])
def test_little_text(tokens: list[int]) -> None:
    assert said(tokens, MatchLength(2, 16)) == {}
    assert bool(said(tokens)) == (tokens == [1, 1])


def test_a_cut_text_is_another() -> None:
    state, tokens = Copying(MatchLength(2, 16)).new_state(), [1, 2, 3, 1, 2]
    assert said(tokens, state=state)[2] == {(3, 1.0)}
    state.clear(2)
    assert said([1, 2, 4, 1, 2], state=state)[2] == {(4, 1.0)}, "what was cut is forgotten"
    assert said([*range(3000), 7, 8], state=GrowingText())[2] == {(9, 1.0)}, "longer than its array was"
