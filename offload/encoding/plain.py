"""Numbers as they are computed with: decoding is a view."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plain:
    """A type of floating-point numbers; see `Encoding`."""

    name: str
    dtype: str
    align_bytes: int  # of one number

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """One number after the other."""
        return math.prod(shape) * self.align_bytes

    def decode(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """A view of the same memory."""
        import torch

        return stored_B.view(getattr(torch, self.dtype)).view(tuple(shape))
