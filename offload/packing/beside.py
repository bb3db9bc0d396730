"""Matrices in a packed file whose copy of 4 bits lies beside what it does not say of them.

Rows are coded some tiles at a time, and decoded so. The copy lies behind all words of its file, as
it stays in memory. `encoding/residuals.py` has the tensors.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.files import PART_BYTES
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.residuals import (
    ALIGN_BYTES,
    COMPANIONS,
    WORDS,
    Residual,
    copy_sum,
    group_of,
)
from offload.errors import UserError
from offload.kernels.encode_residuals import ResidualWords, encode_residuals
from offload.kernels.expand_residuals import expand_residuals
from offload.kernels.int4_blocks import FILE_LAYOUT, Int4Words, encode_int4
from offload.kernels.residual_layout import TILE_ROWS, num_tiles
from offload.packing.reading import PartFile
from offload.packing.words import Part


def is_residual(entry: TensorEntry) -> bool:
    """Return True if a stored tensor is a matrix beside its copy."""
    return entry.coded is not None and isinstance(entry.coded.coding, Residual)


def _rows_at_once(shape: tuple[int, ...]) -> int:
    """Return the rows of a part: whole tiles, at most `PART_BYTES` of bfloat16 or one of tiles."""
    return max(1, PART_BYTES // (2 * shape[1] * TILE_ROWS)) * TILE_ROWS


def part_bytes(shape: tuple[int, ...]) -> int:
    """Return the original bytes of each part of a matrix but the last."""
    return 2 * shape[1] * _rows_at_once(shape)


SUFFIXES = (*WORDS, *COMPANIONS)


class BesideWords(NamedTuple):
    """Some rows of a matrix, encoded: their 4-bit copy and the residual beside it."""

    copy: Int4Words
    residual: ResidualWords


def encode_beside(weight_NK: Tensor) -> BesideWords:
    """Encode some rows as a 4-bit copy and the residual beside it."""
    num_columns = weight_NK.shape[1]
    group = group_of(num_columns)
    assert group is not None, "others are packed otherwise"
    copy = encode_int4(weight_NK, group, FILE_LAYOUT)
    if not copy.scale_GN2.isfinite().all():
        # one NaN would cost its group all levels
        finite_NK = torch.where(weight_NK.isfinite(), weight_NK, 0)
        copy = encode_int4(finite_NK, group, FILE_LAYOUT)
    word_BKH = copy.word_NK.view(-1, num_columns, TILE_ROWS // 2)
    return BesideWords(copy, encode_residuals(weight_NK, word_BKH, copy.scale_GN2))


class BesideParts:
    """What is kept of a matrix until all of it is coded: all but its low bytes."""

    def __init__(self) -> None:
        self._parts = list[BesideWords]()

    def add(self, words: BesideWords) -> np.ndarray:
        """Take a part, and return its low bytes."""
        low_NK = words.residual.low_NK
        self._parts.append(words._replace(residual=words.residual._replace(low_NK=low_NK[:0])))
        return low_NK.numpy()

    def symbols(self, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return both symbols and the escapes, padded so that what begins at `end` is aligned."""
        residuals = [part.residual for part in self._parts]
        near_B = torch.cat([residual.near_B for residual in residuals])
        far_B = torch.cat([residual.far_B for residual in residuals])
        escape_B = torch.cat([residual.escape_3E for residual in residuals], 1).flatten()
        fill_bytes = -(end + len(near_B) + len(far_B) + len(escape_B)) % ALIGN_BYTES
        return near_B, far_B, torch.nn.functional.pad(escape_B, (0, fill_bytes))

    def companions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return words and scales of the copy, and the code."""
        word_NK = torch.cat([part.copy.word_NK for part in self._parts])
        scale_GN2 = torch.cat([part.copy.scale_GN2 for part in self._parts], 1)
        count_3T = torch.cat([part.residual.count_3T for part in self._parts], 1)
        crc = torch.tensor([copy_sum(word_NK, scale_GN2)])
        return word_NK, scale_GN2, torch.cat((crc, count_3T.flatten()))


def decoded_parts(
    where: str, entry: TensorEntry, companions: Sequence[Tensor], file: PartFile
) -> Iterator[Part]:
    """Yield the parts of a matrix. Raises `UserError` for another copy."""
    coding = None if entry.coded is None else entry.coded.coding
    assert isinstance(coding, Residual), "no other words were looked for"
    num_rows, num_columns = entry.shape
    try:
        ready = coding.prepare(dict(zip(COMPANIONS, companions, strict=True)), entry.shape)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    start_3T = ready["start"]
    near_bytes, far_bytes, num_escapes = start_3T[:, -1].tolist()
    used_bytes = near_bytes + far_bytes + 3 * num_escapes
    symbols_lo = entry.lo + num_rows * num_columns
    symbol_B = torch.from_numpy(file.copy_of(symbols_lo, symbols_lo + used_bytes))
    near_B, far_B, escape_B = symbol_B.split((near_bytes, far_bytes, 3 * num_escapes))
    list_3E = escape_B.view(3, -1)
    blocks_per_tile = TILE_ROWS // (2 * ready["word"].shape[2])
    for row in range(0, num_rows, _rows_at_once(entry.shape)):
        after = min(row + _rows_at_once(entry.shape), num_rows)
        tiles = num_tiles(row, num_columns), num_tiles(after, num_columns)
        part_3T = start_3T[:, tiles[0] : tiles[1] + 1]
        spans = [slice(lo, hi) for lo, hi in part_3T[:, [0, -1]].tolist()]
        part_B = torch.cat((near_B[spans[0]], far_B[spans[1]], list_3E[:, spans[2]].flatten()))
        blocks = slice(row // TILE_ROWS * blocks_per_tile, -(-after // TILE_ROWS) * blocks_per_tile)
        copy = (
            ready["word"][blocks],
            ready["scale"][:, row : row + (blocks.stop - blocks.start) * TILE_ROWS],
        )
        place = (entry.lo + row * num_columns, entry.lo + after * num_columns)
        fill = partial(_decode, file, place, part_B, copy, part_3T - part_3T[:, :1])
        yield Part(2 * (place[1] - place[0]), fill)


def _decode(
    file: PartFile,
    place: tuple[int, int],
    symbol_B: Tensor,
    copy: tuple[Tensor, Tensor],
    start_3T: Tensor,
    out: np.ndarray,
) -> None:
    """Decode the rows whose low bytes lie at this place of the file."""
    (stored,) = file.read(place, behind=symbol_B.numpy())
    out_NK = torch.from_numpy(out).view(torch.bfloat16).view(-1, copy[0].shape[1])
    expand_residuals(torch.from_numpy(stored), *copy, start_3T, out_NK)
