"""The instructions that expand weights of 4 bits in blocks of rows: see `int4_blocks`.

A column of a block is read once: the rows of its first half lie in the lower bits of bytes, those of
the second in the upper ones. Product and sum are float32, rounded one after the other, then once to
the type that is written.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import torch

from offload.kernels.machine_code import EIGHT, Code, CompiledCode, compiled, fused_lanes

EXPAND = "expand"
# of a block at once, so that writes stay in cache and few pages
_TILE_COLUMNS = 16
_BITS = 4
_MIDDLE = 8
_LOCK = Lock()


def code_for(dtype: torch.dtype, half: int) -> Callable[..., None]:
    """Return expand(call, lo, hi), which fills columns [lo, hi).

    `call` is the address of where words, float32 scales and offsets (G, N) and `out` (K, N) lie, then
    the number of blocks, of columns, and of columns that share scales.

    Args:
        dtype: of numbers that are expanded.
        half: rows of half a block, a multiple of 8.
    """
    with _LOCK:
        return _compiled(dtype, half).functions[EXPAND]


@cache
def _compiled(dtype: torch.dtype, half: int) -> CompiledCode:
    code = _ExpansionCode(dtype, half)
    code.write()
    return compiled(code.text(), {EXPAND: [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]})


class _ExpansionCode(Code):
    """Loops over tiles of columns, blocks, columns, and eight rows."""

    def __init__(self, dtype: torch.dtype, half: int) -> None:
        super().__init__(dtype, fused_lanes())
        self._half = half
        byte = self._ir.IntType(8)
        self._bytes = byte.as_pointer()
        self._byte_words = self._ir.VectorType(byte, EIGHT)

    def write(self) -> None:
        """Write the function."""
        function = self._begin(EXPAND, [self._index.as_pointer(), self._index, self._index])
        call, lo, hi = function.args
        kinds = [self._bytes, self._number, self._number, self._narrow, *[self._index] * 3]
        *given, num_blocks, num_columns, group = self._arguments(call, kinds)

        def tile(begin: Any) -> None:
            end = self._min(self._add(begin, _TILE_COLUMNS), hi)
            self._each(0, num_blocks, 1, lambda block: self._each(begin, end, 1, column_of(block)))

        def column_of(block: Any) -> Callable[[Any], None]:
            def column(at: Any) -> None:
                num_rows = self._times(num_blocks, 2 * self._half)
                line = self._times(block, 2 * self._half)
                nth = self._add(self._times(block, num_columns), at)
                scales = self._add(self._times(self._builder.udiv(at, group), num_rows), line)
                to = self._add(self._times(at, num_rows), line)
                self._expand(given, self._times(nth, self._half), scales, to)

            return column

        self._each(lo, hi, _TILE_COLUMNS, tile)
        self._builder.ret_void()

    def _expand(self, given: list[Any], source: Any, scales: Any, to: Any) -> None:
        """Expand a column of a block, from places of its words, scales and numbers."""
        builder = self._builder
        word, scale, offset, out = given
        for lane in range(0, self._half, EIGHT):
            stored = self._load(self._at(word, self._add(source, lane)), self._byte_words, 1)
            words = builder.zext(stored, self._words)
            low = builder.and_(words, self._words([(1 << _BITS) - 1] * EIGHT))
            high = builder.lshr(words, self._words([_BITS] * EIGHT))
            for codes, row in ((low, lane), (high, self._half + lane)):
                level = builder.sub(codes, self._words([_MIDDLE] * EIGHT))
                place = self._add(scales, row)
                factor, addend = (
                    self._load(self._at(part, place), self._eight) for part in (scale, offset)
                )
                number = builder.fmul(builder.sitofp(level, self._eight), factor)
                number = builder.fadd(number, addend)
                if self._dtype != torch.float32:
                    number = self._round_to_16_bits(number)
                self._store(number, self._at(out, self._add(to, row)), 2)
