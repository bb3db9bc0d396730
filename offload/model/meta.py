"""Building the model without storage, and refusing what a token tree cannot be verified on.

A tree needs a decoder whose layers stand in `layers[i]`, see positions through rotary embeddings and keep nothing but
keys and values: a recurrent state cannot be rolled back to the accepted path.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offload.checkpoint.safetensors import NOT_TEXT_ALONE, TEXT_INSIDE, Checkpoint, unsupported
from offload.errors import UserError, reason
from offload.model import attention


def build_meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint's model class with its parameters on the meta device and its computed buffers real.

    Raises `UserError` for an unknown architecture, remote code, or a decoder that trees cannot be verified on.
    """
    with _refusing(checkpoint):
        whole = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)
        config = whole.get_text_config(decoder=True)
    if whole.is_encoder_decoder:
        raise _unsupported(checkpoint, "encoder-decoder models")
    if config is not whole:
        if whole.model_type not in TEXT_INSIDE:
            raise _unsupported(checkpoint, NOT_TEXT_ALONE)
        config.tie_word_embeddings = whole.tie_word_embeddings
    _refuse_unrollable(checkpoint, config)
    with _refusing(checkpoint):
        meta_model = _instantiate(config, dtype)
        decoder = meta_model.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(decoder, "rotary_emb"):
        raise _unsupported(checkpoint, "its decoder has no layers[i] with rotary positions")
    if any(".layers." in f".{name}" for pair in meta_model.all_tied_weights_keys.items() for name in pair):
        raise _unsupported(checkpoint, "layers that share weights")
    return meta_model.eval().requires_grad_(False)


def attention_windows(config: Any, num_layers: int) -> list[int | None]:
    """How far back each layer sees; None is without limit."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


@contextmanager
def _refusing(checkpoint: Checkpoint) -> Iterator[None]:
    """transformers says what it dislikes about a config with any exception that lies at hand."""
    try:
        yield
    except Exception as error:
        raise _unsupported(checkpoint, reason(error)) from None


_RANDOM_FILLS = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_")  # of torch and of transformers


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters begin as `torch.empty`, which must allocate nothing, and are not drawn at random, which takes long."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _RANDOM_FILLS:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                return tensor
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _instantiate(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with init_empty_weights(), _EmptyOnMeta():
        meta_model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _keep_in_float32(meta_model, meta_model._get_dtype_plan(dtype))
    # transformers up to 5.19 says that sdpa serves soft-capped families, where their scores would go uncapped.
    is_capped = bool(getattr(config, "attn_logit_softcapping", None))
    meta_model.set_attn_implementation("eager" if is_capped or not meta_model._supports_sdpa else attention.NAME)
    return meta_model


def _keep_in_float32(meta_model: PreTrainedModel, patterns: Iterable[str]) -> None:
    """What a family never lets be rounded (router biases): `from_pretrained` heeds it, `from_config` does not."""
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    for name, tensor in meta_model.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in kept):
            tensor.data = tensor.data.float()


def _refuse_unrollable(checkpoint: Checkpoint, config: Any) -> None:
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise _unsupported(checkpoint, "attention that looks ahead")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise _unsupported(
            checkpoint, f"layers of kind {', '.join(sorted(kinds))}, whose state cannot be rolled back to a tree's path"
        )


def _unsupported(checkpoint: Checkpoint, what: str) -> UserError:
    return unsupported(checkpoint.directory, checkpoint.config, what)
