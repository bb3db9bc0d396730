"""Schedules for growing a tree: how many nodes each draft pass adds; no numpy, for plans."""

import math
from typing import NamedTuple

# rows per node, those that are run in vain included
_ROOM = 1.25
# rows of one draft pass: the most that a device replays from a recording, and no longer free on any
_MOST_ROWS = 128


class GrowthSchedule(NamedTuple):
    """How many rows each draft pass runs while a dynamic tree of N nodes grows.

    Large passes are few, and run a few more rows in vain: rows that children of the same pass would
    have ousted. Trees of every pace are worth the same; which pace is fastest depends on what a
    pass costs here, see `planning.cost_model.paced`. Passes and rows are as counted on the packaged
    pair. A draft's cache has room for the rows of any pace, so that one may be chosen after memory
    is planned.
    """

    # a pass runs at most N / num_parts rows
    num_parts: int
    # passes beyond the number of binary digits of N; a tree is about as deep as N has digits
    more_passes: int
    # rows that are run, as a share of N
    rows_share: float

    def rows_per_pass(self, num_nodes: int) -> int:
        """Return the most rows of one pass for a tree of `num_nodes`."""
        return min(_MOST_ROWS, max(1, num_nodes // self.num_parts))

    def widths(self, num_nodes: int, least_passes: int = 0) -> list[int]:
        """Return the expected rows of every pass behind the root's, at least `least_passes`."""
        num_rows = self.rows_share * num_nodes
        num_passes = max(
            num_nodes.bit_length() + self.more_passes,
            math.ceil(num_rows / self.rows_per_pass(num_nodes)),
        )
        num_passes = max(num_passes, least_passes)
        return [max(1, round(num_rows / num_passes))] * min(num_nodes - 2, num_passes)


# the first is used where costs are not known
PACES = (GrowthSchedule(4, 2, 1.1), GrowthSchedule(8, 4, 1.03))


def most_rows(num_nodes: int) -> int:
    """Return the rows, root included, that growing a tree of `num_nodes` runs at most."""
    return int(_ROOM * num_nodes)
