"""A language model with its head, of families that transformers only has inside of a model that also sees.

The decoder is transformers' own, and so is the forward pass; the head is one matrix behind it, as in those models.
Invariant: parameters bear the names of a language model on its own, and of the family's rules none is lost.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class HeadedModel:
    """What `AutoModelForCausalLM` is to other families."""

    @staticmethod
    def from_config(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
        """A new model. Raises `ValueError` for a config that transformers has no decoder for."""
        if type(config) not in MODEL_MAPPING:
            raise ValueError(f"transformers has no language model of type {config.model_type}")
        decoder = MODEL_MAPPING[type(config)]
        # In the decoder's own module, whose source transformers reads to learn what its families can be asked for.
        own = {"__module__": decoder.__module__, "config_class": type(config)}
        headed: type[PreTrainedModel] = type(f"{decoder.__name__}WithHead", (_WithHead, decoder.__mro__[1]), own)
        return headed._from_config(config, dtype=dtype)


class _WithHead:
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (what transformers calls it)

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = MODEL_MAPPING[type(config)](config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **more: Any) -> CausalLMOutputWithPast:
        """Scores of the last `logits_to_keep` rows; 0 is all of them."""
        hidden_1TD = self.model(input_ids=input_ids, **more).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden_1TD[:, -logits_to_keep:]))
