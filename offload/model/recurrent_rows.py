"""How rows of a tree pass through a recurrent layer, in an order in which few states are held.

A row begins with the state that its parent ends with. Where the states of all rows are small they
go level by level, all rows of one depth in one step. Large ones go branch by branch, the heaviest
last: a state goes when its last child has begun, and of N rows at most log2(N) + 2 states are held.
Either way a row takes the same operations.

Rows are numbered as they were run; -1 is the state behind which all of them lie.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.kernels.gated_delta import BASE
from offload.memory.sizes import WIDE_STATES_BYTES
from offload.model.recurrences import GatedDelta, Inputs, Recurrence

# rows that take a step together, and the same as a tensor
Levels = list[tuple[list[int], Tensor]]


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
            if parent != BASE and parent not in found:
                found.add(parent)
                left.append(parent)
        return sorted(found, key=lambda row: (self._depths[row], row))

    def levels(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each depth together, the least first."""
        levels = defaultdict[int, list[int]](list)
        for row in rows:
            levels[self._depths[row]].append(row)
        return [levels[depth] for depth in sorted(levels)]

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


class TreeRows:
    """The rows of a tree from `first` on, as it is now: those that one pass runs."""

    def __init__(self, tree: RowTree, first: int) -> None:
        self.tree = tree
        self.first = first
        self.end = len(tree)
        self._levels = dict[torch.device, Levels]()
        self._places = dict[tuple[int, torch.device], Tensor]()

    def __len__(self) -> int:
        return self.end - self.first

    def places(self, num_taps: int, device: torch.device) -> Tensor:
        """See `previous_inputs`."""
        if (num_taps, device) not in self._places:
            places = previous_inputs(self.tree.parents, num_taps)[self.first : self.end]
            self._places[num_taps, device] = torch.from_numpy(places).to(device)
        return self._places[num_taps, device]

    def levels(self, device: torch.device) -> Levels:
        """See `RowTree.levels`; with rows of earlier passes where these need them."""
        if device not in self._levels:
            needed = self.tree.with_ancestors(range(self.first, self.end))
            found = self.tree.levels(needed)
            self._levels[device] = [(rows, torch.tensor(rows).to(device)) for rows in found]
        return self._levels[device]

    @cached_property
    def walk(self) -> Tensor:
        """See `RowTree.slots`; with rows of earlier passes where these need them."""
        needed = self.tree.with_ancestors(range(self.first, self.end))
        return torch.tensor(self.tree.slots(needed))


def scan_tree(recurrence: Recurrence, state: Tensor, known: Inputs, rows: TreeRows) -> Tensor:
    """Return outputs (T, ...) of the rows, by the inputs of all rows of the tree up to the last.

    `state` is the one behind which the tree lies.
    """
    if isinstance(recurrence, GatedDelta) and recurrence.walks(state):
        return recurrence.walk(state, known, rows.walk)[rows.first : rows.end]
    run = _branch_by_branch
    if known.num_rows * state.nbytes <= WIDE_STATES_BYTES:
        run = _level_by_level
    return run(recurrence, state, known, rows)[rows.first : rows.end]


def _level_by_level(recurrence: Recurrence, base: Tensor, inputs: Inputs, tree: TreeRows) -> Tensor:
    """Return the outputs of all rows; those of a level take one step together."""
    parents = tree.tree.parents
    outs = list[tuple[Tensor, Tensor]]()
    rows_before = [BASE]
    before = base
    for rows, row_W in tree.levels(base.device):
        place = {row: index for index, row in enumerate(rows_before)}
        chosen = torch.tensor([place[parents[row]] for row in rows]).to(base.device)
        # the level before goes now, so that two are held and not three
        before = before[chosen]
        out, before = recurrence.step(before, inputs.part(row_W))
        outs.append((row_W, out))
        rows_before = rows
    return _in_place(outs, inputs.num_rows)


def _branch_by_branch(
    recurrence: Recurrence, base: Tensor, inputs: Inputs, tree: TreeRows
) -> Tensor:
    """Return the outputs of all rows, one by one."""
    outs = list[tuple[slice, Tensor]]()
    states = {BASE: base}
    for row, source, target in tree.walk.tolist():
        own = slice(row, row + 1)
        out, states[target] = recurrence.step(states[source], inputs.part(own))
        outs.append((own, out))
    return _in_place(outs, inputs.num_rows)


def _in_place(outs: Sequence[tuple[Tensor | slice, Tensor]], num_rows: int) -> Tensor:
    """Return outputs (T, ...), each where its row is; zeros for rows that did not run."""
    first = outs[0][1]
    whole = first.new_zeros(num_rows, *first.shape[1:])
    for row_W, out in outs:
        whole[row_W] = out
    return whole
