"""One pass over several texts, and feed-forwards that take the rows of a wide pass part by part.

A pass over several texts has parts, each of one text, which sees the columns of that text alone.
Products take all rows at once, attention takes part by part: so what a row gets does not depend on
other texts, but for the rounding of products of more rows (and not even that where rows are
`InvariantRows`).

Between the matrices of a feed-forward, a prompt would hold three times its width for each of
thousands of rows, which a plan would have to keep free in every pass. So its rows are taken in
parts of as many rows as one product has at most on a CPU.

Invariant: a row's result is that of all rows at once, as far as products give a row the same bits
whatever rows are beside it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from offload.memory.sizes import INNER_ROWS
from offload.model.kv_cache import CacheRows, JointCache, KVCache


class BatchPart(NamedTuple):
    """The next rows of one text, which may have two parts: its prompt, and a tree behind it."""

    token_T: Tensor
    position_U: Tensor
    ancestor_TU: Tensor
    cache: KVCache


class PartMask(NamedTuple):
    """What the rows of one part see."""

    # rows [lo, hi) of the pass
    lo: int
    hi: int
    # columns [first, last) of the buffers of all texts
    first: int
    last: int
    # the mask of these rows and columns, as attention takes it for one text
    mask: Any


@dataclass(frozen=True, slots=True, eq=False)
class BatchMask:
    """What the rows of one pass see, in place of a mask: part by part."""

    parts: tuple[PartMask, ...]

    def attend(
        self, attend: Callable[..., tuple[Tensor, None]], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return (1, T, H, K); families may run the last T rows of the pass alone."""
        first_row = self.parts[-1].hi - query.shape[2]
        found = list[Tensor]()
        for lo, hi, first, last, mask in self.parts:
            if hi > first_row:
                some_rows = query[:, :, max(0, lo - first_row) : hi - first_row]
                own = (states[:, :, first:last] for states in (key, value))
                found.append(attend(some_rows, *own, mask)[0])
        return torch.cat(found, 1)


def causal(num_rows: int) -> Tensor:
    """Return bool (T, T): what rows of a chain see of each other, themselves included."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()


def lay(parts: Sequence[BatchPart], mode: AbstractContextManager[Any] | None) -> JointCache:
    """Return the cache of a pass in which the parts lie one behind the other.

    Every part is given its rows of the pass, and its own cache their places. `mode` is for
    `KVCache.take_rows`.
    """
    rows = list[CacheRows]()
    lo = 0
    for _, __, ancestor_TU, cache in parts:
        num_rows, num_uncommitted = ancestor_TU.shape
        position = cache.place(num_uncommitted - num_rows, num_rows)
        run = cache.take_rows(ancestor_TU, mode)
        rows.append(CacheRows(cache, lo, lo + num_rows, position, run))
        lo += num_rows
    return JointCache(rows)


def seen_by(rows: Sequence[CacheRows], masks: Sequence[Any]) -> BatchMask:
    """Return one mask for each part."""
    parts = []
    for (cache, lo, hi, position, _), mask in zip(rows, masks, strict=True):
        first = cache.first_slot
        parts.append(PartMask(lo, hi, first, first + position + hi - lo, mask))
    return BatchMask(tuple(parts))


_MATRICES = ("gate_proj", "up_proj", "gate_up_proj")


def take_rows_in_parts(layers: Iterable[nn.Module]) -> None:
    """Let the feed-forwards of these layers take wide passes in parts from now on.

    Only those that `checkpoint.sizes` knows by the names of their matrices.
    """
    for layer in layers:
        inner = getattr(layer, "mlp", None)
        if isinstance(inner, nn.Module) and _is_plain(inner):
            inner.forward = _in_parts(inner)


def _is_plain(inner: nn.Module) -> bool:
    """Return whether a feed-forward is made of matrices alone, and given nothing but rows."""
    children = dict(inner.named_children())
    has_matrices = "down_proj" in children and any(name in children for name in _MATRICES)
    others = [one for one in children.values() if type(one) is not nn.Linear]
    is_bare = not any(True for one in others for _ in one.parameters())
    return has_matrices and is_bare and len(signature(inner.forward).parameters) == 1


def _in_parts(inner: nn.Module) -> Callable[[Tensor], Tensor]:
    # weak, because a module that refers to itself would outlive its model
    whole_of = WeakMethod(inner.forward)

    def forward(hidden_states: Tensor) -> Tensor:
        whole = whole_of()
        num_rows = hidden_states.shape[-2]
        assert whole is not None, "its module is there"
        if num_rows <= INNER_ROWS:
            return whole(hidden_states)
        first = whole(hidden_states[..., :INNER_ROWS, :])
        out = first.new_empty(hidden_states.shape)
        out[..., :INNER_ROWS, :] = first
        for lo in range(INNER_ROWS, num_rows, INNER_ROWS):
            out[..., lo : lo + INNER_ROWS, :] = whole(hidden_states[..., lo : lo + INNER_ROWS, :])
        return out

    return forward
