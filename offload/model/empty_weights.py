"""Weights that have a shape and no memory, whatever a family's constructor fills them with."""

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# parameters alone begin as so many zeros, such as the experts of Llama 4; buffers stay real
_MANY_ZEROS = 1 << 24
# of torch and of transformers
_RANDOM_FILLS = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_")


class EmptyOnMeta(TorchFunctionMode):
    """Parameters begin as `torch.empty`, which must allocate nothing, and are not drawn at random,
    which takes long.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _RANDOM_FILLS:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                return tensor
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        if func is torch.zeros and kwargs.get("device") is None and _num_zeros(args) > _MANY_ZEROS:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _num_zeros(sizes: Any) -> int:
    """Return how many numbers `torch.zeros` is asked for."""
    sizes = sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes
    return math.prod(size for size in sizes if type(size) is int)
