"""Stacks of experts of 4 bits each, floating-point, with a power of two for each 32 of them, as gpt-oss stores them.

The model has a stack's matrices the other way round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import AGAIN, require, require_shape

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

TABLE_BYTES = 4 * 256  # what scales stand for
_GROUP, _NO_NUMBER = 32, 255


@dataclass(frozen=True)
class Mxfp4:
    """See `Coding`. Companions are "scale" (E x N, G), uint8, with their "levels" (256)."""

    name: str = "mxfp4"
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = True

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Two to a byte, in whole groups."""
        return 16 * self._num_groups(shape)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """A byte for each group, and the table."""
        return self._num_groups(shape) + TABLE_BYTES

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`; `shape` is (E, out, in)."""
        import torch

        scale = companions["_scales"]
        require_shape("_scales", scale.shape, (*shape[:-1], shape[-1] // _GROUP))
        num_wrong = int((scale == _NO_NUMBER).sum())
        if num_wrong:
            raise ValueError(f"_scales must be numbers, {num_wrong} are none: {AGAIN}")
        levels = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).float()
        return {"scale": scale.flatten(0, -2).contiguous(), "levels": levels}

    def expand(
        self, stored_B: "Tensor", companions: "Mapping[str, Tensor]", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`; `out` is (E, out, in)."""
        scale, levels = companions["scale"], companions["levels"]
        words_NB = stored_B.view(len(scale), -1)
        expansion.e2m1(words_NB, scale, levels, out.view(len(scale), -1))

    def _num_groups(self, shape: Sequence[int]) -> int:
        return math.prod(shape[:-1]) * math.ceil(shape[-1] / _GROUP)


def _recognise(stored: Mapping[str, Header], _: Mapping[str, Any]) -> Found | None:
    words = stored.get("_blocks")
    if words is None or words.dtype != "U8":
        return None
    require(stored, ("_scales",), "_blocks")
    if len(words.shape) < 3 or words.shape[-1] != _GROUP // 2 or stored["_scales"].dtype != "U8":
        raise ValueError(
            f"_blocks must be stacks of rows of {_GROUP // 2} bytes, with _scales of type U8, has shape "
            f"{list(words.shape)}: {AGAIN}"
        )
    require_shape("_scales", stored["_scales"].shape, words.shape[:-1])
    shape = (*words.shape[:-2], words.shape[-2] * _GROUP)
    return Found(Mxfp4(), shape, ("_blocks",), ("_scales",))


FORMAT = Format(("_blocks", "_scales"), _recognise, parameter="")
