"""How stored words become numbers: one function for each kind of words, handed to whoever expands.

Each kind has a reference in plain torch, a compiled form for CPUs (numba) and a kernel for GPUs (Triton), with equal
signatures and results equal bit for bit: a product in float32, rounded once to the type of `out`.
"""

from collections.abc import Callable
from typing import NamedTuple

from offload.kernels.expand_exponents import expand_exponents_reference
from offload.kernels.expand_float8 import expand_float8_reference


class Expansion(NamedTuple):
    """The signatures are those of the references."""

    float8: Callable[..., None]
    exponents: Callable[..., None]


REFERENCE = Expansion(expand_float8_reference, expand_exponents_reference)
