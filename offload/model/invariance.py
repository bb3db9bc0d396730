"""Products and activation functions whose result for a row does not depend on the rows beside it.

Matrix libraries take other ways for a few rows than for many, and torch rounds the last numbers of a thread's share of
an activation function differently. So within `InvariantRows` the rows of a product are padded to a multiple, which is
found by trial on this machine (`calibration/invariance.py`), and threads share elementwise work in whole vectors.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

MAX_ROWS = 256  # of one product
Work = Callable[[Tensor], Tensor]
_VECTOR = 64  # numbers: no processor that torch knows handles more at once
# torch shares elementwise work among threads by 32768 numbers (at::internal::GRAIN_SIZE), gelu evenly from 16384 on.
_GRAIN, _LEAST_SHARED = 32768, 16384
_LEAST_WIDTH = 64  # of both factors of a product: with narrower ones libraries have ways of their own
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
_ACTIVATIONS = (functional.silu, functional.gelu, torch.sigmoid, Tensor.sigmoid, functional.sigmoid, torch.tanh,
                Tensor.tanh, functional.tanh, functional.softplus, functional.mish, functional.elu)  # fmt: skip


class InvariantRows(TorchFunctionMode):
    """While it is entered, every product has a multiple of `multiple` rows, whatever model code asks for it.

    Products of more than `MAX_ROWS` rows are made in parts, since libraries change their ways again with many rows.
    """

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple
        self._own: dict[Any, Callable[..., Tensor]] = {functional.linear: self._linear}
        self._own |= {product: partial(self._matmul, product) for product in _PRODUCTS}
        self._own |= {function: partial(self._activate, function) for function in _ACTIVATIONS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        num_columns = weight.shape[0]
        left, weight = _widened(input), _widened(_lengthened(weight))
        bias = None if bias is None else _widened(bias)
        out = self.by_rows(lambda rows: functional.linear(rows, weight, bias), left, is_stack=False)
        return out[..., :num_columns]

    def _matmul(self, product: Callable[[Tensor, Tensor], Tensor], *args: Tensor, **kwargs: Tensor) -> Tensor:
        left, right = (*args, *kwargs.values())
        if left.ndim < 2 or right.ndim < 2:
            return product(left, right)
        num_columns = right.shape[-1]
        left, right = _widened(left), _widened(_lengthened(right))
        return self.by_rows(lambda rows: product(rows, right), left, is_stack=right.ndim > 2)[..., :num_columns]

    def by_rows(self, work: Work, left: Tensor, *, is_stack: bool) -> Tensor:
        """`work` on padded rows, which are all numbers of a factor but those of its last dimension.

        Of a stack the rows are those of each factor in it, the last dimension but one.
        """
        rows = left if is_stack else left.reshape(-1, left.shape[-1])
        num_rows = rows.shape[-2]
        if num_rows % self.multiple:
            rows = pad(rows, (0, 0, 0, -num_rows % self.multiple))
        parts = [self.call(work, part) for part in rows.split(self._most, -2)]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts, -2))[..., :num_rows, :]
        return out if is_stack or left.ndim == 2 else out.unflatten(0, left.shape[:-1])

    def call(self, work: Work, rows: Tensor) -> Tensor:
        """What is done with a part of the rows; a check looks at it here."""
        return work(rows)

    @property
    def _most(self) -> int:
        return max(self.multiple, MAX_ROWS // self.multiple * self.multiple)

    def _activate(self, function: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        work = lambda part: in_whole_vectors(function, part, *args, **kwargs)  # noqa: E731
        return self.call(work, numbers) if numbers.ndim > 1 else work(numbers)


def _widened(numbers: Tensor) -> Tensor:
    """Zeros behind each row up to the least width; itself where it is wide enough, which `pad` would copy."""
    num_missing = _LEAST_WIDTH - numbers.shape[-1]
    return pad(numbers, (0, num_missing)) if num_missing > 0 else numbers


def _lengthened(numbers: Tensor) -> Tensor:
    """The same for zeros below."""
    num_missing = _LEAST_WIDTH - numbers.shape[-2]
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
