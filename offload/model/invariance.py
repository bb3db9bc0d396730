"""Products, sums and activation functions whose result for a row does not depend on the rows beside it.

Matrix libraries take other ways for a few rows than for many, torch rounds the last numbers of a thread's share of an
activation function differently, and on a GPU it gives a row's sum fewer threads the more rows there are, up to 16. So
within `InvariantRows` a product is made in parts whose sizes are found by trial (`row_sizes.py`), the last one padded,
sums on a GPU are of at least 16 rows, and threads share elementwise work in whole vectors.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from offload.model.row_sizes import (
    DEVICE_LADDER,
    LADDER,
    Multiply,
    RowSizes,
    find_sizes,
    is_tried_by_likeness,
    parts_of,
)

Work = Callable[[Tensor], Tensor]
_VECTOR = 64  # numbers: no processor that torch knows handles more at once
# torch shares elementwise work among threads by 32768 numbers (at::internal::GRAIN_SIZE), gelu evenly from 16384 on.
_GRAIN, _LEAST_SHARED = 32768, 16384
_LEAST_WIDTH = 64  # of both factors of a product: with narrower ones libraries have ways of their own
_LEAST_STACKED = 32  # the same for stacks
_LEAST_SUMS = 16  # at once on a GPU: from there on each gets the same threads (ATen's Reduce.cuh, set_block_dimension)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
_ACTIVATIONS = (functional.silu, functional.gelu, torch.sigmoid, Tensor.sigmoid, functional.sigmoid, torch.tanh,
                Tensor.tanh, functional.tanh, functional.softplus, functional.mish, functional.elu)  # fmt: skip
_SUMS = (torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.var, Tensor.var)
# By product, and by what decides how it is tried: what a library does with a shape stays what it is, for any model.
_TRIED: dict[Any, RowSizes] = {}


class InvariantRows(TorchFunctionMode):
    """While it is entered, every product has rows of sizes that give the same bits, whatever model code asks for it.

    Args:
        thread_counts: that products may be computed with.

    Attributes:
        num_refused: products whose rows have other bits with every number of rows.
    """

    def __init__(self, thread_counts: Sequence[int]) -> None:
        super().__init__()
        self.num_refused, self._thread_counts = 0, tuple(thread_counts)
        self._found: dict[Any, RowSizes] = {}  # by product
        self._plain: dict[Any, RowSizes] = {}  # of a CPU's weights: as many rows need no padding, nor to be cut
        self._own: dict[Any, Callable[..., Tensor]] = {functional.linear: self._linear}
        self._own |= {product: partial(self._multiply_whole, product) for product in _PRODUCTS}
        self._own |= {function: partial(self._activate, function) for function in _ACTIVATIONS}
        self._own |= {function: partial(self._sum, function) for function in _SUMS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes = self._plain.get((weight.shape, weight.stride(), weight.dtype, bias is None, weight.device))
        if sizes is not None and input.ndim == 3 and len(input) == 1 and input.shape[1] in sizes:
            return functional.linear(input, weight, bias)
        num_columns = weight.shape[0]
        left, widened = _widened(input, _LEAST_WIDTH), _widened(_lengthened(weight, _LEAST_WIDTH), _LEAST_WIDTH)
        bias = None if bias is None else _widened(bias, _LEAST_WIDTH)
        rows, is_host = left.reshape(-1, left.shape[-1]), left.device.type == "cpu"
        multiply = functional.linear if is_host else _linear_into
        sizes, work = self._sizes_of(multiply, widened, bias), lambda part, **out: multiply(part, widened, bias, **out)
        if is_host and widened is weight:
            self._plain[weight.shape, weight.stride(), weight.dtype, bias is None, weight.device] = sizes
        out = in_parts(work, rows, sizes, None if is_host else len(widened))[:, :num_columns]
        return out if left.ndim == 2 else out.unflatten(0, left.shape[:-1])

    def _multiply_whole(self, product: Multiply, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Without gaps where padding was, as the product itself: model code looks at it in other shapes."""
        return self.multiply(product, *args, **kwargs).contiguous()

    def multiply(self, product: Multiply, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """By `matmul` or what is like it; of a stack the rows are those of each factor in it."""
        left, right = (*args, *kwargs.values())
        if left.ndim < 2 or right.ndim < 2 or left.shape[-1] == 1:  # of a single number nothing is added up
            return product(left, right)
        num_columns, is_stack = right.shape[-1], right.ndim > 2
        least = _LEAST_STACKED if is_stack else _LEAST_WIDTH
        left, right = _widened(left, least), _widened(_lengthened(right, least), least)
        rows = left if is_stack or left.ndim == 2 else left.reshape(-1, left.shape[-1])
        out = in_parts(lambda part: product(part, right), rows, self._sizes_of(product, right))[..., :num_columns]
        return out if is_stack or left.ndim == 2 else out.unflatten(0, left.shape[:-1])

    def _sizes_of(self, product: Callable[..., Tensor], factor: Tensor, bias: Tensor | None = None) -> RowSizes:
        """Found when a factor of this shape first comes; one size where a GPU's lies at an odd place."""
        if factor.device.type != "cpu" and factor.data_ptr() % 16:
            return DEVICE_LADDER[:1]
        is_transposed = product not in _PRODUCTS
        what = (product, factor.shape[-2:], factor.stride()[-2:], factor.dtype, factor.device, factor.ndim > 2)
        key = (*what, bias is None)
        if key not in self._found:
            more = () if bias is None else (torch.zeros_like(bias),)
            trial = lambda rows, like: product(rows, like, *more)  # noqa: E731
            settings = (find_sizes, self._thread_counts, torch.get_float32_matmul_precision(), mkldnn.enabled)
            tried = _TRIED if is_tried_by_likeness(factor) else {}
            if (key, settings) not in tried:
                tried[key, settings] = find_sizes(trial, factor, self._thread_counts, is_transposed=is_transposed)
            self._found[key] = tried[key, settings]
        self.num_refused += not self._found[key]
        return self._found[key] or LADDER[-1:]

    def _activate(self, function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        work = lambda part: in_whole_vectors(function, part, *args, **kwargs)  # noqa: E731
        return self.activate(work, numbers) if numbers.ndim > 1 else work(numbers)

    def _sum(self, function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Over the last dimension, on a GPU: on a CPU a row's sum is one thread's, whatever stands beside it."""
        dim = args[0] if len(args) == 1 else kwargs.get("dim")
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if dim not in (-1, numbers.ndim - 1) or numbers.ndim < 2 or numbers.device.type == "cpu":
            return function(numbers, *args, **kwargs)
        more = {name: value for name, value in kwargs.items() if name not in ("dim", "keepdim")}
        work = partial(_at_least, _LEAST_SUMS, partial(function, dim=-1, keepdim=True, **more))
        out = self.activate(work, numbers.reshape(-1, numbers.shape[-1])).reshape(*numbers.shape[:-1], 1)
        return out if kwargs.get("keepdim") else out[..., 0]

    def activate(self, work: Work, rows: Tensor) -> Tensor:
        """What is done with rows one by one; a check looks at it here."""
        return work(rows)


def _linear_into(rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`linear` as a GPU computes it, with a place for the result."""
    return torch.mm(rows, weight.t(), out=out) if bias is None else torch.addmm(bias, rows, weight.t(), out=out)


def in_parts(work: Callable[..., Tensor], rows: Tensor, sizes: RowSizes, num_columns: int | None = None) -> Tensor:
    """`work` on rows, the last dimension but one, in parts of these sizes; zeros stand behind the last ones.

    With `num_columns` it is told where to put so many for each row, as `out`, which saves gathering them.
    """
    num_rows, parts = rows.shape[-2], parts_of(rows.shape[-2], sizes)
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


def _at_least(num_rows: int, work: Work, rows: Tensor) -> Tensor:
    """`work` on that many rows or more, those that are missing being zeros."""
    num_missing = max(0, num_rows - len(rows))
    return work(pad(rows, (0, 0, 0, num_missing)))[: len(rows)] if num_missing else work(rows)


def _widened(numbers: Tensor, least: int) -> Tensor:
    """Zeros behind each row up to the least width; itself where it is wide enough, which `pad` would copy."""
    num_missing = least - numbers.shape[-1]
    return pad(numbers, (0, num_missing)) if num_missing > 0 else numbers


def _lengthened(numbers: Tensor, least: int) -> Tensor:
    """The same for zeros below."""
    num_missing = least - numbers.shape[-2]
    return pad(numbers, (0, 0, 0, num_missing)) if num_missing > 0 else numbers


def in_whole_vectors(function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Elementwise, and no thread's share ends within a vector: what is left over there is computed another way."""
    if numbers.device.type != "cpu":
        return function(numbers, *args, **kwargs)
    flat = numbers.reshape(-1)
    if len(flat) % _VECTOR:
        flat = pad(flat, (0, -len(flat) % _VECTOR))
    num_threads = torch.get_num_threads()
    shares = (num_threads, max(1, min(num_threads, math.ceil(len(flat) / _GRAIN))))
    if len(flat) < _LEAST_SHARED or all(math.ceil(len(flat) / share) % _VECTOR == 0 for share in shares):
        out = function(flat, *args, **kwargs)
    else:
        out = _on_one_thread(function, flat, *args, **kwargs)
    return out[: numbers.numel()].reshape(numbers.shape)


def _on_one_thread(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*args, **kwargs)
    finally:
        torch.set_num_threads(before)
