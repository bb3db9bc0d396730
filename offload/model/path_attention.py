"""Attention whose sums depend on a row's own path alone: not on its tree, nor on how it was cut.

A sum of floating-point numbers depends on their order, and the keys of a tree's path lie at
scattered columns. So keys are taken by their position on the path, in blocks of 64, and blocks are
added up one after another in float32.

    [0, base)      full blocks that lie in order for every row
    [base, ...)    columns of a tree, whose rows share few of them

`kernels/` have machine code for a CPU and a kernel for a GPU. Here are the walks that both follow,
and what computes the same wherever torch does: each row has keys of its own behind `base`, and
weights are added up by the same products as values, as one column of the values is ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.path_attention import BLOCK, HEADER, PathRows, ScoreTerms, Window, first_seen
from offload.kernels.path_attention_cpu import attention_of, can_attend
from offload.memory.sizes import PATH_SCRATCH_BYTES
from offload.model.invariant import in_whole_vectors, widened
from offload.model.row_sizes import MOST_STACKED_ROWS
from offload.model.thread_team import compute

_SPAN = 8 * BLOCK  # keys whose scores are one product: each number of them is tried once
_TILE_BYTES = PATH_SCRATCH_BYTES // 4  # of scores at once
# columns behind the values, the first of which is used: an odd number of them makes products slow
_ONES = 16
_LEAST_WIDTH = 32  # of keys and values: narrower ones are multiplied in ways of their own
# scores are exponents of 2: the exponential of -inf takes a multiple of the time
_LOG2_E = math.log2(math.e)
# a product, its rows, its second factor; see `BatchInvariantProducts.multiply`
MultiplyBy = Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _call_product(product: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
    return product(left, right)


def path_rows(
    num_prefix: int,
    ancestor_TU: Tensor,
    attend: Callable[..., Tensor],
    send: Callable[[Tensor], Tensor] = _identity,
) -> PathRows:
    """Return the last T of U uncommitted rows behind P committed ones, without a window.

    `ancestor_TU` is as in `tree_mask`, on the host; `send` brings tensors to where rows are
    computed.
    """
    sees_TU = ancestor_TU.numpy()
    num_rows, num_uncommitted = sees_TU.shape
    column_T = num_prefix + np.arange(num_uncommitted - num_rows, num_uncommitted)
    base = (num_prefix + _num_linear(sees_TU)) // BLOCK * BLOCK
    # nodes before `first` lie before `base`: a path that goes on behind `base` has all of them
    first = max(0, base - num_prefix)
    # all pairs of a row and a node behind `base` on its path, row by row
    row_E, node_E = np.divmod(np.flatnonzero(sees_TU[:, first:]), max(1, num_uncommitted - first))
    count_T = np.bincount(row_E, minlength=num_rows)
    # a path without such nodes ends before `base`, where all columns are in order
    length_T = np.where(count_T > 0, num_prefix + first + count_T, column_T + 1)
    num_columns = -(-max(0, int(length_T.max()) - base) // BLOCK) * BLOCK
    walk_TL = np.empty((num_rows, HEADER + num_columns), np.int32)
    walk_TL[:, 0] = length_T
    walk_TL[:, 1] = base
    walked_TL = walk_TL[:, HEADER:]
    # padding: the row's own column, whose keys are numbers
    walked_TL[:] = column_T[:, None]
    # committed positions behind `base`, then the nodes of each path in order
    num_committed = max(0, num_prefix - base)
    walked_TL[:, :num_committed] = base + np.arange(num_committed)
    nth_E = np.arange(len(row_E)) - (count_T.cumsum() - count_T)[row_E]
    walked_TL[row_E, num_committed + nth_E] = num_prefix + first + node_E
    return PathRows(send(torch.from_numpy(walk_TL)), None, attend)


def _num_linear(sees_TU: np.ndarray) -> int:
    """Return the number of first columns that every row from there on sees."""
    num_rows, num_uncommitted = sees_TU.shape
    for lo in range(0, num_uncommitted, BLOCK):
        column_B = np.arange(lo, min(lo + BLOCK, num_uncommitted))
        num_later_B = np.minimum(num_rows, num_uncommitted - column_B)
        is_linear_B = np.count_nonzero(sees_TU[:, lo : lo + BLOCK], axis=0) == num_later_B
        if not is_linear_B.all():
            return lo + int(is_linear_B.argmin())
    return num_uncommitted


def path_attention(
    query_HTK: Tensor,
    key_GSK: Tensor,
    value_GSK: Tensor,
    rows: PathRows,
    terms: ScoreTerms,
    *,
    multiply: MultiplyBy = _call_product,
) -> Tensor:
    """See `path_attention_kernel`, whose reference this is: by products that `multiply` makes.

    Few groups are computed at once, so that their scores stay in a processor's cache.
    """
    num_heads, num_rows, _ = query_HTK.shape
    num_groups = len(key_GSK)
    group = num_heads // num_groups
    kind = (rows.window, num_rows, group)
    wide = max(_LEAST_WIDTH, key_GSK.shape[2], _extended_width(value_GSK.shape[2]))
    pieces = rows.once(kind, lambda: _pieces(rows, num_rows, group, wide))
    chosen_TS = None if rows.chosen_TS is None else rows.chosen_TS[-num_rows:]
    query_GTIK = query_HTK.unflatten(0, (num_groups, group)).transpose(1, 2)
    out_TGIV = query_HTK.new_empty(num_rows, num_groups, group, value_GSK.shape[2])
    for piece in pieces:
        some_rows = slice(piece.lo, piece.hi)
        chosen = None if chosen_TS is None else chosen_TS[some_rows]
        own_numbers = (piece.hi - piece.lo) * BLOCK * wide
        step = max(1, _TILE_BYTES // (4 * max(group * piece.num_scores, own_numbers)))
        for first in range(0, num_groups, step):
            some = slice(first, first + step)
            own_terms = _terms_of(terms, some, num_groups)
            call = _Call(piece, rows.window, own_terms, multiply, chosen)
            mean_GTIV = call.attend(query_GTIK[some, some_rows], key_GSK[some], value_GSK[some])
            out_TGIV[some_rows, some] = mean_GTIV.transpose(0, 1)
    return out_TGIV.flatten(1, 2)


def attend_along_paths(
    query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute `path_attention`, whose arguments these are, as quickly as this processor can."""
    if not can_attend(key_GSK, value_GSK):
        return path_attention(query_HTK, key_GSK, value_GSK, *args, **kwargs)
    return compute(attention_of(query_HTK, key_GSK, value_GSK, *args)).to(query_HTK.dtype)


