"""How many tokens a sweep yields where this pair of models was not measured: a range, from pairs that papers measured.

How well a draft knows its target stands in no header; its share of the target's weights is the best sign of it that
does. So large drafts get what large ones have yielded and small ones what small ones have, each figure beside what the
default acceptance expects of its tree, both less the one token that every sweep yields. Assumed: a draft of the same
family. No torch, no clock.
"""

from typing import NamedTuple

import numpy as np

from offload.planning.tree_search import Forest
from offload.tree.topology import DEFAULT_ACCEPTANCE

SOURCE = "arXiv 2402.12374"
_LARGE_SHARE = 1 / 16  # between the two groups


class MeasuredYield(NamedTuple):
    """One published figure, of a static tree and temperature 0 or 0.6."""

    pair: str
    share: float  # weights of the draft over those of the target
    num_nodes: int
    depth: int
    tokens_per_sweep: float


# Sequoia, Table 5 for the first pair, on C4, OpenWebText and CNN Daily; Tables 4 and 7, on C4, for the others.
_TABLE_5 = ((22, 12.18), (23, 10.12), (18, 9.83), (19, 9.05), (17, 10.46), (18, 9.58))
MEASURED = (
    *(MeasuredYield("Llama-2 70B with 7B", 0.098, 768, depth, tokens) for depth, tokens in _TABLE_5),
    MeasuredYield("Vicuna 33B with 1.3B", 0.039, 64, 6, 4.28),
    MeasuredYield("Llama-2 7B with 68M", 0.010, 128, 10, 5.08),
    MeasuredYield("Llama-2 7B with 68M", 0.010, 64, 10, 4.68),
    MeasuredYield("Llama-2 7B with 68M", 0.010, 128, 7, 3.92),
    MeasuredYield("Llama-2 13B with 68M", 0.005, 64, 9, 4.20),
)


class YieldRange(NamedTuple):
    """What to make of the tokens that the default acceptance expects."""

    low: float  # times the tokens beyond the first
    high: float
    pairs: tuple[str, ...]  # that it rests on

    def of(self, tokens_per_sweep: float) -> tuple[float, float]:
        """Least and most tokens per sweep."""
        return 1 + self.low * (tokens_per_sweep - 1), 1 + self.high * (tokens_per_sweep - 1)


def range_for(share: float) -> YieldRange:
    """For a draft with this share of the target's weights."""
    rows = [one for one in MEASURED if (one.share >= _LARGE_SHARE) == (share >= _LARGE_SHARE)]
    ratios = []
    for _, _, num_nodes, depth, tokens in rows:
        usual = Forest(np.array(DEFAULT_ACCEPTANCE), max_nodes=num_nodes, max_depth=depth).expected(num_nodes, depth)
        ratios.append((tokens - 1) / (usual - 1))
    return YieldRange(min(ratios), max(ratios), tuple(dict.fromkeys(one.pair for one in rows)))
