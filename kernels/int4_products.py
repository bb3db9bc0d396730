"""Products of a few rows and weights of 4 bits that are read once, whatever the rows.

For drafts: a pass over one row takes as long as memory takes to bring the words of `int4_blocks`, and
one over sixteen rows some twice as long. torch's own product of this kind unpacks words again for
every few rows, in float32.

Rows are rounded to 8 bits first, with a scale for each group of columns, which is far less than what
weights have lost at 4 bits. Words are unpacked to one byte for each code, four columns in a lane of
32 bits, and multiplied by the bytes of each row with the processor's products of four bytes. With
more rows than the registers hold sums of, a group's codes wait in the cache for the next rows.
These add up exactly within a group; groups add up in float32: a group adds scale x (sum of codes x
bytes) + (offset - 8 scale) x (sum of bytes), both times the row's own scale.

Invariant: a row's bits depend on no row beside it, nor on the threads.

Shape letters, in this file only: M rows, N columns of the result, a multiple of a block's; K
numbers of a row; G groups of k each; P blocks of all matrices; B bytes.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.kernels.int4_blocks import WordLayout, expand_int4_reference
from offload.kernels.machine_code import (
    EIGHT,
    NUM_SHARED,
    Code,
    CompiledCode,
    ParallelKernelCall,
    call_of,
    compiled,
    processor_features,
)

# columns whose codes share a lane
_FOUR = 4
_CODE_BITS = 4
_CODE_MASK = 0x0F0F0F0F
_MIDDLE = 8.0
_MOST = 127.0
# Rows whose sums stay in registers, the most first: by numbers in a register, then by how many
# registers a row's take.
_TILES: dict[int, dict[int, Sequence[int]]] = {
    16: {2: (4, 2, 1), 4: (4, 2, 1)},
    EIGHT: {4: (2, 1), 8: (1,)},
}
# of which machine code is repeated, for fewer jumps
_UNROLLED = 2
_LINE_BYTES = 64
# groups whose scales are fetched ahead: they lie far from each other
_GROUPS_AHEAD = 8
# bytes of words that are fetched ahead
_WORDS_AHEAD = 4096
# LLVM's number for it; 3 is the first cache, which words that wait would fill
_SECOND_CACHE = 2
# rows that take as long as unpacking the words does
_ROWS_TO_UNPACK = 3
# scale and sum of a row's group, in float32
_FACTOR_BYTES = 8
# the numbers of a call that depend on its rows
_OF_ROWS = slice(NUM_SHARED, NUM_SHARED + 4)
_BLOCK_NUMBERS = 3
_PREPARE = "prepare"
_MULTIPLY = "multiply"
_ALONE = "multiply_alone"
_KINDS: dict[str, Sequence[Any]] = {
    _PREPARE: [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3],
    _MULTIPLY: [ctypes.c_void_p] * 2,
    _ALONE: [ctypes.c_void_p],
}


class Instructions(NamedTuple):
    """What of a processor's instructions is used.

    Attributes:
        lanes: 32-bit numbers of a register.
        has_dots: products of four bytes are added to a sum in one instruction.
    """

    lanes: int
    has_dots: bool


@cache
def instructions() -> Instructions | None:
    """Return the instructions of this processor; None where no code can be made for it."""
    features = processor_features()
    if features.get("avx512vnni") and features.get("avx512vbmi"):
        return Instructions(2 * EIGHT, has_dots=True)
    if not features.get("avx2"):
        return None
    is_narrow = features.get("avx512vnni") and features.get("avx512vl")
    return Instructions(EIGHT, has_dots=bool(is_narrow or features.get("avxvnni")))


def int4_rows_reference(
    row_MK: Tensor, word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout
) -> Tensor:
    """Return rows times the transposed weights, (M, N), added up in float32, in plain torch."""
    weight_KN = torch.empty(row_MK.shape[1], len(word_NK))
    expand_int4_reference(word_NK, scale_GN2, layout, weight_KN)
    byte_MGk, scale_MG1 = rounded_rows(row_MK, len(scale_GN2))
    return ((byte_MGk * scale_MG1).flatten(1) @ weight_KN).to(row_MK.dtype)


def rounded_rows(row_MK: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return rows as whole numbers from -127 to 127, and the scale of each group."""
    wide_MGk = row_MK.float().unflatten(1, (num_groups, -1))
    most_MG1 = wide_MGk.abs().amax(2, keepdim=True)
    # torch divides a number by its inverse
    times_MG1 = torch.full_like(most_MG1, _MOST) / most_MG1
    times_MG1.masked_fill_(most_MG1 == 0, 0.0)
    return (wide_MGk * times_MG1).round(), most_MG1 / _MOST


