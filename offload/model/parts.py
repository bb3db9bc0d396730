"""One pass over the rows of one or several texts: its cache and its mask.

A pass has parts, each of one text, which sees the columns of that text alone. Products take all
rows at once, attention takes part by part: so what a row gets does not depend on other texts, but
for the rounding of products of more rows (and not even that where rows are `BatchInvariantProducts`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.model.kv_cache import INDEX, KEYS, VALUES, KVCache, LayerStates
from offload.model.library import CACHE, Cache, DynamicLayer
from offload.model.linear import Products


class BatchPart(NamedTuple):
    """The next rows of one text in a pass: tokens that its cache lacks, behind them a tree.

    What stands behind `num_nodes` is told by `lay`.
    """

    token_T: Tensor
    position_U: Tensor
    ancestor_TU: Tensor
    cache: KVCache
    num_nodes: int = 0  # of the tree, whose rows are the last
    lo: int = 0  # its first row in the pass
    first: int = 0  # where that goes in the cache
    # what recurrent layers have to know, see `KVCache.take_rows`
    states: Any = None

    @property
    def num_pending(self) -> int:
        return len(self.token_T) - self.num_nodes

    @property
    def rows(self) -> slice:
        """Return which of the pass's rows are its own."""
        return slice(self.lo, self.lo + len(self.token_T))

    @property
    def end(self) -> int:
        """Return the positions up to the last row."""
        return self.first + len(self.token_T)

    @property
    def columns(self) -> slice:
        """Return where these positions are in the buffers of all texts."""
        slot = self.cache.first_slot
        return slice(slot, slot + self.end)


def lay(parts: Sequence[BatchPart], products: Products | None) -> "PassCache":
    """Return the cache of a pass in which the parts lie one behind the other.

    Every part is given its rows of the pass, and its own cache their places. `products` are for
    `KVCache.take_rows`.
    """
    laid = list[BatchPart]()
    lo = 0
    for part in parts:
        num_rows, num_uncommitted = part.ancestor_TU.shape
        first = part.cache.reserve(num_uncommitted - num_rows, num_rows)
        states = part.cache.take_rows(part.ancestor_TU, products)
        laid.append(part._replace(lo=lo, first=first, states=states))
        lo += num_rows
    return PassCache(laid)


_RUNNING: ContextVar[Sequence[BatchPart]] = ContextVar("parts")


def running_parts() -> Sequence[BatchPart]:
    """Return the parts of the pass that runs in this thread, see `PassCache.running`."""
    return _RUNNING.get()


class PassCache(Cache):
    """The cache of one pass: passes each row on to the cache of its text.

    A layer gets what its text has up to the last row; of several texts it gets the buffers of all,
    as wide as they are.

    Args:
        slot_T: of a recorded pass: where its rows go, read again at each replay. Its layers get all
            slots, whatever was placed.
    """

    def __init__(self, parts: Sequence[BatchPart], slot_T: Tensor | None = None) -> None:
        first = parts[0].cache
        assert all(part.cache.is_beside(first) for part in parts), "caches that lie side by side"
        super().__init__(
            layers=[_PassLayer(layer, parts, slot_T) for layer in range(first.num_layers)]
        )
        self.parts = parts

    def write_index(self, layer: int, state_TW: Tensor) -> Tensor:
        """Write index states (T, W) of the pass, and return those (S, W) of all rows so far."""
        return self.layers[layer].write_index(state_TW)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this pass's parts those of the mixers that run in this thread meanwhile."""
        token = _RUNNING.set(self.parts)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    def as_argument(self) -> dict[str, "PassCache"]:
        """Return this cache under the name by which the library's models are given theirs."""
        return {CACHE: self}


class _PassLayer(DynamicLayer):
    def __init__(self, layer: int, parts: Sequence[BatchPart], slot_T: Tensor | None) -> None:
        super().__init__()
        self._layer = layer
        self._parts = parts
        self._slot_T = slot_T

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._written({KEYS: key_states, VALUES: value_states})
        return keys, values

    def write_index(self, state_TW: Tensor) -> Tensor:
        """Write the rows' index states, and return those (S, W) of all rows so far."""
        assert self._slot_T is None, "passes with an index are not recorded"
        (index,) = self._written({INDEX: state_TW[None, None]})
        return index[0, 0]

    def _written(self, states: LayerStates) -> list[Tensor]:
        """Write a pass's keys and values (1, G, T, K) by name; return all that attention reads.

        That is the whole buffer where slots are given or several texts share it, else the rows of
        the only text.
        """
        first = self._parts[0]
        if self._slot_T is not None:
            first.cache.write_slots(self._layer, self._slot_T, states)
            return [first.cache.layer_states(self._layer)[name] for name in states]
        for part in self._parts:
            part_states = {name: rows[:, :, part.rows] for name, rows in states.items()}
            part.cache.write(self._layer, part.first, part_states)
        if len(self._parts) > 1:
            buffers = first.cache.buffers_of(self._layer)
            return [first.cache.expanded(buffers, name) for name in states]
        end = first.end - first.cache.num_elsewhere
        views = first.cache.layer_states(self._layer)
        return [first.cache.expanded(views, name, end) for name in states]

    def get_seq_length(self) -> int:
        return self._parts[0].first if len(self._parts) == 1 else 0

    @property
    def indexer_position_ids(self) -> Tensor:
        """Not of the slots, but all positions there are: a family turns index keys by them.

        They are (3, 1, M), by three axes, alike for text.
        """
        position_M = torch.arange(max(part.end for part in self._parts))
        return self._parts[0].cache.send(position_M).expand(3, 1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: Tensor) -> None:
        """Do nothing; a family stores its rows' positions there."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchMask:
    """What the rows of one pass see, in place of a mask: part by part.

    `masks` has one for each part, as attention takes it for one text.
    """

    parts: Sequence[BatchPart]
    masks: Sequence[Any]

    def attend(
        self, attend: Callable[..., tuple[Tensor, None]], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return (1, T, H, K); families may run the last T rows of the pass alone."""
        first_row = self.parts[-1].rows.stop - query.shape[2]
        outputs = list[Tensor]()
        for part, mask in zip(self.parts, self.masks, strict=True):
            rows = part.rows
            if rows.stop > first_row:
                some_rows = query[:, :, max(0, rows.start - first_row) : rows.stop - first_row]
                part_states = (states[:, :, part.columns] for states in (key, value))
                outputs.append(attend(some_rows, *part_states, mask)[0])
        return torch.cat(outputs, 1)


def causal(num_rows: int) -> Tensor:
    """Return bool (T, T): what rows of a chain see of each other, themselves included."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
