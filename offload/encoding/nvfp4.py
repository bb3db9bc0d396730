"""Weights of 4 bits each, floating-point, with a scale of 8 bits for each 16 of them and one for all (NVFP4).

compressed-tensors divides the small scales by the one for all; ModelOpt multiplies them with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import AGAIN, checked_scale, require, require_shape
from offload.encoding.mxfp4 import TABLE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

_GROUP = 16
_WORDS = {".weight_packed": ".weight_global_scale", ".weight": ".weight_scale_2"}  # and what belongs to them


@dataclass(frozen=True)
class Nvfp4:
    """See `Coding`. Companions are "scale" (N, G), uint8, with their "levels" (256)."""

    is_divided: bool  # by the scale for all
    name: str = "nvfp4"
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Two to a byte."""
        return shape[0] * (shape[1] // 2)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """A byte for each group, and the table."""
        return shape[0] * (shape[1] // _GROUP) + TABLE_BYTES

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`."""
        import torch

        suffix = _WORDS[".weight_packed" if self.is_divided else ".weight"]
        scale = checked_scale(".weight_scale", companions[".weight_scale"], (shape[0], shape[1] // _GROUP))
        whole = checked_scale(suffix, companions[suffix].float(), (1,))
        levels = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        levels = levels / whole if self.is_divided else levels * whole
        used = scale.view(torch.uint8)
        if not bool(levels[used.unique().int()].isfinite().all()):
            raise ValueError(f"{suffix} must leave scales finite, is {float(whole):g}: {AGAIN}")
        return {"scale": used, "levels": levels}

    def expand(
        self, stored_B: "Tensor", companions: "Mapping[str, Tensor]", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        scale, levels = companions["scale"], companions["levels"]
        expansion.e2m1(stored_B.view(len(scale), -1), scale, levels, out)


def _recognise(stored: Mapping[str, Header], _: Mapping[str, Any]) -> Found | None:
    suffix = next((suffix for suffix in _WORDS if suffix in stored and stored[suffix].dtype == "U8"), None)
    scale = stored.get(".weight_scale")
    if suffix is None or scale is None or scale.dtype != "F8_E4M3":
        return None
    words = stored[suffix]
    require(stored, (_WORDS[suffix],), suffix)
    if len(words.shape) != 2 or words.shape[1] % (_GROUP // 2):
        raise ValueError(f"{suffix} must have rows of {_GROUP // 2} bytes, has {list(words.shape)}: pack it again")
    require_shape(".weight_scale", scale.shape, (words.shape[0], words.shape[1] * 2 // _GROUP))
    coding = Nvfp4(is_divided=suffix == ".weight_packed")
    return Found(coding, (words.shape[0], words.shape[1] * 2), (suffix,), (".weight_scale", _WORDS[suffix]))


FORMAT = Format((*_WORDS, *_WORDS.values(), ".weight_scale", ".input_scale", ".input_global_scale"), _recognise)
