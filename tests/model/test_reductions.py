"""Sums of rows as a GPU adds them up: in an order that depends on how many rows there are.

ATen shares a sum among threads by its number of outputs (Reduce.cuh: `vectorize_input`, `set_block_dimension`): a lone
row of 2,048 numbers gets 512 of them, each of sixteen gets 32. Here a card that is not there adds up in that order.
"""

from typing import Any

import pytest
import torch
from strict_place import OnCard, StrictDevice, place
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from offload.calibration.invariance import _NUM_ROWS as MOST
from offload.calibration.invariance import _ByFewerRows, _DifferError
from offload.model import invariant as invariance
from offload.model.invariant import BatchInvariantProducts
from offload.model.linear import ByRow

VECTOR, MOST_THREADS, WARP = 4, 512, 32  # numbers that a thread loads at once; threads of a block; of a warp
MANY = 80  # rows


def power_of_two_up_to(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def threads_of_a_row(width: int, num_rows: int) -> int:
    """All of a block where a sum is long for few threads; otherwise what other rows leave."""
    across = min(power_of_two_up_to(width // VECTOR), MOST_THREADS)
    down = min(power_of_two_up_to(num_rows), MOST_THREADS)
    across_first = min(across, WARP)
    down = min(down, MOST_THREADS // across_first)
    across = min(across, MOST_THREADS // down)
    has_long_sums = width // across >= min(16 * down, 256)
    return across * down if has_long_sums else across


def summed_as_on_a_gpu(rows_RD: Tensor) -> Tensor:
    """(R,): each thread adds up every so manieth vector, then its four numbers, then threads meet two by two."""
    num_rows, width = rows_RD.shape
    num_threads = threads_of_a_row(width, num_rows)
    vector_RSTV = rows_RD.reshape(num_rows, -1, num_threads, VECTOR)
    total_RTV = torch.zeros(num_rows, num_threads, VECTOR)
    for step in range(vector_RSTV.shape[1]):
        total_RTV = total_RTV + vector_RSTV[:, step]
    total_RT = total_RTV[..., 0]
    for index in range(1, VECTOR):
        total_RT = total_RT + total_RTV[..., index]
    while total_RT.shape[1] > 1:
        half = total_RT.shape[1] // 2
        total_RT = total_RT[:, :half] + total_RT[:, half:]
    return total_RT[:, 0]


class Reducing(StrictDevice):
    """Means of rows are added up like that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name == "aten::mean" and isinstance(args[0], OnCard):
            rows = args[0].held
            mean_R = summed_as_on_a_gpu(rows.reshape(-1, rows.shape[-1])) / rows.shape[-1]
            out.held.copy_(mean_R.reshape(out.shape))
        return out


def norm_of(kind: type[nn.Module], width: int) -> nn.Module:
    module = kind(width)
    weight_D = torch.randn(width, generator=torch.Generator().manual_seed(1)).to(place())
    module._parameters["weight"] = nn.Parameter(weight_D, requires_grad=False)
    return module


def rows_of(width: int) -> Tensor:
    return torch.randn(1, MANY, width, generator=torch.Generator().manual_seed(2)).to(place())


def differing(module: nn.Module, rows: Tensor) -> list[tuple[int, int]]:
    """Which rows have other bits in a pass of their own than among many."""
    many_ND = module(rows)[0].held
    results = []
    for few in (1, 2, 5, 8, 15, 16, 33):
        for lo in range(0, MANY, few):
            if not torch.equal(module(rows[:, lo : lo + few])[0].held, many_ND[lo : lo + few]):
                results.append((lo, few))
    return results


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("width", [2048, 4096, 6144])
def test_a_norm_has_the_same_bits_beside_any_rows(kind: type[nn.Module], width: int) -> None:
    with Reducing(), torch.inference_mode():
        module, rows = norm_of(kind, width), rows_of(width)
        assert differing(module, rows), "as it is, it has not"
        assert differing(by_row(module), rows) == []


def by_row(module: nn.Module) -> ByRow:
    wrapped = ByRow(module)
    wrapped.products = BatchInvariantProducts((1,))
    return wrapped


def test_the_check_at_load_looks_before_numbers_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 one normed row in two hundred would show it."""
    with Reducing(), torch.inference_mode():
        module, rows = norm_of(LlamaRMSNorm, 2048), rows_of(2048)[:, :MOST].bfloat16()
        with _ByFewerRows(MOST):
            by_row(module)(rows)
        with pytest.raises(_DifferError, match="beside other rows"), _ByFewerRows(MOST):
            module(rows)


def test_products_of_one_number_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles are such: there is no order in which a lone product could be added up."""
    monkeypatch.setattr(invariance, "find_sizes", lambda *_, **__: pytest.fail("a trial"))
    angle = torch.arange(64.0)[None, :, None]
    got = BatchInvariantProducts((1,)).multiply(torch.matmul, angle, torch.arange(300.0)[None, None, :])
    assert torch.equal(got, angle * torch.arange(300.0))
