"""Numbers of rows that give the same bits: products that are added up in two orders are found out; rows in parts."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, Phi3Config

from offload.memory.sizes import INNER_ROWS
from offload.model.invariant import BatchInvariantProducts
from offload.model.linear import Linear, choose_products, replace_linears, take_rows_in_parts
from offload.model.row_sizes import LADDER, find_sizes, parts_of

Multiply = Callable[[Tensor, Tensor], Tensor]


def exact(rows: Tensor, factor: Tensor) -> Tensor:
    """Sum in one order for any rows on any processor: one sum after the other."""
    total = rows.new_zeros(len(rows), len(factor), dtype=torch.float32)
    for index in range(rows.shape[1]):
        total += rows[:, index, None].float() * factor[:, index].float()
    return total.to(rows.dtype)


def in_halves(rows: Tensor, factor: Tensor) -> Tensor:
    middle = factor.shape[1] // 2
    parts = [exact(rows[:, part], factor[:, part]).float() for part in (slice(middle), slice(middle, None))]
    return (parts[0] + parts[1]).to(rows.dtype)


def mixed(wants_halves: Callable[[int], bool]) -> Multiply:
    return lambda rows, factor: (in_halves if wants_halves(len(rows)) else exact)(rows, factor)


def sizes_of(multiply: Multiply, dtype: torch.dtype = torch.float32, counts: tuple[int, ...] = (1,)) -> tuple[int, ...]:
    return find_sizes(multiply, torch.empty(24, 70, dtype=dtype), counts, is_transposed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [8, 48])
def test_few_rows_that_differ_are_not_used(least: int, dtype: torch.dtype) -> None:
    sizes = sizes_of(mixed(lambda num_rows: num_rows < least), dtype)
    assert sizes == tuple(size for size in LADDER if size >= least)


def test_the_cheaper_of_two_orders_is_used() -> None:
    assert sizes_of(mixed(lambda num_rows: num_rows in (4, 256))) == LADDER[1:-1]
    assert sizes_of(mixed(lambda num_rows: num_rows >= 48)) == LADDER[4:]


def by_place(rows: Tensor, factor: Tensor) -> Tensor:
    out = exact(rows, factor)
    out[1::2] = in_halves(rows, factor)[1::2]
    return out


def by_threads(rows: Tensor, factor: Tensor) -> Tensor:
    return (exact if torch.get_num_threads() == 1 else in_halves)(rows, factor)


def test_what_no_number_of_rows_mends_is_refused() -> None:
    assert sizes_of(by_place) == ()
    assert sizes_of(by_threads) == LADDER
    assert sizes_of(by_threads, counts=(1, 2)) == ()
    assert torch.get_num_threads() == 1


def test_a_factor_is_tried_as_it_lies_and_a_large_one_itself() -> None:
    """Products by a transposed weight, by a stack of them and one of it alone, and by columns that lie apart."""
    seen = []

    def noting(rows: Tensor, factor: Tensor) -> Tensor:
        seen.append((tuple(factor.shape), factor.stride()[-2:], rows.shape[:-2]))
        return torch.matmul(rows, factor)

    weight = torch.empty(24, 70)
    for factor in (weight.T, weight[:, ::2].T, weight.expand(5, -1, -1)):
        find_sizes(noting, factor, (1,), is_transposed=False)
    stacks = {((num, 24, 70), (70, 1), (num,)) for num in (1, 5)}
    assert set(seen) == {((70, 24), (1, 70), ()), ((35, 24), (2, 70), ()), *stacks}
    # Large factors are tried themselves.
    weight = torch.randn(70_000, 64)
    factors = set[int]()

    def noting(rows: Tensor, factor: Tensor) -> Tensor:
        factors.add(factor.data_ptr())
        assert len(rows) * len(factor) * 4 <= 20 << 20
        return functional.linear(rows, factor)

    find_sizes(noting, weight, (1,), is_transposed=True)
    assert factors == {weight.data_ptr()}


@pytest.mark.parametrize(
    ("num_rows", "sizes", "parts"),
    [(1, (4, 256), [4]), (5, (4, 256), [4, 4]), (0, (4,), []), (300, (48, 256), [256, 48]), (64, (32, 192), [32, 32]),
     (100, (16, 32, 48, 64, 128), [128]), (70, (32, 128), [128]), (513, (256,), [256, 256, 256])],
)  # fmt: skip
def test_parts(num_rows: int, sizes: tuple[int, ...], parts: list[int]) -> None:
    assert parts_of(num_rows, sizes) == parts


_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
DENSE = [LlamaConfig, Phi3Config]


def rows_seen(inner: nn.Module) -> list[int]:
    seen = list[int]()
    inner.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))
    return seen


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_in_parts_have_the_bits_of_all_rows_at_once(kind: Any, dtype: torch.dtype) -> None:
    model = tiny.build(kind(**_SIZES)).to(dtype)
    replace_linears(model)
    inner = model.model.layers[0].mlp
    rows_1TD = torch.randn(1, 3 * INNER_ROWS + 17, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    products = BatchInvariantProducts([torch.get_num_threads()])
    choose_products(model, products)
    with products.during(rows_1TD.shape[1]):
        wanted = inner(rows_1TD)
        take_rows_in_parts(model.model.layers)
        in_parts, seen = model.model.layers[0].mlp, rows_seen(inner)
        assert torch.equal(in_parts(rows_1TD), wanted)
        assert max(seen) <= INNER_ROWS < sum(seen) == rows_1TD.shape[1]
        seen.clear()
        assert torch.equal(in_parts(rows_1TD[:, :9]), wanted[:, :9]) and seen == [9], "few rows are one part"


def test_a_feed_forward_that_is_given_more_than_rows_is_left_alone() -> None:
    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.down_proj = Linear(nn.Linear(4, 8)), Linear(nn.Linear(8, 4))

        def forward(self, rows: torch.Tensor, guide: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.gate_proj(rows) * guide)

    layer = nn.Module()
    layer.mlp = Guided()
    take_rows_in_parts([layer])
    assert isinstance(layer.mlp, Guided)