def try_scores(multiply: MultiplyBy, key_GSK: Tensor, value_GSK: Tensor) -> None:
    """Make all products that `attend_along_paths` takes of longer texts, for heads as wide as these."""
    if can_attend(key_GSK, value_GSK):
        return
    width = max(_LEAST_WIDTH, key_GSK.shape[2])
    for num_keys in range(BLOCK, _SPAN + 1, BLOCK):
        key_1SK = key_GSK.new_zeros(1, num_keys, width, dtype=torch.float32)
        multiply(torch.bmm, key_1SK[:, :1], key_1SK.transpose(1, 2))


def _extended_width(value_width: int) -> int:
    """Return the width of values with ones behind them: a multiple of what processors take at once."""
    return max(_LEAST_WIDTH, value_width) + _ONES


def _terms_of(terms: ScoreTerms, some: slice, num_groups: int) -> ScoreTerms:
    """Return the terms of the heads of some groups."""
    if terms.sink_H is None:
        return terms
    return replace(terms, sink_H=terms.sink_H.unflatten(0, (num_groups, -1))[some].flatten())


class _OwnKeys(NamedTuple):
    """Keys of one block of positions behind `base`, which each row of a piece has for itself."""

    column_TB: Tensor  # behind `base`, int64
    mask_TB: Tensor  # float32: 0.0, or -inf for a column that the row does not see


class _Piece(NamedTuple):
    """Some rows of a pass, which all end before `base` or all behind it."""

    lo: int
    hi: int
    base: int
    seen_T: Tensor  # positions, on the host
    shared: tuple[int, int]  # positions before `base` that they look at, whole blocks
    unshared: tuple[_OwnKeys, ...]  # block after block

    @property
    def num_scores(self) -> int:
        """Return the scores of one head."""
        num_shared = self.shared[1] - self.shared[0]
        return (self.hi - self.lo) * (num_shared + BLOCK * len(self.unshared))


