"""Products, sums and activation functions whose result for a row does not depend on the rows beside
it.

Matrix libraries take other ways for a few rows than for many, torch rounds the last numbers of a
thread's share of an activation function differently, and on a GPU it gives a row's sum fewer
threads the more rows there are, up to 16. So within `InvariantRows` a product is made in parts
whose sizes are found by trial (`find_sizes`), the last one padded, sums on a GPU are of at least
16 rows, and threads share elementwise work in whole vectors.

With how many rows a product gives a row the same bits: found by trial, since libraries promise
nothing.

A library chooses by shape, type, processor and threads how it adds up, and in 16 bits one order
shows in one of 30,000 numbers alone. So a product is tried on numbers whose sums cancel: what is
left of each is rounding, and many a number tells which order it was added up in. What differs with
the threads, or by where a row stands, is never used.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from offload.model import wide_products
from offload.model.wide_products import product_for

MAX_ROWS = 256  # of one product on a CPU
LADDER = (4, 8, 16, 32, 48, 64, 96, 128, 192, MAX_ROWS)
# On a GPU there is time enough for the first of them; more take fewer launches, where their bits
# are the same.
DEVICE_LADDER = (MAX_ROWS, 2 * MAX_ROWS, 4 * MAX_ROWS, 8 * MAX_ROWS)
# for stacks, whose factors are small: attention multiplies by one for each key/value head.
STACKED_LADDER = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_STACKED_ROWS = STACKED_LADDER[-1]
_CALL_ROWS = 48  # a product costs about what so many more rows would, however few it has
# of steps without a tree, with one of the usual size, and with a large one
_STEP_ROWS = (1, 64, MAX_ROWS)
_LEAST_ROWS = 32  # a product in parts of fewer rows takes several times as long
# of results, and of factors that are made up: larger ones are tried themselves
_MOST_BYTES = 16 << 20
_MOST_DEVICE_BYTES = 32 << 20  # of results there, where layers may have taken the rest
_LARGE = (4, 16, 32, 64, 128, MAX_ROWS)  # sizes to try with these, since each takes long
_NUM_CANCELLING = 64  # columns of these whose sums cancel
# of results that differ are kept, and any more
_MOST_KINDS = len(DEVICE_LADDER)
_OTHER = -1
_FACTORS = 5  # of any stack that are tried, and one alone
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
RowSizes = tuple[int, ...]
# rows (..., T, K) by the second factor: a weight or its transpose
Multiply = Callable[..., Tensor]


def find_sizes(
    multiply: Multiply, factor: Tensor, thread_counts: Sequence[int], *, is_transposed: bool
) -> RowSizes:
    """Numbers of rows that give the same bits with every number of threads; empty where there are
    none.

    Of several such sets the one that is cheapest for trees of usual sizes. `factor` is (N, K) as
    that of `linear` where `is_transposed`, else (K, N) or a stack of such.
    """
    rows, like = _trial_numbers(factor, is_transposed=is_transposed)
    sizes: RowSizes = STACKED_LADDER if like.ndim > 2 else LADDER
    ladder = _ladder(multiply(rows[..., :1, :], like), _LARGE if like is factor else sizes)
    if ladder[-1] >= rows.shape[-2]:
        rows = rows[..., torch.arange(ladder[-1] + 1, device=rows.device) % rows.shape[-2], :]
    outs: list[Tensor] = []  # that differ, each from the product with the most rows
    kinds = {size: set[int]() for size in ladder}
    before = torch.get_num_threads()
    try:
        for num_threads in sorted({*thread_counts}):
            torch.set_num_threads(num_threads)
            for size in reversed(ladder):
                out = multiply(rows[..., :size, :], like)
                kinds[size].add(_kind_of(out, outs))
                if like.ndim > 2:
                    kinds[size] |= (
                        set() if _same(multiply(rows[:1, :size], like[:1]), out[:1]) else {_OTHER}
                    )
        torch.set_num_threads(min(thread_counts))
        same = {
            kind: tuple(size for size in ladder if kinds[size] == {kind})
            for kind in range(len(outs))
        }
        for kind in sorted(filter(same.get, same), key=lambda kind: _cost_in_steps(same[kind])):
            sizes = _that_hold_elsewhere(
                lambda moved: multiply(moved, like), rows, outs[kind], same[kind]
            )
            if sizes and sizes[-1] >= min(_LEAST_ROWS, ladder[-1]):
                return sizes
    finally:
        torch.set_num_threads(before)
    return ()


def _that_hold_elsewhere(
    work: Callable[[Tensor], Tensor], rows: Tensor, out: Tensor, sizes: RowSizes
) -> RowSizes:
    """Those up to the largest whose rows are the same one place further; smaller ones agree with it
    place by place.
    """
    while sizes:
        moved = work(rows[..., 1 : sizes[-1] + 1, :])
        if _same(moved[..., :-1, :], out[..., 1 : sizes[-1], :]):
            break
        sizes = sizes[:-1]
    return sizes


def _cost_in_steps(sizes: RowSizes) -> float:
    return sum(
        sum(_CALL_ROWS + size for size in parts_of(num, sizes)) / (_CALL_ROWS + num)
        for num in _STEP_ROWS
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Compared on one thread: `torch.equal` would wait for all of them, many times over."""
    if one.device.type != "cpu":
        return torch.equal(one, other)
    bits = _BITS[one.element_size()]
    return np.array_equal(one.view(bits).numpy(), other.view(bits).numpy())


