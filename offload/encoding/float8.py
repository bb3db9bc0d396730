"""Weights of 8 bits each, floating-point, with a scale for each block, row or tensor, as DeepSeek and Qwen store them.

Their `weight_scale_inv` is a factor in spite of its name. Where sizes are no multiple of a block's, the last blocks are
cut. compressed-tensors has the same numbers with a `weight_scale`, DeepSeek's later checkpoints with a `scale` of
exponents, Mistral's with a `qscale_weight`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import AGAIN, checked_scale, config_weights

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_OF_ACTIVATIONS = (".input_scale", ".qscale_act")  # which are not rounded here
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # the last two hold exponents alone
_USUAL_BLOCK = (128, 128)
_LARGE = 1 << 31  # numbers; no matrix has as many rows or columns, and compiled code counts in 32 bits
_NAMES = {(0, 0): "with one scale", (1, 0): "with a scale for each row"}
_TYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class Float8:
    """See `Coding`."""

    kind: str  # as headers have it
    block: tuple[int, int]  # rows and columns that share a scale; 0: all, so that weights of any shape have one coding
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    @property
    def name(self) -> str:
        rows, columns = (size or "all" for size in self.block)
        blocks = f"in blocks of {rows} x {columns}"
        return f"fp8 {_NAMES.get(self.block, blocks)}"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """One byte each."""
        return math.prod(shape)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """A float32 scale for each block."""
        return 4 * math.prod(self._grid(shape))

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """Scales in float32, one for each block."""
        import torch

        ((suffix, stored),) = companions.items()
        scale = (stored if stored.element_size() > 1 else stored.view(torch.float8_e8m0fnu)).float()
        return {"scale": checked_scale(suffix, scale, self._grid(shape))}

    def expand(
        self, stored_B: "Tensor", companions: "Mapping[str, Tensor]", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """Of a stack every matrix by itself."""
        import torch

        weight = stored_B.view(getattr(torch, _TYPES[self.kind])).view(out.shape)
        scale, block = companions["scale"], self._block(out.shape)
        for one, own, place in zip(*(t.reshape(-1, *t.shape[-2:]) for t in (weight, scale, out)), strict=True):
            expansion.float8(one, own, block, place)

    def _grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:-2], *(-(-size // part) for size, part in zip(shape[-2:], self._block(shape), strict=True)))

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        rows, columns = self.block
        return rows or max(1, shape[-2]), columns or max(1, shape[-1])


def _recognise(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found | None:
    weight, suffix = stored.get(".weight"), next((suffix for suffix in _SCALES if suffix in stored), None)
    if weight is None or weight.dtype not in _TYPES:
        return None
    if suffix is None:
        wanted = " or ".join(_SCALES[:2])
        raise ValueError(f"{weight.dtype} needs a {wanted} beside it, there is none: {AGAIN}")
    scale = stored[suffix]
    if scale.dtype not in _SCALE_TYPES:
        raise ValueError(
            f"{suffix} must be of type {', '.join(_SCALE_TYPES)}, is {scale.dtype}: take another checkpoint"
        )
    if len(weight.shape) < 2:
        raise ValueError(f".weight must be a matrix or a stack of them, has shape {list(weight.shape)}: pack it again")
    coding = Float8(weight.dtype, _block(weight.shape, scale.shape, settings))
    if 4 * math.prod(scale.shape) != coding.companion_bytes(weight.shape):
        raise ValueError(
            f"{suffix} must have the scales of {coding.name} for weights of {list(weight.shape)}, has shape "
            f"{list(scale.shape)}: {AGAIN}"
        )
    return Found(coding, weight.shape, (".weight",), (suffix,))


def _block(shape: Sequence[int], scale_shape: Sequence[int], settings: Mapping[str, Any]) -> tuple[int, int]:
    """How many rows and columns share a scale: all (0), those of one row, or what the config says."""
    if math.prod(scale_shape) == 1:
        return 0, 0
    if tuple(scale_shape) in ((*shape[:-1], 1), tuple(shape[:-1])):
        return 1, 0
    said = (one["block_structure"] for one in config_weights(settings) if one.get("block_structure"))
    block = settings.get("weight_block_size") or next(said, _USUAL_BLOCK)
    if not isinstance(block, list | tuple) or [type(n) is int and n > 0 for n in block] != [True, True]:
        raise ValueError(f"weight_block_size must be two numbers above 0, got {block!r:.80}: mend config.json")
    rows, columns = (n if n < _LARGE else 0 for n in block)
    return rows, columns


FORMAT = Format((".weight", *_SCALES, *_OF_ACTIVATIONS), _recognise)
