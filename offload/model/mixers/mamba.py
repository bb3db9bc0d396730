"""State spaces with a decay for each channel and state: S = S e^(A dt) + dt x B, and S C + D x.

Jamba, Mamba and Falcon-Mamba have them. Prompts go by steps, too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.checkpoint.spec import RecurrentLayer
from offload.model.invariant import in_whole_vectors
from offload.model.mixers.base import Inputs, Mixer, Recurrence, RowInputs


class ChannelStateSpace(Recurrence):
    """States of D channels and N states."""

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, D, N)."""
        A = inputs.fixed["A"]
        return A.new_zeros(1, *A.shape, dtype=torch.float32)

    def prepare(self, inputs: Inputs) -> RowInputs:
        """See `Recurrence`."""
        x, dt, B, C = (inputs.rows[name] for name in ("x", "dt", "B", "C"))
        dt = dt.float()[..., None]
        return {
            "decay": in_whole_vectors(torch.exp, dt * inputs.fixed["A"]),
            "added": (dt * B.float()[:, None]) * x.float()[..., None],
            "C": C,
        }

    def advance(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        return (state * ready["decay"]).add_(ready["added"])

    def read(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        C = ready["C"]
        return self.products.multiply(torch.matmul, state.to(C.dtype), C[..., None])[..., 0]


class Mamba(Mixer):
    """See above."""

    REQUIRED = frozenset(
        {
            "in_proj.weight",
            "conv1d.weight",
            "x_proj.weight",
            "dt_proj.weight",
            "A_log",
            "D",
            "out_proj.weight",
        }
    )
    OPTIONAL = frozenset(
        {
            *("in_proj.bias", "conv1d.bias", "dt_proj.bias", "out_proj.bias"),
            *(f"{name}_layernorm.weight" for name in ("dt", "b", "c")),
        }
    )
    READ = frozenset({"conv1d", "dt_proj"})

    def __init__(self, source: nn.Module, config: Any, layer: int) -> None:
        super().__init__(source, config, layer)
        self.activation = config.hidden_act
        self.recurrence = ChannelStateSpace()

    def sizes(self) -> RecurrentLayer:
        """See `Mixer`."""
        width, num_states = self.A_log.shape
        num_taps = self.conv1d.weight.shape[2]
        kept = 3 * width + 2 * num_states
        return RecurrentLayer(num_taps, width, width * num_states, kept, 0, 12 * width)

    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """See `Mixer`."""
        input_TX, gate_TX = self.in_proj(hidden_1TD)[0].chunk(2, -1)
        x_TX = self.convolve(input_TX, self.conv1d, self.activation)
        children = dict(self.named_children())
        norms = [children.get(f"{name}_layernorm") for name in ("dt", "b", "c")]
        num_ranks = self.dt_proj.weight.shape[1]
        num_states = self.A_log.shape[1]
        steps = self.x_proj(x_TX[None]).split([num_ranks, num_states, num_states], -1)
        dt, B, C = (
            each[0] if norm is None else norm(each)[0]
            for norm, each in zip(norms, steps, strict=True)
        )
        dt_TX = self.products.linear(dt[None], self.dt_proj.weight)[0]
        if self.dt_proj.bias is not None:
            dt_TX = dt_TX + self.dt_proj.bias.to(dt_TX.dtype)
        rows = {"x": x_TX, "dt": in_whole_vectors(functional.softplus, dt_TX), "B": B, "C": C}
        fixed = {"A": -torch.exp(self.A_log.float())}
        out_TX = self.scan(self.recurrence, Inputs(rows, fixed))
        out_TX = (out_TX + x_TX * self.D.float()) * in_whole_vectors(functional.silu, gate_TX)
        return self.out_proj(out_TX.to(hidden_1TD.dtype)[None])
