"""Nodes in the order of their chances: the first so many that are no deeper than a bound are the tree of that size.

One order has the trees of every size and depth. What they yield is read off the order itself, so that hundreds of them
are compared without any being built. No torch, no clock. O nodes of the order.
"""

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from offload.planning.traces import Trace, cut_order
from offload.tree.topology import Floats, Found, Ints, Topology, tree_of


class TreeOrder:
    """Trees of all sizes and depths; parents and elder siblings come first."""

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found
        self._depth_O = np.array([node.depth for node in found])
        self._place = cache(self._placed)
        self._sums = cache(self._summed)
        self._place_list = cache(lambda depth: self._place(depth).tolist())  # which single look-ups read faster

    def tree(self, num_nodes: int, depth: int) -> Topology:
        """That of `num_nodes` nodes and at most `depth` draft steps; of fewer nodes where there are not as many."""
        return tree_of(cut_order(self._found, num_nodes, depth))

    def num_nodes(self, depth: int) -> int:
        """How many there are no deeper than that."""
        return len(self._sums(depth))

    def depth_of(self, num_nodes: int, depth: int) -> int:
        """Of the tree of that size, which may be less deep than it might be."""
        return int(self._depth_O[self._place(depth) < num_nodes].max())

    def expected(self, num_nodes: int, depth: int) -> float:
        """Tokens that a sweep over this tree yields if its nodes have the chances that they are ordered by."""
        sums = self._sums(depth)
        return float(sums[min(num_nodes, len(sums)) - 1])

    def bursts(self, num_nodes: int, depth: int, trace: Trace) -> list[int]:
        """New tokens of every sweep over this tree of a run that emits this text, as `traces.bursts` has them."""
        place, children = self._place_list(depth), self._children
        yields, node, num_accepted = list[int](), 0, 0
        for rank in trace:
            num_accepted += 1
            child = children[node].get(rank)
            if child is not None and place[child] < num_nodes:
                node = child
            else:
                yields.append(num_accepted)
                node = num_accepted = 0
        return [*yields, num_accepted] if num_accepted else yields

    def _placed(self, depth: int) -> Ints:
        """(O,) which one of those no deeper a node is; of those that are deeper none."""
        is_in_O = self._depth_O <= depth
        return np.where(is_in_O, np.cumsum(is_in_O) - 1, len(is_in_O))

    def _summed(self, depth: int) -> Floats:
        """Chances of nodes no deeper, added up in their order."""
        return np.cumsum([node.score for node in self._found if node.depth <= depth])

    @cached_property
    def _children(self) -> list[dict[int, int]]:
        """Of every node those below it, by rank."""
        children: list[dict[int, int]] = [{} for _ in self._found]
        for index, node in enumerate(self._found[1:], start=1):
            children[node.parent][node.rank] = index
        return children
