"""Gather the accepted path: move rows of all layers' keys and values to the front, in one launch.

With torch that is four launches a layer, hundreds for a large model; the kernel reads the addresses
of all buffers from a table. Invariant: every row is read before any is written, so sources and
destinations may overlap in any way.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offload.kernels.jit import HAS_TRITON, jit, tl, triton

MAX_ROWS = 256  # of a path that one program holds
_TILE = 4096  # numbers that one program holds
_TYPES = (
    {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    if HAS_TRITON
    else {}
)


def kv_commit_reference(buffers: Sequence[Tensor], length: int, row_A: Tensor) -> None:
    """Move rows `length + row_A` of each buffer (1, G, S, K) to `length ...`, in plain torch."""
    for buffer in buffers:
        buffer[:, :, length : length + len(row_A)] = buffer.index_select(2, row_A + length)


def are_alike(buffers: Sequence[Tensor]) -> bool:
    """Return True if buffers have one shape, type and strides, and rows without gaps."""
    kinds = {(buffer.shape, buffer.dtype, buffer.stride()) for buffer in buffers}
    is_plain = buffers[0].shape[0] == 1 and buffers[0].stride(3) == 1
    return len(kinds) == 1 and is_plain and buffers[0].dtype in _TYPES


def kv_commit_kernel(buffers: Sequence[Tensor], length: int, row_A: Tensor) -> None:
    """Do what the reference does, in Triton.

    The reference moves buffers that are not `are_alike`, and paths too long for one program.
    """
    first = buffers[0]
    num_rows = len(row_A)
    if num_rows > MAX_ROWS or not are_alike(buffers):
        return kv_commit_reference(buffers, length, row_A)
    address_L = _addresses(tuple(buffer.data_ptr() for buffer in buffers), first.device)
    is_aligned = all(buffer.data_ptr() % 16 == 0 for buffer in buffers)
    block_rows = triton.next_power_of_2(max(1, num_rows))
    block_width = min(triton.next_power_of_2(first.shape[3]), _TILE // block_rows)
    grid = (len(buffers), first.shape[1], triton.cdiv(first.shape[3], block_width))
    _gather[grid](
        address_L,
        row_A,
        num_rows,
        length,
        first.stride(1),
        first.stride(2),
        WIDTH=first.shape[3],
        BLOCK_A=block_rows,
        BLOCK_K=block_width,
        TYPE=_TYPES[first.dtype],
        IS_ALIGNED=is_aligned,
    )


# Cached: a text keeps its buffers in both models, and a copy to the device may wait behind layers.
@lru_cache(maxsize=512)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(pointers, dtype=torch.int64).to(device)


@jit(do_not_specialize=["num_rows", "length"])
def _gather(
    address: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    length: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
) -> None:
    """Run one program for all moved rows of a buffer and head, or for some of their columns."""
    base = tl.load(address + tl.program_id(0)).to(tl.pointer_type(TYPE))
    # nothing is known of an address from a table; alignment allows wide loads
    if IS_ALIGNED:
        base = tl.multiple_of(base, 16)
    base += tl.program_id(1).to(tl.int64) * head_stride
    index = tl.arange(0, BLOCK_A)
    column = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_inside = (index < num_rows)[:, None] & (column < WIDTH)[None, :]
    source = (length + tl.load(rows + index, mask=index < num_rows, other=0))[
        :, None
    ] * row_stride + column[None, :]
    tile = tl.load(base + source, mask=is_inside)
    tl.debug_barrier()  # a destination may be another thread's source
    target = (length + index).to(tl.int64)[:, None] * row_stride + column[None, :]
    tl.store(base + target, tile, mask=is_inside)
