"""Attention whose sums depend on a row's own path alone: not on the tree around it, nor on how the text was cut.

A sum of floating-point numbers depends on their order, and the keys of a tree's path lie at scattered columns. So keys
are taken by their position on the path, in blocks of 64: products within a block are always of the same shape, and
blocks are added up one after another in float32.

    [0, base) full blocks that lie in order for every row   [base, ...) a row's own path, gathered block by block

A block's result is the same from both sides, because `base` moves as the text grows. Invariant: a key that a row does
not see has weight 0.0, and adding 0.0 * value changes no sum; so blocks that nobody sees may be left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.memory.plan import PATH_SCRATCH_BYTES
from offload.model.invariance import InvariantRows

_STAY: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
BLOCK = 64  # keys whose products are summed by one matrix product
SCRATCH_BYTES = PATH_SCRATCH_BYTES // 2  # of scores at once, and half of that each of keys and of gathered values


@dataclass(frozen=True, slots=True, eq=False)
class PathRows:
    """What the rows of one pass see, by position on their paths, in place of an additive mask.

    Attributes:
        length_T: number of keys on each row's path, itself included; on the host.
        seen_T: the same where rows are computed.
        base: positions before it are columns of the cache for every row, and whole blocks.
        num_early: rows whose paths end before `base`.
        column_TL: of the others, the columns of positions base, base + 1, ...; L is a multiple of 64.
        window: a row sees keys less than this many positions back.
        invariant: makes products that are the same for every number of rows.
    """

    length_T: Tensor
    seen_T: Tensor
    base: int
    num_early: int
    column_TL: Tensor
    window: int | None
    invariant: InvariantRows


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTerms:
    """What a family adds to its scores."""

    scaling: float
    cap: float | None = None  # scores are cap * tanh(score / cap)
    sink_H: Tensor | None = None  # a score per head that takes weight and has no value


def path_rows(
    num_prefix: int,
    ancestor_TU: Tensor,
    window: int | None,
    invariant: InvariantRows,
    send: Callable[[Tensor], Tensor] = _STAY,
) -> PathRows:
    """Rows that are the last T of U uncommitted ones behind P committed ones.

    `ancestor_TU` is as in `tree_mask`, on the host; `send` brings tensors to where rows are computed.
    """
    num_rows, num_uncommitted = ancestor_TU.shape
    own_T = torch.arange(num_uncommitted - num_rows, num_uncommitted)
    column_U = torch.arange(num_uncommitted)
    is_linear_U = (ancestor_TU | (own_T[:, None] < column_U)).all(0)  # every row from there on sees it
    num_linear = num_prefix + int(is_linear_U.int().cumprod(0).sum())
    length_T = ancestor_TU.sum(1) + num_prefix
    base = num_linear // BLOCK * BLOCK
    num_early = int((length_T <= base).sum())
    late_TU, own_T = ancestor_TU[num_early:], own_T[num_early:]
    length = int(length_T[num_early:].max()) - base if num_early < num_rows else 0
    position_L = torch.arange(base, base + -(-length // BLOCK) * BLOCK)
    path_TU = late_TU.logical_not().int().argsort(dim=1, stable=True)  # its own columns first, in order
    nth_L = (position_L - num_prefix).clamp(0, max(0, num_uncommitted - 1))
    column_TL = torch.where(position_L < num_prefix, position_L, path_TU[:, nth_L] + num_prefix)
    is_seen_TL = position_L < length_T[num_early:, None]
    column_TL = torch.where(is_seen_TL, column_TL, (own_T + num_prefix)[:, None])  # any that holds numbers
    return PathRows(length_T, send(length_T), base, num_early, send(column_TL), window, invariant)


def path_attention(query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, rows: PathRows, terms: ScoreTerms) -> Tensor:
    """Attention, (T, H, K) in the type of the queries; families may run the last T rows of the pass alone.

    H is a multiple of G, head h belongs to key/value head h // (H / G); values may be of another width.
    """
    (num_heads, num_rows, width), num_groups = query_HTK.shape, key_GSK.shape[0]
    query_GITK = query_HTK.reshape(num_groups, num_heads // num_groups, num_rows, width)
    first = len(rows.seen_T) - num_rows  # row of the pass that is the first here
    num_keys = rows.base + rows.column_TL.shape[1]
    step = max(1, SCRATCH_BYTES // (4 * num_heads * num_keys))
    out_GITV = query_HTK.new_empty(*query_GITK.shape[:3], value_GSK.shape[2])
    for lo, hi in _pieces(first, rows.num_early, len(rows.seen_T), step):
        queries = query_GITK[:, :, lo - first : hi - first].float()
        piece = _Piece(rows, lo, hi, terms)
        out_GITV[:, :, lo - first : hi - first] = piece.attend(queries, key_GSK, value_GSK)
    return out_GITV.reshape(num_heads, num_rows, -1).transpose(0, 1)


def _pieces(first: int, num_early: int, num_rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Rows in pieces that are early or late as a whole."""
    for lo, hi in ((first, num_early), (max(first, num_early), num_rows)):
        for start in range(lo, hi, step):
            yield start, min(start + step, hi)


