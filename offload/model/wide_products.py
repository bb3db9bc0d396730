"""Products of 16-bit numbers where the processor has no instructions for them: in float32.

oneDNN multiplies bfloat16 on processors with AVX-512 and float16 on fewer still. Elsewhere torch
adds up number after number, at 3 to 7 GFLOP/s a core where float32 gives 60 to 80: a pass over a
tree would take ten times as long. So weights are widened as they are multiplied, by machine code
(`kernels/widened_products.py`). Where that cannot be (shapes, processors), a block of the weight is
widened, stays in the processor's cache, and is multiplied there by the library. Sums are in float32
and rounded once, as where the library does it. What is held and read stays 16 bits wide.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offload.kernels.machine_code import HAS_LLVM, fused_lanes
from offload.kernels.widened_products import can_multiply, product_of
from offload.machine import num_cores
from offload.memory.plan import INNER_ROWS, PATH_SCRATCH_BYTES
from offload.model.scratch import Scratch
from offload.model.thread_team import TEAM, THREAD, compute

MULTIPLY = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
)
_ROWS_BYTES = PATH_SCRATCH_BYTES // 4  # of rows in float32: the plan keeps room for a scratch free
_MASK_BYTES = PATH_SCRATCH_BYTES // 2  # of a mask in float32, in the same room
_NUM_CORES = num_cores()
# Bytes of a weight that one thread widens to float32 at once; all threads together take no more.
_BLOCK_BYTES = min(1 << 20, max(1 << 18, PATH_SCRATCH_BYTES // 4 // _NUM_CORES))
_LEAST_COLUMNS = 48  # of a result at once: products of fewer are slow
_STEP_COLUMNS = 16
_STEP_ROWS = 16
# numbers of a weight: making machine code takes .4 s, which a tiny model does not win back
_LEAST_WIDENED = 1 << 16
_IS_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def lacks_products(dtype: torch.dtype) -> bool:
    """Tell whether the library of this processor has no product for numbers of this type."""
    if dtype not in _IS_SUPPORTED or not mkldnn.is_available():
        return False
    is_supported = _is_supported(dtype)
    return is_supported is not None and not (mkldnn.enabled and is_supported)


def widens_products(dtype: torch.dtype) -> bool:
    """Tell whether weights of this type are multiplied by machine code of our own on this processor.

    A row's bits then depend on nothing beside it, and that takes no time.
    """
    return lacks_products(dtype) and HAS_LLVM and fused_lanes() > 0


@cache
def _is_supported(dtype: torch.dtype) -> bool | None:
    ask = getattr(torch.ops.mkldnn, _IS_SUPPORTED[dtype], None)
    return None if ask is None else ask()


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, parts: Sequence[int] = ()
) -> Tensor:
    """Compute `functional.linear` with sums in float32; a few rows and a block are wide at once.

    `parts` says how many rows each product of the library has, of which the last may be padded with
    zeros; without it one has all. A product of more rows than may be wide at once is made in pieces
    of so many. A block is widened once for all pieces that are wide at once.
    """
    width = input.shape[-1]
    rows_TK = input.reshape(-1, width)
    num_rows = rows_TK.shape[0]
    num_columns = weight.shape[0]
    out = input.new_empty(*input.shape[:-1], num_columns)
    out_TN = out.view(-1, num_columns)
    most_rows = max(_STEP_ROWS, _ROWS_BYTES // (4 * width) // _STEP_ROWS * _STEP_ROWS)
    most_rows = min(INNER_ROWS, most_rows)
    # other widths are refused by the library, and there may be no rows for an expert
    is_large = num_rows > 0 and weight.numel() >= _LEAST_WIDENED
    if is_large and width == weight.shape[1] and can_multiply(weight):
        if num_rows <= most_rows:
            _multiply_widening(rows_TK, weight, bias, out_TN)
            return out
        for some_TK, some_TN in zip(rows_TK.split(most_rows), out_TN.split(most_rows), strict=True):
            _multiply_widening(some_TK, weight, bias, some_TN)
        return out
    pieces = [piece for part in parts or [num_rows] for piece in _pieces_of(part, most_rows)]
    lo = 0
    for some in _together(pieces, most_rows):
        hi = min(lo + sum(some), num_rows)
        _multiply_blocks(rows_TK[lo:hi], some, weight, bias, out_TN[lo:hi])
        lo = hi
    return out


def _pieces_of(num_rows: int, most_rows: int) -> list[int]:
    num_whole, rest = divmod(num_rows, most_rows)
    return [most_rows] * num_whole + [rest] * (rest > 0)


def _together(pieces: Sequence[int], most_rows: int) -> Iterator[list[int]]:
    """Yield the pieces that are wide at once."""
    some: list[int] = []
    for piece in pieces:
        if some and sum(some) + piece > most_rows:
            yield some
            some = []
        some.append(piece)
    if some:
        yield some


def _multiply_widening(
    row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor
) -> None:
    bias = None if bias_N is None else bias_N.float().contiguous()
    compute(product_of(row_TK.float().contiguous(), weight_NK, bias, out_TN))


class _OfThread(local):
    """Room of each thread for the rows that it multiplies."""

    def __init__(self) -> None:
        self.rows = Scratch(_ROWS_BYTES)


_THREAD = _OfThread()


def _multiply_blocks(
    row_TK: Tensor, pieces: list[int], weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor
) -> None:
    num_columns, width = weight_NK.shape
    at_once = _block_columns(weight_NK)
    rows = _THREAD.rows
    rows.begin()
    wide_TK = rows.take((sum(pieces), width), row_TK.device)
    wide_TK[: len(row_TK)].copy_(row_TK)
    wide_TK[len(row_TK) :].zero_()
    products = list(zip(wide_TK.split(pieces), _split_what_there_is(out_TN, pieces), strict=True))
    starts = iter(range(0, num_columns, at_once))

    def work() -> None:
        THREAD.room.begin()
        block_BK = THREAD.room.take((at_once, width), wide_TK.device)
        for lo in starts:  # which the threads share
            num = min(at_once, num_columns - lo)
            block_KB = block_BK[:num].copy_(weight_NK.narrow(0, lo, num)).t()
            bias_B = None if bias_N is None else bias_N.narrow(0, lo, num).float()
            for part_TK, place_TN in products:
                out_TB = (
                    torch.mm(part_TK, block_KB)
                    if bias_B is None
                    else torch.addmm(bias_B, part_TK, block_KB)
                )
                place_TN.narrow(1, lo, num).copy_(out_TB.narrow(0, 0, place_TN.shape[0]))

    TEAM.run(work, most=-(-num_columns // at_once))


def _split_what_there_is(out_TN: Tensor, pieces: list[int]) -> list[Tensor]:
    """Split rows into pieces of these sizes, the last of which may be shorter."""
    ends = accumulate(pieces)
    return [out_TN[end - piece : end] for piece, end in zip(pieces, ends, strict=True)]


def _block_columns(weight_NK: Tensor) -> int:
    num_columns, width = weight_NK.shape
    return min(
        num_columns,
        max(_LEAST_COLUMNS, _BLOCK_BYTES // (4 * width) // _STEP_COLUMNS * _STEP_COLUMNS),
    )


def typical_part(weight_NK: Tensor) -> Tensor:
    """Return as much of a weight as has a block of each size that `linear` makes of it.

    One block is multiplied like the next.
    """
    at_once = _block_columns(weight_NK)
    return weight_NK[: at_once + len(weight_NK) % at_once]


def product_for(product: Callable[..., Tensor], numbers: Tensor) -> Callable[..., Tensor]:
    """Return the product itself, or the wide one where the processor has none for these numbers."""
    if numbers.device.type != "cpu" or not lacks_products(numbers.dtype):
        return product
    return _WIDE[product]


def _widened(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return product(left.float(), right.float()).to(left.dtype)

    return multiply


_WIDE: dict[Any, Callable[..., Tensor]] = {functional.linear: linear} | {
    one: _widened(one) for one in MULTIPLY
}


class WideProducts(TorchFunctionMode):
    """A mode in which products of several rows are wide, and attention is computed in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _OWN.get(func)
        return func(*args, **(kwargs or {})) if own is None else own(func, *args, **(kwargs or {}))


