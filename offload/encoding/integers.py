"""What the formats of packed integers have in common: scales, zero points and an order beside words of 4 or 8 bits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.encoding.companions import checked_scale, require_shape, unpacked
from offload.encoding.registry import ENCODINGS

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion


@dataclass(frozen=True)
class Integers:
    """The part of a `Coding` that does not depend on how words are laid out.

    Companions are "scale" (N, G) as stored, "zero" (N, G) and "order" (K,), int32, which scale each column has.
    """

    bits: int
    group: int  # columns that share a scale; 0: all
    scale: str  # the type of scales, as headers have it
    zero_bytes: int = 0  # of a zero point; 0: there is none
    is_ordered: bool = False  # columns belong to groups by a list
    align_bytes: int = 4
    is_transposed: bool = False

    @property
    def name(self) -> str:
        groups = f"groups of {self.group}" if self.group else "whole rows"
        return f"int{self.bits} in {groups}{', reordered' if self.is_ordered else ''}"

    @property
    def dtype(self) -> str:
        return ENCODINGS[self.scale].dtype

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Rows, or columns, of whole words."""
        return shape[0] * 4 * math.ceil(shape[1] * self.bits / 32)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Of a stack there is none: experts are stored one by one."""
        each = ENCODINGS[self.scale].align_bytes + self.zero_bytes
        return math.prod(self.grid(shape)) * each + (4 * shape[1] if self.is_ordered else 0)

    def expand(
        self, stored_B: "Tensor", companions: "Mapping[str, Tensor]", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        group = companions["order"] if self.is_ordered else self.group or out.shape[1]
        words_NW = self.words(stored_B, out.shape)
        expansion.integers(words_NW, self.bits, companions["scale"], companions.get("zero"), group, out)

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """A view of the words, row by row."""
        import torch

        return stored_B.view(torch.int32).view(shape[0], -1)

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many scales there are: for each row, and of each row."""
        return shape[0], math.ceil(shape[1] / self.group) if self.group else 1

    def turned(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "tuple[Tensor, Tensor]":
        """Scales and packed zero points (uint8) of columns, (N, G) each, as AWQ and GPTQ store them the other way."""
        num_rows, num_groups = self.grid(shape)
        scale = checked_scale(".scales", companions[".scales"], (num_groups, num_rows))
        zero = unpacked(companions[".qzeros"], self.bits, 1, num_rows)
        require_shape(".qzeros unpacked", zero.shape, (num_groups, num_rows))
        return scale.t().contiguous(), zero.t()
