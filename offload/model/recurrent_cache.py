"""A cache with the states of recurrent and convolutional layers at a few positions of a text.

    [0, length)             in `_here`
    [length, length + C)    certain to be committed, in `_trunk`
    behind it               a tree, as inputs

A pass computes the states of its rows and drops them; for rows that may be rejected only the inputs
are kept, from which `commit` runs the accepted path again. Rows that are certain, such as a
prompt's, leave one state after the last of them. States are never overwritten, so a reference to
one stays valid. Invariant: a state is that of exactly the positions that its `length` says.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.model.kv_cache import KVCache, LayerStates
from offload.model.linear import Products
from offload.model.mixers.base import LEAST_CHUNK, Inputs, Recurrence, RowInputs, joined
from offload.model.recurrent_rows import RowTree, TreeRows, scan_tree

_CONVOLVED = "convolved"
# whose products with all taps are one operation; those of a prompt would take much memory at once
_FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class Point:
    """The states of all layers after the first `length` positions of a text; empty for 0."""

    length: int
    # (R, C): the last inputs of a layer's convolution
    tails: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)  # (1, ...)


class PassRows(NamedTuple):
    """The rows of one text in one pass: first those that are certain, then those of the tree."""

    tree: TreeRows
    # what layers hold before them, and what the certain rows leave
    base: Point
    behind: Point

    @property
    def num_certain(self) -> int:
        return self.tree.num_certain


class RecurrentCache(KVCache):
    """Keys and values, and states."""

    def __init__(self, num_layers: int, num_slots: int, *placement: Any) -> None:
        super().__init__(num_layers, num_slots, *placement)
        # behind what is committed, behind the prompt before it, and behind rows that are certain
        self._here = Point(0)
        self._mark = Point(0)
        # behind parts of prompts, until they are taken
        self._points = list[Point]()
        self._begin_anew()
        self._products: Products | None = None
        self._kept = dict[int, RowInputs]()
        self._num_taps = dict[int, int]()
        self._recurrences = dict[int, tuple[Recurrence, dict[str, Any]]]()

    def expect_rows(self, num_rows: int, *, keeps_others: bool = True) -> None:
        """See `KVCache`."""
        self._num_promised = num_rows
        self._keeps_open = keeps_others

    def take_rows(self, sees_TU: Tensor, products: Products | None) -> PassRows:
        """See `KVCache`."""
        num_rows, num_uncommitted = sees_TU.shape
        if num_rows == num_uncommitted:
            self._trunk = Point(0)
            self._passed = []
            self._num_certain = 0
            self._tree = RowTree()
        self._products = products
        num_before = self._num_certain
        base = self._trunk if num_before else self._here
        behind = self._trunk
        num_certain = 0
        if num_uncommitted - num_rows == num_before:  # no open row stands before them
            num_certain = max(0, min(self._num_promised, num_uncommitted) - num_before)
        if num_certain:
            if num_before:
                self._passed.append(self._trunk)
            self._num_certain = num_before + num_certain
            behind = self._trunk = Point(self.length + self._num_certain)
        elif not num_before:
            behind = base
        sees = sees_TU.cpu().numpy()
        assert sees[num_certain:, : self._num_certain].all(), "what is certain lies on every path"
        first = len(self._tree)
        self._tree.add(sees[num_certain:, self._num_certain :])
        return PassRows(TreeRows(self._tree, first, num_certain), base, behind)

    def convolve(
        self, layer: int, rows: PassRows, input_TC: Tensor, weight_CR: Tensor, bias_C: Tensor | None
    ) -> Tensor:
        """Return (T, C): rows with those before them on their paths, in float32, oldest first."""
        num_taps = weight_CR.shape[1]
        self._num_taps[layer] = num_taps
        tail = self._tail_of(rows.base, layer, input_TC)
        earlier = self._earlier(layer, _CONVOLVED, rows.tree)
        # [0, taps - 1) tail   then rows: of earlier passes, certain, of the tree
        source = torch.cat([tail, *earlier, input_TC])
        num_certain = rows.num_certain
        if num_certain:
            rows.behind.tails[layer] = source[num_certain : num_certain + num_taps - 1].clone()
        if rows.tree:
            self._keep(layer, {_CONVOLVED: source[num_taps - 1 + num_certain :]})
        places = rows.tree.places(num_taps, input_TC.device)
        wide = source.float()
        if places is None:
            chain = wide[len(source) - len(input_TC) - num_taps + 1 :]
            taps_RTC = chain.unfold(0, num_taps, 1).movedim(-1, 0)
        else:
            taps_RTC = wide.index_select(0, places.flatten()).view(*places.shape, -1)
        return _sum_taps(taps_RTC, weight_CR, bias_C)

    def _tail_of(self, point: Point, layer: int, like_TC: Tensor) -> Tensor:
        """Return the last inputs of a layer's convolution, zeros before any position."""
        tail = point.tails.get(layer)
        num_before = self._num_taps[layer] - 1
        return like_TC.new_zeros(num_before, like_TC.shape[1]) if tail is None else tail

    def scan(self, layer: int, rows: PassRows, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Return outputs (T, ...) of all rows, each behind the state of its parent."""
        num_certain = rows.num_certain
        state = _state_of(rows.base, layer, recurrence, inputs)
        self._recurrences[layer] = recurrence, inputs.fixed
        is_exact = self._products is not None
        known = inputs
        if rows.tree:
            tree_rows = {name: row_T[num_certain:] for name, row_T in inputs.rows.items()}
            if rows.tree.first:
                tree_rows = {
                    name: torch.cat([*self._earlier(layer, name, rows.tree), row_T])
                    for name, row_T in tree_rows.items()
                }
                known = Inputs(tree_rows, inputs.fixed)
            self._keep(layer, tree_rows)
        is_few = is_exact or num_certain < LEAST_CHUNK
        if is_few and recurrence.walks(state.device):
            out, after = recurrence.walk(state, known, rows.tree.steps())
            if num_certain:
                rows.behind.states[layer] = after
            return out[rows.tree.first :]
        outs = list[Tensor]()
        if num_certain:
            certain = inputs.part(slice(num_certain))
            out, state = recurrence.run(state, certain, is_exact=is_exact)
            rows.behind.states[layer] = state
            outs.append(out)
        if rows.tree:
            known = known.part(slice(num_certain, None)) if num_certain else known
            outs.append(scan_tree(recurrence, state, known, rows.tree))
        return joined(outs)

    def _earlier(self, layer: int, name: str, rows: TreeRows) -> list[Tensor]:
        """Return inputs of the tree's rows of earlier passes."""
        return [self._kept[layer][name][: rows.first]] if rows.first else []

    def _keep(self, layer: int, inputs: RowInputs) -> None:
        """Keep the inputs of all rows of the tree, as long as a commit may ask for them."""
        if self._keeps_open:
            self._kept.setdefault(layer, {}).update(inputs)

    @torch.inference_mode()
    def commit(self, path: Sequence[int], kept: Sequence[int] = ()) -> None:
        """See `KVCache`. A path begins with all rows that are certain, if it has any."""
        assert not kept, "ranks alone keep rows, and have no such layers"
        num_certain = self._num_certain
        here = self._here
        mark = self._mark
        if path:
            is_first = [*path[:num_certain]] == [*range(num_certain)]
            assert is_first, "what was promised is committed first"
            rest = [row - num_certain for row in path[num_certain:]]
            assert not rest or self._keeps_open, "inputs of these rows were not kept"
            base = self._trunk if num_certain else self._here
            with self._products.during(len(path)) if self._products else nullcontext():
                here = self._behind(base, rest, self.length + len(path))
            mark = base if num_certain else mark
            self._points += self._passed
        super().commit(path)
        self._mark = mark
        self._here = here
        self._begin_anew()

    def _behind(self, base: Point, path: Sequence[int], length: int) -> Point:
        """Return the states behind a path of the tree, by its rows' inputs."""
        self._tree.check(path)
        point = Point(length, dict(base.tails), dict(base.states))
        if not path:
            return point
        for layer, inputs in self._kept.items():
            row_A = torch.tensor(path).to(next(iter(inputs.values())).device)
            if _CONVOLVED in inputs:
                own_AC = inputs[_CONVOLVED][row_A]
                tail = self._tail_of(base, layer, own_AC)
                point.tails[layer] = torch.cat([tail, own_AC])[len(path) :].clone()
            if layer in self._recurrences:
                recurrence, fixed = self._recurrences[layer]
                rows = {name: row_T[row_A] for name, row_T in inputs.items() if name != _CONVOLVED}
                path_inputs = Inputs(rows, fixed)
                state = _state_of(base, layer, recurrence, path_inputs)
                _, point.states[layer] = recurrence.run(state, path_inputs, is_exact=True)
        return point

    def _begin_anew(self) -> None:
        """Reset to the committed rows: no others, and no expectations."""
        self._tree = RowTree()
        self._trunk = Point(0)
        # states before that, behind parts of the rows that are certain
        self._passed = list[Point]()
        self._num_certain = 0
        self._num_promised = 0
        self._keeps_open = True

    def take_points(self) -> list[Point]:
        """Return all states behind committed positions; those of parts of a prompt only once."""
        points = [*self._points, self._mark, self._here]
        self._points.clear()
        return [point for point in points if 0 < point.length <= self.length]

    def reusable_prefix(self, num_positions: int) -> int:
        """See `KVCache`: states are there behind what is committed, and behind the last prompt."""
        lengths = (self._here.length, self._mark.length)
        return next((length for length in lengths if length <= num_positions), 0)

    def point_at(self, length: int) -> Point:
        """Return the states of layers behind `length` positions, which must be `reusable_prefix`."""
        known = {point.length: point for point in (Point(0), self._mark, self._here)}
        assert length in known, "states are there"
        return known[length]

    def states(self, most: int) -> dict[int, LayerStates]:
        """See `KVCache`; of as many positions as there are states for, see `point_at`."""
        return super().states(self.reusable_prefix(most))

    def clear(self, num_kept: int = 0) -> None:
        """See `KVCache`; what has no states is forgotten as well."""
        length = self.reusable_prefix(num_kept)
        self.hold(self.point_at(length))
        super().clear(length)

    def hold(self, point: Point) -> None:
        """Continue from these states, which belong to the positions that are there or about to be."""
        self._begin_anew()
        self._here = point
        self._points = [passed for passed in self._points if passed.length <= point.length]
        if self._mark.length > point.length:
            self._mark = Point(0)

    def restore(self, point: Point) -> None:
        """Continue from states that were saved; see `hold`."""
        tails, states = (
            {layer: self.send(state.clone()) for layer, state in kind.items()}
            for kind in (point.tails, point.states)
        )
        self.hold(Point(point.length, tails, states))

    def copy_from(self, other: KVCache, num_positions: int) -> None:
        """See `KVCache`; as far as there are states."""
        assert isinstance(other, RecurrentCache), "a cache of the same model"
        length = other.reusable_prefix(num_positions)
        super().copy_from(other, length)
        self.hold(other.point_at(length))


def _state_of(point: Point, layer: int, recurrence: Recurrence, inputs: Inputs) -> Tensor:
    """Return a layer's state, or what it begins with; from a file it comes as a row of numbers."""
    start = recurrence.start(inputs)
    state = point.states.get(layer)
    return start if state is None else state.reshape(start.shape)


def _sum_taps(taps_RTC: Tensor, weight_CR: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return the result of `conv1d`, (T, C), in the type of the weight; inputs are float32.

    Products are rounded before they are added, on any device.
    """
    weight_RC = weight_CR.T.to(torch.float32, memory_format=torch.contiguous_format)
    if taps_RTC.shape[1] <= _FEW_ROWS:
        terms = iter((taps_RTC * weight_RC[:, None]).unbind())
    else:
        terms = (tap_TC * weight_C for tap_TC, weight_C in zip(taps_RTC, weight_RC, strict=True))
    sum_TC = next(terms)
    for term_TC in terms:
        sum_TC += term_TC
    if bias_C is not None:
        sum_TC += bias_C.float()
    return sum_TC.to(weight_CR.dtype)
