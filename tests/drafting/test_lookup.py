"""Trees of guesses alone: as many as pay, in any shape, and nothing where nothing is known."""

import pytest

from offload.drafting.lookup import Copying, GuessSources, LookupDrafter, PassSeconds
from offload.sampling.sampler import Sampler
from offload.trees.spec import MatchLength
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, Shape, chain, k_ary, sequences
from offload.trees.verification import find_rule
from offload.units import RULES, Sampling

REPEATED = [3, 1, 4, 1, 5, 9, 2, 6, 7, 8] * 3
BRANCHING = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 1, 2]


def grown(shape: Shape, tokens: list[int], pass_s: PassSeconds = lambda _: 1.0) -> TokenTree:
    drafter = LookupDrafter(GuessSources([Copying(MatchLength(2, 16))]), pass_s)
    return drafter.grow(shape, tokens, Sampler(Sampling(), 16), drafter.new_state()).tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    found = [()]
    for node in range(1, tree.num_nodes):
        found.append((*found[int(tree.topology.parent_N[node])], tree.tokens[node]))
    return set(found)


def test_a_text_that_repeats_is_foretold() -> None:
    tree = grown(DynamicShape(9, 8), REPEATED)
    assert tree.topology == chain(8) and tree.tokens == [8, 3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("shape", [DynamicShape(32, 8), chain(4), k_ary(2, 15)])
def test_where_nothing_is_known_is_the_root_alone(shape: Shape) -> None:
    assert grown(shape, list(range(12))).topology == chain(0)


@pytest.mark.parametrize("shape", [chain(3), k_ary(2, 15), sequences(2, 3), DynamicShape(6, 4)])
def test_a_shape_is_filled_as_far_as_guesses_reach(shape: Shape) -> None:
    """The likelier continuation stands first, and no node is where the shape has none."""
    tree = grown(shape, BRANCHING)
    assert (
        {(3,), (3, 0)} <= paths(tree) and 1 < tree.num_nodes <= shape.num_nodes and tree.topology.depth <= shape.depth
    )
    assert ((4,) in paths(tree)) == (shape != chain(3))
    assert tree.tokens[1] == 3, "twice as often as the other"


def test_no_more_than_pays() -> None:
    """Seconds against rows: free, in proportion, and a step after which they are free again."""
    whole = grown(DynamicShape(64, 16), REPEATED).num_nodes
    assert whole == 17
    assert grown(DynamicShape(64, 16), REPEATED, lambda rows: float(rows)).num_nodes == 1
    assert grown(DynamicShape(64, 16), REPEATED, lambda rows: 1.0 + (rows > 5)).num_nodes == 5
    assert grown(DynamicShape(64, 16), REPEATED, lambda rows: 1.0 + 9 * (rows > 5)).num_nodes == 5


def test_what_was_wrong_is_guessed_less() -> None:
    drafter = LookupDrafter(GuessSources([Copying(MatchLength(2, 16))]), lambda rows: 1 + 0.2 * rows)
    state, sampler = drafter.new_state(), Sampler(Sampling(), 16)
    sizes = []
    for _ in range(40):
        drafted = drafter.grow(DynamicShape(64, 16), REPEATED, sampler, state)
        sizes.append(drafted.tree.num_nodes)
        drafter.commit(drafted, [0], [15], sampler, state)
    assert sizes[0] > 4 and sizes[-1] == 1
    warm = Sampler(Sampling(temperature=1.0), 16)
    assert drafter.grow(DynamicShape(64, 16), REPEATED, warm, state).tree.num_nodes == sizes[0], "learned by itself"


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_sees_point_masses(rule: str) -> None:
    drafter, sampler = (
        LookupDrafter(GuessSources([Copying(MatchLength(2, 16))]), lambda _: 1.0),
        Sampler(Sampling(), 16),
    )
    tree = drafter.grow(DynamicShape(8, 4), BRANCHING, sampler, drafter.new_state()).tree
    assert tree.proposals is None and find_rule(rule) and all(offer.probs_V is None for offer in tree.offers(0))
