"""Steps of the gated delta rule through a tree of rows, a head at a time.

A head's state (K x V numbers, 64 KB at the sizes of today) stays in a core's cache while all rows
of a tree pass through it, so of states nothing goes to memory or comes from there. Operations, and
so bits, are those of transformers' `torch_recurrent_gated_delta_rule`: S = S d; u = b (v - k S);
S = S + k u; o = q S, where sums over K are torch's own: sixteen at a time, then their sums.
Invariant: both forms give the same bits; `agrees` says whether they do with this torch.

Shape letters, in this file only: R steps, S slots of states, and K, V numbers of a head.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, runs_numba
from offload.kernels.rounding import F32, U64

BASE = -1
# numbers of which torch makes a sum, and of how many such sums follow sums of another kind
_SUMMED = 16
_MOST_SUMMED = 256


class DeltaRows(NamedTuple):
    """What rows bring to heads, in float32."""

    query_THK: Tensor
    key_THK: Tensor
    value_THV: Tensor
    beta_TH: Tensor
    decay_TH: Tensor


def walk_heads_reference(
    base_HKV: Tensor,
    rows: DeltaRows,
    step_R3: Tensor,
    heads: tuple[int, int],
    state_SHKV: Tensor,
    out_THV: Tensor,
) -> None:
    """Take steps one after the other, in plain torch.

    Args:
        base_HKV: the states before any step, which stay as they are.
        step_R3: int64 on the CPU: a row, the slot of the state before it (or `BASE`), and the slot
            for the state behind it, which may be the same.
        heads: the first, and the one behind the last.
        state_SHKV: room for states, of all heads or of as many as are taken at once; head h has
            column h modulo their number. What the last step leaves in a slot is left there.
        out_THV: receives the outputs of the rows that take a step.
    """
    first, end = heads
    some = slice(first, end)
    place = first % state_SHKV.shape[1]
    own_HKV = torch.empty_like(base_HKV[some])
    key_THK1 = rows.key_THK[:, some, :, None]
    query_THK1 = rows.query_THK[:, some, :, None]
    for row, source, target in step_R3.tolist():
        own_states = state_SHKV[:, place : place + end - first]
        before_HKV = base_HKV[some] if source == BASE else own_states[source]
        new_HKV = own_states[target]
        torch.mul(before_HKV, rows.decay_TH[row, some, None, None], out=new_HKV)
        held_HV = torch.mul(new_HKV, key_THK1[row], out=own_HKV).sum(1)
        delta_HV = (rows.value_THV[row, some] - held_HV) * rows.beta_TH[row, some, None]
        new_HKV.add_(torch.mul(key_THK1[row], delta_HV[:, None], out=own_HKV))
        torch.sum(torch.mul(new_HKV, query_THK1[row], out=own_HKV), 1, out=out_THV[row, some])


def walk_heads_compiled(
    base_HKV: Tensor,
    rows: DeltaRows,
    step_R3: Tensor,
    heads: tuple[int, int],
    state_SHKV: Tensor,
    out_THV: Tensor,
) -> None:
    """Do what `walk_heads_reference` does, with numba; all tensors are contiguous."""
    _walk(
        base_HKV.numpy(),
        tuple(one.numpy() for one in rows),
        step_R3.numpy(),
        heads,
        state_SHKV.numpy(),
        out_THV.numpy(),
    )


@cache
def agrees(key_size: int, value_size: int) -> bool:
    """Return whether the compiled form runs here, with the reference's bits for these sizes."""
    if key_size > _MOST_SUMMED or not runs_numba():
        return False
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    base_HKV = some(2, key_size, value_size)
    rows = DeltaRows(
        query_THK=some(3, 2, key_size),
        key_THK=some(3, 2, key_size),
        value_THV=some(3, 2, value_size),
        beta_TH=some(3, 2),
        decay_TH=some(3, 2),
    )
    step_R3 = torch.tensor([[0, BASE, 0], [1, 0, 1], [2, 0, 0]])
    found = []
    for walk in (walk_heads_reference, walk_heads_compiled):
        state_SHKV = torch.empty(2, *base_HKV.shape)
        out_THV = torch.empty_like(rows.value_THV)
        walk(base_HKV, rows, step_R3, (0, 2), state_SHKV, out_THV)
        found.append(torch.cat([state_SHKV.flatten(), out_THV.flatten()]))
    return torch.equal(*found)


@compiled
def _walk(base: Any, rows: Any, steps: Any, heads: Any, states: Any, out: Any) -> None:
    query, key, value, beta, decay = rows
    num_values = value.shape[2]
    sums = np.zeros((2, num_values), np.float32)
    delta = np.zeros(num_values, np.float32)
    for head in range(heads[0], heads[1]):
        place = head % states.shape[1]
        for step in range(steps.shape[0]):
            row = steps[step, 0]
            source = steps[step, 1]
            target = steps[step, 2]
            new = states[target, place]
            # loops with a source beside would not be vectorised where it is the target
            if source != target:
                new[:] = base[head] if source < 0 else states[source, place]
            _decay(new, decay[row, head], key[row, head], sums)
            for at in range(U64(num_values)):
                delta[at] = (value[row, head, at] - sums[0, at]) * beta[row, head]
            _add(new, key[row, head], delta, query[row, head], sums)
            for at in range(U64(num_values)):
                out[row, head, at] = sums[0, at]


@compiled
def _decay(new: Any, decay: Any, key: Any, sums: Any) -> None:
    """Let a state decay, and leave what it holds for a key in the first row of `sums`."""
    num_keys = U64(new.shape[0])
    num_values = U64(new.shape[1])
    sums[:] = F32(0)
    for at in range(num_keys):
        factor = key[at]
        for column in range(num_values):
            number = new[at, column] * decay
            new[at, column] = number
            sums[0, column] += number * factor
        if at % U64(_SUMMED) == U64(_SUMMED - 1):
            _begin_another(sums)
    _add_up(sums)


@compiled
def _add(new: Any, key: Any, delta: Any, query: Any, sums: Any) -> None:
    """Add what is new, and leave what a query finds in the first row of `sums`."""
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
