"""Attention whose sums depend on a row's own path alone: not on the tree around it, nor on how the text was cut.

A sum of floating-point numbers depends on their order, and the keys of a tree's path lie at scattered columns. So keys
are taken by their position on the path, in blocks of 64: products within a block are always of the same shape, and
blocks are added up one after another in float32.

    [0, base) full blocks that lie in order for every row   [base, ...) a row's own path, gathered block by block

A block's result is the same from both sides, because `base` moves as the text grows. Invariant: a key that a row does
not see has weight 0.0, and adding 0.0 * value changes no sum; so blocks that nobody sees may be left out.
"""

from collections.abc import Callable, Iterator
from functools import reduce

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.path_attention import BLOCK, HEADER, PathRows, ScoreTerms, first_seen
from offload.memory.plan import PATH_SCRATCH_BYTES
from offload.model.invariance import InvariantRows
from offload.model.row_sizes import MAX_ROWS, Multiply

_STAY: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
_SPAN = 8 * BLOCK  # keys whose scores are one product: each number of them is tried once
_TILE_BYTES = PATH_SCRATCH_BYTES // 4  # of scores at once
_GATHER_BYTES = PATH_SCRATCH_BYTES // 16  # of values at once
MultiplyBy = Callable[[Multiply, Tensor, Tensor], Tensor]  # a product, its rows and its second factor
_PLAINLY: MultiplyBy = lambda product, left, right: product(left, right)  # noqa: E731


