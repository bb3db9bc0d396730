"""MTP layers that a target's files carry: scores are the library's, the text is that of no draft."""

from typing import Any

import pytest
from carried_models import CONFIGS, carrying, path_scores

from offload import load
from offload.drafting.base import DraftText
from offload.engine.decoder import Decoder
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape

PROMPT = [1, 5, 9, 5, 9, 7, 3, 5, 9, 11]
FAMILIES = [*CONFIGS]
HOT = {"temperature": 0.7, "seed": 5}


def opened(family: str, draft: str | None = "mtp", **more: Any) -> Decoder:
    return load(carrying(family)[0], draft, dtype="float32", **more)


def gap(family: str, decoder: Decoder, num_steps: int = 3) -> float:
    """Return how far the scores of trees are from those of chains by the library, over some steps of one text."""
    text = decoder.begin(PROMPT, Sampling(), shape=DynamicShape(12, 3))
    decoder.step(text)
    worst = 0.0
    for _ in range(num_steps):
        decoder.step(text)
        text.recover()
        shape = DynamicShape(12, 3)
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, text.caches.draft)])
        assert tree.num_nodes > 4
        for node, score_V in tree.score_of_node.items():
            wanted_V = path_scores(family, text.tokens, tree.path(node))
            worst = max(worst, float((score_V - wanted_V).abs().max()))
        text.caches.draft.commit([])
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_has_the_scores_of_the_librarys_own_layer_along_each_path(family: str) -> None:
    """Steps between are right, wrong and partly right; after each, the draft is as if all were run at once."""
    with opened(family, tree="dynamic:12x3") as decoder:
        assert gap(family, decoder) < 1e-4
