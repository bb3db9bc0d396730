"""Products of float32 rows with weights of 16 bits, which are widened as they are multiplied.

For processors without such products. A library has float32 products alone, so it needs a copy of
the weight in float32: with a few rows making it takes most of the time, with many a third. Here
some columns' weights are widened into the nearest cache, `_CHAIN` numbers of each, and every row is
multiplied by them there. A number of the result is a sum of chains: so many products, each added to
those before by one fused operation; then the chains are added up. So a row's bits depend on nothing
but the row and the weight.

Weights of a column lie in rows, and a register should have one number of each of eight columns. So
sixteen numbers of eight rows are loaded as eight words of two numbers each, and the 8 x 8 words are
transposed.

Shape letters, in this file only: T rows, N columns of the result, K numbers of a row.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.machine_code import (
    EIGHT,
    Code,
    CompiledCode,
    Shared,
    compiled,
    fused_lanes,
)

# numbers of a weight's row that are transposed at once; what is left of a row comes one by one
_STEP = 16
_CHAIN = 12 * _STEP
# Of the result, whose sums stay in registers: so many rows, and registers of columns. Four by two
# were as quick with many rows as six by two, and quicker with a few.
_ROWS = 4
_REGISTERS = 2
# of which machine code is repeated, for fewer jumps
_UNROLLED = 2
_TYPES = (torch.bfloat16, torch.float16)
_ROWS_TO_WIDEN = 8  # that take as long as widening the weight does
_NAME = "multiply_columns"
_KINDS = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 4]


def can_multiply(weight_NK: Tensor) -> bool:
    """Tell whether `product_of` takes this weight on this processor."""
    is_ours = weight_NK.dtype in _TYPES and weight_NK.device.type == "cpu" and weight_NK.numel() > 0
    return is_ours and fused_lanes() > 0


class Product(NamedTuple):
    """A product to be computed: the work, and its result afterwards, in the weight's type."""

    work: Shared
    out_TN: Tensor


