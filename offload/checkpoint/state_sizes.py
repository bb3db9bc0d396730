"""What layers keep of a text beside keys and values: states, and index keys, by headers alone.

Recurrent and convolutional layers keep a state; layers that choose what they attend to keep index
keys, and their keys and values stay compressed, as transformers has kept them since it has such
layers. Invariant: a size is never smaller than what the cache of a text, or a pass, will take of
it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offload.checkpoint.tensors import Entries, first_size, in_layers
from offload.encoding.base import Settings

_DECAY = re.compile(r"(.*\.)?(A_log|rg_lru\.recurrent_param)$")
_CONVOLUTION = re.compile(r"(.*\.)?((?:[qkv]_)?conv_?1d\.weight|conv\.conv\.weight)$")
_GATE = "self_attn.output_gate.weight"
# States, and what they are computed with, are float32.
_FLOAT_BYTES = 4
# Copies of a row's heads that `torch_chunk_gated_delta_rule` holds while it reads a prompt.
_COPIES = 12
# Rows of its chunks.
_CHUNK_ROWS = 64
# Chunk-wide numbers of a row and head that it holds, or a scan of Mamba2.
_CHUNKS = 5
_INDEX = re.compile(r"(?:self_attn|attention)\.indexer\.(\w+)(?:\.weight)?$")
_LATENT = re.compile(r"(?:self_attn|attention)\.w?kv_a_(?:proj_)?with_mqa\.weight$")


class RecurrentShape(NamedTuple):
    """The sizes of states, of all layers where nothing else is said."""

    state_bytes: int = 0  # of one text behind one of its positions
    kept_bytes: int = 0  # of one row of a tree, so that its path can be run again
    largest_bytes: int = 0  # of one layer's state
    row_bytes: int = 0  # of a row that passes through a layer


NO_STATES = RecurrentShape()


class RecurrentLayer(NamedTuple):
    """Counts of numbers of one layer."""

    num_taps: int  # of its convolution, whose last inputs but one are kept; 1 without any
    num_channels: int
    state: int = 0
    kept: int = 0  # of a row, as they come
    kept_floats: int = 0
    row_floats: int = 0


def recurrent_shape(
    config: Settings, tensors: Entries, num_layers: int, item_bytes: int
) -> RecurrentShape:
    """Return the sizes of a model that computes in so many bytes; zeros for most."""
    layers = recurrent_layers(config, tensors, num_layers).values()
    tails = (item_bytes * (one.num_taps - 1) * one.num_channels for one in layers)
    return RecurrentShape(
        state_bytes=sum(tails) + sum(_FLOAT_BYTES * one.state for one in layers),
        kept_bytes=sum(item_bytes * one.kept + _FLOAT_BYTES * one.kept_floats for one in layers),
        largest_bytes=max((_FLOAT_BYTES * one.state for one in layers), default=0),
        row_bytes=max((_FLOAT_BYTES * one.row_floats for one in layers), default=0),
    )


def recurrent_layers(
    config: Settings, tensors: Entries, num_layers: int
) -> dict[int, RecurrentLayer]:
    """Return the layers that keep anything beside keys and values."""
    convolutions = defaultdict[int, list[tuple[int, ...]]](list)
    decays = dict[int, tuple[int, ...]]()
    for layer, name, entry in in_layers(tensors, num_layers):
        if _DECAY.match(name):
            decays[layer] = entry.shape
        elif len(entry.shape) == 3 and _CONVOLUTION.match(name):
            convolutions[layer].append(entry.shape)
    layers = sorted({*convolutions, *decays})
    found = {layer: _layer(config, convolutions[layer], decays.get(layer)) for layer in layers}
    # linear attention, whose heads are as wide together as its gate
    is_linear = config.get("model_type") == "minimax"
    for layer, name, entry in in_layers(tensors, num_layers if is_linear else 0):
        if name == _GATE:
            width = entry.shape[0]
            num_heads = first_size(config, "num_attention_heads")
            state = width * (first_size(config, "head_dim") or width // max(1, num_heads))
            row_floats = 8 * width + _CHUNK_ROWS * width
            found[layer] = RecurrentLayer(1, 0, state, 2 * width, 0, row_floats)
    return found


def _layer(
    config: Settings,
    convolutions: Sequence[tuple[int, ...]],
    decays: tuple[int, ...] | None,
) -> RecurrentLayer:
    """Return a layer by what its tensors are called; without decays it keeps its last inputs alone."""
    channels = sum(shape[0] for shape in convolutions)
    taps = max((shape[2] for shape in convolutions), default=1)
    if decays is None:
        return RecurrentLayer(taps, channels, kept=channels, row_floats=4 * channels)
    if config.get("model_type") == "recurrent_gemma":
        return RecurrentLayer(taps, channels, channels, 3 * channels, 0, 12 * channels)
    if len(decays) == 2:  # Mamba has a decay for each channel and state
        width, num_states = decays
        state = width * num_states
        kept = width + num_states
        kept_floats = width
        row_floats = 8 * width
    elif first_size(config, "linear_key_head_dim", "linear_head_dim"):
        state, kept, kept_floats, row_floats = _delta(config)
    else:
        state, kept, kept_floats, row_floats = _mamba2(config, channels, math.prod(decays))
    return RecurrentLayer(
        taps, channels, state, channels + kept, kept_floats, 4 * channels + row_floats
    )


def _delta(config: Settings) -> tuple[int, int, int, int]:
    key_width, value_width = (
        first_size(config, name, "linear_head_dim")
        for name in ("linear_key_head_dim", "linear_value_head_dim")
    )
    num_heads = first_size(config, "linear_num_value_heads", "linear_num_heads")
    heads = num_heads * (key_width + value_width)
    row = _COPIES * num_heads * max(key_width, value_width) + _CHUNKS * _CHUNK_ROWS * num_heads
    decays = num_heads * key_width if first_size(config, "linear_head_dim") else num_heads
    return num_heads * key_width * value_width, heads + num_heads, decays, row


def _mamba2(config: Settings, channels: int, num_heads: int) -> tuple[int, int, int, int]:
    num_states = first_size(config, "mamba_d_state", "ssm_state_size", "state_size")
    num_groups = first_size(config, "mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    groups_width = num_groups * num_states
    width = max(0, channels - 2 * groups_width)
    chunk = first_size(config, "mamba_chunk_size", "chunk_size") or 256
    row = 6 * width + 4 * num_heads * num_states + _CHUNKS * chunk * num_heads
    return width * num_states, width + num_heads + groups_width, num_heads, row


class IndexShape(NamedTuple):
    """Counts of numbers, of all layers where nothing else is said."""

    index_width: int = 0  # of index keys of one position
    latent_width: int = 0  # of compressed keys and values of one position
    expanded_width: int = 0  # of one layer's while it runs, of each position that it may see


def index_shape(config: Settings, tensors: Entries, sizes: Mapping[str, int]) -> IndexShape:
    """Return the sizes of a model; zeros for one without such layers."""
    num_layers = sizes["num_hidden_layers"]
    index = index_layers(config, tensors, num_layers)
    if not index:
        return IndexShape()
    latents = {
        layer: entry.shape[0]
        for layer, name, entry in in_layers(tensors, num_layers)
        if _LATENT.match(name)
    }
    # of a head: keys and values as a projection gives them, once more apart, and keys with what turns
    keys_width = 3 * sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0)
    values_width = 2 * sizes.get("v_head_dim", 0)
    expanded = sizes.get("num_attention_heads", 1) * (keys_width + values_width)
    return IndexShape(sum(index.values()), sum(latents.values()), expanded if latents else 0)


def index_layers(config: Settings, tensors: Entries, num_layers: int) -> dict[int, int]:
    """Return the width of a position's index key, by layer."""
    found = dict[int, int]()
    for layer, name, entry in in_layers(tensors, num_layers):
        match = _INDEX.match(name)
        what = match[1] if match else ""
        if what == "wk":
            found[layer] = max(found.get(layer, 0), entry.shape[0])
        elif what == "index_kpool_compress_gate":  # beside each key its gate, and whether it is
            found[layer] = 2 * entry.shape[0] + 1
        elif what == "index_qk_proj":
            found[layer] = first_size(config, "indexer_head_dim") or entry.shape[0]
    return found
