"""Packed integers with scales and zero points: what formats share, and integers in whole bytes.

The file of each format has the layout of its words and the names of its companions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.encoding.base import ANOTHER, ENCODINGS, Headers, Tensors, checked_scale, must

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion


@dataclass(frozen=True)
class Integers:
    """The part of a `Coding` that does not depend on the layout of words.

    Companions are "scale" (N, G) as stored, "zero" and "added" (N, G), and "order" (K,), int32: the
    scale of each column.
    """

    bits: int
    group: int  # columns that share a scale; 0: all
    scale: str  # header type of the scales
    zero_bytes: int = 0  # bits of a zero point; 0: none
    is_ordered: bool = False  # whether a list gives the group of each column
    align_bytes: int = 4
    is_transposed: bool = False
    codes_per_word: int = 0  # bits before the first code of a word; 0: codes without gaps

    @property
    def name(self) -> str:
        groups = f"groups of {self.group}" if self.group else "whole rows"
        return f"int{self.bits} in {groups}{', reordered' if self.is_ordered else ''}"

    @property
    def dtype(self) -> str:
        return ENCODINGS[self.scale].dtype

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of whole words per row, or per column."""
        per_word = self.codes_per_word
        num_words = math.ceil(shape[1] / per_word if per_word else shape[1] * self.bits / 32)
        return shape[0] * 4 * num_words

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of scales, zero points and order of one matrix.

        Stacks do not occur: experts are stored one by one.
        """
        each = ENCODINGS[self.scale].align_bytes + self.zero_bytes
        return math.prod(self.grid(shape)) * each + (4 * shape[1] if self.is_ordered else 0)

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        group = companions["order"] if self.is_ordered else self.group or out.shape[1]
        words_NW = self.words(stored_B, out.shape)
        factors = (companions["scale"], companions.get("zero"))
        kinds = {"added_NG": companions.get("added"), "codes_per_word": self.codes_per_word}
        expansion.integers(words_NW, self.bits, *factors, group, out, **kinds)

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return a view of the words, row by row."""
        import torch

        return stored_B.view(torch.int32).view(shape[0], -1)

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the scales: rows, and groups of each row."""
        return shape[0], math.ceil(shape[1] / self.group) if self.group else 1


@dataclass(frozen=True)
class ByteIntegers(Integers):
    """See `Coding`: `int-quantized`, with signed bytes and possibly one scale for all."""

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return one byte for each weight."""
        return math.prod(shape)

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        grid = self.grid(shape)
        given = {suffix.removeprefix(".weight_"): each for suffix, each in companions.items()}
        ready = {"scale": checked_scale(".weight_scale", spread(given["scale"], grid), grid)}
        if self.zero_bytes:
            zero = spread(given["zero_point"], grid)
            ready["zero"] = checked_scale(".weight_zero_point", zero, grid)
        return ready

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return the signed bytes."""
        import torch

        return stored_B.view(torch.int8).view(tuple(shape))


def spread(stored: "Tensor", grid: tuple[int, int]) -> "Tensor":
    """Return one scale for each row and group if the file has a single one."""
    return stored.expand(grid) if stored.numel() == 1 else stored


def float_type(stored: Headers, suffix: str) -> str:
    """Return the header's type of scales. Raises `ValueError` unless it is floating-point."""
    dtype = stored[suffix].dtype
    requirement = f"{suffix} must be of type {', '.join(ENCODINGS)}"
    must(dtype in ENCODINGS, requirement, f"is {dtype}", ANOTHER)
    return dtype


def matrix_shape(stored: Headers, suffix: str) -> tuple[int, int]:
    """Return the shape of a matrix. Raises `ValueError` unless it has two dimensions."""
    shape = stored[suffix].shape
    is_matrix = len(shape) == 2 and 0 not in shape
    must(is_matrix, f"{suffix} must have two dimensions", f"has shape {list(shape)}")
    return shape[0], shape[1]


def require_integers(stored: Headers, suffixes: Sequence[str]) -> None:
    """Raise `ValueError` unless these, where present, are I32; `.g_idx` may be I64."""
    for suffix in suffixes:
        known = ("I32", "I64") if suffix.endswith("g_idx") else ("I32",)
        dtype = stored[suffix].dtype if suffix in stored else "I32"
        requirement = f"{suffix} must be of type {' or '.join(known)}"
        must(dtype in known, requirement, f"is {dtype}", ANOTHER)


def group_size(num_columns: int, num_groups: int, said: object) -> int:
    """Return the number of columns that share a scale: the config's, or a divisor; 0 for all.

    Raises `ValueError` if the number of groups does not fit the columns.
    """
    if num_groups == 1:
        return 0
    if type(said) is int and said > 0 and math.ceil(num_columns / said) == num_groups:
        return said
    if num_groups <= 0 or num_columns % num_groups:
        requirement = f"group_size must divide {num_columns} columns into {num_groups} groups"
        must(False, requirement, f"is {said!r:.20}", "mend config.json")
    return num_columns // num_groups


def checked_order(suffix: str, order: "Tensor", num_columns: int, num_groups: int) -> "Tensor":
    """Return the index (int32) of each column's scale. Raises `ValueError` for a bad index."""
    import torch

    count = order.numel()
    must(count == num_columns, f"{suffix} must have {num_columns} numbers", f"has {count}")
    if num_columns:
        least = int(order.min())
        most = int(order.max())
        is_inside = least >= 0 and most < num_groups
        must(is_inside, f"{suffix} must lie in 0..{num_groups - 1}", f"has {least}..{most}")
    return order.reshape(num_columns).to(torch.int32)


def unpacked(
    words: "Tensor", bits: int, dim: int, num_codes: int, codes_per_word: int = 0
) -> "Tensor":
    """Return the codes (uint8) packed in int32 words along a dimension, lowest bits first."""
    import torch

    code_C = torch.arange(num_codes)
    bit_C = bits * code_C
    if codes_per_word:
        bit_C = 32 * (code_C // codes_per_word) + bits * (code_C % codes_per_word)
    word = words.movedim(dim, -1).long() & 0xFFFFFFFF
    last = word.shape[-1] - 1
    # a code may end in the next word
    low = word[..., (bit_C // 32).clamp(max=last)]
    high = word[..., (bit_C // 32 + 1).clamp(max=last)]
    code = ((low | high << 32) >> bit_C % 32) & ((1 << bits) - 1)
    return code.movedim(-1, dim).to(torch.uint8).contiguous()
