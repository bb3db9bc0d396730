"""Every name of transformers that the models use and that may move between minor versions.

A rename is corrected here, and nowhere else. A missing name is reported as such: it never makes a
family unsupported or a number wrong. `tests/contract` checks each of these names in the installed
version, and says from which version on it holds.
"""

import sys
import traceback
from collections.abc import Callable, Iterable
from inspect import Signature, signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from offload.errors import UserError, reason

TESTED = ("5.17", "5.24")  # the oldest and the newest minor version that was tested
_PACKAGE = str(Path(__file__).resolve().parents[1])
# errors that a use of a renamed thing ends in
_RENAMED = (TypeError, AttributeError, KeyError, ImportError, StopIteration, NotImplementedError)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def library_error(missing: str) -> UserError:
    """Return the error for a transformers that lacks a name which the program needs."""
    oldest, newest = TESTED
    major, minor = _minor(newest)
    return UserError(
        f"transformers {transformers.__version__} has no {missing}, which transformers {oldest} to "
        f"{newest} have: pip install 'transformers>={oldest},<{major}.{minor + 1}'"
    )


def version_notes() -> list[str]:
    """Return a note for the user if transformers is newer than the tested versions."""
    newest = TESTED[1]
    installed = transformers.__version__
    if _minor(installed) <= _minor(newest):
        return []
    return [f"transformers {installed} is newer than {newest}, up to which this was tested"]


def version_error(error: Exception) -> UserError | None:
    """Return the user's error if a newer transformers caused this one; None for any other.

    Such errors come from the program's own frames, and are of the kinds that a rename causes.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_own = bool(frames) and frames[-1].filename.startswith(_PACKAGE)
    notes = version_notes()
    if not notes or not (is_own or isinstance(error, _RENAMED)):
        return None
    major, minor = _minor(TESTED[1])
    remedy = f"pip install 'transformers<{major}.{minor + 1}'"
    return UserError(f"{notes[0]}, and fails ({type(error).__name__}: {reason(error)}): {remedy}")


if sys.flags.optimize > 1:
    raise UserError(
        "Python keeps no docstrings under -OO, out of which transformers makes parts of models: "
        "leave -OO out, or unset PYTHONOPTIMIZE"
    )
try:
    # The parts of models, and the tables by which files become parameters.
    from transformers import (  # noqa: F401  (handed on from here)
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_MAPPING,
        AttentionInterface,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
        PreTrainedModel,
    )
    from transformers.activations import ACT2FN  # noqa: F401
    from transformers.cache_utils import (  # noqa: F401
        Cache,
        DynamicCache,
        DynamicLayer,
        EncoderDecoderCache,
    )
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES  # noqa: F401
    from transformers.conversion_mapping import (  # noqa: F401
        get_checkpoint_conversion_mapping,
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import (  # noqa: F401
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        WeightTransform,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: F401
except ImportError as missing_name:
    raise library_error(str(missing_name.msg).removeprefix("cannot import name ")) from None

# by owner: methods of a cache that layers call
_METHODS = (
    (Cache, ("update", "get_seq_length")),
    (DynamicLayer, ("update", "get_seq_length")),
)
# methods by which models are built and inspected, apart from their forward pass
_MODEL_METHODS = (
    "get_decoder",
    "get_encoder",
    "get_output_embeddings",
    "set_attn_implementation",
    "set_experts_implementation",
    "initialize_weights",
    "base_model_prefix",
    "_get_dtype_plan",
    "_from_config",
    "_supports_sdpa",
)
_CACHE_NAMES = ("cache", "past_key_values")  # newest first: `cache` from 5.24
# for recurrent layers and models with a name of their own: until 5.23
STATE_CACHE = "cache_params"
# Arguments of a layer and an indexer in families that select by an index: from 5.23.
HIDDEN = "hidden_states"
MASK = "attention_mask"
POSITIONS = "position_ids"
ROTARY_TABLES = "position_embeddings"
QUERY_INPUT = "q_resid"
EARLIER_INDICES = "prev_topk_indices"
# arguments by which decoders get the rows of a pass; some would swallow unknown ones
_ROWS = ("input_ids", "position_ids")


def _cache_name() -> str:
    """Return the argument by which models, layers and masks get their cache."""
    parameters = signature(create_causal_mask).parameters
    known = [name for name in _CACHE_NAMES if name in parameters]
    if not known:
        raise library_error(f"argument {' or '.join(_CACHE_NAMES)} of create_causal_mask")
    return known[0]


for owner, names in (*_METHODS, (PreTrainedModel, _MODEL_METHODS)):
    for name in names:
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", ()):
            raise library_error(f"{owner.__name__}.{name}")

CACHE = _cache_name()
LAYER_CACHES = (STATE_CACHE, *_CACHE_NAMES)


def require_arguments(module: nn.Module, names: Iterable[str]) -> Signature:
    """Return the arguments of a module's forward pass. Raises `UserError` if one is missing."""
    arguments = signature(module.forward)
    missing = [name for name in names if name not in arguments.parameters]
    if missing:
        raise _argument_error(" and ".join(missing), module)
    return arguments


def _argument_error(names: str, module: nn.Module) -> UserError:
    return library_error(f"argument {names} of {type(module).__name__}.forward")


def require_rows(decoder: Any) -> None:
    """Raise `UserError` for a decoder without arguments of these names for positions and cache."""
    known = signature(type(decoder).forward).parameters
    rows = _ROWS if hasattr(decoder, "rotary_emb") else _ROWS[:1]
    for name in rows:
        if name not in known:
            raise _argument_error(name, decoder)
    if not known.keys() & {*LAYER_CACHES}:
        raise _argument_error(" or ".join(_CACHE_NAMES), decoder)


def cache_in(arguments: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a layer's forward pass, None if it has none."""
    return next((arguments[name] for name in LAYER_CACHES if name in arguments), None)


EXPERTS = "offload_rows"  # our name for the function that multiplies experts; from 5.17


def register_experts(multiply: Callable[..., Tensor]) -> None:
    """Let models that ask for `EXPERTS` multiply their experts by this function.

    It gets the experts' module, rows, and each row's choice and shares.
    """
    ExpertsInterface.register(EXPERTS, multiply)


def build_without_storage(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a model without storage for its parameters; buffers computed from its config are real.

    As the library does before it reads weights: from 5.17 each family's `_init_weights` fills the
    buffers that are not saved.
    """
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers[key]
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    return model
