"""Attention of rows that see a dense prefix and, of the rows behind it, those that a bit mask names.

    columns  [0, P) committed, seen by every row   [P, P + U) uncommitted, bit u of a row's mask for column P + u

As bits a tree's mask is 16 times smaller than in the type of the scores, and it is read only where it can say anything.
Queries that share a key/value head are folded into rows, row t * group + i, so keys and values are read once per group.
The softmax is taken online, in float32. Invariant: every row sees itself, so no row is without a key.
"""

import math
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from offload.kernels.jit import jit, tl, triton

_WORD = 32  # bits
_MIN_SPLIT = 256  # keys: a shorter piece is not worth a program of its own
MAX_WIDTH = 256  # of heads: even halved blocks of wider ones take more shared memory than the 99 KiB of many GPUs
PositionT = TypeVar("PositionT", int, Tensor)
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Chunk(NamedTuple):
    """In place of a window: a row sees no further back than to the last position that is a multiple of `size`."""

    size: int


Window: TypeAlias = int | Chunk | None  # a row sees keys less than so many positions back; None is without limit


def first_seen(window: int | Chunk, position: PositionT) -> PositionT:
    """The least position that a row at `position` sees, which may be negative."""
    return position // window.size * window.size if isinstance(window, Chunk) else position - window + 1


class Sight(NamedTuple):
    """What the rows of one pass see."""

    seen_TW: Tensor  # int32 from `pack_bits`; which of the U uncommitted rows each of the T rows sees, itself included
    num_prefix: int  # P, committed positions 0..P-1
    position_U: Tensor  # int64, absolute, of the uncommitted rows, the last T of them those of this pass; at most P + u
    window: Window = None


def pack_bits(seen_TU: Tensor) -> Tensor:
    """Words (int32, T x ceil(U / 32)) of a bool mask: bit b of word w stands for column 32 w + b."""
    padded = pad(seen_TU, (0, -seen_TU.shape[1] % _WORD)).unflatten(1, (-1, _WORD)).long()
    return (padded << torch.arange(_WORD, device=seen_TU.device)).sum(2).to(torch.int32)


def unpack_bits(word_TW: Tensor, num_columns: int) -> Tensor:
    """The bool mask (T, U) that was packed."""
    bits = (word_TW[:, :, None] >> torch.arange(_WORD, dtype=torch.int32, device=word_TW.device)) & 1
    return bits.flatten(1)[:, :num_columns].bool()


def seen_columns(num_prefix: int, position_U: Tensor, seen_TU: Tensor, window: Window) -> Tensor:
    """Bool (T, P + U): what rows see of the prefix and of the uncommitted rows, as far as their window reaches."""
    seen_TS = torch.cat([seen_TU.new_ones(len(seen_TU), num_prefix), seen_TU], dim=1)
    if window is not None:
        position_S = torch.cat([torch.arange(num_prefix, device=position_U.device), position_U])
        seen_TS &= position_S >= first_seen(window, position_U[-len(seen_TU) :, None])
    return seen_TS


