"""Keys and values of every layer in buffers of fixed size, with one place where the length changes.

    [0, length) committed   [length, length + U) not committed, in the order in which they were run or kept

A forward pass only writes behind the committed positions; `commit` gathers the rows of the accepted path, moves the
length, and behind it the rows that are kept for a later commit. Where nothing is kept, the next pass writes over what
is not committed: one that is abandoned half-way therefore leaves nothing behind.
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
        self.length = self._num_placed = 0

    @property
    def num_uncommitted(self) -> int:
        """U, rows behind the committed ones: what the last commit has kept, and the passes since then."""
        return self._num_placed

    def place(self, num_uncommitted: int, num_rows: int) -> None:
        """Let the next forward pass write `num_rows` rows behind `num_uncommitted` rows that are not committed yet.

        A pass that was placed and does not run leaves rows of whatever was there before; see `fix`.
        """
        self._window.lo = self.length + num_uncommitted
        last = self._window.lo - self._window.num_elsewhere + num_rows
        assert last <= self.num_slots, f"{num_rows} rows do not fit behind {self._window.lo}"
        self._num_placed = num_uncommitted + num_rows

    def fix(self) -> None:
        """From the first pass on keep one slot more, for rows that are padding, and zeros in slots not written yet.

        A recorded pass looks at those, and so does one behind rows that were placed and never run; its mask gives them
        no weight, but no weight times NaN is NaN.
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
    def commit(self, path: Sequence[int], kept: Sequence[int] = ()) -> None:
        """Make the uncommitted rows `path` the next positions, and let `kept` follow, uncommitted, in these orders.

        Rows are counted from the committed length; everything else is forgotten.
        """
        rows = [*path, *kept]
        # In some families the last layers share the keys and values of earlier ones and have none of their own.
        filled = [layer for layer in self._slot_layers if layer.is_initialized]
        if filled and rows != list(range(len(rows))):
            row_A = torch.tensor(rows)
            row_A = row_A.to(filled[0].keys.device) if self._send is None else self._send(row_A)
            lo = self.length - self._window.num_elsewhere
            self._gather([buffer for layer in filled for buffer in (layer.keys, layer.values)], lo, row_A)
        self._end_at(self.length + len(path), len(kept))

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
        self._end_at(length)

    def clear(self, num_kept: int = 0) -> None:
        """Forget the sequence but for its first positions."""
        self._end_at(min(num_kept, self.length))

    def _end_at(self, length: int, num_uncommitted: int = 0) -> None:
        self.length, self._num_placed = length, num_uncommitted
        self._window.lo = length + num_uncommitted