def _pieces(rows: PathRows, num_rows: int, group: int, wide: int) -> Sequence[_Piece]:
    """Return the last rows of a pass, in pieces whose scores of one group fit into a tile."""
    walk_TL = rows.walk_TL[-num_rows:].cpu().numpy()
    base = int(walk_TL[0, 1])
    # rows whose paths end before `base`: the first ones
    num_early = int((walk_TL[:, 0] <= base).sum())
    # each row has keys of its own, so wide each, beside its scores
    row_bytes = 4 * max(group * (base + 2 * BLOCK), BLOCK * wide)
    most = max(1, min(_TILE_BYTES // row_bytes, MOST_STACKED_ROWS // group))
    return [
        _piece(walk_TL, lo, min(lo + most, end), rows)
        for start, end in ((0, num_early), (num_early, num_rows))
        for lo in range(start, end, most)
    ]


def _piece(walk_TL: np.ndarray, lo: int, hi: int, rows: PathRows) -> _Piece:
    """Return rows [lo, hi) with the keys that they share, and their own keys in blocks."""
    window = rows.window
    place = rows.walk_TL.device
    seen_T = torch.from_numpy(walk_TL[lo:hi, 0].astype(np.int64))
    base = int(walk_TL[0, 1])
    most = int(seen_T.max())
    first = 0 if window is None else max(0, first_seen(window, int(seen_T.min()) - 1))
    first = first // BLOCK * BLOCK
    end = max(first, min(base, -(-most // BLOCK) * BLOCK))
    unshared = []
    for start in range(base, most, BLOCK):
        column = HEADER + start - base
        column_TB = torch.from_numpy(walk_TL[lo:hi, column : column + BLOCK].astype(np.int64))
        is_seen_TB = _is_seen(torch.arange(start, start + BLOCK), seen_T[:, None], window)
        if is_seen_TB.any():
            unshared.append(_OwnKeys((column_TB - base).to(place), _mask_of(is_seen_TB).to(place)))
    return _Piece(lo, hi, base, seen_T, (first, end), tuple(unshared))


def _is_seen(position_S: Tensor, seen_T1: Tensor, window: Window) -> Tensor:
    """Tell which positions rows see, by the lengths of their paths."""
    is_seen_TS = position_S < seen_T1
    if window is not None:
        is_seen_TS &= position_S >= first_seen(window, seen_T1 - 1)
    return is_seen_TS


def _mask_of(is_seen: Tensor) -> Tensor:
    """Return 0.0, or -inf for what is not seen."""
    mask = torch.zeros(is_seen.shape, device=is_seen.device)
    return mask.masked_fill_(~is_seen, -torch.inf)


class _Call(NamedTuple):
    """Attention of a piece, for some groups."""

    piece: _Piece
    window: Window
    terms: ScoreTerms
    multiply: MultiplyBy
    chosen_TS: Tensor | None  # of the piece's rows

    def attend(self, query_GTIK: Tensor, key_GSK: Tensor, value_GSV: Tensor) -> Tensor:
        """Return weighted means (G, T, I, V) of the values, float32, of I queries for each of G."""
        base = self.piece.base
        factor = self.terms.scaling * (1.0 if self.terms.cap else _LOG2_E)
        query_GTIK = _in_float32(query_GTIK).mul(factor)
        spans = range(*self.piece.shared, _SPAN)
        shared = [self._shared_scores(query_GTIK, key_GSK, first) for first in spans]
        key_GUK = key_GSK[:, base:]
        unshared = [self._own_scores(query_GTIK, key_GUK, keys) for keys in self.piece.unshared]
        sink_GTIs = self._sinks(query_GTIK)
        parts = [*shared, *unshared, *([] if sink_GTIs is None else [sink_GTIs])]
        peak_GTI1 = reduce(torch.maximum, (part.amax(3, keepdim=True) for part in parts))
        for part in parts:
            part.sub_(peak_GTI1)
        shared = [in_whole_vectors(Tensor.exp2_, part) for part in shared]
        unshared = [in_whole_vectors(Tensor.exp2_, part) for part in unshared]
        own_sums = self._own_sums(unshared, value_GSV[:, base:])
        sum_GTIW = reduce(Tensor.add_, chain(self._shared_sums(shared, value_GSV), own_sums))
        width = value_GSV.shape[2]
        total_GTI1 = sum_GTIW[..., width : width + 1]
        if sink_GTIs is not None:
            total_GTI1 = total_GTI1 + in_whole_vectors(torch.exp2, sink_GTIs).sum(3, keepdim=True)
        return sum_GTIW[..., :width].div_(total_GTI1)

    def _shared_scores(self, query_GTIK: Tensor, key_GSK: Tensor, lo: int) -> Tensor:
        """Return the scores of the span that begins there."""
        hi = min(lo + _SPAN, self.piece.shared[1])
        keys_GKS = _in_float32(key_GSK[:, lo:hi]).transpose(1, 2)
        score_GAS = self.multiply(torch.bmm, query_GTIK.flatten(1, 2), keys_GKS)
        score_GTIS = self._capped(score_GAS.unflatten(1, query_GTIK.shape[1:3]))
        seen_T = self.piece.seen_T
        if self.window is not None or int(seen_T.min()) < hi:
            seen_T11 = seen_T[:, None, None].to(score_GTIS.device)
            position_S = torch.arange(lo, hi, device=score_GTIS.device)
            score_GTIS.add_(_mask_of(_is_seen(position_S, seen_T11, self.window)))
        if self.chosen_TS is not None:
            score_GTIS.add_(_mask_of(self.chosen_TS[:, None, lo:hi]))
        return score_GTIS

    def _own_scores(self, query_GTIK: Tensor, key_GUK: Tensor, keys: _OwnKeys) -> Tensor:
        """Return (G, T, I, B)."""
        num_groups, num_rows, group, width = query_GTIK.shape
        key_EK = _in_float32(key_GUK.index_select(1, keys.column_TB.flatten()))
        key_EBK = key_EK.reshape(num_groups * num_rows, BLOCK, -1)
        query_EIK = query_GTIK.reshape(num_groups * num_rows, group, width)
        score_EIB = self.multiply(torch.bmm, query_EIK, key_EBK.transpose(1, 2))
        score_GTIB = self._capped(score_EIB).reshape(num_groups, num_rows, group, BLOCK)
        score_GTIB.add_(keys.mask_TB[:, None])
        if self.chosen_TS is not None:
            chosen_TB = self.chosen_TS[:, self.piece.base :].gather(1, keys.column_TB)
            score_GTIB.add_(_mask_of(chosen_TB[:, None]))
        return score_GTIB

    def _shared_sums(self, weights: Sequence[Tensor], value_GSV: Tensor) -> Iterator[Tensor]:
        """Yield the sums (G, T, I, W) of each block."""
        lo = self.piece.shared[0]
        extended_GBW = _extended(value_GSV, BLOCK)
        for weight_GTIB in (block for part in weights for block in part.split(BLOCK, 3)):
            extended_GBW[..., : value_GSV.shape[2]].copy_(value_GSV[:, lo : lo + BLOCK])
            sum_GAW = self.multiply(torch.bmm, weight_GTIB.flatten(1, 2), extended_GBW)
            yield sum_GAW.unflatten(1, weight_GTIB.shape[1:3])
            lo += BLOCK

    def _own_sums(self, weights: Sequence[Tensor], value_GUV: Tensor) -> Iterator[Tensor]:
        for keys, weight_GTIB in zip(self.piece.unshared, weights, strict=True):
            num_groups, num_rows, group, _ = weight_GTIB.shape
            column_E = keys.column_TB.flatten()
            extended_GEW = _extended(value_GUV, len(column_E))
            extended_GEW[..., : value_GUV.shape[2]].copy_(value_GUV.index_select(1, column_E))
            extended_EBW = extended_GEW.reshape(num_groups * num_rows, BLOCK, -1)
            weight_EIB = weight_GTIB.reshape(-1, group, BLOCK)
            sum_EIW = self.multiply(torch.bmm, weight_EIB, extended_EBW)
            yield sum_EIW.reshape(num_groups, num_rows, group, -1)

    def _capped(self, score_GTIS: Tensor) -> Tensor:
        cap = self.terms.cap
        return score_GTIS if cap is None else score_GTIS.div_(cap).tanh_().mul_(cap * _LOG2_E)

    def _sinks(self, query_GTIK: Tensor) -> Tensor | None:
        """Return a column of scores where the family has sinks."""
        if self.terms.sink_H is None:
            return None
        num_groups, num_rows, *_ = query_GTIK.shape
        sink_G1I1 = (self.terms.sink_H.float() * _LOG2_E).reshape(num_groups, 1, -1, 1)
        return sink_G1I1.repeat(1, num_rows, 1, 1)


def _in_float32(states: Tensor) -> Tensor:
    """Return rows without gaps; with zeros behind, narrow ones are multiplied alike."""
    return widened(states.float().contiguous(), _LEAST_WIDTH)


def _extended(value_GSV: Tensor, num_columns: int) -> Tensor:
    """Return room for this many values, (G, C, W), with ones behind them."""
    num_groups, _, width = value_GSV.shape
    sizes = (num_groups, num_columns, _extended_width(width))
    extended_GCW = value_GSV.new_zeros(sizes, dtype=torch.float32)
    extended_GCW[..., width] = 1.0
    return extended_GCW
