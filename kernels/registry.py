"""The functions with kernels: one set is chosen per run and handed to the code that calls them.

A kernel is used where it runs and agrees with what runs without it (`calibration.kernels`).
Invariant: the fields are named like the files in kernels/, and any set of them gives the same
results up to rounding: noise to 1e-13, attention to 2e-2 in half precision and 1e-3 in float32;
draws follow these, moved rows are equal, and products of 4-bit words agree to 2e-2.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from offload.kernels.draw_without_replacement import (
    draw_without_replacement_kernel,
    draw_without_replacement_reference,
)
from offload.kernels.keyed_gumbel import keyed_gumbel_kernel, keyed_gumbel_reference
from offload.kernels.kv_commit import kv_commit_kernel, kv_commit_reference
from offload.kernels.match_rows import match_rows_kernel
from offload.kernels.multiply_int4 import multiply_int4_kernel
from offload.kernels.path_attention import path_attention_kernel
from offload.kernels.rms_norm import rms_norm_kernel


class KernelSet(NamedTuple):
    """One function for each kernel, with the signatures of the references."""

    keyed_gumbel: Callable[..., Tensor]
    draw_without_replacement: Callable[..., Tensor]
    kv_commit: Callable[..., None]
    # Without these, rows that a walk visits are drawn one by one, masks are dense, norms are
    # transformers' own operations, and 4-bit weights are expanded for every pass.
    match_rows: Callable[..., Tensor] | None = None
    path_attention: Callable[..., Tensor] | None = None
    rms_norm: Callable[..., Tensor] | None = None
    multiply_int4: Callable[..., Tensor] | None = None


REFERENCES = KernelSet(
    keyed_gumbel_reference, draw_without_replacement_reference, kv_commit_reference
)
KERNELS = KernelSet(
    keyed_gumbel_kernel,
    draw_without_replacement_kernel,
    kv_commit_kernel,
    match_rows_kernel,
    path_attention_kernel,
    rms_norm_kernel,
    multiply_int4_kernel,
)
