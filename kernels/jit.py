"""Triton where it is installed; the only file that knows that it may be missing.

A kernel file takes `jit` and `tl` from here, so that its reference can be used without Triton. The
parameters of a kernel are annotated as `tl.tensor` (pointers, numbers, tuples of them) or
`tl.constexpr`: Triton allows no others. Invariant: nothing that is defined with `jit` is called
unless `HAS_TRITON`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    triton = None
    tl = SimpleNamespace(tensor=object, constexpr=object)
    HAS_TRITON = False


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return `triton.jit(function)`; without Triton the function itself, which is never called."""
    if HAS_TRITON:
        return triton.jit(function, **options)
    return function if function is not None else lambda later: later


def is_for_kernels(device: torch.device | str) -> bool:
    """Return True if kernels run there: on CUDA, with Triton to compile them."""
    return HAS_TRITON and torch.device(device).type == "cuda"
