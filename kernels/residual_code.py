"""The LLVM instructions that expand and encode bfloat16 weights beside a copy: see `residual_layout`.

`COLUMNS` columns of a row are taken at once: low bytes and levels lie in registers, and a *mask* has
a bit for each column with a symbol. A *plane* has one bit of every symbol, at its column's place
(`pdep` puts bits there, `pext` collects them). Invariant: whatever words, symbols and places hold,
only memory that a call names is read or written.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import Lock
from typing import Any

import torch

from offload.kernels.machine_code import CompiledCode, compiled
from offload.kernels.residual_layout import NO_MAGNITUDE, STEP
from offload.kernels.residual_tiles import COLUMNS, ColumnPart, Given, TileCode, TilePlace

EXPAND = "expand"
ENCODE = "encode"
# where a call's arrays lie, and then its sizes
EXPAND_FIELDS = (
    "word", "scale", "stored", "start", "out",
    "num_rows", "num_columns", "num_padded", "num_bytes",
)  # fmt: skip
ENCODE_FIELDS = (
    "word", "scale", "weight", "low", "near", "far", "escape", "count",
    "num_rows", "num_columns", "num_padded",
)  # fmt: skip
# zeros that may be written behind encoded symbols
SPARE_BYTES = 16
# masks of columns whose far symbols fill 64 bits at most
_HALVES = (0xFFFF, 0xFFFF0000)
_QUARTERS = (0xFF, 0xFF00, 0xFF0000, 0xFF000000)
# symbols of 4 bits that `_bits_from` returns, wherever they begin
_MOST_SYMBOLS = 14
_LOCK = Lock()
# processors that take hundreds of cycles for pdep and pext
_SLOW = ("bdver4", "znver1", "znver2")


def code_for(name: str, dtype: torch.dtype, half: int, group: int) -> Callable[..., None]:
    """Return the compiled function `name`, of a call's address and rows of tiles [lo, hi).

    Args:
        dtype: of the expanded numbers.
        half: bytes of one column in a block of codes, of two rows each.
        group: columns that share a scale and an offset.
    """
    # the cache alone would let two threads compile it twice
    with _LOCK:
        return _compiled(name, dtype, half, group, can_scatter()).functions[name]


@cache
def _compiled(
    name: str, dtype: torch.dtype, half: int, group: int, has_scatter: bool
) -> CompiledCode:
    code = _ResidualCode(dtype, half, group, has_scatter)
    if name == EXPAND:
        code.write_expand()
    else:
        code.write_encode()
    return compiled(code.text(), {name: [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]})


@cache
def can_scatter() -> bool:
    """Return True if pdep and pext are fast on this processor."""
    from llvmlite import binding

    has_instructions = binding.get_host_cpu_features().get("bmi2")
    return bool(has_instructions) and binding.get_host_cpu_name() not in _SLOW


class _ResidualCode(TileCode):
    """Writes the functions `expand` and `encode`."""

    def __init__(self, dtype: torch.dtype, half: int, group: int, has_scatter: bool) -> None:
        super().__init__(dtype, half, group)
        self._wide = self._ir.IntType(128)
        flag = self._ir.IntType(1)
        self._low_zeros = self._intrinsic("llvm.cttz.i32", self._int, [self._int, flag])
        self._has_scatter = has_scatter
        if has_scatter:
            self._pdep, self._pext = (self._of_bits(name) for name in ("pdep", "pext"))

    def _of_bits(self, name: str) -> Any:
        """Return pdep or pext of 64 bits."""
        return self._intrinsic(f"llvm.x86.bmi.{name}.64", self._index, [self._index] * 2)

    def write_expand(self) -> None:
        """Write expand(call, lo, hi), which fills rows of tiles [lo, hi) of `out`."""
        given, codes, lo, hi = self._begin_tiled(EXPAND, EXPAND_FIELDS)
        add, times, load = self._add, self._times, self._builder.load
        num_tiles = self._num_tiles(given)
        starts = [self._at(given["start"], times(add(num_tiles, 1), nth)) for nth in range(3)]
        totals = [load(self._at(start, num_tiles)) for start in starts]
        near_lo = times(given["num_rows"], given["num_columns"])
        far_lo = add(near_lo, totals[0])
        escapes = self._at(given["stored"], add(far_lo, totals[1]))

        def expand(tile: TilePlace, _: Sequence[Any]) -> list[Any]:
            near, far, escape = (load(self._at(start, tile.nth)) for start in starts)
            begun = [times(add(near_lo, near), 8), times(add(far_lo, far), 8)]
            self._each_part(given, tile, begun, lambda *part: self._expand_part(given, *part))
            end = load(self._at(starts[2], add(tile.nth, 1)))
            put = partial(self._put_escape, given, tile, escapes, totals[2])
            self._each(escape, end, 1, put)
            return []

        self._each_tile(given, codes, (lo, hi), [], expand)
        self._builder.ret_void()

    def _expand_part(self, given: Given, part: ColumnPart, ends: Sequence[Any]) -> list[Any]:
        """Expand one part; `ends` are the places, in bits, up to which near and far symbols were read."""
        builder = self._builder
        stored = self._load(self._at(given["stored"], part.at), self._byte_c, 1)
        bits, is_zero = self._first_numbers(builder.zext(stored, self._short_c), part)
        near = builder.and_(builder.bitcast(is_zero, self._int), part.group.near_mask)
        are_few = builder.icmp_unsigned(
            "<=", builder.call(self._set_bits, [near]), self._int(_MOST_SYMBOLS)
        )
        (odd, other, *planes), ends = self._if_else_values(
            are_few,
            lambda: self._read_both_symbols(given, near, ends, (0xFFFFFFFF,)),
            lambda: self._read_both_symbols(given, near, ends, _QUARTERS),
        )
        far = builder.and_(other, builder.not_(odd))
        for mask, steps in ((far, 1), (planes[0], 1), (planes[1], 2), (planes[2], 4)):
            lower = builder.sub(bits, self._all_shorts(STEP * steps))
            bits = builder.select(self._lanes_of(mask), lower, bits)
        has_none = builder.and_(planes[0], builder.and_(planes[1], planes[2]))
        has_none = builder.or_(has_none, builder.and_(odd, other))
        for mask, kept in ((near, 0x7FFF), (has_none, 0xFF)):
            fewer = builder.and_(bits, self._all_shorts(kept))
            bits = builder.select(self._lanes_of(mask), fewer, bits)
        is_negative = builder.or_(builder.and_(odd, builder.not_(other)), planes[3])
        negative = builder.or_(bits, self._all_shorts(0x8000))
        bits = builder.select(self._lanes_of(is_negative), negative, bits)
        self._store(self._from_bfloat16(bits, COLUMNS), self._at(given["out"], part.at), 1)
        return ends

    def _read_both_symbols(
        self, given: Given, near: Any, ends: Sequence[Any], masks: Sequence[int]
    ) -> tuple[list[Any], list[Any]]:
        """Return two planes of near symbols, four of far symbols, and the ends of both in bits.

        Args:
            near: mask of the columns with near symbols.
            masks: columns whose symbols are read at once, one mask after the other.
        """
        builder = self._builder
        planes = [self._int(0)] * 6
        near_end, far_end = ends
        for mask in masks:
            some = builder.and_(near, self._int(mask))
            odd, other = self._read_symbols(self._bits_from(given, near_end), some, 2)
            near_end = self._add(near_end, self._symbol_bits(some, 2))
            some = builder.and_(other, builder.not_(odd))
            further = self._read_symbols(self._bits_from(given, far_end), some, 4)
            far_end = self._add(far_end, self._symbol_bits(some, 4))
            pairs = zip(planes, [odd, other, *further], strict=True)
            planes = [builder.or_(*pair) for pair in pairs]
        return planes, [near_end, far_end]

    def _if_else_values(
        self,
        condition: Any,
        work: Callable[[], tuple[list[Any], list[Any]]],
        otherwise: Callable[[], tuple[list[Any], list[Any]]],
    ) -> tuple[list[Any], list[Any]]:
        """Write an if-else whose branches have two lists of values each; return those that were taken."""
        builder = self._builder
        results = []
        with builder.if_else(condition, likely=True) as ways:
            for way, write in zip(ways, (work, otherwise), strict=True):
                with way:
                    results.append((write(), builder.block))
        (lists, block), (other_lists, other_block) = results
        joined = list[list[Any]]()
        for values, other_values in zip(lists, other_lists, strict=True):
            joined.append([])
            for value, other in zip(values, other_values, strict=True):
                phi = builder.phi(value.type)
                phi.add_incoming(value, block)
                phi.add_incoming(other, other_block)
                joined[-1].append(phi)
        return joined[0], joined[1]

    def _put_escape(
        self, given: Given, tile: TilePlace, escapes: Any, num_escapes: Any, nth: Any
    ) -> None:
        """Write escape `nth` into its tile; a place outside of the tile is passed over."""
        builder = self._builder
        begin = self._at(escapes, nth)
        places = [self._at(begin, self._times(num_escapes, which)) for which in range(3)]
        column, row, high = (builder.zext(builder.load(place), self._index) for place in places)
        has_row = builder.icmp_unsigned("<", row, tile.num_rows)
        has_column = builder.icmp_unsigned("<", column, tile.width)
        with builder.if_then(builder.and_(has_row, has_column)):
            line = self._times(self._add(tile.first_row, row), given["num_columns"])
            at = self._add(line, self._add(tile.first_column, column))
            low = builder.load(self._at(given["stored"], at))
            bits = builder.or_(self._times(high, STEP), builder.zext(low, self._index))
            number = self._from_bfloat16(builder.trunc(bits, self._short), 1)
            self._builder.store(number, self._at(given["out"], at))

    def write_encode(self) -> None:
        """Write encode(call, lo, hi), which encodes rows of tiles [lo, hi).

        It writes low bytes, symbols, escapes, and the counts of each tile. Lists are filled from
        their beginning; the first byte of those of symbols is zero before.
        """
        given, codes, lo, hi = self._begin_tiled(ENCODE, ENCODE_FIELDS)
        num_tiles = self._num_tiles(given)
        eight = self._index(8)

        def encode(tile: TilePlace, begun: Sequence[Any]) -> list[Any]:
            *ends, end = self._each_part(
                given, tile, begun, lambda *part: self._encode_part(given, *part)
            )
            # symbols of a tile begin with a byte
            ends = [self._times(self._ceil_div(end, 8), 8) for end in ends]
            counts = [
                self._builder.udiv(self._builder.sub(end, first), eight)
                for first, end in zip(begun[:2], ends, strict=True)
            ]
            for nth, count in enumerate([*counts, self._builder.sub(end, begun[2])]):
                place = self._add(self._times(num_tiles, nth), tile.nth)
                self._builder.store(count, self._at(given["count"], place))
            return [*ends, end]

        self._each_tile(given, codes, (lo, hi), [self._index(0)] * 3, encode)
        self._builder.ret_void()

    def _encode_part(self, given: Given, part: ColumnPart, ends: Sequence[Any]) -> list[Any]:
        """Encode one part; `ends` are those of near and far symbols, in bits, and of escapes."""
        builder = self._builder
        weight = self._load(self._at(given["weight"], part.at), self._short_c, 2)
        self._store(builder.trunc(weight, self._byte_c), self._at(given["low"], part.at), 1)
        low = builder.and_(weight, self._all_shorts(0xFF))
        bits, is_zero = self._first_numbers(low, part)
        near = builder.and_(builder.bitcast(is_zero, self._int), part.group.near_mask)
        size = builder.and_(weight, self._all_shorts(0x7FFF))
        steps = builder.ashr(builder.sub(bits, size), self._all_shorts(8))
        rest = builder.sub(steps, self._all_shorts(1))
        sign = self._mask_of(">=", weight, 0x8000)
        is_largest = self._mask_of("==", steps, 0)
        has_no_magnitude = self._mask_of("<", size, STEP)
        # larger weights have a difference below 0, which is a large unsigned number
        is_further = builder.or_(self._mask_of("<", rest, NO_MAGNITUDE), has_no_magnitude)
        is_further = builder.and_(is_further, builder.not_(is_largest))
        has_none = builder.and_(is_further, self._mask_of("<", weight, STEP))
        far = builder.and_(is_further, builder.not_(has_none))
        odd = builder.or_(builder.and_(sign, builder.not_(far)), has_none)
        near_end = self._write_symbols(given["near"], ends[0], near, [odd, is_further])
        no_magnitude = self._all_shorts(NO_MAGNITUDE)
        other = builder.select(self._lanes_of(has_no_magnitude), no_magnitude, rest)
        planes = [
            self._mask_of("!=", builder.and_(other, self._all_shorts(bit)), 0) for bit in (1, 2, 4)
        ]
        far = builder.and_(far, near)

        def write_far(*masks: int) -> tuple[list[Any], list[Any]]:
            end = ends[1]
            for mask in masks:
                some = builder.and_(far, self._int(mask))
                end = self._write_symbols(given["far"], end, some, [*planes, sign])
            return [], [end]

        fit_at_once = builder.icmp_unsigned(
            "<=", builder.call(self._set_bits, [far]), self._int(COLUMNS // 2)
        )
        _, (far_end,) = self._if_else_values(
            fit_at_once, lambda: write_far(0xFFFFFFFF), lambda: write_far(*_HALVES)
        )
        differs = builder.bitcast(builder.icmp_unsigned("!=", bits, weight), self._int)
        is_said = builder.or_(is_largest, is_further)
        unsaid = builder.and_(near, builder.not_(is_said))
        lost = builder.or_(unsaid, builder.and_(differs, builder.not_(near)))
        return [near_end, far_end, self._list_escapes(given, part, lost, ends[2])]

    def _list_escapes(self, given: Given, part: ColumnPart, lost: Any, end: Any) -> Any:
        """Append the columns of a mask with their high bytes to the escapes; return the new end."""
        builder = self._builder
        room = self._times(given["num_rows"], given["num_columns"])
        count = builder.zext(builder.call(self._set_bits, [lost]), self._index)
        left = self._left
        builder.store(lost, left)

        def put(nth: Any) -> None:
            mask = builder.load(left)
            lane = builder.call(self._low_zeros, [mask, self._ir.IntType(1)(0)])
            builder.store(builder.and_(mask, builder.sub(mask, self._int(1))), left)
            lane = builder.zext(lane, self._index)
            weight = builder.load(self._at(given["weight"], self._add(part.at, lane)))
            high = builder.lshr(weight, self._short(8))
            begin = self._at(given["escape"], nth)
            for which, value in enumerate((self._add(part.column, lane), part.row, high)):
                place = self._at(begin, self._times(room, which))
                builder.store(builder.trunc(value, self._byte), place)

        after = self._add(end, count)
        self._each(end, after, 1, put)
        return after

    def _from_bfloat16(self, bits: Any, count: int) -> Any:
        """Convert `count` bfloat16 numbers to the expanded type; a single one is no register."""
        builder = self._builder
        if self._dtype == torch.bfloat16:
            return bits
        kinds = (self._word_c, self._float_c) if count > 1 else (self._int, self._single)
        sixteen = kinds[0]([16] * count) if count > 1 else kinds[0](16)
        wide = builder.bitcast(builder.shl(builder.zext(bits, kinds[0]), sixteen), kinds[1])
        if self._dtype == torch.float32:
            return wide
        half = self._ir.HalfType()
        return builder.fptrunc(wide, self._ir.VectorType(half, count) if count > 1 else half)

    def _bits_from(self, given: Given, place: Any) -> Any:
        """Return at least 57 bits from a bit's place on; past the end of the bytes arbitrary ones."""
        builder = self._builder
        last = self._add(given["num_bytes"], -8)
        byte = builder.lshr(place, self._index(3))
        begin = builder.select(builder.icmp_unsigned("<", byte, last), byte, last)
        passed = builder.sub(place, builder.shl(begin, self._index(3)))
        word = self._load(self._at(given["stored"], begin), self._index, 1)
        return builder.lshr(word, builder.and_(passed, self._index(63)))

    def _read_symbols(self, window: Any, mask: Any, num_bits: int) -> list[Any]:
        """Read a symbol for each column of a mask, and return its bits as planes."""
        builder = self._builder
        if self._has_scatter:
            wide = builder.zext(mask, self._index)
            planes = [self._plane(nth, num_bits) for nth in range(num_bits)]
            planes = [builder.call(self._pext, [window, plane]) for plane in planes]
            planes = [builder.call(self._pdep, [plane, wide]) for plane in planes]
            return [builder.trunc(plane, self._int) for plane in planes]

        def take(_: Any, before: Sequence[Any]) -> list[Any]:
            window, left, *planes = before
            lowest = builder.and_(left, builder.neg(left))
            for nth, plane in enumerate(planes):
                bit = builder.and_(window, self._index(1 << nth))
                is_set = builder.icmp_unsigned("!=", bit, self._index(0))
                bit = builder.select(is_set, lowest, self._int(0))
                planes[nth] = builder.or_(plane, bit)
            left = builder.xor(left, lowest)
            return [builder.lshr(window, self._index(num_bits)), left, *planes]

        begun = [window, mask, *[self._int(0)] * num_bits]
        return self._loop(0, self._symbol_bits(mask, 1), 1, begun, take)[2:]

    def _plane(self, nth: int, num_bits: int) -> Any:
        return self._index(sum(1 << at for at in range(nth, 64, num_bits)))

    def _write_symbols(self, to: Any, place: Any, mask: Any, planes: Sequence[Any]) -> Any:
        """Write the symbols of a mask's columns from a bit's place on; return the end."""
        builder = self._builder
        num_bits = len(planes)
        word = self._pack_symbols(mask, planes)
        begin = self._at(to, builder.lshr(place, self._index(3)))
        shift = builder.zext(builder.and_(place, self._index(7)), self._wide)
        before = builder.zext(builder.load(begin), self._wide)
        words = builder.or_(builder.shl(builder.zext(word, self._wide), shift), before)
        self._store(words, begin, 1)
        return self._add(place, self._symbol_bits(mask, num_bits))

    def _pack_symbols(self, mask: Any, planes: Sequence[Any]) -> Any:
        """Return the symbols of a mask's columns as one word, one after the other."""
        builder = self._builder
        num_bits = len(planes)
        if self._has_scatter:
            wide = builder.zext(mask, self._index)
            word = self._index(0)
            for nth, plane in enumerate(planes):
                some = builder.call(self._pext, [builder.zext(plane, self._index), wide])
                some = builder.call(self._pdep, [some, self._plane(nth, num_bits)])
                word = builder.or_(word, some)
            return word

        def take(nth: Any, before: Sequence[Any]) -> list[Any]:
            word, left = before
            lowest = builder.and_(left, builder.neg(left))
            for place, plane in enumerate(planes):
                bit = builder.and_(plane, lowest)
                is_set = builder.icmp_unsigned("!=", bit, self._int(0))
                at = self._add(self._times(nth, num_bits), place)
                bit = builder.shl(builder.zext(is_set, self._index), at)
                word = builder.or_(word, bit)
            return [word, builder.xor(left, lowest)]

        return self._loop(0, self._symbol_bits(mask, 1), 1, [self._index(0), mask], take)[0]
