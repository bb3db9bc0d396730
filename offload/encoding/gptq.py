"""GPTQ's integers of 2, 3, 4 and 8 bits, and AWQ's of 4, which have tensors of the same names.

AWQ's `gemm` version packs eight rows of a column into a word, in a special order. GPTQ packs the
columns of a row without gaps, so a 3-bit code may begin in one word and end in the next. GPTQ's
first version stores zero points less one; an all-ones code (15 for 4 bits) is 16 here as in
AutoGPTQ, while its older kernel reads 0. Shapes tell GPTQ from AWQ, and the bits of a module,
whatever the config says of single modules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.encoding.base import (
    ANOTHER,
    NOWHERE,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    checked_scale,
    must,
    require,
    require_shape,
)
from offload.encoding.integers import (
    Integers,
    checked_order,
    float_type,
    group_size,
    matrix_shape,
    require_integers,
    unpacked,
)
from offload.errors import ensure

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

VERSION_KEYS = ("format", "checkpoint_format")
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_BITS = (2, 3, 4, 8)
_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_AUTO_ROUND = ("auto-round", "intel/auto-round")


@dataclass(frozen=True)
class _Columns(Integers):
    """Shared by both formats: the file has the weight's rows as columns."""

    def transposed(self, companions: Tensors, shape: Sequence[int]) -> "tuple[Tensor, Tensor]":
        """Return scales and unpacked zero points (uint8), (N, G) each, from the file's (G, N)."""
        num_rows, num_groups = self.grid(shape)
        scale = checked_scale(".scales", companions[".scales"], (num_groups, num_rows))
        zero = unpacked(companions[".qzeros"], self.bits, 1, num_rows)
        require_shape(".qzeros unpacked", zero.shape, (num_groups, num_rows))
        return scale.t().contiguous(), zero.t()


@dataclass(frozen=True)
class Awq(_Columns):
    """See `Coding`."""

    @property
    def name(self) -> str:
        return super().name.replace("int4", "int4 (AWQ)")

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of words of eight rows each."""
        return 4 * math.ceil(shape[0] / 8) * shape[1]

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        from offload.kernels.expand_columns import NIBBLES

        scale, zero = self.transposed(companions, shape)
        in_order = zero.unflatten(0, (-1, 8))[:, list(NIBBLES)].flatten(0, 1)
        return {"scale": scale, "zero": in_order.contiguous()}

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        import torch

        words_CK = stored_B.view(torch.int32).view(out.shape[1], -1).t()
        group = self.group or out.shape[1]
        expansion.columns(words_CK, companions["scale"], companions["zero"], group, out)


def _recognise_awq(
    stored: Headers, settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return an AWQ weight; None without its tensors. Raises `ValueError` for misfit shapes."""
    shapes = packed_shapes(stored)
    if shapes is None:
        return None
    (num_columns, num_words), zeros, (num_groups, num_rows) = shapes
    require_shape(".scales", (num_groups, num_rows), (num_groups, 8 * num_words))
    require_shape(".qzeros", zeros, (num_groups, num_words))
    group = group_size(num_columns, num_groups, settings.get("group_size"))
    coding = Awq(4, group, float_type(stored, ".scales"), zero_bytes=1)
    return RecognisedWeight(coding, (num_rows, num_columns), (".qweight",), (".qzeros", ".scales"))


AWQ = Format((".qweight", ".qzeros", ".scales"), _recognise_awq)


@dataclass(frozen=True)
class Gptq(_Columns):
    """See `Coding`."""

    added: int = 1  # number to add to stored zero points

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`; without `desc_act`, groups must be consecutive columns."""
        import torch

        scale, zero = self.transposed(companions, shape)
        zero = zero.to(torch.uint8 if self.zero_bytes == 1 else torch.int16) + self.added
        ready = {"scale": scale, "zero": zero.contiguous()}
        num_columns = shape[1]
        if ".g_idx" in companions:
            order = checked_order(".g_idx", companions[".g_idx"], num_columns, scale.shape[1])
            if self.is_ordered:
                return {**ready, "order": order}
            in_order = (torch.arange(num_columns) // (self.group or num_columns)).int()
            requirement = ".g_idx must be in order where desc_act is false"
            ensure(
                torch.equal(order, in_order), f"{requirement}: set desc_act to true in config.json"
            )
        return ready

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return a view of the words; its rows are the file's columns."""
        import torch

        return stored_B.view(torch.int32).view(-1, shape[0]).t()


def _recognise_gptq(
    stored: Headers, settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return a GPTQ weight; None if shapes are AWQ's. Raises `ValueError` for misfit shapes."""
    shapes = packed_shapes(stored)
    if shapes is None or shapes[0][1] != shapes[2][1]:
        return None
    (num_words, num_rows), zeros, scales = shapes
    num_groups = scales[0]
    bits = zeros[1] * 32 / num_rows
    requirement = f"GPTQ weights must have {_BITS} bits"
    must(bits in _BITS, requirement, f"have {bits:g}", "take a checkpoint of these")
    require_shape(".qzeros", zeros, (num_groups, num_rows * int(bits) // 32))
    requirement = f"a column of {num_words} words must have whole codes"
    must(num_words * 32 % bits == 0, requirement, f"by .qzeros they have {bits:g} bits")
    num_columns = num_words * 32 // int(bits)
    is_ordered = ".g_idx" in stored and num_groups > 1 and bool(settings.get("desc_act"))
    group = group_size(num_columns, num_groups, settings.get("group_size"))
    # AutoRound packs as GPTQ's first version, and uses `format` for something else
    added = 1 if settings.get("quant_method") in _AUTO_ROUND else 2 - gptq_version(settings)
    zero_bytes = 2 if added and bits == 8 else 1  # 255 + 1
    scale = float_type(stored, ".scales")
    coding = Gptq(int(bits), group, scale, zero_bytes, is_ordered, added=added)
    companions = tuple(suffix for suffix in _SUFFIXES[1:] if suffix in stored)
    return RecognisedWeight(coding, (num_rows, num_columns), (".qweight",), companions)


def gptq_version(settings: Settings) -> int:
    """Return the version of the format, 1 or 2.

    Current tools call it `format`; `checkpoint_format` is its old name. Raises `ValueError` for an
    unknown version, or if both names contradict each other.
    """
    given = {key: settings[key] for key in VERSION_KEYS if settings.get(key) is not None}
    versions = set[int]()
    for key, version in given.items():
        is_known = isinstance(version, str) and version in _VERSIONS
        requirement = f"{key} of GPTQ must be one of {', '.join(_VERSIONS)}"
        must(is_known, requirement, f"got {version!r:.40}", "take a checkpoint of these")
        versions.add(_VERSIONS[version])
    requirement = f"{' and '.join(VERSION_KEYS)} must name one version of GPTQ"
    must(len(versions) < 2, requirement, f"got {' and '.join(map(str, given.values()))}", ANOTHER)
    return min(versions, default=1)


GPTQ = Format(_SUFFIXES, _recognise_gptq)


def packed_shapes(stored: Headers) -> list[tuple[int, int]] | None:
    """Return the shapes of `.qweight`, `.qzeros` and `.scales`, which AWQ and GPTQ both have.

    Returns None without `.qweight`. Raises `ValueError` for a missing tensor, or one of a type or
    shape that neither format stores.
    """
    if ".qweight" not in stored:
        return None
    require(stored, (".scales", ".qzeros"), ".qweight")
    require_integers(stored, (".qweight", ".qzeros", ".g_idx"))
    return [matrix_shape(stored, suffix) for suffix in (".qweight", ".qzeros", ".scales")]
