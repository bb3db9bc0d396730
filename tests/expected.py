"""What a tree yields by the product form, summed up node by node; and all trees that a search ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offload.planning.cost_model import Costs, Prediction, Traffic
from offload.planning.search import SearchTerms, TreeSearch, search
from offload.trees.topology import AcceptanceVector, Topology, check_acceptance, path_chances


def expected_tokens(topology: Topology, p: AcceptanceVector) -> float:
    """F(T), the tokens that one pass over the tree is expected to commit (Sequoia, Prop. 3.4), the bonus token too."""
    return float(path_chances(topology, check_acceptance(p)).sum())


def rank_trees(
    trees: TreeSearch, costs: Costs, traffic_of: Callable[[int], Traffic | None], **options: Any
) -> list[Prediction]:
    """All trees of one search, the best first, as `search` ranks them."""
    return search(lambda _: trees, trees.max_nodes, SearchTerms(costs, traffic_of, **options))[1]


def passes_of(topology: Topology, ranks: Sequence[int]) -> list[int]:
    """The new tokens of every pass of a run that emits a text with these accepted ranks; the end cuts the last."""
    first = 1 + np.cumsum([0, *topology.num_children_N])  # siblings are consecutive
    tokens, node, num_accepted = list[int](), 0, 0
    for rank in ranks:
        num_accepted += 1
        if 0 <= rank < topology.num_children_N[node]:
            node = int(first[node]) + rank
        else:
            tokens.append(num_accepted)
            node = num_accepted = 0
    return [*tokens, num_accepted] if num_accepted else tokens
