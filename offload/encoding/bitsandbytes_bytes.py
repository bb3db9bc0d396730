"""Weights of 8 bits as bitsandbytes stores them: signed bytes, and the largest number (`SCB`) of each row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import checked_scale, require_shape
from offload.encoding.compressed_integers import Bytes

if TYPE_CHECKING:
    from torch import Tensor

_FORM = ".weight_format"  # how columns and rows lie: others are tiles of a GPU


@dataclass(frozen=True)
class BitsandbytesBytes(Bytes):
    """See `Coding`."""

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`: 127 stands for a row's largest number."""
        form = companions.get(_FORM)
        if form is not None and form.flatten().tolist() != [0]:
            raise ValueError(f"{_FORM} must be 0 (row-major), is {form.tolist()!r:.40}: store the model again")
        return {"scale": checked_scale(".SCB", companions[".SCB"].float(), self.grid(shape)) / 127}


def _recognise(stored: Mapping[str, Header], _: Mapping[str, Any]) -> Found | None:
    weight, largest = stored.get(".weight"), stored.get(".SCB")
    if weight is None or largest is None or weight.dtype != "I8" or len(weight.shape) != 2:
        return None
    require_shape(".SCB", largest.shape, weight.shape[:1])
    companions = (".SCB", _FORM) if _FORM in stored else (".SCB",)
    return Found(BitsandbytesBytes(8, 0, "F32", align_bytes=1), weight.shape, (".weight",), companions)


FORMAT = Format((".weight", ".SCB", _FORM), _recognise)
