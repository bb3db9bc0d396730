"""The kinds of recurrence of layers: what a row brings, how a state takes a step, how rows follow.

The arithmetic is transformers' own: a step calls the function by which it writes one token, with
the rows of one level as its batch, and many rows of one text may go through the function by which
it reads a prompt. Of a row only what the state needs is kept (`kept`), so that a path can be run
again without any weight.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from offload.kernels.gated_delta import (
    BASE,
    DeltaRows,
    agrees,
    walk_heads_compiled,
    walk_heads_reference,
)
from offload.model.invariant import in_whole_vectors
from offload.model.thread_team import TEAM

RowInputs = dict[str, Tensor]  # (T, ...) each
Stepped = tuple[Tensor, Tensor]  # outputs of rows, and states behind them
_LEAST_CHUNK = 16  # rows: fewer are as quick one by one
_LIGHTNING_CHUNK = 64  # rows
LARGE_STATE_BYTES = 1 << 20  # of a layer; smaller ones stay in a processor's cache anyway
# heads that a thread takes at once: in torch by the bytes of their states
_HEADS_COMPILED = 4
_HEADS_BYTES = 1 << 19
_NORM_EPS = 1e-6  # of `l2norm` in all families
_DECAYS_BY_HEAD = ("torch_recurrent_gated_delta_rule",)
_GATE = "z"  # which a family need not have
# inputs that decide about outputs alone, and others of their shape
STAND_IN = {"query": "key", "C": "B", _GATE: "x"}
_UNLIMITED = (0.0, float("inf"))


class Inputs(NamedTuple):
    """The arguments of one call of a layer's scan."""

    rows: RowInputs
    fixed: dict[str, Any]  # what all rows have in common

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.rows.values())))

    def part(self, some: slice | Tensor) -> "Inputs":
        """Return those of some rows."""
        return self._replace(rows={name: row_T[some] for name, row_T in self.rows.items()})

    def filled(self) -> "Inputs":
        """Let others stand for inputs that were not kept; outputs mean nothing then."""
        rows = dict(self.rows)
        for name, other in STAND_IN.items():
            if name != _GATE and name not in rows and other in rows:
                rows[name] = rows[other]
        return self._replace(rows=rows)


