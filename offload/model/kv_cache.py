"""Keys and values of every layer in buffers of fixed size, with one place where the length changes.

    [0, length) committed   [window_lo, window_lo + T) rows of the running forward pass

A forward pass only writes behind the committed positions; `commit` gathers the rows of the accepted path and moves the
length. A pass that is abandoned half-way therefore leaves nothing behind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from offload.kernels.kv_commit import kv_commit_reference


class _Window:
    """Where the running pass writes, shared by all layers of one cache."""

    def __init__(self) -> None:
        self.lo = 0
        self.num_elsewhere = 0  # committed positions, the first ones, that have no slots here
        self.is_fixed = False
        self.slot_T: Tensor | None = None  # of a recorded pass: where its rows go, read anew at each replay
        self.extent = 0  # ... and how many slots it looks at


class _SlotLayer(DynamicLayer):
    """One layer's keys and values, (1, G, S, K) each; allocated at first use, when the model shows its shapes."""

    def __init__(self, window: _Window, num_slots: int) -> None:
        super().__init__()
        self._window, self._num_slots = window, num_slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        make = torch.zeros if self._window.is_fixed else torch.empty
        num_slots = self._num_slots + self._window.is_fixed
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (*states.shape[:2], num_slots, states.shape[3])
            setattr(self, name, make(shape, dtype=states.dtype, device=states.device))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._window.slot_T is not None:
            self.keys.index_copy_(2, self._window.slot_T, key_states)
            self.values.index_copy_(2, self._window.slot_T, value_states)
            return self.keys[:, :, : self._window.extent], self.values[:, :, : self._window.extent]
        lo = self._window.lo - self._window.num_elsewhere
        hi = lo + key_states.shape[2]
        self.keys[:, :, lo:hi] = key_states
        self.values[:, :, lo:hi] = value_states
        return self.keys[:, :, :hi], self.values[:, :, :hi]

    def get_seq_length(self) -> int:
        return self._window.lo


class KVCache(Cache):
    """The cache of one model for one sequence: S = `num_slots`, committed positions plus rows of the largest pass.

    `gather` moves the rows of a path in all buffers, see `kv_commit_reference`; `send` brings a host's tensor there.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        gather: Callable[..., None] = kv_commit_reference,
        send: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._gather, self._send, self._window = gather, send, _Window()
        self._slot_layers = [_SlotLayer(self._window, num_slots) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))
        self.num_slots = num_slots
        self.length = 0

    def place(self, num_uncommitted: int, num_rows: int) -> None:
        """Let the next forward pass write `num_rows` rows behind `num_uncommitted` rows that are not committed yet."""
        self._window.lo = self.length + num_uncommitted
        last = self._window.lo - self._window.num_elsewhere + num_rows
        assert last <= self.num_slots, f"{num_rows} rows do not fit behind {self._window.lo}"

    def fix(self) -> None:
        """From the first pass on keep one slot more, for rows that are padding, and zeros in slots not written yet.

        A recorded pass looks at those; its mask gives them no weight, but no weight times NaN is NaN.
        """
        assert not self._slot_layers[0].is_initialized or self._window.is_fixed, "too late: passes have been run"
        self._window.is_fixed = True

    @contextmanager
    def recorded(self, slot_T: Tensor, extent: int) -> Iterator[None]:
        """Meanwhile rows go where `slot_T` says and look at the first `extent` slots, whatever `place` was told."""
        self._window.slot_T, self._window.extent = slot_T, extent
        try:
            yield
        finally:
            self._window.slot_T = None

    @torch.inference_mode()
    def commit(self, rows: Sequence[int]) -> None:
        """Keep these uncommitted rows, in this order, as the next positions; everything else is forgotten."""
        if list(rows) != list(range(len(rows))):
            # In some families the last layers share the keys and values of earlier ones and have none of their own.
            filled = [layer for layer in self._slot_layers if layer.is_initialized]
            row_A = torch.tensor(rows)
            row_A = row_A.to(filled[0].keys.device) if self._send is None else self._send(row_A)
            lo = self.length - self._window.num_elsewhere
            self._gather([buffer for layer in filled for buffer in (layer.keys, layer.values)], lo, row_A)
        self.length += len(rows)
        self._window.lo = self.length

    def states(self, most: int) -> dict[int, tuple[Tensor, Tensor]]:
        """By layer the keys and values of at most so many committed positions, (1, G, P, K) each: views."""
        num_kept = min(most, self.length)
        filled = [(index, layer) for index, layer in enumerate(self._slot_layers) if num_kept and layer.is_initialized]
        return {index: (layer.keys[:, :, :num_kept], layer.values[:, :, :num_kept]) for index, layer in filled}

    @torch.inference_mode()
    def refill(self, states: Iterable[tuple[int, Tensor, Tensor]], length: int) -> None:
        """Take in what `states` gave, layer by layer. Where that fails half-way, the cache is empty."""
        self.clear()
        for index, keys, values in states:
            layer, send = self._slot_layers[index], self._send or (lambda tensor: tensor)
            if not layer.is_initialized:
                layer.lazy_initialization(send(keys[:, :, :1]), send(values[:, :, :1]))
            layer.keys[:, :, :length], layer.values[:, :, :length] = keys, values
        self.length = self._window.lo = length

    def clear(self, num_kept: int = 0) -> None:
        """Forget the sequence but for its first positions."""
        self.length = self._window.lo = min(num_kept, self.length)
