"""Keys and values of every layer in buffers of fixed size; `commit` and `clear` set the length.

    [0, length)             committed
    [length, length + U)    not committed, in the order in which they were run or kept

A pass (`parts.py`) only writes after the committed positions. `commit` gathers the rows of the
accepted path, moves the length, and after it the rows that are kept for a later commit. Otherwise
the next pass overwrites uncommitted rows, so an abandoned pass leaves nothing behind.

Caches of several texts can lie side by side in the same buffers, so that one pass writes to all of
them and attention reads all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.kernels.kv_commit import kv_commit_reference
from offload.model.linear import Products
from offload.model.taps import TapLog

KEYS = "keys"
VALUES = "values"
SCALES = "_scales"  # suffixes of the coded states' names
# positions that are expanded at once, through float32
_CHUNK_ROWS = 512


class RowCoding(NamedTuple):
    """Keys and values in eight bits: each row of a head as words and one factor.

    A row is coded by its own numbers alone, and every row that attends to it, even in the same pass,
    reads the expanded words. So a text does not depend on its tree, as without coding, but it
    differs from the text with the model's own type.
    """

    most: float  # the largest word, before the factor
    dtype: torch.dtype

    def coded(self, states: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the coded form of states (1, G, T, K) by name: uint8 words, (1, G, T, 1) factors."""
        for name, rows in states.items():
            if name not in (KEYS, VALUES):
                yield name, rows
                continue
            wide = rows.float()
            scale = wide.abs().amax(3, keepdim=True) / self.most
            # the factor of a row of zeros, or nearly zeros
            scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
            words = (wide / scale).clamp_(-self.most, self.most)
            words = words if self.dtype.is_floating_point else words.round_()
            yield name, words.to(self.dtype).view(torch.uint8)
            yield f"{name}{SCALES}", scale

    def expanded(self, words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers (1, G, S, K) that words stand for."""
        numbers = torch.empty(words.shape, dtype=dtype, device=words.device)
        parts = (tensor.split(_CHUNK_ROWS, 2) for tensor in (numbers, words, scale))
        for number, word, factor in zip(*parts, strict=True):
            number.copy_(word.view(self.dtype).float().mul_(factor))
        return numbers


CODINGS = {"int8": RowCoding(127.0, torch.int8), "fp8": RowCoding(448.0, torch.float8_e4m3fn)}


INDEX = "index"  # index keys, by which layers select positions
# one layer's states of some positions by these names, (1, G, P, K) each
LayerStates = Mapping[str, Tensor]
Send = Callable[[Tensor], Tensor]
Gather = Callable[..., None]


class _Buffers:
    """Layers' states of B texts side by side, (1, G, B * S, K) each; made as they show shapes."""

    def __init__(self, num_texts: int, num_layers: int, num_slots: int) -> None:
        self.num_texts = num_texts
        self._num_slots = num_slots
        self.is_fixed = False
        self.of_layer = [dict[str, Tensor]() for _ in range(num_layers)]

    @property
    def stride(self) -> int:
        """Return the slots from one text's first to the next one's."""
        return self._num_slots + self.is_fixed

    @property
    def is_empty(self) -> bool:
        return not any(self.of_layer)

    def make(self, layer: int, name: str, states: Tensor) -> Tensor:
        """Return the buffer for such states of a layer, created with the first."""
        buffers = self.of_layer[layer]
        if name not in buffers:
            new = torch.zeros if self.is_fixed else torch.empty
            shape = (*states.shape[:2], self.num_texts * self.stride, states.shape[3])
            buffers[name] = new(shape, dtype=states.dtype, device=states.device)
        return buffers[name]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class KVCache:
    """The layers' states of one text.

    Args:
        num_slots: S, committed positions plus rows of the largest pass.
        gather: moves a path's rows in all buffers, see `kv_commit_reference`.
        send: copies a host tensor to the device.

    Attributes:
        length: P, the committed positions.
        num_uncommitted: U, the rows behind them: of the last commit, and of the passes since then.
        taps: hidden states of the committed positions, if a drafter reads any.
        is_long: whether the text is beyond the turning point, see `Target.turn`.
        ahead: number of tokens after its own that a row depends on.
        coding: keys and values are kept in fewer bits; None keeps them as they are.
        point_rows: states are kept each time after this many rows of a prompt; 0 for none.
    """

    ahead = 0
    point_rows = 0
    coding: RowCoding | None = None

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        gather: Gather | None = None,
        send: Send = _identity,
    ) -> None:
        self._gather = gather or kv_commit_reference
        self.send = send
        self.num_layers = num_layers
        self.num_slots = num_slots
        self.length = self.num_uncommitted = 0
        self.taps: TapLog | None = None
        self.is_long = False
        self._dtype = torch.float32  # type of coded rows once expanded
        self._lie_in(_Buffers(1, num_layers, num_slots), 0)

    def _lie_in(self, buffers: _Buffers, text: int) -> None:
        self._buffers = buffers
        self._text = text
        # views of the buffers, (1, G, S, K) each
        self._views = [dict[str, Tensor]() for _ in range(self.num_layers)]

    @classmethod
    def side_by_side(cls, caches: "Sequence[KVCache]") -> None:
        """Let empty caches of one size share their buffers, so that one pass can serve them."""
        first = caches[0]
        buffers = _Buffers(len(caches), first.num_layers, first.num_slots)
        buffers.is_fixed = first._buffers.is_fixed
        for text, cache in enumerate(caches):
            is_new = cache.num_slots == first.num_slots and cache._buffers.is_empty
            assert is_new, "new ones, all alike"
            cache._lie_in(buffers, text)

    def layer_states(self, layer: int) -> LayerStates:
        """Return a layer's keys and values of this text, (1, G, S, K) each."""
        return self._views[layer]

    def buffers_of(self, layer: int) -> LayerStates:
        """Return a layer's keys and values, (1, G, B * S, K) each, of this and all other texts."""
        return self._buffers.of_layer[layer]

    def is_beside(self, other: "KVCache") -> bool:
        """Return True if one pass can serve both."""
        return self._buffers is other._buffers

    @property
    def num_elsewhere(self) -> int:
        """Return the number of first committed positions that have no slots here."""
        return 0

    @property
    def first_slot(self) -> int:
        """Return the column of its first position among those of all texts in the buffers."""
        return self._text * self._buffers.stride - self.num_elsewhere

    def reserve(self, num_before: int, num_rows: int) -> int:
        """Reserve this many rows after `num_before` uncommitted ones; return the first position.

        A reserved pass that does not run leaves rows with old content; see `fix`.
        """
        position = self.length + num_before
        last = position - self.num_elsewhere + num_rows
        assert last <= self.num_slots, f"{num_rows} rows do not fit behind {position}"
        self.num_uncommitted = num_before + num_rows
        return position

    def write(self, layer: int, position: int, states: LayerStates) -> None:
        """Write a layer's states of some rows, from this position on."""
        if self.coding is not None:
            self._dtype = next(iter(states.values())).dtype
            states = dict(self.coding.coded(states))
        self._put(layer, position, states)

    def _put(self, layer: int, position: int, states: LayerStates) -> None:
        lo = position - self.num_elsewhere
        for name, rows in states.items():
            self._view(layer, name, rows)[:, :, lo : lo + rows.shape[2]] = rows

    def expanded(self, buffers: LayerStates, name: str, end: int | None = None) -> Tensor:
        """Return rows of this name up to a column, as attention takes them."""
        rows = buffers[name][:, :, :end]
        scales = buffers.get(f"{name}{SCALES}")
        if self.coding is None or scales is None:
            return rows
        return self.coding.expanded(rows, scales[:, :, :end], self._dtype)

    def write_slots(self, layer: int, slot_T: Tensor, states: LayerStates) -> None:
        """Write a layer's states of some rows to these slots, given on its device."""
        assert self.coding is None, "passes that are recorded write plain rows"
        for name, rows in states.items():
            self._view(layer, name, rows).index_copy_(2, slot_T, rows)

    def _view(self, layer: int, name: str, states: Tensor) -> Tensor:
        views = self._views[layer]
        if name not in views:
            stride = self._buffers.stride
            first = self._text * stride
            views[name] = self._buffers.make(layer, name, states)[:, :, first : first + stride]
        return views[name]

    def expect_rows(self, num_rows: int, *, keeps_others: bool = True) -> None:
        """Note that the next rows are a chain that will be committed.

        Other rows of the next pass are not needed later unless `keeps_others`. Caches of keys and
        values alone ignore this.
        """

    def take_rows(self, sees_TU: Tensor, products: Products | None) -> Any:
        """Note the rows of a reserved pass: (T, U), the uncommitted rows that each one sees.

        `products` give the same bits for any tree, if passes have them. Returns what recurrent
        layers need of it.
        """

    def reusable_prefix(self, num_positions: int) -> int:
        """Return the most of these first positions that `clear` can keep."""
        return min(num_positions, self.length)

    def fix(self) -> None:
        """Add a slot for padding rows, and zero slots that were not written yet.

        It holds from the first pass on. Recorded passes read such slots, and so do passes after
        rows that were reserved and never run. Masks give them weight 0, but 0 times NaN is NaN.
        """
        is_early = self._buffers.is_empty or self._buffers.is_fixed
        assert is_early, "too late: passes have been run"
        self._buffers.is_fixed = True

    @torch.inference_mode()
    def commit(self, path: Sequence[int], kept: Sequence[int] = ()) -> None:
        """Make the uncommitted rows `path` the next positions, and let `kept` follow, uncommitted.

        Rows are counted from the committed length; all others are dropped.
        """
        rows = [*path, *kept]
        # In some families the last layers share keys and values of earlier ones.
        buffers = [buffer for views in self._views for buffer in views.values()]
        if buffers and rows != list(range(len(rows))):
            row_A = self.send(torch.tensor(rows)).to(buffers[0].device)
            self._gather(buffers, self.length - self.num_elsewhere, row_A)
        if self.taps is not None:
            self.taps.commit(path, self.length)
        self._end_at(self.length + len(path), len(kept))

    @property
    def saved(self) -> "KVCache | None":
        """Return the tensors of this draft state for a session."""
        return self

    @property
    def num_sound(self) -> int:
        """Return the number of first committed positions that are worth keeping for other texts."""
        return self.length

    def can_follow(self, num_positions: int) -> int:
        """Return all: a draft with keys and values alone can continue at any token."""
        return num_positions

    def states(self, most: int) -> dict[int, LayerStates]:
        """Return views of what each layer holds of at most this many positions, (1, G, P, K)."""
        num_kept = min(most, self.length)
        return {
            layer: {name: states[:, :, :num_kept] for name, states in views.items()}
            for layer, views in enumerate(self._views)
            if num_kept and views
        }

    @torch.inference_mode()
    def refill(self, states: Iterable[tuple[int, LayerStates]], length: int) -> None:
        """Restore what `states` returned; if that fails half-way, the cache is empty."""
        self.clear()
        for layer, rows_by_name in states:
            for name, rows in rows_by_name.items():
                self._view(layer, name, self.send(rows[:, :, :1]))[:, :, :length] = rows
        self._end_at(length)

    @torch.inference_mode()
    def extend(self, blocks: Iterable[tuple[int, Mapping[int, LayerStates]]], length: int) -> None:
        """Write rows at their positions, and commit all up to `length`.

        If `blocks` fails half-way, nothing is committed.
        """
        for position, layers in blocks:
            for layer, states in layers.items():
                sent = {name: self.send(rows) for name, rows in states.items()}
                self._put(layer, position, sent)
        self._end_at(length)

    def copy_from(self, other: "KVCache", num_positions: int) -> None:
        """Replace all content by the first committed positions of another text."""
        self.refill(other.states(num_positions).items(), min(num_positions, other.length))
        self.is_long = other.is_long

    def clear(self, num_kept: int = 0) -> None:
        """Keep only the first positions."""
        self._end_at(min(num_kept, self.length))
        if self.taps is not None:
            self.taps.clear(self.length)

    def _end_at(self, length: int, num_uncommitted: int = 0) -> None:
        self.length = length
        self.num_uncommitted = num_uncommitted
