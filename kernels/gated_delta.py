"""Steps of the gated delta rule through a tree of rows, a head at a time.

A head's state (K x V numbers, 64 KB at the sizes of today) stays in a core's cache while all rows
of a tree pass through it, so of states nothing goes to memory or comes from there. Operations, and
so bits, are those of the plain recurrence in torch: S = S d; u = b (v - k S); S = S + k u; o = q S,
where sums over K are torch's own: sixteen at a time, then their sums.
Invariant: both forms give the same bits; `agrees` says whether they do with this torch.

Shape letters, in this file only: R steps, S slots of states, K, V numbers of a head, G heads of
queries and keys, each of which serves H / G heads in a row, and C decays of a head: one, or K.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, runs_numba
from offload.kernels.rounding import F32, U64

# in place of slots: the states before any step, and those that are kept
BASE = -1
AFTER = -2
# numbers of which torch makes a sum, and of how many such sums follow sums of another kind
_SUMMED = 16
_MOST_SUMMED = 256


class DeltaRows(NamedTuple):
    """What rows bring to heads, in float32."""

    query_TGK: Tensor
    key_TGK: Tensor
    value_THV: Tensor
    beta_TH: Tensor
    decay_THC: Tensor


def walk_heads_reference(
    ends_HKV: tuple[Tensor, Tensor],
    rows: DeltaRows,
    step_R3: Tensor,
    heads: tuple[int, int],
    state_SKV: Tensor,
    out_THV: Tensor,
) -> None:
    """Take steps one after the other, in plain torch.

    Args:
        ends_HKV: the states before any step, which stay as they are, and room for those that steps
            leave in `AFTER`.
        step_R3: int64 on the CPU: a row, the slot of the state before it (or `BASE`, or `AFTER`),
            and the slot for the state behind it, which may be the same.
        heads: the first, and the one behind the last.
        state_SKV: room for the states of one head.
        out_THV: receives the outputs of the rows that take a step.
    """
    base_HKV, after_HKV = ends_HKV
    num_alike = base_HKV.shape[0] // rows.key_TGK.shape[1]
    for head in range(*heads):
        for row, source, target in step_R3.tolist():
            key_K1 = rows.key_TGK[row, head // num_alike, :, None]
            query_K1 = rows.query_TGK[row, head // num_alike, :, None]
            sources = {BASE: base_HKV[head], AFTER: after_HKV[head]}
            before_KV = sources[source] if source < 0 else state_SKV[source]
            new_KV = before_KV * rows.decay_THC[row, head, :, None]
            # sums of whole stacks, as rows that take a step together have them
            held_V = (new_KV * key_K1)[None].sum(-2)[0]
            delta_V = (rows.value_THV[row, head] - held_V) * rows.beta_TH[row, head]
            new_KV = new_KV + key_K1 * delta_V
            out_THV[row, head] = (new_KV * query_K1)[None].sum(-2)[0]
            (after_HKV[head] if target == AFTER else state_SKV[target]).copy_(new_KV)


def walk_heads_compiled(
    ends_HKV: tuple[Tensor, Tensor],
    rows: DeltaRows,
    step_R3: Tensor,
    heads: tuple[int, int],
    state_SKV: Tensor,
    out_THV: Tensor,
) -> None:
    """Do what `walk_heads_reference` does, with numba; all tensors are contiguous."""
    base_HKV, after_HKV = ends_HKV
    _walk(
        base_HKV.numpy(),
        tuple(row_T.numpy() for row_T in rows),
        step_R3.numpy(),
        heads,
        state_SKV.numpy(),
        after_HKV.numpy(),
        out_THV.numpy(),
    )


@cache
def agrees(key_size: int, value_size: int) -> bool:
    """Return True if the compiled form runs here, with the reference's bits for these sizes."""
    if key_size > _MOST_SUMMED or not runs_numba():
        return False
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    base_HKV = some(2, key_size, value_size)
    rows = DeltaRows(
        query_TGK=some(4, 1, key_size),
        key_TGK=some(4, 1, key_size),
        value_THV=some(4, 2, value_size),
        beta_TH=some(4, 2),
        decay_THC=some(4, 2, key_size),
    )
    step_R3 = torch.tensor([[0, BASE, AFTER], [1, AFTER, 0], [2, AFTER, 1], [3, 0, 0]])
    results = []
    for walk in (walk_heads_reference, walk_heads_compiled):
        state_SKV = torch.zeros(2, key_size, value_size)
        after_HKV = torch.zeros_like(base_HKV)
        out_THV = torch.zeros_like(rows.value_THV)
        walk((base_HKV, after_HKV), rows, step_R3, (0, 2), state_SKV, out_THV)
        results.append(torch.cat([each.flatten() for each in (state_SKV, after_HKV, out_THV)]))
    return torch.equal(*results)


