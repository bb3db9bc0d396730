"""Numba where it is installed: compiled loops in place of chains of torch's operators on a CPU.

Importing numba takes 0.4 s and compiling a function as long, so both wait for the first call.
Compiled code is kept beside its file or in the user's cache (numba's own rule, `NUMBA_CACHE_DIR`);
where neither can be written it is compiled again in every process. Invariant: nothing `compiled` is
called unless `runs_numba`, but to try it.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from importlib.util import find_spec
from itertools import pairwise
from threading import Lock
from types import FunctionType
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

import torch

HAS_NUMBA = find_spec("numba") is not None  # which may still refuse the NumPy beside it
_LEAST_ROWS = 16  # in a thread's share
_LOCK = Lock()


_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@cache
def runs_numba() -> bool:
    """Return True if numba is there, and works with the libraries beside it."""
    try:
        import numba  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def faster(
    code: Callable[_Given, _Made],
    reference: Callable[_Given, _Made],
    runs: Callable[[], object] = runs_numba,
) -> Callable[_Given, _Made]:
    """Return the function that is compiled where that `runs` and tensors are a CPU's, else torch's."""

    @wraps(reference)
    def call(*args: _Given.args, **named: _Given.kwargs) -> _Made:
        is_on_cpu = isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu"
        return (code if is_on_cpu and runs() else reference)(*args, **named)

    return call


class Compiled:
    """A function that numba compiles on its first call, for each type that it writes; see `to`.

    It runs without Python's lock, on numpy arrays and numbers. Other `Compiled` functions that it
    calls are compiled with it; those that are `ByType` are chosen by the type. An index in an inner
    loop has to be unsigned, or numba checks it and nothing is vectorised.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._for_type: dict[torch.dtype, Callable[..., Any]] = {}

    def to(self, dtype: torch.dtype) -> Callable[..., Any]:
        """Return the function that writes numbers of this type."""
        with _LOCK:
            if dtype not in self._for_type:
                self._for_type[dtype] = _jitted(self.bound(dtype))
            return self._for_type[dtype]

    def __call__(self, *args: Any) -> Any:
        return self.to(torch.float32)(*args)

    def bound(self, dtype: torch.dtype) -> FunctionType:
        """Return the plain function with its callees compiled.

        Its name depends on their sources, since numba caches by the name.
        """
        import numba

        others = self._others(dtype)
        plain = self.function
        compiled = {name: numba.njit(callee.bound(dtype)) for name, callee in others.items()}
        known = {**plain.__globals__, **compiled}
        bound = FunctionType(plain.__code__, known, plain.__name__, None, plain.__closure__)
        bound.__module__ = plain.__module__
        # Numba checks only this function's file for changes, so the name tells of the others.
        sources = "".join(callee.source(dtype) for callee in others.values())
        bound.__qualname__ = f"{plain.__qualname__}_{crc32(sources.encode()):08x}"
        return bound

    def _others(self, dtype: torch.dtype) -> "dict[str, Compiled]":
        """Return the compiled functions that it calls, by name."""
        others = dict[str, Compiled]()
        for name in self.function.__code__.co_names:
            callee = self.function.__globals__.get(name)
            callee = callee.for_dtype(dtype) if isinstance(callee, ByType) else callee
            if isinstance(callee, Compiled):
                others[name] = callee
        return others

    def source(self, dtype: torch.dtype) -> str:
        """Return the source of the function and of those that it calls."""
        others = self._others(dtype).values()
        return "".join(
            [inspect.getsource(self.function), *(callee.source(dtype) for callee in others)]
        )


class ByType:
    """A set of compiled functions, one for each type of the numbers that are written."""

    def __init__(self, functions: Mapping[torch.dtype, Compiled]) -> None:
        self._functions = functions

    def for_dtype(self, dtype: torch.dtype) -> Compiled:
        """Return the function for that type."""
        return self._functions[dtype]

    def __call__(self, *args: Any) -> Any:
        raise TypeError("only compiled functions call it")


# decorates a function that numba will compile
compiled = Compiled


class _Lent:
    """Threads that torch has lent to a team: rows are shared among as many while it has one."""

    num_threads = 0


def lend_threads(num_threads: int) -> None:
    """Share rows among `num_threads`, whatever torch has; 0: among those that torch has."""
    _Lent.num_threads = num_threads


def share_rows(work: Callable[[int, int], object], num_rows: int) -> None:
    """Call `work(lo, hi)` for all rows, shared among as many threads as torch has, or has lent.

    `work` should not hold Python's lock for long.
    """
    num_threads = _Lent.num_threads or torch.get_num_threads()
    num_threads = min(num_threads, max(1, num_rows // _LEAST_ROWS))
    bounds = [num_rows * share // num_threads for share in range(num_threads + 1)]
    first, *shares = pairwise(bounds)
    others = [_pool(num_threads - 1).submit(work, lo, hi) for lo, hi in shares]
    try:
        work(*first)
    finally:
        # no thread may write after the caller has taken its memory back
        for other in others:
            other.exception()
    for other in others:
        other.result()


def _jitted(function: FunctionType) -> Callable[..., Any]:
    """Return a function compiled by numba, cached on disk where a folder can be written."""
    import numba

    not_kept = numba.njit(nogil=True)(function)
    try:
        kept = numba.njit(nogil=True, cache=True)(function)
    # no folder for a cache can be written
    except RuntimeError:
        return not_kept

    def call(*args: Any) -> Any:
        try:
            return kept(*args)
        # the folder is full, or what lies there cannot be read
        except OSError:
            return not_kept(*args)

    return call


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="offload-expand")


# a child process has none of its parent's threads
os.register_at_fork(after_in_child=_pool.cache_clear)
