"""Two models of the packaged target's size that differ in their mixers alone: a hybrid and its twin.

Both begin as the packaged target with every mixer of tokens anew: the hybrid has layers of the
gated delta rule, with full attention in every fourth, the twin full attention throughout.
"""

from collections.abc import Callable

import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# of a config, as the dense model has them
_KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
)


def hybrid_of(dense: LlamaForCausalLM, seed: int) -> PreTrainedModel:
    """Return a Qwen 3.5 in float32 whose mixers begin at random."""
    own = dense.config
    config = Qwen3_5TextConfig(
        **{name: getattr(own, name) for name in _KEPT},
        linear_key_head_dim=own.head_dim,
        linear_value_head_dim=own.head_dim,
        linear_num_key_heads=own.num_key_value_heads,
        linear_num_value_heads=own.num_attention_heads,
    )
    # its norms store what is added to one
    return _begun(Qwen3_5ForCausalLM, config, dense, 1.0, seed)


def twin_of(dense: LlamaForCausalLM, seed: int) -> PreTrainedModel:
    """Return a Qwen 3 in float32 whose mixers begin at random."""
    own = dense.config
    config = Qwen3Config(
        **{name: getattr(own, name) for name in _KEPT}, rope_parameters=own.rope_parameters
    )
    return _begun(Qwen3ForCausalLM, config, dense, 0.0, seed)


def _begun(
    kind: Callable[..., PreTrainedModel],
    config: Qwen3Config | Qwen3_5TextConfig,
    dense: LlamaForCausalLM,
    norms_less: float,
    seed: int,
) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = kind(config).float()
    taken = {
        name: weight.float() - norms_less if name.endswith("norm.weight") else weight.float()
        for name, weight in dense.state_dict().items()
        if ".self_attn." not in name
    }
    _, unknown = model.load_state_dict(taken, strict=False)
    assert not unknown, f"a dense model has {unknown}"
    return model