@compiled
def _walk(base: Any, rows: Any, steps: Any, heads: Any, states: Any, after: Any, out: Any) -> None:
    """Compute states and outputs of some heads, step by step of (row, source, target), a tree's order.

    A source or target below 0 is BASE or AFTER: the state before all steps, or behind them.
    """
    query, key, value, beta, decay = rows
    num_values = value.shape[2]
    num_alike = value.shape[1] // key.shape[1]
    sums = np.zeros((2, num_values), np.float32)
    delta = np.zeros(num_values, np.float32)
    for head in range(heads[0], heads[1]):
        group = head // num_alike
        for step in range(steps.shape[0]):
            row = steps[step, 0]
            source = steps[step, 1]
            target = steps[step, 2]
            new = after[head] if target < 0 else states[target]
            # loops with a source beside would not be vectorised where it is the target
            if source != target:
                if source == BASE:
                    new[:] = base[head]
                elif source < 0:
                    new[:] = after[head]
                else:
                    new[:] = states[source]
            _decay(new, decay[row, head], key[row, group], sums)
            for at in range(U64(num_values)):
                delta[at] = (value[row, head, at] - sums[0, at]) * beta[row, head]
            _add(new, key[row, group], delta, query[row, group], sums)
            for at in range(U64(num_values)):
                out[row, head, at] = sums[0, at]


@compiled
def _decay(new: Any, decays: Any, key: Any, sums: Any) -> None:
    """Decay a state, and write its product with a key to the first row of `sums`."""
    num_keys = U64(new.shape[0])
    num_values = U64(new.shape[1])
    stride = U64(decays.shape[0] > 1)
    sums[:] = F32(0)
    for at in range(num_keys):
        factor = key[at]
        decay = decays[at * stride]
        for column in range(num_values):
            number = new[at, column] * decay
            new[at, column] = number
            sums[0, column] += number * factor
        if at % U64(_SUMMED) == U64(_SUMMED - 1):
            _begin_another(sums)
    _add_up(sums)


@compiled
def _add(new: Any, key: Any, delta: Any, query: Any, sums: Any) -> None:
    """Add an update to a state, and write its product with a query to the first row of `sums`."""
    num_keys = U64(new.shape[0])
    num_values = U64(new.shape[1])
    sums[:] = F32(0)
    for at in range(num_keys):
        factor = key[at]
        asked = query[at]
        for column in range(num_values):
            number = new[at, column] + factor * delta[column]
            new[at, column] = number
            sums[0, column] += number * asked
        if at % U64(_SUMMED) == U64(_SUMMED - 1):
            _begin_another(sums)
    _add_up(sums)


@compiled
def _begin_another(sums: Any) -> None:
    for column in range(U64(sums.shape[1])):
        sums[1, column] += sums[0, column]
        sums[0, column] = F32(0)


@compiled
def _add_up(sums: Any) -> None:
    for column in range(U64(sums.shape[1])):
        sums[0, column] += sums[1, column]
