"""Integers of 4 and 8 bits as compressed-tensors stores them: `pack-quantized`, and `int-quantized` of signed bytes.

Zero points are packed along rows of the weight, words along its columns. The true number of columns is data
(`weight_shape`); headers only say how many words there are, so the last of them may be padded.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import (
    AGAIN,
    checked_order,
    checked_scale,
    config_weights,
    float_type,
    group_size,
    matrix_shape,
    require,
    require_integers,
    require_shape,
    unpacked,
)
from offload.encoding.integers import Integers

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = (
    *(".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    *(".weight", ".input_scale", ".input_zero_point"),
)
_BITS = (4, 8)


@dataclass(frozen=True)
class Packed(Integers):
    """See `Coding`: `pack-quantized`."""

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`; an order of -1 everywhere is none: groups lie one behind the other."""
        import torch

        said = companions.get(".weight_shape")
        if said is not None and said.tolist() != list(shape):
            what = f"{list(shape)}, is {said.tolist()}"
            raise ValueError(f".weight_shape must be {what}: give the model's own config.json")
        grid = self.grid(shape)
        ready = {"scale": checked_scale(".weight_scale", companions[".weight_scale"], grid)}
        if self.zero_bytes:
            ready["zero"] = unpacked(companions[".weight_zero_point"], self.bits, 0, shape[0])
            require_shape(".weight_zero_point unpacked", ready["zero"].shape, grid)
        if self.is_ordered:
            order = companions[".weight_g_idx"]
            if bool((order == -1).all()):
                order = torch.arange(shape[1]) // self.group
            ready["order"] = checked_order(".weight_g_idx", order, shape[1], grid[1])
        return ready


@dataclass(frozen=True)
class Bytes(Integers):
    """See `Coding`: `int-quantized`, whose bytes have a sign and whose scale may be one for all."""

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """One byte each."""
        return math.prod(shape)

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`."""
        grid = self.grid(shape)
        given = {suffix.removeprefix(".weight_"): one for suffix, one in companions.items()}
        ready = {"scale": checked_scale(".weight_scale", _spread(given["scale"], grid), grid)}
        if self.zero_bytes:
            ready["zero"] = checked_scale(".weight_zero_point", _spread(given["zero_point"], grid), grid)
        return ready

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """The signed bytes."""
        import torch

        return stored_B.view(torch.int8).view(tuple(shape))


def _spread(stored: "Tensor", grid: tuple[int, int]) -> "Tensor":
    return stored.expand(grid) if stored.numel() == 1 else stored


def _recognise(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found | None:
    packed, weight = stored.get(".weight_packed"), stored.get(".weight")
    if packed is not None and packed.dtype == "I32":
        return _packed(stored, settings)
    if weight is not None and weight.dtype == "I8" and ".weight_scale" in stored:
        return _bytes(stored, settings)
    return None


def _packed(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found:
    require(stored, (".weight_scale",), ".weight_packed")
    require_integers(stored, (".weight_zero_point", ".weight_g_idx"))
    (num_rows, num_words), scale = (matrix_shape(stored, one) for one in (".weight_packed", ".weight_scale"))
    require_shape(".weight_scale", scale, (num_rows, scale[1]))
    bits, said = _bits_and_group(num_words, scale[1], settings)
    num_columns = num_words * 32 // bits
    # Columns that pad the last word may seem to need a group more or not to divide; then the config's size holds.
    group = said or group_size(num_columns, scale[1], None)
    has_zero, is_ordered = ".weight_zero_point" in stored, ".weight_g_idx" in stored and group > 0
    if has_zero:
        wanted = (math.ceil(num_rows * bits / 32), scale[1])
        require_shape(".weight_zero_point", stored[".weight_zero_point"].shape, wanted)
    coding = Packed(bits, group, float_type(stored, ".weight_scale"), int(has_zero), is_ordered)
    used = {".weight_scale", ".weight_shape", ".weight_zero_point"} | ({".weight_g_idx"} if is_ordered else set())
    companions = tuple(suffix for suffix in _SUFFIXES if suffix in stored and suffix in used)
    return Found(coding, (num_rows, num_columns), (".weight_packed",), companions)


def _bits_and_group(num_words: int, num_groups: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """What config groups say that fit these words and scales; they may be told by names, which tensors need not."""
    fitting, others = set(), set()
    for weights in _weights(settings):
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if type(bits) is not int or bits not in _BITS:
            others.add(f"{bits!r:.20}")
            continue
        if size is not None and type(size) is not int:
            continue
        per_word = 32 // bits
        if num_groups == 1 and (size is None or size < 0 or num_words <= math.ceil(size / per_word)):
            fitting.add((bits, 0))
        elif size is not None and size > 0:
            most, least = num_words * per_word, (num_words - 1) * per_word + 1
            if math.ceil(least / size) <= num_groups <= math.ceil(most / size):
                fitting.add((bits, size))
    if len(fitting) == 1:
        return next(iter(fitting))
    if not fitting and others:
        raise ValueError(f"num_bits must be one of {_BITS}, got {others.pop()}: take a checkpoint of 4 or 8 bits")
    what = f"{num_words} words and {num_groups} scales a row, {f'{len(fitting)} do' if fitting else 'none does'}"
    raise ValueError(f"one of config_groups must fit {what}: mend config.json")


def _weights(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (one for one in config_weights(settings) if one.get("type", "int") == "int")


def _bytes(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found:
    shape, scale = matrix_shape(stored, ".weight"), stored[".weight_scale"].shape
    if math.prod(scale) == 1:
        group = 0
    else:
        require_shape(".weight_scale", scale[:1], shape[:1])
        said = next((weights.get("group_size") for weights in _weights(settings)), None)
        group = group_size(shape[1], math.prod(scale[1:]), said)
    zero = stored.get(".weight_zero_point")
    if zero is not None and zero.dtype != "I8":
        raise ValueError(f".weight_zero_point must be of type I8, is {zero.dtype}: {AGAIN}")
    coding = Bytes(8, group, float_type(stored, ".weight_scale"), int(zero is not None), align_bytes=1)
    companions = tuple(suffix for suffix in (".weight_scale", ".weight_zero_point") if suffix in stored)
    return Found(coding, shape, (".weight",), companions)


FORMAT = Format(_SUFFIXES, _recognise)
