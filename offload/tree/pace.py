"""How many rows a draft pass runs while a dynamic tree grows: large passes are few, and run a few more rows in vain.

In vain is a row that children of the same pass would have ousted. Trees of every pace are worth the same; which pace is
fastest is a matter of what a pass costs here, see `planning.cost_model.paced`. Invariant: the cache of a draft has room
for the rows of any pace, so that one may be chosen after memory is planned.
"""

import math
from typing import NamedTuple

_ROOM = 1.25  # rows for every node, those that are run in vain included
_MOST_ROWS = 128  # of one pass: the most that a device replays from a recording, and no longer free on any


class Pace(NamedTuple):
    """One way to divide the growth of a tree of N nodes; passes and rows as counted on the packaged pair."""

    num_parts: int  # a pass runs N over so many rows, at most
    more_passes: int  # than the N have binary digits: a tree is about as deep as these are many
    rows_share: float  # of N: rows that are run

    def rows_per_pass(self, num_nodes: int) -> int:
        """At most, of a tree with so many nodes."""
        return min(_MOST_ROWS, max(1, num_nodes // self.num_parts))

    def widths(self, num_nodes: int, least_passes: int = 0) -> list[int]:
        """Rows of every pass behind the root's, as many as are expected: `least_passes` or more."""
        num_rows = self.rows_share * num_nodes
        num_passes = max(num_nodes.bit_length() + self.more_passes, math.ceil(num_rows / self.rows_per_pass(num_nodes)))
        num_passes = max(num_passes, least_passes)
        return [max(1, round(num_rows / num_passes))] * min(num_nodes - 2, num_passes)


PACES = (Pace(4, 2, 1.1), Pace(8, 4, 1.03))  # the first where nothing is known of costs


def most_rows(num_nodes: int) -> int:
    """Rows, the root included, after which the growth of a tree of so many nodes ends at any pace."""
    return int(_ROOM * num_nodes)
