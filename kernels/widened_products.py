"""Products of float32 rows with weights of 16 bits, which are widened as they are multiplied.

For processors without such products. A library has float32 products alone, so it needs a copy of
the weight in float32: with a few rows making it takes most of the time, with many a third. Here
some columns' weights are widened into the nearest cache, `_CHAIN` numbers of each, and every row is
multiplied by them there. A number of the result is a sum of chains: so many products, each added to
those before by one fused operation; then the chains are added up. So a row's bits depend on nothing
but the row and the weight.

Weights of a column lie in rows, and a register should have one number of each of eight columns. So
sixteen numbers of eight rows are loaded as eight words of two numbers each, and the 8 x 8 words are
transposed. All that is said to LLVM directly, through llvmlite: numba has no words for it, and
takes more memory and a longer start.

Shape letters, in this file only: T rows, N columns of the result, K numbers of a row.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

HAS_LLVM = find_spec("llvmlite") is not None
# numbers of a weight's row in a register; a width is a multiple
_STEP = 16
_CHAIN = 12 * _STEP
# Of the result, whose sums stay in registers: so many rows, and registers of columns. Four by two
# were as quick with many rows as six by two, and quicker with a few.
_ROWS = 4
_REGISTERS = 2
# columns that are transposed at once
_TRANSPOSED = 8
# of which machine code is repeated, for fewer jumps
_UNROLLED = 2
_TYPES = (torch.bfloat16, torch.float16)
_QUIET_NAN = 0x7FC0
_NAME = "multiply_columns"
# the memory of this process, and what Linux calls to let pages of it go
_PAGES = Path("/proc/self/smaps")
_MADV_DONTNEED = 4


class Product(NamedTuple):
    """A product that threads share by its columns.

    Attributes:
        multiply: takes the first column and the one behind the last, all but the last of them
            multiples of `columns`, and room for as many float32 as `num_room`, which is of one
            thread alone meanwhile. It does not hold Python's lock.
        columns: that are computed at once.
        num_room: see there.
    """

    multiply: Callable[[int, int, Tensor], None]
    columns: int
    num_room: int


def can_multiply(weight_NK: Tensor) -> bool:
    """Tell whether `product_of` takes this weight on this processor."""
    return (
        HAS_LLVM
        and weight_NK.dtype in _TYPES
        and weight_NK.device.type == "cpu"
        and weight_NK.is_contiguous()
        and weight_NK.shape[1] % _STEP == 0
        and 0 < _lanes() * _REGISTERS <= weight_NK.shape[0]
    )


def product_of(row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> Product:
    """Return the product of rows and a weight, to be computed.

    All tensors are contiguous.

    Args:
        row_TK: in float32, one row at least.
        weight_NK: that `can_multiply` admits.
        bias_N: in float32.
        out_TN: in the weight's type.
    """
    code = _compiled(weight_NK.dtype, bias_N is not None, _lanes())
    columns = _lanes() * _REGISTERS
    # weights of a chain, and sums of all rows and of those that are made up behind the last
    num_room = (_CHAIN + len(row_TK) + _ROWS) * columns
    sizes = (*row_TK.shape, len(weight_NK))

    def multiply(lo: int, hi: int, room: Tensor) -> None:
        bias = None if bias_N is None else bias_N.data_ptr()
        places = (row_TK.data_ptr(), weight_NK.data_ptr(), out_TN.data_ptr(), room.data_ptr())
        code.function(*places, bias, *sizes, lo, hi)

    return Product(multiply, columns, num_room)


@cache
def _lanes() -> int:
    """Return how many float32 a register has whose products are fused; 0 if none has any."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    is_arm = binding.get_process_triple().startswith(("aarch64", "arm64"))
    if features.get("avx512f"):
        return 16
    return 8 if is_arm or (features.get("fma") and features.get("f16c")) else 0


class _Compiled(NamedTuple):
    """A function of machine code, and what keeps it in memory."""

    function: Callable[..., None]
    engine: Any


@cache
def _compiled(dtype: torch.dtype, has_bias: bool, lanes: int) -> _Compiled:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
    )
    code = binding.parse_assembly(_Code(dtype, has_bias, lanes).text())
    code.verify()
    engine = binding.create_mcjit_compiler(code, machine)
    engine.finalize_object()
    _give_back("libllvmlite")
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 5)
    return _Compiled(kind(engine.get_function_address(_NAME)), engine)


def _give_back(library: str) -> None:
    """Take what is read of a library's file out of this process's memory.

    Of LLVM's 74 MiB 63 are such pages. They come again if they are needed again, as for the next
    function; what was written to stays.
    """
    if not _PAGES.exists():
        return
    system = ctypes.CDLL(None)
    place: list[str] = []
    for line in _PAGES.read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            place = line.split()
        elif name == "Private_Dirty:" and values[0] == "0" and library in place[-1]:
            start, end = (int(bound, 16) for bound in place[0].split("-"))
            if "w" not in place[1]:
                system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


