"""The interface of storage formats of tensors, and checks that they share.

The numbers of a `StorageType` are a view of the stored bytes. The numbers of a `Coding` have to be
expanded before a product. Its words are streamed as stored. The small tensors that belong to them,
the companions (scales, zero points, column orders), are read once, checked, and stay in memory.
Headers, layouts, sizes and the planner know tensors by this interface alone; another format is one
more module here and one more entry in `tensors.FORMATS`.
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
class StorageType:
    """A storage format of plain numbers."""

    name: str  # name in safetensors headers
    dtype: str  # name of the torch type of the numbers that `decode` returns
    # bytes of a number; stored bytes must begin at a multiple of this to be decoded
    align_bytes: int

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that a tensor of this shape takes in the file and in a slab."""
        return math.prod(shape) * self.align_bytes

    def decode(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return the tensor whose stored bytes (uint8) these are: a view of the same memory."""
        import torch

        return stored_B.view(getattr(torch, self.dtype)).view(tuple(shape))


class Coding(Protocol):
    """A storage format of weights that have to be expanded; values are hashable.

    An expanded weight is the float32 product of the stored numbers, rounded once to the requested
    type.
    """

    @property
    def name(self) -> str:
        """The name that users see, such as `fp8 in blocks of 128 x 128`."""

    @property
    def dtype(self) -> str:
        """The torch type, by name, that the format's own library expands into."""

    @property
    def is_transposed(self) -> bool:
        """True if models have the last two dimensions of `expand`'s output swapped."""

    @property
    def align_bytes(self) -> int:
        """Words must begin at a multiple of this to be expanded."""

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that the words of such a weight take in the file and in a slab."""

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the companions in memory, as `prepare` returns them."""

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Check companions, by their suffixes in the file, and return them as `expand` needs them.

        Raises `ValueError` (requirement, value, remedy) for numbers that are not finite, out of range, or
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
    """The header of one tensor: its type, by the format's name, and its shape as stored."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Headers = Mapping[str, Header]
Settings = Mapping[str, Any]


class RecognisedWeight(NamedTuple):
    """A weight recognised by its tensors."""

    coding: Coding
    # the weight's shape, (out, in) or a stack of these; (out x in,) if headers do not tell
    shape: tuple[int, ...]
    words: tuple[str, ...]  # suffixes of streamed tensors, adjacent in the file
    companions: tuple[str, ...]  # suffixes of tensors that stay in memory
    # the type of words that a file keeps as numbers of another one, which they are not
    dtype: str = ""


class Site(NamedTuple):
    """The place of a weight in its model, for what its tensors leave open."""

    name: str = ""  # name without `.weight`
    columns: int = 0  # columns that the model has there; 0 if its sizes do not tell


NOWHERE = Site()


class Format(NamedTuple):
    """A family of codings, recognised by the names of tensors."""

    suffixes: tuple[str, ...]  # suffixes of its tensors, after the weight's name without `.weight`
    # Takes the tensors of one weight by suffix (some may belong to other formats), the
    # `quantization_config` and the weight's site; returns None if they are not of this format.
    # Raises `ValueError` (requirement, value, remedy) for tensors that contradict each other, or an
    # unknown version.
    recognise: Callable[[Headers, Settings, Site], RecognisedWeight | None]
    parameter: str = ".weight"  # the suffix in the model


class WordsAlone:
    """Methods of codings without companions."""

    __slots__ = ()

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return 0: there are no companions."""
        return 0

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Return nothing: there are no companions."""
        return {}


AGAIN = "download the checkpoint again"
# for files that may be intact, but cannot be read
ANOTHER = "take another checkpoint"
_PLAIN = (("BF16", "bfloat16", 2), ("F16", "float16", 2), ("F32", "float32", 4))
# the types of words and companions
_PARTS = (("F64", "float64", 8), ("I64", "int64", 8), ("I32", "int32", 4), ("I16", "int16", 2), ("I8", "int8", 1),
          ("U8", "uint8", 1), ("BOOL", "bool", 1), ("U64", "uint64", 8), ("U32", "uint32", 4), ("U16", "uint16", 2),
          ("F8_E4M3", "float8_e4m3fn", 1), ("F8_E5M2", "float8_e5m2", 1), ("F8_E8M0", "float8_e8m0fnu", 1))  # fmt: skip
# all types that can be read, by the header's name
STORED = {row[0]: StorageType(*row) for row in (*_PLAIN, *_PARTS)}
# types of weights that are computed with as stored, by the header's name
ENCODINGS = {name: STORED[name] for name, *_ in _PLAIN}
# the same types by torch's name
PLAIN_OF = {encoding.dtype: encoding for encoding in ENCODINGS.values()}


def must(holds: bool, requirement: str, actual: object, remedy: str = AGAIN) -> None:
    """Raise `ValueError` unless a requirement holds."""
    if not holds:
        raise ValueError(f"{requirement}, {actual}: {remedy}")


def require(stored: Headers, suffixes: Sequence[str], beside: str) -> None:
    """Raise `ValueError` if a tensor is missing."""
    for suffix in suffixes:
        must(suffix in stored, f"{beside} needs a {suffix} beside it", "there is none")


def require_shape(suffix: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise `ValueError` if a tensor's shape is not the one that the words require."""
    is_wanted = tuple(shape) == tuple(wanted)
    must(is_wanted, f"{suffix} must have shape {list(wanted)}", f"has {list(shape)}")


def config_weights(settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Yield compressed-tensors' weight settings; tensor names need not follow the names of groups."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def checked_scale(suffix: str, scale: "Tensor", shape: Sequence[int]) -> "Tensor":
    """Return scales of that shape, contiguous. Raises `ValueError` if one is not finite."""
    count = scale.numel()
    wanted = math.prod(shape)
    must(count == wanted, f"{suffix} must have {wanted} numbers", f"has {count}")
    num_wrong = int((~scale.float().isfinite()).sum())
    must(not num_wrong, f"{suffix} must be finite", f"{num_wrong} of {count} are not")
    return scale.reshape(tuple(shape)).contiguous()
