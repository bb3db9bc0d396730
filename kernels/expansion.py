"""The functions that expand stored words into numbers: one for each kind of words.

Each kind has a reference in plain torch, a compiled form for CPUs (numba) and a kernel for GPUs
(Triton), with equal signatures and results equal bit for bit: a product in float32, rounded once to
the type of `out`. A measurement decides which one a run uses (`calibration.kernels`).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from offload.kernels import (
    expand_blocks,
    expand_codebook,
    expand_columns,
    expand_exponents,
    expand_float8,
    expand_integers,
    expand_residuals,
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
    residuals: Callable[..., None]


def _all_in(form: Literal["reference", "compiled", "kernel"]) -> Expansion:
    """Return the functions of one form, which are called `expand_KIND_FORM` in their files."""
    files = [expand_float8, expand_integers, expand_columns, expand_codebook, expand_codebook]
    files += [expand_blocks, expand_exponents, expand_residuals]
    kinds = zip(Expansion._fields, files, strict=True)
    return Expansion(*(getattr(file, f"expand_{kind}_{form}") for kind, file in kinds))


REFERENCE = _all_in("reference")
COMPILED = _all_in("compiled")
EXPANSION_KERNELS = _all_in("kernel")
