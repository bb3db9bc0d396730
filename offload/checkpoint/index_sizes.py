"""What layers keep that choose what they attend to by an index, from tensor headers alone.

Their keys and values stay compressed, as transformers has kept them since it has such layers.
Invariant: a size is never smaller than what the cache of a text takes of it.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from offload.checkpoint.tensors import TensorEntry

_LAYER = r"^(?:.*?\.)?layers\.(\d{1,9})\.(?:self_attn|attention)\."
_INDEX = re.compile(_LAYER + r"indexer\.(\w+)(?:\.weight)?$")
_LATENT = re.compile(_LAYER + r"w?kv_a_(?:proj_)?with_mqa\.weight$")


class IndexShape(NamedTuple):
    """Counts of numbers, of all layers where nothing else is said."""

    index_width: int = 0  # of index keys of one position
    latent_width: int = 0  # of compressed keys and values of one position
    expanded_width: int = 0  # of one layer's while it runs, of each position that it may see


def index_shape(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], sizes: Mapping[str, int]
) -> IndexShape:
    """Return the sizes of a model; zeros for one without such layers."""
    num_layers = sizes["num_hidden_layers"]
    index = index_layers(config, tensors, num_layers)
    if not index:
        return IndexShape()
    latents = latent_layers(tensors, num_layers)
    # of a head: keys and values as a projection gives them, once more apart, and keys with what turns
    keys_width = 3 * sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0)
    values_width = 2 * sizes.get("v_head_dim", 0)
    expanded = sizes.get("num_attention_heads", 1) * (keys_width + values_width)
    return IndexShape(sum(index.values()), sum(latents.values()), expanded if latents else 0)


def index_layers(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], num_layers: int
) -> dict[int, int]:
    """Return the width of a position's index key, by layer."""
    found = dict[int, int]()
    for name, entry in tensors.items():
        match = _INDEX.match(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        layer = int(match[1])
        if match[2] == "wk":
            found[layer] = max(found.get(layer, 0), entry.shape[0])
        elif match[2] == "index_kpool_compress_gate":  # beside each key its gate, and whether it is
            found[layer] = 2 * entry.shape[0] + 1
        elif match[2] == "index_qk_proj":
            width = config.get("indexer_head_dim")
            found[layer] = width if type(width) is int and width > 0 else entry.shape[0]
    return found


def latent_layers(tensors: Mapping[str, TensorEntry], num_layers: int) -> dict[int, int]:
    """Return the width of a position's compressed keys and values, by layer."""
    matches = ((_LATENT.match(name), entry) for name, entry in tensors.items())
    return {
        int(match[1]): entry.shape[0]
        for match, entry in matches
        if match is not None and int(match[1]) < num_layers
    }
