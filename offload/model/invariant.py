"""Batch-invariant products: a row's result does not depend on the rows computed with it.

Matrix libraries use other algorithms for few rows than for many. torch rounds the last numbers of a
thread's share of an activation function differently. On a GPU it sums a row with fewer threads the
more rows there are, up to 16. So a product is computed in parts of sizes found by trial
(`row_sizes.py`), the last one padded, and what a library computes row by row gets the same sizes.
On a CPU one thread does the work between products, and rows that are no whole vectors are stored
apart, so that torch computes each alone. Our own machine code (`wide_products.py`) needs no
padding.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn import functional
from torch.nn.functional import pad

from offload.model import wide_products
from offload.model.linear import Products, own_matrices
from offload.model.row_sizes import (
    DEVICE_LADDER,
    LADDER,
    Multiply,
    RowSizes,
    find_sizes,
    is_tried_by_likeness,
    parts_of,
)
from offload.model.thread_team import TEAM
from offload.model.wide_products import product_for
from offload.units import rounded_up

_VECTOR = 64  # numbers: no processor that torch supports handles more at once
# torch shares elementwise work among threads by 32768 numbers (at::internal::GRAIN_SIZE), gelu
# evenly from 16384 on.
_GRAIN = 32768
_LEAST_SHARED = 16384
# for both factors of a product: libraries have special algorithms for narrower ones
_LEAST_WIDTH = 64
_LEAST_STACKED = 32  # the same for stacks
# rows on a GPU: from there on each gets the same threads (ATen's Reduce.cuh, set_block_dimension)
_LEAST_SUMS = 16
_LEAST_BATCHED = 2  # beyond these dimensions rows have one for texts
# By product, and by what decides its trial: a library's choice for a shape stays the same for any
# model.
_TRIED: dict[Any, RowSizes] = {}


class BatchInvariantProducts(Products):
    """Products in which a row has the same bits whatever rows are beside it.

    Args:
        thread_counts: numbers of threads that products may run with.

    Attributes:
        thread_counts: the same.
        num_refused: products whose rows change their bits with every number of rows.
    """

    is_invariant = True

    def __init__(self, thread_counts: Sequence[int]) -> None:
        self.num_refused = 0
        self.thread_counts = tuple(thread_counts)
        self._found: dict[Any, RowSizes] = {}  # by product
        # a CPU's weights: up to this many rows need neither padding nor cutting
        self._plain: dict[Any, RowSizes] = {}
        # by the matrix of a module that does its own product
        self._by_row: dict[Any, RowSizes] = {}

    def during(self, num_rows: int) -> AbstractContextManager[Any]:
        """See `Products`: torch's own threads would divide the work between products."""
        return TEAM.in_place_of_torch()

    def widen(self, rows: Tensor) -> Tensor:
        """See `Products`: a widened copy is contiguous, so rows are stored apart again."""
        is_wide = rows.dtype == torch.float32 or not rows.shape[-1] % _VECTOR
        return rows if is_wide or rows.device.type != "cpu" else _apart(rows.float())

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Products`."""
        if wide_products.is_widened(rows, weight):
            return _apart(wide_products.linear(rows, weight, bias))
        key = (weight.shape, weight.stride(), weight.dtype, bias is None, weight.device)
        sizes = self._plain.get(key)
        is_text = rows.ndim == 3 and rows.shape[0] == 1
        if sizes is not None and is_text and rows.shape[1] in sizes:
            return _apart(TEAM.lend(product_for(functional.linear, rows), rows, weight, bias))
        num_columns = weight.shape[0]
        left = widened(rows, _LEAST_WIDTH)
        wide = widened(_lengthened(weight, _LEAST_WIDTH), _LEAST_WIDTH)
        bias = None if bias is None else widened(bias, _LEAST_WIDTH)
        left_TK = left.reshape(-1, left.shape[-1])
        is_host = left.device.type == "cpu"
        multiply: Callable[..., Tensor] = _linear_into
        if is_host:
            multiply = product_for(functional.linear, left)
        sizes = self._sizes_of(multiply, wide, bias, is_transposed=True)
        if is_host and wide is weight:
            self._plain[key] = sizes
        work = lambda part, **out: TEAM.lend(multiply, part, wide, bias, **out)  # noqa: E731
        whole = in_parts(work, left_TK, sizes, None if is_host else len(wide))
        out = whole[:, :num_columns]
        out = out if left.ndim == 2 else out.unflatten(0, left.shape[:-1])
        return _apart(out) if is_host else out

    def run_by_row(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `Products`: in parts of sizes that suit the module's product, the last padded.

        A module without a matrix only sums up rows, for which a GPU needs 16 of them.
        """
        rows = args[0]
        num_rows = rows.shape[_row_dim(rows)]
        if matrices := own_matrices(module):
            sizes = self._sizes_by_row(matrices[0])
        elif rows.device.type == "cpu":
            return module(*args, **kwargs)
        else:
            sizes = (rounded_up(num_rows, _LEAST_SUMS),)
        spans = _spans(num_rows, sizes)
        parts = [
            module(*(_rows_of(arg, rows, lo, size) for arg in args), **kwargs) for lo, size in spans
        ]
        return _joined(parts, [size for _, size in spans], num_rows)

    def _sizes_by_row(self, matrix: Tensor) -> RowSizes:
        """Return the row counts for a module that multiplies by this matrix, in its type or float32."""
        key = (matrix.shape, matrix.dtype, matrix.device)
        if key not in self._by_row:
            if matrix.device.type != "cpu":
                return DEVICE_LADDER[:1]
            # within a pass one thread computes it
            one_thread = BatchInvariantProducts((1,))
            both = [
                {*one_thread._sizes_of(functional.linear, like, is_transposed=True)}
                for like in (matrix, matrix.float())
            ]
            agreed = tuple(sorted(both[0] & both[1]))
            whole = tuple(size for size in agreed if size * len(matrix) % _VECTOR == 0)
            self.num_refused += not agreed
            self._by_row[key] = whole or agreed or LADDER[-1:]
        return self._by_row[key]

    def multiply(self, product: Multiply, *args: Tensor, **kwargs: Any) -> Tensor:
        """Multiply by `matmul` or a similar product; a stack's rows are those of each factor.

        GPUs may give another `out_dtype` than that of the factors.
        """
        out_dtype = kwargs.pop("out_dtype", None)
        factors = [*args, *kwargs.values()]
        left, right = factors
        if out_dtype is not None:
            product = _giving(product, out_dtype)
        # a single number involves no sum
        if left.ndim < 2 or right.ndim < 2 or left.shape[-1] == 1:
            return product(left, right)
        num_columns = right.shape[-1]
        is_stack = right.ndim > 2
        least = _LEAST_STACKED if is_stack else _LEAST_WIDTH
        left = widened(left, least)
        right = widened(_lengthened(right, least), least)
        rows = left if is_stack or left.ndim == 2 else left.reshape(-1, left.shape[-1])
        product = product_for(product, left)
        sizes = self._sizes_of(product, right)
        out = in_parts(lambda part: TEAM.lend(product, part, right), rows, sizes)
        out = out[..., :num_columns]
        return out if is_stack or left.ndim == 2 else out.unflatten(0, left.shape[:-1])

    def _sizes_of(
        self,
        product: Callable[..., Tensor],
        factor: Tensor,
        bias: Tensor | None = None,
        *,
        is_transposed: bool = False,
    ) -> RowSizes:
        """Return the row counts for a factor, tried when one of its shape comes for the first time.

        A factor at an odd address on a GPU has one size, without a trial.
        """
        if factor.device.type != "cpu" and factor.data_ptr() % 16:
            return DEVICE_LADDER[:1]
        likeness = (product, factor.shape[-2:], factor.stride()[-2:], factor.dtype, factor.device)
        key = (*likeness, factor.ndim > 2, bias is None)
        if key not in self._found:
            zero_bias = () if bias is None else (bias.new_zeros(len(factor)),)
            trial = lambda rows, like: product(rows, like, *zero_bias)  # noqa: E731
            precision = torch.get_float32_matmul_precision()
            settings = (key, find_sizes, self.thread_counts, precision, mkldnn.enabled)
            tried = _TRIED if is_tried_by_likeness(factor) else {}
            if settings not in tried:
                counts = self.thread_counts
                tried[settings] = find_sizes(trial, factor, counts, is_transposed=is_transposed)
            self._found[key] = tried[settings]
        self.num_refused += not self._found[key]
        return self._found[key] or LADDER[-1:]


@cache
def _giving(product: Multiply, out_dtype: torch.dtype) -> Multiply:
    """Return one function object for each product and type: trials are cached by it."""
    return partial(product, out_dtype=out_dtype)


def _linear_into(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute `linear` as a GPU does, into a given result."""
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def in_parts(
    work: Callable[..., Tensor], rows: Tensor, sizes: RowSizes, num_columns: int | None = None
) -> Tensor:
    """Apply `work` to rows, the last dimension but one, in parts of these sizes, padding the last.

    With `num_columns`, `out` tells it where to write this many numbers for each row.
    """
    num_rows = rows.shape[-2]
    parts = parts_of(num_rows, sizes)
    if not parts:
        return work(rows)
    if len(parts) == 1:
        missing = parts[0] - num_rows
        return work(pad(rows, (0, 0, 0, missing)))[..., :num_rows, :] if missing else work(rows)
    rows = pad(rows, (0, 0, 0, sum(parts) - num_rows)) if sum(parts) > num_rows else rows
    if num_columns is not None:
        whole = rows.new_empty(len(rows), num_columns)
        for part, out in zip(rows.split(parts), whole.split(parts), strict=True):
            work(part, out=out)
        return whole[:num_rows]
    return torch.cat([work(part) for part in rows.split(parts, -2)], -2)[..., :num_rows, :]


def _apart(rows: Tensor) -> Tensor:
    """Return rows stored apart from each other if they are no whole vectors.

    torch then computes each of them alone, and all in the same way.
    """
    width = rows.shape[-1]
    return pad(rows, (0, -width % _VECTOR))[..., :width] if width % _VECTOR else rows


def _spans(num_rows: int, sizes: RowSizes) -> list[tuple[int, int]]:
    """Return the first row and the size of each part of this many rows."""
    parts = parts_of(num_rows, sizes) or [sizes[0]]
    return [(sum(parts[:nth]), size) for nth, size in enumerate(parts)]


def _row_dim(numbers: Tensor) -> int:
    """Return the dimension of a pass's rows: (T, ...), or (1, T, ...)."""
    return 1 if numbers.ndim > _LEAST_BATCHED and numbers.shape[0] == 1 else 0


def _rows_of(argument: Any, rows: Tensor, lo: int, size: int) -> Any:
    """Return some rows of an argument that has all, zeros after the last; return others unchanged."""
    dim = _row_dim(rows)
    shape = rows.shape[: dim + 1]
    if not isinstance(argument, Tensor) or argument.ndim == 1 or argument.shape[: dim + 1] != shape:
        return argument
    some = argument.narrow(dim, lo, min(size, shape[dim] - lo))
    missing = size - some.shape[dim]
    return pad(some, (0, 0) * (some.ndim - 1 - dim) + (0, missing)) if missing else some


def _joined(parts: Sequence[Any], sizes: Sequence[int], num_rows: int) -> Any:
    """Return the result for all rows from parts of these sizes, without padding."""
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(_joined(outs, sizes, num_rows) for outs in zip(*parts, strict=True))
    dim = _row_dim(first)
    if first.shape[dim] != sizes[0]:
        return first
    whole = first if len(parts) == 1 else torch.cat([*parts], dim)
    whole = whole.narrow(dim, 0, num_rows)
    return _apart(whole) if whole.is_floating_point() and whole.device.type == "cpu" else whole


def widened(numbers: Tensor, least: int) -> Tensor:
    """Return the rows padded with zeros to the least width.

    Rows that are wide enough are returned themselves, where `pad` would copy.
    """
    num_missing = least - numbers.shape[-1]
    return pad(numbers, (0, num_missing)) if num_missing > 0 else numbers


def _lengthened(numbers: Tensor, least: int) -> Tensor:
    """Append rows of zeros; see `widened`."""
    num_missing = least - numbers.shape[-2]
    return pad(numbers, (0, 0, 0, num_missing)) if num_missing > 0 else numbers


def in_whole_vectors(
    function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute an elementwise function so that no thread's share ends within a vector.

    torch computes the remainder of a share with other instructions.
    """
    num = numbers.numel()
    is_whole = num % _VECTOR == 0
    is_plain = is_whole and numbers.is_contiguous() and _are_shares_whole(num)
    if numbers.device.type != "cpu" or (is_plain and numbers.shape[-1] % _VECTOR == 0):
        return function(numbers, *args, **kwargs)
    if is_plain:
        # rows are no whole vectors, though all together are: `calibration/invariance.py` tries rows
        return function(numbers.view(-1), *args, **kwargs).view(numbers.shape)
    flat = numbers.reshape(-1)
    if not is_whole:
        flat = pad(flat, (0, -num % _VECTOR))
    before = torch.get_num_threads()
    is_shared = _are_shares_whole(flat.numel())
    try:
        if not is_shared:
            torch.set_num_threads(1)
        return function(flat, *args, **kwargs)[:num].reshape(numbers.shape)
    finally:
        if not is_shared:
            torch.set_num_threads(before)


def _are_shares_whole(num: int) -> bool:
    """Return True if no thread's share of this many numbers, whole vectors, ends within one."""
    num_threads = torch.get_num_threads()
    shares = (num_threads, max(1, min(num_threads, math.ceil(num / _GRAIN))))
    return num < _LEAST_SHARED or all(math.ceil(num / share) % _VECTOR == 0 for share in shares)
