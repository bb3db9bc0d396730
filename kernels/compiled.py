"""Numba where it is installed: what a CPU runs in place of chains of torch's operators.

Importing it takes 0.4 s and compiling a function as long, so both wait for the first call. Compiled
code is kept beside its file or in the user's cache (numba's own rule, `NUMBA_CACHE_DIR`); where
neither can be written it is compiled anew in every process. Invariant: nothing `compiled` is called
unless `HAS_NUMBA`.
"""

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from threading import Lock
from types import FunctionType
from typing import Any
from zlib import crc32

import torch

HAS_NUMBA = find_spec("numba") is not None
_LEAST_ROWS = 16  # of a thread's share
_LOCK = Lock()


class Compiled:
    """A function that numba compiles when it is first called, for each type of numbers it is to
    write; see `to`.

    It runs without Python's lock, on numpy arrays and numbers. Of what it finds in its module,
    other such functions are compiled with it; those that are `ByType` are taken for the type. An
    index in an inner loop has to be unsigned, or numba checks it and nothing is vectorised.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._for_type: dict[torch.dtype, Callable[..., Any]] = {}

    def to(self, dtype: torch.dtype) -> Callable[..., Any]:
        """The function for which the numbers written are of this type."""
        with _LOCK:
            if dtype not in self._for_type:
                self._for_type[dtype] = _kept(self.bound(dtype))
            return self._for_type[dtype]

    def __call__(self, *args: Any) -> Any:
        return self.to(torch.float32)(*args)

    def bound(self, dtype: torch.dtype) -> FunctionType:
        """The plain function with what it calls compiled; its name, by which numba keeps it, tells
        these apart.
        """
        import numba

        others = self._others(dtype)
        plain = self.function
        found = {name: numba.njit(one.bound(dtype)) for name, one in others.items()}
        bound = FunctionType(
            plain.__code__, {**plain.__globals__, **found}, plain.__name__, None, plain.__closure__
        )
        bound.__module__ = plain.__module__
        # To see whether what it has kept is up to date, numba looks at this function's file only.
        sources = "".join(one.source(dtype) for one in others.values())
        bound.__qualname__ = f"{plain.__qualname__}_{crc32(sources.encode()):08x}"
        return bound

    def _others(self, dtype: torch.dtype) -> "dict[str, Compiled]":
        """What it calls, by name."""
        named = {
            name: self.function.__globals__.get(name) for name in self.function.__code__.co_names
        }
        chosen = {
            name: one.of(dtype) if isinstance(one, ByType) else one for name, one in named.items()
        }
        return {name: one for name, one in chosen.items() if isinstance(one, Compiled)}

    def source(self, dtype: torch.dtype) -> str:
        """The text of the function and of those that it calls."""
        return inspect.getsource(self.function) + "".join(
            one.source(dtype) for one in self._others(dtype).values()
        )


class ByType:
    """One of several compiled functions, by the type of the numbers that are written."""

    def __init__(self, functions: Mapping[torch.dtype, Compiled]) -> None:
        self._functions = functions

    def of(self, dtype: torch.dtype) -> Compiled:
        """The one for that type."""
        return self._functions[dtype]

    def __call__(self, *args: Any) -> Any:
        raise TypeError("only compiled functions call it")


def compiled(function: Callable[..., Any]) -> Compiled:
    """The function as numba will compile it; to be used as a decorator."""
    return Compiled(function)


def share_rows(work: Callable[[int, int], object], num_rows: int) -> None:
    """`work(lo, hi)` over all rows, shared among as many threads as torch has now; `work` holds no
    lock for long.
    """
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


def _kept(function: FunctionType) -> Callable[..., Any]:
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for a cache can be written
        return numba.njit(nogil=True)(function)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="offload-expand")
