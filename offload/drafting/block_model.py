"""The model of a block: layers over the target's states, and what corrects their scores.

Keys are made of the target's states, of every committed token. The rows of a block are the last
token and masks behind it. Which class grows trees of it: `drafting.dflash`.

Shape letters, in this file only: F nodes of a level, Z numbers of a state that corrects.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.carried import MIXER
from offload.checkpoint.checkpoint import Block
from offload.checkpoint.heads import CORRECTIONS
from offload.drafting.block_convolution import BlockConvolution
from offload.drafting.corrections import BlockOutput, Corrections, Sizes, corrections_of
from offload.drafting.head_model import HeadModel, empty_linear, mixer_shapes
from offload.model.carried_model import CarriedCache, twin
from offload.model.kv_cache import KVCache
from offload.model.linear import replace_linears
from offload.model.parts import BatchPart
from offload.model.taps import final_norm

_CORRECTIONS = CORRECTIONS.removeprefix(MIXER)


class BlockModel(HeadModel):
    """A block's layers: rows of committed tokens give keys alone, made of the target's states."""

    def _new_mixer(self, decoder: Any) -> nn.Module:
        mixer = _ContextMixer(final_norm(decoder), mixer_shapes(self.checkpoint))
        mixer.corrections = self._corrections(mixer)
        for layer in decoder.layers:
            if self.block.convolution is not None:
                self._convolve(layer, mixer)
            layer.input_layernorm.register_forward_hook(mixer.place)
        return mixer

    def _corrections(self, mixer: "_ContextMixer") -> Corrections | None:
        """Return the module that corrects scores by the tokens before; None for none."""
        head = self.checkpoint.tensors.get("lm_head.weight")
        num_words = int(self.checkpoint.config["vocab_size"])
        num_scored = num_words if head is None else head.shape[0]
        width = mixer.fc.out_features
        sizes = Sizes(num_words, num_scored, width, 0, self.block.size, self.block.num_candidates)
        parts = {
            name.removeprefix(_CORRECTIONS): shape
            for name, shape in mixer_shapes(self.checkpoint).items()
            if name.startswith(_CORRECTIONS)
        }
        return corrections_of(parts, sizes, mixer.fc.weight.dtype)

    def _convolve(self, layer: Any, mixer: "_ContextMixer") -> None:
        """Add the convolutions around a layer's halves."""
        assert self.block.convolution is not None, "there are some"
        width = mixer.fc.out_features
        dtype = mixer.fc.weight.dtype
        layer.attention_conv = BlockConvolution(width, *self.block.convolution, dtype)
        layer.mlp_conv = BlockConvolution(width, *self.block.convolution, dtype)
        layer.attention_conv.surround(layer.input_layernorm, layer.self_attn, mixer.in_block)
        layer.mlp_conv.surround(layer.post_attention_layernorm, layer.mlp, mixer.in_block)
        replace_linears(layer)

    def forward_parts(self, parts: Sequence[BatchPart], *, num_logits: int = 0) -> Tensor:
        """See `TreeModel`; rows whose states were taken out of the log are of committed tokens."""
        is_context = [
            torch.arange(len(part.token_T)) < part.cache.num_tapped(part)
            for part in parts
            if isinstance(part.cache, CarriedCache)
        ]
        self._is_context_T = self.send(torch.cat(is_context))
        return super().forward_parts(parts, num_logits=num_logits)

    def new_cache(self, num_slots: int, gather: Any = None) -> CarriedCache:
        """Return an empty cache, which has room for a block as well."""
        return super().new_cache(num_slots + self.block.size, gather)

    @property
    def block(self) -> Block:
        """Return the block as the draft describes it."""
        assert self._carried.block is not None, "such a draft says so"
        return self._carried.block

    @property
    def num_guesses(self) -> int:
        """Return the number of tokens that a block guesses."""
        return self.block.size - (not self.block.is_anchored)

    @property
    def corrections(self) -> Corrections | None:
        """Return the module that corrects scores by the tokens before; None for none."""
        corrections: Corrections | None = self._mixer.corrections
        return corrections

    def output(self, logits_DV: Tensor) -> BlockOutput:
        """Return scores behind a block's pass with its rows."""
        scores_DV = logits_DV
        if self.block.scores_scale != 1:
            scores_DV = scores_DV * self.block.scores_scale
        if softcap := self.block.softcap:
            # words that a head lacks stay ruled out
            is_out_DV = scores_DV == -torch.inf
            scores_DV = ((scores_DV / softcap).tanh() * softcap).masked_fill(is_out_DV, -torch.inf)
        return BlockOutput(scores_DV, self._output_TD[-self.block.size :])

    @torch.inference_mode()
    def before(self, output: BlockOutput, tokens: Sequence[int]) -> Tensor:
        """Return the state (1, Z) of corrections before the last of these tokens."""
        if self.corrections is None:
            return output.hidden_BH.new_zeros(1, 0)
        return self.corrections.start(output, tokens)

    @torch.inference_mode()
    def below(
        self, output: BlockOutput, depth_F: Tensor, token_F: Tensor, state_FZ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return scores (F, V) of what follows nodes, and states (F, Z) for what follows those."""
        depth_F = self.send(depth_F.clamp(max=self.num_guesses - 1))
        scores_FV = output.scores_DV[depth_F]
        if self.corrections is None:
            return scores_FV, state_FZ
        added_FW, state_FZ = self.corrections(output, depth_F, self.send(token_F), state_FZ)
        return scores_FV + self.widened(added_FW, 0.0), state_FZ

    def _masks_of(self, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache) -> Any:
        """See `TreeModel`; rows of a causal layer see none behind themselves."""
        masks = super()._masks_of(position_U, ancestor_TU, cache)
        kinds = [window for window in masks if self.block.is_causal[window is not None]]
        if not kinds:
            return masks
        num_before = ancestor_TU.shape[1] - ancestor_TU.shape[0]
        causal = super()._masks_of(position_U, ancestor_TU.tril(num_before), cache)
        return {**masks, **{window: causal[window] for window in kinds}}

    def _enter(self, embedded_1TD: Tensor, fed_1TD: Tensor) -> Tensor:
        self._mixer.context = (self._is_context_T[None, :, None], fed_1TD)
        return embedded_1TD * self.block.embedding_scale


class _ContextMixer(nn.Module):
    """Makes of states what every layer makes keys of.

    Attributes:
        context: of the pass that runs, which rows (1, T, 1) are of committed tokens, and their
            states (1, T, D).
    """

    context: tuple[Tensor, ...] = ()

    def __init__(self, norm: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        width, num_inputs = shapes["fc.weight"]
        dtype = next(norm.parameters()).dtype
        self.fc = empty_linear(num_inputs, width, dtype)
        self.hidden_norm = twin(norm)
        self.corrections: Corrections | None = None

    def forward(self, tapped_TW: Tensor) -> Tensor:
        """Return (T, D) of the target's states."""
        mixed_TD: Tensor = self.hidden_norm(self.fc(tapped_TW))
        return mixed_TD

    def in_block(self) -> Tensor:
        """Return which rows (1, T, 1) of the pass that runs are a block's."""
        return ~self.context[0]

    def place(self, _: nn.Module, __: Any, normed_1TD: Tensor) -> Tensor:
        """Return keys and values of a layer's attention, from its own normed rows and context."""
        is_context_1T1, fed_1TD = self.context
        return torch.where(is_context_1T1, fed_1TD, normed_1TD)
