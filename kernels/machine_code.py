"""Machine code for loops that no library has, written as LLVM's instructions, through llvmlite.

For what takes most of a pass on a CPU and has to add up in a promised order: a library chooses its
own. numba has no words for some of it, takes more memory and a longer start.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# raised where code adds up in another order than before: what was kept has other bits then
ORDER = 2
# numbers that are loaded, widened and rounded at once
EIGHT = 8
_QUIET_NAN = 0x7FC0
# integers of a call before its own
NUM_SHARED = 3
# the memory of this process, and what Linux calls to let pages of it go
_PAGES = Path("/proc/self/smaps")
_MADV_DONTNEED = 4
_LIBRARY = "libllvmlite"


class ParallelKernelCall(NamedTuple):
    """Work that threads share by its parts, each of which has the same bits in any thread.

    Attributes:
        function: takes parts until none is left, without Python's lock. Its arguments: where `call`
            lies, and where room of its thread alone does.
        call: integers. First that of the first part that no thread has begun, which it raises; then
            how many parts it takes at once, and how many there are; then its own.
        num_room: float32 that the room has at least.
        num_products: that all parts make, about.
        held: what keeps the addresses valid that the code has.
        out: the result, once all parts were computed.
        alone: does what `function` does, with room on its own stack; None where that is too much.
    """

    function: Callable[[int, int], None]
    call: "ctypes.Array[ctypes.c_int64]"
    num_room: int
    num_products: int
    held: object
    out: Tensor
    alone: Callable[[int], None] | None = None

    @property
    def num_parts(self) -> int:
        return self.call[2]

    def begin(self, at_once: int) -> None:
        """Let all parts be taken, this many at once."""
        self.call[:2] = [0, at_once]

    def take_parts(self, room: Tensor) -> None:
        """Compute parts in this thread, in this room, until none is left."""
        self.function(ctypes.addressof(self.call), room.data_ptr())


def call_of(num_parts: int, given: Iterable[Tensor | int | None]) -> "ctypes.Array[ctypes.c_int64]":
    """Return the arguments of machine code, numbers and addresses; 0 for a missing one."""
    numbers = [
        argument.data_ptr() if isinstance(argument, Tensor) else argument or 0 for argument in given
    ]
    return (ctypes.c_int64 * (NUM_SHARED + len(numbers)))(0, 0, num_parts, *numbers)


@cache
def fused_lanes() -> int:
    """Return the float32 lanes of a register with fused products; 0 where no code can be made."""
    try:
        from llvmlite import binding

        features = binding.get_host_cpu_features()
        is_arm = binding.get_process_triple().startswith(("aarch64", "arm64"))
        _compile_module("define void @nothing() {\n  ret void\n}", {"nothing": []})
    except (ImportError, OSError, RuntimeError):
        return 0
    if features.get("avx512f"):
        return 16
    return EIGHT if is_arm or (features.get("fma") and features.get("f16c")) else 0


@cache
def emulates_bfloat16() -> bool:
    """Return True if the library multiplies bfloat16 by wider instructions, where code can be made.

    These are processors with AVX-512 and without its instructions for bfloat16: oneDNN multiplies
    there at half the rate of code that widens a weight once for all rows.
    """
    if not fused_lanes():
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    has_instructions = any(features.get(name) for name in ("avx512bf16", "amx-bf16"))
    return bool(features.get("avx512f")) and not has_instructions


@cache
def processor_features() -> Mapping[str, bool]:
    """Return LLVM's names of this processor's instructions; none where no code can be made."""
    if not fused_lanes():
        return {}
    from llvmlite import binding

    return dict(binding.get_host_cpu_features())


class CompiledCode(NamedTuple):
    """Functions of machine code by their names, and what keeps them in memory."""

    functions: Mapping[str, Callable[..., None]]
    engine: Any


def compiled(module: str, kinds: Mapping[str, Sequence[Any]]) -> CompiledCode:
    """Return functions of a module, each of which takes arguments of these kinds of `ctypes`."""
    code = _compile_module(module, kinds)
    drop_library_pages()
    return code


def _compile_module(module: str, kinds: Mapping[str, Sequence[Any]]) -> CompiledCode:
    """Return a module's functions, verified and compiled for this processor."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
    )
    code = binding.parse_assembly(module)
    code.verify()
    engine = binding.create_mcjit_compiler(code, machine)
    engine.finalize_object()
    functions = {
        name: ctypes.CFUNCTYPE(None, *signature)(engine.get_function_address(name))
        for name, signature in kinds.items()
    }
    return CompiledCode(functions, engine)


