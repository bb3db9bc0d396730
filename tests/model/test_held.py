"""Matrices at 4 and 8 bits: how near they are to what they were, both ways to multiply with them, and what stays."""

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from offload.checkpoint.held import is_held
from offload.encoding.residuals import group_of, held_bytes
from offload.kernels.int4_products import instructions
from offload.model import quantised_draft
from offload.model.linear import Linear
from offload.model.quantised_draft import HeldWeights, Int8, matrix_of
from offload.model.thread_team import compute

SHAPES = ((64, 128), (70, 96), (5, 50), (192, 512))


def weights(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)


def numbers_of(matrix, dtype: torch.dtype) -> torch.Tensor:
    eye_KK = torch.eye(matrix.shape[1], dtype=dtype)
    return matrix.expanded(eye_KK, lambda count: torch.empty(count, dtype=dtype)).t()


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.always)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_number_is_farther_than_half_a_step_and_both_ways_to_multiply_agree(
    shape: tuple[int, int], bits: int
) -> None:
    weight_NK, row_MK = weights(shape), torch.randn(3, shape[1])
    matrix = matrix_of(weight_NK, bits)
    assert matrix.num_bytes == held_bytes(shape, bits, 4)
    error_NK = (numbers_of(matrix, torch.float32) - weight_NK).abs()
    if isinstance(matrix, Int8):
        step_N1 = weight_NK.abs().amax(1, keepdim=True) / 127
        assert (error_NK <= 0.5001 * step_N1).all()
    else:
        grouped = weight_NK.view(shape[0], -1, group_of(shape[1]))
        step_NG1 = (grouped.amax(2, keepdim=True) - grouped.amin(2, keepdim=True)) / 15
        assert (error_NK.view_as(grouped) <= 0.5001 * step_NG1).all()
        assert error_NK.mean() > 0.1 * step_NG1.mean(), "as near as that it has not been rounded"
    if not matrix.has_product:
        pytest.skip("this torch has no such product")
    product_MN, wanted_MN = matrix.product(row_MK), matrix.expanded(row_MK, torch.empty)
    # our own product rounds rows to 8 bits
    least = 0.02 if bits == 4 else 1e-5
    assert (product_MN - wanted_MN).norm() < least * wanted_MN.norm()


