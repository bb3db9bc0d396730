"""Integers of 4 bits as AWQ's `gemm` version stores them: words of eight rows of a column, in an order of their own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import float_type, group_size, packed_shapes, require_shape
from offload.encoding.integers import Integers

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion


@dataclass(frozen=True)
class Awq(Integers):
    """See `Coding`."""

    @property
    def name(self) -> str:
        return super().name.replace("int4", "int4 (AWQ)")

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Eight rows to a word."""
        return 4 * math.ceil(shape[0] / 8) * shape[1]

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`."""
        from offload.kernels.expand_columns import NIBBLES

        scale, zero = self.turned(companions, shape)
        return {"scale": scale, "zero": zero.unflatten(0, (-1, 8))[:, list(NIBBLES)].flatten(0, 1).contiguous()}

    def expand(
        self, stored_B: "Tensor", companions: "Mapping[str, Tensor]", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        import torch

        words_CK = stored_B.view(torch.int32).view(out.shape[1], -1).t()
        expansion.columns(words_CK, companions["scale"], companions["zero"], self.group or out.shape[1], out)


def _recognise(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found | None:
    shapes = packed_shapes(stored)
    if shapes is None:
        return None
    (num_columns, num_words), zeros, (num_groups, num_rows) = shapes
    require_shape(".scales", (num_groups, num_rows), (num_groups, 8 * num_words))
    require_shape(".qzeros", zeros, (num_groups, num_words))
    group = group_size(num_columns, num_groups, settings.get("group_size"))
    coding = Awq(4, group, float_type(stored, ".scales"), zero_bytes=1)
    return Found(coding, (num_rows, num_columns), (".qweight",), (".qzeros", ".scales"))


FORMAT = Format((".qweight", ".qzeros", ".scales"), _recognise)