def product_of(row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Product:
    """Return the product of rows and a weight; its parts are of some columns.

    Args:
        row_TK: one row at least.
        weight_NK: that `can_multiply` admits.
        bias_N: of any type.
    """
    num_rows, width = row_TK.shape
    num_columns = weight_NK.shape[0]
    columns = fused_lanes() * _REGISTERS
    missing = max(0, columns - num_columns)
    weight_NK = pad(weight_NK, (0, 0, 0, missing)) if missing else weight_NK.contiguous()
    # behind a row zeros stand, up to a whole step
    row_TW = (
        pad(row_TK.float(), (0, -width % _STEP)) if width % _STEP else row_TK.float().contiguous()
    )
    if bias_N is not None:
        bias_N = pad(bias_N.float().expand(num_columns), (0, missing)).contiguous()
    code = _compiled(weight_NK.dtype, bias_N is not None, fused_lanes())
    out_TN = weight_NK.new_empty(num_rows, num_columns + missing)
    sizes = (num_rows, width, num_columns + missing)

    def multiply(begun: ctypes.c_int64, at_once: int, room: Tensor) -> None:
        bias = None if bias_N is None else bias_N.data_ptr()
        places = (row_TW.data_ptr(), weight_NK.data_ptr(), out_TN.data_ptr(), room.data_ptr())
        code.function(*places, bias, ctypes.byref(begun), *sizes, at_once)

    # weights of a chain, and sums of all rows and of those that are made up behind the last
    num_room = (_CHAIN + num_rows + _ROWS) * columns
    num_products = (num_rows + _ROWS_TO_WIDEN) * width * num_columns
    held = (row_TW, weight_NK, bias_N, out_TN)
    work = Shared(multiply, -(-sizes[2] // columns), num_room, num_products, held)
    return Product(work, out_TN[:, :num_columns])


@cache
def _compiled(dtype: torch.dtype, has_bias: bool, lanes: int) -> CompiledCode:
    return compiled(_Product(dtype, has_bias, lanes).text(), _NAME, _KINDS)


class _Product(Code):
    """The instructions of the product.

    Args:
        dtype: of the weight and the result.
        has_bias: whether there is one to begin with.
        lanes: numbers of a register.
    """

    def __init__(self, dtype: torch.dtype, has_bias: bool, lanes: int) -> None:
        super().__init__(dtype, lanes)
        self._has_bias = has_bias
        self._columns = lanes * _REGISTERS
        bits = self._narrow
        begun = self._index.as_pointer()
        given = [self._number, bits, bits, self._number, self._number, begun, *[self._index] * 4]
        bytes_ = self._ir.IntType(8).as_pointer()
        fetched = self._ir.FunctionType(self._ir.VoidType(), [bytes_, *[self._int] * 3])
        self._prefetch = self._ir.Function(self._module, fetched, "llvm.prefetch.p0")
        function = self._begin(_NAME, given)
        self._rows, self._weight, self._out, self._panel, self._bias, begun, *sizes = function.args
        self._num_rows, self._width, self._height, at_once = sizes
        self._whole = self._in_steps(self._width)
        self._ahead = self._times(self._width, self._columns)
        self._sums = self._at(self._panel, _CHAIN * self._columns)
        last = self._builder.sub(self._height, self._index(self._columns))
        up = self._add(self._height, self._columns - 1)
        num_parts = self._builder.udiv(up, self._index(self._columns))
        has_steps = self._builder.icmp_signed("==", self._width, self._whole)
        is_lone = self._builder.icmp_signed("==", self._num_rows, self._index(1))
        is_one = self._builder.and_(is_lone, has_steps)

        def multiply(part: Any) -> None:
            # the last columns may be computed again
            first = self._least(self._times(part, self._columns), last)
            with self._builder.if_else(is_one) as (alone, together):
                with alone:
                    self._multiply_row(first)
                with together:
                    self._multiply_rows(first)

        self._share(begun, at_once, num_parts, multiply)
        self._builder.ret_void()

    def _multiply_row(self, column: Any) -> None:
        """Multiply a lone row by some columns: their weights are needed once and never stored."""
        groups = range(0, self._columns, EIGHT)
        begun = [self._eight([-0.0] * EIGHT)] * len(groups)
        if self._has_bias:
            place = self._at(self._bias, column)
            begun = [self._loaded(self._at(place, group), self._eight) for group in groups]

        def add_chain(start: Any, sums: Sequence[Any]) -> list[Any]:
            num = self._least(self._index(_CHAIN), self._builder.sub(self._width, start))
            rows = [
                [self._at(place, start) for place in self._weights(self._add(column, group))]
                for group in groups
            ]

            def add_products(at: Any, chains: Sequence[Any]) -> list[Any]:
                here = self._at(self._rows, self._add(start, at))
                numbers = [self._builder.load(self._at(here, step)) for step in range(_STEP)]
                numbers = [self._repeated(number, self._eight) for number in numbers]
                added = []
                for places, chain in zip(rows, chains, strict=True):
                    for place in places:
                        self._fetch(self._at(place, self._add(at, self._ahead)))
                    for number, weights in zip(numbers, self._transposed(places, at), strict=True):
                        chain = self._added(number, weights, chain)
                    added.append(chain)
                return added

            nothing = [self._eight([0.0] * EIGHT)] * len(groups)
            chains = self._loop(0, num, _STEP, nothing, add_products)
            return [
                self._builder.fadd(before, chain)
                for before, chain in zip(sums, chains, strict=True)
            ]

        sums = self._loop(0, self._width, _CHAIN, begun, add_chain)
        for group, numbers in zip(groups, sums, strict=True):
            place = self._at(self._out, self._add(column, group))
            self._store(self._rounded(numbers), place, 2)

    def _in_steps(self, num: Any) -> Any:
        """Return the next multiple of a step."""
        return self._builder.and_(self._add(num, _STEP - 1), self._index(-_STEP))

    def _multiply_rows(self, column: Any) -> None:
        """Multiply all rows by some columns, chain after chain."""
        self._begin_sums(column)

        def add_chains(start: Any, _: Sequence[Any]) -> list[Any]:
            num = self._least(self._index(_CHAIN), self._builder.sub(self._width, start))
            self._widen(column, start, num)
            self._add_chains(start, self._in_steps(num))
            return []

        self._loop(0, self._width, _CHAIN, [], add_chains)
        self._write(column)

    def _weights(self, column: Any) -> list[Any]:
        """Return where the weights of eight columns begin."""
        rows = [self._times(self._add(column, row), self._width) for row in range(EIGHT)]
        return [self._at(self._weight, row) for row in rows]

    def _begin_sums(self, column: Any) -> None:
        """Let the sums of all rows be the bias, or what keeps the sign of all that is added."""
        begun = [self._floats([-0.0] * self._lanes)] * _REGISTERS
        if self._has_bias:
            place = self._at(self._bias, column)
            begun = [self._loaded(one, self._floats) for one in self._registers(place)]

        def begin(row: Any, _: Sequence[Any]) -> list[Any]:
            for value, place in zip(begun, self._registers(self._sums_of(row)), strict=True):
                self._store(value, place)
            return []

        self._loop(0, self._add(self._num_rows, _ROWS), 1, [], begin)

    def _widen(self, column: Any, start: Any, num: Any) -> None:
        """Leave `num` numbers of each column in the panel, column beside column, and zeros behind
        them up to a whole step.
        """
        steps = self._builder.and_(num, self._index(-_STEP))
        for group in range(0, self._columns, EIGHT):
            places = [self._at(place, start) for place in self._weights(self._add(column, group))]

            def widen_some(at: Any, places: Any = places, group: int = group) -> None:
                # what comes next in these rows, and in those of the next columns
                for place in places:
                    self._fetch(self._at(place, self._add(at, self._ahead)))
                    self._fetch(self._at(place, self._add(at, _CHAIN)))
                for step, numbers in enumerate(self._transposed(places, at)):
                    place = self._times(self._add(at, step), self._columns)
                    self._store(numbers, self._at(self._panel, self._add(place, group)))

            def widen_one(at: Any, places: Any = places, group: int = group) -> None:
                here = self._at(self._panel, self._add(self._times(at, self._columns), group))
                for nth, place in enumerate(places):
                    number = self._widened(self._at(place, at), 1)
                    self._builder.store(number, self._at(here, nth))

            self._each(0, steps, _STEP, widen_some)
            self._each(steps, num, 1, widen_one)

        def clear(at: Any) -> None:
            for place in self._registers(self._at(self._panel, self._times(at, self._columns))):
                self._store(self._floats([0.0] * self._lanes), place)

        self._each(num, self._in_steps(num), 1, clear)

    def _add_chains(self, start: Any, num: Any) -> None:
        """Multiply `num` numbers of all rows by the panel, and add that to their sums."""
        last = self._builder.sub(self._num_rows, self._index(1))

        def add_some(first: Any, _: Sequence[Any]) -> list[Any]:
            # beyond the last row it comes again, and its sums are left
            rows = [self._least(self._add(first, row), last) for row in range(_ROWS)]
            places = [
                self._at(self._rows, self._add(self._times(row, self._whole), start))
                for row in rows
            ]

            def add_products(at: Any, sums: Sequence[Any]) -> list[Any]:
                for step in range(_UNROLLED):
                    sums = self._products_added(places, self._add(at, step), sums)
                return list(sums)

            nothing = [self._floats([0.0] * self._lanes)] * (_ROWS * _REGISTERS)
            chains = self._loop(0, num, _UNROLLED, nothing, add_products)
            sums = [
                place
                for row in range(_ROWS)
                for place in self._registers(self._sums_of(self._add(first, row)))
            ]
            for chain, place in zip(chains, sums, strict=True):
                before = self._loaded(place, self._floats)
                self._store(self._builder.fadd(before, chain), place)
            return []

        self._loop(0, self._num_rows, _ROWS, [], add_some)

    def _products_added(self, rows: Sequence[Any], at: Any, sums: Sequence[Any]) -> list[Any]:
        """Add the products of one number of each row and those of all columns."""
        place = self._at(self._panel, self._times(at, self._columns))
        weights = [self._loaded(one, self._floats) for one in self._registers(place)]
        numbers = [
            self._repeated(self._builder.load(self._at(row, at)), self._floats) for row in rows
        ]
        pairs = [(number, weight) for number in numbers for weight in weights]
        return [self._added(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

    def _write(self, column: Any) -> None:
        def write_row(row: Any, _: Sequence[Any]) -> list[Any]:
            begin = self._add(self._times(row, self._height), column)
            for group in range(0, self._columns, EIGHT):
                place = self._at(self._sums_of(row), group)
                rounded = self._rounded(self._loaded(place, self._eight))
                self._store(rounded, self._at(self._out, self._add(begin, group)), 2)
            return []

        self._loop(0, self._num_rows, 1, [], write_row)

    def _transposed(self, rows: Sequence[Any], at: Any) -> list[Any]:
        """Load sixteen numbers of eight rows, and return them by column, in float32."""
        loaded = [self._loaded(self._at(row, at), self._words, 2) for row in rows]
        # within each half of a register, which takes one instruction where other orders take two
        pairs = [
            self._shuffled(loaded[row], loaded[row + 1], order)
            for order in ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
            for row in range(0, EIGHT, 2)
        ]
        fours = [
            [self._shuffled(pairs[pair], pairs[pair + 1], order) for pair in (first, first + 2)]
            for first in (0, 4)
            for order in ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        ]
        halves = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        whole = [self._shuffled(*four, half) for half in halves for four in fours]
        return [number for words in whole for number in self._both_of(words)]

    def _fetch(self, place: Any) -> None:
        """Let the memory there come nearer, for those who read it later; it need not exist."""
        start = self._builder.bitcast(place, self._prefetch.args[0].type)
        # to read it, and often, as data
        self._builder.call(self._prefetch, [start, self._int(0), self._int(3), self._int(1)])

    def _sums_of(self, row: Any) -> Any:
        return self._at(self._sums, self._times(row, self._columns))

    def _registers(self, place: Any) -> list[Any]:
        """Return where registers begin that lie behind one another."""
        return [self._at(place, which * self._lanes) for which in range(_REGISTERS)]
