"""The state space of Zamba: Mamba's, where each of a few heads has time steps, B and C of its own.

A head's channels lie side by side; channels and their gates alternate in the rows of one product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.checkpoint.spec import RecurrentLayer
from offload.model.invariant import in_whole_vectors
from offload.model.mixers.base import Inputs, Mixer, RowInputs
from offload.model.mixers.mamba import ChannelStateSpace


class HeadedStateSpace(ChannelStateSpace):
    """States of D channels and N states; B and C are (T, H, N)."""

    def prepare(self, inputs: Inputs) -> RowInputs:
        """See `Recurrence`."""
        x_TD, dt_TD, B_THN, C_THN = (inputs.rows[name] for name in ("x", "dt", "B", "C"))
        num_alike = x_TD.shape[1] // B_THN.shape[1]
        dt_TD1 = dt_TD.float()[..., None]
        B_TDN = B_THN.float().repeat_interleave(num_alike, 1)
        return {
            "decay": in_whole_vectors(torch.exp, dt_TD1 * inputs.fixed["A"]),
            "added": dt_TD1 * B_TDN * x_TD.float()[..., None],
            "C": C_THN,
        }

    def read(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        C_THN = ready["C"]
        by_head = state.to(C_THN.dtype).unflatten(1, (C_THN.shape[1], -1))
        return self.products.multiply(torch.matmul, by_head, C_THN[..., None])[..., 0].flatten(1)


class ZambaMamba(Mixer):
    """See above."""

    REQUIRED = frozenset(
        {
            *(f"{name}.weight" for name in ("in_proj", "conv1d", "out_proj")),
            *("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"),
        }
    )
    OPTIONAL = frozenset({"in_proj.bias", "conv1d.bias", "out_proj.bias"})

    def __init__(self, source: nn.Module, config: Any, layer: int) -> None:
        super().__init__(source, config, layer)
        self.activation = config.hidden_mamba_act
        self.recurrence = HeadedStateSpace()

    def sizes(self) -> RecurrentLayer:
        """See `Mixer`."""
        num_heads, head_size, num_states = self.A_log.shape
        width = num_heads * head_size
        num_taps = self.conv1d.weight.shape[2]
        kept = 3 * width + 2 * num_heads * num_states
        return RecurrentLayer(num_taps, width, width * num_states, kept, 0, 12 * width)

    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """See `Mixer`."""
        input_TX, gate_TX = self.in_proj(hidden_1TD)[0].unflatten(-1, (-1, 2)).unbind(-1)
        x_TX = self.convolve(input_TX.contiguous(), self.conv1d, self.activation)
        num_heads, _, num_ranks = self.dt_proj_weight.shape
        num_states = self.A_log.shape[2]
        x_HTP = x_TX.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        multiply = self.products.multiply
        steps = multiply(torch.bmm, x_HTP, self.x_proj_weight.transpose(1, 2))
        dt_HTR, B_HTN, C_HTN = steps.split([num_ranks, num_states, num_states], -1)
        dt_HTP = multiply(torch.bmm, dt_HTR, self.dt_proj_weight.transpose(1, 2))
        dt_TX = (dt_HTP + self.dt_proj_bias.to(dt_HTP.dtype)[:, None]).transpose(0, 1).flatten(1)
        rows = {
            "x": x_TX,
            "dt": in_whole_vectors(functional.softplus, dt_TX),
            "B": B_HTN.transpose(0, 1),
            "C": C_HTN.transpose(0, 1),
        }
        fixed = {"A": -torch.exp(self.A_log.float()).flatten(0, 1)}
        out_TX = self.scan(self.recurrence, Inputs(rows, fixed))
        out_TX = (out_TX + x_TX * self.D.float().flatten()) * in_whole_vectors(
            functional.silu, gate_TX.contiguous()
        )
        return self.out_proj(out_TX.to(hidden_1TD.dtype)[None])
