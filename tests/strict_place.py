"""A GPU that is not there: tensors that live on it cannot be mixed with the host's, as CUDA would not let them.

Their numbers lie in host memory, but they say of themselves that they are elsewhere, and every operation is looked at
before it runs. An operation that takes tensors of both places is refused, and so is numpy; copies go either way and are
counted.
"""

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from offload.kernels.path_attention import PathRows, ScoreTerms
from offload.model.path_attention import path_attention

_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to", "aten::type_as")
_MATH = 0  # the way of attention that is made of simple operations
_HOST = torch.device("cpu")


class _Unavailable(_DummyBackendModule):
    def is_available(self) -> bool:
        return False  # libraries must not find an accelerator here


@cache
def place() -> torch.device:
    """Where tensors of the GPU lie. Torch is told of it at the first call and not at import.

    From then on it looks for pinned memory on this accelerator and no other, which tests of a real GPU must not meet.
    """
    _setup_privateuseone_for_python_backend("card", backend_module=_Unavailable())
    return torch.device("card", 0)


class OnCard(Tensor):
    """A tensor of the GPU; `held` are its numbers."""

    held: Tensor
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnCard":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        with torch.inference_mode(False):  # a view of it may be taken in either mode
            tensor = cls._make_wrapper_subclass(cls, held.size(), **layout, dtype=held.dtype, device=place())
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"on card: {self.held}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a tensor of the card has no numpy array, copy it to the host first")

    __array__ = numpy


class StrictDevice(TorchDispatchMode):
    """While it is entered the GPU is there.

    Attributes:
        looks: sizes of what the host has waited for.
        sends: sizes of what it has sent.
    """

    entered: ClassVar[list["StrictDevice"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[int] = []
        self.sends: list[int] = []

    def __enter__(self) -> "StrictDevice":
        self.entered.append(self)
        return super().__enter__()

    def __exit__(self, *others: Any) -> None:
        self.entered.pop()
        super().__exit__(*others)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _run(func, args, kwargs or {})
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_of_card = any(isinstance(operand, OnCard) for operand in operands)
        is_read = not any(isinstance(leaf, OnCard) for leaf in tree_leaves(out))
        if is_of_card and (is_read or _has_a_size_to_wait_for(func, operands)):
            self.looks.append(sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)) or 1)
        elif not is_read and (sent := [tensor.numel() for tensor in operands if _is_sent(func, tensor)]):
            self.sends.append(max(sent))
        return out


def _is_sent(func: Any, operand: Tensor) -> bool:
    """Return True if an operation sends the operand: a single number of the host is sent by copies alone."""
    return not isinstance(operand, OnCard) and (operand.ndim > 0 or func._schema.name in _COPIES)


def attend_on_card(query: Tensor, key: Tensor, value: Tensor, rows: PathRows, terms: ScoreTerms) -> Tensor:
    """In the kernel's place: it reads what lies there and nothing else, by operations that a card can look at."""
    assert all(isinstance(tensor, OnCard) for tensor in (query, key, value, rows.walk_TL))
    sink_H = None if terms.sink_H is None else terms.sink_H.held
    *states, walk_TL = (tensor.clone().held for tensor in (query, key, value, rows.walk_TL))
    return OnCard(path_attention(*states, replace(rows, walk_TL=walk_TL), replace(terms, sink_H=sink_H)))


def _has_a_size_to_wait_for(func: Any, operands: list[Tensor]) -> bool:
    """How large the result is depends on numbers of the GPU."""
    by_mask = func._schema.name == "aten::index" and any(operand.dtype == torch.bool for operand in operands[1:])
    return by_mask or func._schema.name in ("aten::nonzero", "aten::masked_select")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation on the numbers, wrapped again where the result lies on the GPU."""
    name, leaves = func._schema.name, tree_leaves((args, kwargs))
    if name == "aten::_fused_sdp_choice":
        return _MATH
    if name == "aten::scaled_dot_product_attention":
        with StrictDevice():
            return func.decompose(*args, **kwargs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    is_here = any(isinstance(tensor, OnCard) for tensor in tensors)
    if is_here and name not in _COPIES:
        _refuse_host(func, tensors)
    places = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
    out = _on_host(func, *tree_map(_held, (args, kwargs)))
    if name == "aten::copy_":
        return args[0]
    known = {id(_held(tensor)): tensor for tensor in tensors}
    if "card" in places or (is_here and "cpu" not in places):
        return tree_map(lambda leaf: _placed(leaf, known) if isinstance(leaf, Tensor) else leaf, out)
    return tree_map(lambda leaf: leaf.clone() if isinstance(known.get(id(leaf)), OnCard) else leaf, out)


def _refuse_host(func: Any, tensors: list[Tensor]) -> None:
    """CUDA takes single numbers from the host, and nothing else."""
    strangers = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, OnCard) and tensor.ndim]
    if strangers:
        raise RuntimeError(f"{func}: expected all tensors on the card, those of shape {strangers} are on the host")


def _placed(tensor: Tensor, known: dict[int, Tensor]) -> Tensor:
    """An operand that is handed back stays itself; what comes from the host is copied."""
    operand = known.get(id(tensor))
    if isinstance(operand, OnCard):
        return operand
    return OnCard(tensor if operand is None else tensor.clone())


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    if func._schema.name == "aten::histc" and not args[0].is_floating_point():  # which only CUDA counts
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if func is torch.ops.aten.mm.dtype:  # which CUDA alone has
        left, right, dtype = args
        return left.to(dtype) @ right.to(dtype)
    return func(*args, **kwargs)


def _held(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return _HOST
    return leaf.held if isinstance(leaf, OnCard) else leaf


# torch.tensor(..., device=...) goes past every mode.
@torch.library.impl("aten::empty_strided", "PrivateUse1")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnCard(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(to, OnCard) and not isinstance(source, OnCard):
        StrictDevice.entered[-1].sends.append(to.numel())
    _held(to).copy_(_held(source))
    return to