class Int4RowsProduct:
    """The product of rows with matrices of 4 bits, whose results lie side by side.

    One parallel call makes all of them: threads begin and end together once, and rows are rounded
    once.

    Args:
        matrices: the words (N, K / 2) of each, in this layout, and scale and offset of each group of
            columns (G, N, 2). All have the same number of columns, a multiple of 32 in a group, and
            scales of one type; this processor has `instructions`.
    """

    def __init__(self, matrices: Sequence[tuple[Tensor, Tensor]], layout: WordLayout) -> None:
        known = instructions()
        assert known is not None, "the product is asked for where it can be made"
        self._held = [(word.contiguous(), scale.contiguous()) for word, scale in matrices]
        word_NK, scale_GN2 = self._held[0]
        self._block_rows = layout.block_rows
        self._num_groups = len(scale_GN2)
        self._num_columns = 2 * word_NK.shape[1]
        self._group = self._num_columns // self._num_groups
        self._width = sum(len(word) for word, _ in self._held)
        self._block_P3 = torch.cat([self._blocks(*pair) for pair in self._held])
        self._code = _compiled(scale_GN2.dtype, layout.block_rows, known).functions
        of_rows = (None, None, None, None)
        given = (*of_rows, self._block_P3, self._num_groups, self._group, self._width)
        self._call = call_of(len(self._block_P3), given)

    def _blocks(self, word_NK: Tensor, scale_GN2: Tensor) -> Tensor:
        """Return where each block's words and its first scale lie, and the rows of its matrix."""
        first_P = torch.arange(0, len(word_NK), self._block_rows)
        place_P = word_NK.data_ptr() + first_P * word_NK.shape[1]
        scale_P = scale_GN2.data_ptr() + first_P * 2 * scale_GN2.dtype.itemsize
        return torch.stack((place_P, scale_P, torch.full_like(first_P, len(word_NK))), 1)

    def __call__(self, row_MK: Tensor) -> ParallelKernelCall:
        """Return the work of the result, (M, all N); its parts are of a block each.

        Args:
            row_MK: one row at least, of the scales' type; sums of some hundreds fit on the stack of
                a thread of torch's.
        """
        row_MK = row_MK.contiguous()
        num_rows = len(row_MK)
        factor_bytes = _FACTOR_BYTES * num_rows * self._num_groups
        # two factors for each row and group, and behind them the rows' bytes
        room_B = torch.empty(factor_bytes + num_rows * self._num_columns, dtype=torch.int8)
        factors = room_B.data_ptr()
        codes = factors + factor_bytes
        sizes = (num_rows, self._num_groups, self._group)
        self._code[_PREPARE](row_MK.data_ptr(), codes, factors, *sizes)
        out_MN = row_MK.new_empty(num_rows, self._width)
        call = type(self._call).from_buffer_copy(self._call)
        call[_OF_ROWS] = [codes, factors, out_MN.data_ptr(), num_rows]
        # sums of all rows, and codes of a group in bytes
        num_room = (num_rows + self._group // _FOUR) * self._block_rows
        num_products = (num_rows + _ROWS_TO_UNPACK) * self._num_columns * self._width
        held = (room_B, self)
        multiply = self._code[_MULTIPLY]
        alone = self._code[_ALONE]
        return ParallelKernelCall(multiply, call, num_room, num_products, held, out_MN, alone)


@cache
def _compiled(dtype: torch.dtype, block_rows: int, known: Instructions) -> CompiledCode:
    return compiled(_Product(dtype, block_rows, known).text(), _KINDS)


class _Product(Code):
    """The instructions of the product.

    Args:
        dtype: of rows, scales and the result.
        block_rows: of the words' layout.
        known: what the processor has.
    """

    def __init__(self, dtype: torch.dtype, block_rows: int, known: Instructions) -> None:
        super().__init__(dtype, known.lanes)
        ir = self._ir
        self._block_rows = block_rows
        self._half = block_rows // 2
        self._has_dots = known.has_dots
        self._num_registers = block_rows // known.lanes
        self._tiles = _TILES[known.lanes][self._num_registers]
        self._byte = ir.IntType(8)
        self._bytes = self._byte.as_pointer()
        self._ints = ir.VectorType(self._int, known.lanes)
        self._codes = ir.VectorType(self._byte, _FOUR * known.lanes)
        fetched = ir.FunctionType(ir.VoidType(), [self._bytes, *[self._int] * 3])
        self._prefetch = ir.Function(self._module, fetched, "llvm.prefetch.p0")
        self._declare_reductions()
        self._declare_products()
        self._write_prepare()
        self._write_multiply()

    def _declare_reductions(self) -> None:
        """Declare LLVM's functions of vectors: absolute, nearest and larger values, maximum, total."""
        ir = self._ir
        floats = self._floats
        size = f"v{self._lanes}"
        unary = ir.FunctionType(floats, [floats])
        self._abs = ir.Function(self._module, unary, f"llvm.fabs.{size}f32")
        self._nearest = ir.Function(self._module, unary, f"llvm.rint.{size}f32")
        two = ir.FunctionType(floats, [floats, floats])
        self._larger = ir.Function(self._module, two, f"llvm.maxnum.{size}f32")
        largest = ir.FunctionType(ir.FloatType(), [floats])
        self._largest = ir.Function(self._module, largest, f"llvm.vector.reduce.fmax.{size}f32")
        total = ir.FunctionType(self._int, [self._ints])
        self._total = ir.Function(self._module, total, f"llvm.vector.reduce.add.{size}i32")

    def _declare_products(self) -> None:
        """Declare this processor's products of four bytes."""
        ir = self._ir
        bits = 32 * self._lanes
        kind = self._ints
        if self._has_dots:
            signature = ir.FunctionType(kind, [kind] * 3)
            name = f"llvm.x86.avx512.vpdpbusd.{bits}"
            self._dot = ir.Function(self._module, signature, name)
            return
        self._pairs = ir.VectorType(ir.IntType(16), 2 * self._lanes)
        of_bytes = ir.FunctionType(self._pairs, [self._codes] * 2)
        self._of_bytes = ir.Function(self._module, of_bytes, "llvm.x86.avx2.pmadd.ub.sw")
        of_pairs = ir.FunctionType(kind, [self._pairs] * 2)
        self._of_pairs = ir.Function(self._module, of_pairs, "llvm.x86.avx2.pmadd.wd")

    def _write_prepare(self) -> None:
        """prepare(rows, bytes, factors, count, groups, group): rows rounded to bytes.

        The bytes of a group lie beside those of the other rows. Each has two factors: its scale,
        and that times the sum of its bytes.
        """
        kinds = [self._narrow, self._bytes, self._number, *[self._index] * 3]
        self._rows, self._out_bytes, self._factors, *sizes = self._begin(_PREPARE, kinds).args
        count, num_groups, group = sizes

        def prepare_row(row: Any) -> None:
            def prepare_group(nth: Any) -> None:
                source = self._times(self._add(self._times(row, num_groups), nth), group)
                self._round_group(source, self._add(self._times(nth, count), row), group)

            self._each(0, num_groups, 1, prepare_group)

        self._each(0, count, 1, prepare_row)
        self._builder.ret_void()

    def _round_group(self, source: Any, place: Any, group: Any) -> None:
        """Round the numbers from `source` on, to the bytes and factors of this place."""
        builder = self._builder
        rows = self._at(self._rows, source)
        target = self._at(self._out_bytes, self._times(place, group))
        number = self._ir.FloatType()
        nothing = self._floats([0.0] * self._lanes)

        def look(at: Any, before: Sequence[Any]) -> list[Any]:
            numbers = builder.call(self._abs, [self._register(self._at(rows, at))])
            return [builder.call(self._larger, [before[0], numbers])]

        (most_lanes,) = self._loop(0, group, self._lanes, [nothing], look)
        most = builder.call(self._largest, [most_lanes])
        is_any = builder.fcmp_ordered(">", most, number(0.0))
        times = builder.select(is_any, builder.fdiv(number(_MOST), most), number(0.0))
        times = self._broadcast(times, self._floats)

        def round_some(at: Any, before: Sequence[Any]) -> list[Any]:
            numbers = builder.fmul(self._register(self._at(rows, at)), times)
            whole = builder.fptosi(builder.call(self._nearest, [numbers]), self._ints)
            some = self._ir.VectorType(self._byte, self._lanes)
            self._store(builder.trunc(whole, some), self._at(target, at), 1)
            return [builder.add(before[0], whole)]

        (sums,) = self._loop(0, group, self._lanes, [self._ints([0] * self._lanes)], round_some)
        scale = builder.fdiv(most, number(_MOST))
        total = builder.sitofp(builder.call(self._total, [sums]), number)
        factors = self._at(self._factors, self._times(place, 2))
        builder.store(scale, factors)
        builder.store(builder.fmul(scale, total), self._at(factors, 1))

    def _register(self, place: Any) -> Any:
        """Return a register of numbers of the rows' type that lie there, in float32."""
        if self._dtype == torch.float32:
            return self._load(place, self._floats)
        return self._wide(
            self._load(place, self._ir.VectorType(place.type.pointee, self._lanes), 2)
        )

    def _wide(self, numbers: Any) -> Any:
        """Return numbers of 16 bits, bfloat16 as integers, in float32."""
        builder = self._builder
        kind = self._ir.VectorType(self._ir.FloatType(), numbers.type.count)
        if self._dtype == torch.float16:
            return builder.fpext(numbers, kind)
        ints = self._ir.VectorType(self._int, numbers.type.count)
        wide = builder.shl(builder.zext(numbers, ints), ints([16] * numbers.type.count))
        return builder.bitcast(wide, kind)

    def _write_multiply(self) -> None:
        """multiply(call, room): compute parts; see `ParallelKernelCall`. The call's own numbers are where the
        rows' bytes lie, their factors and the result, how many rows there are, where the table of
        blocks lies, and how many groups, numbers of a group and columns there are.
        """
        function = self._begin(_MULTIPLY, [self._index.as_pointer(), self._number])
        call, self._sums = function.args
        self._row, self._factor, self._out, self._num_rows, *known = self._own_arguments(call)
        blocks, self._num_groups, self._group, self._width = known
        builder = self._builder
        self._unpacked = builder.bitcast(
            self._at(self._sums, self._times(self._num_rows, self._block_rows)), self._bytes
        )

        def multiply(block: Any) -> None:
            first = self._times(block, self._block_rows)
            numbers = self._at(blocks, self._times(block, _BLOCK_NUMBERS))
            word, scale, self._height = (
                builder.load(self._at(numbers, nth)) for nth in range(_BLOCK_NUMBERS)
            )
            words = builder.inttoptr(word, self._bytes)
            first_scales = builder.inttoptr(scale, self._narrow)

            def multiply_group(group: Any) -> None:
                place = self._times(group, self._height)
                scales = self._at(first_scales, self._times(place, 2))
                self._fetch_scales(scales)
                begin = self._at(words, self._times(self._times(group, self._group), self._half))
                are_many = builder.icmp_signed(">", self._num_rows, self._index(self._tiles[0]))
                with builder.if_else(are_many) as (if_many, if_few):
                    with if_many:
                        self._unpack_group(begin)
                        self._multiply_group(group, self._unpacked_columns, scales)
                    with if_few:
                        unpack = partial(self._columns_of_words, begin)
                        self._multiply_group(group, unpack, scales)

            self._each_tile(self._clear)
            self._each(0, self._num_groups, 1, multiply_group)
            self._each_tile(lambda row, count: self._write(first, row, count))

        self._share_parts(call, multiply)
        self._builder.ret_void()
        self._write_alone(function)

    def _own_arguments(self, call: Any) -> list[Any]:
        index = self._index
        of_rows = [self._bytes, self._number, self._narrow, index]
        return self._arguments(call, [*of_rows, index.as_pointer(), *[index] * 3])

    def _write_alone(self, multiply: Any) -> None:
        """multiply_alone(call): `multiply` with room of its own; see `ParallelKernelCall`."""
        (call,) = self._begin(_ALONE, [self._index.as_pointer()]).args
        _, _, _, num_rows, _, _, group, _ = self._own_arguments(call)
        code_rows = self._builder.udiv(group, self._index(_FOUR))
        size = self._times(self._add(num_rows, code_rows), self._block_rows)
        room = self._builder.alloca(self._ir.FloatType(), size)
        room.align = _LINE_BYTES
        self._builder.call(multiply, [call, room])
        self._builder.ret_void()

    def _fetch_scales(self, scales: Any) -> None:
        """Let the scales of a later group come nearer; they need not exist."""
        num_bytes = 2 * self._block_rows * self._dtype.itemsize
        ahead = self._times(self._height, 2 * _GROUPS_AHEAD)
        later = self._builder.bitcast(self._at(scales, ahead), self._bytes)
        for line in range(0, num_bytes, _LINE_BYTES):
            self._fetch(self._at(later, line))

    def _fetch(self, place: Any) -> None:
        # to read it, as data
        self._builder.call(
            self._prefetch, [place, self._int(0), self._int(_SECOND_CACHE), self._int(1)]
        )

    def _each_tile(self, work: Callable[..., None]) -> None:
        """Write work for all rows, by as many at once as go into the registers."""
        begin: Any = self._index(0)
        for count in self._tiles:
            left = self._builder.sub(self._num_rows, begin)
            num_tiles = self._builder.udiv(left, self._index(count))
            end = self._builder.add(begin, self._times(num_tiles, count))
            self._each(begin, end, count, partial(work, count=count))
            begin = end

    def _places(self, row: Any, count: int) -> list[Any]:
        """Return the addresses of some rows' sums, register after register."""
        begin = self._times(row, self._block_rows)
        steps = range(0, count * self._block_rows, self._lanes)
        return [self._at(self._sums, self._add(begin, step)) for step in steps]

    def _clear(self, row: Any, count: int) -> None:
        for place in self._places(row, count):
            self._store(self._floats([0.0] * self._lanes), place)

    def _multiply_group(
        self, group: Any, codes_at: Callable[[Any], list[Any]], scales: Any
    ) -> None:
        """Add the products of one group's columns to the sums of all rows.

        Args:
            codes_at: return the codes of the four columns that begin with this one of the group.
        """
        self._each_tile(lambda row, count: self._multiply_tile(group, codes_at, scales, row, count))

    def _multiply_tile(
        self, group: Any, codes_at: Callable[[Any], list[Any]], scales: Any, row: Any, count: int
    ) -> None:
        """Add the products of one group's columns to the sums of some rows."""
        builder = self._builder
        nths = [
            self._add(self._times(group, self._num_rows), self._add(row, nth))
            for nth in range(count)
        ]
        rows = [self._at(self._row, self._times(nth, self._group)) for nth in nths]

        def add_columns(at: Any, sums: Sequence[Any]) -> list[Any]:
            for step in range(0, _FOUR * _UNROLLED, _FOUR):
                here = self._add(at, step)
                sums = self._columns_added(
                    codes_at(here), [self._at(row, here) for row in rows], sums
                )
            return list(sums)

        nothing = [self._ints([0] * self._lanes)] * (count * self._num_registers)
        products = self._loop(0, self._group, _FOUR * _UNROLLED, nothing, add_columns)
        factors = [self._scale_and_offset(scales, nth) for nth in range(self._num_registers)]
        places = self._places(row, count)
        for index, (place, product) in enumerate(zip(places, products, strict=True)):
            scale, offset = factors[index % self._num_registers]
            factor = self._at(self._factor, self._times(nths[index // self._num_registers], 2))
            row_scale, row_sum = (self._broadcast_at(factor, nth, self._floats) for nth in (0, 1))
            scaled = builder.fmul(builder.sitofp(product, self._floats), scale)
            before = self._fma(offset, row_sum, self._load(place, self._floats))
            self._store(self._fma(scaled, row_scale, before), place)

    def _unpack_group(self, words: Any) -> None:
        """Write the codes of one group's columns behind the sums, register after register."""

        def unpack(at: Any) -> None:
            place = self._at(self._unpacked, self._times(at, self._block_rows))
            for nth, codes in enumerate(self._columns_of_words(words, at)):
                self._store(codes, self._at(place, nth * _FOUR * self._lanes), _FOUR * self._lanes)

        self._each(0, self._group, _FOUR, unpack)

    def _unpacked_columns(self, at: Any) -> list[Any]:
        """Return the codes of four columns that `_unpack_group` has written."""
        place = self._at(self._unpacked, self._times(at, self._block_rows))
        steps = range(0, _FOUR * self._block_rows, _FOUR * self._lanes)
        return [
            self._load(self._at(place, step), self._ints, _FOUR * self._lanes) for step in steps
        ]

    def _columns_of_words(self, words: Any, at: Any) -> list[Any]:
        """Return the codes of the four columns that begin with this one of a group."""
        return self._four_columns(self._at(words, self._times(at, self._half)))

    def _four_columns(self, place: Any) -> list[Any]:
        """Return the codes of four columns of a block, a byte each: a register for some rows.

        Registers have the rows of a block in their order.
        """
        builder = self._builder
        both = self._ir.VectorType(self._byte, 2 * self._half)
        for line in range(0, _FOUR * self._half, _LINE_BYTES):
            self._fetch(self._at(place, _WORDS_AHEAD + line))
        first = self._load(place, both, 1)
        second = self._load(self._at(place, 2 * self._half), both, 1)
        mask = self._ints([_CODE_MASK] * self._lanes)
        four = self._ints([_CODE_BITS] * self._lanes)
        lows = list[Any]()
        highs = list[Any]()
        for lo in range(0, self._half, self._lanes):
            order = [
                column * self._half + row
                for row in range(lo, lo + self._lanes)
                for column in range(_FOUR)
            ]
            words = builder.bitcast(self._shuffle(first, second, order), self._ints)
            lows.append(builder.and_(words, mask))
            highs.append(builder.and_(builder.lshr(words, four), mask))
        return [*lows, *highs]

    def _columns_added(
        self, codes: Sequence[Any], rows: Sequence[Any], sums: Sequence[Any]
    ) -> list[Any]:
        """Add the products of four columns of a block with those bytes of some rows."""
        added = list[Any]()
        for nth, place in enumerate(rows):
            four = self._broadcast(self._load(place, self._int, _FOUR), self._ints)
            before = sums[nth * len(codes) : (nth + 1) * len(codes)]
            added += [self._dotted(*pair, four) for pair in zip(before, codes, strict=True)]
        return added

    def _dotted(self, before: Any, codes: Any, four: Any) -> Any:
        """Add the products of four bytes in each lane."""
        builder = self._builder
        if self._has_dots:
            return builder.call(self._dot, [before, codes, four])
        both = [builder.bitcast(vector, self._codes) for vector in (codes, four)]
        pairs = [builder.call(self._of_bytes, both), self._pairs([1] * self._pairs.count)]
        return builder.add(before, builder.call(self._of_pairs, pairs))

    def _scale_and_offset(self, scales: Any, register: int) -> tuple[Any, Any]:
        """Return the scales of a register's rows, and what the sums of bytes are times."""
        place = self._at(scales, 2 * register * self._lanes)
        kind = self._ir.VectorType(place.type.pointee, 2 * self._lanes)
        both = self._load(place, kind, self._dtype.itemsize)
        parts = [self._shuffle(both, both, range(nth, kind.count, 2)) for nth in (0, 1)]
        if self._dtype != torch.float32:
            parts = [self._wide(part) for part in parts]
        scale, offset = parts
        middle = self._floats([-_MIDDLE] * self._lanes)
        return scale, self._fma(middle, scale, offset)

    def _write(self, first: Any, row: Any, count: int) -> None:
        """Round the sums of some rows and a block's columns, and write them to the result."""
        for nth in range(count):
            begin = self._add(self._times(self._add(row, nth), self._width), first)
            sums_of_row = self._at(self._sums, self._times(self._add(row, nth), self._block_rows))
            for lo in range(0, self._block_rows, EIGHT):
                some = self._load(self._at(sums_of_row, lo), self._eight)
                target = self._at(self._out, self._add(begin, lo))
                if self._dtype == torch.float32:
                    self._store(some, target)
                else:
                    self._store(self._round_to_16_bits(some), target, 2)
