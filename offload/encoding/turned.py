"""Plain numbers whose matrices are stored the other way round, such as some stacks of experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.encoding.base import ENCODINGS, Tensors, WordsAlone

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion


@dataclass(frozen=True, slots=True)
class Turned(WordsAlone):
    """Matrices of plain numbers whose rows are stored as columns.

    They are copied row by row when their module runs, as coded weights are expanded: a view would be
    multiplied with several times more slowly on a CPU.
    """

    kind: str  # the plain type, by the header's name
    is_transposed: bool = False  # in the model

    @property
    def name(self) -> str:
        return f"{self.kind}, columns before rows"

    @property
    def dtype(self) -> str:
        return ENCODINGS[self.kind].dtype

    @property
    def align_bytes(self) -> int:
        return ENCODINGS[self.kind].align_bytes

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the numbers."""
        return ENCODINGS[self.kind].stored_bytes(shape)

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        *stack, rows, columns = out.shape
        number = ENCODINGS[self.kind].decode(stored_B, (*stack, columns, rows))
        out.copy_(number.transpose(-1, -2))
