"""Floating-point weights: FP8, MXFP4 and NVFP4 with block scales, and plain ones in another order.

FP8 has a scale for each block, row or tensor, as DeepSeek and Qwen store them. Their
`weight_scale_inv` is a factor in spite of its name; compressed-tensors calls the scales
`weight_scale`, Mistral `qscale_weight`, and DeepSeek's later checkpoints have a `scale` of
exponents. Where sizes are no multiple of a block's, the last blocks are cut.

MXFP4 is gpt-oss's format for stacks of experts: 4 bits each and a power of two for 32 of them; the
model has a stack's matrices transposed. NVFP4 has 4 bits each, a scale of 8 bits for 16 of them and
one scale per tensor, by which compressed-tensors divides the small scales and ModelOpt multiplies
them. Plain numbers may have their matrices stored the other way round, as some stacks of experts do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.encoding.base import (
    AGAIN,
    ENCODINGS,
    STORED,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
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

TABLE_BYTES = 4 * 256  # the float32 levels of scales of 8 bits
_FP8_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_ACTIVATION_SCALES = (".input_scale", ".qscale_act")  # unused: activations are not rounded here
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # the last two hold exponents alone
_USUAL_BLOCK = (128, 128)
_LARGE = 1 << 31  # no matrix has as many rows or columns, and compiled code counts in 32 bits
_MXFP4_GROUP = 32
_MXFP4_NAN = 255
_NVFP4_GROUP = 16
# suffix of the words -> suffix of the scale per tensor
_NVFP4_WORDS = {".weight_packed": ".weight_global_scale", ".weight": ".weight_scale_2"}
_NAMES = {(0, 0): "with one scale", (1, 0): "with a scale for each row"}
_TYPES = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Float8:
    """See `Coding`."""

    kind: str  # the header's type
    # rows and columns that share a scale; 0 is all, so weights of any shape have equal codings
    block: tuple[int, int]
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    @property
    def name(self) -> str:
        rows, columns = (size or "all" for size in self.block)
        blocks = f"in blocks of {rows} x {columns}"
        return f"fp8 {_NAMES.get(self.block, blocks)}"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return one byte for each weight."""
        return math.prod(shape)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a float32 scale for each block."""
        return 4 * math.prod(self.grid(shape))

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Return the scales in float32, one for each block."""
        import torch

        ((suffix, stored),) = companions.items()
        scale = (stored if stored.element_size() > 1 else stored.view(torch.float8_e8m0fnu)).float()
        return {"scale": checked_scale(suffix, scale, self.grid(shape))}

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`; the matrices of a stack are expanded one by one."""
        weight = STORED[self.kind].decode(stored_B, out.shape)
        scale = companions["scale"]
        block = self._block(out.shape)
        stacks = (one.reshape(-1, *one.shape[-2:]) for one in (weight, scale, out))
        for one, own, place in zip(*stacks, strict=True):
            expansion.float8(one, own, block, place)

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales, one for each block."""
        parts = zip(shape[-2:], self._block(shape), strict=True)
        return (*shape[:-2], *(-(-size // part) for size, part in parts))

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        rows, columns = self.block
        return rows or max(1, shape[-2]), columns or max(1, shape[-1])


def _recognise_float8(stored: Headers, settings: Settings) -> RecognisedWeight | None:
    weight = stored.get(".weight")
    suffix = next((suffix for suffix in _FP8_SCALES if suffix in stored), None)
    if weight is None or weight.dtype not in _TYPES:
        return None
    if suffix is None:
        wanted = " or ".join(_FP8_SCALES[:2])
        raise ValueError(f"{weight.dtype} needs a {wanted} beside it, there is none: {AGAIN}")
    scale = stored[suffix]
    shape = list(weight.shape)
    rule = f"{suffix} must be of type {', '.join(_SCALE_TYPES)}"
    must(scale.dtype in _SCALE_TYPES, rule, f"is {scale.dtype}", "take another checkpoint")
    rule = ".weight must be a matrix or a stack of them"
    must(len(shape) > 1, rule, f"has shape {shape}", "pack it again")
    coding = Float8(weight.dtype, _block(weight.shape, scale.shape, settings))
    grid = coding.grid(shape)
    # those of whole rows may lack dimensions of one
    is_shaped = coding.block in _NAMES or tuple(scale.shape) == grid
    fits = is_shaped and math.prod(scale.shape) == math.prod(grid)
    rule = f"{suffix} must have the scales of {coding.name} for weights of {shape}"
    must(fits, rule, f"has shape {list(scale.shape)}")
    return RecognisedWeight(coding, weight.shape, (".weight",), (suffix,))


def _block(shape: Sequence[int], scale_shape: Sequence[int], settings: Settings) -> tuple[int, int]:
    """Return how many rows and columns share a scale; 0 stands for all."""
    if math.prod(scale_shape) == 1:
        return 0, 0
    if tuple(scale_shape) in ((*shape[:-1], 1), tuple(shape[:-1])):
        return 1, 0
    said = (one.get("block_structure") for one in config_weights(settings))
    block = settings.get("weight_block_size") or next(filter(None, said), _USUAL_BLOCK)
    sizes = block if isinstance(block, list | tuple) else ()
    is_block = len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    rule = "weight_block_size must be two numbers above 0"
    must(is_block, rule, f"got {block!r:.80}", "mend config.json")
    rows, columns = (n if n < _LARGE else 0 for n in block)
    return rows, columns


FLOAT8 = Format((".weight", *_FP8_SCALES, *_ACTIVATION_SCALES), _recognise_float8)


class _FourBits:
    """What MXFP4 and NVFP4 share. Companions: "scale" (N, G), uint8, an index into "levels" (256)."""

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`; N are the rows of all matrices of a stack."""
        scale_NG = companions["scale"]
        words_NB, own = (one.view(len(scale_NG), -1) for one in (stored_B, out))
        expansion.e2m1(words_NB, scale_NG, companions["levels"], own)


@dataclass(frozen=True)
class Mxfp4(_FourBits):
    """See `Coding`."""

    name: str = "mxfp4"
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = True

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of whole groups, two codes to a byte."""
        return 16 * self._num_groups(shape)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return a byte for each group, and the bytes of the table."""
        return self._num_groups(shape) + TABLE_BYTES

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`; `shape` is (E, out, in)."""
        import torch

        scale = companions["_scales"]
        require_shape("_scales", scale.shape, (*shape[:-1], shape[-1] // _MXFP4_GROUP))
        num_wrong = int((scale == _MXFP4_NAN).sum())
        must(not num_wrong, "_scales must be numbers", f"{num_wrong} are none")
        levels = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).float()
        return {"scale": scale.flatten(0, -2).contiguous(), "levels": levels}

    def _num_groups(self, shape: Sequence[int]) -> int:
        return math.prod(shape[:-1]) * math.ceil(shape[-1] / _MXFP4_GROUP)


def _recognise_mxfp4(stored: Headers, _: Settings) -> RecognisedWeight | None:
    words = stored.get("_blocks")
    if words is None or words.dtype != "U8":
        return None
    require(stored, ("_scales",), "_blocks")
    is_stack = len(words.shape) > 2 and words.shape[-1] == _MXFP4_GROUP // 2
    rule = f"_blocks must be stacks of rows of {_MXFP4_GROUP // 2} bytes, with _scales of type U8"
    is_known = is_stack and stored["_scales"].dtype == "U8"
    must(is_known, rule, f"has shape {list(words.shape)}")
    require_shape("_scales", stored["_scales"].shape, words.shape[:-1])
    shape = (*words.shape[:-2], words.shape[-2] * _MXFP4_GROUP)
    return RecognisedWeight(Mxfp4(), shape, ("_blocks",), ("_scales",))


MXFP4 = Format(("_blocks", "_scales"), _recognise_mxfp4, parameter="")


@dataclass(frozen=True)
class Nvfp4(_FourBits):
    """See `Coding`."""

    is_divided: bool  # whether scales are divided by the tensor's scale, or multiplied with it
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

        suffix = _NVFP4_WORDS[".weight_packed" if self.is_divided else ".weight"]
        grid = (shape[0], shape[1] // _NVFP4_GROUP)
        scale = checked_scale(".weight_scale", companions[".weight_scale"], grid)
        whole = checked_scale(suffix, companions[suffix].float(), (1,))
        levels = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        levels = levels / whole if self.is_divided else levels * whole
        used = scale.view(torch.uint8)
        are_finite = bool(levels[used.unique().int()].isfinite().all())
        must(are_finite, f"{suffix} must leave scales finite", f"is {float(whole):g}")
        return {"scale": used, "levels": levels}


def _recognise_nvfp4(stored: Headers, _: Settings) -> RecognisedWeight | None:
    kinds = {suffix: stored[suffix].dtype for suffix in _NVFP4_WORDS if suffix in stored}
    suffix = next((suffix for suffix, kind in kinds.items() if kind == "U8"), None)
    scale = stored.get(".weight_scale")
    if suffix is None or scale is None or scale.dtype != "F8_E4M3":
        return None
    words = stored[suffix]
    require(stored, (_NVFP4_WORDS[suffix],), suffix)
    has_rows = len(words.shape) == 2 and words.shape[1] % (_NVFP4_GROUP // 2) == 0
    rule = f"{suffix} must have rows of {_NVFP4_GROUP // 2} bytes"
    must(has_rows, rule, f"has {list(words.shape)}", "pack it again")
    shape = (words.shape[0], words.shape[1] * 2)
    require_shape(".weight_scale", scale.shape, (shape[0], shape[1] // _NVFP4_GROUP))
    coding = Nvfp4(is_divided=suffix == ".weight_packed")
    return RecognisedWeight(coding, shape, (suffix,), (".weight_scale", _NVFP4_WORDS[suffix]))


NVFP4 = Format(
    (*_NVFP4_WORDS, *_NVFP4_WORDS.values(), ".weight_scale", ".input_scale", ".input_global_scale"),
    _recognise_nvfp4,
)


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
