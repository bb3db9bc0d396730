"""What is asked of the ways in which a checkpoint stores a tensor.

Of an `Encoding` the numbers are a view of the stored bytes. Those of a `Coding` have to be expanded
before they are
multiplied with: its words are streamed as they are stored, while the small tensors that belong to
them, the companions (scales, zero points, orders), are read once, checked, and stay. Headers,
layouts, sizes and the planner know tensors by these answers alone; a further way of storing weights
is one more file here and one more entry of a registry.

Numbers as they are computed with: decoding is a view.

The encodings that are read, by the names that headers give them, and the types that are computed
in.

What is asked of the small tensors that belong to words, wherever they come from: shapes, finite
scales, orders.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # planning does without torch
    from torch import Tensor

    from offload.kernels.expansion import Expansion

if TYPE_CHECKING:
    from torch import Tensor


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

    Each weight is what a float32 product of the stored numbers gives, rounded once to the type that
    is asked for.
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

    def prepare(
        self, companions: Mapping[str, "Tensor"], shape: Sequence[int]
    ) -> Mapping[str, "Tensor"]:
        """Companions, by their suffixes in the file, in the form that `expand` wants, looked at
        once for all.

        Raises `ValueError` (rule, value, remedy) for numbers that are not finite, out of range, or
        of another shape.
        """

    def expand(
        self,
        stored_B: "Tensor",
        companions: Mapping[str, "Tensor"],
        out: "Tensor",
        expansion: "Expansion",
    ) -> None:
        """Fill `out`, contiguous, of the weight's shape, in a floating-point type, from words
        (uint8) on its device.
        """


class Header(Protocol):
    """What a header says of one tensor."""

    @property
    def dtype(self) -> str:
        """The format's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor."""


class RecognisedWeight(NamedTuple):
    """A weight whose tensors were recognised."""

    coding: Coding
    # of the weight, (out, in) or a stack of these; where headers do not say, one number: N x K
    shape: tuple[int, ...]
    # suffixes of what is streamed; several must lie one behind the other in the file
    words: tuple[str, ...]
    companions: tuple[str, ...]  # suffixes of what stays


class Format(NamedTuple):
    """A family of codings, known by names of tensors."""

    suffixes: tuple[str, ...]  # of its tensors behind the name of a weight without its `.weight`
    # Tensors of one weight by suffix, some of which may be those of other formats, and
    # `quantization_config` -> what they are; None where they are not of this format. Raises
    # `ValueError` (rule, value, remedy) where they contradict each other, or for a version of the
    # format that is not known.
    recognise: Callable[[Mapping[str, Header], Mapping[str, Any]], RecognisedWeight | None]
    parameter: str = ".weight"  # what a model has behind that name


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


_PLAIN = (Plain("BF16", "bfloat16", 2), Plain("F16", "float16", 2), Plain("F32", "float32", 4))
_PARTS = (Plain("F64", "float64", 8), Plain("I64", "int64", 8), Plain("I32", "int32", 4), Plain("I16", "int16", 2),
          Plain("I8", "int8", 1), Plain("U8", "uint8", 1), Plain("BOOL", "bool", 1), Plain("U64", "uint64", 8),
          Plain("U32", "uint32", 4), Plain("U16", "uint16", 2), Plain("F8_E4M3", "float8_e4m3fn", 1),
          Plain("F8_E5M2", "float8_e5m2", 1), Plain("F8_E8M0", "float8_e8m0fnu", 1))  # fmt: skip
# of weights that are computed with as they are
ENCODINGS: Mapping[str, Encoding] = {one.name: one for one in _PLAIN}
# by the type that is computed in
PLAIN_OF: Mapping[str, Encoding] = {one.dtype: one for one in _PLAIN}
# also of words and companions
STORED: Mapping[str, Encoding] = {one.name: one for one in (*_PLAIN, *_PARTS)}


AGAIN = "download the checkpoint again"


def float_type(stored: Mapping[str, Header], suffix: str) -> str:
    """The header's name of the type of scales. Raises `ValueError` where they are of no
    floating-point type.
    """
    dtype = stored[suffix].dtype
    if dtype not in ENCODINGS:
        raise ValueError(f"{suffix} must be of type {', '.join(ENCODINGS)}, is {dtype}: {AGAIN}")
    return dtype


