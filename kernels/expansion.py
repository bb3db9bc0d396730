"""The functions that expand stored words into numbers: one for each kind of words.

Each kind has a reference in plain torch, a compiled form for CPUs (numba) and a kernel for GPUs
(Triton), with equal signatures and results equal bit for bit: a product in float32, rounded once to
the type of `out`. A measurement decides which one a run uses (`calibration.kernels`).
"""

from collections.abc import Callable
from typing import NamedTuple

from offload.kernels.expand_blocks import (
    expand_blocks_compiled,
    expand_blocks_kernel,
    expand_blocks_reference,
)
from offload.kernels.expand_codebook import (
    expand_codebook_compiled,
    expand_codebook_kernel,
    expand_codebook_reference,
    expand_e2m1_compiled,
    expand_e2m1_kernel,
    expand_e2m1_reference,
)
from offload.kernels.expand_columns import (
    expand_columns_compiled,
    expand_columns_kernel,
    expand_columns_reference,
)
from offload.kernels.expand_exponents import (
    expand_exponents_compiled,
    expand_exponents_kernel,
    expand_exponents_reference,
)
from offload.kernels.expand_float8 import (
    expand_float8_compiled,
    expand_float8_kernel,
    expand_float8_reference,
)
from offload.kernels.expand_integers import (
    expand_integers_compiled,
    expand_integers_kernel,
    expand_integers_reference,
)


class Expansion(NamedTuple):
    """One function for each kind of words, with the signatures of the references."""

    float8: Callable[..., None]
    integers: Callable[..., None]
    columns: Callable[..., None]
    codebook: Callable[..., None]
    e2m1: Callable[..., None]
    blocks: Callable[..., None]
    exponents: Callable[..., None]


REFERENCE = Expansion(
    expand_float8_reference,
    expand_integers_reference,
    expand_columns_reference,
    expand_codebook_reference,
    expand_e2m1_reference,
    expand_blocks_reference,
    expand_exponents_reference,
)
COMPILED = Expansion(
    expand_float8_compiled,
    expand_integers_compiled,
    expand_columns_compiled,
    expand_codebook_compiled,
    expand_e2m1_compiled,
    expand_blocks_compiled,
    expand_exponents_compiled,
)
EXPANSION_KERNELS = Expansion(
    expand_float8_kernel,
    expand_integers_kernel,
    expand_columns_kernel,
    expand_codebook_kernel,
    expand_e2m1_kernel,
    expand_blocks_kernel,
    expand_exponents_kernel,
)
