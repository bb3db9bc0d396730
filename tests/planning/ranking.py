"""All trees of one search, the best first, as `search` ranks them."""

from collections.abc import Callable
from typing import Any

from offload.planning.cost_model import Costs, Prediction, Traffic
from offload.planning.search import TreeSearch, search


def rank_trees(
    trees: TreeSearch, costs: Costs, traffic_of: Callable[[int], Traffic | None], **how: Any
) -> list[Prediction]:
    return search(lambda _: trees, trees.max_nodes, costs, traffic_of, **how)[1]