class Recurrence(ABC):
    """One kind, over a family's functions where it has any, see `Functions`.

    Attributes:
        kept: inputs of a row that its step of the state needs; the others decide about its output
            alone.
    """

    kept: tuple[str, ...]

    def __init__(self, scan: Any = None, step: Any = None) -> None:
        self._scan = scan
        self._step = step

    @abstractmethod
    def read(self, *args: Any, **kwargs: Any) -> Inputs:
        """Take the arguments of the family's scan over (1, T) rows."""

    @abstractmethod
    def start(self, inputs: Inputs) -> Tensor:
        """Return the state before any row, (1, ...), in float32."""

    @abstractmethod
    def step(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Return outputs (W, ...) and new states (W, ...) of W rows.

        Each row stands behind a state of its own, which stays as it is.
        """

    def run(self, state: Tensor, inputs: Inputs, *, is_exact: bool) -> Stepped:
        """Return outputs (T, ...) and the last state (1, ...) of T rows, one behind the other.

        `is_exact` asks for the arithmetic of single steps. Rows may lack what is not `kept`; then
        outputs mean nothing.
        """
        is_by_steps = is_exact or inputs.num_rows < _LEAST_CHUNK
        return (self._by_steps if is_by_steps else self._together)(state, inputs.filled())

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Do what `run` does in the way that is quickest for many rows."""
        return self._by_steps(state, inputs)

    def _by_steps(self, state: Tensor, inputs: Inputs) -> Stepped:
        outs = list[Tensor]()
        for row in range(inputs.num_rows):
            out, state = self.step(state, inputs.part(slice(row, row + 1)))
            outs.append(out)
        return torch.cat(outs), state

    def give(self, out_T: Tensor) -> Any:
        """Return outputs as the family's scan does."""
        return out_T[None]


class GatedDelta(Recurrence):
    """The gated delta rule: S = S e^g + k u^T.

    The decay is one for each head (Qwen3-Next, Qwen3.5) or channel (Kimi).
    """

    kept: tuple[str, ...] = ("key", "value", "g", "beta")

    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> Inputs:
        """Return the inputs; queries and keys are (1, T, G, K), values (1, T, H, K)."""
        rows = {"query": query[0], "key": key[0], "value": value[0], "g": g[0], "beta": beta[0]}
        return Inputs(rows, {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel})

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, H, K, K)."""
        key = inputs.rows["key"]
        value = inputs.rows["value"]
        return value.new_zeros(1, value.shape[1], key.shape[2], value.shape[2], dtype=torch.float32)

    def step(self, state: Tensor, inputs: Inputs) -> Stepped:
        """See `Recurrence`."""
        alone = {name: row[:, None] for name, row in inputs.rows.items()}
        more = {**inputs.fixed, "initial_state": state, "output_final_state": True}
        out, state = self._step(**alone, **more)
        return out[:, 0], state

    def _by_steps(self, state: Tensor, inputs: Inputs) -> Stepped:
        if not self.walks(state):
            return self._run_by(self._step, state, inputs)
        chain = [(row, 0 if row else BASE, 0) for row in range(inputs.num_rows)]
        after = torch.empty_like(state)
        return self.walk(state, inputs, torch.tensor(chain), after), after

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        return self._run_by(self._scan, state, inputs)

    def _run_by(self, function: Callable[..., Any], state: Tensor, inputs: Inputs) -> Stepped:
        together = {name: row[None] for name, row in inputs.rows.items()}
        more = {**inputs.fixed, "initial_state": state, "output_final_state": True}
        out, state = function(**together, **more)
        return out[0], state

    def give(self, out_T: Tensor) -> tuple[Tensor, None]:
        """See `Recurrence`."""
        return out_T[None], None

    def walks(self, state: Tensor) -> bool:
        """Tell whether steps are taken here; the library's leave caches with every operation."""
        name = getattr(self._step, "__name__", "")
        is_here = state.device.type == "cpu" and name in _DECAYS_BY_HEAD
        return is_here and state[0].nbytes >= LARGE_STATE_BYTES

    def walk(
        self, state: Tensor, inputs: Inputs, step_R3: Tensor, after: Tensor | None = None
    ) -> Tensor:
        """Return outputs (T, ...) of the rows that `step_R3` names, see `RowTree.slots`.

        Operations, and so bits, are the library's, but threads take a few heads each through all
        steps.

        Args:
            after: receives the last state (1, ...) where all steps have one slot.
        """
        # no mode has to watch these
        with torch._C.DisableTorchFunction():
            given = _delta_rows(inputs.rows, state.shape[1], **inputs.fixed)
            out = torch.empty(given.value_THV.shape)
            _walk(state[0].contiguous(), given, step_R3, after, out)
            return out.to(inputs.rows["query"].dtype)


