"""Products, sums and activation functions whose result for a row depends on no row beside it.

Matrix libraries take other ways for a few rows than for many, torch rounds the last numbers of a
thread's share of an activation function differently, and on a GPU it gives a row's sum fewer
threads the more rows there are, up to 16. So within `InvariantRows` a product is made in parts
whose sizes are found by trial (`row_sizes.py`), the last one padded, sums on a GPU are of at least
16 rows, and threads share elementwise work in whole vectors.
What machine code of our own multiplies (`wide_products.py`) needs none of that.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from offload.model import wide_products
from offload.model.row_sizes import (
    DEVICE_LADDER,
    LADDER,
    Multiply,
    RowSizes,
    find_sizes,
    is_tried_by_likeness,
    parts_of,
)
from offload.model.wide_products import product_for

Work = Callable[[Tensor], Tensor]
_VECTOR = 64  # numbers: no processor that torch knows handles more at once
# torch shares elementwise work among threads by 32768 numbers (at::internal::GRAIN_SIZE), gelu
# evenly from 16384 on.
_GRAIN = 32768
_LEAST_SHARED = 16384
# of both factors of a product: with narrower ones libraries have ways of their own
_LEAST_WIDTH = 64
_LEAST_STACKED = 32  # the same for stacks
# at once on a GPU: from there on each gets the same threads (ATen's Reduce.cuh,
# set_block_dimension)
_LEAST_SUMS = 16
_ACTIVATIONS = (functional.silu, functional.gelu, torch.sigmoid, Tensor.sigmoid, functional.sigmoid, torch.tanh,
                Tensor.tanh, functional.tanh, functional.softplus, functional.mish, functional.elu, torch.exp,
                Tensor.exp)  # fmt: skip
_SUMS = (torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.var, Tensor.var)
# By product, and by what decides how it is tried: what a library does with a shape stays what it
# is, for any model.
_TRIED: dict[Any, RowSizes] = {}


class InvariantRows(TorchFunctionMode):
    """A mode in which every product of a library has rows of sizes that give the same bits.

    It holds whatever model code asks for the product.

    Args:
        thread_counts: that products may be computed with.

    Attributes:
        thread_counts: the same.
        num_refused: products whose rows have other bits with every number of rows.
    """

    def __init__(self, thread_counts: Sequence[int]) -> None:
        super().__init__()
        self.num_refused = 0
        self.thread_counts = tuple(thread_counts)
        self._found: dict[Any, RowSizes] = {}  # by product
        # of a CPU's weights: as many rows need no padding, nor to be cut
        self._plain: dict[Any, RowSizes] = {}
        self._own: dict[Any, Callable[..., Tensor]] = {functional.linear: self._linear}
        self._own |= {one: partial(self._multiply_whole, one) for one in wide_products.MULTIPLY}
        self._own |= {function: partial(self._activate, function) for function in _ACTIVATIONS}
        self._own |= {function: partial(self._sum, function) for function in _SUMS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if wide_products.is_widened(input, weight):
            return wide_products.linear(input, weight, bias)
        key = (weight.shape, weight.stride(), weight.dtype, bias is None, weight.device)
        sizes = self._plain.get(key)
        is_text = input.ndim == 3 and input.shape[0] == 1
        if sizes is not None and is_text and input.shape[1] in sizes:
            return product_for(functional.linear, input)(input, weight, bias)
        num_columns = weight.shape[0]
        left = widened(input, _LEAST_WIDTH)
        wide = widened(_lengthened(weight, _LEAST_WIDTH), _LEAST_WIDTH)
        bias = None if bias is None else widened(bias, _LEAST_WIDTH)
        rows = left.reshape(-1, left.shape[-1])
        is_host = left.device.type == "cpu"
        multiply: Callable[..., Tensor] = _linear_into
        if is_host:
            multiply = product_for(functional.linear, left)
        sizes = self._sizes_of(multiply, wide, bias, is_transposed=True)
        if is_host and wide is weight:
            self._plain[key] = sizes
        work = lambda part, **out: multiply(part, wide, bias, **out)  # noqa: E731
        whole = in_parts(work, rows, sizes, None if is_host else len(wide))
        out = whole[:, :num_columns]
        return out if left.ndim == 2 else out.unflatten(0, left.shape[:-1])

    def _multiply_whole(self, product: Multiply, *args: Tensor, **kwargs: Any) -> Tensor:
        """Multiply, and leave no gaps where padding was: model code looks at it in other shapes."""
        return self.multiply(product, *args, **kwargs).contiguous()

    def multiply(self, product: Multiply, *args: Tensor, **kwargs: Any) -> Tensor:
        """Multiply by `matmul` or what is like it; of a stack the rows are those of each factor.

        GPUs may give another `out_dtype` than that of the factors.
        """
        out_dtype = kwargs.pop("out_dtype", None)
        factors = [*args, *kwargs.values()]
        left, right = factors
        if out_dtype is not None:
            product = _giving(product, out_dtype)
        # of a single number nothing is added up
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
        out = in_parts(lambda part: product(part, right), rows, sizes)[..., :num_columns]
        return out if is_stack or left.ndim == 2 else out.unflatten(0, left.shape[:-1])

    def _sizes_of(
        self,
        product: Callable[..., Tensor],
        factor: Tensor,
        bias: Tensor | None = None,
        *,
        is_transposed: bool = False,
    ) -> RowSizes:
        """Return the row counts for a factor, tried when one of its shape first comes.

        A factor of a GPU that lies at an odd address has one size, without a trial.
        """
        if factor.device.type != "cpu" and factor.data_ptr() % 16:
            return DEVICE_LADDER[:1]
        what = (product, factor.shape[-2:], factor.stride()[-2:], factor.dtype, factor.device)
        key = (*what, factor.ndim > 2, bias is None)
        if key not in self._found:
            more = () if bias is None else (bias.new_zeros(len(factor)),)
            trial = lambda rows, like: product(rows, like, *more)  # noqa: E731
            precision = torch.get_float32_matmul_precision()
            settings = (key, find_sizes, self.thread_counts, precision, mkldnn.enabled)
            tried = _TRIED if is_tried_by_likeness(factor) else {}
            if settings not in tried:
                counts = self.thread_counts
                tried[settings] = find_sizes(trial, factor, counts, is_transposed=is_transposed)
            self._found[key] = tried[settings]
        self.num_refused += not self._found[key]
        return self._found[key] or LADDER[-1:]

    def _activate(
        self, function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        work = lambda part: in_whole_vectors(function, part, *args, **kwargs)  # noqa: E731
        return self.activate(work, numbers) if numbers.ndim > 1 else work(numbers)

    def _sum(
        self, function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Add up over the last dimension, of at least 16 rows on a GPU.

        On a CPU a row's sum is one thread's, whatever stands beside it.
        """
        dim = args[0] if len(args) == 1 else kwargs.get("dim")
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if dim not in (-1, numbers.ndim - 1) or numbers.ndim < 2 or numbers.device.type == "cpu":
            return function(numbers, *args, **kwargs)
        more = {name: value for name, value in kwargs.items() if name not in ("dim", "keepdim")}
        work = partial(_at_least, _LEAST_SUMS, partial(function, dim=-1, keepdim=True, **more))
        sums = self.activate(work, numbers.reshape(-1, numbers.shape[-1]))
        out = sums.reshape(*numbers.shape[:-1], 1)
        return out if kwargs.get("keepdim") else out[..., 0]

    def activate(self, work: Work, rows: Tensor) -> Tensor:
        """Do what is done with rows one by one; a check looks at it here."""
        return work(rows)


