"""The names of transformers that have moved, or may move, between its minor versions.

Everything else that the program asks of transformers is public and older than the oldest version
that it admits. A rename is mended here, and nowhere else. `tests/contract` asks each name of the
version that is installed.
"""

from collections.abc import Iterable
from inspect import Signature, signature
from typing import Any

import transformers
from torch import nn
from transformers.masking_utils import create_causal_mask

TESTED = ("5.17", "5.24")  # the oldest and the newest minor version that the tests were run with
_CACHE_NAMES = ("cache", "past_key_values")  # newest first: `cache` from 5.24
# of recurrent layers and models, where they have a name of their own: until 5.23
STATE_CACHE = "cache_params"
# What a layer and an indexer are given, by these names in those families that select by an index:
# from 5.23.
HIDDEN = "hidden_states"
MASK = "attention_mask"
POSITIONS = "position_ids"
ROTARY_TABLES = "position_embeddings"
QUERY_INPUT = "q_resid"
EARLIER_INDICES = "prev_topk_indices"


def _cache_name() -> str:
    """Return the argument by which models, layers and masks are given their cache."""
    parameters = signature(create_causal_mask).parameters
    known = [name for name in _CACHE_NAMES if name in parameters]
    if not known:
        raise ImportError(f"create_causal_mask of transformers has none of {_CACHE_NAMES}")
    return known[0]


CACHE = _cache_name()
LAYER_CACHES = (STATE_CACHE, *_CACHE_NAMES)


def require_arguments(module: nn.Module, names: Iterable[str]) -> Signature:
    """Return what a module's forward pass is given. Raises `ValueError` where names are missing."""
    arguments = signature(module.forward)
    missing = [name for name in names if name not in arguments.parameters]
    if missing:
        name = f"{type(module).__name__} of transformers {transformers.__version__}"
        raise ValueError(f"{name} is given no {' and no '.join(missing)}")
    return arguments


def cache_in(arguments: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a layer's forward pass, None where it has none."""
    return next((arguments[name] for name in LAYER_CACHES if name in arguments), None)
