"""The interface of the ways in which a checkpoint stores tensors, and checks that they share.

The numbers of an `Encoding` are a view of the stored bytes. The numbers of a `Coding` have to be
expanded before they are multiplied with: its words are streamed as they are stored, while the small
tensors that belong to them, the companions (scales, zero points, column orders), are read once,
checked, and stay. Headers, layouts, sizes and the planner know tensors by this interface alone; a
further way of storing weights is one more module here and one more entry in `tensors.FORMATS`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # planning does without torch
    from torch import Tensor

    from offload.kernels.expansion import Expansion


Tensors = Mapping[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """A way in which a checkpoint stores a tensor of plain numbers."""

    name: str  # in safetensors headers
    dtype: str  # the torch type, by name, of the numbers that `decode` returns
    align_bytes: int  # of one number; stored bytes must begin at multiples of this to be decoded

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that a tensor of this shape takes in the file and in a slab."""
        return math.prod(shape) * self.align_bytes

    def decode(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return the tensor whose stored bytes (uint8) these are: a view of the same memory."""
        import torch

        return stored_B.view(getattr(torch, self.dtype)).view(tuple(shape))


class Coding(Protocol):
    """A way in which a checkpoint stores weights that have to be expanded; values are hashable.

    An expanded weight is the float32 product of the stored numbers, rounded once to the type that
    is asked for.
    """

    @property
    def name(self) -> str:
        """The name that users see, such as `fp8 in blocks of 128 x 128`."""

    @property
    def dtype(self) -> str:
        """The torch type, by name, that the format's own library expands into."""

    @property
    def is_transposed(self) -> bool:
        """Whether models have the last two dimensions of what `expand` fills in the other order."""

    @property
    def align_bytes(self) -> int:
        """Words must begin at multiples of this to be expanded."""

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that the words of such a weight take in the file and in a slab."""

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the companions in memory, as `prepare` returns them."""

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Check companions, by their suffixes in the file, and return them as `expand` needs them.

        Raises `ValueError` (rule, value, remedy) for numbers that are not finite, out of range, or
        of another shape.
        """

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """Fill `out` from words (uint8) on its device.

        `out` is contiguous, of the weight's shape and of a floating-point type.
        """


@runtime_checkable
class Header(Protocol):
    """The header's entry for one tensor: type, by the format's name, and shape as stored."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Headers = Mapping[str, Header]
Settings = Mapping[str, Any]


class RecognisedWeight(NamedTuple):
    """A weight that was recognised by its tensors."""

    coding: Coding
    # the weight's, (out, in) or a stack of these; (out x in,) where headers do not tell
    shape: tuple[int, ...]
    words: tuple[str, ...]  # suffixes of tensors that are streamed, consecutive in the file
    companions: tuple[str, ...]  # suffixes of tensors that stay in memory
    # the type of words that a file keeps as numbers of another one, which they are not
    dtype: str = ""


class Site(NamedTuple):
    """Where a weight stands in its model, for what tensors leave open."""

    name: str = ""  # without `.weight`
    columns: int = 0  # that the model has there, by its sizes; 0 where these do not tell


NOWHERE = Site()


class Format(NamedTuple):
    """A family of codings, recognised by the names of tensors."""

    suffixes: tuple[str, ...]  # of its tensors, which follow the weight's name without `.weight`
    # Takes the tensors of one weight by suffix, some of which may be those of other formats,
    # `quantization_config` and the weight's site; returns None where they are not of this format.
    # Raises `ValueError` (rule, value, remedy) where they contradict each other, or for an unknown
    # version.
    recognise: Callable[[Headers, Settings, Site], RecognisedWeight | None]
    parameter: str = ".weight"  # the suffix in the model


class WordsAlone:
    """What codings without companions share."""

    __slots__ = ()

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return 0: there are no companions."""
        return 0

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Return nothing: there are no companions."""
        return {}


AGAIN = "download the checkpoint again"
# for files that may be sound, and are not read
ANOTHER = "take another checkpoint"
_PLAIN = (("BF16", "bfloat16", 2), ("F16", "float16", 2), ("F32", "float32", 4))
# the types of words and companions
_PARTS = (("F64", "float64", 8), ("I64", "int64", 8), ("I32", "int32", 4), ("I16", "int16", 2), ("I8", "int8", 1),
          ("U8", "uint8", 1), ("BOOL", "bool", 1), ("U64", "uint64", 8), ("U32", "uint32", 4), ("U16", "uint16", 2),
          ("F8_E4M3", "float8_e4m3fn", 1), ("F8_E5M2", "float8_e5m2", 1), ("F8_E8M0", "float8_e8m0fnu", 1))  # fmt: skip
# all types that are read, by the header's name
STORED = {row[0]: Encoding(*row) for row in (*_PLAIN, *_PARTS)}
# the types of weights that are computed with as they are, by the header's name
ENCODINGS = {name: STORED[name] for name, *_ in _PLAIN}
# the same types by torch's name
PLAIN_OF = {encoding.dtype: encoding for encoding in ENCODINGS.values()}


def must(holds: bool, rule: str, actual: object, remedy: str = AGAIN) -> None:
    """Raise `ValueError` (rule, value, remedy) where a rule does not hold."""
    if not holds:
        raise ValueError(f"{rule}, {actual}: {remedy}")


def require(stored: Headers, suffixes: Sequence[str], beside: str) -> None:
    """Raise `ValueError` where a tensor is missing."""
    for suffix in suffixes:
        must(suffix in stored, f"{beside} needs a {suffix} beside it", "there is none")


def require_shape(suffix: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise `ValueError` where a tensor has another shape than the words require."""
    is_wanted = tuple(shape) == tuple(wanted)
    must(is_wanted, f"{suffix} must have shape {list(wanted)}", f"has {list(shape)}")


def config_weights(settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Yield compressed-tensors' weight settings; tensors need not follow names in groups."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def checked_scale(suffix: str, scale: "Tensor", shape: Sequence[int]) -> "Tensor":
    """Return scales in that shape, contiguous. Raises `ValueError` where one is not finite."""
    count = scale.numel()
    wanted = math.prod(shape)
    must(count == wanted, f"{suffix} must have {wanted} numbers", f"has {count}")
    num_wrong = int((~scale.float().isfinite()).sum())
    must(not num_wrong, f"{suffix} must be finite", f"{num_wrong} of {count} are not")
    return scale.reshape(tuple(shape)).contiguous()
