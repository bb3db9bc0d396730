"""The gated delta rule: S = S e^g + k u^T with u = beta (v - e^g k S), and outputs q S.

The decay is one for each head (Qwen3-Next, Qwen3.5 and 3.6, OLMo Hybrid) or one for each channel
of a head's keys (Kimi Linear, Ling 2.5, GLM-5.3 Flash). On a CPU a compiled kernel takes a head
through all rows of a tree; elsewhere rows of a level take a step together.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.checkpoint.spec import RecurrentLayer
from offload.kernels.gated_delta import AFTER, BASE, DeltaRows, agrees, walk_heads_compiled
from offload.model.invariant import in_whole_vectors
from offload.model.mixers.base import (
    CHUNK_FLOATS,
    Inputs,
    Mixer,
    Recurrence,
    RowInputs,
    Stepped,
    Steps,
    num_of,
    require_multiple,
)
from offload.model.thread_team import TEAM

_NORM_EPS = 1e-6  # of queries and keys, in all families
# rows of a chunk: decays by channel lie inside of a product, (rows, rows, channels) of each head
_CHUNK = 64
_COPIES = 12  # of a row's heads, while a prompt is read in chunks
_CHANNEL_CHUNK = 8
_HEADS_AT_ONCE = 4  # that a thread takes
_LEAST_SHARED = 1 << 20  # numbers of states that all steps write: fewer are one thread's
# parameters that every module of the family has, whatever its projections
_SHARED = ("conv1d.weight",)
_BY_HEAD = (*_SHARED, "A_log", "dt_bias", "norm.weight", "out_proj.weight")
_BY_CHANNEL = (
    *_SHARED,
    *(f"{name}_proj.weight" for name in "qkvbo"),
    "o_norm.weight",
    "forget_gate.A_log",
    "forget_gate.dt_bias",
)


class GatedDelta(Recurrence):
    """The rule for G heads of queries and keys and H of values, of sizes K and V."""

    def __init__(self, num_key_heads: int, num_heads: int, key_size: int, value_size: int) -> None:
        self.num_key_heads = num_key_heads
        self.num_heads = num_heads
        self.key_size = key_size
        self.value_size = value_size

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, H, K, V)."""
        shape = (1, self.num_heads, self.key_size, self.value_size)
        return inputs.rows["mixed"].new_zeros(shape, dtype=torch.float32)

    def _rows(self, inputs: Inputs) -> RowInputs:
        """Return normalised queries and keys (T, G, K), and what heads take, all in float32."""
        mixed_TC = inputs.rows["mixed"].float()
        num_twice = 2 * self.num_key_heads
        width = num_twice * self.key_size
        both_TGK = mixed_TC[:, :width].reshape(-1, num_twice, self.key_size)
        sums = (both_TGK * both_TGK).sum(-1, keepdim=True)
        both_TGK = both_TGK * torch.rsqrt(sums + _NORM_EPS)
        decay = in_whole_vectors(torch.exp, inputs.rows["g"].float())
        return {
            "query": both_TGK[:, : self.num_key_heads] / (self.key_size**0.5),
            "key": both_TGK[:, self.num_key_heads :],
            "value": mixed_TC[:, width:].reshape(-1, self.num_heads, self.value_size),
            "beta": inputs.rows["beta"].float(),
            # (T, H, 1) or (T, H, K)
            "decay": decay[..., None] if decay.ndim == 2 else decay,
        }

    def _by_head(self, ready: RowInputs) -> RowInputs:
        num_alike = self.num_heads // self.num_key_heads
        repeated = (
            {}
            if num_alike == 1
            else {
                name: ready[name].repeat_interleave(num_alike, dim=1) for name in ("query", "key")
            }
        )
        return {**ready, **repeated}

    def prepare(self, inputs: Inputs) -> RowInputs:
        """See `Recurrence`."""
        return self._by_head(self._rows(inputs))

    def advance(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        key_WHK1 = ready["key"][..., None]
        state = state * ready["decay"][..., None]
        held_WHV = (state * key_WHK1).sum(-2)
        delta_WHV = (ready["value"] - held_WHV) * ready["beta"][..., None]
        return state + key_WHK1 * delta_WHV[..., None, :]

    def read(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        return (state * ready["query"][..., None]).sum(-2)

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Run chunks by products of matrices (the UT transform, Yang et al. 2024, 2406.06484)."""
        ready = self.prepare(inputs)
        is_by_channel = ready["decay"].shape[-1] > 1
        # which takes longer than steps in a processor's cache
        if is_by_channel and self.walks(state.device):
            return self._by_steps(state, inputs)
        g = inputs.rows["g"].float()
        ready["decay"] = g if is_by_channel else g[..., None]
        chunk = _CHANNEL_CHUNK if is_by_channel else _CHUNK
        state_HKV = state[0]
        outs = list[Tensor]()
        for lo in range(0, inputs.num_rows, chunk):
            some = {name: row_T[lo : lo + chunk].transpose(0, 1) for name, row_T in ready.items()}
            out_HTV, state_HKV = _run_chunk(state_HKV, **some)
            outs.append(out_HTV.transpose(0, 1))
        return torch.cat(outs), state_HKV[None]

    def _by_steps(self, state: Tensor, inputs: Inputs) -> Stepped:
        if not self.walks(state.device):
            return super()._by_steps(state, inputs)
        chain = [(row, AFTER if row else BASE, AFTER) for row in range(inputs.num_rows)]
        return self.walk(state, inputs, Steps.from_rows(chain))

    def walks(self, device: torch.device) -> bool:
        """See `Recurrence`."""
        return device.type == "cpu" and agrees(self.key_size, self.value_size)

    def walk(self, state: Tensor, inputs: Inputs, steps: Steps) -> Stepped:
        """See `Recurrence`. Bits are those of `advance` and `read`."""
        ready = {name: row_T.contiguous() for name, row_T in self._rows(inputs).items()}
        rows = DeltaRows(
            query_TGK=ready["query"],
            key_TGK=ready["key"],
            value_THV=ready["value"],
            beta_TH=ready["beta"],
            decay_THC=ready["decay"],
        )
        out_THV = torch.empty_like(rows.value_THV)
        base_HKV = state[0].contiguous()
        after_HKV = torch.empty_like(base_HKV) if steps.is_kept else base_HKV
        _share_heads(base_HKV, rows, steps, after_HKV, out_THV)
        return out_THV, after_HKV[None]


def _run_chunk(
    state_HKV: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
) -> Stepped:
    """Return outputs (H, T, V) of a few rows and the state behind them.

    `decay` has logarithms of decays, (H, T, 1 or K), whose sums are G:
    u = (1 + A)^-1 beta (v - e^G k S), where A_ij = beta_i k_i e^(G_i - G_j) k_j below the diagonal.
    """
    num_rows = key.shape[1]
    sum_HTD = decay.cumsum(1)
    is_before_TT = torch.ones(num_rows, num_rows, dtype=torch.bool, device=key.device).tril()
    # (H, T, T, 1 or K): what is left of a row's share at a later one
    left = (sum_HTD[:, :, None] - sum_HTD[:, None]).masked_fill(
        ~is_before_TT[:, :, None], float("-inf")
    )
    left = left.exp()
    if left.shape[-1] == 1:
        among = (query @ key.transpose(1, 2)) * left[..., 0]
        system = (key @ key.transpose(1, 2)) * left[..., 0]
    else:
        among = torch.einsum("htk,huk,htuk->htu", query, key, left)
        system = torch.einsum("htk,huk,htuk->htu", key, key, left)
    into = sum_HTD.exp()
    known = value - (key * into) @ state_HKV
    delta = torch.linalg.solve_triangular(
        system * beta[..., None], known * beta[..., None], upper=False, unitriangular=True
    )
    out = (query * into) @ state_HKV + among @ delta
    out_of = (sum_HTD[:, -1:] - sum_HTD).exp()
    state = state_HKV * into[:, -1, :, None] + (key * out_of).transpose(1, 2) @ delta
    return out, state


def _share_heads(
    base_HKV: Tensor, rows: DeltaRows, steps: Steps, after_HKV: Tensor, out_THV: Tensor
) -> None:
    """Share the heads among threads where there is work for several, each with slots of its own."""
    num_heads, *size = base_HKV.shape
    is_shared = len(steps.step_R3) * base_HKV.numel() >= _LEAST_SHARED
    at_once = _HEADS_AT_ONCE if is_shared else num_heads
    bounds = range(0, num_heads, at_once)
    ends_HKV = (base_HKV, after_HKV)
    left = iter([(lo, min(lo + at_once, num_heads)) for lo in bounds])

    def take() -> None:
        state_SKV = torch.empty(steps.num_slots, *size)
        for heads in left:
            walk_heads_compiled(ends_HKV, rows, steps.step_R3, heads, state_SKV, out_THV)

    TEAM.run(take, len(bounds)) if is_shared else take()


class DeltaNet(Mixer):
    """A mixer of the gated delta rule; families differ in how they project.

    Raises `KeyError` for what config.json lacks.
    """

    gate_norm = "norm"
    project_out = "out_proj"

    def __init__(self, source: nn.Module, config: Any, layer: int) -> None:
        super().__init__(source, config, layer)
        self.activation = config.hidden_act
        self.num_channels, _, self.num_taps = self.conv1d.weight.shape
        num_key_heads, num_heads, key_size, value_size = self._heads(config)
        self.recurrence = GatedDelta(num_key_heads, num_heads, key_size, value_size)
        self.is_doubled = bool(getattr(config, "linear_allow_neg_eigval", False))

    def _heads(self, config: Any) -> tuple[int, int, int, int]:
        num_key_heads = num_of(config, "linear_num_key_heads")
        num_heads = num_of(config, "linear_num_value_heads")
        require_multiple("linear_num_value_heads", num_heads, "linear_num_key_heads", num_key_heads)
        return (
            num_key_heads,
            num_heads,
            num_of(config, "linear_key_head_dim"),
            num_of(config, "linear_value_head_dim"),
        )

    def sizes(self) -> RecurrentLayer:
        """See `Mixer`."""
        rule = self.recurrence
        num_heads = rule.num_heads
        copies = _COPIES * num_heads * max(rule.key_size, rule.value_size)
        return RecurrentLayer(
            self.num_taps,
            self.num_channels,
            state=num_heads * rule.key_size * rule.value_size,
            kept=2 * self.num_channels + num_heads,
            # decays, of each channel of keys or of each head
            kept_floats=num_heads * (rule.key_size if isinstance(self, ChannelDelta) else 1),
            row_floats=4 * self.num_channels + copies + CHUNK_FLOATS * num_heads,
        )

    def project(self, hidden_1TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (T, C) that is convolved, gates (T, H * V) of outputs, g, and beta (T, H)."""
        raise NotImplementedError

    def decays(self, step_TH: Tensor) -> Tensor:
        """Return the logarithms of decays, (T, H)."""
        return -self.A_log.float().exp() * in_whole_vectors(
            functional.softplus, step_TH.float() + self.dt_bias
        )

    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """See `Mixer`."""
        input_TC, gate, g, beta = self.project(hidden_1TD)
        beta = beta * 2.0 if self.is_doubled else beta
        mixed_TC = self.convolve(input_TC, self.conv1d, self.activation)
        out_THV = self.scan(self.recurrence, Inputs({"mixed": mixed_TC, "g": g, "beta": beta}, {}))
        out_THV = out_THV.to(mixed_TC.dtype)
        out = getattr(self, self.gate_norm)(
            out_THV.reshape(-1, out_THV.shape[-1]), gate.reshape(-1, out_THV.shape[-1])
        )
        return getattr(self, self.project_out)(out.reshape(1, len(mixed_TC), -1))


class SplitDelta(DeltaNet):
    """The mixer of Qwen3.5, Qwen3.6 and Qwen3.8: a projection for each thing."""

    REQUIRED = frozenset(
        {*_BY_HEAD, *(f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))}
    )

    def project(self, hidden_1TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DeltaNet`."""
        input_TC = self.in_proj_qkv(hidden_1TD)[0]
        gate = self.in_proj_z(hidden_1TD)[0]
        beta = in_whole_vectors(torch.sigmoid, self.in_proj_b(hidden_1TD)[0])
        return input_TC, gate, self.decays(self.in_proj_a(hidden_1TD)[0]), beta


class FusedDelta(DeltaNet):
    """The mixer of Qwen3-Next: each head of keys has what belongs to it side by side."""

    REQUIRED = frozenset({*_BY_HEAD, "in_proj_qkvz.weight", "in_proj_ba.weight"})

    def project(self, hidden_1TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DeltaNet`."""
        rule = self.recurrence
        num_alike = rule.num_heads // rule.num_key_heads
        width = num_alike * rule.value_size
        all_TGX = self.in_proj_qkvz(hidden_1TD)[0].unflatten(-1, (rule.num_key_heads, -1))
        *mixed, gate = all_TGX.split([rule.key_size, rule.key_size, width, width], -1)
        input_TC = torch.cat([part.flatten(1) for part in mixed], -1)
        steps_TGX = self.in_proj_ba(hidden_1TD)[0].unflatten(-1, (rule.num_key_heads, -1))
        beta, step = (part.flatten(1) for part in steps_TGX.split(num_alike, -1))
        return input_TC, gate, self.decays(step), in_whole_vectors(torch.sigmoid, beta)


class OlmoDelta(DeltaNet):
    """The mixer of OLMo Hybrid: queries, keys and values apart."""

    REQUIRED = frozenset(
        {
            *_SHARED,
            "A_log",
            "dt_bias",
            "o_norm.weight",
            *(f"{name}_proj.weight" for name in "qkvabgo"),
        }
    )
    gate_norm = "o_norm"
    project_out = "o_proj"

    def project(self, hidden_1TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DeltaNet`."""
        input_1TC = torch.cat(
            [each(hidden_1TD) for each in (self.q_proj, self.k_proj, self.v_proj)], -1
        )
        beta = in_whole_vectors(torch.sigmoid, self.b_proj(hidden_1TD)[0])
        return (
            input_1TC[0],
            self.g_proj(hidden_1TD)[0],
            self.decays(self.a_proj(hidden_1TD)[0]),
            beta,
        )


class ChannelDelta(OlmoDelta):
    """The mixer of Kimi Linear and GLM-5.3 Flash: decays by channel, and gates of outputs, by two products."""

    REQUIRED = frozenset(
        {
            *_BY_CHANNEL,
            *(f"{name}_{part}_proj.weight" for name in ("g", "forget_gate.f") for part in "ab"),
        }
    )

    def _heads(self, config: Any) -> tuple[int, int, int, int]:
        num_heads = num_of(config, "linear_num_heads")
        size = num_of(config, "linear_head_dim")
        return num_heads, num_heads, size, size

    def project(self, hidden_1TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `DeltaNet`."""
        input_1TC = torch.cat(
            [each(hidden_1TD) for each in (self.q_proj, self.k_proj, self.v_proj)], -1
        )
        beta = in_whole_vectors(torch.sigmoid, self.b_proj(hidden_1TD)[0])
        return input_1TC[0], self.gates(hidden_1TD), self.forget_gate(hidden_1TD)[0], beta

    def gates(self, hidden_1TD: Tensor) -> Tensor:
        """Return the gates of outputs, (T, H * V)."""
        return self.g_b_proj(self.g_a_proj(hidden_1TD))[0]


class PlainChannelDelta(ChannelDelta):
    """The mixer of Ling 2.5: gates and decays by one product each."""

    REQUIRED = frozenset({*_BY_CHANNEL, "g_proj.weight", "forget_gate.f_proj.weight"})

    def gates(self, hidden_1TD: Tensor) -> Tensor:
        """See `ChannelDelta`."""
        return self.g_proj(hidden_1TD)[0]
