"""The real-gated linear recurrent unit of RecurrentGemma (Griffin, De et al. 2024, 2402.19427).

A channel keeps a share of its state and adds to it: S = a S + sqrt(1 - a^2) i x, where the share a
and the gate i are of the row; a text begins with a state of zeros, and its first row adds i x.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.checkpoint.spec import RecurrentLayer
from offload.model.invariant import in_whole_vectors
from offload.model.library import ACT2FN
from offload.model.mixers.base import Inputs, PairMixer, Recurrence, RowInputs

_SHARPNESS = -8.0  # c in the paper, section 2.4


class KeptShare(Recurrence):
    """A state (C) that is kept by a share for each channel, and added to."""

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, C)."""
        x_TC = inputs.rows["x"]
        return x_TC.new_zeros(1, x_TC.shape[1], dtype=torch.float32)

    def prepare(self, inputs: Inputs) -> RowInputs:
        """See `Recurrence`."""
        return {name: row_TC.float() for name, row_TC in inputs.rows.items()}

    def advance(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        return ready["share"] * state + ready["x"]

    def read(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        return state


class RgLru(PairMixer):
    """See above."""

    REQUIRED = frozenset(
        {
            *(f"linear_{name}.{kind}" for name in ("x", "y", "out") for kind in ("weight", "bias")),
            *("conv_1d.weight", "conv_1d.bias", "rg_lru.recurrent_param"),
            *(
                f"rg_lru.{gate}_gate_{kind}"
                for gate in ("input", "recurrent")
                for kind in ("weight", "bias")
            ),
        }
    )
    READ = frozenset({"conv_1d", "rg_lru"})

    def __init__(self, source: nn.Module, config: Any, layer: int) -> None:
        super().__init__(source, config, layer)
        self.act = ACT2FN[config.hidden_activation]
        self.recurrence = KeptShare()

    def sizes(self) -> RecurrentLayer:
        """See `Mixer`."""
        num_channels, _, num_taps = self.conv_1d.weight.shape
        kept = 3 * num_channels
        return RecurrentLayer(num_taps, num_channels, num_channels, kept, 0, 12 * num_channels)

    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """See `Mixer`."""
        x_TC = self.convolve(self.linear_x(hidden_1TD)[0], self.conv_1d)
        unit = self.rg_lru
        x_HTK = x_TC.unflatten(-1, (len(unit.input_gate_bias), -1)).transpose(0, 1)
        gate_TC = self._gates(x_HTK, unit.input_gate_weight, unit.input_gate_bias)
        share_TC = self._gates(x_HTK, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        log_TC = _SHARPNESS * share_TC * functional.softplus(unit.recurrent_param)
        is_first_T1 = (self.positions() == 0).to(x_TC.device)[:, None]
        grown_TC = torch.where(
            is_first_T1, 1.0, torch.sqrt(1 - in_whole_vectors(torch.exp, 2 * log_TC))
        )
        rows = {
            "x": x_TC * gate_TC * grown_TC.to(x_TC.dtype),
            "share": in_whole_vectors(torch.exp, log_TC) * ~is_first_T1,
        }
        out_TC = self.scan(self.recurrence, Inputs(rows, {})).to(x_TC.dtype)
        return self.linear_out(out_TC[None] * in_whole_vectors(self.act, self.linear_y(hidden_1TD)))

    def _gates(self, x_HTK: Tensor, weight_HKK: Tensor, bias_HK: Tensor) -> Tensor:
        """Return a gate for each channel, (T, H * K), by the channels of its head."""
        gate_HTK = self.products.multiply(torch.bmm, x_HTK, weight_HKK) + bias_HK[:, None]
        return in_whole_vectors(torch.sigmoid, gate_HTK.transpose(0, 1).flatten(1))
