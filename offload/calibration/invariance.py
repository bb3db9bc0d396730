"""Whether a row has the same bits on this machine whatever stands beside it.

Nobody promises that. Row sizes of products are found by trial (`model/invariant.py`); here one
layer is run with its real weights, once with all rows and in parts, and its activation functions
are computed again for fewer rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.errors import UserError
from offload.model.invariant import InvariantRows, Work
from offload.model.kv_cache import KVCache
from offload.model.path_attention import InvariantAttention
from offload.model.streamed import StreamedModel

# of the longest pass: of its first 64 positions the keys lie in a block that rows share
_NUM_ROWS = 72
# other ways to take in the first rows, which then have these keys for themselves
_CUTS = ((1, 1, 5), (12,))
_LENGTH_ROPES = ("dynamic", "longrope")


class Invariance(NamedTuple):
    """What was found."""

    thread_counts: tuple[int, ...] = ()  # with which it holds
    reason: str = ""  # why it does not
    # that make it so; they refuse a product where no number of rows helps
    rows: InvariantRows | None = None

    @property
    def holds(self) -> bool:
        """So far: a later layer may have a product that is refused."""
        return self.rows is not None and not self.rows.num_refused


class _DifferError(Exception):
    """Two ways to compute a row gave different bits; says of what."""


def make_invariant(
    model: StreamedModel, slab: np.ndarray, thread_counts: Sequence[int], context: int
) -> Invariance:
    """Make `model` invariant, or leave it as it was where that does not hold here.

    Args:
        slab: of the typical layer, which is not bound yet; embeddings and head are.
        thread_counts: that passes may be computed with.
        context: the longest text.
    """
    if _turns_by_length(model, context):
        return Invariance(reason="its rotary embeddings depend on the length of the text")
    found = Invariance()
    typical = model.typical_layer
    model.bind_layer(typical, slab)
    try:
        with model.cut_to(slice(typical, typical + 1)):
            rows = _require_invariance(model, thread_counts)
        found = Invariance(tuple(thread_counts), rows=rows)
    except (_DifferError, UserError, torch.OutOfMemoryError) as error:
        found = Invariance(reason=str(error).partition("\n")[0])
    finally:
        model.unbind_layer(typical)
        if not found.holds:
            model.be_invariant(None)
    return found


def _turns_by_length(model: StreamedModel, context: int) -> bool:
    config = model.meta_model.config
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    names = ("original_max_position_embeddings", "max_position_embeddings")
    trained = next(
        (length for name in names if (length := _length(getattr(config, name, None)))), 0
    )
    lengths = [
        _length(rope.get(names[0])) or trained
        for rope in kinds
        if rope.get("rope_type") in _LENGTH_ROPES
    ]
    return any(context > length for length in lengths)


def _length(stated: Any) -> int:
    """0 for what is none: transformers does not look at every length that a config.json may have."""
    return stated if type(stated) is int else 0


def _require_invariance(model: StreamedModel, thread_counts: Sequence[int]) -> InvariantRows:
    """What makes it so from now on. Raises `_DifferError`."""
    most = _length(getattr(model.meta_model.config, "max_position_embeddings", None)) or _NUM_ROWS
    generator = torch.Generator().manual_seed(0)
    token_T = torch.randint(model.vocab_size, (min(_NUM_ROWS, most),), generator=generator)
    rows = _CheckedRows(thread_counts)
    model.be_invariant(rows)
    num_layers = model.typical_layer + 1
    cache = KVCache(num_layers, len(token_T))
    wanted_TV = _logits(model, token_T, (len(token_T),), cache)
    if isinstance(model.attend, InvariantAttention):  # no kernel computes them
        model.attend.try_out(cache.layers[-1].keys[0], cache.layers[-1].values[0])
    if rows.num_refused:
        counts = ", ".join(map(str, thread_counts))
        raise _DifferError(
            f"a product has other bits for each number of rows, with {counts} threads"
        )
    rows.is_checking = False
    for cut in _CUTS:
        if sum(cut) <= len(token_T):
            logits = _logits(model, token_T[: sum(cut)], cut, KVCache(num_layers, sum(cut)))
            if not torch.equal(logits, wanted_TV[: len(logits)]):
                raise _DifferError(
                    "a layer gives other bits when a text is taken in at once than in parts"
                )
    return rows


def _logits(model: StreamedModel, token_T: Tensor, cut: Sequence[int], cache: KVCache) -> Tensor:
    """Scores of all rows of a chain, taken in by passes of so many rows."""
    parts = []
    for part_T in token_T.split(list(cut)):
        position_T = torch.arange(len(part_T)) + cache.length
        sees_TT = torch.ones(len(part_T), len(part_T), dtype=torch.bool).tril()
        parts.append(model.forward(part_T, position_T, sees_TT, cache))
        cache.commit(range(len(part_T)))
    return torch.cat(parts)


class _CheckedRows(InvariantRows):
    """Computes activations again with fewer rows, beside others, and with every number of threads."""

    is_checking = True

    def activate(self, work: Work, rows: Tensor) -> Tensor:
        out = work(rows)
        if self.is_checking and out.numel():
            for part in (slice(1), slice(1, 5), slice(-3, None)):
                _require_equal(work(rows[..., part, :]), out[..., part, :], "beside other rows")
            before = torch.get_num_threads()
            try:
                for num_threads in {*self._thread_counts} - {before}:
                    torch.set_num_threads(num_threads)
                    _require_equal(work(rows), out, f"with {num_threads} threads")
            finally:
                torch.set_num_threads(before)
        return out


def _require_equal(got: Tensor, wanted: Tensor, where: str) -> None:
    if not torch.equal(got, wanted):
        shape = "x".join(map(str, got.shape))
        raise _DifferError(f"an activation of {shape} numbers has other bits {where}")
