"""The numbers of rows for which a product gives a row the same bits, found by trial.

A library promises nothing: shape, type, processor and threads decide its order of summation, and in
16 bits a different order may show in one of 30,000 numbers only. So a product is tried on numbers
whose sums cancel: what is left is rounding, and many of these numbers show the order of summation.
Sizes whose results differ with the threads, or with a row's place, are never used.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MAX_ROWS = 256  # of one product on a CPU
LADDER = (4, 8, 16, 32, 48, 64, 96, 128, 192, MAX_ROWS)
# On a GPU there is time enough for the first of them; more take fewer launches, where their bits
# are the same.
DEVICE_LADDER = (MAX_ROWS, 2 * MAX_ROWS, 4 * MAX_ROWS, 8 * MAX_ROWS)
# for stacks, whose factors are small: attention multiplies by one for each key/value head.
STACKED_LADDER = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_STACKED_ROWS = STACKED_LADDER[-1]
_CALL_ROWS = 48  # a product costs about what this many more rows would, however few it has
# rows of steps without a tree, with a usual tree, and with a large one
_STEP_ROWS = (1, 64, MAX_ROWS)
_LEAST_ROWS = 32  # a product in parts of fewer rows takes several times as long
# most bytes of a result, and of a factor that is imitated; larger factors are tried themselves
_MOST_BYTES = 16 << 20
_MOST_DEVICE_BYTES = 32 << 20  # results on a device, beside layers
_LARGE = (4, 16, 32, 64, 128, MAX_ROWS)  # sizes to try with these, since each takes long
_NUM_CANCELLING = 64  # columns of these whose sums cancel
# different results that are kept; `_OTHER` is any more of them
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
    """Return numbers of rows that give the same bits with every number of threads, or none.

    Of several such sets it is the one that is cheapest for trees of usual sizes. `factor` is (N, K)
    as that of `linear` where `is_transposed`, else (K, N) or a stack of such.
    """
    rows, like = _trial_numbers(factor, is_transposed=is_transposed)
    sizes: RowSizes = STACKED_LADDER if like.ndim > 2 else LADDER
    ladder = _ladder(multiply(rows[..., :1, :], like), _LARGE if like is factor else sizes)
    if ladder[-1] >= rows.shape[-2]:
        rows = rows[..., torch.arange(ladder[-1] + 1, device=rows.device) % rows.shape[-2], :]
    before = torch.get_num_threads()
    try:
        alike = _sizes_by_result(multiply, rows, like, ladder, thread_counts)
        torch.set_num_threads(min(thread_counts))
        for sizes, result in sorted(alike, key=lambda pair: _cost_in_steps(pair[0])):
            movable = _movable_sizes(multiply, rows, like, sizes, result)
            if movable and movable[-1] >= min(_LEAST_ROWS, ladder[-1]):
                return movable
    finally:
        torch.set_num_threads(before)
    return ()


def _sizes_by_result(
    multiply: Multiply, rows: Tensor, like: Tensor, ladder: RowSizes, thread_counts: Sequence[int]
) -> list[tuple[RowSizes, Tensor]]:
    """Try every size with every number of threads; return the sizes that share a result, with it.

    A result is that of the product with the most rows. Sizes with several results are left out, as
    are those of stacks whose first product differs from the same product alone.
    """
    results: list[Tensor] = []
    kinds = {size: set[int]() for size in ladder}
    for num_threads in sorted({*thread_counts}):
        torch.set_num_threads(num_threads)
        for size in reversed(ladder):
            out = multiply(rows[..., :size, :], like)
            kinds[size].add(_kind_of(out, results))
            is_stack = like.ndim > 2
            if is_stack and not _same(multiply(rows[:1, :size], like[:1]), out[:1]):
                kinds[size].add(_OTHER)
    alike = [
        (tuple(size for size in ladder if kinds[size] == {kind}), result)
        for kind, result in enumerate(results)
    ]
    return [(sizes, result) for sizes, result in alike if sizes]


def _movable_sizes(
    multiply: Multiply, rows: Tensor, like: Tensor, sizes: RowSizes, result: Tensor
) -> RowSizes:
    """Return the sizes up to the largest whose rows keep their bits one place further up.

    Smaller sizes agree with it place by place, so one comparison is enough.
    """
    while sizes:
        moved = multiply(rows[..., 1 : sizes[-1] + 1, :], like)
        if _same(moved[..., :-1, :], result[..., 1 : sizes[-1], :]):
            break
        sizes = sizes[:-1]
    return sizes


def _cost_in_steps(sizes: RowSizes) -> float:
    return sum(
        sum(_CALL_ROWS + size for size in parts_of(num, sizes)) / (_CALL_ROWS + num)
        for num in _STEP_ROWS
    )


def _same(result: Tensor, other: Tensor) -> bool:
    """Return True for equal bits, by one thread: `torch.equal` would wait for all, many times."""
    if result.device.type != "cpu":
        return torch.equal(result, other)
    bits = _BITS[result.element_size()]
    return np.array_equal(result.view(bits).numpy(), other.view(bits).numpy())


def _ladder(result: Tensor, sizes: RowSizes) -> RowSizes:
    """Return the sizes whose results are small enough to be tried, by the result for one row."""
    is_host = result.device.type == "cpu"
    all_sizes, most_bytes = (sizes, _MOST_BYTES) if is_host else (DEVICE_LADDER, _MOST_DEVICE_BYTES)
    return tuple(size for size in all_sizes if size * result.nbytes <= most_bytes) or all_sizes[:1]


def _kind_of(out: Tensor, outs: list[Tensor]) -> int:
    """Return the index of the result with the same rows; `out` joins them unless they are many."""
    for kind, other in enumerate(outs):
        if _same(out, other[..., : out.shape[-2], :]):
            return kind
    if len(outs) == _MOST_KINDS:
        return _OTHER
    outs.append(out)
    return len(outs) - 1


def parts_of(num_rows: int, sizes: RowSizes) -> list[int]:
    """Return the sizes of the products that this many rows are made in; the last may be padded."""
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
    """Return True if a factor is tried by numbers like its own; a large one is tried itself."""
    return factor.ndim > 2 or factor.numel() * factor.element_size() <= _MOST_BYTES


def _trial_numbers(factor: Tensor, *, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Return rows whose sums cancel, and a factor like this one in all but its numbers."""
    num_columns, width = factor.shape[-2:] if is_transposed else factor.mT.shape[-2:]
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
    stack = (_FACTORS,) if factor.ndim > 2 else ()
    like = _strided_like(factor, stack)
    # in place: what is made for a large matrix lies in memory once
    columns = like if is_transposed else like.mT
    columns[..., : width // 2] = halves[1]
    columns[..., width // 2 : width - odd] = halves[1][:, order].neg_()
    columns[..., width - odd :] = 0
    return rows.expand(*stack, -1, -1).contiguous(), like


def _cancelling_rows(factor_NK: Tensor, chance: torch.Generator) -> Tensor:
    """Return rows whose products with some columns of a factor nearly cancel to 0.

    The second half of each sum undoes the first, by least squares; what rounding to the factor's
    type leaves is small beside what is added up.
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
    """Return an uninitialised matrix, or a stack of them, with the strides of this one."""
    shape = factor.shape[-2:]
    stride = factor.stride()[-2:]
    if 0 in stride:
        return factor.new_empty(*stack, *shape)
    num_spanned = 1 + sum((num - 1) * step for num, step in zip(shape, stride, strict=True))
    strides = (*[num_spanned] * len(stack), *stride)
    return factor.new_empty(*stack, num_spanned).as_strided((*stack, *shape), strides)
