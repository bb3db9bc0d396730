"""Keys and values of every layer in buffers of fixed size, with one place where the length changes.

Layers that choose by an index what they attend to keep a third thing of each position, its index
keys.

    [0, length)             committed
    [length, length + U)    not committed, in the order in which they were run or kept

A forward pass only writes behind the committed positions; `commit` gathers the rows of the accepted
path, moves the length, and behind it the rows that are kept for a later commit. Where nothing is
kept, the next pass writes over what is not committed: one that is abandoned half-way therefore
leaves nothing behind.

Caches of several texts lie side by side in the same buffers, so that one pass can write to all of
them and hand all of them on to attention, in which each row looks at the columns of its own text
alone (`parts.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from offload.kernels.kv_commit import kv_commit_reference

KEYS = "keys"
VALUES = "values"
INDEX = "index"
# what one layer holds of some positions, (1, G, P, K) each, by these names
Held = Mapping[str, Tensor]
Send = Callable[[Tensor], Tensor]
Gather = Callable[..., None]


class _Window:
    """Where the running pass writes, shared by all layers of one cache."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.lo = 0
        self.hi = 0  # behind the last row of the pass that was placed
        self.num_elsewhere = 0  # committed positions, the first ones, that have no slots here
        # of a recorded pass: where its rows go, read anew at each replay
        self.slot_T: Tensor | None = None


class _Buffers:
    """What layers hold of B texts side by side, (1, G, B * S, K) each; made as they show shapes."""

    def __init__(self, num_texts: int, num_slots: int) -> None:
        self.num_texts = num_texts
        self._num_slots = num_slots
        self.is_fixed = False
        self.of_layer: dict[int, dict[str, Tensor]] = {}

    @property
    def stride(self) -> int:
        """Return the slots from one text's first to the next one's."""
        return self._num_slots + self.is_fixed

    def make(self, layer: int, name: str, states: Tensor) -> Tensor:
        """Return the buffer of a layer with such states, as it is from then on."""
        held = self.of_layer.setdefault(layer, {})
        if name not in held:
            new = torch.zeros if self.is_fixed else torch.empty
            shape = (*states.shape[:2], self.num_texts * self.stride, states.shape[3])
            held[name] = new(shape, dtype=states.dtype, device=states.device)
        return held[name]


class _PassLayer(DynamicLayer):
    """One layer of the texts of a pass."""

    def __init__(self, windows: Sequence[_Window]) -> None:
        super().__init__()
        self._windows = windows

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Not of the slots, but all positions there are: a family turns index keys by them.

        They are (3, 1, M), by three axes, alike for text.
        """
        furthest = max(self._windows, key=lambda window: window.hi)
        position_M = torch.arange(furthest.hi)
        return furthest.send(position_M).expand(3, 1, -1) if furthest.hi else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: Tensor) -> None:
        """Do nothing: a family would keep those of its rows there."""


class _SlotLayer(_PassLayer):
    """What one layer holds of one text, (1, G, S, K) each: views of buffers, made at first use."""

    def __init__(self, window: _Window, buffers: _Buffers, layer: int, text: int) -> None:
        super().__init__([window])
        self._window = window
        self._buffers = buffers
        self._layer = layer
        self._text = text
        self.held: dict[str, Tensor] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = self._view(KEYS, key_states)
        self.values = self._view(VALUES, value_states)
        self.is_initialized = True

    def _view(self, name: str, states: Tensor) -> Tensor:
        if name not in self.held:
            stride = self._buffers.stride
            first = self._text * stride
            whole = self._buffers.make(self._layer, name, states)
            self.held[name] = whole[:, :, first : first + stride]
        return self.held[name]

    def write(self, first: int, key_states: Tensor, value_states: Tensor) -> int:
        """Put rows at positions from `first` on; returns the slot behind them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        lo = first - self._window.num_elsewhere
        hi = lo + key_states.shape[2]
        self.keys[:, :, lo:hi] = key_states
        self.values[:, :, lo:hi] = value_states
        return hi

    def write_index(self, first: int, states_1TW: Tensor) -> Tensor:
        """Put index keys at positions from `first` on; returns those of all slots up to there."""
        lo = first - self._window.num_elsewhere
        hi = lo + states_1TW.shape[1]
        index = self._view(INDEX, states_1TW[:, None])
        index[:, 0, lo:hi] = states_1TW
        return index[:, 0, :hi]

    def take(self, held: Held, length: int, send: Send) -> None:
        """Take in what a layer holds of the first positions."""
        if KEYS in held and not self.is_initialized:
            self.lazy_initialization(*(send(held[name][:, :, :1]) for name in (KEYS, VALUES)))
        for name, states in held.items():
            self._view(name, send(states[:, :, :1]))[:, :, :length] = states

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self._window.slot_T is None:
            hi = self.write(self._window.lo, key_states, value_states)
            return self.keys[:, :, :hi], self.values[:, :, :hi]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._window.slot_T, key_states)
        self.values.index_copy_(2, self._window.slot_T, value_states)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """See transformers' `DynamicIndexedLayer`: (1, S, W), of all rows so far."""
        assert self._window.slot_T is None, "passes with an index are not recorded"
        return self.write_index(self._window.lo, indexer_key_states)

    def get_seq_length(self) -> int:
        return self._window.lo


