"""The LLVM instructions that walk over tiles of weights beside a copy: see `residual_layout`.

The 4-bit codes of a tile lie column by column and are transposed into rows in the near cache. Then
`COLUMNS` columns of a row are taken at once. A *mask* is an integer with one bit for each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.kernels.machine_code import Code, fused_lanes
from offload.kernels.residual_layout import EMPTY_STEP, STEP, TILE_COLUMNS, TILE_ROWS

# columns that are taken at once; groups are multiples of them
COLUMNS = 32
# columns of codes that become rows at once
_SQUARE = 16
Given = Mapping[str, Any]


class TilePlace(NamedTuple):
    """Values of a tile: where it lies and how large it is, in rows and columns."""

    nth: Any
    first_row: Any
    num_rows: Any
    first_column: Any
    width: Any
    codes: Any


class GroupLevels(NamedTuple):
    """Values of a group of a row."""

    step: Any  # in all lanes, as the following two
    zero: Any
    first: Any  # the first number of level zero
    near_mask: Any  # 32 bits, none of them set where the group is empty


class ColumnPart(NamedTuple):
    """Values of some columns of a row: their place in the matrix and in the tile, and codes."""

    at: Any
    row: Any
    column: Any
    codes: Any
    group: GroupLevels


class TileCode(Code):
    """Writes loops over tiles, rows and columns, and the numbers that levels stand for.

    Args:
        dtype: of the expanded numbers.
        half: bytes of one column in a block of codes, of two rows each.
        group: columns that share a scale and an offset.
    """

    def __init__(self, dtype: torch.dtype, half: int, group: int) -> None:
        super().__init__(dtype, fused_lanes())
        ir = self._ir
        self._half = half
        self._group = group
        self._single = ir.FloatType()
        self._byte, self._short = (ir.IntType(bits) for bits in (8, 16))
        self._bytes = self._byte.as_pointer()
        kinds = (self._byte, self._short, self._int, self._single, ir.IntType(1))
        self._byte_c, self._short_c, self._word_c, self._float_c, self._bit_c = (
            ir.VectorType(kind, COLUMNS) for kind in kinds
        )
        self._nearest = self._intrinsic("llvm.roundeven.f32", self._single, [self._single])
        self._set_bits = self._intrinsic("llvm.ctpop.i32", self._int, [self._int])

    def _intrinsic(self, name: str, result: Any, kinds: Sequence[Any]) -> Any:
        """Return a function of LLVM."""
        return self._ir.Function(self._module, self._ir.FunctionType(result, kinds), name)

    def _begin_tiled(self, name: str, fields: Sequence[str]) -> tuple[Given, Any, Any, Any]:
        """Begin a function; return its arguments by name, a buffer for codes, and its rows [lo, hi)."""
        numbers = self._index.as_pointer()
        function = self._begin(name, [numbers, self._index, self._index])
        call, lo, hi = function.args
        kinds = dict.fromkeys(("word", "stored", "low", "near", "far", "escape"), self._bytes)
        kinds |= dict.fromkeys(("scale", "weight"), self._short.as_pointer())
        kinds |= dict.fromkeys(("start", "count"), numbers)
        kinds["out"] = self._narrow
        values = self._arguments(call, [kinds.get(field, self._index) for field in fields])
        codes = self._builder.alloca(self._byte, TILE_ROWS * TILE_COLUMNS)
        codes.align = 64
        self._left = self._builder.alloca(self._int)
        return dict(zip(fields, values, strict=True)), codes, lo, hi

    def _ceil_div(self, number: Any, size: int) -> Any:
        """Return ceil(number / size)."""
        return self._builder.udiv(self._add(number, size - 1), self._index(size))

    def _num_tiles(self, given: Given) -> Any:
        num_down = self._ceil_div(given["num_rows"], TILE_ROWS)
        return self._times(num_down, self._ceil_div(given["num_columns"], TILE_COLUMNS))

    def _each_tile(
        self,
        given: Given,
        codes: Any,
        rows: tuple[Any, Any],
        begun: Sequence[Any],
        work: Callable[[TilePlace, Sequence[Any]], list[Any]],
    ) -> None:
        """Write loops over tiles that carry values; `work` finds the codes of each tile in rows."""
        num_across = self._ceil_div(given["num_columns"], TILE_COLUMNS)

        def row_of_tiles(down: Any, before: Sequence[Any]) -> list[Any]:
            first_row = self._times(down, TILE_ROWS)
            left = self._builder.sub(given["num_rows"], first_row)

            def tile_of(across: Any, carried: Sequence[Any]) -> list[Any]:
                first_column = self._times(across, TILE_COLUMNS)
                tile = TilePlace(
                    self._add(self._times(down, num_across), across),
                    first_row,
                    self._min(left, self._index(TILE_ROWS)),
                    first_column,
                    self._min(
                        self._builder.sub(given["num_columns"], first_column),
                        self._index(TILE_COLUMNS),
                    ),
                    codes,
                )
                self._transpose(given, tile)
                return work(tile, carried)

            return self._loop(0, num_across, 1, before, tile_of)

        self._loop(*rows, 1, begun, row_of_tiles)

    def _transpose(self, given: Given, tile: TilePlace) -> None:
        """Transpose the codes of a tile into rows of one byte a code."""
        builder = self._builder
        kind = self._ir.VectorType(self._byte, self._half)
        for block in range(TILE_ROWS // (2 * self._half)):
            line = self._add(tile.first_row, block * 2 * self._half)
            # codes of half a byte, for all columns of the rows before
            begin = builder.udiv(self._times(line, given["num_columns"]), self._index(2))

            def square(
                within: Any, begin: Any = begin, first: int = block * 2 * self._half
            ) -> None:
                column = self._add(tile.first_column, within)
                place = self._at(given["word"], self._add(begin, self._times(column, self._half)))
                registers = [
                    self._load(self._at(place, nth * self._half), kind, 1) for nth in range(_SQUARE)
                ]
                for _ in range(4):
                    registers = self._interleaved(registers)
                for nth, register in enumerate(registers):
                    low = builder.and_(register, kind([15] * self._half))
                    high = builder.lshr(register, kind([4] * self._half))
                    for codes, row in ((low, first + nth), (high, first + nth + self._half)):
                        for lane in range(0, self._half, _SQUARE):
                            order = range(lane, lane + _SQUARE)
                            some = self._shuffle(codes, codes, order)
                            at = self._add(within, (row + lane) * TILE_COLUMNS)
                            self._store(some, self._at(tile.codes, at), 16)

            self._each(0, tile.width, _SQUARE, square)

    def _interleaved(self, registers: Sequence[Any]) -> list[Any]:
        """Interleave the bytes of registers i and i + 8, within each run of 16 bytes.

        Four rounds of this transpose squares of 16 by 16 bytes.
        """
        half = _SQUARE // 2
        results = []
        for left, other in zip(registers[:half], registers[half:], strict=True):
            for part in (0, half):
                order = [
                    lane + part + nth + other_register
                    for lane in range(0, self._half, _SQUARE)
                    for nth in range(half)
                    for other_register in (0, self._half)
                ]
                results.append(self._shuffle(left, other, order))
        return results

    def _each_part(
        self,
        given: Given,
        tile: TilePlace,
        begun: Sequence[Any],
        work: Callable[[ColumnPart, Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Write loops over a tile's rows, groups and parts of `COLUMNS` columns that carry values."""

        def row(nth: Any, before: Sequence[Any]) -> list[Any]:
            whole_row = self._add(tile.first_row, nth)
            line = self._times(whole_row, given["num_columns"])
            begin = self._add(line, tile.first_column)
            codes = self._at(tile.codes, self._times(nth, TILE_COLUMNS))

            def group(within: Any, ends: Sequence[Any]) -> list[Any]:
                column = self._add(tile.first_column, within)
                scales = self._group_of(given, whole_row, column)
                for offset in range(0, self._group, COLUMNS):
                    at = self._add(within, offset)
                    code = self._load(self._at(codes, at), self._byte_c, COLUMNS)
                    ends = work(ColumnPart(self._add(begin, at), nth, at, code, scales), ends)
                return list(ends)

            return self._loop(0, tile.width, self._group, before, group)

        return self._loop(0, tile.num_rows, 1, begun, row)

    def _group_of(self, given: Given, row: Any, column: Any) -> GroupLevels:
        """Return the levels of a group by its scales, as the reference computes them."""
        builder = self._builder
        nth = builder.udiv(column, self._index(self._group))
        place = self._add(self._times(nth, given["num_padded"]), row)
        begin = self._at(given["scale"], self._times(place, 2))
        step, offset = (self._of_bfloat16(builder.load(self._at(begin, nth))) for nth in (0, 1))
        ratio = builder.call(self._nearest, [builder.fdiv(offset, step)])
        zero = builder.fsub(self._single(8.0), ratio)
        top = builder.bitcast(builder.fmul(step, self._single(0.5)), self._int)
        top = builder.trunc(builder.lshr(top, self._int(16)), self._short)
        first = builder.sub(top, self._short(STEP - 1))
        is_empty = builder.fcmp_ordered("<=", step, self._single(EMPTY_STEP))
        return GroupLevels(
            self._broadcast(step, self._float_c),
            self._broadcast(zero, self._float_c),
            self._broadcast(builder.select(is_empty, self._short(0), first), self._short_c),
            builder.select(is_empty, self._int(0), self._int(0xFFFFFFFF)),
        )

    def _of_bfloat16(self, bits: Any) -> Any:
        word = self._builder.shl(self._builder.zext(bits, self._int), self._int(16))
        return self._builder.bitcast(word, self._single)

    def _first_numbers(self, low: Any, part: ColumnPart) -> tuple[Any, Any]:
        """Return the bits of the numbers with these low bytes that levels hold, and a mask of level zero.

        From the lower bound of a level on, the first number with a low byte is the bound plus
        (low byte - bound) mod 256. At level zero it is the largest such number of the level.
        """
        builder = self._builder
        group = part.group
        wide = builder.zext(part.codes, self._word_c)
        level = builder.fsub(builder.sitofp(wide, self._float_c), group.zero)
        zeros, lower, upper = (self._float_c([number] * COLUMNS) for number in (0.0, -0.5, 0.5))
        half = builder.select(builder.fcmp_ordered(">", level, zeros), upper, lower)
        bound = builder.bitcast(builder.fmul(builder.fsub(level, half), group.step), self._word_c)
        bound = builder.lshr(bound, self._word_c([16] * COLUMNS))
        is_zero = builder.fcmp_ordered("==", level, zeros)
        bound = builder.select(is_zero, group.first, builder.trunc(bound, self._short_c))
        above = builder.and_(builder.sub(low, bound), self._all_shorts(0xFF))
        return builder.add(bound, above), is_zero

    def _all_shorts(self, number: int) -> Any:
        return self._short_c([number] * COLUMNS)

    def _lanes_of(self, mask: Any) -> Any:
        """Return a mask as one boolean for each lane."""
        return self._builder.bitcast(mask, self._bit_c)

    def _mask_of(self, relation: str, numbers: Any, other: int) -> Any:
        """Return the mask of the unsigned numbers that stand in a relation to `other`."""
        is_so = self._builder.icmp_unsigned(relation, numbers, self._all_shorts(other))
        return self._builder.bitcast(is_so, self._int)

    def _symbol_bits(self, mask: Any, num_bits: int) -> Any:
        """Return the bits that symbols of `num_bits` take for the columns of a mask."""
        count = self._builder.call(self._set_bits, [mask])
        return self._times(self._builder.zext(count, self._index), num_bits)