def _product(
    product: Callable[..., Tensor], left: Tensor, right: Tensor, *more: Any, **named: Any
) -> Tensor:
    # for which torch has a quick way
    is_row = product is functional.linear and left.numel() == left.shape[-1]
    return (product if is_row else product_for(product, left))(left, right, *more, **named)


def _attend(
    attention: Callable[..., Tensor], *states: Tensor, attn_mask: Tensor | None = None, **more: Any
) -> Tensor:
    dtype = states[0].dtype
    mask = attn_mask
    if not lacks_products(dtype):
        return attention(*states, attn_mask=mask, **more)
    query, *others = (one.float() for one in states)
    if mask is None or not mask.is_floating_point() or mask.shape[-2] != query.shape[-2]:
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        return attention(query, *others, attn_mask=mask, **more).to(dtype)
    num_rows = query.shape[-2]
    at_once = max(1, _MASK_BYTES // (4 * max(1, mask.numel() // max(1, num_rows))))
    parts = [
        attention(some, *others, attn_mask=seen.float(), **more).to(dtype)
        for some, seen in zip(query.split(at_once, -2), mask.split(at_once, -2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


_OWN: dict[Any, Callable[..., Tensor]] = dict.fromkeys(_WIDE, _product)
_OWN[functional.scaled_dot_product_attention] = _attend
