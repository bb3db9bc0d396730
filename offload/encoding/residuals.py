"""bfloat16 weights stored without loss as a 4-bit copy, kept in memory, and a streamed residual.

`offload pack --beside int4` writes them; `kernels/residual_layout.py` has the layout. For a matrix
X, `X.residual.low` (U8, of its shape), `X.residual.near`, `X.residual.far` and `X.residual.escapes`
(U8) are streamed as one run. In memory stay `X.copy.words` and `X.copy.scales`, with which a draft
multiplies, and `X.residual.code`: a CRC-32 of these two, and for each tile the bytes of both
symbols and the number of escapes. Invariant: a residual is only expanded with the copy that it was
made from.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.encoding.base import (
    NOWHERE,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    must,
    require_shape,
)
from offload.kernels.residual_layout import TILE_ROWS, num_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

WORDS = (".residual.low", ".residual.near", ".residual.far", ".residual.escapes")
COMPANIONS = (".copy.words", ".copy.scales", ".residual.code")
_STEM = ".weight"
_WORDS = tuple(_STEM + suffix for suffix in WORDS)
_COMPANIONS = tuple(_STEM + suffix for suffix in COMPANIONS)
ALIGN_BYTES = 64
_AGAIN = "pack it again"
DAMAGED = "it was damaged, pack the model again"
# 64 is as good as 32 by tokens per sweep, with half as many scales; a group's own range beats a
# symmetric one (docs/drafts.md)
_GROUPS = (64, 32)


def group_of(num_columns: int) -> int | None:
    """Return the columns that share a scale at 4 bits; None: no size divides them, so use 8 bits."""
    return next((group for group in _GROUPS if num_columns % group == 0), None)


def padded_rows(num_rows: int) -> int:
    """Return the rows that a matrix of `num_rows` has at 4 bits, padding included."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS


def held_bytes(shape: tuple[int, ...], bits: int, item_bytes: int) -> int:
    """Return the bytes of one quantised matrix (out, in), computed in numbers of `item_bytes`."""
    num_rows, num_columns = shape
    group = group_of(num_columns) if bits == 4 else None
    if group is None:
        return num_rows * (num_columns + item_bytes)
    return padded_rows(num_rows) * (num_columns // 2 + num_columns // group * 2 * item_bytes)


def copy_sum(word_NK: "Tensor", scale_GN2: "Tensor") -> int:
    """Return a CRC-32 of a copy."""
    import torch

    return zlib.crc32(scale_GN2.view(torch.uint8).numpy().data, zlib.crc32(word_NK.numpy().data))


@dataclass(frozen=True, slots=True)
class Residual:
    """See `Coding`."""

    # bytes of symbols and escapes, with padding; not compared, since the expansion is the same
    symbol_bytes: int = field(compare=False)
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return "bfloat16 without loss beside int4"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of low bytes, symbols and escapes."""
        return math.prod(shape) + self.symbol_bytes

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the copy, and of starts (int64)."""
        num_rows, num_columns = shape
        starts_bytes = 3 * 8 * (num_tiles(num_rows, num_columns) + 1)
        return held_bytes((num_rows, num_columns), 4, 2) + starts_bytes

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Return the copy in this processor's layout. Raises `ValueError` if it is another copy."""
        import torch

        from offload.kernels.int4_blocks import in_layout

        word_NK, scale_GN2, code = companions.values()
        num_rows, num_columns = shape
        num_counts = 3 * num_tiles(num_rows, num_columns)
        requirement = f"its code must be a sum and {num_counts} counts"
        must(len(code) == 1 + num_counts, requirement, f"has {len(code)} numbers", DAMAGED)
        requirement = "the copy must be the one that the residual was made from"
        is_same = copy_sum(word_NK, scale_GN2) == int(code[0])
        must(is_same, requirement, "its checksum differs", DAMAGED)
        count_3T = code[1:].view(3, -1)
        start_3T = torch.nn.functional.pad(count_3T.cumsum(1), (1, 0))
        self._check_counts(count_3T, TILE_ROWS * num_columns)
        word_BKH = in_layout(word_NK.view(-1, num_columns, TILE_ROWS // 2))
        return {"word": word_BKH, "scale": scale_GN2, "start": start_3T}

    def _check_counts(self, count_3T: "Tensor", most: int) -> None:
        """Raise `ValueError` unless counts are 0 to `most` and fill the symbols' bytes.

        Counts are bytes of both symbols, and escapes of 3 bytes each.
        """
        small_bytes, large_bytes, num_escapes = count_3T.sum(1).tolist()
        used_bytes = small_bytes + large_bytes + 3 * num_escapes
        is_odd = bool(((count_3T < 0) | (count_3T > most)).any())
        if is_odd or not 0 <= self.symbol_bytes - used_bytes < ALIGN_BYTES:
            mismatch = f"{used_bytes} bytes of symbols are not what {self.symbol_bytes} bytes hold"
            raise ValueError(f"{mismatch}: {DAMAGED}")

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """Fill `out` with the original numbers."""
        copy = (companions["word"], companions["scale"])
        expansion.residuals(stored_B, *copy, companions["start"], out)


def _recognise(stored: Headers, _settings: Settings, _: Site = NOWHERE) -> RecognisedWeight | None:
    """Recognise a matrix stored with a copy."""
    names = (*_WORDS, *_COMPANIONS)
    if not any(name in stored for name in names):
        return None
    missing = [name for name in names if name not in stored]
    must(not missing, "a residual needs all of its tensors", f"no {', '.join(missing)}", _AGAIN)
    low, *symbols = (stored[name] for name in _WORDS)
    words, scales, code = (stored[name] for name in _COMPANIONS)
    shape = low.shape
    types = [stored[name].dtype for name in names]
    wanted = [*["U8"] * len(WORDS), "U8", "BF16", "I64"]
    group = group_of(shape[1]) if len(shape) == 2 else None
    is_known = types == wanted and group is not None and len(code.shape) == 1
    form = f"a residual of shape {list(shape)} in {', '.join(types)}"
    must(is_known, "packed as by another version", form, _AGAIN)
    assert group is not None, "else it is refused"
    num_rows = padded_rows(shape[0])
    require_shape(_COMPANIONS[0], words.shape, (num_rows, shape[1] // 2))
    require_shape(_COMPANIONS[1], scales.shape, (shape[1] // group, num_rows, 2))
    coding = Residual(sum(math.prod(symbol.shape) for symbol in symbols))
    return RecognisedWeight(coding, shape, _WORDS, _COMPANIONS)


RESIDUAL = Format((*_WORDS, *_COMPANIONS), _recognise, _STEM)
