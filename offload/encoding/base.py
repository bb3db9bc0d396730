"""What is asked of an encoding: what a tensor takes where it is stored, and the tensor itself.

Headers, layouts, sizes and the planner know tensors by these answers alone; a further way of storing weights is one
more file here and one more entry of the registry.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # planning does without torch
    from torch import Tensor


class Encoding(Protocol):
    """One way in which a checkpoint stores a tensor."""

    @property
    def name(self) -> str:
        """As safetensors headers have it."""

    @property
    def dtype(self) -> str:
        """The type, by torch's name, of the numbers that `decode` gives."""

    @property
    def align_bytes(self) -> int:
        """Stored bytes must begin at multiples of this where they are decoded."""

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """What a tensor of this shape takes in the file, and in a slab."""

    def decode(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """The tensor whose stored bytes, uint8, these are, on their device."""
