"""Whether, and from how many rows on, this machine's arithmetic gives a row the same bits whatever stands beside it.

Nobody promises that: libraries choose by shape, type and processor how they add up. So one layer is run with its real
weights, and whatever it multiplies is multiplied again with other rows beside it and on other numbers of threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.errors import UserError
from offload.model.invariance import MAX_ROWS, InvariantRows, Work
from offload.model.kv_cache import KVCache
from offload.model.weights import StreamedModel

_MULTIPLES = (4, 8, 16, 32, 64)  # on a GPU every product has the same number of rows, there is time enough
_NUM_ROWS = 72  # of the longest pass: of its first 64 positions the keys lie in a block that rows share
_CUTS = ((1, 1, 5), (12,))  # other ways to take in the first rows, which then have these keys for themselves
_NUM_COMPARED = 1 << 15  # numbers of each product: some kernels differ in one of 30,000
# Multiples of rows that are computed again, of the rows of the text and of random ones.
_FEW_PARTS, _MANY_PARTS = (1, 2, 3), (1, 1, 1, 1, 9, 30)
_LENGTH_ROPES = ("dynamic", "longrope")


class Invariance(NamedTuple):
    """What was found."""

    multiple: int | None  # rows that products are padded to; None: results depend on the rows beside
    reason: str = ""  # why not


class _DifferError(Exception):
    """Two ways to compute a row gave different bits; says of what."""


def find_row_multiple(
    model: StreamedModel, first_layer: np.ndarray, thread_counts: Sequence[int], context: int
) -> Invariance:
    """Make `model` invariant with the smallest multiple of rows that holds here, or leave it as it was.

    Args:
        first_layer: the slab of layer 0, which is not bound yet; embeddings and head are.
        thread_counts: that passes may be computed with.
        context: the longest text.
    """
    if _turns_by_length(model, context):
        return Invariance(None, "its rotary embeddings depend on the length of the text")
    found = Invariance(None)
    model.bind_layer(0, first_layer)
    try:
        with model.cut_to(1):
            found = _try_multiples(model, thread_counts)
    finally:
        model.unbind_layer(0)
        model.be_invariant(None if found.multiple is None else InvariantRows(found.multiple))
    return found


def _try_multiples(model: StreamedModel, thread_counts: Sequence[int]) -> Invariance:
    reason = ""
    for multiple in _MULTIPLES if model.place.type == "cpu" else (MAX_ROWS,):
        try:
            _require_invariance(model, multiple, thread_counts)
            return Invariance(multiple)
        except _DifferError as difference:
            reason = str(difference)
        except UserError as error:
            return Invariance(None, str(error))
    return Invariance(None, reason)


def _turns_by_length(model: StreamedModel, context: int) -> bool:
    config = model.meta_model.config
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    names = ("original_max_position_embeddings", "max_position_embeddings")
    trained = next((length for name in names if (length := getattr(config, name, None))), 0)
    return any(
        rope.get("rope_type") in _LENGTH_ROPES and context > (rope.get("original_max_position_embeddings") or trained)
        for rope in kinds
    )


def _require_invariance(model: StreamedModel, multiple: int, thread_counts: Sequence[int]) -> None:
    """Raises `_DifferError`."""
    most = getattr(model.meta_model.config, "max_position_embeddings", None) or _NUM_ROWS
    generator = torch.Generator().manual_seed(0)
    token_T = torch.randint(model.vocab_size, (min(_NUM_ROWS, most),), generator=generator)
    model.be_invariant(_CheckedRows(multiple, thread_counts))
    wanted_TV = _logits(model, token_T, (len(token_T),))
    model.be_invariant(InvariantRows(multiple))
    for cut in _CUTS:
        if sum(cut) <= len(token_T):
            logits = _logits(model, token_T[: sum(cut)], cut)
            if not torch.equal(logits, wanted_TV[: len(logits)]):
                raise _DifferError("a layer gives other bits when a text is taken in at once than in parts")


def _logits(model: StreamedModel, token_T: Tensor, cut: Sequence[int]) -> Tensor:
    """Scores of all rows of a chain, taken in by passes of so many rows."""
    cache, parts = KVCache(1, len(token_T)), []
    for part_T in token_T.split(list(cut)):
        position_T = torch.arange(len(part_T)) + cache.length
        sees_TT = torch.ones(len(part_T), len(part_T), dtype=torch.bool).tril()
        parts.append(model.forward(part_T, position_T, sees_TT, cache))
        cache.commit(range(len(part_T)))
    return torch.cat(parts)


class _CheckedRows(InvariantRows):
    """Computes everything again with fewer rows, elsewhere, beside others, and with every number of threads."""

    def __init__(self, multiple: int, thread_counts: Sequence[int]) -> None:
        super().__init__(multiple)
        self._thread_counts, self._generator = thread_counts, torch.Generator().manual_seed(0)

    def call(self, work: Work, rows: Tensor) -> Tensor:
        out = work(rows)
        if not out.numel():
            return out
        self._compare(work, rows, out, _FEW_PARTS)
        _require_equal(work(rows.roll(1, -2)), out.roll(1, -2), "one row further down")
        width = out[..., 0, :].numel()
        for _ in range(-(-_NUM_COMPARED // (width * MAX_ROWS))):
            more = torch.randn(*rows.shape[:-2], MAX_ROWS, rows.shape[-1], generator=self._generator).to(rows)
            self._compare(work, more, work(more), _MANY_PARTS)
        before = torch.get_num_threads()
        try:
            for num_threads in set(self._thread_counts) - {before}:
                torch.set_num_threads(num_threads)
                _require_equal(work(rows), out, f"with {num_threads} threads")
        finally:
            torch.set_num_threads(before)
        return out

    def _compare(self, work: Work, rows: Tensor, out: Tensor, parts: Sequence[int]) -> None:
        """Parts of so many multiples of rows, spread over all."""
        num_multiples = rows.shape[-2] // self.multiple
        for index, part in enumerate(parts):
            size = min(part, num_multiples) * self.multiple
            lo = (num_multiples * self.multiple - size) * index // len(parts) // self.multiple * self.multiple
            _require_equal(work(rows.narrow(-2, lo, size)), out.narrow(-2, lo, size), "beside other rows")


def _require_equal(got: Tensor, wanted: Tensor, where: str) -> None:
    if not torch.equal(got, wanted):
        shape = "x".join(map(str, got.shape))
        raise _DifferError(f"a product or activation of {shape} numbers has other bits {where}")
