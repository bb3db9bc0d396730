"""Keys and values in eight bits: each row of a head as words and one factor.

A row is coded by its own numbers alone, and every row that attends to it, even in the same pass,
reads the expanded words. So a text does not depend on its tree, as without coding, but it differs
from the text with the model's own type.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

KEYS = "keys"
VALUES = "values"
SCALES = "_scales"  # suffixes of the coded states' names
# positions that are expanded at once, through float32
_CHUNK_ROWS = 512


class RowCoding(NamedTuple):
    """One way to code a row."""

    most: float  # the largest word, before the factor
    dtype: torch.dtype

    def coded(self, states: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the coded form of states (1, G, T, K) by name: uint8 words, (1, G, T, 1) factors."""
        for name, rows in states.items():
            if name not in (KEYS, VALUES):
                yield name, rows
                continue
            wide = rows.float()
            scale = wide.abs().amax(3, keepdim=True) / self.most
            # the factor of a row of zeros, or nearly zeros
            scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
            words = (wide / scale).clamp_(-self.most, self.most)
            words = words if self.dtype.is_floating_point else words.round_()
            yield name, words.to(self.dtype).view(torch.uint8)
            yield f"{name}{SCALES}", scale

    def expanded(self, words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers (1, G, S, K) that words stand for."""
        numbers = torch.empty(words.shape, dtype=dtype, device=words.device)
        parts = (tensor.split(_CHUNK_ROWS, 2) for tensor in (numbers, words, scale))
        for number, word, factor in zip(*parts, strict=True):
            number.copy_(word.view(self.dtype).float().mul_(factor))
        return numbers


CODINGS = {"int8": RowCoding(127.0, torch.int8), "fp8": RowCoding(448.0, torch.float8_e4m3fn)}
