"""EAGLE-3 heads: one layer over a token's embedding and three states from inside of the target.

`fc` mixes the three states into one; deeper guesses are fed with what the layer made of their
parents. Attention reads the normed embedding and the normed state side by side, what is fed goes
past it. Source: Li et al. 2503.01840; forms and names: `checkpoint.heads`.

Shape letters, in this file only: W the width of all states tapped.
"""

from typing import Any

import torch
from torch import Tensor, nn

from offload.drafting.head_model import HeadModel, empty_linear, mixer_shapes
from offload.drafting.mtp import open_proposer as open_proposer
from offload.model.carried_model import twin
from offload.model.linear import replace_linears
from offload.model.taps import final_norm

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Eagle3Model(HeadModel):
    """A layer whose attention reads twice the width."""

    def _new_mixer(self, decoder: Any) -> nn.Module:
        """Widen the layer's projections to embedding and state; return what mixes the states."""
        layer = decoder.layers[0]
        mixer = _StateMixer(final_norm(decoder), mixer_shapes(self.checkpoint))
        for name in _PROJECTIONS:
            narrow = getattr(layer.self_attn, name)
            sizes = (2 * narrow.in_features, narrow.out_features)
            wide = empty_linear(*sizes, narrow.weight.dtype, has_bias=narrow.bias is not None)
            setattr(layer.self_attn, name, wide)
        layer.input_layernorm.register_forward_pre_hook(lambda _, __: mixer.rows[:1])
        layer.input_layernorm.register_forward_hook(
            lambda _, __, normed_1TD: torch.cat([normed_1TD, mixer.rows[1]], dim=-1)
        )
        replace_linears(layer)
        return mixer

    def _enter(self, embedded_1TD: Tensor, fed_1TD: Tensor) -> Tensor:
        normed_1TD: Tensor = self._mixer.hidden_norm(fed_1TD)
        self._mixer.rows = (embedded_1TD, normed_1TD)
        return normed_1TD if self._carried.is_residual_normed else fed_1TD


MODEL = Eagle3Model


class _StateMixer(nn.Module):
    """Makes one state of several; norms before are there where the file has them.

    Attributes:
        rows: of the pass that runs, what attention reads: embeddings, and normed states.
    """

    rows: tuple[Tensor, ...] = ()

    def __init__(self, norm: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        width, num_inputs = shapes["fc.weight"]
        dtype = next(norm.parameters()).dtype
        self.fc = empty_linear(num_inputs, width, dtype, has_bias="fc.bias" in shapes)
        self.hidden_norm = twin(norm)
        widths = [shape[0] for name, shape in shapes.items() if name.startswith("fc_norm.")]
        self.fc_norm = nn.ModuleList(twin(norm, width) for width in widths)
        is_normed = "input_norm.weight" in shapes
        self.input_norm = twin(norm, num_inputs) if is_normed else nn.Identity()

    def forward(self, tapped_TW: Tensor) -> Tensor:
        """Return (T, D) of the target's states."""
        tapped_TW = self.input_norm(tapped_TW)
        if len(self.fc_norm):
            parts = tapped_TW.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            tapped_TW = torch.cat(normed, dim=-1)
        mixed_TD: Tensor = self.fc(tapped_TW)
        return mixed_TD
