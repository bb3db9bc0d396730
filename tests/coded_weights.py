"""One coded weight, from its tensors to numbers, the way a checkpoint's go: recognised, prepared, expanded."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from marks import needs_triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.checkpoint.tensors import FORMATS
from offload.encoding.base import RecognisedWeight
from offload.kernels.compiled import share_rows
from offload.kernels.expansion import COMPILED, EXPANSION_KERNELS, REFERENCE, Expansion

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXPANSIONS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(COMPILED, id="compiled"),
    pytest.param(EXPANSION_KERNELS, id="kernels", marks=needs_triton),
]
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
          torch.int8: "I8", torch.uint8: "U8", torch.uint32: "U32", torch.float8_e4m3fn: "F8_E4M3",
          torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"}  # fmt: skip
_BITS = {2: torch.int16, 4: torch.int32}


class OfHeader(NamedTuple):
    """What a file's header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def recognise(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> RecognisedWeight:
    """By the first format that knows the tensors, by suffix."""
    headers = {suffix: OfHeader(_NAMES[tensor.dtype], tuple(tensor.shape)) for suffix, tensor in tensors.items()}
    for known_format in FORMATS:
        recognised = known_format.recognise(
            {key: header for key, header in headers.items() if key in known_format.suffixes}, settings
        )
        if recognised is not None:
            return recognised
    raise AssertionError(f"no format knows {sorted(tensors)}")


def expanded(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    expansion: Expansion = REFERENCE,
) -> Tensor:
    """The weight, after what is said of its bytes was compared with what they are."""
    recognised = recognise(tensors, settings)
    (words,) = recognised.words
    stored_B = tensors[words].contiguous().flatten().view(torch.uint8)
    assert len(stored_B) == recognised.coding.stored_bytes(shape)
    ready = recognised.coding.prepare({suffix: tensors[suffix] for suffix in recognised.companions}, shape)
    held = sum(tensor.numel() * tensor.element_size() for tensor in ready.values())
    assert held == recognised.coding.companion_bytes(shape)
    around = torch.full((shape[0] + 2, *shape[1:]), 7.0, dtype=dtype)
    recognised.coding.expand(stored_B, ready, around[1:-1], expansion)
    assert bool((around[0] == 7).all() and (around[-1] == 7).all()), "written beside its place"
    return around[1:-1]


def are_equal(got: Tensor, wanted: Tensor) -> bool:
    """To the bit, signs of zeros included."""
    bits = _BITS[got.element_size()]
    return got.dtype == wanted.dtype and torch.equal(got.contiguous().view(bits), wanted.contiguous().view(bits))


class _Views(TorchDispatchMode):
    """Refuses operators that make numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(operand.alias_info is not None for operand in func._schema.returns)
        assert is_view or func.name().startswith("aten::empty"), f"{func} where threads share rows"
        return func(*args, **(kwargs or {}))


def forbid_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads that share rows: for 32,768 numbers torch would start threads of its own, from each of ours."""

    def share(work: Callable[[int, int], object], num_rows: int) -> None:
        def watched(lo: int, hi: int) -> None:
            with _Views():
                work(lo, hi)

        share_rows(watched, num_rows)

    for name, module in list(sys.modules.items()):
        if name.startswith("offload.kernels.expand_") and hasattr(module, "share_rows"):
            monkeypatch.setattr(module, "share_rows", share)


def can_round(expansion: Expansion, dtype: torch.dtype) -> bool:
    """Triton's interpreter cuts what it stores as bfloat16."""
    return expansion is not EXPANSION_KERNELS or dtype != torch.bfloat16
