"""Mixed opinions are chances, the best paths are the best, and trust follows what comes true."""

from itertools import product

import numpy as np
import pytest

from offload.datastore.index import heaviest
from offload.drafting.lookup import Guess, Guesses, SourceWeights, TrieCursor, TrieGuesses

VOCAB_SIZE, DEPTH = 4, 3


def tier(seed: int, length: int, source: str = "lookup", num_rows: int = 12) -> TrieGuesses:
    rows = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (num_rows, DEPTH))
    return TrieGuesses(source, length, heaviest(rows, 64))


def opinions() -> Guesses:
    return Guesses([tier(1, 3), tier(2, 9), tier(3, 1, "datastore")], SourceWeights())


def chance_of(guesses: Guesses, path: tuple[int, ...]) -> float:
    place, chance = guesses.root, 1.0
    for token in path:
        chance *= guesses.children(place)[0].get(token, 0.0)
        place = guesses.follow(place, token)
    return chance


def paths_of(found: list[Guess]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for guess in found:
        paths.append((*(paths[guess.parent] if guess.parent >= 0 else ()), guess.token))
    return paths


def test_chances_and_what_is_left_sum_to_one() -> None:
    guesses = opinions()
    for path in product(range(VOCAB_SIZE), repeat=DEPTH - 1):
        place = guesses.root
        for token in path:
            chances, rest = guesses.children(place)
            assert sum(chances.values()) + rest == pytest.approx(1) and rest > 0
            place = guesses.follow(place, token)


def test_the_longest_match_is_asked_first() -> None:
    """By hand: it claims its trust, shared out; the next claims of the rest, for tokens that were not named yet."""
    one = TrieGuesses("lookup", 9, heaviest(np.array([[1], [1], [2]]), 8))
    other = TrieGuesses("lookup", 3, heaviest(np.array([[1]] * 6 + [[2], [3], [0], [0]]), 8))
    trust = SourceWeights()
    first, second = trust.of("lookup", 9), trust.of("lookup", 3)
    chances, rest = Guesses([other, one], trust).children(TrieCursor(0, (0, 0)))
    wanted = {1: first * 2 / 3, 2: first / 3, 3: (1 - first) * second / 3, 0: (1 - first) * second * 2 / 3}
    assert first > second and chances == pytest.approx(wanted) and rest == pytest.approx((1 - first) * (1 - second))
    assert Guesses([one, one], trust).children(TrieCursor(0, (0, 0)))[1] == pytest.approx(1 - first), (
        "twice is not more"
    )


@pytest.mark.parametrize("count", [1, 7, 30, 1000])
def test_best_paths_are_the_best_of_all(count: int) -> None:
    guesses = opinions()
    every = {
        path: chance_of(guesses, path) for n in range(1, DEPTH + 1) for path in product(range(VOCAB_SIZE), repeat=n)
    }
    wanted = sorted((chance for chance in every.values() if chance), reverse=True)[:count]
    found = guesses.best(count, DEPTH)
    assert [guess.chance for guess in found] == pytest.approx(wanted)
    assert [every[path] for path in paths_of(found)] == pytest.approx(wanted)
    assert len(set(paths_of(found))) == len(found)


def test_bounds_are_kept() -> None:
    found = opinions().best(1000, 2, least=0.02)
    assert found and max(guess.depth for guess in found) == 2 and min(guess.chance for guess in found) > 0.02
    assert opinions().best(0, 3) == opinions().best(9, 0) == Guesses([], SourceWeights()).best(9, 9) == []


@pytest.mark.parametrize(("is_right", "bound"), [(0.95, (0.85, 1)), (0.3, (0.15, 0.45)), (0.0, (0, 0.05))])
def test_trust_becomes_how_often_a_source_is_right(is_right: float, bound: tuple[float, float]) -> None:
    trust, chance = SourceWeights(), np.random.default_rng(0)
    for _ in range(200):
        trust.learn("lookup", 5, float(chance.random() < is_right), 0.0)
    assert bound[0] <= trust.of("lookup", 5) <= bound[1]
    assert trust.of("lookup", 24) == SourceWeights().of("lookup", 24) and trust.of(
        "datastore", 5
    ) == SourceWeights().of("datastore", 5)


def test_a_source_that_only_repeats_a_good_draft_is_not_trusted_against_it() -> None:
    """Right as often as not, but never where the draft is wrong: only where they disagree is something to learn."""
    trust = SourceWeights()
    for _ in range(50):
        trust.learn("lookup", 5, 1.0, 0.9)  # both right
        trust.learn("lookup", 5, 0.0, 0.9)  # only the draft
    assert trust.of("lookup", 5) < 0.2


def test_learning_walks_along_what_was_emitted() -> None:
    """A chain that came true to its second token: shorter matches on its way gain, the one behind it loses."""
    trie, trust = heaviest(np.array([[1, 2, 3]]), 8), SourceWeights()
    before = [trust.of("lookup", length) for length in (2, 3, 4)]
    for _ in range(30):
        Guesses([TrieGuesses("lookup", 2, trie)], trust).learn([1, 2, 0], [None] * 3)
    after = [trust.of("lookup", length) for length in (2, 3, 4)]
    assert after[0] > before[0] and after[1] > before[1] and after[2] < before[2]
