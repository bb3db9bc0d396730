"""The order in which rows of a tree pass through a recurrent layer, so that few states are held.

A row begins with the state that its parent ends with. Where the states of all rows are small they
go level by level, all rows of one depth in one step. Large ones go branch by branch, the heaviest
last: a state goes when its last child has begun, and of N rows at most log2(N) + 2 states are held.
Either way a row takes the same operations.

Rows are numbered as they were run; -1 is the state behind which all of them lie.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.kernels.gated_delta import BASE

_DEAD = -2  # a row whose parent was dropped


class RowTree:
    """The rows that were run since the state that is their base, in that order.

    Attributes:
        parents: of each row, an earlier one or `BASE`.
    """

    def __init__(self) -> None:
        self.parents = list[int]()
        self._depths = list[int]()

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, sees_TU: NDArray[np.bool_]) -> None:
        """Append T rows; `sees_TU` tells which of U rows lie on each path, its row included."""
        if not len(sees_TU):
            return
        depth_T = sees_TU.sum(1)
        self._depths += (int(depth) - 1 for depth in depth_T)
        depth_U = np.array(self._depths)
        assert sees_TU.shape[1] == len(depth_U), "earlier rows are those that are there"
        is_parent_TU = sees_TU & (depth_U == (depth_T - 2)[:, None])
        found_T = np.where(is_parent_TU.any(1), is_parent_TU.argmax(1), BASE)
        assert ((found_T == BASE) == (depth_T == 1)).all(), "a row sees its parent"
        self.parents += found_T.tolist()

    def keep(self, path: Sequence[int], kept: Sequence[int]) -> None:
        """Let the base be the state behind `path`, with the rows `kept` behind it; others die."""
        number = {row: index for index, row in enumerate(kept)}
        number[path[-1] if path else BASE] = BASE
        self.parents = [number.get(self.parents[row], _DEAD) for row in kept]
        self._depths = [self._depths[row] - len(path) for row in kept]

    def check(self, path: Sequence[int]) -> None:
        """Check that each row of a path is a child of the one before."""
        befores = [BASE, *path[:-1]]
        is_path = [self.parents[row] for row in path] == befores[: len(path)]
        assert is_path, "a path follows the tree"

    def with_ancestors(self, rows: Collection[int]) -> list[int]:
        """Return these rows and all above them, parents first."""
        found = set(rows)
        left = list(rows)
        while left:
            parent = self.parents[left.pop()]
            assert parent != _DEAD, "a branch that was dropped"
            if parent != BASE and parent not in found:
                found.add(parent)
                left.append(parent)
        return sorted(found, key=lambda row: (self._depths[row], row))

    def steps(self, rows: Sequence[int], *, is_wide: bool) -> Iterator[list[int]]:
        """Yield rows behind their parents: one depth together where `is_wide`, else one by one."""
        if not is_wide:
            yield from ([row] for row in _by_branches(rows, self.parents))
            return
        levels = defaultdict[int, list[int]](list)
        for row in rows:
            levels[self._depths[row]].append(row)
        yield from (levels[depth] for depth in sorted(levels))

    def slots(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the rows branch by branch, each with the slot of the state before it and its own.

        Before the first ones it is `BASE`. A slot is free when the last child has begun, so that
        child may write over it.
        """
        waiting = Counter(self.parents[row] for row in rows)
        slots = {BASE: BASE}
        free = list[int]()
        num_slots = 0
        found = []
        for row in _by_branches(rows, self.parents):
            parent = self.parents[row]
            source = slots[parent]
            waiting[parent] -= 1
            if not waiting[parent] and parent != BASE:
                free.append(source)
            if not free:
                free.append(num_slots)
                num_slots += 1
            target = free.pop()
            found.append((row, source, target))
            if waiting[row]:
                slots[row] = target
            else:
                free.append(target)
        return found


def _by_branches(rows: Sequence[int], parents: Sequence[int]) -> Iterator[int]:
    """Yield rows, which have parents first, in preorder, the child with most below it last."""
    weights = dict.fromkeys(rows, 1)
    children = defaultdict[int, list[int]](list)
    for row in reversed(rows):
        parent = parents[row]
        children[parent].append(row)
        if parent != BASE:
            weights[parent] += weights[row]
    stack = [BASE]
    while stack:
        row = stack.pop()
        if row != BASE:
            yield row
        # the last of them is popped first
        stack += sorted(children[row], key=lambda child: -weights[child])


def previous_inputs(parents: Sequence[int], num_taps: int) -> NDArray[np.int64]:
    """Return what a convolution of so many taps sees, (U, taps), the row itself last.

    These are places in the last taps - 1 inputs of the base, then in those of rows; the oldest
    comes first.
    """
    num_before = num_taps - 1
    place_U = np.arange(len(parents)) + num_before
    before = np.maximum(np.arange(num_before + len(parents)) - 1, 0)
    for row, parent in enumerate(parents):
        before[num_before + row] = max(num_before + parent, 0)
    places = [place_U]
    for _ in range(num_before):
        places.insert(0, before[places[0]])
    return np.stack(places, 1)
