"""Selectors of trees for made-up machines, and what is known of them."""

from typing import Any

from offload.engine.run_trees import TreeSelector
from offload.planning.choice import TrafficOf, TreeRoom
from offload.planning.cost_model import Traffic
from offload.planning.knowledge import UNKNOWN_LINK, Knowledge, LinkRate, Provenance
from offload.planning.profile import FindProfile, Profile
from offload.trees.spec import MAX_TREE_NODES, parse_tree

NOTHING_MOVES = Traffic(0, 0)


def no_profile(*_: object) -> tuple[Profile | None, str]:
    return None, "none here"


def known_of(link: float | None = None, **options: Any) -> Knowledge:
    return Knowledge(link=LinkRate(link, Provenance.MEASURED) if link else UNKNOWN_LINK, **options)


def selector(
    tree: str = "auto", traffic: TrafficOf | Traffic = NOTHING_MOVES, *, find: FindProfile = no_profile,
    max_nodes: int = MAX_TREE_NODES, context: int | None = None, parallel: int = 1, **known: Any,
) -> TreeSelector:  # fmt: skip
    traffic_of = (lambda _: traffic) if isinstance(traffic, Traffic) else traffic
    return TreeSelector(parse_tree(tree), known_of(**known), TreeRoom(traffic_of, max_nodes, context, parallel), find)