def require(stored: Mapping[str, Header], suffixes: Sequence[str], beside: str) -> None:
    """Raises `ValueError` where a tensor is missing."""
    for suffix in suffixes:
        if suffix not in stored:
            raise ValueError(f"{beside} needs a {suffix} beside it, there is none: {AGAIN}")


def matrix_shape(stored: Mapping[str, Header], suffix: str) -> tuple[int, int]:
    """Raises `ValueError` where a tensor has not two dimensions."""
    shape = stored[suffix].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{suffix} must have two dimensions, has shape {list(shape)}: {AGAIN}")
    return shape[0], shape[1]


def packed_shapes(stored: Mapping[str, Header]) -> list[tuple[int, int]] | None:
    """Of `.qweight`, `.qzeros` and `.scales`, as AWQ and GPTQ name them alike; None where there are
    no such words.

    Raises `ValueError` for a tensor that is missing, or is none of what both store.
    """
    if ".qweight" not in stored:
        return None
    require(stored, (".scales", ".qzeros"), ".qweight")
    require_integers(stored, (".qweight", ".qzeros", ".g_idx"))
    return [matrix_shape(stored, suffix) for suffix in (".qweight", ".qzeros", ".scales")]


def require_integers(stored: Mapping[str, Header], suffixes: Sequence[str]) -> None:
    """Raises `ValueError` where a tensor, if it is there, is not of type I32; orders may be of I64."""
    for suffix in suffixes:
        known = ("I32", "I64") if suffix.endswith("g_idx") else ("I32",)
        if suffix in stored and stored[suffix].dtype not in known:
            raise ValueError(
                f"{suffix} must be of type {' or '.join(known)}, is {stored[suffix].dtype}: {AGAIN}"
            )


def require_shape(suffix: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises `ValueError` where a tensor has another shape than the words ask for."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"{suffix} must have shape {list(wanted)}, has {list(shape)}: {AGAIN}")


def group_size(num_columns: int, num_groups: int, said: object) -> int:
    """How many columns share a scale: what the config says, or what divides them; 0 where all do.

    Raises `ValueError` where so many groups do not fit so many columns.
    """
    if num_groups == 1:
        return 0
    if type(said) is int and said > 0 and math.ceil(num_columns / said) == num_groups:
        return said
    if num_groups > 0 and num_columns % num_groups == 0:
        return num_columns // num_groups
    raise ValueError(
        f"group_size must divide {num_columns} columns into {num_groups} groups, is {said!r:.20}: mend config.json"
    )


def config_weights(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What groups in compressed-tensors' config say of weights; names of modules, which tensors
    need not, are left.
    """
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def checked_scale(suffix: str, scale: "Tensor", shape: Sequence[int]) -> "Tensor":
    """Scales in that shape, contiguous. Raises `ValueError` where one is not finite."""
    if scale.numel() != math.prod(shape):
        raise ValueError(
            f"{suffix} must have {math.prod(shape)} numbers, has {scale.numel()}: {AGAIN}"
        )
    num_wrong = int((~scale.float().isfinite()).sum())
    if num_wrong:
        raise ValueError(
            f"{suffix} must be finite, {num_wrong} of {scale.numel()} are not: {AGAIN}"
        )
    return scale.reshape(tuple(shape)).contiguous()


def checked_order(suffix: str, order: "Tensor", num_columns: int, num_groups: int) -> "Tensor":
    """Which scale each column has, int32. Raises `ValueError` where there is no such scale."""
    import torch

    if order.numel() != num_columns:
        raise ValueError(f"{suffix} must have {num_columns} numbers, has {order.numel()}: {AGAIN}")
    if num_columns and not 0 <= int(order.min()) <= int(order.max()) < num_groups:
        least = int(order.min())
        most = int(order.max())
        raise ValueError(f"{suffix} must lie in 0..{num_groups - 1}, has {least}..{most}: {AGAIN}")
    return order.reshape(num_columns).to(torch.int32)


def unpacked(words: "Tensor", bits: int, dim: int, num_codes: int) -> "Tensor":
    """Codes (uint8) that lie one behind the other in int32 words along a dimension, the first in
    the lowest bits.
    """
    import torch

    shift_E = torch.arange(0, 32, bits, dtype=torch.int32)
    code = (words.movedim(dim, -1)[..., None] >> shift_E) & ((1 << bits) - 1)
    return code.flatten(-2)[..., :num_codes].movedim(-1, dim).to(torch.uint8).contiguous()
