"""Model and guesses in one tree: both compete for its nodes, and every rule keeps its distribution."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tables import SHAPES, TableSampler, count_pairs, distributions, grow, p_value, pair, pair_distribution
from test_dynamic import draft_of, grow_best, path_of
from tiny import FAMILIES, VOCAB_SIZE, save_pair

from offload.checkpoint.open import open_checkpoint
from offload.datastore.index import heaviest
from offload.drafting.base import DraftText
from offload.drafting.join import JoinedDrafter, graft
from offload.drafting.lookup import (
    Copying,
    Guess,
    Guesses,
    GuessSources,
    SourceWeights,
    TrieCursor,
    TrieGuesses,
    confidence,
)
from offload.drafting.model_drafter import ModelDrafter
from offload.engine.build import resident_model
from offload.model.tree_model import TreeModel
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.spec import MatchLength
from offload.trees.token_tree import Draw, TokenTree
from offload.trees.topology import DynamicShape, best_first, chain
from offload.trees.verification import Acceptance, find_rule

PROMPT = [*range(11, 29), 5, *range(11, 25)]
GUESSED = [25, 26, 27, 28, 5, 11, 12, 13]
GREEDY, WARM = Sampling(), Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeModel]:
    draft = save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("hybrid"))[1]
    model = resident_model(open_checkpoint(draft), "float32")
    yield model
    model.close()


def hybrid(model: TreeModel) -> JoinedDrafter:
    return JoinedDrafter(ModelDrafter(model, VOCAB_SIZE, 256), GuessSources([Copying(MatchLength(2, 16))]))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {path_of(tree, node) for node in range(tree.num_nodes)}


def guessed_paths(depth: int) -> set[tuple[int, ...]]:
    return {tuple(GUESSED[:length]) for length in range(depth + 1)}


@pytest.mark.parametrize("shape", [DynamicShape(32, 6), best_first([0.5, 0.2], 32, 6), chain(7)], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_long_match_is_in_every_tree(model: TreeModel, shape, sampling: Sampling) -> None:
    drafter, sampler = hybrid(model), Sampler(sampling, VOCAB_SIZE)
    tree = drafter.propose([DraftText(shape, PROMPT, sampler, drafter.new_state())])[0]
    assert guessed_paths(3) <= paths(tree) and tree.num_nodes <= shape.num_nodes and tree.topology.depth <= shape.depth
    alone = ModelDrafter(model, VOCAB_SIZE, 256)
    assert not guessed_paths(3) <= paths(alone.propose([DraftText(shape, PROMPT, sampler, alone.new_state())])[0])


def test_without_a_guess_the_tree_is_the_models_own(model: TreeModel) -> None:
    drafter, alone, sampler = hybrid(model), ModelDrafter(model, VOCAB_SIZE, 256), Sampler(GREEDY, VOCAB_SIZE)
    for shape in (DynamicShape(24, 6), best_first([0.5, 0.2], 24, 6)):
        got = drafter.propose([DraftText(shape, [1, 2, 3, 4], sampler, drafter.new_state())])[0]
        wanted = alone.propose([DraftText(shape, [1, 2, 3, 4], sampler, alone.new_state())])[0]
        assert got.topology == wanted.topology and got.tokens == wanted.tokens


def test_every_row_sees_its_path_alone(model: TreeModel) -> None:
    """Rows that were run ahead of others, many levels at once, have the scores of their own paths."""
    guesses = Guesses(
        [TrieGuesses("lookup", 8, heaviest(np.array([GUESSED, [25, 26, 3, 4, 5, 6, 7, 8]]), 32))], SourceWeights()
    )
    sampler = Sampler(GREEDY, VOCAB_SIZE)
    tree = grow_best(draft_of(model), DynamicShape(40, 7), PROMPT, sampler, 1.0, guesses)
    assert max(map(len, guessed_paths(6) & paths(tree))) >= 4 and len(tree.row_of_node) > 8
    for node, score_V in tree.score_of_node.items():
        alone_1V = draft_of(model).catch_up([*PROMPT, *path_of(tree, node)])
        assert (alone_1V[0] - score_V).abs().max() < 1e-4


def test_a_dynamic_tree_is_the_best_of_the_mixture(model: TreeModel) -> None:
    """Grown again by hand: one node after the other, each with the chance that draft and guesses give it together."""
    guesses = Guesses([TrieGuesses("lookup", 3, heaviest(np.array([GUESSED, [3] * 8, [25] * 8]), 32))], SourceWeights())
    sampler, shape = Sampler(GREEDY, VOCAB_SIZE), DynamicShape(30, 4)
    tree = grow_best(draft_of(model), shape, PROMPT, sampler, 1.3, guesses)
    every: dict[tuple[int, ...], float] = {(): 1.0}
    open_paths: list[tuple[tuple[int, ...], TrieCursor]] = [((), guesses.root)]
    for path, cursor in open_paths:
        pi_V = (1.3 * draft_of(model).catch_up([*PROMPT, *path])[0].float()).softmax(0)
        chances, rest = guesses.children(cursor, confidence(float(pi_V.max())))
        mixed = {token: chances.get(token, 0) + rest * float(pi_V[token]) for token in range(VOCAB_SIZE)}
        for token in sorted(mixed, key=lambda token: -mixed[token])[:32]:
            child = (*path, token)
            every[child] = every[path] * mixed[token]
            if len(child) < shape.depth and every[child] > 0.003:
                open_paths.append((child, guesses.follow(cursor, token)))
    wanted = sorted(every, key=lambda path: -every[path])[: shape.num_nodes]
    assert sum(every[path] for path in paths(tree)) == pytest.approx(sum(every[path] for path in wanted), rel=1e-3)


def test_a_commit_keeps_the_accepted_path(model: TreeModel) -> None:
    for shape in (DynamicShape(32, 6), best_first([0.5, 0.2], 32, 6)):
        drafter, sampler = hybrid(model), Sampler(GREEDY, VOCAB_SIZE)
        state = drafter.new_state()
        tree = drafter.propose([DraftText(shape, PROMPT, sampler, state)])[0]
        node_of = {path_of(tree, node): node for node in reversed(range(tree.num_nodes))}
        nodes = [node_of[tuple(GUESSED[:length])] for length in range(4)]
        drafter.accepted(tree, Acceptance(nodes, [*GUESSED[:3], 9]), sampler, state)
        text = [*PROMPT, *GUESSED[:3], 9]
        again, fresh = (draft_of(model, cache).catch_up(text) for cache in (state.cache, None))
        assert (again - fresh).abs().max() < 1e-4


FOUND = [
    Guess(1, 0, 0, 1, 0.9, (TrieCursor(0, ()), 2)),
    Guess(2, 1, 0, 2, 0.5, (TrieCursor(1, ()), 3)),
    Guess(3, 0, 1, 1, 0.1, (TrieCursor(0, ()), 1)),
]
CASES = [("sequoia", "binary", "bad"), ("sequoia", "chain", "disjoint"), ("specinfer", "sequences", "bad"),
         ("spectr", "binary", "good")]  # fmt: skip


def p_of_grafted(rule_name: str, shape: str, draft: str, planted=lambda drafted, tree: tree) -> float:
    (target_VV, draft_VV), rule = pair(draft), find_rule(rule_name)
    sampling = Sampling(temperature=1.0, seed=1)

    def grow_with_guesses(root_R: torch.Tensor, sampler: Sampler) -> list[TokenTree]:
        trees = grow(draft_VV, SHAPES[shape], root_R, sampler)
        return [planted(tree, graft(tree, FOUND, tree.num_nodes + 3)) for tree in trees]

    sampler = TableSampler(sampling, rule)
    count_VV = count_pairs(grow_with_guesses, rule.verify, target_VV, sampler, 5000)
    return p_value(count_VV, pair_distribution(distributions(target_VV, sampling)))


@pytest.mark.parametrize(("rule", "shape", "draft"), CASES, ids=str)
def test_distribution_of_two_tokens(rule: str, shape: str, draft: str) -> None:
    assert p_of_grafted(rule, shape, draft) > 1e-3


def as_drawn(_: TokenTree, tree: TokenTree) -> TokenTree:
    """A guess that passes for a draw."""
    assert tree.proposals is not None
    tree.proposals.draw_N[:] = int(Draw.WITH_REPLACEMENT)
    tree.proposals.row_N[:] = 0
    return tree


def dropped(drawn: TokenTree, tree: TokenTree) -> TokenTree:
    """A draw that gives way where it differs from the guess: growth that looks at the value."""
    is_same = drawn.tokens[1] == FOUND[0].item[1]
    return drawn if is_same else TokenTree(chain(1), torch.tensor([drawn.tokens[0], FOUND[0].item[1]]))


@pytest.mark.parametrize(("rule", "draft", "mistake"), [("specinfer", "good", as_drawn), ("sequoia", "bad", dropped)])
def test_planted_mistakes_are_caught(
    rule: str, draft: str, mistake: Callable[[TokenTree, TokenTree], TokenTree]
) -> None:
    assert p_of_grafted(rule, "chain", draft, mistake) < 1e-6
