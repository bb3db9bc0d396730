"""How a GGUF file stores weights: blocks with their own scales, or plain numbers, some changed.

llama.cpp's rotary embedding rotates adjacent pairs where Hugging Face's rotates halves, so files of
Llama models have the rows of query and key projections in another order: head by head, both halves
interleaved. Gemma's norms are stored with 1 added, which its model adds again. Rows are whole
blocks, so their order is undone before anything is expanded. Qwen3.5's recurrent layers store value
heads in turn for each key head, while the model keeps those of one key head together. Columns in
that order, and those of transposed matrices, would cut blocks, so they are put in order after
expansion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from offload.encoding.base import ENCODINGS, Tensors, WordsAlone

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

# numbers in a block, and bytes of a block
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}


_CHUNK_ROWS = 64  # elements of a matrix whose columns are put in order at once


class HeadPermutation(NamedTuple):
    """Rows, or columns, from `first` on: value heads of `num_groups` key heads in turn."""

    num_groups: int
    num_heads: int  # value heads of each group
    first: int = 0
    is_columns: bool = False

    def in_order(self, number: "Tensor", dim: int) -> "Tensor":
        """Return a copy along `dim` in which the heads of a group lie together."""
        import torch

        before, tiled = number.tensor_split([self.first], dim)
        heads = tiled.unflatten(dim, (self.num_heads, self.num_groups, -1))
        return torch.cat([before, heads.transpose(dim, dim + 1).flatten(dim, dim + 2)], dim)


@dataclass(frozen=True, slots=True)
class GgufBlocks(WordsAlone):
    """See `Coding`."""

    kind: str  # GGUF's name: one of `BLOCKS`, or plain numbers that the writer changed
    num_heads: int = 0  # heads whose rows are interleaved; 0 if rows lie in order
    added: int = 0  # the number that the writer added to each
    tiles: HeadPermutation | None = None
    is_exponential: bool = False  # whether -exp of each number is stored
    is_flipped: bool = False  # whether rows are stored as columns
    align_bytes: int = 4
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return self.kind

    @property
    def dtype(self) -> str:
        """The type of plain numbers is their own; blocks expand into bfloat16."""
        return ENCODINGS[self.kind].dtype if self.kind in ENCODINGS else "bfloat16"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of whole blocks."""
        if self.kind in ENCODINGS:
            return ENCODINGS[self.kind].stored_bytes(shape)
        num_numbers, num_bytes = BLOCKS[self.kind]
        return -(-math.prod(shape) // num_numbers) * num_bytes

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        if self.is_flipped:
            number = self._numbers(stored_B, out.new_empty(out.shape[::-1]), expansion)
            out.copy_(number.T)
            return
        if self.tiles is not None:
            self._expand_tiled(self.tiles, stored_B, out, expansion)
            return
        # rows of a matrix are whole blocks and can be reordered before expansion; numbers of a
        # vector cannot
        keeps_blocks = out.dim() > 1 or not self.num_heads
        if self.kind in BLOCKS and keeps_blocks and not self.added:
            stored_B = self._in_order(stored_B.view(len(out), -1)) if self.num_heads else stored_B
            self._expand_blocks(stored_B, out, expansion)
            return
        number = self._in_order(self._numbers(stored_B, out, expansion)).float()
        out.copy_((-number).log() if self.is_exponential else number - self.added)

    def _expand_tiled(
        self, tiles: HeadPermutation, stored_B: "Tensor", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """Fill `out` with value heads in the model's order: reordered whole, or after expansion."""
        if out.dim() == 1 or self.kind not in BLOCKS:
            number = self._numbers(stored_B, out, expansion).float()
            number = (-number).log() if self.is_exponential else number
            out.copy_(tiles.in_order(number, 1 if tiles.is_columns else 0))
        elif not tiles.is_columns:
            rows = tiles.in_order(stored_B.view(len(out), -1), 0)
            self._expand_blocks(rows, out, expansion)
        else:
            self._expand_blocks(stored_B, out, expansion)
            for lo in range(0, len(out), _CHUNK_ROWS):
                out[lo : lo + _CHUNK_ROWS] = tiles.in_order(out[lo : lo + _CHUNK_ROWS], 1)

    def _numbers(self, stored_B: "Tensor", like: "Tensor", expansion: "Expansion") -> "Tensor":
        """Return the numbers as stored, in a type that holds all of them exactly."""
        import torch

        if self.kind in ENCODINGS:
            return ENCODINGS[self.kind].decode(stored_B, like.shape)
        number = torch.empty_like(like, dtype=torch.float32)
        self._expand_blocks(stored_B, number, expansion)
        return number

    def _expand_blocks(self, stored: "Tensor", out: "Tensor", expansion: "Expansion") -> None:
        num_numbers, num_bytes = BLOCKS[self.kind]
        expansion.blocks(self.kind, stored.view(-1, num_bytes), out.view(-1, num_numbers))

    def _in_order(self, row_R: "Tensor") -> "Tensor":
        """Return the rows of heads in the model's order."""
        if not self.num_heads:
            return row_R
        return row_R.unflatten(0, (self.num_heads, -1, 2)).transpose(1, 2).reshape(row_R.shape)
