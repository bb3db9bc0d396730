"""What is asked of the ways in which a checkpoint stores a tensor.

Of an `Encoding` the numbers are a view of the stored bytes. Those of a `Coding` have to be expanded before they are
multiplied with: its words are streamed as they are stored, while the small tensors that belong to them, the companions
(scales, zero points, orders), are read once, checked, and stay. Headers, layouts, sizes and the planner know tensors by
these answers alone; a further way of storing weights is one more file here and one more entry of a registry.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # planning does without torch
    from torch import Tensor

    from offload.kernels.expansion import Expansion


class Encoding(Protocol):
    """One way in which a checkpoint stores a tensor of plain numbers."""

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


class Coding(Protocol):
    """One way in which a checkpoint stores weights that have to be expanded; values are hashable.

    Each weight is what a float32 product of the stored numbers gives, rounded once to the type that is asked for.
    """

    @property
    def name(self) -> str:
        """For users, such as `fp8 in blocks of 128 x 128`."""

    @property
    def dtype(self) -> str:
        """The type, by torch's name, that the format's own library expands into."""

    @property
    def is_transposed(self) -> bool:
        """Whether models have the last two dimensions of what `expand` fills the other way round."""

    @property
    def align_bytes(self) -> int:
        """Words must begin at multiples of this where they are expanded."""

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """What the words of a weight of this shape take in the file, and in a slab."""

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """What stays in memory beside them, as `prepare` gives it."""

    def prepare(self, companions: Mapping[str, "Tensor"], shape: Sequence[int]) -> Mapping[str, "Tensor"]:
        """Companions, by their suffixes in the file, in the form that `expand` wants, looked at once for all.

        Raises `ValueError` (rule, value, remedy) for numbers that are not finite, out of range, or of another shape.
        """

    def expand(
        self, stored_B: "Tensor", companions: Mapping[str, "Tensor"], out: "Tensor", expansion: "Expansion"
    ) -> None:
        """Fill `out`, contiguous, of the weight's shape, in a floating-point type, from words (uint8) on its device."""


class Header(Protocol):
    """What a header says of one tensor."""

    @property
    def dtype(self) -> str:
        """The format's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor."""


class Found(NamedTuple):
    """A weight whose tensors were recognised."""

    coding: Coding
    shape: tuple[int, ...]  # of the weight, (out, in) or a stack of these; where headers do not say, one number: N x K
    words: tuple[str, ...]  # suffixes of what is streamed; several must lie one behind the other in the file
    companions: tuple[str, ...]  # suffixes of what stays


class Format(NamedTuple):
    """A family of codings, known by names of tensors."""

    suffixes: tuple[str, ...]  # of its tensors behind the name of a weight without its `.weight`
    # Tensors of one weight by suffix, some of which may be those of other formats, and `quantization_config` -> what
    # they are; None where they are not of this format. Raises `ValueError` (rule, value, remedy) where they contradict
    # each other, or for a version of the format that is not known.
    recognise: Callable[[Mapping[str, Header], Mapping[str, Any]], Found | None]
    parameter: str = ".weight"  # what a model has behind that name
