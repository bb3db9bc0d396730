"""Building the model without storage, and refusing what a token tree cannot be verified on.

A tree needs a decoder whose layers stand in `layers[i]`, see positions through rotary embeddings and keep nothing but
keys and values: a recurrent state cannot be rolled back to the accepted path.
"""

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offload import attention
from offload.checkpoint import Checkpoint
from offload.errors import UserError

_LOOK = "models of the Llama, Qwen, Mistral, Phi3, Gemma and Mixtral kind work"


def build_skeleton(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint's model class with its parameters on the meta device and its computed buffers real.

    Raises:
        UserError: unknown architecture, remote code, or a decoder that trees cannot be verified on.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)
        config = config.get_text_config(decoder=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise _unsupported(checkpoint, str(error).strip().splitlines()[0][:160]) from None
    _refuse_unrollable(checkpoint, config)
    skeleton = _instantiate(checkpoint, config, dtype)
    decoder = skeleton.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(decoder, "rotary_emb"):
        raise _unsupported(checkpoint, "its decoder has no layers[i] with rotary positions")
    return skeleton.eval().requires_grad_(False)


def attention_windows(config: Any, num_layers: int) -> list[int | None]:
    """How far back each layer sees; None is without limit."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _instantiate(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with init_empty_weights():
        try:
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unsupported(checkpoint, str(error).strip().splitlines()[0][:160]) from None
    skeleton.set_attn_implementation(attention.NAME if skeleton._supports_sdpa else "eager")
    return skeleton


def _refuse_unrollable(checkpoint: Checkpoint, config: Any) -> None:
    if config.is_encoder_decoder:
        raise _unsupported(checkpoint, "encoder-decoder models")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise _unsupported(
            checkpoint, f"layers of kind {', '.join(sorted(kinds))}, whose state cannot be rolled back to a tree's path"
        )


def _unsupported(checkpoint: Checkpoint, what: str) -> UserError:
    kind = checkpoint.config.get("model_type", "unknown")
    return UserError(f"{checkpoint.directory.name}: model type {kind} is not supported ({what}): {_LOOK}")
