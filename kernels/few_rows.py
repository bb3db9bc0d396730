"""Products of a few rows with weights of 16 bits, with the bits of the library's float32 product.

A library is fast where many rows are multiplied by a block of widened weights. With a few rows the
widening takes most of the time, so here weights are widened in registers, and read once. A number
of the result is a sum of chains: `length` products, each added to those before by one fused
operation; then the chains are added up. So are the float32 products of MKL for four rows and more,
whose length depends on the processor: `find_length` finds it by trial.

Eight columns are computed at once. Their weights lie in rows, so sixteen numbers of each of the
eight rows are loaded as eight words of two numbers, and the 8 x 8 words are transposed: then a
register has two numbers of every column. That is said to LLVM directly, through llvmlite, which
takes a third of the memory and of the start that numba does.

Shape letters, in this file only: T rows, N columns of the result, K numbers of a row.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

HAS_LLVM = find_spec("llvmlite") is not None
# whose sums stay in registers beside the weights
_ROWS = 4
# of the result at once, a register of float32; a weight's height is a multiple
COLUMNS = 8
# numbers of a weight's row in a register; widths and lengths are multiples
_STEP = 16
_TRIED_ROWS = 16
_TYPES = (torch.bfloat16, torch.float16)
_WITHOUT_REGISTERS = ("DEFAULT", "NO AVX")
_QUIET_NAN = 0x7FC0


def can_multiply(weight_NK: Tensor) -> bool:
    """Tell whether `columns_of` takes this weight on this processor."""
    return (
        HAS_LLVM
        and weight_NK.dtype in _TYPES
        and weight_NK.is_contiguous()
        and weight_NK.shape[0] % COLUMNS == 0
        and weight_NK.shape[1] % _STEP == 0
        and torch.backends.cpu.get_cpu_capability() not in _WITHOUT_REGISTERS
    )


def columns_of(
    row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, length: int, out_TN: Tensor
) -> Callable[[int, int], None]:
    """Return what multiplies rows by some columns of a weight, on the thread that calls it.

    It takes the first column, and the one behind the last; both are multiples of `COLUMNS`. All
    tensors are contiguous.

    Args:
        row_TK: in float32, one row at least.
        weight_NK: that `can_multiply` admits.
        bias_N: in float32.
        length: of a chain, a multiple of 16.
        out_TN: in the weight's type.
    """
    function = _compiled(weight_NK.dtype, bias_N is not None).function
    sizes = (*row_TK.shape, len(weight_NK), length)

    def multiply(lo: int, hi: int) -> None:
        bias = None if bias_N is None else bias_N.data_ptr()
        function(row_TK.data_ptr(), weight_NK.data_ptr(), bias, out_TN.data_ptr(), *sizes, lo, hi)

    return multiply


def find_length(weight_NK: Tensor, *, has_bias: bool) -> int:
    """Return the length of chains that has the bits of the library's product, or 0.

    The numbers that are tried cancel, so that of each sum nothing but its rounding is left.

    Args:
        weight_NK: as much of a weight as the library multiplies at once.
    """
    num_columns, width = weight_NK.shape
    chance = torch.Generator().manual_seed(0)
    order = torch.randperm(width // 2, generator=chance)
    row_TH = torch.randn(_TRIED_ROWS, width // 2, generator=chance)
    weight_NH = torch.randn(num_columns, width // 2, generator=chance).to(weight_NK.dtype)
    row_TK = torch.cat([row_TH, row_TH[:, order]], 1)
    like_NK = torch.cat([weight_NH, -weight_NH[:, order]], 1)
    # as large as what is left of a sum
    bias_N = torch.randn(num_columns, generator=chance) * width**0.5 * 2**-24 if has_bias else None
    block_KN = like_NK.float().t()
    wanted_TN = (
        torch.mm(row_TK, block_KN) if bias_N is None else torch.addmm(bias_N, row_TK, block_KN)
    ).to(weight_NK.dtype)
    out_TN = torch.empty_like(wanted_TN)
    for length in range(_STEP, width + 1, _STEP):
        multiply = columns_of(row_TK, like_NK, bias_N, length, out_TN)
        multiply(0, COLUMNS)
        if torch.equal(out_TN[:, :COLUMNS], wanted_TN[:, :COLUMNS]):
            multiply(0, num_columns)
            return length if torch.equal(out_TN, wanted_TN) else 0
    return 0


class _Compiled(NamedTuple):
    """A function of machine code, and what keeps it in memory."""

    function: Callable[..., None]
    engine: Any


@cache
def _compiled(dtype: torch.dtype, has_bias: bool) -> _Compiled:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
    )
    code = binding.parse_assembly(_Code(dtype, has_bias).text())
    code.verify()
    engine = binding.create_mcjit_compiler(code, machine)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 6)
    return _Compiled(kind(engine.get_function_address(_NAME)), engine)


_NAME = "multiply_columns"


class _Code:
    """The instructions of one function, as llvmlite writes them.

    Args:
        dtype: of the weight and the result.
        has_bias: whether there is one to begin with.
    """

    def __init__(self, dtype: torch.dtype, has_bias: bool) -> None:
        from llvmlite import ir

        self._dtype = dtype
        self._has_bias = has_bias
        self._index = ir.IntType(64)
        self._floats = ir.VectorType(ir.FloatType(), COLUMNS)
        self._words = ir.VectorType(ir.IntType(32), COLUMNS)
        self._shorts = ir.VectorType(ir.IntType(16), COLUMNS)
        self._halves = ir.VectorType(ir.HalfType(), COLUMNS)
        self._module = ir.Module()
        number = ir.FloatType().as_pointer()
        bits = ir.IntType(16).as_pointer()
        given = [number, bits, number, bits, *[self._index] * 6]
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), given), _NAME)
        fused = ir.FunctionType(self._floats, [self._floats] * 3)
        self._fused = ir.Function(self._module, fused, "llvm.fma.v8f32")
        self._undefined = self._floats(ir.Undefined)
        self._first = ir.IntType(32)(0)
        self._args = function.args
        self._builder = ir.IRBuilder(function.append_basic_block())

    def text(self) -> str:
        """Return the function: all columns, a few rows at once, chain after chain."""
        *_, num_rows, _, _, _, lo, hi = self._args
        index = self._index

        def multiply_column(column: Any, _: Sequence[Any]) -> list[Any]:
            def multiply_rows(first: Any, _: Sequence[Any]) -> list[Any]:
                self._multiply(column, first)
                return []

            return self._loop(index(0), num_rows, index(_ROWS), [], multiply_rows)

        self._loop(lo, hi, index(COLUMNS), [], multiply_column)
        self._builder.ret_void()
        return str(self._module)

    def _multiply(self, column: Any, first: Any) -> None:
        """Multiply the rows that begin with `first` by the columns that begin with `column`."""
        rows, weight, bias, out, num_rows, width, height, length, *_ = self._args
        builder = self._builder
        last = builder.sub(num_rows, self._index(1))
        weights = self._places(weight, column, COLUMNS, width)
        numbers = self._places(rows, first, _ROWS, width, last)

        def add_products(at: Any, sums: Sequence[Any]) -> list[Any]:
            for step, factors in enumerate(self._columns_at(weights, at)):
                place = builder.add(at, self._index(step))
                ones = [self._repeated(builder.gep(row, [place])) for row in numbers]
                pairs = zip(ones, sums, strict=True)
                sums = [builder.call(self._fused, [one, factors, before]) for one, before in pairs]
            return list(sums)

        def add_chain(start: Any, sums: Sequence[Any]) -> list[Any]:
            end = self._least(builder.add(start, length), width)
            nothing = [self._floats([0.0] * COLUMNS)] * _ROWS
            chain = self._loop(start, end, self._index(_STEP), nothing, add_products)
            return [builder.fadd(*both) for both in zip(sums, chain, strict=True)]

        # what is added to -0.0 keeps its bits, its sign as well
        begun = self._floats([-0.0] * COLUMNS)
        if self._has_bias:
            begun = self._loaded(builder.gep(bias, [column]), self._floats, 4)
        sums = self._loop(self._index(0), width, length, [begun] * _ROWS, add_chain)
        places = self._places(out, first, _ROWS, height, last)
        for added, row in zip(sums, places, strict=True):
            rounded = self._rounded(added)
            place = builder.bitcast(builder.gep(row, [column]), rounded.type.as_pointer())
            builder.store(rounded, place, align=2)

    def _loop(
        self,
        start: Any,
        end: Any,
        step: Any,
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
        following = builder.add(at, step)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, behind)
        at.add_incoming(start, before)
        at.add_incoming(following, builder.block)
        for phi, first, value in zip(carried, begun, values, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, builder.block)
        builder.position_at_end(behind)
        return values

    def _places(
        self, start: Any, first: Any, count: int, stride: Any, last: Any = None
    ) -> list[Any]:
        """Return where rows begin; instead of those beyond the last one it comes again."""
        own = [self._builder.add(first, self._index(which)) for which in range(count)]
        if last is not None:
            own = [self._least(row, last) for row in own]
        return [self._builder.gep(start, [self._builder.mul(row, stride)]) for row in own]

    def _columns_at(self, rows: Sequence[Any], at: Any) -> list[Any]:
        """Load sixteen numbers of eight rows, and return them by column, in float32."""
        builder = self._builder
        loaded = [self._loaded(builder.gep(row, [at]), self._words, 2) for row in rows]

        def merge(order: list[int], one: Any, other: Any) -> Any:
            return builder.shuffle_vector(one, other, self._words(order))

        # within each half of a register, which takes one instruction where other orders take two
        pairs = [
            merge(order, loaded[row], loaded[row + 1])
            for order in ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
            for row in range(0, COLUMNS, 2)
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
        sixteen = self._words([16] * COLUMNS)
        if self._dtype == torch.bfloat16:
            low = builder.shl(words, sixteen)
            high = builder.and_(words, self._words([0xFFFF0000] * COLUMNS))
            return [builder.bitcast(part, self._floats) for part in (low, high)]
        parts = [
            builder.trunc(part, self._shorts) for part in (words, builder.lshr(words, sixteen))
        ]
        return [builder.fpext(builder.bitcast(part, self._halves), self._floats) for part in parts]

    def _rounded(self, numbers: Any) -> Any:
        """Return numbers of 16 bits: to nearest, ties to even."""
        builder = self._builder
        if self._dtype == torch.float16:
            return builder.fptrunc(numbers, self._halves)
        sixteen = self._words([16] * COLUMNS)
        bits = builder.bitcast(numbers, self._words)
        odd = builder.and_(builder.lshr(bits, sixteen), self._words([1] * COLUMNS))
        nearest = builder.add(builder.add(bits, self._words([0x7FFF] * COLUMNS)), odd)
        kept = builder.trunc(builder.lshr(nearest, sixteen), self._shorts)
        is_number = builder.fcmp_ordered("ord", numbers, numbers)
        return builder.select(is_number, kept, self._shorts([_QUIET_NAN] * COLUMNS))

    def _least(self, one: Any, other: Any) -> Any:
        return self._builder.select(self._builder.icmp_signed("<", one, other), one, other)

    def _loaded(self, place: Any, kind: Any, alignment: int) -> Any:
        return self._builder.load(self._builder.bitcast(place, kind.as_pointer()), align=alignment)

    def _repeated(self, place: Any) -> Any:
        """Return a register full of the number that lies there."""
        number = self._builder.load(place)
        first = self._builder.insert_element(self._undefined, number, self._first)
        return self._builder.shuffle_vector(first, self._undefined, self._words([0] * COLUMNS))
