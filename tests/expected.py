"""What a tree yields by the product form, summed up node by node; and all trees that a search ranks."""

from collections.abc import Callable
from typing import Any

from offload.planning.cost_model import Costs, Prediction, Traffic
from offload.planning.search import TreeSearch, search
from offload.trees.topology import AcceptanceVector, Topology, check_acceptance, path_chances


def expected_tokens(topology: Topology, p: AcceptanceVector) -> float:
    """F(T), the tokens that one pass over the tree is expected to commit (Sequoia, Prop. 3.4), the bonus token too."""
    return float(path_chances(topology, check_acceptance(p)).sum())


def rank_trees(
    trees: TreeSearch, costs: Costs, traffic_of: Callable[[int], Traffic | None], **options: Any
) -> list[Prediction]:
    """All trees of one search, the best first, as `search` ranks them."""
    return search(lambda _: trees, trees.max_nodes, costs, traffic_of, **options)[1]
