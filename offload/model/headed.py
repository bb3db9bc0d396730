"""A language model of a family that transformers only has inside a multimodal model.

The decoder and its forward pass are transformers' own; the head is one matrix after it.
"""

import sys
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from offload.model.library import MODEL_MAPPING, CausalLMOutputWithPast, PreTrainedModel


def headed_model(config: Any, dtype: torch.dtype, **_: Any) -> PreTrainedModel:
    """Build a model that `AutoModelForCausalLM` has no class for. Raises `ValueError`."""
    decoder = _decoder_class(config)
    # In the decoder's own module, from whose source transformers learns what its families support.
    attributes = {"__module__": decoder.__module__, "config_class": type(config)}
    headed: Any = type(f"{decoder.__name__}WithHead", (_WithHead, decoder.__mro__[1]), attributes)
    return headed._from_config(config, dtype=dtype)


class _WithHead:
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (what transformers calls it)

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = _decoder_class(config)(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: Tensor, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Return scores of the last `logits_to_keep` rows; 0 is all of them."""
        hidden_1TD = self.model(input_ids=input_ids, **inputs).last_hidden_state
        logits_1TV = self.lm_head(hidden_1TD[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=_scaled_scores(logits_1TV, self.model.config))


def _decoder_class(config: Any) -> Any:
    """Return the class of this config's decoder, listed or beside it. Raises `ValueError`.

    Some families only have it inside other models.
    """
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise ValueError("it does not write text")
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = [
        value
        for name, value in vars(sys.modules.get(home, object)).items()
        if name.endswith("TextModel")
        and isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == home
        and type(config) in _configs_of(value)
    ]
    if len(classes) != 1:
        raise ValueError(f"transformers has no language model of type {config.model_type}")
    return classes[0]


def _configs_of(decoder: type[PreTrainedModel]) -> tuple[Any, Any]:
    """Return the classes of config that a decoder names, and that it is built from.

    PaddleOCR-VL's names the whole model's in transformers 5.17.
    """
    made_of = signature(decoder).parameters.get("config")
    return getattr(decoder, "config_class", None), made_of and made_of.annotation


def _scaled_scores(logits_1TV: Tensor, config: Any) -> Tensor:
    """Apply the whole model's changes to scores: Granite divides, Muse bounds."""
    if divisor := getattr(config, "logits_scaling", None):
        logits_1TV = logits_1TV / divisor
    if factor := getattr(config, "output_multiplier", None):
        logits_1TV = logits_1TV * factor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits_1TV = torch.tanh(logits_1TV / cap) * cap
    return logits_1TV
