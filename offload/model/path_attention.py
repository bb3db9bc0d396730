"""Attention whose sums depend on a row's own path alone: not on the tree around it, nor on how the
text was cut.

A sum of floating-point numbers depends on their order, and the keys of a tree's path lie at
scattered columns. So keys are taken by their position on the path, in blocks of 64, and blocks are
added up one after another in float32.

    [0, base)      full blocks that lie in order for every row
    [base, ...)    columns of a tree, whose rows share few of them

A CPU computes it by machine code of our own (`kernels/path_attention_cpu.py`), a GPU by a kernel
(`kernels/path_attention.py`). Here are the walks that both follow, and what computes the same
wherever torch does: there each row has keys of its own behind `base`, and weights are added up by
the same products as values, as one column of the values is ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.path_attention import BLOCK, HEADER, PathRows, ScoreTerms, Window, first_seen
from offload.kernels.path_attention_cpu import attention_of, can_attend
from offload.memory.plan import PATH_SCRATCH_BYTES
from offload.model.invariant import InvariantRows, in_whole_vectors
from offload.model.row_sizes import MOST_STACKED_ROWS
from offload.model.scratch import Scratch
from offload.model.thread_team import compute

_SPAN = 8 * BLOCK  # keys whose scores are one product: each number of them is tried once
_TILE_BYTES = PATH_SCRATCH_BYTES // 4  # of scores at once
# columns behind the values, the first of which is used: an odd number of them makes products slow
_ONES = 16
_LEAST_WIDTH = 32  # of keys and values: narrower ones are multiplied in ways of their own
# scores are exponents of 2: the exponential of -inf takes a multiple of the time
_LOG2_E = math.log2(math.e)
# a product, its rows, its second factor, and as `out` where to put the result
MultiplyBy = Callable[..., Tensor]


def _stay(tensor: Tensor) -> Tensor:
    return tensor


def _plainly(
    product: Callable[..., Tensor], left: Tensor, right: Tensor, out: Tensor | None = None
) -> Tensor:
    return product(left, right, out=out)


def path_rows(
    num_prefix: int,
    ancestor_TU: Tensor,
    attend: Callable[..., Tensor],
    send: Callable[[Tensor], Tensor] = _stay,
) -> PathRows:
    """Return rows that are the last T of U uncommitted ones behind P committed ones; without a
    window.

    `ancestor_TU` is as in `tree_mask`, on the host; `send` brings tensors to where rows are
    computed.
    """
    sees_TU = ancestor_TU.numpy()
    num_rows, num_uncommitted = sees_TU.shape
    own_T = np.arange(num_uncommitted - num_rows, num_uncommitted)
    base = (num_prefix + _num_linear(sees_TU)) // BLOCK * BLOCK
    # uncommitted rows before it are seen by all whose paths go on behind `base`
    first = max(0, base - num_prefix)
    row_E, node_E = np.divmod(np.flatnonzero(sees_TU[:, first:]), max(1, num_uncommitted - first))
    count_T = np.bincount(row_E, minlength=num_rows)
    length_T = np.where(count_T > 0, num_prefix + first + count_T, own_T + num_prefix + 1)
    num_columns = -(-max(0, int(length_T.max()) - base) // BLOCK) * BLOCK
    walk_TL = np.empty((num_rows, HEADER + num_columns), np.int32)
    walk_TL[:, 0] = length_T
    walk_TL[:, 1] = base
    column_TL = walk_TL[:, HEADER:]
    column_TL[:] = (own_T + num_prefix)[:, None]  # any that holds numbers
    column_TL[:, : max(0, num_prefix - base)] = np.arange(base, max(base, num_prefix))
    nth_E = np.arange(len(row_E)) - (count_T.cumsum() - count_T)[row_E] + max(0, num_prefix - base)
    column_TL[row_E, nth_E] = node_E + first + num_prefix
    return PathRows(send(torch.from_numpy(walk_TL)), None, attend)


def _num_linear(sees_TU: np.ndarray) -> int:
    """Return how many columns, the first ones, every row from there on sees."""
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
    multiply: MultiplyBy = _plainly,
    scratch: Scratch | None = None,
) -> Tensor:
    """See `path_attention_kernel`, of which this is the reference: by products of torch, which
    `multiply` makes.

    Few groups are computed at once, so that their scores stay in a processor's cache. `scratch` is
    what they are computed in; another caller must not use it meanwhile.
    """
    scratch = scratch or Scratch(0)
    num_heads, num_rows, _ = query_HTK.shape
    num_groups = len(key_GSK)
    group = num_heads // num_groups
    kind = (rows.window, num_rows, group)
    wide = max(_LEAST_WIDTH, key_GSK.shape[2], _extended_width(value_GSK.shape[2]))
    pieces = rows.kept.get(kind)
    if pieces is None:
        pieces = rows.kept[kind] = _pieces(rows, num_rows, group, wide)
    chosen_TS = None if rows.chosen_TS is None else rows.chosen_TS[-num_rows:]
    query_GTIK = query_HTK.unflatten(0, (num_groups, group)).transpose(1, 2)
    out_TGIV = query_HTK.new_empty(num_rows, num_groups, group, value_GSK.shape[2])
    for piece in pieces:
        own_numbers = (piece.hi - piece.lo) * BLOCK * wide
        step = max(1, _TILE_BYTES // (4 * max(group * piece.num_scores, own_numbers)))
        for first in range(0, num_groups, step):
            some = slice(first, first + step)
            scratch.begin()
            own_terms = _terms_of(terms, some, num_groups)
            call = _Call(piece, rows.window, own_terms, multiply, scratch, chosen_TS)
            mean_GTIV = call.attend(
                query_GTIK[some, piece.lo : piece.hi], key_GSK[some], value_GSK[some]
            )
            out_TGIV[piece.lo : piece.hi, some] = mean_GTIV.transpose(0, 1)
    return out_TGIV.flatten(1, 2)


def attend_along_paths(
    query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, *how: Any, **more: Any
) -> Tensor:
    """Compute `path_attention`, whose arguments these are, as quickly as can be without a kernel of
    this device.
    """
    if not can_attend(key_GSK, value_GSK):
        return path_attention(query_HTK, key_GSK, value_GSK, *how, **more)
    attention = attention_of(query_HTK, key_GSK, value_GSK, *how)
    compute(attention.work)
    return attention.out_THV.to(query_HTK.dtype)


class InvariantAttention:
    """`attend_along_paths` whose sums have the same bits whatever rows share a pass.

    Where torch computes it, that is by products that `invariant` makes.
    """

    def __init__(self, invariant: InvariantRows) -> None:
        self._invariant = invariant
        self._scratch = Scratch(PATH_SCRATCH_BYTES // 2)  # the other half is left to products

    def __call__(self, *what: Any) -> Tensor:
        multiply = self._invariant.multiply
        return attend_along_paths(*what, multiply=multiply, scratch=self._scratch)

    def try_out(self, key_GSK: Tensor, value_GSK: Tensor) -> None:
        """Try all products that scores of longer texts are, for heads as wide as these."""
        if can_attend(key_GSK, value_GSK):
            return
        width = max(_LEAST_WIDTH, key_GSK.shape[2])
        for num_keys in range(BLOCK, _SPAN + 1, BLOCK):
            key_1SK = key_GSK.new_zeros(1, num_keys, width, dtype=torch.float32)
            self._invariant.multiply(torch.bmm, key_1SK[:, :1], key_1SK.transpose(1, 2))


def _extended_width(value_width: int) -> int:
    """Return the width of values with ones behind them: a multiple of what processors take at once."""
    return max(_LEAST_WIDTH, value_width) + _ONES


def _mask_of(is_seen: Tensor) -> Tensor:
    """Return 0.0, or -inf for what is not seen."""
    mask = torch.zeros(is_seen.shape, device=is_seen.device)
    return mask.masked_fill_(~is_seen, -torch.inf)


def _terms_of(terms: ScoreTerms, some: slice, num_groups: int) -> ScoreTerms:
    """Return the terms of the heads of some groups."""
    sink_H = (
        None
        if terms.sink_H is None
        else terms.sink_H.unflatten(0, (num_groups, -1))[some].flatten()
    )
    return ScoreTerms(terms.scaling, terms.cap, sink_H)


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
    own: tuple[_OwnKeys, ...]  # block after block

    @property
    def num_scores(self) -> int:
        """Return the scores of one head."""
        num_shared = self.shared[1] - self.shared[0]
        return (self.hi - self.lo) * (num_shared + BLOCK * len(self.own))


def _pieces(rows: PathRows, num_rows: int, group: int, wide: int) -> Sequence[_Piece]:
    """Return the last rows of a pass, so many at a time that scores of one group fit into a tile."""
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
    seen_T = walk_TL[lo:hi, 0]
    base = int(walk_TL[0, 1])
    least = int(seen_T.min())
    most = int(seen_T.max())
    first = (
        0 if rows.window is None else max(0, first_seen(rows.window, least - 1)) // BLOCK * BLOCK
    )
    end = max(first, min(base, -(-most // BLOCK) * BLOCK))
    own = []
    for start in range(base, most, BLOCK):
        column_TB = walk_TL[lo:hi, HEADER + start - base : HEADER + start - base + BLOCK] - base
        is_seen_TB = _is_seen(start + np.arange(BLOCK), seen_T[:, None], rows.window)
        if is_seen_TB.any():
            own.append(_own_keys(column_TB, is_seen_TB, rows.walk_TL.device))
    return _Piece(lo, hi, base, torch.from_numpy(seen_T.astype(np.int64)), (first, end), tuple(own))


def _is_seen(position_S: np.ndarray, seen_T1: np.ndarray, window: Window) -> np.ndarray:
    is_seen_TS = position_S < seen_T1
    return (
        is_seen_TS
        if window is None
        else is_seen_TS & (position_S >= first_seen(window, seen_T1 - 1))
    )


def _own_keys(column_TB: np.ndarray, is_seen_TB: np.ndarray, place: torch.device) -> _OwnKeys:
    mask_TB = np.where(is_seen_TB, 0.0, -np.inf).astype(np.float32)
    return _OwnKeys(
        torch.from_numpy(column_TB.astype(np.int64)).to(place), torch.from_numpy(mask_TB).to(place)
    )


class _Call:
    """Attention of a piece, for some groups."""

    def __init__(
        self,
        piece: _Piece,
        window: Window,
        terms: ScoreTerms,
        multiply: MultiplyBy,
        scratch: Scratch,
        chosen_TS: Tensor | None,
    ) -> None:
        self._piece = piece
        self._window = window
        self._terms = terms
        self._multiply = multiply
        self._scratch = scratch
        self._chosen_TS = None if chosen_TS is None else chosen_TS[piece.lo : piece.hi]

    def attend(self, query_GTIK: Tensor, key_GSK: Tensor, value_GSV: Tensor) -> Tensor:
        """Return weighted means (G, T, I, V) of the values, float32; queries are of I heads for
        each of G.
        """
        lo, hi = self._piece.shared
        query_GTIK = self._in_float32(query_GTIK).mul_(
            self._terms.scaling * (1.0 if self._terms.cap else _LOG2_E)
        )
        shared = [self._shared_scores(query_GTIK, key_GSK, first) for first in range(lo, hi, _SPAN)]
        own = [
            self._own_scores(query_GTIK, key_GSK[:, self._piece.base :], keys)
            for keys in self._piece.own
        ]
        sink_GTIs = self._sinks(query_GTIK)
        parts = [*shared, *own, *([] if sink_GTIs is None else [sink_GTIs])]
        peak_GTI1 = reduce(torch.maximum, (part.amax(3, keepdim=True) for part in parts))
        for part in parts:
            part.sub_(peak_GTI1)
        shared, own = (
            [in_whole_vectors(Tensor.exp2_, part) for part in some] for some in (shared, own)
        )
        own_sums = self._own_sums(own, value_GSV[:, self._piece.base :])
        sum_GTIW = reduce(Tensor.add_, chain(self._shared_sums(shared, value_GSV), own_sums))
        width = value_GSV.shape[2]
        total_GTI1 = sum_GTIW[..., width : width + 1]
        if sink_GTIs is not None:
            total_GTI1 = total_GTI1 + in_whole_vectors(torch.exp2, sink_GTIs).sum(3, keepdim=True)
        return sum_GTIW[..., :width].div_(total_GTI1)

    def _shared_scores(self, query_GTIK: Tensor, key_GSK: Tensor, lo: int) -> Tensor:
        """Return the scores of the span that begins there."""
        hi = min(lo + _SPAN, self._piece.shared[1])
        keys_GKS = self._in_float32(key_GSK[:, lo:hi]).transpose(1, 2)
        score_GTIS = self._capped(
            self._times(query_GTIK.flatten(1, 2), keys_GKS).unflatten(1, query_GTIK.shape[1:3])
        )
        seen_T11 = self._piece.seen_T[:, None, None]
        if self._window is not None or int(seen_T11.min()) < hi:
            self._hide(score_GTIS, lo, seen_T11.to(score_GTIS.device))
        if self._chosen_TS is not None:
            score_GTIS.add_(_mask_of(self._chosen_TS[:, None, lo:hi]))
        return score_GTIS

    def _hide(self, score_GTIS: Tensor, lo: int, seen_T11: Tensor) -> None:
        """Hide what lies behind a row, and what its window does not reach.

        The first column is that of position `lo`.
        """
        position_S = torch.arange(lo, lo + score_GTIS.shape[3], device=score_GTIS.device)
        is_hidden_T1S = position_S >= seen_T11
        if self._window is not None:
            is_hidden_T1S |= position_S < first_seen(self._window, seen_T11 - 1)
        mask_T1S = torch.zeros(is_hidden_T1S.shape, device=score_GTIS.device).masked_fill_(
            is_hidden_T1S, -torch.inf
        )
        score_GTIS.add_(mask_T1S)

    def _own_scores(self, query_GTIK: Tensor, key_GUK: Tensor, keys: _OwnKeys) -> Tensor:
        """Return (G, T, I, B)."""
        num_groups, num_rows, group, width = query_GTIK.shape
        key_EK = self._in_float32(key_GUK.index_select(1, keys.column_TB.flatten()))
        key_EBK = key_EK.reshape(num_groups * num_rows, BLOCK, -1)
        query_EIK = query_GTIK.reshape(num_groups * num_rows, group, width)
        score_EIB = self._capped(self._times(query_EIK, key_EBK.transpose(1, 2)))
        score_GTIB = score_EIB.reshape(num_groups, num_rows, group, BLOCK)
        score_GTIB.add_(keys.mask_TB[:, None])
        if self._chosen_TS is not None:
            chosen_TB = self._chosen_TS[:, self._piece.base :].gather(1, keys.column_TB)
            score_GTIB.add_(_mask_of(chosen_TB[:, None]))
        return score_GTIB

    def _shared_sums(self, weights: Sequence[Tensor], value_GSV: Tensor) -> Iterator[Tensor]:
        """Yield the sums of each block, in (G, T, I, W).

        Those behind the first lie in one place, and last until the next is made.
        """
        place_GAW = None
        lo = self._piece.shared[0]
        extended_GBW = self._extended(value_GSV, BLOCK)
        for weight_GTIB in (block for part in weights for block in part.split(BLOCK, 3)):
            extended_GBW[..., : value_GSV.shape[2]].copy_(value_GSV[:, lo : lo + BLOCK])
            sum_GAW = self._times(weight_GTIB.flatten(1, 2), extended_GBW, place_GAW)
            yield sum_GAW.unflatten(1, weight_GTIB.shape[1:3])
            place_GAW = sum_GAW if lo > self._piece.shared[0] else None
            lo += BLOCK

    def _own_sums(self, weights: Sequence[Tensor], value_GUV: Tensor) -> Iterator[Tensor]:
        for keys, weight_GTIB in zip(self._piece.own, weights, strict=True):
            num_groups, num_rows, group, _ = weight_GTIB.shape
            extended_GEW = self._extended(value_GUV, keys.column_TB.numel())
            extended_GEW[..., : value_GUV.shape[2]].copy_(
                value_GUV.index_select(1, keys.column_TB.flatten())
            )
            extended_EBW = extended_GEW.reshape(num_groups * num_rows, BLOCK, -1)
            sum_EIW = self._times(weight_GTIB.reshape(-1, group, BLOCK), extended_EBW)
            yield sum_EIW.reshape(num_groups, num_rows, group, -1)

    def _capped(self, score_GTIS: Tensor) -> Tensor:
        cap = self._terms.cap
        return score_GTIS if cap is None else score_GTIS.div_(cap).tanh_().mul_(cap * _LOG2_E)

    def _times(self, left: Tensor, right: Tensor, place: Tensor | None = None) -> Tensor:
        place = (
            self._scratch.take((*left.shape[:2], right.shape[2]), left.device)
            if place is None
            else place
        )
        return self._multiply(torch.bmm, left, right, out=place)

    def _sinks(self, query_GTIK: Tensor) -> Tensor | None:
        """Return a column of scores where the family has sinks."""
        if self._terms.sink_H is None:
            return None
        num_groups, num_rows, *_ = query_GTIK.shape
        return (
            (self._terms.sink_H.float() * _LOG2_E)
            .reshape(num_groups, 1, -1, 1)
            .repeat(1, num_rows, 1, 1)
        )

    def _in_float32(self, states: Tensor) -> Tensor:
        """Return a copy without gaps, with zeros behind narrow ones, which are multiplied alike
        then.
        """
        num_missing = max(0, _LEAST_WIDTH - states.shape[-1])
        wide = self._scratch.take(
            (*states.shape[:-1], states.shape[-1] + num_missing), states.device
        )
        if num_missing:
            wide[..., -num_missing:].zero_()
            wide[..., :-num_missing].copy_(states)
            return wide
        return wide.copy_(states)

    def _extended(self, value_GSV: Tensor, num_columns: int) -> Tensor:
        """Return room for so many values, (G, C, W), with ones behind them."""
        num_groups, _, width = value_GSV.shape
        extended_GCW = self._scratch.take(
            (num_groups, num_columns, _extended_width(width)), value_GSV.device
        )
        extended_GCW[..., width:].zero_()
        extended_GCW[..., width] = 1.0
        return extended_GCW
