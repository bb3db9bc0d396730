"""Integers of 4 bits as AWQ's `gemm` version stores them: words of eight rows of a column, in an order of their own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import (
    FLOAT_BYTES,
    FLOATS,
    checked_scale,
    float_type,
    group_size,
    require,
    require_integers,
    require_matrices,
    require_shape,
    unpacked,
)

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

_SUFFIXES = (".qweight", ".qzeros", ".scales")


@dataclass(frozen=True)
class Awq:
    """See `Coding`. Companions are "scale" and "zero", (N, G)."""

    group: int  # columns that share a scale; 0: all
    scale: str  # the type of scales, as headers have it
    align_bytes: int = 4
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return f"int4 (AWQ) in {f'groups of {self.group}' if self.group else 'whole rows'}"

    @property
    def dtype(self) -> str:
        return FLOATS[self.scale]

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Eight rows to a word."""
        return 4 * math.ceil(shape[0] / 8) * shape[1]

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """A scale and a byte for each group."""
        return shape[0] * self._num_groups(shape) * (FLOAT_BYTES[self.scale] + 1)

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`."""
        from offload.kernels.expand_columns import NIBBLES

        num_rows, num_groups = shape[0], self._num_groups(shape)
        scale = checked_scale(".scales", companions[".scales"], (num_groups, num_rows))
        stored = unpacked(companions[".qzeros"], 4, 1, num_rows)
        require_shape(".qzeros unpacked", stored.shape, (num_groups, num_rows))
        zero = stored.unflatten(1, (-1, 8))[..., list(NIBBLES)].flatten(1)
        return {"scale": scale.t().contiguous(), "zero": zero.t().contiguous()}

    def expand(
        self, stored_B: "Tensor", companions: "Mapping[str, Tensor]", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        import torch

        words_CK = stored_B.view(torch.int32).view(out.shape[1], -1).t()
        expansion.columns(words_CK, companions["scale"], companions["zero"], self.group or out.shape[1], out)

    def _num_groups(self, shape: Sequence[int]) -> int:
        return math.ceil(shape[1] / self.group) if self.group else 1


def _recognise(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found | None:
    words = stored.get(".qweight")
    if words is None:
        return None
    require(stored, (".scales", ".qzeros"), ".qweight")
    require_matrices(stored, _SUFFIXES)
    require_integers(stored, (".qweight", ".qzeros"))
    (num_columns, num_words), (num_groups, num_rows) = words.shape, stored[".scales"].shape
    require_shape(".scales", (num_groups, num_rows), (num_groups, 8 * num_words))
    require_shape(".qzeros", stored[".qzeros"].shape, (num_groups, num_words))
    group = group_size(num_columns, num_groups, settings.get("group_size"))
    coding = Awq(group, float_type(stored, ".scales"))
    return Found(coding, (num_rows, num_columns), (".qweight",), (".qzeros", ".scales"))


FORMAT = Format(_SUFFIXES, _recognise)