def _stay(tensor: Tensor) -> Tensor:
    return tensor


class KVCache(Cache):
    """The cache of one model for one sequence.

    Args:
        num_slots: S, committed positions plus rows of the largest pass.
        gather: moves the rows of a path in all buffers, see `kv_commit_reference`.
        send: brings a host's tensor there.

    Attributes:
        length: P, the committed positions.
        num_uncommitted: U, the rows behind them: of the last commit, and of the passes since then.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        gather: Gather | None = None,
        send: Send = _stay,
    ) -> None:
        self._gather = gather or kv_commit_reference
        self._send = send
        self._lie_in(_Buffers(1, num_slots), 0, num_layers)
        self.num_slots = num_slots
        self.length = self.num_uncommitted = 0

    def _lie_in(self, buffers: _Buffers, text: int, num_layers: int) -> None:
        self._window = _Window(self._send)
        self._buffers = buffers
        self._text = text
        layers = range(num_layers)
        self._slot_layers = [_SlotLayer(self._window, buffers, layer, text) for layer in layers]
        Cache.__init__(self, layers=list(self._slot_layers))

    @classmethod
    def side_by_side(cls, caches: "Sequence[KVCache]") -> None:
        """Let empty caches of one size share their buffers; see `JointCache`."""
        first = caches[0]
        buffers = _Buffers(len(caches), first.num_slots)
        num_layers = len(first._slot_layers)
        buffers.is_fixed = first._buffers.is_fixed
        for text, cache in enumerate(caches):
            is_new = cache.num_slots == first.num_slots and not cache._buffers.of_layer
            assert is_new, "new ones, all alike"
            cache._lie_in(buffers, text, num_layers)

    def layer(self, layer: int) -> _SlotLayer:
        """Return what one layer holds of this text."""
        return self._slot_layers[layer]

    def buffers_of(self, layer: int) -> Held:
        """Return what a layer holds, (1, G, B * S, K) each, of this and all texts beside it."""
        return self._buffers.of_layer[layer]

    def is_beside(self, other: "KVCache") -> bool:
        """Return whether one pass can serve both."""
        return self._buffers is other._buffers

    @property
    def first_slot(self) -> int:
        """Return the column of its first position among those of all texts."""
        return self._text * self._buffers.stride - self._window.num_elsewhere

    def place(self, num_before: int, num_rows: int) -> int:
        """Let the next forward pass write so many rows behind `num_before` uncommitted ones.

        Returns the position of the first. A pass that was placed and does not run leaves rows of
        whatever was there before; see `fix`.
        """
        self._window.lo = self.length + num_before
        last = self._window.lo - self._window.num_elsewhere + num_rows
        assert last <= self.num_slots, f"{num_rows} rows do not fit behind {self._window.lo}"
        self.num_uncommitted = num_before + num_rows
        self._window.hi = self._window.lo + num_rows
        return self._window.lo

    def promise(self, num_rows: int, *, keeps_others: bool = True) -> None:
        """Note that the first rows behind the committed ones are a chain that will be committed.

        Of the others of the next pass nothing is needed later unless `keeps_others`. Caches of keys
        and values alone do not care.
        """

    def take_rows(self, sees_TU: Tensor, mode: AbstractContextManager[Any] | None) -> Any:
        """Note what a pass that was placed will run: (T, U), which uncommitted rows its rows see.

        `mode` is what passes are computed in where their bits are the same for any tree. Returns
        what recurrent layers have to know of it.
        """

    def keepable(self, num_positions: int) -> int:
        """Return how many of so many first positions `clear` can keep."""
        return min(num_positions, self.length)

    def fix(self) -> None:
        """Keep one slot more for rows that are padding, and zeros in slots not written yet.

        It holds from the first pass on. A recorded pass looks at those, and so does one behind rows
        that were placed and never run; its mask gives them no weight, but no weight times NaN is
        NaN.
        """
        is_early = not self._buffers.of_layer or self._buffers.is_fixed
        assert is_early, "too late: passes have been run"
        self._buffers.is_fixed = True

    @contextmanager
    def recorded(self, slot_T: Tensor) -> Iterator[None]:
        """Let rows go where `slot_T` says meanwhile, and look at all slots, whatever was placed."""
        self._window.slot_T = slot_T
        try:
            yield
        finally:
            self._window.slot_T = None

    @torch.inference_mode()
    def commit(self, path: Sequence[int], kept: Sequence[int] = ()) -> None:
        """Make the uncommitted rows `path` the next positions, and let `kept` follow, uncommitted.

        Rows are counted from the committed length; everything else is forgotten.
        """
        rows = [*path, *kept]
        # In some families the last layers share the keys and values of earlier ones and have none
        # of their own.
        buffers = [buffer for layer in self._slot_layers for buffer in layer.held.values()]
        if buffers and rows != list(range(len(rows))):
            row_A = self._send(torch.tensor(rows)).to(buffers[0].device)
            self._gather(buffers, self.length - self._window.num_elsewhere, row_A)
        self._end_at(self.length + len(path), len(kept))

    def states(self, most: int) -> dict[int, Held]:
        """Return views of what each layer holds of at most so many positions, (1, G, P, K)."""
        num_kept = min(most, self.length)
        return {
            index: {name: states[:, :, :num_kept] for name, states in layer.held.items()}
            for index, layer in enumerate(self._slot_layers)
            if num_kept and layer.held
        }

    @torch.inference_mode()
    def refill(self, states: Iterable[tuple[int, Held]], length: int) -> None:
        """Take in what `states` gave; where that fails half-way, the cache is empty."""
        self.clear()
        for index, held in states:
            self._slot_layers[index].take(held, length, self._send)
        self._end_at(length)

    def copy_from(self, other: "KVCache", num_positions: int) -> None:
        """Take over the first committed positions of another text, in place of all that is here."""
        self.refill(other.states(num_positions).items(), min(num_positions, other.length))

    def clear(self, num_kept: int = 0) -> None:
        """Forget the sequence but for its first positions."""
        self._end_at(min(num_kept, self.length))

    def _end_at(self, length: int, num_uncommitted: int = 0) -> None:
        self.length = length
        self.num_uncommitted = num_uncommitted
        self._window.lo = length + num_uncommitted


class CacheRows(NamedTuple):
    """Consecutive rows of one pass, all of one text."""

    cache: KVCache
    lo: int
    hi: int
    position: int  # of the slot where the first of them goes
    run: Any = None  # what recurrent layers have to know, see `KVCache.take_rows`


class JointCache(Cache):
    """What one pass over several texts takes for its cache: each row goes to that of its own text.

    Layers are handed the buffers of all texts, as wide as they are.
    """

    def __init__(self, parts: Sequence[CacheRows]) -> None:
        first = parts[0].cache
        assert all(part.cache.is_beside(first) for part in parts), "caches that lie side by side"
        super().__init__(layers=[_JointLayer(layer, parts) for layer in range(len(first.layers))])
        self.parts = parts


class _JointLayer(_PassLayer):
    def __init__(self, layer: int, parts: Sequence[CacheRows]) -> None:
        super().__init__([part.cache._window for part in parts])
        self._layer = layer
        self._parts = parts

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        for cache, lo, hi, position, _ in self._parts:
            own = cache.layer(self._layer)
            own.write(position, key_states[:, :, lo:hi], value_states[:, :, lo:hi])
        held = self._parts[0].cache.buffers_of(self._layer)
        return held[KEYS], held[VALUES]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """See `_SlotLayer`: (1, B * S, W)."""
        for cache, lo, hi, position, _ in self._parts:
            cache.layer(self._layer).write_index(position, indexer_key_states[:, lo:hi])
        return self._parts[0].cache.buffers_of(self._layer)[INDEX][:, 0]

    def get_seq_length(self) -> int:
        return 0
