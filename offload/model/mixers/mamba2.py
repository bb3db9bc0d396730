"""State spaces with a decay for each head: S = S e^(A dt) + dt x B^T, and outputs S C + D x.

Bamba, Granite 4, Falcon-H1, Nemotron-H, Zamba2 and Mamba2 have them. Where config.json has a size
of chunks, it is the library's way of reading a prompt; here chunks have a size of their own.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.checkpoint.spec import RecurrentLayer
from offload.model.invariant import in_whole_vectors
from offload.model.mixers.base import (
    CHUNK_FLOATS,
    Inputs,
    Mixer,
    Recurrence,
    RowInputs,
    Stepped,
    num_of,
    require_multiple,
)

_CHUNK = 64  # rows


class StateSpace(Recurrence):
    """States of H heads of P channels, and G groups of N states."""

    def __init__(self, num_heads: int, head_size: int, num_groups: int, num_states: int) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_groups = num_groups
        self.num_states = num_states

    def split(self, mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x (T, H, P), and B and C (T, G, N)."""
        width = self.num_heads * self.head_size
        groups_width = self.num_groups * self.num_states
        x, B, C = mixed_TC.split([width, groups_width, groups_width], -1)
        groups = (self.num_groups, self.num_states)
        return (
            x.unflatten(-1, (self.num_heads, -1)),
            B.unflatten(-1, groups),
            C.unflatten(-1, groups),
        )

    def _by_head(self, group_TGN: Tensor) -> Tensor:
        return group_TGN.repeat_interleave(self.num_heads // self.num_groups, dim=1)

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, H, P, N)."""
        shape = (1, self.num_heads, self.head_size, self.num_states)
        return inputs.rows["mixed"].new_zeros(shape, dtype=torch.float32)

    def prepare(self, inputs: Inputs) -> RowInputs:
        """See `Recurrence`."""
        x, B, C = self.split(inputs.rows["mixed"])
        dt_TH = inputs.rows["dt"]
        step_TH1N = dt_TH[..., None, None] * self._by_head(B)[:, :, None]
        return {
            "decay": in_whole_vectors(torch.exp, dt_TH.float() * inputs.fixed["A"])[
                ..., None, None
            ],
            "added": step_TH1N * x[..., None],
            "C": self._by_head(C),
        }

    def advance(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        return (state * ready["decay"]).add_(ready["added"])

    def read(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        C = ready["C"]
        out = self.products.multiply(
            torch.bmm, state.to(C.dtype).flatten(0, 1), C.flatten(0, 1)[..., None]
        )
        return out.reshape(state.shape[:3])

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Run chunks by products of matrices (Dao and Gu 2024, 2405.21060, section 6)."""
        x, B, C = (each.float().transpose(0, 1) for each in self.split(inputs.rows["mixed"]))
        dt_HT = inputs.rows["dt"].float().T
        log_HT = dt_HT * inputs.fixed["A"][:, None]
        state_HPN = state[0]
        outs = list[Tensor]()
        for lo in range(0, inputs.num_rows, _CHUNK):
            some = slice(lo, lo + _CHUNK)
            out_HTP, state_HPN = self._run_chunk(
                state_HPN,
                x[:, some] * dt_HT[:, some, None],
                B[:, some],
                C[:, some],
                log_HT[:, some],
            )
            outs.append(out_HTP.transpose(0, 1))
        return torch.cat(outs), state_HPN[None]

    def _run_chunk(
        self, state_HPN: Tensor, x_HTP: Tensor, B_GTN: Tensor, C_GTN: Tensor, log_HT: Tensor
    ) -> Stepped:
        """Return outputs (H, T, P) of a chunk of rows, and the state (H, P, N) after it."""
        num_alike = self.num_heads // self.num_groups
        num_rows = log_HT.shape[1]
        sum_HT = log_HT.cumsum(1)
        is_before_TT = torch.ones(num_rows, num_rows, dtype=torch.bool, device=x_HTP.device).tril()
        left_HTT = (
            (sum_HT[:, :, None] - sum_HT[:, None]).masked_fill(~is_before_TT, -math.inf).exp()
        )
        alike_GTT = C_GTN @ B_GTN.transpose(1, 2)
        among_HTP = (alike_GTT.repeat_interleave(num_alike, 0) * left_HTT) @ x_HTP
        C_HTN = C_GTN.repeat_interleave(num_alike, 0)
        before_HTP = (C_HTN @ state_HPN.transpose(1, 2)) * sum_HT.exp()[..., None]
        out_of_HT1 = (sum_HT[:, -1:] - sum_HT).exp()[..., None]
        B_HTN = B_GTN.repeat_interleave(num_alike, 0)
        state = (
            state_HPN * sum_HT[:, -1, None, None].exp()
            + (x_HTP * out_of_HT1).transpose(1, 2) @ B_HTN
        )
        return among_HTP + before_HTP, state


