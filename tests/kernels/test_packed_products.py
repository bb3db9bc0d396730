"""Products with packed weights against float32 ones, and the trial that says whether they are used here."""

import pytest
import torch
from torch import Tensor

from offload.calibration import int4_choice
from offload.calibration.int4_choice import NUM_ROWS, int4_rows, int8_rows
from offload.kernels import int4_product
from offload.kernels.int4_product import int4_linear, int4_linear_reference, pack_int4
from offload.kernels.int8_product import Int8Weight, int8_linear, int8_linear_reference

HAS_INT4 = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
needs_int4 = pytest.mark.skipif(not HAS_INT4, reason="this torch has no such product")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def coded(num_out: int, num_in: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(num_out)
    code_NK = torch.randint(0, 16, (num_out, num_in), generator=random, dtype=torch.uint8)
    scale_NG = torch.rand(num_out, num_in // group, generator=random) + 0.1
    return code_NK, scale_NG, torch.randint(0, 16, scale_NG.shape, generator=random, dtype=torch.uint8)


def are_close(got: Tensor, wanted: Tensor) -> bool:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    difference = (got.float() - wanted.float()).abs().max()
    return bool(difference <= TOLERANCE[got.dtype] * wanted.float().abs().max())


@needs_int4
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_out", "num_in", "group"), [(16, 64, 32), (100, 128, 64), (70, 256, 128), (1, 256, 256)])
def test_int4_products_are_those_of_the_reference(num_out: int, num_in: int, group: int, dtype: torch.dtype) -> None:
    code_NK, scale_NG, zero_NG = coded(num_out, num_in, group)
    bias = torch.randn(num_out).to(dtype)
    for zero in (None, zero_NG):
        packed = pack_int4(code_NK, scale_NG, zero, dtype)
        for shape in ((num_in,), (1, num_in), (2, 17, num_in)):
            x = torch.randn(shape).to(dtype)
            wanted = int4_linear_reference(x, code_NK, scale_NG, zero, bias)
            assert are_close(int4_linear(x, packed, bias), wanted)
    wrong = int4_linear_reference(x, code_NK.flip(1), scale_NG, zero_NG, bias)
    assert not are_close(int4_linear(x, packed, bias), wrong)


@needs_int4
def test_packing_some_rows_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = coded(200, 64, 32)
    whole = pack_int4(*parts, torch.bfloat16)
    monkeypatch.setattr(int4_product, "_PACKED_ROWS", 64)
    assert torch.equal(whole.packed_NB, pack_int4(*parts, torch.bfloat16).packed_NB)
    assert whole.num_bytes == 208 * 32 + 2 * 208 * 2 * 2


@pytest.mark.parametrize(("num_in", "num_groups"), [(48, 3), (100, 3), (512, 1)])
def test_groups_that_torch_does_not_know_are_refused(num_in: int, num_groups: int) -> None:
    code_NK, scale_NG = torch.zeros(16, num_in, dtype=torch.uint8), torch.ones(16, num_groups)
    with pytest.raises(ValueError, match=f"must have 32, 64, 128, 256 columns, got {num_in} columns in {num_groups} "):
        pack_int4(code_NK, scale_NG, None, torch.bfloat16)


@pytest.mark.parametrize("num_few", [0, 4, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_int8_products_are_those_of_the_reference(dtype: torch.dtype, num_few: int) -> None:
    code_NK = torch.randint(-128, 128, (300, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    weight = Int8Weight(code_NK, (torch.rand(300) + 0.1).to(dtype))
    bias = torch.randn(300).to(dtype)
    for shape in ((64,), (2, 3, 64), (17, 64)):
        x = torch.randn(shape).to(dtype)
        assert are_close(int8_linear(x, weight, bias, num_few=num_few), int8_linear_reference(x, weight, bias))


class Clock:
    """A timer by which the packed product wins up to some number of rows; it is asked about both sides in turn."""

    def __init__(self, num_won: int) -> None:
        self.num_won, self.num_asked = num_won, 0

    def __call__(self, work: object) -> float:
        index, is_rival = divmod(self.num_asked, 2)
        self.num_asked += 1
        return 1.0 if is_rival or NUM_ROWS[index] > self.num_won else 0.5


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_choice, "_NUM_OUT", 64)
    monkeypatch.setattr(int4_choice, "_NUM_IN", 256)


@needs_int4
@pytest.mark.parametrize("num_won", [0, 4, 32])
def test_rows_are_those_that_won(num_won: int, small: None) -> None:
    assert int4_rows(torch.bfloat16, timer=Clock(num_won)) == num_won
    assert int8_rows(torch.bfloat16, timer=Clock(num_won)) == num_won


def test_a_wrong_product_is_not_used(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setattr(int4_choice, "int4_linear", lambda x, packed: int4_linear(x, packed) * 1.5)
    assert int4_rows(torch.bfloat16, timer=Clock(32)) == 0


def test_a_missing_product_is_not_used(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("Could not run 'aten::_convert_weight_to_int4pack_for_cpu'")

    monkeypatch.setattr(int4_choice, "pack_int4", refuse)
    assert int4_rows(torch.bfloat16, timer=Clock(32)) == 0
