"""One pass over the rows of one text or of several: what it takes for its cache and for its mask.

A pass has parts, each of one text, which sees the columns of that text alone. Products take all
rows at once, attention takes part by part: so what a row gets does not depend on other texts, but
for the rounding of products of more rows (and not even that where rows are `InvariantRows`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from offload.model.kv_cache import INDEX, KEYS, VALUES, Held, KVCache


class BatchPart(NamedTuple):
    """The next rows of one text, which may have two parts: its prompt, and a tree behind it."""

    token_T: Tensor
    position_U: Tensor
    ancestor_TU: Tensor
    cache: KVCache


class PartRows(NamedTuple):
    """Where the rows of one part lie."""

    cache: KVCache
    # rows [lo, hi) of the pass
    lo: int
    hi: int
    # where the first of them goes in the cache
    position: int
    # what recurrent layers have to know, see `KVCache.take_rows`
    run: Any = None

    @property
    def end(self) -> int:
        """Return the positions up to the last row."""
        return self.position + self.hi - self.lo

    @property
    def columns(self) -> slice:
        """Return where these positions are in the buffers of all texts."""
        first = self.cache.first_slot
        return slice(first, first + self.end)


def lay(parts: Sequence[BatchPart], mode: AbstractContextManager[Any] | None) -> "PassCache":
    """Return the cache of a pass in which the parts lie one behind the other.

    Every part is given its rows of the pass, and its own cache their places. `mode` is for
    `KVCache.take_rows`.
    """
    rows = list[PartRows]()
    lo = 0
    for _, __, ancestor_TU, cache in parts:
        num_rows, num_uncommitted = ancestor_TU.shape
        position = cache.place(num_uncommitted - num_rows, num_rows)
        run = cache.take_rows(ancestor_TU, mode)
        rows.append(PartRows(cache, lo, lo + num_rows, position, run))
        lo += num_rows
    return PassCache(rows)


class PassCache(Cache):
    """What a pass takes for its cache: each row goes to that of its own text.

    A layer gets what its text has up to the last row; of several texts it gets the buffers of all,
    as wide as they are.

    Args:
        slot_T: of a recorded pass: where its rows go, read anew at each replay. Its layers get all
            slots, whatever was placed.
    """

    def __init__(self, parts: Sequence[PartRows], slot_T: Tensor | None = None) -> None:
        first = parts[0].cache
        assert all(part.cache.is_beside(first) for part in parts), "caches that lie side by side"
        super().__init__(
            layers=[_PassLayer(layer, parts, slot_T) for layer in range(first.num_layers)]
        )
        self.parts = parts


class _PassLayer(DynamicLayer):
    def __init__(self, layer: int, parts: Sequence[PartRows], slot_T: Tensor | None) -> None:
        super().__init__()
        self._layer = layer
        self._parts = parts
        self._slot_T = slot_T

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._written({KEYS: key_states, VALUES: value_states})
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """See transformers' `DynamicIndexedLayer`: (1, S, W), of all rows so far."""
        assert self._slot_T is None, "passes with an index are not recorded"
        (index,) = self._written({INDEX: indexer_key_states[:, None]})
        return index[:, 0]

    def _written(self, states: Held) -> list[Tensor]:
        """Write the rows (1, G, T, K), and return what there is of these names."""
        first = self._parts[0]
        if self._slot_T is not None:
            first.cache.write_slots(self._layer, self._slot_T, states)
            return [first.cache.held(self._layer)[name] for name in states]
        for cache, lo, hi, position, _ in self._parts:
            own = {name: rows[:, :, lo:hi] for name, rows in states.items()}
            cache.write(self._layer, position, own)
        if len(self._parts) > 1:
            return [first.cache.buffers_of(self._layer)[name] for name in states]
        end = first.end - first.cache.num_elsewhere
        return [first.cache.held(self._layer)[name][:, :, :end] for name in states]

    def get_seq_length(self) -> int:
        return self._parts[0].position if len(self._parts) == 1 else 0

    @property
    def indexer_position_ids(self) -> Tensor:
        """Not of the slots, but all positions there are: a family turns index keys by them.

        They are (3, 1, M), by three axes, alike for text.
        """
        position_M = torch.arange(max(part.end for part in self._parts))
        return self._parts[0].cache.send(position_M).expand(3, 1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: Tensor) -> None:
        """Do nothing: a family would keep those of its rows there."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchMask:
    """What the rows of one pass see, in place of a mask: part by part.

    `masks` has one for each part, as attention takes it for one text.
    """

    parts: Sequence[PartRows]
    masks: Sequence[Any]

    def attend(
        self, attend: Callable[..., tuple[Tensor, None]], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return (1, T, H, K); families may run the last T rows of the pass alone."""
        first_row = self.parts[-1].hi - query.shape[2]
        found = list[Tensor]()
        for part, mask in zip(self.parts, self.masks, strict=True):
            if part.hi > first_row:
                some_rows = query[:, :, max(0, part.lo - first_row) : part.hi - first_row]
                own = (states[:, :, part.columns] for states in (key, value))
                found.append(attend(some_rows, *own, mask)[0])
        return torch.cat(found, 1)


def causal(num_rows: int) -> Tensor:
    """Return bool (T, T): what rows of a chain see of each other, themselves included."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
