"""Guesses: matches are all there are, opinions are chances, trust follows what comes true; trees of guesses alone."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_dynamic import path_of
from tiny import FAMILIES, VOCAB_SIZE, save_pair

from offload.checkpoint.open import open_checkpoint
from offload.datastore.index import SuffixIndex, heaviest
from offload.drafting.base import DraftText
from offload.drafting.lookup import (
    Copying,
    Guess,
    Guesses,
    GuessSources,
    GuessState,
    LookupDrafter,
    PassSeconds,
    SourceWeights,
    TrieCursor,
    TrieGuesses,
)
from offload.drafting.registry import proposer_of
from offload.drafting.retrieval import Retrieval
from offload.engine.build import resident_model
from offload.kernels.registry import REFERENCES
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.spec import MatchLength
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, Shape, chain, k_ary, sequences
from offload.trees.verification import Acceptance

NUM_LETTERS, DEPTH = 4, 3


def tier(seed: int, length: int, source: str = "lookup", num_rows: int = 12) -> TrieGuesses:
    rows = np.random.default_rng(seed).integers(0, NUM_LETTERS, (num_rows, DEPTH))
    return TrieGuesses(source, length, heaviest(rows, 64))


def opinions() -> Guesses:
    return Guesses([tier(1, 3), tier(2, 9), tier(3, 1, "datastore")], SourceWeights())


def chance_of(guesses: Guesses, path: tuple[int, ...]) -> float:
    cursor, chance = guesses.root, 1.0
    for token in path:
        chance *= guesses.children(cursor)[0].get(token, 0.0)
        cursor = guesses.follow(cursor, token)
    return chance


def paths_of(guesses: list[Guess]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for guess in guesses[1:]:
        paths.append((*paths[guess.parent], guess.item[1]))
    return paths[1:]


def test_chances_and_what_is_left_sum_to_one() -> None:
    guesses = opinions()
    for path in product(range(NUM_LETTERS), repeat=DEPTH - 1):
        cursor = guesses.root
        for token in path:
            chances, rest = guesses.children(cursor)
            assert sum(chances.values()) + rest == pytest.approx(1) and rest > 0
            cursor = guesses.follow(cursor, token)
    # Bounds are kept.
    best = opinions().best(1000, 2, least=0.02)
    assert best and max(guess.depth for guess in best) == 2 and min(guess.score for guess in best) > 0.02
    root_alone = [opinions().best(0, 3), opinions().best(9, 0), Guesses([], SourceWeights()).best(9, 9)]
    assert list(map(len, root_alone)) == [1, 1, 1]


def test_the_longest_match_is_asked_first() -> None:
    """By hand: it claims its trust, shared out; the next claims of the rest, for tokens that were not named yet."""
    trie = TrieGuesses("lookup", 9, heaviest(np.array([[1], [1], [2]]), 8))
    other = TrieGuesses("lookup", 3, heaviest(np.array([[1]] * 6 + [[2], [3], [0], [0]]), 8))
    trust = SourceWeights()
    first, second = trust.weight("lookup", 9), trust.weight("lookup", 3)
    chances, rest = Guesses([other, trie], trust).children(TrieCursor(0, (0, 0)))
    wanted = {1: first * 2 / 3, 2: first / 3, 3: (1 - first) * second / 3, 0: (1 - first) * second * 2 / 3}
    assert first > second and chances == pytest.approx(wanted) and rest == pytest.approx((1 - first) * (1 - second))
    assert Guesses([trie, trie], trust).children(TrieCursor(0, (0, 0)))[1] == pytest.approx(1 - first), (
        "twice is not more"
    )


@pytest.mark.parametrize("count", [1, 7, 30, 1000])
def test_best_paths_are_the_best_of_all(count: int) -> None:
    guesses = opinions()
    every = {
        path: chance_of(guesses, path) for n in range(1, DEPTH + 1) for path in product(range(NUM_LETTERS), repeat=n)
    }
    wanted = sorted((chance for chance in every.values() if chance), reverse=True)[:count]
    best = guesses.best(count, DEPTH)
    assert [guess.score for guess in best] == pytest.approx([1, *wanted])
    assert [every[path] for path in paths_of(best)] == pytest.approx(wanted)
    assert len(set(paths_of(best))) == len(best) - 1


@pytest.mark.parametrize(("is_right", "bound"), [(0.95, (0.85, 1)), (0.3, (0.15, 0.45)), (0.0, (0, 0.05))])
def test_trust_becomes_how_often_a_source_is_right(is_right: float, bound: tuple[float, float]) -> None:
    trust, chance = SourceWeights(), np.random.default_rng(0)
    for _ in range(200):
        trust.learn("lookup", 5, float(chance.random() < is_right), 0.0)
    assert bound[0] <= trust.weight("lookup", 5) <= bound[1]
    assert trust.weight("lookup", 24) == SourceWeights().weight("lookup", 24) and trust.weight(
        "datastore", 5
    ) == SourceWeights().weight("datastore", 5)


ANY_LENGTH, USUAL = MatchLength(1, 8), MatchLength(2, 16)


def said(tokens: list[int], match: MatchLength = ANY_LENGTH, state: GuessState | None = None) -> dict[int, set]:
    """By the length of the match all the first tokens that are guessed, with their shares."""
    tiers = Copying(match).opinions((state or GuessState()).read(tokens), 64, 6)
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


def test_matches_by_hand() -> None:
    tokens = [9, 1, 2, 3, 4, 5, 6, 7, 8, 0] * 3
    assert list(said(tokens, USUAL)) == [16, 8, 4, 2], "shorter matches follow by halves"
    for little in ([7], [1, 2, 3, 4], [1, 1]):
        assert said(little, USUAL) == {} and bool(said(little)) == (little == [1, 1])
    tier = next(iter(Copying(USUAL).opinions(np.array([5, 1, 2, 3, 1, 2, 3, 1, 2]), 64, 9)))
    cursor, path = tier.start(), []
    while tier.shares(cursor):
        (token,) = tier.shares(cursor)
        path.append(token)
        cursor = tier.follow(cursor, token)
    assert path == [3, 1, 2] * 3, "a loop goes on"
    state = GuessState()
    assert said([1, 2, 3, 1, 2], USUAL, state)[2] == {(3, 1.0)}
    state.clear(2)
    assert said([1, 2, 4, 1, 2], state=state)[2] == {(4, 1.0)}, "what was cut is forgotten"
    assert said([*range(3000), 7, 8], state=GuessState())[2] == {(9, 1.0)}, "longer than its array was"


NUM_WORDS = 32
DOCUMENTS = [[1, 2, 3, 4, 5, 6, 7], [9, 3, 4, 8], [9, 3, 4, 8], [3, 4, 10]]


def index() -> SuffixIndex:
    return SuffixIndex.in_memory(DOCUMENTS, NUM_WORDS)


def retrieved(context: list[int], length: MatchLength = USUAL) -> list[Any]:
    return list(Retrieval(index(), length).opinions(np.array(context, dtype=int), 16, 3))


def test_the_longest_match_of_a_corpus_then_a_short_one() -> None:
    tiers = retrieved([0, 1, 2, 3, 4])
    assert [tier.length for tier in tiers] == [4, 3] and tiers[0].shares(0) == {5: 1.0}
    (short,) = retrieved([3, 4], MatchLength(2, 2))
    assert short.length == 2 and short.shares(0) == {8: 0.5, 5: 0.25, 10: 0.25}
    best = Guesses([*tiers, short], SourceWeights()).best(16, 3)
    assert {guess.item[1] for guess in best if guess.depth == 1} == {5, 8, 10}
    assert best[1].item[1] == 5
    assert all(retrieved(context) == [] for context in ([20, 21], [7], [4, 10], [])), (
        "nothing follows what is not there"
    )
    for length, wanted in ((USUAL, [4, 3]), (MatchLength(4, 16), [4]), (MatchLength(2, 3), [3])):
        assert [tier.length for tier in retrieved([1, 2, 3, 4], length)] == wanted, "no shorter than allowed"


REPEATED = [3, 1, 4, 1, 5, 9, 2, 6, 7, 8] * 3
BRANCHING = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 1, 2]


def lookup(pass_s: PassSeconds = lambda _: 1.0) -> LookupDrafter:
    return LookupDrafter(GuessSources([Copying(MatchLength(2, 16))]), pass_s)


def grown(shape: Shape, tokens: list[int], pass_s: PassSeconds = lambda _: 1.0) -> TokenTree:
    drafter = lookup(pass_s)
    return drafter.propose([DraftText(shape, tokens, Sampler(Sampling(), 16), drafter.new_state())])[0]


def test_a_text_that_repeats_is_foretold_and_where_nothing_is_known_is_the_root_alone() -> None:
    tree = grown(DynamicShape(9, 8), REPEATED)
    assert tree.topology == chain(8) and tree.tokens == [8, 3, 1, 4, 1, 5, 9, 2, 6]
    for shape in (DynamicShape(32, 8), chain(4), k_ary(2, 15)):
        assert grown(shape, list(range(12))).topology == chain(0)


@pytest.mark.parametrize("shape", [chain(3), k_ary(2, 15), sequences(2, 3), DynamicShape(6, 4)])
def test_a_shape_is_filled_as_far_as_guesses_reach(shape: Shape) -> None:
    """The likelier continuation stands first, and no node is where the shape has none."""
    tree = grown(shape, BRANCHING)
    paths = {path_of(tree, node) for node in range(tree.num_nodes)}
    assert {(3,), (3, 0)} <= paths and 1 < tree.num_nodes <= shape.num_nodes and tree.topology.depth <= shape.depth
    assert ((4,) in paths) == (shape != chain(3))
    assert tree.tokens[1] == 3, "twice as often as the other"


def test_what_was_wrong_is_guessed_less() -> None:
    drafter, sampler, sizes = lookup(lambda rows: 1 + 0.2 * rows), Sampler(Sampling(), 16), []
    state = drafter.new_state()
    for _ in range(40):
        tree = drafter.propose([DraftText(DynamicShape(64, 16), REPEATED, sampler, state)])[0]
        sizes.append(tree.num_nodes)
        drafter.accepted(tree, Acceptance([0], [15]), sampler, state)
    assert sizes[0] > 4 and sizes[-1] == 1
    warm = Sampler(Sampling(temperature=1.0), 16)
    (tree,) = drafter.propose([DraftText(DynamicShape(64, 16), REPEATED, warm, state)])
    assert tree.num_nodes == sizes[0], "learned by itself"


PROMPT = [7, 11, 9, 5, 7, 11, 3, 7, 11]


@pytest.mark.parametrize("has_sources", [False, True])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_drafter_keeps_a_text_in_its_state_alone(has_draft: bool, has_sources: bool, tmp_path: Path) -> None:
    """Two texts at once: what it proposes for one does not depend on the other."""
    model = resident_model(open_checkpoint(save_pair(FAMILIES["llama"](), tmp_path)[1]), "float32")
    sources = GuessSources([Copying(MatchLength(1, 8))] if has_sources else [])
    draft = model if has_draft else None
    drafter = proposer_of(draft, VOCAB_SIZE, 64, REFERENCES, sources, lambda *_: 1.0)
    sampler, shape = Sampler(Sampling(), VOCAB_SIZE), k_ary(2, 7) if (has_draft or has_sources) else chain(0)
    state, other, fresh = (drafter.new_state() for _ in range(3))

    def proposed(text: list[int], state: Any) -> list[int]:
        return drafter.propose([DraftText(shape, text, sampler, state)])[0].tokens

    first = drafter.propose([DraftText(shape, PROMPT, sampler, state)])[0]
    proposed([5, 6, 7, 8], other)
    drafter.accepted(first, Acceptance([0], [9]), sampler, state)
    again = proposed([*PROMPT, 9], state)
    assert again == proposed([*PROMPT, 9], fresh)
    assert again[0] == 9 and (len(again) > 1) == (has_draft or has_sources)
    state.clear()
    # compared with a fresh state, since a drafter has learned from what was committed
    assert proposed(PROMPT, state) == proposed(PROMPT, drafter.new_state())
    model.close()
