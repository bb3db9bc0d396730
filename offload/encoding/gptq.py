"""Integers of 4 and 8 bits as GPTQ's libraries store them: words of one column each, first and second version.

The first version stores zero points less one. Libraries differ where that gives -1 of an all-ones code (15 of 4 bits):
AutoGPTQ reads 16, its older kernel 0, GPTQModel lets it carry into the neighbour; here it is 16, as one more than is
stored. Shapes tell GPTQ from AWQ, and how many bits a module has, whatever the config says of single modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import checked_order, float_type, group_size, packed_shapes, require_shape
from offload.encoding.integers import Integers

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_BITS = (4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class Gptq(Integers):
    """See `Coding`."""

    added: int = 1  # to stored zero points

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`; without `desc_act` groups must lie one behind the other."""
        import torch

        scale, zero = self.turned(companions, shape)
        zero = zero.to(torch.uint8 if self.zero_bytes == 1 else torch.int16) + self.added
        ready, num_columns = {"scale": scale, "zero": zero.contiguous()}, shape[1]
        if ".g_idx" in companions:
            order = checked_order(".g_idx", companions[".g_idx"], num_columns, scale.shape[1])
            if self.is_ordered:
                return {**ready, "order": order}
            if not torch.equal(order, (torch.arange(num_columns) // (self.group or num_columns)).int()):
                raise ValueError(".g_idx must be in order where desc_act is false: set desc_act to true in config.json")
        return ready

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Words of one row of the weight lie in a column."""
        import torch

        return stored_B.view(torch.int32).view(-1, shape[0]).t()


def _recognise(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found | None:
    shapes = packed_shapes(stored)
    if shapes is None or shapes[0][1] != shapes[2][1]:
        return None
    (num_words, num_rows), zeros, (num_groups, _) = shapes
    bits = zeros[1] * 32 / num_rows
    if bits not in _BITS:
        raise ValueError(f"GPTQ weights must have {_BITS} bits, have {bits:g}: take a checkpoint of 4 bits")
    require_shape(".qzeros", zeros, (num_groups, num_rows * int(bits) // 32))
    num_columns = num_words * 32 // int(bits)
    is_ordered = ".g_idx" in stored and num_groups > 1 and bool(settings.get("desc_act"))
    group = group_size(num_columns, num_groups, settings.get("group_size"))
    added = _added(settings)
    zero_bytes = 2 if added and bits == 8 else 1  # 255 + 1
    scale = float_type(stored, ".scales")
    coding = Gptq(int(bits), group, scale, zero_bytes, is_ordered, added=added)
    companions = tuple(suffix for suffix in _SUFFIXES[1:] if suffix in stored)
    return Found(coding, (num_rows, num_columns), (".qweight",), companions)


def _added(settings: Mapping[str, Any]) -> int:
    """What zero points lack, by the version of the format."""
    version = settings.get("checkpoint_format") or "gptq"
    if not isinstance(version, str) or version not in _VERSIONS:
        raise ValueError(
            f"checkpoint_format of GPTQ must be one of {', '.join(_VERSIONS)}, got {version!r:.40}: "
            "take a checkpoint of these"
        )
    return 2 - _VERSIONS[version]


FORMAT = Format(_SUFFIXES, _recognise)