def path_rows(
    num_prefix: int,
    ancestor_TU: Tensor,
    attend: Callable[..., Tensor],
    send: Callable[[Tensor], Tensor] = _STAY,
) -> PathRows:
    """Rows that are the last T of U uncommitted ones behind P committed ones; without a window.

    `ancestor_TU` is as in `tree_mask`, on the host; `send` brings tensors to where rows are computed.
    """
    sees_TU = ancestor_TU.numpy()
    num_rows, num_uncommitted = sees_TU.shape
    own_T = np.arange(num_uncommitted - num_rows, num_uncommitted)
    base = (num_prefix + _num_linear(sees_TU)) // BLOCK * BLOCK
    first = max(0, base - num_prefix)  # uncommitted rows before it are seen by all whose paths go on behind `base`
    row_E, node_E = np.divmod(np.flatnonzero(sees_TU[:, first:]), max(1, num_uncommitted - first))
    count_T = np.bincount(row_E, minlength=num_rows)
    length_T = np.where(count_T > 0, num_prefix + first + count_T, own_T + num_prefix + 1)
    num_columns = -(-max(0, int(length_T.max()) - base) // BLOCK) * BLOCK
    walk_TL = np.empty((num_rows, HEADER + num_columns), np.int32)
    walk_TL[:, 0], walk_TL[:, 1] = length_T, base
    column_TL = walk_TL[:, HEADER:]
    column_TL[:] = (own_T + num_prefix)[:, None]  # any that holds numbers
    column_TL[:, : max(0, num_prefix - base)] = np.arange(base, max(base, num_prefix))
    nth_E = np.arange(len(row_E)) - (count_T.cumsum() - count_T)[row_E] + max(0, num_prefix - base)
    column_TL[row_E, nth_E] = node_E + first + num_prefix
    return PathRows(send(torch.from_numpy(walk_TL)), None, attend)


def _num_linear(sees_TU: np.ndarray) -> int:
    """How many columns, the first ones, are seen by every row from there on."""
    num_rows, num_uncommitted = sees_TU.shape
    for lo in range(0, num_uncommitted, BLOCK):
        column_B = np.arange(lo, min(lo + BLOCK, num_uncommitted))
        num_later_B = np.minimum(num_rows, num_uncommitted - column_B)
        is_linear_B = np.count_nonzero(sees_TU[:, lo : lo + BLOCK], axis=0) == num_later_B
        if not is_linear_B.all():
            return lo + int(is_linear_B.argmin())
    return num_uncommitted


def path_attention(
    query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, rows: PathRows, terms: ScoreTerms,
    multiply: MultiplyBy = _PLAINLY,
) -> Tensor:  # fmt: skip
    """See `path_attention_kernel`, of which this is the reference: on a CPU, by products that `multiply` makes.

    Few groups are computed at once, so that their scores stay in a processor's cache.
    """
    num_groups, num_rows = len(key_GSK), query_HTK.shape[1]
    walk_TL = rows.walk_TL[-num_rows:]
    base = int(walk_TL[0, 1])
    num_early = int((walk_TL[:, 0] <= base).sum())  # rows whose paths end before `base`: the first ones
    query_GTIK = query_HTK.unflatten(0, (num_groups, -1)).transpose(1, 2)
    num_kept = walk_TL.shape[1] - HEADER + 2 * (key_GSK.shape[1] - base)  # of scores by path, and twice by column
    row_bytes = 4 * query_GTIK.shape[2] * (base + num_kept)  # of the scores of a group
    out_GTIV = query_HTK.new_empty(*query_GTIK.shape[:3], value_GSK.shape[2])
    most = max(1, min(_TILE_BYTES // row_bytes, MAX_ROWS // query_GTIK.shape[2]))  # of which products have one part
    for lo, hi in _pieces(num_early, num_rows, most):
        step = max(1, _TILE_BYTES // ((hi - lo) * row_bytes))
        for group in range(0, num_groups, step):
            some = slice(group, group + step)
            piece = _Piece(walk_TL[lo:hi], rows, _terms_of(terms, some, num_groups), multiply)
            out_GTIV[some, lo:hi] = piece.attend(query_GTIK[some, lo:hi].float(), key_GSK[some], value_GSK[some])
    return out_GTIV.transpose(0, 1).flatten(1, 2)


def _terms_of(terms: ScoreTerms, some: slice, num_groups: int) -> ScoreTerms:
    """Those of the heads of some groups."""
    sink_H = None if terms.sink_H is None else terms.sink_H.unflatten(0, (num_groups, -1))[some].flatten()
    return ScoreTerms(terms.scaling, terms.cap, sink_H)


def try_scores(invariant: InvariantRows, key_GSK: Tensor) -> None:
    """Let it try all products that scores of longer texts are, for heads as wide as these."""
    width = key_GSK.shape[2]
    for num_keys in range(BLOCK, _SPAN + 1, BLOCK):
        key_1SK = key_GSK.new_zeros(1, num_keys, width, dtype=torch.float32)
        invariant.multiply(torch.bmm, key_1SK[:, :1], key_1SK.transpose(1, 2))


def _pieces(num_early: int, num_rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Rows in pieces that are early or late as a whole."""
    for lo, hi in ((0, num_early), (num_early, num_rows)):
        for start in range(lo, hi, step):
            yield start, min(start + step, hi)


class _Piece:
    """Some rows of a pass, which all end before `base` or all behind it."""

    def __init__(self, walk_TL: Tensor, rows: PathRows, terms: ScoreTerms, multiply: MultiplyBy) -> None:
        self._window, self._terms, self._multiply = rows.window, terms, multiply
        self._seen_T, self._base = walk_TL[:, 0], int(walk_TL[0, 1])
        self._most, self._least = int(self._seen_T.max()), int(self._seen_T.min())
        self._lo = 0 if self._window is None else max(0, first_seen(self._window, self._least - 1)) // BLOCK * BLOCK
        self._hi = max(self._lo, min(self._base, -(-self._most // BLOCK) * BLOCK))  # of the blocks that rows share
        num_own = -(-max(0, self._most - self._base) // BLOCK) * BLOCK
        self._column_TL = walk_TL[:, HEADER : HEADER + num_own] - self._base if num_own else None

    def attend(self, query_GTIK: Tensor, key_GSK: Tensor, value_GSK: Tensor) -> Tensor:
        """Weighted means (G, T, I, V) of the values, float32; queries are those of I heads for each of G."""
        query_GTIK = query_GTIK * self._terms.scaling
        shared = [self._shared_scores(query_GTIK, key_GSK, lo) for lo in range(self._lo, self._hi, _SPAN)]
        own_GTIL, sink_GTIs = self._own_scores(query_GTIK, key_GSK), self._sinks(query_GTIK)
        parts = [part for part in (*shared, own_GTIL, sink_GTIs) if part.shape[3]]
        peak_GTI1 = reduce(torch.maximum, (part.amax(3, keepdim=True) for part in parts))
        for part in parts:
            part.sub_(peak_GTI1).exp_()
        total_GTI1 = sink_GTIs.sum(3, keepdim=True)
        sum_GTIV = query_GTIK.new_zeros(*query_GTIK.shape[:3], value_GSK.shape[2])
        lo = self._lo
        for weight_GTIB in (block for part in shared for block in part.split(BLOCK, 3)):
            sum_GTIV += self._product(weight_GTIB, value_GSK[:, lo : lo + BLOCK].float())
            total_GTI1 += weight_GTIB.sum(3, keepdim=True)
            lo += BLOCK
        value_GUV = value_GSK[:, self._base :].float()
        for index, weight_GTIB in enumerate(own_GTIL.split(BLOCK, 3) if own_GTIL.shape[3] else ()):
            self._add_own(sum_GTIV, weight_GTIB.contiguous(), value_GUV, index * BLOCK)
            total_GTI1 += weight_GTIB.sum(3, keepdim=True)
        return sum_GTIV.div_(total_GTI1)

    def _add_own(self, sum_GTIV: Tensor, weight_GTIB: Tensor, value_GUV: Tensor, lo: int) -> None:
        """One block of which each row has keys of its own: a product for every row, in which its heads are the rows.

        The gathered values of few rows and one group fit into a processor's cache.
        """
        assert self._column_TL is not None, "late rows have columns"
        column_TB = self._column_TL[:, lo : lo + BLOCK]
        step = max(1, _GATHER_BYTES // (4 * BLOCK * value_GUV.shape[2]))
        kept = value_GUV.new_empty(min(step, len(column_TB)) * BLOCK, value_GUV.shape[2])  # fresh memory is slow
        for first in range(0, len(column_TB), step):
            some, columns = slice(first, first + step), column_TB[first : first + step]
            out = kept[: columns.numel()]
            for sum_TIV, weight_TIB, value_UV in zip(sum_GTIV, weight_GTIB, value_GUV, strict=True):
                value_TBV = torch.index_select(value_UV, 0, columns.flatten(), out=out).unflatten(0, columns.shape)
                sum_TIV[some] += self._times(weight_TIB[some], value_TBV)

    def _shared_scores(self, query_GTIK: Tensor, key_GSK: Tensor, lo: int) -> Tensor:
        """Of the span that begins there."""
        hi = min(lo + _SPAN, self._hi)
        score_GTIS = self._capped(self._times_keys(query_GTIK, key_GSK[:, lo:hi]))
        first = lo if self._window is not None else max(lo, self._least)
        if first < hi:
            self._hide(score_GTIS[..., first - lo :], first)
        return score_GTIS

    def _own_scores(self, query_GTIK: Tensor, key_GSK: Tensor) -> Tensor:
        if self._column_TL is None:
            return query_GTIK.new_empty(*query_GTIK.shape[:3], 0)
        base = self._base
        parts = [self._times_keys(query_GTIK, part_GSK) for part_GSK in key_GSK[:, base:].split(_SPAN, 1)]
        score_GTIU = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        score_GTIL = score_GTIU.gather(3, self._column_TL.long()[:, None].expand(*score_GTIU.shape[:3], -1))
        score_GTIL = self._capped(score_GTIL)
        self._hide(score_GTIL, base)
        return score_GTIL

    def _hide(self, score_GTIS: Tensor, first: int) -> None:
        """What lies behind a row, and what its window does not reach; the first column is that of position `first`."""
        position_S = torch.arange(first, first + score_GTIS.shape[3], device=score_GTIS.device)
        seen_T11 = self._seen_T[:, None, None]
        is_hidden_T1S = position_S >= seen_T11
        if self._window is not None:
            is_hidden_T1S |= position_S < first_seen(self._window, seen_T11 - 1)
        score_GTIS.masked_fill_(is_hidden_T1S, -torch.inf)

    def _capped(self, score_GTIS: Tensor) -> Tensor:
        cap = self._terms.cap
        return score_GTIS if cap is None else score_GTIS.div_(cap).tanh_().mul_(cap)

    def _times_keys(self, query_GTIK: Tensor, key_GSK: Tensor) -> Tensor:
        """Each score is a product of its own, so columns may lie anywhere; in whole blocks all the same."""
        keys = _padded(key_GSK.float(), BLOCK).transpose(1, 2)
        return self._product(query_GTIK, keys)[..., : key_GSK.shape[1]]

    def _product(self, left_GTIS: Tensor, right_GSV: Tensor) -> Tensor:
        """(G, T, I, V); the rows of all heads of a group are those of one product."""
        return self._times(left_GTIS.flatten(1, 2), right_GSV).unflatten(1, left_GTIS.shape[1:3])

    def _times(self, left: Tensor, right: Tensor) -> Tensor:
        return self._multiply(torch.bmm, left, right)

    def _sinks(self, query_GTIK: Tensor) -> Tensor:
        """A column of scores where the family has sinks, else none."""
        shape = query_GTIK.shape[:3]
        if self._terms.sink_H is None:
            return query_GTIK.new_empty(*shape, 0)
        return self._terms.sink_H.float().reshape(shape[0], 1, shape[2], 1).repeat(1, shape[1], 1, 1)


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """A stack with zeros below, up to the multiple; itself where there is nothing to add, which `pad` would copy."""
    num_missing = -rows.shape[1] % multiple
    return pad(rows, (0, 0, 0, num_missing)) if num_missing else rows
