"""Linear attention with a fixed decay for each head (MiniMax-01): S = S e^-slope + k v^T.

Everything is in float32: a state that is rounded to bfloat16 at every token, as transformers has
it in that type, forgets.
"""

from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.spec import RecurrentLayer
from offload.model.invariant import in_whole_vectors
from offload.model.library import ACT2FN
from offload.model.mixers.base import Inputs, PairMixer, Recurrence, RowInputs, Stepped, num_of

_CHUNK = 64  # rows


class FixedDecay(Recurrence):
    """States of H heads; a row has their queries, keys and values of K numbers side by side."""

    def start(self, inputs: Inputs) -> Tensor:
        """Return (1, H, K, K)."""
        heads_THX = inputs.rows["heads"]
        size = heads_THX.shape[2] // 3
        return heads_THX.new_zeros(1, heads_THX.shape[1], size, size, dtype=torch.float32)

    def prepare(self, inputs: Inputs) -> RowInputs:
        """See `Recurrence`."""
        query, key, value = inputs.rows["heads"].float().chunk(3, -1)
        decay_H11 = inputs.fixed["decay"][:, None, None]
        return {
            "query": query[..., None],
            "added": key[..., None] * value[..., None, :],
            "decay": decay_H11.expand(inputs.num_rows, *decay_H11.shape),
        }

    def advance(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        return (state * ready["decay"]).add_(ready["added"])

    def read(self, state: Tensor, ready: RowInputs) -> Tensor:
        """See `Recurrence`."""
        return (state * ready["query"]).sum(-2)

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        outs = list[Tensor]()
        for lo in range(0, inputs.num_rows, _CHUNK):
            out, state = self._run_chunk(state, inputs.part(slice(lo, lo + _CHUNK)))
            outs.append(out)
        return torch.cat(outs), state

    def _run_chunk(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Run a few rows by products of matrices: what they had from before, and from each other."""
        query, key, value = inputs.rows["heads"].float().transpose(0, 1).chunk(3, -1)
        decay_H11 = inputs.fixed["decay"][:, None, None]
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


class Lightning(PairMixer):
    """See above. Raises `KeyError` for what config.json lacks."""

    REQUIRED = frozenset(
        {"qkv_proj.weight", "norm.weight", "output_gate.weight", "out_proj.weight"}
    )

    def __init__(self, source: nn.Module, config: Any, layer: int) -> None:
        super().__init__(source, config, layer)
        self.act = ACT2FN[config.hidden_act]
        self.num_heads = num_of(config, "num_attention_heads")
        self.recurrence = FixedDecay()
        # slopes of MiniMax-01 (2501.08313, section 2.2.1): less in later layers
        is_late = layer / (num_of(config, "num_hidden_layers") - 1 + 1e-5)
        with torch.device("cpu"):
            slope_H = (2 ** (-8 / self.num_heads)) ** torch.arange(1, self.num_heads + 1)
            slope_H = slope_H * (1 - is_late + 1e-5)
            self.register_buffer("decay_H", torch.exp(-slope_H.float()), persistent=False)

    def sizes(self) -> RecurrentLayer:
        """See `Mixer`."""
        width = self.output_gate.weight.shape[0]
        state = width * width // self.num_heads
        return RecurrentLayer(1, 0, state, 3 * width, 0, (8 + _CHUNK) * width)

    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """See `Mixer`."""
        heads_THX = in_whole_vectors(self.act, self.qkv_proj(hidden_1TD))[0]
        heads_THX = heads_THX.unflatten(-1, (self.num_heads, -1))
        out = self.scan(self.recurrence, Inputs({"heads": heads_THX}, {"decay": self.decay_H}))
        out = self.norm(out.to(heads_THX.dtype).flatten(1)[None])
        return self.out_proj(in_whole_vectors(torch.sigmoid, self.output_gate(hidden_1TD)) * out)