@cache
def _giving(product: Multiply, out_dtype: torch.dtype) -> Multiply:
    """Return one function for one product and type: what was tried is found by it."""
    return partial(product, out_dtype=out_dtype)


def _linear_into(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute `linear` as a GPU does, with a place for the result."""
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def in_parts(
    work: Callable[..., Tensor], rows: Tensor, sizes: RowSizes, num_columns: int | None = None
) -> Tensor:
    """Do `work` on rows, the last dimension but one, in parts of these sizes, the last one padded.

    With `num_columns` it is told where to put so many for each row, as `out`, in one place.
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


def _at_least(num_rows: int, work: Work, rows: Tensor) -> Tensor:
    """Do `work` on that many rows or more, those that are missing being zeros."""
    num_missing = max(0, num_rows - len(rows))
    return work(pad(rows, (0, 0, 0, num_missing)))[: len(rows)] if num_missing else work(rows)


def widened(numbers: Tensor, least: int) -> Tensor:
    """Return the rows with zeros behind each, up to the least width.

    Rows that are wide enough are returned themselves, where `pad` would copy.
    """
    num_missing = least - numbers.shape[-1]
    return pad(numbers, (0, num_missing)) if num_missing > 0 else numbers


def _lengthened(numbers: Tensor, least: int) -> Tensor:
    """Add rows of zeros below; see `widened`."""
    num_missing = least - numbers.shape[-2]
    return pad(numbers, (0, 0, 0, num_missing)) if num_missing > 0 else numbers


def in_whole_vectors(
    function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute an elementwise function so that no thread's share ends within a vector.

    torch computes what is left over there in another way.
    """
    num = numbers.numel()
    is_whole = num % _VECTOR == 0
    is_plain = is_whole and numbers.is_contiguous() and _are_shares_whole(num)
    if numbers.device.type != "cpu" or is_plain:
        return function(numbers, *args, **kwargs)
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
    """Tell whether no thread's share of so many numbers, whole vectors, ends within one."""
    num_threads = torch.get_num_threads()
    shares = (num_threads, max(1, min(num_threads, math.ceil(num / _GRAIN))))
    return num < _LEAST_SHARED or all(math.ceil(num / share) % _VECTOR == 0 for share in shares)