class _Piece:
    """Rows [lo, hi) of a pass, which are early or late as a whole."""

    def __init__(self, rows: PathRows, lo: int, hi: int, terms: ScoreTerms) -> None:
        self._rows, self._terms = rows, terms
        self._seen_T, length_T = rows.seen_T[lo:hi], rows.length_T[lo:hi]
        self._most, self._least = int(length_T.max()), int(length_T.min())
        self._lo = 0 if rows.window is None else max(0, self._least - rows.window) // BLOCK * BLOCK
        self._hi = max(self._lo, min(rows.base, -(-self._most // BLOCK) * BLOCK))  # of the blocks that rows share
        num_own = -(-(self._most - rows.base) // BLOCK) * BLOCK if lo >= rows.num_early else 0
        self._column_TL = rows.column_TL[lo - rows.num_early : hi - rows.num_early, :num_own] if num_own else None

    def attend(self, query_GITK: Tensor, key_GSK: Tensor, value_GSK: Tensor) -> Tensor:
        """Weighted means (G, I, T, V) of the values, float32; queries are those of I heads for each of G."""
        query_GITK = query_GITK * self._terms.scaling
        parts = [
            self._shared_scores(query_GITK, key_GSK),
            self._own_scores(query_GITK, key_GSK),
            self._sinks(query_GITK),
        ]
        peak_GIT1 = reduce(torch.maximum, (part.amax(3, keepdim=True) for part in parts if part.shape[3]))
        shared_GITS, own_GITL, sink_GITs = (part.sub_(peak_GIT1).exp_() for part in parts)
        total_GIT1 = sink_GITs.sum(3, keepdim=True)
        sum_GITV = query_GITK.new_zeros(*query_GITK.shape[:3], value_GSK.shape[2])
        for lo in range(0, shared_GITS.shape[3], BLOCK):
            weight_GITB = shared_GITS[..., lo : lo + BLOCK]
            sum_GITV += self._product(weight_GITB, value_GSK[:, self._lo + lo : self._lo + lo + BLOCK].float())
            total_GIT1 += weight_GITB.sum(3, keepdim=True)
        value_UGV = value_GSK[:, self._rows.base :].transpose(0, 1).float().contiguous()
        for lo in range(0, own_GITL.shape[3], BLOCK):
            weight_GITB = own_GITL[..., lo : lo + BLOCK]
            self._add_own(sum_GITV, weight_GITB, value_UGV, lo)
            total_GIT1 += weight_GITB.sum(3, keepdim=True)
        return sum_GITV.div_(total_GIT1)

    def _add_own(self, sum_GITV: Tensor, weight_GITB: Tensor, value_UGV: Tensor, lo: int) -> None:
        """One block of which each row has keys of its own: a product for every row, in which its heads are the rows."""
        assert self._column_TL is not None, "late rows have columns"
        column_TB, group = self._column_TL[:, lo : lo + BLOCK] - self._rows.base, weight_GITB.shape[1]
        step = max(1, SCRATCH_BYTES // (8 * BLOCK * (value_UGV[0].numel() + 2 * group)))
        for first in range(0, len(column_TB), step):
            columns = column_TB[first : first + step]
            value_TBGV = value_UGV.index_select(0, columns.flatten()).unflatten(0, columns.shape)
            for index, weight_ITB in enumerate(weight_GITB[:, :, first : first + step]):
                own_TIV = self._times(weight_ITB.transpose(0, 1), value_TBGV[:, :, index])
                sum_GITV[index, :, first : first + step] += own_TIV.transpose(0, 1)

    def _shared_scores(self, query_GITK: Tensor, key_GSK: Tensor) -> Tensor:
        score_GITS = self._capped(self._times_keys(query_GITK, key_GSK[:, self._lo : self._hi]))
        if self._least < self._hi:
            self._hide(score_GITS[..., self._least - self._lo :], self._least)
        if self._rows.window is not None:
            self._hide_old(score_GITS, self._lo)
        return score_GITS

    def _own_scores(self, query_GITK: Tensor, key_GSK: Tensor) -> Tensor:
        if self._column_TL is None:
            return query_GITK.new_empty(*query_GITK.shape[:3], 0)
        base = self._rows.base
        score_GITU = self._times_keys(query_GITK, key_GSK[:, base:])
        score_GITL = score_GITU.gather(3, (self._column_TL - base).expand(*score_GITU.shape[:2], -1, -1))
        score_GITL = self._capped(score_GITL)
        self._hide(score_GITL, base)
        if self._rows.window is not None:
            self._hide_old(score_GITL, base)
        return score_GITL

    def _hide(self, score_GITS: Tensor, first: int) -> None:
        """What lies behind a row; the first column is that of position `first`."""
        position_S = torch.arange(first, first + score_GITS.shape[3], device=score_GITS.device)
        score_GITS.masked_fill_(position_S >= self._seen_T[:, None], -torch.inf)

    def _hide_old(self, score_GITS: Tensor, first: int) -> None:
        """What a row's window does not reach."""
        position_S = torch.arange(first, first + score_GITS.shape[3], device=score_GITS.device)
        assert self._rows.window is not None, "there is a window"
        score_GITS.masked_fill_(position_S < self._seen_T[:, None] - self._rows.window, -torch.inf)

    def _capped(self, score_GITS: Tensor) -> Tensor:
        cap = self._terms.cap
        return score_GITS if cap is None else score_GITS.div_(cap).tanh_().mul_(cap)

    def _times_keys(self, query_GITK: Tensor, key_GSK: Tensor) -> Tensor:
        """Each score is a product of its own, so columns may lie anywhere; in whole blocks all the same."""
        num_keys, step = (
            key_GSK.shape[1],
            max(BLOCK, SCRATCH_BYTES // (8 * key_GSK.shape[0] * key_GSK.shape[2]) // BLOCK * BLOCK),
        )
        parts = [
            self._product(query_GITK, _padded(part_GSK.float(), BLOCK).transpose(1, 2))
            for part_GSK in key_GSK.split(step, 1)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 3))[..., :num_keys]

    def _product(self, left_GITS: Tensor, right_GSV: Tensor) -> Tensor:
        """(G, I, T, V); the rows of all heads of a group are those of one product."""
        return self._times(left_GITS.flatten(1, 2), right_GSV).unflatten(1, left_GITS.shape[1:3])

    def _times(self, left: Tensor, right: Tensor) -> Tensor:
        return self._rows.invariant.multiply(torch.bmm, left, right)

    def _sinks(self, query_GITK: Tensor) -> Tensor:
        """A column of scores where the family has sinks, else none."""
        shape = query_GITK.shape[:3]
        if self._terms.sink_H is None:
            return query_GITK.new_empty(*shape, 0)
        return self._terms.sink_H.float().reshape(*shape[:2], 1, 1).repeat(1, 1, shape[2], 1)


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """A stack with zeros below, up to the multiple; itself where there is nothing to add, which `pad` would copy."""
    num_missing = -rows.shape[1] % multiple
    return pad(rows, (0, 0, 0, num_missing)) if num_missing else rows
