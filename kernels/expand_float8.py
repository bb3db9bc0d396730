"""Weights of 8-bit floating-point numbers, with one scale for each block of them."""

import torch
from torch import Tensor

_CHUNK_ROWS = 64  # what is made of them in float32 stays in the cache


def expand_float8_reference(weight_NK: Tensor, scale_AB: Tensor, block: tuple[int, int], out_NK: Tensor) -> None:
    """Fill `out` with weight x scale; scales (float32) are for blocks of so many rows and columns, the last ones cut."""
    num_rows, num_columns = weight_NK.shape
    for lo in range(0, num_rows, _CHUNK_ROWS):
        rows = slice(lo, min(lo + _CHUNK_ROWS, num_rows))
        scale_R = torch.arange(rows.start, rows.stop, device=scale_AB.device) // block[0]
        scale_RK = scale_AB[scale_R].repeat_interleave(block[1], 1)[:, :num_columns]
        out_NK[rows] = (weight_NK[rows].float() * scale_RK).to(out_NK.dtype)