class _Code:
    """The instructions of one function, as llvmlite writes them.

    Args:
        dtype: of the weight and the result.
        has_bias: whether there is one to begin with.
        lanes: numbers of a register.
    """

    def __init__(self, dtype: torch.dtype, has_bias: bool, lanes: int) -> None:
        from llvmlite import ir

        self._dtype = dtype
        self._has_bias = has_bias
        self._lanes = lanes
        self._columns = lanes * _REGISTERS
        self._index = ir.IntType(64)
        self._int = ir.IntType(32)
        self._floats = ir.VectorType(ir.FloatType(), lanes)
        self._eight = ir.VectorType(ir.FloatType(), _TRANSPOSED)
        self._words = ir.VectorType(self._int, _TRANSPOSED)
        self._shorts = ir.VectorType(ir.IntType(16), _TRANSPOSED)
        self._halves = ir.VectorType(ir.HalfType(), _TRANSPOSED)
        self._module = ir.Module()
        number = ir.FloatType().as_pointer()
        bits = ir.IntType(16).as_pointer()
        given = [number, bits, bits, number, number, *[self._index] * 5]
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), given), _NAME)
        fused = ir.FunctionType(self._floats, [self._floats] * 3)
        self._fused = ir.Function(self._module, fused, f"llvm.fma.v{lanes}f32")
        self._same = ir.VectorType(self._int, lanes)([0] * lanes)
        self._undefined = self._floats(ir.Undefined)
        bytes_ = ir.IntType(8).as_pointer()
        fetched = ir.FunctionType(ir.VoidType(), [bytes_, *[self._int] * 3])
        self._prefetch = ir.Function(self._module, fetched, "llvm.prefetch.p0")
        self._builder = ir.IRBuilder(function.append_basic_block())
        self._rows, self._weight, self._out, self._panel, self._bias, *sizes = function.args
        self._num_rows, self._width, self._height, self._lo, self._hi = sizes
        self._ahead = self._builder.mul(self._width, self._index(self._columns))
        self._sums = self._at(self._panel, self._index(_CHAIN * self._columns))

    def text(self) -> str:
        """Return the function: some columns after others, and in them chain after chain."""
        last = self._builder.sub(self._height, self._index(self._columns))

        def multiply_columns(column: Any, _: Sequence[Any]) -> list[Any]:
            # the last ones may be computed again
            first = self._least(column, last)
            self._begin_sums(first)

            def add_chains(start: Any, _: Sequence[Any]) -> list[Any]:
                num = self._least(self._index(_CHAIN), self._builder.sub(self._width, start))
                self._widen(first, start, num)
                self._add_chains(start, num)
                return []

            self._loop(0, self._width, _CHAIN, [], add_chains)
            self._write(first)
            return []

        self._loop(self._lo, self._hi, self._columns, [], multiply_columns)
        self._builder.ret_void()
        return str(self._module)

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
        """Leave `num` numbers of each column in the panel, column beside column."""
        for group in range(0, self._columns, _TRANSPOSED):
            rows = [self._add(column, group + row) for row in range(_TRANSPOSED)]
            places = [
                self._at(self._weight, self._add(self._times(row, self._width), start))
                for row in rows
            ]

            def widen_some(
                at: Any, _: Sequence[Any], places: Any = places, group: int = group
            ) -> list[Any]:
                # what comes next in these rows, and in those of the next columns
                for place in places:
                    self._fetch(self._at(place, self._add(at, self._ahead)))
                    self._fetch(self._at(place, self._add(at, _CHAIN)))
                for step, numbers in enumerate(self._transposed(places, at)):
                    place = self._times(self._add(at, step), self._columns)
                    self._store(numbers, self._at(self._panel, self._add(place, group)))
                return []

            self._loop(0, num, _STEP, [], widen_some)

    def _add_chains(self, start: Any, num: Any) -> None:
        """Multiply `num` numbers of all rows by the panel, and add that to their sums."""
        last = self._builder.sub(self._num_rows, self._index(1))

        def add_some(first: Any, _: Sequence[Any]) -> list[Any]:
            # beyond the last row it comes again, and its sums are left
            rows = [self._least(self._add(first, row), last) for row in range(_ROWS)]
            places = [
                self._at(self._rows, self._add(self._times(row, self._width), start))
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
        numbers = [self._repeated(self._at(row, at)) for row in rows]
        pairs = [(number, weight) for number in numbers for weight in weights]
        return [
            self._builder.call(self._fused, [*pair, before])
            for pair, before in zip(pairs, sums, strict=True)
        ]

    def _write(self, column: Any) -> None:
        def write_row(row: Any, _: Sequence[Any]) -> list[Any]:
            begin = self._add(self._times(row, self._height), column)
            for group in range(0, self._columns, _TRANSPOSED):
                place = self._at(self._sums_of(row), self._index(group))
                rounded = self._rounded(self._loaded(place, self._eight))
                self._store(rounded, self._at(self._out, self._add(begin, group)), 2)
            return []

        self._loop(0, self._num_rows, 1, [], write_row)

    def _transposed(self, rows: Sequence[Any], at: Any) -> list[Any]:
        """Load sixteen numbers of eight rows, and return them by column, in float32."""
        loaded = [self._loaded(self._at(row, at), self._words, 2) for row in rows]

        def merge(order: list[int], one: Any, other: Any) -> Any:
            return self._builder.shuffle_vector(one, other, self._words(order))

        # within each half of a register, which takes one instruction where other orders take two
        pairs = [
            merge(order, loaded[row], loaded[row + 1])
            for order in ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
            for row in range(0, _TRANSPOSED, 2)
        ]
        fours = [
            [merge(order, pairs[pair], pairs[pair + 1]) for pair in (first, first + 2)]
            for first in (0, 4)
            for order in ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        ]
        halves = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        whole = [merge(half, *four) for half in halves for four in fours]
        return [number for words in whole for number in self._both_of(words)]

    def _both_of(self, words: Any) -> list[Any]:
        """Return the first and the second number of every word, in float32."""
        builder = self._builder
        sixteen = self._words([16] * _TRANSPOSED)
        if self._dtype == torch.bfloat16:
            low = builder.shl(words, sixteen)
            high = builder.and_(words, self._words([0xFFFF0000] * _TRANSPOSED))
            return [builder.bitcast(part, self._eight) for part in (low, high)]
        both = (words, builder.lshr(words, sixteen))
        parts = [builder.bitcast(builder.trunc(part, self._shorts), self._halves) for part in both]
        return [builder.fpext(part, self._eight) for part in parts]

    def _rounded(self, numbers: Any) -> Any:
        """Return numbers of 16 bits: to nearest, ties to even."""
        builder = self._builder
        if self._dtype == torch.float16:
            return builder.fptrunc(numbers, self._halves)
        sixteen = self._words([16] * _TRANSPOSED)
        bits = builder.bitcast(numbers, self._words)
        odd = builder.and_(builder.lshr(bits, sixteen), self._words([1] * _TRANSPOSED))
        nearest = builder.add(builder.add(bits, self._words([0x7FFF] * _TRANSPOSED)), odd)
        kept = builder.trunc(builder.lshr(nearest, sixteen), self._shorts)
        is_number = builder.fcmp_ordered("ord", numbers, numbers)
        return builder.select(is_number, kept, self._shorts([_QUIET_NAN] * _TRANSPOSED))

    def _loop(
        self,
        start: Any,
        end: Any,
        step: int,
        begun: Sequence[Any],
        work: Callable[[Any, Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Write a loop that runs once at least, and return the values behind it.

        Args:
            begun: values before it.
            work: writes a round: from the index and the values before it to those behind it.
        """
        builder = self._builder
        before = builder.block
        loop = builder.append_basic_block()
        behind = builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(self._index)
        carried = [builder.phi(value.type) for value in begun]
        values = work(at, carried)
        following = self._add(at, step)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, behind)
        at.add_incoming(self._index(0) if start == 0 else start, before)
        at.add_incoming(following, builder.block)
        for phi, first, value in zip(carried, begun, values, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, builder.block)
        builder.position_at_end(behind)
        return values

    def _fetch(self, place: Any) -> None:
        """Let the memory there come nearer, for those who read it later; it need not exist."""
        start = self._builder.bitcast(place, self._prefetch.args[0].type)
        # to read it, and often, as data
        self._builder.call(self._prefetch, [start, self._int(0), self._int(3), self._int(1)])

    def _sums_of(self, row: Any) -> Any:
        return self._at(self._sums, self._times(row, self._columns))

    def _registers(self, place: Any) -> list[Any]:
        """Return where registers begin that lie behind one another."""
        return [self._at(place, self._index(which * self._lanes)) for which in range(_REGISTERS)]

    def _at(self, place: Any, number: Any) -> Any:
        return self._builder.gep(place, [number])

    def _add(self, one: Any, other: Any) -> Any:
        return self._builder.add(one, self._index(other) if isinstance(other, int) else other)

    def _times(self, one: Any, other: Any) -> Any:
        return self._builder.mul(one, self._index(other) if isinstance(other, int) else other)

    def _least(self, one: Any, other: Any) -> Any:
        return self._builder.select(self._builder.icmp_signed("<", one, other), one, other)

    def _loaded(self, place: Any, kind: Any, alignment: int = 4) -> Any:
        pointer = self._builder.bitcast(place, kind.as_pointer())
        return self._builder.load(pointer, align=alignment)

    def _store(self, value: Any, place: Any, alignment: int = 4) -> None:
        pointer = self._builder.bitcast(place, value.type.as_pointer())
        self._builder.store(value, pointer, align=alignment)

    def _repeated(self, place: Any) -> Any:
        """Return a register full of the number that lies there."""
        number = self._builder.load(place)
        first = self._builder.insert_element(self._undefined, number, self._int(0))
        return self._builder.shuffle_vector(first, self._undefined, self._same)
