"""What layers with a state keep beside keys and values.

Each mixer (`model/mixers/`) has a function of its sizes here; a `LayerSpec` keeps what it says.
Invariant: a size is never smaller than what the cache of a text, or a pass, will take of it.
"""

from typing import NamedTuple

# States, and what they are computed with, are float32.
FLOAT_BYTES = 4
# Copies of a row's heads while a prompt is read in chunks.
_COPIES = 12
# Rows of a chunk, and numbers of each row and head that are as many.
_CHUNK_ROWS = 64
_CHUNKS = 5


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
        return item_bytes * (self.num_taps - 1) * self.num_channels + FLOAT_BYTES * self.state


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


def mamba_layer(num_taps: int, width: int, num_states: int) -> RecurrentLayer:
    """Return the sizes of a Mamba, which has a decay for each channel and state."""
    kept = 3 * width + 2 * num_states
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