def drop_library_pages() -> None:
    """Free the pages of LLVM's library that this process has only read.

    They are 63 of its 74 MiB, and come back when they are needed, as for the next function. Pages
    that were ever written to have no file behind them and stay, even if they are read-only by now
    or shared with a forked child.
    """
    try:
        lines = _PAGES.read_text().splitlines()
    except OSError:
        return
    system = ctypes.CDLL(None)
    for start, end in _unwritten_ranges(lines):
        system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _unwritten_ranges(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of the library's mappings without written pages, from lines of smaps.

    Dirty pages do not count as written: those of a file that was just installed are dirty until
    they are on the disk.
    """
    mapping: list[str] = []  # addresses, permissions, ..., path
    written_kib = 0
    for line in lines:
        name, *values = line.split()
        if not name.endswith(":"):
            mapping = line.split()
            written_kib = 0
        elif name in ("Anonymous:", "Swap:"):
            written_kib += int(values[0])
        elif name == "VmFlags:":  # the last line of a mapping
            is_library = _LIBRARY in mapping[-1] and "w" not in mapping[1]
            if is_library and not written_kib:
                start, end = mapping[0].split("-")
                yield int(start, 16), int(end, 16)


class Code:
    """Writes the functions of one LLVM module through llvmlite, one after the other.

    Methods append instructions to the function that was begun last. Their arguments and results are
    LLVM's values, which stand for numbers at run time: an *index* is a 64-bit integer, for which a
    Python int may be given, a *place* an address, a *register* a vector.

    Args:
        dtype: of weights, keys or values in memory.
        lanes: float32 numbers of a register.
    """

    def __init__(self, dtype: torch.dtype, lanes: int) -> None:
        from llvmlite import ir

        self._ir = ir
        self._dtype = dtype
        self._lanes = lanes
        self._index = ir.IntType(64)
        self._int = ir.IntType(32)
        self._number = ir.FloatType().as_pointer()
        self._narrow = {
            torch.bfloat16: ir.IntType(16),
            torch.float16: ir.HalfType(),
            torch.float32: ir.FloatType(),
        }[dtype].as_pointer()
        self._floats = ir.VectorType(ir.FloatType(), lanes)
        self._eight = ir.VectorType(ir.FloatType(), EIGHT)
        self._words = ir.VectorType(self._int, EIGHT)
        self._shorts = ir.VectorType(ir.IntType(16), EIGHT)
        self._halves = ir.VectorType(ir.HalfType(), EIGHT)
        self._module = ir.Module()
        self._fused = dict[int, Any]()
        for kind in {EIGHT: self._eight, lanes: self._floats}.values():
            signature = ir.FunctionType(kind, [kind] * 3)
            name = f"llvm.fma.v{kind.count}f32"
            self._fused[kind.count] = ir.Function(self._module, signature, name)
        self._builder = ir.IRBuilder()

    def text(self) -> str:
        """Return the module in LLVM's language."""
        return str(self._module)

    def _begin(self, name: str, kinds: Sequence[Any]) -> Any:
        """Begin a function that returns nothing, and return it."""
        kind = self._ir.FunctionType(self._ir.VoidType(), kinds)
        function = self._ir.Function(self._module, kind, name)
        self._builder = self._ir.IRBuilder(function.append_basic_block())
        return function

    def _loop(
        self,
        start: Any,
        end: Any,
        step: int,
        begun: Sequence[Any],
        work: Callable[[Any, Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Write a do-while loop over [start, end), and return the values that it ends with.

        Args:
            begun: the values that it begins with.
            work: writes one round: takes the index and the values so far, returns the next ones.
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
        at.add_incoming(self._index(start) if isinstance(start, int) else start, before)
        at.add_incoming(following, builder.block)
        for phi, first, value in zip(carried, begun, values, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, builder.block)
        builder.position_at_end(behind)
        return values

    def _each(self, start: Any, end: Any, step: int, work: Callable[[Any], None]) -> None:
        """Write a for loop over [start, end), which may be empty; `work` writes one round."""
        first = self._index(start) if isinstance(start, int) else start

        def once(at: Any, _: Sequence[Any]) -> list[Any]:
            work(at)
            return []

        with self._builder.if_then(self._builder.icmp_signed("<", first, end)):
            self._loop(start, end, step, [], once)

    def _arguments(self, call: Any, kinds: Sequence[Any]) -> list[Any]:
        """Load a call's own arguments, as indices or as pointers; see `ParallelKernelCall`."""
        values = []
        for place, kind in enumerate(kinds):
            value = self._builder.load(self._at(call, NUM_SHARED + place))
            values.append(value if kind == self._index else self._builder.inttoptr(value, kind))
        return values

    def _share_parts(self, call: Any, work: Callable[[Any], None]) -> None:
        """Write a loop that takes parts until none is left; see `ParallelKernelCall`."""
        builder = self._builder
        at_once = builder.load(self._at(call, 1))
        num_parts = builder.load(self._at(call, 2))
        take = builder.append_basic_block()
        some = builder.append_basic_block()
        behind = builder.append_basic_block()
        builder.branch(take)
        builder.position_at_end(take)
        lo = builder.atomic_rmw("add", call, at_once, "monotonic")
        builder.cbranch(builder.icmp_signed("<", lo, num_parts), some, behind)
        builder.position_at_end(some)
        self._each(lo, self._min(builder.add(lo, at_once), num_parts), 1, work)
        builder.branch(take)
        builder.position_at_end(behind)

    def _at(self, place: Any, number: Any) -> Any:
        """Return the address `number` elements behind a place."""
        number = self._index(number) if isinstance(number, int) else number
        return self._builder.gep(place, [number])

    def _add(self, left: Any, other: Any) -> Any:
        return self._builder.add(left, self._index(other) if isinstance(other, int) else other)

    def _times(self, left: Any, other: Any) -> Any:
        return self._builder.mul(left, self._index(other) if isinstance(other, int) else other)

    def _min(self, left: Any, other: Any) -> Any:
        return self._builder.select(self._builder.icmp_signed("<", left, other), left, other)

    def _max(self, left: Any, other: Any) -> Any:
        return self._builder.select(self._builder.icmp_signed(">", left, other), left, other)

    def _load(self, place: Any, kind: Any, alignment: int = 4) -> Any:
        pointer = self._builder.bitcast(place, kind.as_pointer())
        return self._builder.load(pointer, align=alignment)

    def _store(self, value: Any, place: Any, alignment: int = 4) -> None:
        pointer = self._builder.bitcast(place, value.type.as_pointer())
        self._builder.store(value, pointer, align=alignment)

    def _broadcast(self, number: Any, kind: Any) -> Any:
        """Return a register of this kind full of one number."""
        first = self._builder.insert_element(kind(self._ir.Undefined), number, self._int(0))
        order = self._ir.VectorType(self._int, kind.count)([0] * kind.count)
        return self._builder.shuffle_vector(first, first, order)

    def _broadcast_at(self, place: Any, number: Any, kind: Any) -> Any:
        return self._broadcast(self._builder.load(self._at(place, number)), kind)

    def _shuffle(self, left: Any, other: Any, order: Sequence[int]) -> Any:
        """Return the numbers of two registers, one behind the other, in this order of places."""
        places = self._ir.VectorType(self._int, len(order))(list(order))
        return self._builder.shuffle_vector(left, other, places)

    def _fma(self, left: Any, right: Any, before: Any) -> Any:
        """Return left * right + before, lane by lane, rounded once."""
        return self._builder.call(self._fused[left.type.count], [left, right, before])

    def _fma_all(self, left: Sequence[Any], right: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        """Return `_fma` of each left with each right register and its sum, left after left."""
        pairs = [(first, other) for first in left for other in right]
        return [self._fma(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

    def _both_halves(self, words: Any) -> list[Any]:
        """Return the low and the high 16 bits of eight words, each as eight float32 numbers."""
        builder = self._builder
        sixteen = self._words([16] * EIGHT)
        if self._dtype == torch.bfloat16:
            low = builder.shl(words, sixteen)
            high = builder.and_(words, self._words([0xFFFF0000] * EIGHT))
            return [builder.bitcast(part, self._eight) for part in (low, high)]
        both = (words, builder.lshr(words, sixteen))
        parts = [builder.bitcast(builder.trunc(part, self._shorts), self._halves) for part in both]
        return [builder.fpext(part, self._eight) for part in parts]

    def _load_widened(self, place: Any, count: int = EIGHT) -> Any:
        """Load `count` numbers, 8 or 1, as float32; a single one is no register."""
        builder = self._builder
        if self._dtype == torch.float32:
            return self._load(place, self._eight) if count > 1 else builder.load(place)
        if self._dtype == torch.float16:
            halves = self._load(place, self._halves, 2) if count > 1 else builder.load(place)
            return builder.fpext(halves, self._eight if count > 1 else self._ir.FloatType())
        words = self._words if count > 1 else self._int
        sixteen = words([16] * EIGHT) if count > 1 else words(16)
        bits = self._load(place, self._shorts, 2) if count > 1 else builder.load(place)
        wide = builder.shl(builder.zext(bits, words), sixteen)
        return builder.bitcast(wide, self._eight if count > 1 else self._ir.FloatType())

    def _round_to_16_bits(self, numbers: Any) -> Any:
        """Round eight float32 numbers to the type in memory: to nearest, ties to even."""
        builder = self._builder
        if self._dtype == torch.float16:
            return builder.fptrunc(numbers, self._halves)
        sixteen = self._words([16] * EIGHT)
        bits = builder.bitcast(numbers, self._words)
        odd = builder.and_(builder.lshr(bits, sixteen), self._words([1] * EIGHT))
        nearest = builder.add(builder.add(bits, self._words([0x7FFF] * EIGHT)), odd)
        kept = builder.trunc(builder.lshr(nearest, sixteen), self._shorts)
        is_number = builder.fcmp_ordered("ord", numbers, numbers)
        return builder.select(is_number, kept, self._shorts([_QUIET_NAN] * EIGHT))