def _delta_rows(rows: RowInputs, num_heads: int, *, use_qk_l2norm_in_kernel: bool) -> DeltaRows:
    names = ("query", "key", "value", "beta", "g")
    query, key, value, beta, decay = (rows[name].float().contiguous() for name in names)
    query, key = (one.repeat_interleave(num_heads // one.shape[1], dim=1) for one in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (_l2norm(one) for one in (query, key))
    query = query / (query.shape[-1] ** 0.5)
    return DeltaRows(query, key, value, beta, in_whole_vectors(torch.exp, decay))


def _l2norm(rows: Tensor) -> Tensor:
    """Do what transformers' `l2norm` does."""
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _NORM_EPS)


def _walk(
    base_HKV: Tensor, rows: DeltaRows, step_R3: Tensor, after: Tensor | None, out_THV: Tensor
) -> None:
    """Share the heads among threads; each has slots of its own where no state is asked for."""
    num_heads = len(base_HKV)
    num_slots = int(step_R3[:, 2].max()) + 1
    assert after is None or num_slots == 1, "the last step leaves the last state"
    is_compiled = agrees(*base_HKV.shape[1:])
    walk_heads = walk_heads_compiled if is_compiled else walk_heads_reference
    at_once = _HEADS_COMPILED if is_compiled else max(1, _HEADS_BYTES // base_HKV[0].nbytes)
    parts = [(lo, min(lo + at_once, num_heads)) for lo in range(0, num_heads, at_once)]
    left = iter(parts)

    def take() -> None:
        states = after
        if states is None:
            num_held = 1 if is_compiled else min(at_once, num_heads)
            states = torch.empty(num_slots, num_held, *base_HKV.shape[1:])
        for some in left:
            walk_heads(base_HKV, rows, step_R3, some, states, out_THV)

    TEAM.run(take, len(parts))


class Mamba2(Recurrence):
    """State spaces with a decay for each head: S = S e^(A dt) + dt x B^T.

    Bamba, Granite 4, Falcon-H1 and Nemotron-H have them.
    """

    kept: tuple[str, ...] = ("x", "dt", "B")

    def read(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **more: Any) -> Inputs:
        """Return (1, T, H, K), settled time steps (1, T, H), and B and C (1, T, G, K)."""
        lowest, highest = more.get("dt_limit", _UNLIMITED)
        dt = _settled(dt, more.get("dt_bias"), is_soft=more.get("dt_softplus"))
        dt = torch.clamp(dt, min=lowest, max=highest)
        rows = {"x": x[0], "dt": dt[0], "B": B[0], "C": C[0]}
        return Inputs(rows, {"A": A, "D": more["D"].clone(), "chunk_size": more["chunk_size"]})

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, H, K, K)."""
        x = inputs.rows["x"]
        B = inputs.rows["B"]
        return x.new_zeros(1, *x.shape[1:], B.shape[2], dtype=torch.float32)

    def step(self, state: Tensor, inputs: Inputs) -> Stepped:
        """See `Recurrence`; the family's function writes over its state."""
        x, dt, B, C = (inputs.rows[name] for name in ("x", "dt", "B", "C"))
        state = state.clone()
        width = x.shape[2]
        A = inputs.fixed["A"][:, None, None].expand(-1, width, B.shape[2])
        D = inputs.fixed["D"][:, None].expand(-1, width)
        return self._step(state, x, dt[:, :, None].expand(-1, -1, width), A, B, C, D, z=None), state

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        x, dt, B, C = (inputs.rows[name][None] for name in ("x", "dt", "B", "C"))
        more = {"initial_states": state, "return_final_states": True}
        A, D, chunk_size = (inputs.fixed[name] for name in ("A", "D", "chunk_size"))
        out, state = self._scan(x, dt, A, B, C, chunk_size=chunk_size, D=D, **more)
        return out[0].to(x.dtype), state


class Mamba(Recurrence):
    """State spaces with a decay for each channel and state (Jamba); prompts, too, go by steps."""

    kept: tuple[str, ...] = ("x", "dt", "B")

    def read(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **more: Any) -> Inputs:
        """Return the inputs, which are all (1, D, T) or (1, K, T)."""
        bias = more.get("delta_bias")
        bias = None if bias is None else bias[:, None]
        dt = _settled(dt, bias, is_soft=more.get("delta_softplus"))
        rows = {"x": x, "dt": dt, "B": B, "C": C, "z": more.get("z")}
        own = {name: row[0].T for name, row in rows.items() if row is not None}
        return Inputs(own, {"A": A, "D": more["D"].clone()})

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, D, K)."""
        return inputs.rows["x"].new_zeros(1, *inputs.fixed["A"].shape, dtype=torch.float32)

    def step(self, state: Tensor, inputs: Inputs) -> Stepped:
        """See `Recurrence`; the family's function writes over its state."""
        x, dt, B, C = (inputs.rows[name] for name in ("x", "dt", "B", "C"))
        state = state.clone()
        A = inputs.fixed["A"]
        D = inputs.fixed["D"]
        return self._step(state, x, dt, A, B, C, D, z=inputs.rows.get("z")), state

    def give(self, out_T: Tensor) -> Tensor:
        """See `Recurrence`."""
        return out_T.T[None]


