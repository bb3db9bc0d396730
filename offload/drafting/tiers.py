"""Tiers of drafting: what a cheap source guesses, a copy of the target verifies in its own passes.

A copy is right so often that its trees are deep, and each level would take a pass over its weights.
So each pass also scores what the source says behind the nodes that it runs: where the copy agrees, those
nodes are there already, and the next pass begins behind them. Both predict the same draw, since the
noise belongs to a position, so nothing has to be corrected between tiers: a guess that the copy finds
unlikely is a row in vain and no more.

Invariant: guesses change which rows a pass scores, never what a row's scores are.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from offload.drafting.lookup import Guesses, TrieCursor

# Rows of a pass that a copy takes for less than half as long again as one row, as was measured.
ROWS_OF_PASS = 8
# A guess is worth its row where its chance is at least that share of the likeliest node's.
_LEAST_SHARE = 0.1


class Standing(NamedTuple):
    """A node that a pass scores, and where guesses stand for what follows it.

    Attributes:
        chance: of its path to be accepted.
        depth: edges from the root.
        parent: the index of its parent among the nodes of the pass; None for one that was picked.
    """

    chance: float
    depth: int
    cursor: TrieCursor
    token: int
    parent: int | None = None


def guesses_behind(
    guesses: Guesses, picked: Sequence[Standing], num_rows: int, depth: int
) -> list[Standing]:
    """Return the likeliest guesses behind nodes that a pass runs anyway, parents first.

    Args:
        picked: these nodes.
        num_rows: of the whole pass, at most.
        depth: of the tree; what lies there has no child.
    """
    nodes = [*picked]
    least = _LEAST_SHARE * max((node.chance for node in picked), default=0.0)
    order = count()
    heap: list[tuple[float, int, Standing]] = []

    def look_behind(index: int) -> None:
        node = nodes[index]
        # a leaf need not be scored
        if node.depth + 1 >= depth:
            return
        for token, share in guesses.children(node.cursor)[0].items():
            chance = node.chance * share
            if chance > least:
                cursor = guesses.follow(node.cursor, token)
                behind = Standing(chance, node.depth + 1, cursor, token, index)
                heapq.heappush(heap, (-chance, next(order), behind))

    for index in range(len(picked)):
        look_behind(index)
    while heap and len(nodes) < num_rows:
        nodes.append(heapq.heappop(heap)[2])
        look_behind(len(nodes) - 1)
    return nodes[len(picked) :]
