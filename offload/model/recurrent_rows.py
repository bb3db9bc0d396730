"""The order in which a tree's rows pass through a recurrent layer, so that few states are alive.

A row starts from its parent's state. If all rows' states together are small, rows go level by
level, those of one depth in one step. Large states go branch by branch, the heaviest last: a state
is dropped when its last child has started, and of N rows at most log2(N) + 2 states are alive.
Either way a row takes the same operations.

Rows are numbered in the order in which they were run; -1 is the state before all of them.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.kernels.gated_delta import AFTER, BASE
from offload.memory.sizes import WIDE_STATES_BYTES
from offload.model.mixers.base import Inputs, Recurrence, Steps, joined


class Levels(NamedTuple):
    """Rows level by level, as `_level_by_level` needs them."""

    order_R: Tensor  # the rows, the least deep first
    sizes: list[int]  # of levels
    # for each level, where its parents are in the one before; None where they are all of it
    parents: list[Tensor | None]
    back_T: Tensor  # where the rows of the pass are in that order


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
        """Append T rows; `sees_TU` is True for the U rows on each path, its own row included."""
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
        rows_above = set(rows)
        left = list(rows)
        while left:
            parent = self.parents[left.pop()]
            if parent != BASE and parent not in rows_above:
                rows_above.add(parent)
                left.append(parent)
        return sorted(rows_above, key=lambda row: (self._depths[row], row))

    def levels(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each depth together, the least first."""
        levels = defaultdict[int, list[int]](list)
        for row in rows:
            levels[self._depths[row]].append(row)
        return [levels[depth] for depth in sorted(levels)]

    def slots(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (row, source, target) for each row, branch by branch: slots of two states.

        `source` has the state before the row, `BASE` for rows without a parent; `target` gets the
        state after it. A slot is free once the last child of its row begins, so that this child may
        write over it.
        """
        waiting = Counter(self.parents[row] for row in rows)
        slots = {BASE: BASE}
        free = list[int]()
        num_slots = 0
        moves = []
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
            moves.append((row, source, target))
            if waiting[row]:
                slots[row] = target
            else:
                free.append(target)
        return moves


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
    """Return the rows that a convolution of `num_taps` taps sees, (taps, U), the row itself last.

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
    return np.stack(places)


class TreeRows:
    """The rows of a tree from `first` on, as it is now: those that one pass runs.

    A chain of `num_certain` rows may stand before all of them, in the same pass.
    """

    def __init__(self, tree: RowTree, first: int, num_certain: int = 0) -> None:
        self.tree = tree
        self.first = first
        self.end = len(tree)
        self.num_certain = num_certain
        assert not (first and num_certain), "what is certain stands before all that is not"
        self._levels = dict[torch.device, Levels]()
        self._places = dict[tuple[int, torch.device], Tensor | None]()
        self._steps = dict[bool, Steps]()

    def __len__(self) -> int:
        return self.end - self.first

    def places(self, num_taps: int, device: torch.device) -> Tensor | None:
        """Return the rows that a convolution sees, (taps, T), as `previous_inputs`; None for a chain.

        Rows of earlier passes lie before those of this one.
        """
        key = (num_taps, device)
        if key not in self._places:
            last = self.num_certain - 1
            parents = [*range(-1, last)]
            # a part that is laid behind this one may have added rows since
            tree_parents = self.tree.parents[: self.end]
            parents += [last if parent == BASE else parent + last + 1 for parent in tree_parents]
            if parents == [*range(-1, len(parents) - 1)]:
                self._places[key] = None
            else:
                places = previous_inputs(parents, num_taps)[:, self.first :]
                self._places[key] = torch.from_numpy(places.copy()).to(device)
        return self._places[key]

    def levels(self, device: torch.device) -> Levels:
        """See `RowTree.levels`; with rows of earlier passes where these need them."""
        if device not in self._levels:
            rows = self.tree.with_ancestors(range(self.first, self.end))
            parents = list[Tensor | None]()
            before = [BASE]
            levels = self.tree.levels(rows)
            for level in levels:
                place = {row: index for index, row in enumerate(before)}
                chosen = [place[self.tree.parents[row]] for row in level]
                is_all = chosen == [*range(len(before))] or before == [BASE]
                parents.append(None if is_all else torch.tensor(chosen).to(device))
                before = level
            order = [row for level in levels for row in level]
            index_of = {row: index for index, row in enumerate(order)}
            back = [index_of[row] for row in range(self.first, self.end)]
            order_R, back_T = (torch.tensor(places).to(device) for places in (order, back))
            self._levels[device] = Levels(order_R, [*map(len, levels)], parents, back_T)
        return self._levels[device]

    def steps(self, *, with_certain: bool = True) -> Steps:
        """Return the steps of all rows, see `RowTree.slots`, with rows of earlier passes.

        What is certain leaves its states in `AFTER`; without it that is the base of the tree.
        """
        num_certain = self.num_certain if with_certain else 0
        if with_certain not in self._steps:
            rows = self.tree.with_ancestors(range(self.first, self.end))
            chain = [(row, AFTER if row else BASE, AFTER) for row in range(num_certain)]
            root = AFTER if num_certain else BASE
            slots = [
                (row + num_certain, root if source == BASE else source, target)
                for row, source, target in self.tree.slots(rows)
            ]
            self._steps[with_certain] = Steps.from_rows(chain + slots)
        return self._steps[with_certain]


def scan_tree(recurrence: Recurrence, state: Tensor, known: Inputs, rows: TreeRows) -> Tensor:
    """Return outputs (T, ...) of the rows, by the inputs of all rows of the tree up to the last.

    `state` is the one behind which the tree lies.
    """
    if recurrence.walks(state.device):
        steps = rows.steps(with_certain=False)
        return recurrence.walk(state, known, steps)[0][rows.first : rows.end]
    if known.num_rows * state.nbytes <= WIDE_STATES_BYTES:
        return _level_by_level(recurrence, state, known, rows)
    return _branch_by_branch(recurrence, state, known, rows)[rows.first : rows.end]


def _level_by_level(recurrence: Recurrence, base: Tensor, inputs: Inputs, rows: TreeRows) -> Tensor:
    """Return the outputs of the rows; those of a level take one step together."""
    levels = rows.levels(base.device)
    if levels.sizes == [inputs.num_rows]:
        ready = recurrence.prepare(inputs)
        return recurrence.read(recurrence.advance(base, ready), ready)
    ready = recurrence.prepare(inputs.part(levels.order_R))
    parts = zip(*(row_R.split(levels.sizes) for row_R in ready.values()), strict=True)
    states = list[Tensor]()
    state = base
    for parent_W, values in zip(levels.parents, parts, strict=True):
        state = state if parent_W is None else state[parent_W]
        state = recurrence.advance(state, dict(zip(ready, values, strict=True)))
        states.append(state)
    return recurrence.read(joined(states), ready)[levels.back_T]


def _branch_by_branch(
    recurrence: Recurrence, base: Tensor, inputs: Inputs, rows: TreeRows
) -> Tensor:
    """Return the outputs of all rows, computed one by one; zeros for rows that did not run."""
    states = {BASE: base}
    whole = None
    for row, source, target in rows.steps(with_certain=False).step_R3.tolist():
        ready = recurrence.prepare(inputs.part(slice(row, row + 1)))
        state = states[target] = recurrence.advance(states[source], ready)
        out = recurrence.read(state, ready)
        whole = out.new_zeros(inputs.num_rows, *out.shape[1:]) if whole is None else whole
        whole[row] = out[0]
    assert whole is not None, "a tree has rows"
    return whole
