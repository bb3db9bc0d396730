"""What layers with a state keep beside keys and values, by headers alone.

Each mixer (`model/mixers/`) has a function of its sizes here, which both ask: the mixer that was
built, and a plan that knows names and shapes of tensors. Invariant: a size is never smaller than
what the cache of a text, or a pass, will take of it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from offload.checkpoint.small_files import first_size
from offload.checkpoint.tensors import Entries, in_layers
from offload.encoding.base import Settings
from offload.families.types import GATED_STATES, LIGHTNING

_DECAY = re.compile(r"(.*\.)?(A_log|rg_lru\.recurrent_param)$")
_CONVOLUTION = re.compile(r"(.*\.)?((?:[qkv]_)?conv_?1d\.weight|conv\.conv\.weight)$")
_GATE = "self_attn.output_gate.weight"
# States, and what they are computed with, are float32.
_FLOAT_BYTES = 4
# Copies of a row's heads while a prompt is read in chunks.
_COPIES = 12
# Rows of a chunk, and numbers of each row and head that are as many.
_CHUNK_ROWS = 64
_CHUNKS = 5


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

    def state_bytes(self, item_bytes: int) -> int:
        """Return what a text keeps behind one of its positions, computed in so many bytes."""
        return item_bytes * (self.num_taps - 1) * self.num_channels + _FLOAT_BYTES * self.state


def delta_layer(
    num_taps: int,
    num_channels: int,
    num_heads: int,
    key_size: int,
    value_size: int,
    *,
    is_by_channel: bool,
) -> RecurrentLayer:
    """Return the sizes of a gated delta rule, whose decays may be one for each channel of keys."""
    row = 4 * num_channels + _COPIES * num_heads * max(key_size, value_size)
    return RecurrentLayer(
        num_taps,
        num_channels,
        state=num_heads * key_size * value_size,
        kept=2 * num_channels + num_heads,
        kept_floats=num_heads * key_size if is_by_channel else num_heads,
        row_floats=row + _CHUNKS * _CHUNK_ROWS * num_heads,
    )


def mamba2_layer(
    num_taps: int, num_channels: int, width: int, num_heads: int, num_states: int
) -> RecurrentLayer:
    """Return the sizes of a Mamba 2; `width` is that of all heads together."""
    row = 4 * num_channels + 6 * width + 4 * num_heads * num_states
    return RecurrentLayer(
        num_taps,
        num_channels,
        state=width * num_states,
        kept=2 * num_channels + num_heads,
        row_floats=row + _CHUNKS * _CHUNK_ROWS * num_heads,
    )


def mamba_layer(num_taps: int, width: int, num_states: int, num_heads: int = 1) -> RecurrentLayer:
    """Return the sizes of a Mamba, which has a decay for each channel and state."""
    kept = 3 * width + 2 * num_heads * num_states
    return RecurrentLayer(num_taps, width, width * num_states, kept, 0, 12 * width)


def lightning_layer(width: int, num_heads: int) -> RecurrentLayer:
    """Return the sizes of MiniMax's linear attention; `width` is that of all heads together."""
    state = width * width // max(1, num_heads)
    return RecurrentLayer(1, 0, state, 3 * width, 0, 8 * width + _CHUNK_ROWS * width)


def rg_lru_layer(num_taps: int, num_channels: int) -> RecurrentLayer:
    """Return the sizes of RecurrentGemma's recurrent block."""
    kept = 3 * num_channels
    return RecurrentLayer(num_taps, num_channels, num_channels, kept, 0, 12 * num_channels)


def short_conv_layer(num_taps: int, num_channels: int) -> RecurrentLayer:
    """Return the sizes of a convolution by itself."""
    return RecurrentLayer(num_taps, num_channels, kept=num_channels, row_floats=4 * num_channels)


def recurrent_shape(
    config: Settings, tensors: Entries, num_layers: int, item_bytes: int
) -> RecurrentShape:
    """Return the sizes of a model that computes in so many bytes; zeros for most."""
    layers = recurrent_layers(config, tensors, num_layers).values()
    return RecurrentShape(
        state_bytes=sum(layer.state_bytes(item_bytes) for layer in layers),
        kept_bytes=sum(
            item_bytes * layer.kept + _FLOAT_BYTES * layer.kept_floats for layer in layers
        ),
        largest_bytes=max((_FLOAT_BYTES * layer.state for layer in layers), default=0),
        row_bytes=max((_FLOAT_BYTES * layer.row_floats for layer in layers), default=0),
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
    layers = {
        layer: _layer(config, convolutions[layer], decays.get(layer))
        for layer in sorted({*convolutions, *decays})
    }
    # linear attention, whose heads are as wide together as its gate
    is_linear = config.get("model_type") in LIGHTNING
    for layer, name, entry in in_layers(tensors, num_layers if is_linear else 0):
        if name == _GATE:
            layers[layer] = lightning_layer(
                entry.shape[0], first_size(config, "num_attention_heads")
            )
    return layers


def _layer(
    config: Settings,
    convolutions: Sequence[tuple[int, ...]],
    decays: tuple[int, ...] | None,
) -> RecurrentLayer:
    """Return a layer by what its tensors are called; without decays it keeps its last inputs alone."""
    channels = sum(shape[0] for shape in convolutions)
    taps = max((shape[2] for shape in convolutions), default=1)
    if decays is None:
        return short_conv_layer(taps, channels)
    if config.get("model_type") in GATED_STATES:
        return rg_lru_layer(taps, channels)
    if len(decays) == 2:  # a decay for each channel and state
        return mamba_layer(taps, *decays)
    if len(decays) == 3:  # Zamba's, of a few heads
        num_heads, head_size, num_states = decays
        return mamba_layer(taps, num_heads * head_size, num_states, num_heads)
    if first_size(config, "linear_key_head_dim", "linear_head_dim"):
        key_size, value_size, num_heads = (
            first_size(config, f"linear_{name}", f"linear_{usual}")
            for name, usual in (
                ("key_head_dim", "head_dim"),
                ("value_head_dim", "head_dim"),
                ("num_value_heads", "num_heads"),
            )
        )
        is_by_channel = bool(first_size(config, "linear_head_dim"))
        return delta_layer(
            taps, channels, num_heads, key_size, value_size, is_by_channel=is_by_channel
        )
    num_states = first_size(config, "mamba_d_state", "ssm_state_size", "state_size")
    num_groups = first_size(config, "mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    width = max(0, channels - 2 * num_groups * num_states)
    return mamba2_layer(taps, channels, width, math.prod(decays), num_states)
