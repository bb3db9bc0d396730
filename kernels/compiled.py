"""Numba where it is installed: what a CPU runs in place of chains of torch's operators.

It takes 0.4 s to import and as long to compile a function, so both wait for the first call. Compiled code is kept
beside its file, or in the user's cache. Invariant: nothing `compiled` is called unless `HAS_NUMBA`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch

HAS_NUMBA = find_spec("numba") is not None
_LEAST_ROWS = 16  # of a thread's share


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by numba when it is first called; it runs without Python's lock."""

    @wraps(function)
    def call(*args: Any) -> Any:
        return _compile(function)(*args)

    return call


def share_rows(work: Callable[[int, int], None], num_rows: int) -> None:
    """`work(lo, hi)` over all rows, shared among as many threads as torch has now; `work` holds no lock."""
    num_threads = min(torch.get_num_threads(), max(1, num_rows // _LEAST_ROWS))
    bounds = [num_rows * share // num_threads for share in range(num_threads + 1)]
    shares = list(zip(bounds, bounds[1:], strict=False))
    others = [_pool(num_threads - 1).submit(work, lo, hi) for lo, hi in shares[1:]]
    work(*shares[0])
    for other in others:
        other.result()


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    return numba.njit(nogil=True, cache=True)(function)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="offload-expand")
