"""Compiled functions on the threads that torch computes with.

Between two products these look for work, so a thread of another kind finds no core free. What is given to their own
team begins within microseconds, and none of them waits for Python's lock. Torch's OpenMP is asked for the team
(`GOMP_parallel`, which GNU's, LLVM's and Intel's have); where it has no such function a pool takes the team's place.
Invariant: each share is taken by one thread, and all were made when `run` returns.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

_SHARES = 4  # for each thread: the last one to end is waited for, and a core may be another's for a while
_LEAST_ROWS = 16  # of a share
_SHARE, _NUM_SHARES, _NUM_DONE, _NUM_ROWS, _FIRST = range(5)  # places in a table, in words of 8 bytes


class Job(NamedTuple):
    """A function in machine code that takes shares of what a table tells until none is left."""

    code: Any  # numba's, which must not go
    address: int
    call: Callable[[int], None]

    def run(self, num_rows: int, arguments: Sequence[Any]) -> None:
        """All rows, on as many threads as torch has now. Raises `RuntimeError` where a share has failed."""
        num_threads = torch.get_num_threads()
        num_shares = max(1, min(_SHARES * num_threads, num_rows // _LEAST_ROWS)) if num_threads > 1 else 1
        words = [0, num_shares, 0, num_rows, *(word for one in arguments for word in _words_of(one))]
        table = (ctypes.c_int64 * len(words))(*words)
        place = ctypes.addressof(table)
        if num_threads == 1 or num_shares == 1:
            self.call(place)
        elif (parallel := _parallel()) is not None:
            parallel(self.address, place, num_threads, 0)  # with fewer the others would end, to be started anew
        else:
            others = [_pool(num_threads - 1).submit(self.call, place) for _ in range(num_threads - 1)]
            self.call(place)
            for other in others:
                other.result()
        if table[_NUM_DONE] != num_shares:
            raise RuntimeError("a compiled function has failed, see above")


def job_for(function: Callable[..., Any], name: str, arguments: Sequence[Any]) -> Job:
    """Of a plain function of lo, hi and `arguments`: arrays and whole numbers; by its name numba keeps the code."""
    import numba
    from numba import types

    kinds = types.Tuple([_typed(one) for one in arguments])
    others = {"take": _take(), "read": _read(kinds), "end": _end(), "fill": numba.njit(function)}
    bound = FunctionType(_work.__code__, {**others, "range": range}, _work.__name__)
    bound.__module__, bound.__qualname__ = __name__, name
    signature = types.void(types.voidptr)
    try:
        code = numba.cfunc(signature, cache=True)(bound)
    except RuntimeError:  # no folder for a cache can be written
        code = numba.cfunc(signature)(bound)
    address = int(code.address or 0)
    assert address, "numba has compiled it"
    return Job(code, address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address))


def _work(table):  # type: ignore[no-untyped-def]
    arguments, num_shares, num_rows = read(table)  # type: ignore[name-defined]  # noqa: F821
    share = take(table)  # type: ignore[name-defined]  # noqa: F821
    while share < num_shares:
        fill(num_rows * share // num_shares, num_rows * (share + 1) // num_shares, *arguments)  # type: ignore[name-defined]  # noqa: F821
        end(table)  # type: ignore[name-defined]  # noqa: F821
        share = take(table)  # type: ignore[name-defined]  # noqa: F821


def _typed(argument: Any) -> Any:
    from numba import typeof, types

    return typeof(argument) if isinstance(argument, np.ndarray) else types.int64


def _words_of(argument: Any) -> Sequence[int]:
    """As numba has an array: owner and parent (none), numbers, bytes of one, place, shape, strides."""
    if not isinstance(argument, np.ndarray):
        return (int(argument),)
    place = argument.__array_interface__["data"][0]  # far quicker than `ctypes.data`
    return (0, 0, argument.size, argument.itemsize, place, *argument.shape, *argument.strides)


def _add_at(place: int) -> Any:
    """One more in a table; gives what there was."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    word = ir.IntType(64)

    @intrinsic
    def add(_context, table):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            words = builder.bitcast(args[0], word.as_pointer())
            counter = builder.gep(words, [word(place)])
            return builder.atomic_rmw("add", counter, word(1), "seq_cst")

        return types.int64(types.voidptr), generate

    return add


@cache
def _take() -> Any:
    return _add_at(_SHARE)


@cache
def _end() -> Any:
    return _add_at(_NUM_DONE)


def _read(kinds: Any) -> Any:
    """Arguments of these types, shares and rows from a table."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    word = ir.IntType(64)

    @intrinsic
    def read(_context, table):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            words = builder.bitcast(args[0], word.as_pointer())
            at, found = _FIRST, []
            for kind in kinds:
                place = builder.gep(words, [word(at)])
                found.append(builder.load(builder.bitcast(place, context.get_value_type(kind).as_pointer())))
                at += 5 + 2 * kind.ndim if isinstance(kind, types.Array) else 1
            counts = [builder.load(builder.gep(words, [word(place)])) for place in (_NUM_SHARES, _NUM_ROWS)]
            own = context.make_tuple(builder, kinds, found)
            return context.make_tuple(builder, signature.return_type, [own, *counts])

        return types.Tuple([kinds, types.int64, types.int64])(types.voidptr), generate

    return read


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """Of the library that torch itself has loaded, wherever it lies; None where it has no such function."""
    try:
        torch_itself = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
        parallel = None if torch_itself is None else ctypes.CDLL(str(torch_itself)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    if parallel is not None:
        parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel


def share_rows(work: Callable[[int, int], object], num_rows: int) -> None:
    """`work(lo, hi)` over all rows, shared among as many threads as torch has now; `work` holds no lock for long."""
    num_threads = min(torch.get_num_threads(), max(1, num_rows // _LEAST_ROWS))
    bounds = [num_rows * share // num_threads for share in range(num_threads + 1)]
    first, *shares = pairwise(bounds)
    others = [_pool(num_threads - 1).submit(work, lo, hi) for lo, hi in shares]
    try:
        work(*first)
    finally:  # nobody writes into memory that the caller takes back
        for other in others:
            other.exception()
    for other in others:
        other.result()


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="offload-expand")
