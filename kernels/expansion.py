"""How stored words become numbers: one function for each kind of words, handed to whoever expands.

Each kind has a reference in plain torch, a compiled form for CPUs (numba) and a kernel for GPUs (Triton), with equal
signatures and results equal bit for bit: a product in float32, rounded once to the type of `out`. Which one a run takes
a measurement decides (`expansion_choice.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

from offload.kernels.expand_float8 import expand_float8_compiled, expand_float8_kernel, expand_float8_reference


class Expansion(NamedTuple):
    """One function for each kind; the signatures are those of the references."""

    float8: Callable[..., None]


REFERENCE = Expansion(expand_float8_reference)
COMPILED = Expansion(expand_float8_compiled)
KERNELS = Expansion(expand_float8_kernel)
