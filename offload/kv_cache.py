"""Keys and values of every layer in buffers of fixed size, with one place where the length changes.

    [0, length) committed   [window_lo, window_lo + T) rows of the running forward pass

A forward pass only writes behind the committed positions; `commit` gathers the rows of the accepted path and moves the
length. A pass that is abandoned half-way therefore leaves nothing behind.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from offload.kernels.kv_commit import kv_commit


class _Window:
    """Where the running pass writes, shared by all layers of one cache."""

    def __init__(self) -> None:
        self.lo = 0


class _SlotLayer(DynamicLayer):
    """One layer's keys and values, (1, G, S, K) each; allocated at first use, when the model shows its shapes."""

    def __init__(self, window: _Window, num_slots: int) -> None:
        super().__init__()
        self._window, self._num_slots = window, num_slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], self._num_slots, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], self._num_slots, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        lo, hi = self._window.lo, self._window.lo + key_states.shape[2]
        self.keys[:, :, lo:hi] = key_states
        self.values[:, :, lo:hi] = value_states
        return self.keys[:, :, :hi], self.values[:, :, :hi]

    def get_seq_length(self) -> int:
        return self._window.lo


class KVCache(Cache):
    """The cache of one model for one sequence.

    Args:
        num_layers: decoder layers.
        num_slots: S, committed positions plus the rows of the largest forward pass.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self._window = _Window()
        self._slot_layers = [_SlotLayer(self._window, num_slots) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))
        self.num_slots = num_slots
        self.length = 0

    def place(self, num_uncommitted: int, num_rows: int) -> None:
        """Let the next forward pass write `num_rows` rows behind `num_uncommitted` rows that are not committed yet."""
        self._window.lo = self.length + num_uncommitted
        assert self._window.lo + num_rows <= self.num_slots, f"{num_rows} rows do not fit behind {self._window.lo}"

    @torch.inference_mode()
    def commit(self, rows: Sequence[int]) -> None:
        """Keep these uncommitted rows, in this order, as the next positions; everything else is forgotten."""
        if list(rows) != list(range(len(rows))):
            # In some families the last layers share the keys and values of earlier ones and have none of their own.
            filled = [layer for layer in self._slot_layers if layer.is_initialized]
            row_A = torch.tensor(rows, device=filled[0].keys.device)
            kv_commit([buffer for layer in filled for buffer in (layer.keys, layer.values)], self.length, row_A)
        self.length += len(rows)
        self._window.lo = self.length

    def clear(self) -> None:
        """Forget the whole sequence."""
        self.length = self._window.lo = 0