class Dialect(NamedTuple):
    """The names of sizes in config.json; `groups` and `beside` tell families apart."""

    groups: str
    beside: str
    activation: str | None  # None: silu, whatever the feed-forwards have
    is_limited_below: bool  # time steps are at least `time_step_min`; else within `time_step_limit`


_DIALECTS = (
    Dialect("mamba_n_groups", "mamba_d_state", "hidden_act", is_limited_below=False),
    Dialect("n_groups", "ssm_state_size", "mamba_hidden_act", is_limited_below=True),
    Dialect("mamba_ngroups", "mamba_d_state", None, is_limited_below=True),
    Dialect("n_groups", "state_size", "hidden_act", is_limited_below=False),
)


class Mamba2(Mixer):
    """See above. Raises `KeyError` for what config.json lacks."""

    REQUIRED = frozenset(
        {"in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "D", "out_proj.weight"}
    )
    OPTIONAL = frozenset({"norm.weight", "in_proj.bias", "conv1d.bias", "out_proj.bias"})

    def __init__(self, source: nn.Module, config: Any, layer: int) -> None:
        super().__init__(source, config, layer)
        known = (
            each
            for each in _DIALECTS
            if hasattr(config, each.groups) and hasattr(config, each.beside)
        )
        dialect = next(known, _DIALECTS[0])
        num_groups = num_of(config, dialect.groups)
        num_heads = len(self.A_log)
        require_multiple("the number of heads", num_heads, dialect.groups, num_groups)
        self.width = self.out_proj.weight.shape[1]
        self.num_channels, _, self.num_taps = self.conv1d.weight.shape
        num_states = (self.num_channels - self.width) // 2 // num_groups
        self.recurrence = StateSpace(num_heads, self.width // num_heads, num_groups, num_states)
        self.activation = (
            "silu" if dialect.activation is None else getattr(config, dialect.activation)
        )
        self.limits = (
            (config.time_step_min, math.inf) if dialect.is_limited_below else config.time_step_limit
        )
        self.is_normed = any(name == "norm.weight" for name, _ in self.named_parameters())
        self.in_multiplier = getattr(config, "ssm_in_multiplier", None)
        factors = getattr(config, "ssm_multipliers", None)
        widths = [self.width, self.width, *[num_groups * num_states] * 2, num_heads]
        if factors is not None:
            # in the type of what they are multiplied with, as the library has them
            dtype = self.in_proj.weight.dtype
            with torch.device("cpu"):
                parts = [
                    torch.full((size,), factor, dtype=dtype)
                    for factor, size in zip(factors, widths, strict=True)
                ]
                self.register_buffer("factors", torch.cat(parts), persistent=False)
        else:
            self.register_buffer("factors", None, persistent=False)

    def sizes(self) -> RecurrentLayer:
        """See `Mixer`."""
        num_heads = self.recurrence.num_heads
        num_states = self.recurrence.num_states
        copies = 6 * self.width + 4 * num_heads * num_states
        return RecurrentLayer(
            self.num_taps,
            self.num_channels,
            state=self.width * num_states,
            kept=2 * self.num_channels + num_heads,
            row_floats=4 * self.num_channels + copies + CHUNK_FLOATS * num_heads,
        )

    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """See `Mixer`."""
        if self.in_multiplier is not None:
            hidden_1TD = hidden_1TD * self.in_multiplier
        projected_TX = self.in_proj(hidden_1TD)[0]
        if self.factors is not None:
            projected_TX = projected_TX * self.factors
        num_heads = self.recurrence.num_heads
        gate_TX, input_TC, dt_TH = projected_TX.split(
            [self.width, self.num_channels, num_heads], -1
        )
        mixed_TC = self.convolve(input_TC, self.conv1d, self.activation)
        dt_TH = in_whole_vectors(functional.softplus, dt_TH + self.dt_bias.to(dt_TH.dtype))
        dt_TH = torch.clamp(dt_TH, min=self.limits[0], max=self.limits[1])
        fixed = {"A": -torch.exp(self.A_log.float())}
        out_THP = self.scan(self.recurrence, Inputs({"mixed": mixed_TC, "dt": dt_TH}, fixed))
        # chunks are in float32
        x_THP = self.recurrence.split(mixed_TC)[0].to(out_THP.dtype)
        out_THP = (out_THP + x_THP * self.D[:, None]).to(mixed_TC.dtype)
        out_1TX = out_THP.flatten(1)[None]
        return self.out_proj(self._gated(out_1TX, gate_TX[None]).to(hidden_1TD.dtype))

    def _gated(self, out_1TX: Tensor, gate_1TX: Tensor) -> Tensor:
        if self.is_normed:
            return self.norm(out_1TX, gate_1TX)
        return out_1TX * in_whole_vectors(functional.silu, gate_1TX)