class Lightning(Recurrence):
    """Linear attention with a fixed decay for each head (MiniMax-01): S = S e^-slope + k v^T.

    transformers has no functions for it, so the arithmetic is here, in float32: a state that is
    rounded to bfloat16 at every token, as transformers has it in that type, forgets.
    """

    kept: tuple[str, ...] = ("key", "value")

    def read(self, query: Tensor, key: Tensor, value: Tensor, decay_H: Tensor) -> Inputs:
        """Return the inputs, (1, T, H, K); `decay_H` is what a state keeps from row to row."""
        rows = {"query": query[0], "key": key[0], "value": value[0]}
        return Inputs(rows, {"decay_H": decay_H})

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, H, K, K)."""
        value = inputs.rows["value"]
        return value.new_zeros(1, *value.shape[1:], value.shape[2], dtype=torch.float32)

    def step(self, state: Tensor, inputs: Inputs) -> Stepped:
        """See `Recurrence`."""
        query, key, value = (inputs.rows[name].float() for name in ("query", "key", "value"))
        state = state * inputs.fixed["decay_H"][:, None, None]
        state = state + key[..., None] * value[..., None, :]
        out = (state * query[..., None]).sum(-2)
        return out.to(inputs.rows["value"].dtype), state

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        outs = list[Tensor]()
        for first in range(0, inputs.num_rows, _LIGHTNING_CHUNK):
            out, state = self._run_chunk(state, inputs.part(slice(first, first + _LIGHTNING_CHUNK)))
            outs.append(out)
        return torch.cat(outs).to(inputs.rows["value"].dtype), state

    def _run_chunk(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Run a few rows by products of matrices: what they had from before, and from each other."""
        names = ("query", "key", "value")
        query, key, value = (inputs.rows[name].float().transpose(0, 1) for name in names)
        decay_H11 = inputs.fixed["decay_H"][:, None, None]
        num_rows = key.shape[1]
        at_T = torch.arange(num_rows, device=key.device)
        lag_TT = (at_T[:, None] - at_T).clamp(min=0)
        decay_HTT = (decay_H11**lag_TT).tril()
        into_HT1 = decay_H11 ** (at_T + 1)[:, None]
        out_of_HT1 = decay_H11 ** (num_rows - 1 - at_T)[:, None]
        before = (query * into_HT1) @ state[0]
        among = (query @ key.transpose(1, 2) * decay_HTT) @ value
        behind = state[0] * into_HT1[:, -1:] + (key * out_of_HT1).transpose(1, 2) @ value
        return (before + among).transpose(0, 1), behind[None]


class Gated(Recurrence):
    """A state that is kept by a share for each channel, and added to (RecurrentGemma): S = a S + x."""

    kept: tuple[str, ...] = ("x", "share")

    def read(self, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor) -> Inputs:
        """Return the inputs, all (1, T, C); a text begins where `reset`, (1, T, 1), says so."""
        return Inputs({"x": hidden_states[0], "share": (recurrent_gate * ~reset)[0]}, {})

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, C)."""
        x = inputs.rows["x"]
        return x.new_zeros(1, x.shape[1], dtype=torch.float32)

    def step(self, state: Tensor, inputs: Inputs) -> Stepped:
        """See `Recurrence`."""
        x = inputs.rows["x"]
        state = inputs.rows["share"].float() * state + x.float()
        return state.to(x.dtype), state


def _settled(dt: Tensor, bias: Tensor | None, *, is_soft: bool | None) -> Tensor:
    """Return time steps as a scan would take them."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return in_whole_vectors(functional.softplus, dt) if is_soft else dt


class Functions(NamedTuple):
    """The names of a family's functions for one kind of recurrence, and what makes it of them."""

    scan: str  # of a whole prompt
    step: str  # of one token
    kind: Callable[[Callable[..., Any], Callable[..., Any]], Recurrence]


KINDS = (
    Functions("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", GatedDelta),
    Functions("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", GatedDelta),
    Functions("mamba2_chunk_scan", "mamba2_selective_state_update", Mamba2),
    Functions("mamba_selective_scan", "mamba_selective_state_update", Mamba),
)
CONVOLUTION = "causal_conv1d_fn"
