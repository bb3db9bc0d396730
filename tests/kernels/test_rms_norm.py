"""Norms in one launch: the kernel against its reference, and families' own code against both."""

import re
from typing import Any

import pytest
import torch
from marks import DEVICE, ON_DEVICE, needs_triton
from test_families import WORKING, config_of, tiny_model
from test_path_rows import config_named
from torch import Tensor, nn

from offload.kernels.rms_norm import FORMS, NormForm, rms_norm_kernel, rms_norm_reference
from offload.model.norms import find_norms, set_norm_kernel

TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
pytestmark = ON_DEVICE


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 100), (1, 3, 2, 24), (2, 1024)])
def test_the_kernel_is_its_reference(shape: tuple[int, ...], form: NormForm, dtype: torch.dtype) -> None:
    rows, weight_D = numbers(*shape, dtype=dtype), numbers(shape[-1], dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    for weight in (weight_D, None):
        got, wanted = (norm(rows, weight, 1e-5, form) for norm in (rms_norm_kernel, rms_norm_reference))
        assert got.dtype == dtype and got.shape == rows.shape
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


@needs_triton
def test_a_row_has_the_bits_that_it_has_alone() -> None:
    rows, weight_D = numbers(40, 200), numbers(200)
    together = rms_norm_kernel(rows, weight_D, 1e-6, FORMS[0])
    assert all(torch.equal(rms_norm_kernel(row[None], weight_D, 1e-6, FORMS[0])[0], together[index])
               for index, row in enumerate(rows))  # fmt: skip


@needs_triton
@pytest.mark.parametrize("rows", [numbers(6, 64)[:, 8:48], numbers(1, 7, 5).transpose(1, 2)], ids=["gaps", "across"])
def test_rows_with_gaps_and_across_are_taken(rows: Tensor) -> None:
    options = (rows, numbers(rows.shape[-1]), 1e-6, FORMS[0])
    torch.testing.assert_close(rms_norm_kernel(*options), rms_norm_reference(*options))


@needs_triton
@pytest.mark.parametrize("other", FORMS[1:], ids=str)
def test_another_form_would_show(other: NormForm) -> None:
    rows, weight_D = numbers(50, 64, dtype=torch.float16), numbers(64, dtype=torch.float16)
    wanted = rms_norm_reference(rows, weight_D, 1e-6, other)
    assert not torch.equal(rms_norm_kernel(rows, weight_D, 1e-6, FORMS[0]), wanted)


LAYER_NORMS = ("cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "gpt_neox", "jais2", "nemotron", "olmo",
               "phi", "persimmon", "phimoe", "stablelm", "starcoder2")  # fmt: skip


@pytest.mark.parametrize("family", WORKING)
def test_all_norms_of_a_family_are_known(family: str) -> None:
    """Those that divide by the root mean square, and no others: one takes a gate, another returns the inverse alone."""
    model = tiny_model(config_of(family))
    seen = {type(module) for module, _ in find_norms(model)}
    usual = re.compile("(?<!Weightless|Unweighted)(?<!Gated)(RMS|L2)Norm$")
    named = {type(module) for module in model.modules() if usual.search(type(module).__name__)}
    assert seen - {nn.RMSNorm} == named - {nn.RMSNorm} and bool(seen) is (family not in LAYER_NORMS)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.ones(32))

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * rows * torch.rsqrt(rows.abs().mean(-1, keepdim=True) + self.eps)


class Gated(Odd):
    def forward(self, rows: Tensor, gate: Any = None) -> Tensor:
        return rows * gate.sigmoid()


def test_what_computes_something_else_is_left_alone() -> None:
    usual: Any = type(find_norms(tiny_model(config_named("llama")))[0][0])

    class MayBeGated(usual):
        """A plain norm, unless it is given a gate."""

        def forward(self, rows: Tensor, gate: Any = None) -> Tensor:
            normed = super().forward(rows)
            return normed if gate is None else normed * gate

    assert find_norms(nn.Sequential(MayBeGated(32))) == [] and find_norms(nn.Sequential(usual(32)))
    by_head = usual(32)
    by_head.weight = nn.Parameter(torch.ones(4, 32))
    assert find_norms(nn.Sequential(Odd(), Gated(), by_head)) == []


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "llama4_text", "gemma3n_text"])
def test_a_model_computes_the_same_by_the_reference(family: str) -> None:
    model, calls = tiny_model(config_named(family)).bfloat16(), list[Any]()
    token_1T = torch.arange(9)[None]
    with torch.inference_mode():
        wanted = model(token_1T).logits
        set_norm_kernel(model, lambda *others: calls.append(others) or rms_norm_reference(*others))
        assert torch.equal(model(token_1T).logits, wanted)
    assert calls


def test_forms_are_found_without_weights_and_weights_of_another_type_keep_their_own_code() -> None:
    (module, _), *_ = find_norms(tiny_model(config_named("llama")))
    set_norm_kernel(module, lambda *_: pytest.fail("the kernel was asked"))
    rows = numbers(3, module.weight.shape[0]).cpu().bfloat16()
    assert module(rows).dtype == torch.float32
    # At load they are on the meta device.
    with torch.device("meta"):
        model = tiny_model(config_named("llama"))
    assert len(find_norms(model)) == 9