def test_a_group_of_equal_numbers_and_a_row_of_zeros_stay_what_they_are() -> None:
    for bits in (4, 8):
        for weight_NK in (torch.zeros(64, 64), torch.full((64, 64), 0.25)):
            numbers = numbers_of(matrix_of(weight_NK, bits), torch.float32)
            torch.testing.assert_close(numbers, weight_NK, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_linear_that_is_taken_over_computes_the_same_for_any_number_of_rows(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # or some are expanded, which rounds no rows
    monkeypatch.setattr(HeldWeights, "_rows_without_scratch", lambda *_: 128)
    linear, held = Linear(nn.Linear(128, 70)), HeldWeights(bits)
    row = torch.randn(1, 90, 128)
    before = linear(row)
    held.take(linear)
    held.settle()
    assert linear.weight.is_meta, "it still has its weight"
    after, one_by_one = linear(row), torch.cat([linear(row[:, at : at + 1]) for at in range(90)], 1)
    assert after.shape == before.shape
    torch.testing.assert_close(one_by_one, after, rtol=1e-3, atol=1e-3)
    error = (after - before).abs().mean() / before.abs().mean()
    assert 1e-4 < error < (0.15 if bits == 4 else 0.02)


@pytest.mark.parametrize(
    ("row_s", "most"),
    [(0.1, 1 << 30), (0.25, 128), (0.6, 16), (2.0, 4), (20.0, 0)],
    ids=["faster than a normal product", "slower", "from 32 rows", "from 8 rows", "slower with one"],
)
def test_matrices_are_expanded_from_where_that_is_faster(
    row_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanding takes 8 s here, and a row 0.2 s behind it."""
    held = HeldWeights(4)
    matrix = matrix_of(weights((64, 128)), 4)

    def seconds(work: Any) -> float:
        num_rows = len((work.args or work.func.args)[0])
        is_expanded = getattr(work.func, "func", work.func) == matrix.expanded
        return 8 + 0.2 * num_rows if is_expanded else row_s * num_rows

    monkeypatch.setattr(quantised_draft, "timed", seconds)
    assert held._rows_without_scratch(matrix) == most


def test_runs_that_a_busy_machine_cuts_into_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first four runs of a product take ten times as long as the later ones."""
    held = HeldWeights(4)
    matrix = matrix_of(weights((64, 128)), 4)
    num_runs = Counter[Any]()

    def seconds(work: Any) -> float:
        if getattr(work.func, "func", work.func) == matrix.expanded:
            return 1.0
        num_runs[work] += 1
        return 5.0 if num_runs[work] <= 4 else 0.5

    monkeypatch.setattr(quantised_draft, "timed", seconds)
    assert held._rows_without_scratch(matrix) == 128


@pytest.mark.skipif(instructions() is None, reason="this processor has no such product")
def test_a_product_of_many_rows_is_made_in_parts_with_the_same_bits() -> None:
    matrix = matrix_of(weights((70, 128)), 4)
    row_MK = torch.randn(700, 128)
    whole_MN = matrix.product(row_MK)
    assert whole_MN.shape == (700, 70)
    assert torch.equal(whole_MN, torch.cat([matrix.product(rows) for rows in row_MK.split(90)]))


class Counted:
    """Linears with 4-bit copies, and how many parallel products they took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...]) -> None:
        self.num_products = 0
        self.held = HeldWeights(4)
        self.linears = [Linear(nn.Linear(128, width)) for width in widths]
        for linear in self.linears:
            self.held.take(linear)
        monkeypatch.setattr(HeldWeights, "_rows_without_scratch", lambda *_: 16)
        self.held.settle()
        monkeypatch.setattr(quantised_draft, "compute_with_torch", self._compute)

    def _compute(self, work: Any) -> torch.Tensor:
        self.num_products += 1
        return compute(work)

    def products(self, rows: torch.Tensor, numbers: tuple[int, ...]) -> int:
        """Multiply by these one after the other; return in how many products, which have the right bits."""
        linears: list[Any] = [self.linears[number] for number in numbers]
        row_MK = rows.reshape(-1, 128)
        wanted = [linear.stored.matrix.product(row_MK) + linear.bias for linear in linears]
        before = self.num_products
        for linear, wanted_MN in zip(linears, wanted, strict=True):
            assert torch.equal(linear(rows).reshape(wanted_MN.shape), wanted_MN)
        return self.num_products - before


@pytest.mark.skipif(instructions() is None, reason="this processor has no such product")
def test_matrices_that_multiply_the_same_rows_do_so_at_once_from_the_second_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Counted(monkeypatch, (64, 70, 192))
    assert model.products(torch.randn(1, 3, 128), (0, 1, 2)) == 3
    for num_rows in (1, 4, 16):
        assert model.products(torch.randn(1, num_rows, 128), (0, 1, 2)) == 1
    # others see different rows, if equal ones
    rows = torch.randn(1, 2, 128)
    model.products(rows, (0,))
    assert model.products(rows.clone(), (1,)) == 1
    # what was not asked for with the first one is no longer made with it, until it is again
    assert model.products(torch.randn(1, 2, 128), (0, 1, 2)) == 3
    assert model.products(torch.randn(1, 2, 128), (0, 1, 2)) == 1


@pytest.mark.skipif(instructions() is None, reason="this processor has no such product")
def test_rows_that_changed_in_place_are_multiplied_anew_by_the_first_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counted(monkeypatch, (64, 70))
    rows = torch.randn(1, 2, 128)
    model.products(rows, (0, 1))
    for _ in range(2):
        assert model.products(rows.normal_(), (0, 1)) == 1
    model.products(rows.normal_(), (0,))
    assert model.products(rows.normal_(), (0, 1)) == 2


@pytest.mark.skipif(instructions() is None, reason="this processor has no such product")
def test_a_pass_that_is_interrupted_while_siblings_are_learned_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counted(monkeypatch, (64, 70))
    make = quantised_draft.Int4RowsProduct
    for num_made in range(4):
        left = iter(range(num_made))

        def interrupted(*args: Any, left: Any = left) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return make(*args)

        monkeypatch.setattr(quantised_draft, "Int4RowsProduct", interrupted)
        with suppress(KeyboardInterrupt):
            for linear in model.linears:
                linear(rows := torch.randn(1, 2, 128))
                linear(rows)
            rows = torch.randn(1, 2, 128)
            for linear in model.linears:
                linear(rows)
        monkeypatch.setattr(quantised_draft, "Int4RowsProduct", make)
        model.products(torch.randn(1, 3, 128), (1, 0))
        model.products(torch.randn(1, 3, 128), (0, 1))
    assert model.products(torch.randn(1, 3, 128), (0, 1)) == 1


def test_widths_that_the_library_does_not_take_whole_are_expanded() -> None:
    assert matrix_of(weights((8, 48)), 8).has_product
    odd = matrix_of(weights((8, 40)), 8)
    assert not odd.has_product
    torch.testing.assert_close(numbers_of(odd, torch.float32), weights((8, 40)), rtol=0.0, atol=0.02)


def test_names_tell_what_is_held() -> None:
    assert is_held("model.layers.0.mlp.gate_proj.weight", (8, 8)) and is_held("self_attn.q_proj.weight", (8, 8))
    for name in ("model.layers.0.mlp.gate.weight", "mlp.experts.3.up_proj.weight", "q_proj.bias"):
        assert not is_held(name, (8, 8))
    assert not is_held("input_layernorm.weight", (8,))