def _ladder(one: Tensor, sizes: RowSizes) -> RowSizes:
    """Those of the sizes to try there, by the result for one row."""
    is_host = one.device.type == "cpu"
    all_sizes, most_bytes = (sizes, _MOST_BYTES) if is_host else (DEVICE_LADDER, _MOST_DEVICE_BYTES)
    return tuple(size for size in all_sizes if size * one.nbytes <= most_bytes) or all_sizes[:1]


def _kind_of(out: Tensor, outs: list[Tensor]) -> int:
    """Which of them has the same rows; it is added where none has, and while they are few."""
    for kind, other in enumerate(outs):
        if _same(out, other[..., : out.shape[-2], :]):
            return kind
    if len(outs) == _MOST_KINDS:
        return _OTHER
    outs.append(out)
    return len(outs) - 1


def parts_of(num_rows: int, sizes: RowSizes) -> list[int]:
    """In which of the sizes to make a product of so many rows, the last of which may be padded."""
    num_most, rest = divmod(num_rows, sizes[-1])
    return [sizes[-1]] * num_most + (_cheapest(rest, sizes)[1] if rest else [])


@lru_cache(maxsize=4096)
def _cheapest(num_rows: int, sizes: RowSizes) -> tuple[int, list[int]]:
    if num_rows <= 0:
        return 0, []
    choices = []
    for size in sizes[: next(i for i, size in enumerate(sizes) if size >= num_rows) + 1]:
        rest_cost, rest = _cheapest(num_rows - size, sizes)
        choices.append((_CALL_ROWS + size + rest_cost, [size, *rest]))
    return min(choices)


def is_tried_by_likeness(factor: Tensor) -> bool:
    """Whether other numbers stand for its own in a trial; a large matrix is tried itself, to save
    the memory.
    """
    return factor.ndim > 2 or factor.numel() * factor.element_size() <= _MOST_BYTES


