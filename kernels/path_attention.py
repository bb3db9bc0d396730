"""Attention of each row along its own path, in blocks of 64 positions, with an online softmax.

    positions  [0, base) columns of the same number   [base, ...) columns that the row's walk names

One program takes one row, one key/value head and up to 16 of the query heads that share it, and
sums in float32. So the sums of a row depend on its path alone, by construction: nothing of the tree
around it, of where `base` lies, or of how many rows a pass has changes what is added up in which
order. The code for a block is the same on both sides of `base`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from offload.kernels.jit import jit, tl, triton

BLOCK = 64  # positions; `base` and the number of a walk's columns are multiples of it
HEADER = 2  # numbers of a walk before its columns
_HEADS = 16  # of a program: the fewest that tensor cores multiply, padded if need be
# bytes of a tile's keys, and as many of values: many GPUs grant 99 KiB, for two blocks
_TILE_BYTES = 16 << 10
PositionT = TypeVar("PositionT", int, np.ndarray, Tensor)


class AttentionChunk(NamedTuple):
    """A row sees no further back than the last position that is a multiple of `size`."""

    size: int


# a row sees keys less than this many positions back; None is without limit
Window: TypeAlias = int | AttentionChunk | None


def first_seen(window: int | AttentionChunk, position: PositionT) -> PositionT:
    """Return the least position that a row at `position` sees, which may be negative."""
    if isinstance(window, AttentionChunk):
        return position // window.size * window.size
    return position - window + 1


@dataclass(frozen=True, slots=True, eq=False)
class PathRows:
    """What the rows of one pass see, by position on their paths, in place of an additive mask.

    Attributes:
        walk_TL: int32, on the device of the rows: how many keys lie on a row's path, itself
            included; `base`, the same for all rows; then the columns of positions base, base + 1,
            ..., a multiple of 64 of them. Behind the end of a path any column with finite numbers
            may stand.
        window: how far back a row sees.
        attend: computes the attention, as `path_attention_kernel` does.
        chosen_TS: bool; of all columns those that a layer lets each row see, where it chooses; what
            is not on a row's path stays unseen.
        kept: a cache of what was computed from these walks, for the following layers.
    """

    walk_TL: Tensor
    window: Window
    attend: Callable[..., Tensor]
    chosen_TS: Tensor | None = None
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the tables of these walks, made when the first layer asks for them."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTerms:
    """What a model family adds to its scores."""

    scaling: float
    cap: float | None = None  # scores are cap * tanh(score / cap)
    sink_H: Tensor | None = None  # a score per head that takes weight and has no value


def path_attention_kernel(
    query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, rows: PathRows, terms: ScoreTerms
) -> Tensor:
    """Return the attention, (T, H, V) in the type of the queries, of the last T rows of the pass.

    H is a multiple of G; head h belongs to key/value head h // (H / G). Values may be of another
    width than keys.
    """
    assert rows.chosen_TS is None, "layers that choose take the reference"
    assert (
        query_HTK.stride(2)
        == key_GSK.stride(2)
        == value_GSK.stride(2)
        == rows.walk_TL.stride(1)
        == 1
    ), "gaps"
    num_heads, num_rows, width = query_HTK.shape
    num_groups, _, value_width = value_GSK.shape
    group = num_heads // num_groups
    window = rows.window
    walk_TL = rows.walk_TL[-num_rows:]
    out_THV = query_HTK.new_empty(num_rows, num_heads, value_width)
    key_block, value_block = (
        max(16, triton.next_power_of_2(size)) for size in (width, value_width)
    )
    _attend[(num_rows, num_groups, triton.cdiv(group, _HEADS))](
        out_THV,
        query_HTK,
        key_GSK,
        value_GSK,
        walk_TL,
        terms.sink_H if terms.sink_H is not None else out_THV,
        -window.size if isinstance(window, AttentionChunk) else window or 0,
        (
            *query_HTK.stride()[:2],
            *key_GSK.stride()[:2],
            *value_GSK.stride()[:2],
            walk_TL.stride(0),
        ),
        float(terms.scaling),
        float(terms.cap or 0.0),
        SHAPE=(group, width, value_width),
        HAS_WINDOW=window is not None,
        HAS_CAP=terms.cap is not None,
        HAS_SINK=terms.sink_H is not None,
        BLOCK_M=_HEADS,
        BLOCK_S=_block_size(max(key_block, value_block), key_GSK.element_size()),
        BLOCK_K=key_block,
        BLOCK_V=value_block,
        num_warps=4,
        num_stages=2,
    )
    return out_THV


def _block_size(width: int, item_bytes: int) -> int:
    """Return the number of positions that are added up at once, the same for all passes of a model.

    Wide keys allow fewer, and so does float32, which has no tensor cores and spills registers.
    """
    return max(16, min(BLOCK, _TILE_BYTES // (width * item_bytes * (2 if item_bytes == 4 else 1))))


# Not specialised on alignment: a walk may begin anywhere among the inputs of a CUDA graph, and
# sinks anywhere in their layer.
@jit(
    do_not_specialize=["window", "scaling", "cap"], do_not_specialize_on_alignment=["walk", "sink"]
)
def _attend(
    out: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    walk: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    strides: tl.tensor,
    scaling: tl.tensor,
    cap: tl.tensor,
    SHAPE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Attend as the top says; `strides` are of heads and rows of each, and at last of walks."""
    LOG2_E: tl.constexpr = 1.4426950408889634  # a GPU computes powers of two
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    member = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = member < SHAPE[0]
    head = group * SHAPE[0] + member
    dim = tl.arange(0, BLOCK_K)
    dim_v = tl.arange(0, BLOCK_V)
    query_place = query + head[:, None] * strides[0] + row * strides[1]
    query_MK = _rows_of(query_place, dim, is_head, SHAPE[1])
    walk_row = walk + row * strides[6]
    num_keys = tl.load(walk_row)
    base = tl.load(walk_row + 1)
    least = _first_key(num_keys, window) if HAS_WINDOW else 0
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINK:
        peak = tl.load(sink + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    sum_MV = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(least // BLOCK_S * BLOCK_S, num_keys, BLOCK_S):
        position = start + tl.arange(0, BLOCK_S)
        is_seen = (position < num_keys) & (position >= least)
        column = _columns_of(walk_row, base, position, is_seen)
        key_place = key + group * strides[2] + column[None, :] * strides[3] + dim[:, None]
        key_KS = tl.load(key_place, mask=is_seen[None, :] & (dim < SHAPE[1])[:, None], other=0.0)
        score = tl.dot(query_MK, key_KS, input_precision="ieee")
        score = _exponents(score, is_seen, scaling, cap, HAS_CAP, LOG2_E)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(peak - higher)
        value_place = value + group * strides[4] + column[:, None] * strides[5]
        value_SV = _rows_of(value_place, dim_v, is_seen, SHAPE[2])
        sum_MV = tl.dot(
            weight.to(value_SV.dtype), value_SV, sum_MV * shrink[:, None], input_precision="ieee"
        )
        total = total * shrink + tl.sum(weight, 1)
        peak = higher
    target = out + (row * tl.num_programs(1) * SHAPE[0] + head)[:, None] * SHAPE[2] + dim_v[None, :]
    result = sum_MV / total[:, None]
    tl.store(
        target, result.to(out.dtype.element_ty), mask=is_head[:, None] & (dim_v < SHAPE[2])[None, :]
    )


@jit
def _rows_of(place: tl.tensor, dim: tl.tensor, is_row: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Load rows that begin at these places, with 0.0 where the mask is false."""
    mask = is_row[:, None] & (dim < WIDTH)[None, :]
    return tl.load(place + dim[None, :], mask=mask, other=0.0)


@jit
def _columns_of(
    walk_row: tl.tensor, base: tl.tensor, position: tl.tensor, is_seen: tl.tensor
) -> tl.tensor:
    """Return the columns of positions: those before `base` have the same numbers."""
    named = tl.load(walk_row + 2 + position - base, mask=is_seen & (position >= base), other=0)
    return tl.where(position >= base, named, position).to(tl.int64)


@jit
def _exponents(
    score: tl.tensor,
    is_seen: tl.tensor,
    scaling: tl.tensor,
    cap: tl.tensor,
    HAS_CAP: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> tl.tensor:
    """Return scores, capped if they are to be, as exponents of 2."""
    if HAS_CAP:
        score = (2 * tl.sigmoid(score * (2 * scaling / cap)) - 1) * (cap * LOG2_E)
    else:
        score = score * (scaling * LOG2_E)
    return tl.where(is_seen[None, :], score, float("-inf"))


@jit
def _first_key(num_keys: tl.tensor, window: tl.tensor) -> tl.tensor:
    """Return the least position that the last of `num_keys` keys sees.

    A chunk's size is passed as a negative window.
    """
    last = num_keys - 1
    chunk = tl.maximum(-window, 1)
    return tl.maximum(tl.where(window > 0, last - window + 1, last // chunk * chunk), 0)
