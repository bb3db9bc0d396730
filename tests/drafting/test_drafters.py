"""Drafters of the registry keep to what a decoder asks of one; trees of guesses alone have as many nodes as pay."""

from pathlib import Path
from typing import Any

import pytest
from test_dynamic import path_of
from tiny import FAMILIES, VOCAB_SIZE, save_pair

from offload.checkpoint.safetensors import open_checkpoint
from offload.drafting.base import DraftText
from offload.drafting.hybrid import drafter_of
from offload.drafting.lookup import Copying, GuessSources, LookupDrafter, PassSeconds
from offload.engine.build import resident_model
from offload.kernels.registry import REFERENCES
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.spec import MatchLength
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, Shape, chain, k_ary, sequences

REPEATED = [3, 1, 4, 1, 5, 9, 2, 6, 7, 8] * 3
BRANCHING = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 1, 2]


def lookup(pass_s: PassSeconds = lambda _: 1.0) -> LookupDrafter:
    return LookupDrafter(GuessSources([Copying(MatchLength(2, 16))]), pass_s)


def grown(shape: Shape, tokens: list[int], pass_s: PassSeconds = lambda _: 1.0) -> TokenTree:
    drafter = lookup(pass_s)
    return drafter.grow([DraftText(shape, tokens, Sampler(Sampling(), 16), drafter.new_state())])[0].tree


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


def test_no_more_than_pays() -> None:
    """Seconds against rows: free, in proportion, and a step after which they are free again."""
    shape = DynamicShape(64, 16)
    prices: list[PassSeconds] = [lambda _: 1.0, float, lambda rows: 1.0 + (rows > 5), lambda rows: 1.0 + 9 * (rows > 5)]
    assert [grown(shape, REPEATED, pass_s).num_nodes for pass_s in prices] == [17, 1, 5, 5]


def test_what_was_wrong_is_guessed_less() -> None:
    drafter, sampler, sizes = lookup(lambda rows: 1 + 0.2 * rows), Sampler(Sampling(), 16), []
    state = drafter.new_state()
    for _ in range(40):
        drafted = drafter.grow([DraftText(DynamicShape(64, 16), REPEATED, sampler, state)])[0]
        sizes.append(drafted.tree.num_nodes)
        drafter.commit(drafted, [0], [15], sampler, state)
    assert sizes[0] > 4 and sizes[-1] == 1
    warm = Sampler(Sampling(temperature=1.0), 16)
    (drafted,) = drafter.grow([DraftText(DynamicShape(64, 16), REPEATED, warm, state)])
    assert drafted.tree.num_nodes == sizes[0], "learned by itself"


def test_every_rule_sees_point_masses() -> None:
    """Whatever the rule, for none of them asks guesses for a distribution."""
    tree = grown(DynamicShape(8, 4), BRANCHING)
    assert tree.proposals is None and all(offer.probs_V is None for offer in tree.offers(0))


PROMPT = [7, 11, 9, 5, 7, 11, 3, 7, 11]


@pytest.mark.parametrize("has_sources", [False, True])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_drafter_keeps_a_text_in_its_state_alone(has_draft: bool, has_sources: bool, tmp_path: Path) -> None:
    """Two texts at once: what it proposes for one does not depend on the other."""
    model = resident_model(open_checkpoint(save_pair(FAMILIES["llama"](), tmp_path)[1]), "float32")
    sources = GuessSources([Copying(MatchLength(1, 8))] if has_sources else [])
    draft = model if has_draft else None
    drafter = drafter_of(draft, VOCAB_SIZE, 64, REFERENCES, sources, lambda *_: 1.0)
    sampler, shape = Sampler(Sampling(), VOCAB_SIZE), k_ary(2, 7) if (has_draft or has_sources) else chain(0)
    one, other, fresh = (drafter.new_state() for _ in range(3))

    def proposed(text: list[int], state: Any) -> list[int]:
        return drafter.grow([DraftText(shape, text, sampler, state)])[0].tree.tokens

    first = drafter.grow([DraftText(shape, PROMPT, sampler, one)])[0]
    proposed([5, 6, 7, 8], other)
    drafter.commit(first, [0], [9], sampler, one)
    again = proposed([*PROMPT, 9], one)
    assert again == proposed([*PROMPT, 9], fresh)
    assert again[0] == 9 and (len(again) > 1) == (has_draft or has_sources)
    one.clear()
    # compared with a fresh state, since a drafter has learned from what was committed
    assert proposed(PROMPT, one) == proposed(PROMPT, drafter.new_state())
    model.close()