def _trial_numbers(factor: Tensor, *, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Rows and a factor like this one in all but its numbers: of every sum the second half undoes
    the first.
    """
    num_columns, width = (
        factor.shape[-2:] if is_transposed else (factor.shape[-1], factor.shape[-2])
    )
    chance = torch.Generator().manual_seed(0)
    if not is_tried_by_likeness(factor):
        return _cancelling_rows(factor if is_transposed else factor.mT, chance), factor
    order = torch.randperm(width // 2, generator=chance).to(factor.device)
    halves = [
        torch.randn(num + width // 2, generator=chance).to(factor).unfold(0, width // 2, 1)[:num]
        for num in (MAX_ROWS + 1, num_columns)
    ]
    odd = width % 2
    rows = torch.cat([halves[0], halves[0][:, order], halves[0].new_zeros(MAX_ROWS + 1, odd)], 1)
    columns = torch.cat([halves[1], -halves[1][:, order], halves[1].new_zeros(num_columns, odd)], 1)
    stack = (_FACTORS,) if factor.ndim > 2 else ()
    like = _strided_like(factor, stack).copy_(columns if is_transposed else columns.mT)
    return rows.expand(*stack, -1, -1).contiguous(), like


def _cancelling_rows(factor_NK: Tensor, chance: torch.Generator) -> Tensor:
    """Rows whose products with some columns of a factor all but vanish, since the second half
    undoes the first.

    They do so by least squares; what rounding to the factor's type leaves is small beside what is
    added up.
    """
    num_columns, width = factor_NK.shape
    num_some = min(_NUM_CANCELLING, num_columns, width // 8)
    some_SK = factor_NK[:: num_columns // num_some][:num_some].double().cpu().nan_to_num(0, 0, 0)
    first_SK, second_SK = some_SK.tensor_split(2, 1)
    start = torch.randn(MAX_ROWS + 1, first_SK.shape[1], generator=chance).to(factor_NK.dtype)
    # some columns may be alike, or nothing
    inverse_SS = torch.linalg.pinv(second_SK @ second_SK.T, hermitian=True)
    rest = -(start.double() @ first_SK.T @ inverse_SS) @ second_SK
    return torch.cat([start, rest.to(start)], 1).to(factor_NK)


def _strided_like(factor: Tensor, stack: tuple[int, ...]) -> Tensor:
    """An empty factor, or a stack of such, whose numbers lie as far from each other."""
    shape = factor.shape[-2:]
    stride = factor.stride()[-2:]
    if 0 in stride:
        return factor.new_empty(*stack, *shape)
    num_spanned = 1 + sum((num - 1) * step for num, step in zip(shape, stride, strict=True))
    return factor.new_empty(*stack, num_spanned).as_strided(
        (*stack, *shape), (*[num_spanned] * len(stack), *stride)
    )


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
    """While it is entered, every product has rows of sizes that give the same bits, whatever model
    code asks for it.

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
        self._own |= {
            product: partial(self._multiply_whole, product) for product in wide_products.MULTIPLY
        }
        self._own |= {function: partial(self._activate, function) for function in _ACTIVATIONS}
        self._own |= {function: partial(self._sum, function) for function in _SUMS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes = self._plain.get(
            (weight.shape, weight.stride(), weight.dtype, bias is None, weight.device)
        )
        if sizes is not None and input.ndim == 3 and len(input) == 1:
            product = product_for(functional.linear, input)
            num_rows = input.shape[1]
            if num_rows in sizes:
                return product(input, weight, bias)
            if product is wide_products.linear:
                return wide_products.linear(input, weight, bias, parts_of(num_rows, sizes))
        num_columns = weight.shape[0]
        left = _widened(input, _LEAST_WIDTH)
        widened = _widened(_lengthened(weight, _LEAST_WIDTH), _LEAST_WIDTH)
        bias = None if bias is None else _widened(bias, _LEAST_WIDTH)
        rows = left.reshape(-1, left.shape[-1])
        is_host = left.device.type == "cpu"
        multiply: Callable[..., Tensor] = (
            product_for(functional.linear, left) if is_host else _linear_into
        )
        sizes = self._sizes_of(multiply, widened, bias, is_transposed=True)
        if is_host and widened is weight:
            self._plain[
                weight.shape, weight.stride(), weight.dtype, bias is None, weight.device
            ] = sizes
        if multiply is wide_products.linear:
            whole = wide_products.linear(rows, widened, bias, parts_of(len(rows), sizes))
        else:
            work = lambda part, **out: multiply(part, widened, bias, **out)  # noqa: E731
            whole = in_parts(work, rows, sizes, None if is_host else len(widened))
        out = whole[:, :num_columns]
        return out if left.ndim == 2 else out.unflatten(0, left.shape[:-1])

    def _multiply_whole(self, product: Multiply, *args: Tensor, **kwargs: Any) -> Tensor:
        """Without gaps where padding was, as the product itself: model code looks at it in other
        shapes.
        """
        return self.multiply(product, *args, **kwargs).contiguous()

    def multiply(
        self, product: Multiply, *args: Tensor, out: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """By `matmul` or what is like it; of a stack the rows are those of each factor in it.

        `out` is a place for the result, which need not be used. GPUs may give another `out_dtype`
        than that of the factors.
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
        left = _widened(left, least)
        right = _widened(_lengthened(right, least), least)
        rows = left if is_stack or left.ndim == 2 else left.reshape(-1, left.shape[-1])
        product = product_for(product, left)
        sizes = self._sizes_of(product, right)
        if out is not None and rows.shape[-2] in sizes and right.shape[-1] == num_columns:
            return product(rows, right, out=out)
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
        what = (
            product,
            factor.shape[-2:],
            factor.stride()[-2:],
            factor.dtype,
            factor.device,
            factor.ndim > 2,
        )
        key = (*what, bias is None)
        if key not in self._found:
            # a wide product's blocks are one thread's each, however many there are
            is_shared = product is wide_products.linear
            counts = (1,) if is_shared else self.thread_counts
            factor = wide_products.typical_part(factor) if is_shared else factor
            more = () if bias is None else (bias.new_zeros(len(factor)),)
            trial = lambda rows, like: product(rows, like, *more)  # noqa: E731
            settings = (
                find_sizes,
                counts,
                torch.get_float32_matmul_precision(),
                mkldnn.enabled,
            )
            tried = _TRIED if is_tried_by_likeness(factor) else {}
            if (key, settings) not in tried:
                tried[key, settings] = find_sizes(
                    trial, factor, counts, is_transposed=is_transposed
                )
            self._found[key] = tried[key, settings]
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
        """Over the last dimension, on a GPU: on a CPU a row's sum is one thread's, whatever stands
        beside it.
        """
        dim = args[0] if len(args) == 1 else kwargs.get("dim")
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if dim not in (-1, numbers.ndim - 1) or numbers.ndim < 2 or numbers.device.type == "cpu":
            return function(numbers, *args, **kwargs)
        more = {name: value for name, value in kwargs.items() if name not in ("dim", "keepdim")}
        work = partial(_at_least, _LEAST_SUMS, partial(function, dim=-1, keepdim=True, **more))
        out = self.activate(work, numbers.reshape(-1, numbers.shape[-1])).reshape(
            *numbers.shape[:-1], 1
        )
        return out if kwargs.get("keepdim") else out[..., 0]

    def activate(self, work: Work, rows: Tensor) -> Tensor:
        """What is done with rows one by one; a check looks at it here."""
        return work(rows)


@cache
def _giving(product: Multiply, out_dtype: torch.dtype) -> Multiply:
    """Return one function for one product and type: what was tried is found by it."""
    return partial(product, out_dtype=out_dtype)


def _linear_into(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`linear` as a GPU computes it, with a place for the result."""
    return (
        torch.mm(rows, weight.t(), out=out)
        if bias is None
        else torch.addmm(bias, rows, weight.t(), out=out)
    )


def in_parts(
    work: Callable[..., Tensor], rows: Tensor, sizes: RowSizes, num_columns: int | None = None
) -> Tensor:
    """`work` on rows, the last dimension but one, in parts of these sizes; zeros stand behind the
    last ones.

    With `num_columns` it is told where to put so many for each row, as `out`, which saves gathering
    them.
    """
    num_rows = rows.shape[-2]
    parts = parts_of(rows.shape[-2], sizes)
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
    """Zeros behind each row up to the least width; itself where it is wide enough, which `pad`
    would copy.
    """
    num_missing = least - numbers.shape[-1]
    return pad(numbers, (0, num_missing)) if num_missing > 0 else numbers


def _lengthened(numbers: Tensor, least: int) -> Tensor:
    """Add rows of zeros below; see `_widened`."""
    num_missing = least - numbers.shape[-2]
    return pad(numbers, (0, 0, 0, num_missing)) if num_missing > 0 else numbers


def in_whole_vectors(
    function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Elementwise, and no thread's share ends within a vector: what is left over there is computed
    another way.
    """
    if numbers.device.type != "cpu":
        return function(numbers, *args, **kwargs)
    flat = numbers.reshape(-1)
    if len(flat) % _VECTOR:
        flat = pad(flat, (0, -len(flat) % _VECTOR))
    num_threads = torch.get_num_threads()
    shares = (num_threads, max(1, min(num_threads, math.ceil(len(flat) / _GRAIN))))
    if len(flat) < _LEAST_SHARED or all(
        math.ceil(len(flat) / share) % _VECTOR == 0 for share in shares
    ):
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
