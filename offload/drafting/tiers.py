"""Tiers of drafting: a copy of the target verifies a cheap source's guesses in its own passes.

The source is what the text says (`guesses_behind`), or a smaller model as well (`scouting.py`).

A copy is right so often that its trees are deep, and each level would take a pass over its weights.
So each pass also scores the source's guesses below the nodes that it runs. Where the copy agrees,
those nodes are scored already, and the next pass begins below them. Both predict the same draw,
since noise belongs to a position, so nothing has to be corrected between tiers: a guess that the
copy finds unlikely wastes a row, no more.

Invariant: guesses change which rows a pass scores, never a row's scores.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from offload.drafting.lookup import Guesses, TrieCursor

# Rows of a pass that takes a copy less than 1.5 times as long as one row, as measured.
ROWS_OF_PASS = 8
# A guess is worth its row if its chance is at least that share of the likeliest node's.
_LEAST_SHARE = 0.1


class Standing(NamedTuple):
    """A node that a pass scores, and the guesses' cursor after it.

    Attributes:
        chance: that its path is accepted.
        depth: edges from the root.
        parent: index of its parent among the nodes of the pass; None for a picked one.
        path: its tokens, from below the root to its own.
        agreement: chance that the copy agrees with all guesses down to it.
    """

    chance: float
    depth: int
    cursor: TrieCursor
    token: int
    parent: int | None = None
    path: tuple[int, ...] = ()
    agreement: float = 1.0


class Scout(Protocol):
    """A smaller model that guesses behind what a copy's passes run."""

    def behind(
        self,
        guesses: Guesses,
        picked: Sequence[Standing],
        num_rows: int,
        depth: int,
        pass_s: Callable[[int], float],
    ) -> list[Standing]:
        """Return guesses worth their rows behind nodes that a pass runs anyway, parents first.

        Args:
            guesses: of other sources, which compete with its own.
            picked: these nodes.
            num_rows: of the whole pass, at most.
            depth: of the tree; what lies there has no child.
            pass_s: seconds that this many rows take the copy; 0 where that is not known.
        """


def guesses_behind(
    guesses: Guesses, picked: Sequence[Standing], num_rows: int, depth: int
) -> list[Standing]:
    """Return the likeliest guesses below nodes that a pass runs anyway, parents first.

    Args:
        picked: these nodes.
        num_rows: most rows of the whole pass.
        depth: of the tree; nodes at this depth have no children.
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
