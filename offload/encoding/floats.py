"""Floating-point weights: FP8, MXFP4 and NVFP4 with block scales, and plain ones in another order.

FP8 has a scale for each block, row or tensor, as DeepSeek and Qwen store them. Their
`weight_scale_inv` is a factor in spite of its name; compressed-tensors calls the scales
`weight_scale`, Mistral `qscale_weight`, and DeepSeek's later checkpoints have a `scale` of
exponents. GPTQModel's `weight_scale_inv` is an inverse: its config says so, and its reciprocal, in
float32, is the factor. If sizes are no multiple of a block's, the last blocks are cut. MXFP8 has an
exponent for 32 numbers of a row; exponents stay bytes in memory.

MXFP4 has 4 bits each and a power of two for 32 of them: compressed-tensors stores matrices so, and
gpt-oss stacks of experts, whose matrices the model has transposed. NVFP4 has 4 bits each, a scale
of 8 bits for 16 of them and one scale per tensor, by which compressed-tensors divides the small
scales and ModelOpt multiplies them. Plain numbers may have their matrices stored the other way
round, as some stacks of experts do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.encoding.base import (
    AGAIN,
    ANOTHER,
    ENCODINGS,
    NOWHERE,
    STORED,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    WordsAlone,
    checked_scale,
    config_weights,
    must,
    require,
    require_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

TABLE_BYTES = 4 * 256  # table of the float32 values of 8-bit scales
_FP8_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
# read, but not used: activations are not rounded here
_ACTIVATION_SCALES = (".input_scale", ".qscale_act")
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # the last two store exponents alone
_EXPONENTS = ("F8_E8M0", "U8")
_NO_EXPONENT = 255
_USUAL_BLOCK = (128, 128)
_LARGE = 1 << 31  # no matrix has as many rows or columns, and compiled code counts in 32 bits
_MXFP4_GROUP = 32
_NVFP4_GROUP = 16
# suffix of the words -> suffix of the scale per tensor
_NVFP4_WORDS = {".weight_packed": ".weight_global_scale", ".weight": ".weight_scale_2"}
_NAMES = {(0, 0): "with one scale", (1, 0): "with a scale for each row"}
_TYPES = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Float8:
    """See `Coding`."""

    kind: str  # the header's type
    # rows and columns that share a scale; 0 means all, so that weights of any shape have equal
    # codings
    block: tuple[int, int]
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False
    has_exponents: bool = False  # type of scales of one byte each
    is_inverse: bool = False  # whether weights are divided by stored scales

    @property
    def name(self) -> str:
        rows, columns = (size or "all" for size in self.block)
        blocks = f"in blocks of {rows} x {columns}"
        return f"fp8 {_NAMES.get(self.block, blocks)}"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return one byte for each weight."""
        return math.prod(shape)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a scale for each block, and of the table of exponents."""
        num_blocks = math.prod(self.grid(shape))
        return num_blocks + TABLE_BYTES if self.has_exponents else 4 * num_blocks

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Return the scales, one for each block: float32, or bytes that index into "levels"."""
        import torch

        ((suffix, stored),) = companions.items()
        if self.has_exponents:
            return exponents(suffix, stored.view(torch.uint8), self.grid(shape))
        scale = checked_scale(suffix, stored.float(), self.grid(shape))
        if self.is_inverse:
            scale = checked_scale(f"the inverse of {suffix}", scale.reciprocal(), scale.shape)
        return {"scale": scale}

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`; the matrices of a stack are expanded one by one."""
        weight = STORED[self.kind].decode(stored_B, out.shape)
        scale = companions["scale"]
        block = self._block(out.shape)
        stacks = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (weight, scale, out))
        levels = companions.get("levels")
        for matrix, matrix_scale, place in zip(*stacks, strict=True):
            expansion.float8(matrix, matrix_scale, block, place, levels)

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales, one for each block."""
        parts = zip(shape[-2:], self._block(shape), strict=True)
        return (*shape[:-2], *(-(-size // part) for size, part in parts))

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        rows, columns = self.block
        return rows or max(1, shape[-2]), columns or max(1, shape[-1])


def exponents(suffix: str, stored: "Tensor", grid: Sequence[int]) -> Tensors:
    """Return "scale" (uint8) and "levels" (256,), float32, the powers of two that it indexes."""
    import torch

    require_shape(suffix, stored.shape, grid)
    num_wrong = int((stored == _NO_EXPONENT).sum())
    must(not num_wrong, f"{suffix} must be numbers", f"{num_wrong} are none")
    levels = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).float()
    return {"scale": stored.contiguous(), "levels": levels}


def _recognise_float8(
    stored: Headers, settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return an FP8 weight with its scales; None for other types. Raises `ValueError`."""
    weight = stored.get(".weight")
    suffix = next((suffix for suffix in _FP8_SCALES if suffix in stored), None)
    if weight is None or weight.dtype not in _TYPES:
        return None
    if suffix is None:
        wanted = " or ".join(_FP8_SCALES[:2])
        remedy = "take a checkpoint with its scales"
        raise ValueError(f"{weight.dtype} needs a {wanted} beside it, there is none: {remedy}")
    scale = stored[suffix]
    shape = list(weight.shape)
    requirement = f"{suffix} must be of type {', '.join(_SCALE_TYPES)}"
    must(scale.dtype in _SCALE_TYPES, requirement, f"is {scale.dtype}", ANOTHER)
    requirement = ".weight must be a matrix or a stack of them"
    must(len(shape) > 1, requirement, f"has shape {shape}", "pack it again")
    coding = Float8(
        weight.dtype,
        _block(weight.shape, scale.shape, settings),
        has_exponents=scale.dtype in _EXPONENTS,
        is_inverse=suffix == _FP8_SCALES[0] and settings.get("weight_scale_semantics") == "inverse",
    )
    grid = coding.grid(shape)
    # scales of whole rows may lack dimensions of size one
    is_shaped = coding.block in _NAMES or tuple(scale.shape) == grid
    fits = is_shaped and math.prod(scale.shape) == math.prod(grid)
    requirement = f"{suffix} must have the scales of {coding.name} for weights of {shape}"
    is_joined = math.prod(scale.shape) in (2, 3) and len(scale.shape) < 3
    remedy = "take a checkpoint in which matrices with scales of their own are stored apart"
    must(fits, requirement, f"has shape {list(scale.shape)}", remedy if is_joined else AGAIN)
    return RecognisedWeight(coding, weight.shape, (".weight",), (suffix,))


def _block(shape: Sequence[int], scale_shape: Sequence[int], settings: Settings) -> tuple[int, int]:
    """Return the rows and columns that share a scale; 0 stands for all."""
    if math.prod(scale_shape) == 1:
        return 0, 0
    if tuple(scale_shape) in ((*shape[:-1], 1), tuple(shape[:-1])):
        return 1, 0
    *rows_of, groups = scale_shape
    # MXFP8's blocks; a matrix of one row also fits other blocks
    if tuple(rows_of) == tuple(shape[:-1]) and shape[-2] > 1 and groups and not shape[-1] % groups:
        return 1, shape[-1] // groups
    said = (group.get("block_structure") for group in config_weights(settings))
    block = settings.get("weight_block_size") or next(filter(None, said), _USUAL_BLOCK)
    sizes = block if isinstance(block, list | tuple) else ()
    is_block = len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    requirement = "weight_block_size must be two numbers above 0"
    must(is_block, requirement, f"got {block!r:.80}", "mend config.json")
    rows, columns = (n if n < _LARGE else 0 for n in block)
    return rows, columns


FLOAT8 = Format((".weight", *_FP8_SCALES, *_ACTIVATION_SCALES), _recognise_float8)


class _FourBits:
    """Shared by MXFP4 and NVFP4. Companions: "scale" (N, G), uint8, an index into "levels" (256)."""

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`; N are the rows of all matrices of a stack."""
        scale_NG = companions["scale"]
        words_NB, out_N = (tensor.view(len(scale_NG), -1) for tensor in (stored_B, out))
        expansion.e2m1(words_NB, scale_NG, companions["levels"], out_N)


@dataclass(frozen=True)
class Mxfp4(_FourBits):
    """See `Coding`."""

    scales: str = "_scales"  # the suffix
    name: str = "mxfp4"
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of whole groups, two codes to a byte."""
        return 16 * self._num_groups(shape)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return a byte for each group, and the bytes of the table."""
        return self._num_groups(shape) + TABLE_BYTES

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`; `shape` is (out, in), or (E, out, in) of a stack."""
        grid = (*shape[:-1], shape[-1] // _MXFP4_GROUP)
        ready = exponents(self.scales, companions[self.scales], grid)
        return {**ready, "scale": ready["scale"].flatten(0, -2)}

    def _num_groups(self, shape: Sequence[int]) -> int:
        return math.prod(shape[:-1]) * math.ceil(shape[-1] / _MXFP4_GROUP)


def _recognise_mxfp4_stack(
    stored: Headers, _settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return gpt-oss's stack of experts; None without `_blocks`. Raises `ValueError`."""
    words = stored.get("_blocks")
    if words is None or words.dtype != "U8":
        return None
    require(stored, ("_scales",), "_blocks")
    is_stack = len(words.shape) > 2 and words.shape[-1] == _MXFP4_GROUP // 2
    requirement = (
        f"_blocks must be stacks of rows of {_MXFP4_GROUP // 2} bytes, with _scales of type U8"
    )
    is_known = is_stack and stored["_scales"].dtype == "U8"
    must(is_known, requirement, f"has shape {list(words.shape)}")
    require_shape("_scales", stored["_scales"].shape, words.shape[:-1])
    shape = (*words.shape[:-2], words.shape[-2] * _MXFP4_GROUP)
    return RecognisedWeight(Mxfp4(is_transposed=True), shape, ("_blocks",), ("_scales",))


MXFP4_STACK = Format(("_blocks", "_scales"), _recognise_mxfp4_stack, parameter="")


def _recognise_mxfp4(
    stored: Headers, _settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return compressed-tensors' MXFP4; None for other types. Raises `ValueError`."""
    words = stored.get(".weight_packed")
    scale = stored.get(".weight_scale")
    if words is None or scale is None or (words.dtype, scale.dtype) != ("U8", "U8"):
        return None
    has_rows = len(words.shape) == 2 and words.shape[1] % (_MXFP4_GROUP // 2) == 0
    requirement = f".weight_packed must have rows of groups of {_MXFP4_GROUP // 2} bytes"
    must(has_rows, requirement, f"has shape {list(words.shape)}")
    shape = (words.shape[0], words.shape[1] * 2)
    require_shape(".weight_scale", scale.shape, (shape[0], shape[1] // _MXFP4_GROUP))
    coding = Mxfp4(".weight_scale")
    return RecognisedWeight(coding, shape, (".weight_packed",), (".weight_scale",))


MXFP4 = Format((".weight_packed", ".weight_scale", ".input_scale"), _recognise_mxfp4)


@dataclass(frozen=True)
class Nvfp4(_FourBits):
    """See `Coding`."""

    is_divided: bool = False  # whether the tensor's scale divides or multiplies
    scales: str = ".weight_scale"  # the suffix
    whole: str = ""  # suffix of the tensor's scale, if it has one
    name: str = "nvfp4"
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of codes, two to a byte."""
        return shape[0] * (shape[1] // 2)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return a byte for each group, and the bytes of the table."""
        return shape[0] * (shape[1] // _NVFP4_GROUP) + TABLE_BYTES

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        import torch

        grid = (shape[0], shape[1] // _NVFP4_GROUP)
        scale = companions[self.scales].view(torch.float8_e4m3fn)
        scale = checked_scale(self.scales, scale, grid)
        levels = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        whole = torch.ones(1)
        if self.whole:
            whole = checked_scale(self.whole, companions[self.whole].float(), (1,))
            levels = levels / whole if self.is_divided else levels * whole
        used = scale.view(torch.uint8)
        are_finite = bool(levels[used.unique().int()].isfinite().all())
        must(are_finite, f"{self.whole} must leave scales finite", f"is {float(whole):g}")
        return {"scale": used, "levels": levels}


def _recognise_nvfp4(
    stored: Headers, _settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return NVFP4 of compressed-tensors or ModelOpt; None for other types. Raises `ValueError`."""
    kinds = {suffix: stored[suffix].dtype for suffix in _NVFP4_WORDS if suffix in stored}
    suffix = next((suffix for suffix, kind in kinds.items() if kind == "U8"), None)
    scale = stored.get(".weight_scale")
    if suffix is None or scale is None or scale.dtype != "F8_E4M3":
        return None
    words = stored[suffix]
    require(stored, (_NVFP4_WORDS[suffix],), suffix)
    has_rows = len(words.shape) == 2 and words.shape[1] % (_NVFP4_GROUP // 2) == 0
    requirement = f"{suffix} must have rows of {_NVFP4_GROUP // 2} bytes"
    must(has_rows, requirement, f"has {list(words.shape)}", "pack it again")
    shape = (words.shape[0], words.shape[1] * 2)
    require_shape(".weight_scale", scale.shape, (shape[0], shape[1] // _NVFP4_GROUP))
    coding = Nvfp4(is_divided=suffix == ".weight_packed", whole=_NVFP4_WORDS[suffix])
    return RecognisedWeight(coding, shape, (suffix,), (".weight_scale", _NVFP4_WORDS[suffix]))


NVFP4 = Format(
    (*_NVFP4_WORDS, *_NVFP4_WORDS.values(), ".weight_scale", ".input_scale", ".input_global_scale"),
    _recognise_nvfp4,
)


@dataclass(frozen=True, slots=True)
class TransposedStack(WordsAlone):
    """Matrices of plain numbers whose rows are stored as columns.

    They are copied row by row when their module runs, as coded weights are expanded: on a CPU a
    product with a transposed view is several times slower.
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
