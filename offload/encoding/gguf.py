"""How a GGUF file stores weights: blocks with their own scales, or plain numbers, some changed.

llama.cpp's rotary embedding rotates adjacent pairs where Hugging Face's rotates halves, so files of
Llama models have the rows of query and key projections in another order: head by head, both halves
interleaved. Gemma's norms are stored with 1 added, which its model adds again. Rows are whole
blocks, so their order is undone before anything is expanded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.encoding.base import ENCODINGS

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

# numbers in a block, and its bytes
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """See `Coding`. There are no companions."""

    kind: str  # GGUF's name: one of `BLOCKS`, or plain numbers that the writer has changed
    num_heads: int = 0  # heads whose rows are interleaved; 0 where rows lie in order
    added: int = 0  # what the writer added to each number
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

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return 0: there are no companions."""
        return 0

    def prepare(
        self, companions: "Mapping[str, Tensor]", shape: Sequence[int]
    ) -> "Mapping[str, Tensor]":
        """Return nothing: there are no companions."""
        return {}

    def expand(
        self,
        stored_B: "Tensor",
        companions: "Mapping[str, Tensor]",
        out: "Tensor",
        expansion: "Expansion",
    ) -> None:
        """See `Coding`."""
        # Reordering moves the rows of a matrix, but single numbers of a vector, which cut blocks.
        moves_blocks = out.dim() > 1 or not self.num_heads
        if self.kind in BLOCKS and moves_blocks and not self.added:
            stored_B = self._in_order(stored_B.view(len(out), -1)) if self.num_heads else stored_B
            self._expand_blocks(stored_B, out, expansion)
            return
        number = self._numbers(stored_B, out, expansion)
        out.copy_(self._in_order(number).float() - self.added)

    def _numbers(self, stored_B: "Tensor", like: "Tensor", expansion: "Expansion") -> "Tensor":
        """Return the numbers as stored, in a type that rounds none of them."""
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