def is_supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes such states, and one sequence of them; (1, H or G, rows, K) each."""
    are_alike = query.dtype == key.dtype == value.dtype and query.dtype in _TYPES
    is_narrow = max(query.shape[3], value.shape[3]) <= MAX_WIDTH
    return are_alike and is_narrow and query.shape[0] == 1 and query.shape[1] % key.shape[1] == 0


def tree_attention_reference(
    query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, sight: Sight, *, scaling: float
) -> Tensor:
    """Attention, (T, H, K) in the type of the queries; in plain torch.

    H is a multiple of G, head h belongs to key/value head h // (H / G); S = P + U; values may be of another width.
    """
    num_heads, num_rows, width = query_HTK.shape
    group = num_heads // key_GSK.shape[0]
    seen_TU, position_U = unpack_bits(sight.seen_TW, key_GSK.shape[1] - sight.num_prefix), sight.position_U
    seen_TS = seen_columns(sight.num_prefix, position_U, seen_TU, sight.window)
    folded = query_HTK.reshape(key_GSK.shape[0], group * num_rows, width)
    seen_RS = seen_TS.repeat(group, 1)
    out = scaled_dot_product_attention(folded, key_GSK, value_GSK, attn_mask=seen_RS, scale=scaling)
    return out.reshape(num_heads, num_rows, -1).transpose(0, 1)


def tree_attention_kernel(
    query_HTK: Tensor,
    key_GSK: Tensor,
    value_GSK: Tensor,
    sight: Sight,
    *,
    scaling: float,
    num_splits: int | None = None,
) -> Tensor:
    """The same in Triton, which reads no dense mask; in so many pieces of the keys (`num_splits`), None chooses."""
    seen_TW, num_prefix, position_U, window = sight
    num_words = triton.cdiv(key_GSK.shape[1] - num_prefix, _WORD)
    assert seen_TW.is_contiguous() and seen_TW.shape == (query_HTK.shape[1], num_words), "one bit per uncommitted row"
    assert query_HTK.stride(2) == key_GSK.stride(2) == value_GSK.stride(2) == 1, "rows have gaps"
    (num_heads, num_rows, width), (num_groups, num_keys, _) = query_HTK.shape, key_GSK.shape
    value_width, group = value_GSK.shape[2], num_heads // num_groups
    # Larger blocks spill registers, or take more shared memory than the 99 KiB that some GPUs grant a program.
    is_float32, is_wide = query_HTK.dtype == torch.float32, max(width, value_width) > 128
    block_rows = min(32 if is_float32 else 64, max(16, triton.next_power_of_2(group * num_rows)))
    block_keys = (32 if is_float32 else 64) // (2 if is_wide else 1)
    num_blocks = triton.cdiv(group * num_rows, block_rows) * num_groups
    splits = num_splits or _choose_splits(num_blocks, num_keys, query_HTK.device)
    split_keys = triton.cdiv(triton.cdiv(num_keys, splits), block_keys) * block_keys
    out_ZTHK = query_HTK.new_empty(
        (splits, num_rows, num_heads, value_width), dtype=query_HTK.dtype if splits == 1 else torch.float32
    )
    mass_ZTH = torch.empty(out_ZTHK.shape[:3], dtype=torch.float32, device=query_HTK.device)
    _attend[(num_blocks // num_groups, num_groups, splits)](
        out_ZTHK,
        mass_ZTH,
        query_HTK,
        key_GSK,
        value_GSK,
        (seen_TW, position_U),
        num_rows,
        num_prefix,
        num_keys,
        split_keys,
        -window.size if isinstance(window, Chunk) else window or 0,
        (*query_HTK.stride()[:2], *key_GSK.stride()[:2], *value_GSK.stride()[:2]),
        float(scaling),
        (group, width, value_width),
        HAS_WINDOW=window is not None,
        BLOCK_R=block_rows,
        BLOCK_S=block_keys,
        BLOCK_K=max(16, triton.next_power_of_2(width)),
        BLOCK_V=max(16, triton.next_power_of_2(value_width)),
        num_warps=8 if is_float32 or is_wide else 4,
        num_stages=2,
    )
    return out_ZTHK[0] if splits == 1 else _merge(out_ZTHK, mass_ZTH).to(query_HTK.dtype)


def _choose_splits(num_blocks: int, num_keys: int, device: torch.device) -> int:
    """Pieces of the keys, so that few rows still fill the device with two programs per multiprocessor."""
    if device.type != "cuda":  # the interpreter takes one program after the other
        return 1
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * num_processors // num_blocks, math.ceil(num_keys / _MIN_SPLIT)))


def _merge(out_ZTHK: Tensor, mass_ZTH: Tensor) -> Tensor:
    """Pieces weighted by the softmax mass that each has seen, given as log2; a piece may have seen nothing."""
    weight_ZTH = torch.exp2(mass_ZTH - mass_ZTH.amax(0))
    return (out_ZTHK * weight_ZTH[..., None]).sum(0) / weight_ZTH.sum(0)[..., None]


@jit(do_not_specialize=["num_rows", "num_prefix", "num_keys", "split_keys", "window", "scaling"])
def _attend(
    out: tl.tensor,
    mass: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    masks: tl.tensor,
    num_rows: tl.tensor,
    num_prefix: tl.tensor,
    num_keys: tl.tensor,
    split_keys: tl.tensor,
    window: tl.tensor,
    strides: tl.tensor,
    scaling: tl.tensor,
    SHAPE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program takes a block of folded rows of one key/value head through a piece of the keys."""
    num_words = (num_keys - num_prefix + 31) // 32
    group: tl.constexpr = SHAPE[0]
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    time, head = row // group, tl.program_id(1) * group + row % group
    is_row, dim = time < num_rows, tl.arange(0, BLOCK_K)
    place = query + head[:, None] * strides[0] + time[:, None] * strides[1] + dim[None, :]
    query_RK = tl.load(place, mask=is_row[:, None] & (dim < SHAPE[1])[None, :], other=0.0)
    lo = tl.program_id(2) * split_keys
    hi = tl.minimum(lo + split_keys, num_keys)
    reach = tl.full((BLOCK_R,), -1, tl.int32)  # a row sees keys at later positions than this
    if HAS_WINDOW:
        own = tl.load(masks[1] + (num_keys - num_prefix - num_rows) + time, mask=is_row, other=2147483647)
        chunk = tl.maximum(-window, 1)  # its size, where the window is one
        reach = tl.where(window > 0, own - window, own // chunk * chunk - 1).to(tl.int32)
        first = tl.maximum(tl.min(reach, 0) + 1, 0)  # column c holds a position of at most c
        lo = tl.maximum(lo, first // BLOCK_S * BLOCK_S)
    rows = (time, is_row, reach)
    group_at = tl.program_id(1).to(tl.int64)  # in a long cache of many heads the last one lies beyond 2^31 numbers
    piece = (key + group_at * strides[2], value + group_at * strides[4])
    state = (
        tl.full((BLOCK_R,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_R,), tl.float32),
        tl.zeros((BLOCK_R, BLOCK_V), tl.float32),
    )
    edge = tl.minimum(hi, num_prefix // BLOCK_S * BLOCK_S)  # blocks before it lie in the prefix
    for start in range(lo, edge, BLOCK_S):
        state = _block(state, query_RK, piece, rows, masks, (start, hi, num_prefix, num_words), strides, scaling, SHAPE,
                       HAS_WINDOW, False, BLOCK_S, BLOCK_V)  # fmt: skip
    for start in range(tl.maximum(lo, edge), hi, BLOCK_S):
        state = _block(state, query_RK, piece, rows, masks, (start, hi, num_prefix, num_words), strides, scaling, SHAPE,
                       HAS_WINDOW, True, BLOCK_S, BLOCK_V)  # fmt: skip
    _store(out, mass, state, time, head, is_row, num_rows, SHAPE, BLOCK_V)


@jit
def _store(
    out: tl.tensor,
    mass: tl.tensor,
    state: tl.tensor,
    time: tl.tensor,
    head: tl.tensor,
    is_row: tl.tensor,
    num_rows: tl.tensor,
    SHAPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """The weighted mean of the values and log2 of its mass; a piece of the keys may have shown a row nothing."""
    peak, total, sum_RV = state
    column, target = (
        tl.arange(0, BLOCK_V),
        (tl.program_id(2) * num_rows + time) * (tl.num_programs(1) * SHAPE[0]) + head,
    )
    has_seen = total > 0
    result = sum_RV / tl.where(has_seen, total, 1.0)[:, None]
    is_inside = is_row[:, None] & (column < SHAPE[2])[None, :]
    place = out + target.to(tl.int64)[:, None] * SHAPE[2] + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_inside)
    tl.store(mass + target, tl.where(has_seen, peak + tl.log2(tl.where(has_seen, total, 1.0)), peak), mask=is_row)


@jit
def _block(
    state: tl.tensor,
    query_RK: tl.tensor,
    piece: tl.tensor,
    rows: tl.tensor,
    masks: tl.tensor,
    place: tl.tensor,
    strides: tl.tensor,
    scaling: tl.tensor,
    SHAPE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_TREE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tl.tensor:
    """The online softmax takes in one block of keys: its peak (a power of two), its total and the weighted values."""
    peak, total, sum_RV = state
    time, is_row, reach = rows
    start, hi, num_prefix, num_words = place
    column, dim, dim_v = start + tl.arange(0, BLOCK_S), tl.arange(0, query_RK.shape[1]), tl.arange(0, BLOCK_V)
    is_key = column < hi
    key_place = piece[0] + column[None, :] * strides[3] + dim[:, None]
    key_KS = tl.load(key_place, mask=is_key[None, :] & (dim < SHAPE[1])[:, None], other=0.0)
    score = tl.dot(query_RK, key_KS, input_precision="ieee") * scaling
    is_seen = is_key[None, :] & is_row[:, None]
    if IN_TREE:
        node = column - num_prefix
        is_node = is_key & (node >= 0)
        word_place = masks[0] + time[:, None] * num_words + (node >> 5)[None, :]
        word = tl.load(word_place, mask=is_row[:, None] & is_node[None, :], other=-1)
        is_seen = is_seen & (((word >> (node & 31)[None, :]) & 1) != 0)
        if HAS_WINDOW:
            position = tl.where(is_node, tl.load(masks[1] + node, mask=is_node, other=0).to(tl.int32), column)
            is_seen = is_seen & (position[None, :] > reach[:, None])
    elif HAS_WINDOW:
        is_seen = is_seen & (column[None, :] > reach[:, None])
    score = tl.where(is_seen, score * 1.4426950408889634, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    value_place = piece[1] + column[:, None] * strides[5] + dim_v[None, :]
    value_SV = tl.load(value_place, mask=is_key[:, None] & (dim_v < SHAPE[2])[None, :], other=0.0)
    sum_RV = tl.dot(weight.to(value_SV.dtype), value_SV, sum_RV * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weight, 1), sum_RV
