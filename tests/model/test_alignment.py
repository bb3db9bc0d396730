"""What a product reads lies where a processor gives it the same bits as anywhere else, whatever brought it there.

MKL's product of one row of float32 adds up in another order where a matrix begins off its vectors' steps, so that an
expert that comes by itself would have other bits than the same one in its stack.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from plans import plan_memory
from rounding import Promise, assert_same_bits
from stored import Make, gguf, packed, plain, quantised
from test_device_experts import place_experts
from test_device_path import BUDGETS, TIERS, device, place_layers
from test_tiny import prompts
from tiny import LINE_BYTES, displaced
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import offload
from offload.checkpoint import layout
from offload.checkpoint.open import open_headers
from offload.memory.planner import least_budget

__all__ = ["device"]  # a fixture
_PRODUCTS = {functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}


class Addresses(TorchFunctionMode):
    """Where the float32 matrices lie that rows are multiplied with, behind the last line of a cache that begins."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            _, factor, *_ = (*args, *(kwargs or {}).values())
            if factor.ndim == 2 and factor.dtype == torch.float32:
                self.behind.append(factor.data_ptr() % LINE_BYTES)
        return func(*args, **(kwargs or {}))


LAYERS: dict[str, Make] = {
    "float32": plain(),
    "tied": plain("llama-tied"),
    "fused": plain("phi3"),
    "float16": plain(dtype=torch.float16),
    "packed": packed(),
    **{name: quantised(name, "qwen2") for name in ("gptq", "nf4")},
    **{kind: gguf(kind) for kind in ("Q4_K", "F16")},
}
EXPERTS: dict[str, Make] = {
    "float32": plain("qwen3-moe"),
    "transposed": plain("gpt_oss"),
    "fp8": quantised("fp8-block", "qwen3_moe"),
    "mxfp4": quantised("mxfp4", "gpt_oss"),
}


def addresses(model: Path, **settings: Any) -> list[int]:
    """Return the addresses of what a run of plain steps and one of trees multiply with."""
    watched = Addresses()
    settings = {"dtype": "float32", "context": 128, "tree": "8x3", "threads": 1, "invariant": False} | settings
    with offload.load(model, model, **settings) as decoder, watched:
        for tree in ("none", "8x3"):
            decoder.generate(prompts()[1], max_new_tokens=4, tree=tree)
    assert len(watched.behind) > 100, "its products were seen"
    return watched.behind


def of_format(formats: dict[str, Make], name: str, tmp_path: Path) -> Path:
    model = formats[name](tmp_path / "model")
    return model if model.is_file() else displaced(model, 56)


@pytest.mark.parametrize("format", LAYERS)
def test_layers_in_host_memory(format: str, tmp_path: Path) -> None:
    model = of_format(LAYERS, format, tmp_path)
    plan = partial(plan_memory, (open_headers(model), open_headers(model)), dtype="float32", context=128, num_nodes=9)
    for ram in ("2GiB", least_budget(lambda size: plan(ram=size))):
        assert {*addresses(model, ram=ram)} == {0}


@pytest.mark.parametrize("format", LAYERS)
def test_layers_on_a_device(format: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_format(LAYERS, format, tmp_path)
    place_layers(monkeypatch, *TIERS["all three"])
    assert {*addresses(model, **BUDGETS)} == {0}


@pytest.mark.parametrize("format", EXPERTS)
def test_experts_in_host_memory(format: str, tmp_path: Path) -> None:
    model = of_format(EXPERTS, format, tmp_path)
    for experts in ("demand", "layers"):
        assert {*addresses(model, ram="2GiB", experts=experts)} == {0}


@pytest.mark.parametrize("format", EXPERTS)
def test_experts_on_a_device(format: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_experts(monkeypatch, 9, 5, "PINNED", "DISK", "RESIDENT")
    assert {*addresses(of_format(EXPERTS, format, tmp_path), experts="demand", **BUDGETS)} == {0}


@pytest.mark.parametrize("experts", ["demand", "layers"])
def test_matrices_that_lie_as_in_their_file_are_found(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: so they would lie if only their type decided."""
    monkeypatch.setattr(layout, "_MATRIX_ALIGN_BYTES", 4)
    assert 56 in addresses(of_format(EXPERTS, "float32", tmp_path), ram="2GiB", experts=experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
def test_in_16_bits_a_product_is_the_same_anywhere(dtype: torch.dtype, num_rows: int) -> None:
    """So files of these are read straight into place, wherever their matrices begin."""
    rows, weight = torch.randn(num_rows, 96).to(dtype), torch.randn(80, 96).to(dtype)
    wanted, room = functional.linear(rows, weight), torch.empty(weight.numel() + 64, dtype=dtype)
    for first in range(64):
        moved = room[first : first + weight.numel()].view_as(weight).copy_(weight)
        assert_same_bits(functional.linear(rows, moved), wanted, Promise.SAME_PRODUCTS, first)
