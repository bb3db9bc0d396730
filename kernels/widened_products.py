"""Products of 16-bit rows and weights in float32: weights are widened as they are multiplied.

For processors without 16-bit products. A library there multiplies in float32 and needs a copy of
the weight: with a few rows making the copy takes most of the time, with many a third. Here the
weights of some columns are widened into the near cache, `_DEPTH` numbers of each column at a time
(the *panel*), and every row is multiplied by them there.

Each number of the result is a sum of *chains*, and a chain a sequence of fused multiply-adds. A
depth has eight chains: sixteen numbers are loaded as eight words of two, and chain i has the words
of lane i. A few rows are multiplied as the words lie, with eight chains of one column in a register;
many rows with eight columns in a register, for which the 8 x 8 words of eight columns are
transposed. Both add up in one order, so a row's bits depend on the row and the weight alone.

Shape letters, in this file only: T rows, N columns of the result, K numbers of a row.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.machine_code import (
    EIGHT,
    Code,
    CompiledCode,
    ParallelKernelCall,
    call_of,
    compiled,
    fused_lanes,
)

# numbers that are loaded at once; what is left of a row comes one by one
_STEP = 2 * EIGHT
_DEPTH = 48 * _STEP
# Of the result, whose sums stay in registers: this many rows, and registers of columns. Four by two
# were as quick with many rows as six by two, and quicker with a few.
_ROWS = 4
_REGISTERS = 2
# times that the loop's code is repeated, for fewer jumps
_UNROLLED = 2
_TYPES = (torch.bfloat16, torch.float16)
# up to this many are multiplied one by one, which takes less than widening weights for all of them
_LONE_ROWS = 2
# rows that take as long as a weight does to be widened and stored, or to be loaded alone
_ROWS_TO_WIDEN = 8
_ROWS_TO_LOAD = 2
_SPREAD = "spread"
_MULTIPLY = "multiply"
_KINDS: dict[str, Sequence[Any]] = {
    _SPREAD: [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2],
    _MULTIPLY: [ctypes.c_void_p] * 2,
}


def can_multiply(weight_NK: Tensor) -> bool:
    """Return True if `product_of` takes this weight on this processor."""
    is_ours = weight_NK.dtype in _TYPES and weight_NK.device.type == "cpu" and weight_NK.numel() > 0
    return is_ours and fused_lanes() > 0


def product_of(rows: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> ParallelKernelCall:
    """Return the call that computes rows @ weight^T + bias, in the weight's type.

    Each part of the call computes some columns of the result. An operation of torch takes some 10 us
    where a pass has just filled the caches, so this uses few.

    Args:
        rows: (..., K), one row at least, of the weight's type.
        weight_NK: a weight that `can_multiply` admits.
        bias_N: of any floating-point type.
    """
    *sizes, width = rows.shape
    num_rows = math.prod(sizes)
    num_columns = weight_NK.shape[0]
    columns = fused_lanes() * _REGISTERS
    missing = max(0, columns - num_columns)
    weight_NK = pad(weight_NK, (0, 0, 0, missing)) if missing else weight_NK.contiguous()
    # rows are padded with zeros to whole steps
    rows = pad(rows, (0, -width % _STEP)) if width % _STEP else rows.contiguous()
    if bias_N is not None:
        bias_N = pad(bias_N.float().expand(num_columns), (0, missing)).contiguous()
    code = _compiled(weight_NK.dtype, bias_N is not None, fused_lanes())
    wide = None
    if num_rows > _LONE_ROWS or width % _STEP:
        wide = torch.empty_like(rows, dtype=torch.float32)
        code.functions[_SPREAD](rows.data_ptr(), wide.data_ptr(), num_rows, rows.shape[-1])
    out = weight_NK.new_empty(*sizes, num_columns + missing)
    given = (rows, wide, weight_NK, out, bias_N)
    num_parts = -(-(num_columns + missing) // columns)
    call = call_of(num_parts, (*given, num_rows, width, num_columns + missing))
    # float32 numbers: the panel of weights, a gap for each chain, the sums of all rows, and those of
    # the rows that fill up the last group
    num_room = (_DEPTH + EIGHT + num_rows + _ROWS) * columns
    beside = _ROWS_TO_LOAD if wide is None else _ROWS_TO_WIDEN
    num_products = (num_rows + beside) * width * num_columns
    out = out[..., :num_columns] if missing else out
    return ParallelKernelCall(code.functions[_MULTIPLY], call, num_room, num_products, given, out)


@cache
def _compiled(dtype: torch.dtype, has_bias: bool, lanes: int) -> CompiledCode:
    return compiled(_Product(dtype, has_bias, lanes).text(), _KINDS)


class _Product(Code):
    """The instructions of the product.

    Args:
        dtype: of rows, the weight and the result.
        has_bias: whether there is one to begin with.
        lanes: numbers of a register.
    """

    def __init__(self, dtype: torch.dtype, has_bias: bool, lanes: int) -> None:
        super().__init__(dtype, lanes)
        self._has_bias = has_bias
        self._columns = lanes * _REGISTERS
        bytes_ = self._ir.IntType(8).as_pointer()
        fetched = self._ir.FunctionType(self._ir.VoidType(), [bytes_, *[self._int] * 3])
        self._prefetch = self._ir.Function(self._module, fetched, "llvm.prefetch.p0")
        self._write_widen_rows()
        self._write_multiply()

    def _write_widen_rows(self) -> None:
        """Write spread(rows, wide, count, width): widen rows of whole steps, chain after chain."""
        function = self._begin(_SPREAD, [self._narrow, self._number, *[self._index] * 2])
        rows, wide, count, width = function.args

        def spread(row: Any) -> None:
            source = self._at(rows, self._times(row, width))
            target = self._at(wide, self._times(row, width))
            depth = self._index(_DEPTH)

            def spread_depth(start: Any) -> None:
                num = self._min(depth, self._builder.sub(width, start))
                self._widen_row(self._at(source, start), self._at(target, start), num)

            self._each(0, width, _DEPTH, spread_depth)

        self._each(0, count, 1, spread)
        self._builder.ret_void()

    def _widen_row(self, source: Any, target: Any, num: Any) -> None:
        """Widen `num` numbers of a row, whole steps, and write them chain after chain."""
        # numbers whose words fill eight registers
        at_once = _STEP * EIGHT // 2
        chains = [self._at(target, self._chain_share(num, nth)) for nth in range(EIGHT)]

        def spread_some(at: Any) -> None:
            numbers = []
            for step in range(0, at_once, _STEP):
                numbers += self._both_halves(
                    self._load_pairs(self._at(source, self._add(at, step)))
                )
            for chain, some in zip(chains, self._transposed(numbers), strict=True):
                self._store(some, self._at(chain, self._chain_share(at, 1)))

        def spread_step(at: Any) -> None:
            for nth, numbers in enumerate(
                self._both_halves(self._load_pairs(self._at(source, at)))
            ):
                place = self._add(self._chain_share(at, 1), nth)
                for lane, chain in enumerate(chains):
                    number = self._builder.extract_element(numbers, self._int(lane))
                    self._builder.store(number, self._at(chain, place))

        whole = self._builder.and_(num, self._index(-at_once))
        self._each(0, whole, at_once, spread_some)
        self._each(whole, num, _STEP, spread_step)

    def _chain_share(self, num: Any, nth: int) -> Any:
        """Return num / 8 * nth: the share of `nth` chains in `num` numbers."""
        return self._times(self._builder.udiv(num, self._index(EIGHT)), nth)

    def _write_multiply(self) -> None:
        """Write multiply(call, room), which computes parts; see `ParallelKernelCall`.

        The call's own arguments are the addresses of rows, of widened rows (0 for a few rows), of the
        weight, the result and the bias, and the sizes T, K and N.
        """
        function = self._begin(_MULTIPLY, [self._index.as_pointer(), self._number])
        call, self._panel = function.args
        kinds = [self._narrow, self._number, self._narrow, self._narrow, self._number]
        given = self._arguments(call, [*kinds, *[self._index] * 3])
        self._row, self._wide, self._weight, self._out, self._bias, *sizes = given
        self._num_rows, self._width, self._height = sizes
        self._whole = self._whole_steps(self._width)
        self._ahead = self._times(self._width, self._columns)
        self._sums = self._at(self._panel, (_DEPTH + EIGHT) * self._columns)
        last = self._builder.sub(self._height, self._index(self._columns))
        is_spread = self._builder.icmp_unsigned("!=", self._wide, self._wide.type(None))

        def multiply(part: Any) -> None:
            # the last columns may be computed again
            first = self._min(self._times(part, self._columns), last)
            with self._builder.if_else(is_spread) as (together, alone):
                with together:
                    self._multiply_rows(first)
                with alone:
                    self._each(0, self._num_rows, 1, lambda row: self._multiply_row(row, first))

        self._share_parts(call, multiply)
        self._builder.ret_void()

    def _multiply_row(self, row: Any, first: Any) -> None:
        """Multiply one row by the part's columns; widened weights stay in registers."""
        source = self._at(self._row, self._times(row, self._width))
        for group in range(0, self._columns, EIGHT):
            column = self._add(first, group)
            weights = self._weights(column)
            begun = self._eight([-0.0] * EIGHT)
            if self._has_bias:
                begun = self._load(self._at(self._bias, column), self._eight)

            def add_depth(start: Any, sums: Sequence[Any], weights: Any = weights) -> list[Any]:
                num = self._min(self._index(_DEPTH), self._builder.sub(self._width, start))

                def add_products(at: Any, chains: Sequence[Any]) -> list[Any]:
                    here = self._add(start, at)
                    numbers = self._both_halves(self._load_pairs(self._at(source, here)))
                    added = []
                    for weight, chain in zip(weights, chains, strict=True):
                        place = self._at(weight, here)
                        self._prefetch_line(self._at(place, self._ahead))
                        for pair in zip(
                            numbers, self._both_halves(self._load_pairs(place)), strict=True
                        ):
                            chain = self._fma(*pair, chain)
                        added.append(chain)
                    return added

                zeros = [self._eight([0.0] * EIGHT)] * EIGHT
                (sum_8,) = sums
                for chain in self._transposed(self._loop(0, num, _STEP, zeros, add_products)):
                    sum_8 = self._builder.fadd(sum_8, chain)
                return [sum_8]

            (sum_8,) = self._loop(0, self._width, _DEPTH, [begun], add_depth)
            place = self._at(self._out, self._add(self._times(row, self._height), column))
            self._store(self._round_to_16_bits(sum_8), place, 2)

    def _whole_steps(self, num: Any) -> Any:
        """Round an index up to whole steps."""
        return self._builder.and_(self._add(num, _STEP - 1), self._index(-_STEP))

    def _multiply_rows(self, column: Any) -> None:
        """Multiply all rows by the part's columns, which are widened into the panel, depth by depth."""
        self._begin_sums(column)

        def add_depth(start: Any) -> None:
            num = self._min(self._index(_DEPTH), self._builder.sub(self._width, start))
            self._fill_panel(column, start, num)
            length = self._chain_share(self._whole_steps(num), 1)

            def add_chain(nth: Any) -> None:
                panel = self._chain(nth)
                self._multiply_chain(self._add(start, self._times(length, nth)), panel, length)

            self._each(0, self._index(EIGHT), 1, add_chain)

        self._each(0, self._width, _DEPTH, add_depth)
        self._write_rounded(column)

    def _chain(self, nth: Any) -> Any:
        """Return where a chain's weights begin in the panel.

        Chains lie a cache line further apart than they need, so that they share no cache set.
        """
        return self._at(self._panel, self._times(nth, (_DEPTH // EIGHT + 1) * self._columns))

    def _weights(self, column: Any) -> list[Any]:
        """Return the addresses of eight columns' weights."""
        rows = [self._times(self._add(column, row), self._width) for row in range(EIGHT)]
        return [self._at(self._weight, row) for row in rows]

    def _begin_sums(self, column: Any) -> None:
        """Set the sums of all rows to the bias, or to -0.0, which keeps the sign of what is added."""
        begun = [self._floats([-0.0] * self._lanes)] * _REGISTERS
        if self._has_bias:
            place = self._at(self._bias, column)
            begun = [
                self._load(register, self._floats) for register in self._register_places(place)
            ]

        def begin(row: Any, _: Sequence[Any]) -> list[Any]:
            for value, place in zip(
                begun, self._register_places(self._sums_place(row)), strict=True
            ):
                self._store(value, place)
            return []

        self._loop(0, self._add(self._num_rows, _ROWS), 1, [], begin)

    def _fill_panel(self, column: Any, start: Any, num: Any) -> None:
        """Widen `num` weights of each column into the panel, with zeros up to a whole step.

        Chain follows chain; within a chain all columns of one number stand side by side.
        """
        steps = self._builder.and_(num, self._index(-_STEP))
        chains = [self._chain(self._index(nth)) for nth in range(EIGHT)]
        zeros = self._floats([0.0] * self._lanes)

        def in_chain(at: Any) -> Any:
            return self._times(self._chain_share(at, 1), self._columns)

        def clear(at: Any) -> None:
            for chain in chains:
                for nth in range(2):
                    begin = self._at(self._at(chain, in_chain(at)), nth * self._columns)
                    for place in self._register_places(begin):
                        self._store(zeros, place)

        self._each(steps, num, _STEP, clear)
        for group in range(0, self._columns, EIGHT):
            places = [self._at(place, start) for place in self._weights(self._add(column, group))]

            def widen_some(at: Any, places: Any = places, group: int = group) -> None:
                # the next columns' weights, and the next depth of these
                for place in places:
                    self._prefetch_line(self._at(place, self._add(at, self._ahead)))
                    self._prefetch_line(self._at(place, self._add(at, _DEPTH)))
                words = [self._load_pairs(self._at(place, at)) for place in places]
                for chain, word_8 in zip(chains, self._transposed(words), strict=True):
                    begin = self._at(self._at(chain, in_chain(at)), group)
                    for nth, numbers in enumerate(self._both_halves(word_8)):
                        self._store(numbers, self._at(begin, nth * self._columns))

            def widen_one(at: Any, places: Any = places, group: int = group) -> None:
                behind = self._builder.sub(at, steps)
                chain = self._chain(self._builder.lshr(behind, self._index(1)))
                nth = self._builder.and_(behind, self._index(1))
                begin = self._at(self._at(chain, in_chain(steps)), self._times(nth, self._columns))
                for row, place in enumerate(places):
                    number = self._load_widened(self._at(place, at), 1)
                    self._builder.store(number, self._at(begin, group + row))

            self._each(0, steps, _STEP, widen_some)
            self._each(steps, num, 1, widen_one)

    def _multiply_chain(self, start: Any, panel: Any, length: Any) -> None:
        """Multiply `length` numbers of all rows by one chain's panel, and add that to their sums."""
        last = self._builder.sub(self._num_rows, self._index(1))

        def add_some(first: Any, _: Sequence[Any]) -> list[Any]:
            # past the end the last row is computed again, into sums that nothing reads
            rows = [self._min(self._add(first, row), last) for row in range(_ROWS)]
            places = [
                self._at(self._wide, self._add(self._times(row, self._whole), start))
                for row in rows
            ]

            def add_products(at: Any, sums: Sequence[Any]) -> list[Any]:
                for step in range(_UNROLLED):
                    sums = self._add_products(places, panel, self._add(at, step), sums)
                return list(sums)

            zeros = [self._floats([0.0] * self._lanes)] * (_ROWS * _REGISTERS)
            chains = self._loop(0, length, _UNROLLED, zeros, add_products)
            sums = [
                place
                for row in range(_ROWS)
                for place in self._register_places(self._sums_place(self._add(first, row)))
            ]
            for chain, place in zip(chains, sums, strict=True):
                before = self._load(place, self._floats)
                self._store(self._builder.fadd(before, chain), place)
            return []

        self._loop(0, self._num_rows, _ROWS, [], add_some)

    def _add_products(
        self, rows: Sequence[Any], panel: Any, at: Any, sums: Sequence[Any]
    ) -> list[Any]:
        """Add to the sums the products of number `at` of each row with the weights of all columns."""
        place = self._at(panel, self._times(at, self._columns))
        weights = [self._load(register, self._floats) for register in self._register_places(place)]
        numbers = [self._broadcast_at(row, at, self._floats) for row in rows]
        return self._fma_all(numbers, weights, sums)

    def _write_rounded(self, column: Any) -> None:
        def write_row(row: Any, _: Sequence[Any]) -> list[Any]:
            begin = self._add(self._times(row, self._height), column)
            for group in range(0, self._columns, EIGHT):
                place = self._at(self._sums_place(row), group)
                rounded = self._round_to_16_bits(self._load(place, self._eight))
                self._store(rounded, self._at(self._out, self._add(begin, group)), 2)
            return []

        self._loop(0, self._num_rows, 1, [], write_row)

    def _load_pairs(self, place: Any) -> Any:
        """Load sixteen 16-bit numbers as eight words of two."""
        return self._load(place, self._words, 2)

    def _transposed(self, rows: Sequence[Any]) -> list[Any]:
        """Transpose eight registers of eight numbers."""
        # first within each half of a register: one instruction, where other orders take two
        pairs = [
            self._shuffle(rows[row], rows[row + 1], order)
            for order in ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
            for row in range(0, EIGHT, 2)
        ]
        fours = [
            (
                self._shuffle(pairs[first], pairs[first + 1], order),
                self._shuffle(pairs[first + 2], pairs[first + 3], order),
            )
            for first in (0, 4)
            for order in ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        ]
        halves = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        return [self._shuffle(*four, half) for half in halves for four in fours]

    def _prefetch_line(self, place: Any) -> None:
        """Prefetch the cache line of a place; an address outside of memory does no harm."""
        start = self._builder.bitcast(place, self._prefetch.args[0].type)
        # to read it, and often, as data
        self._builder.call(self._prefetch, [start, self._int(0), self._int(3), self._int(1)])

    def _sums_place(self, row: Any) -> Any:
        return self._at(self._sums, self._times(row, self._columns))

    def _register_places(self, place: Any) -> list[Any]:
        """Return the addresses of the registers that follow one another from a place on."""
        return [self._at(place, nth * self._lanes) for nth in range(_REGISTERS)]
