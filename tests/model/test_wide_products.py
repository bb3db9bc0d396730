"""Products of 16-bit numbers made in float32, as on a processor that has no instructions for them: tried on any."""

from collections.abc import Iterator

import pytest
import torch
from rounding import Promise, assert_same_bits
from torch import Tensor
from torch.nn import functional

from offload.model import wide_products
from offload.model.invariant import BatchInvariantProducts
from offload.model.wide_products import WideProducts, attend, linear, product_for

CHANCE = torch.Generator().manual_seed(3)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=CHANCE).to(dtype)


@pytest.fixture(autouse=True, params=["as it widens", "block by block"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "block by block":
        monkeypatch.setattr(wide_products, "can_multiply", lambda weight_NK: False)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor that has no products of 16 bits."""
    monkeypatch.setattr(wide_products, "lacks_products", lambda dtype: dtype in (torch.bfloat16, torch.float16))
    monkeypatch.setattr(wide_products, "emulates_bfloat16", lambda: False)
    yield


@pytest.mark.parametrize("is_emulated", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_only_small_products_are_left_to_a_library_that_emulates(
    num_rows: int, is_emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a lone row is, whatever the size of its weight."""
    widened: list[int] = []
    monkeypatch.setattr(wide_products, "emulates_bfloat16", lambda: is_emulated)
    monkeypatch.setattr(wide_products, "product_for", lambda *_: lambda rows, *_: widened.append(len(rows)))
    rows, weight = numbers(num_rows, 96), numbers(64, 96)
    for least in (num_rows * 64 * 96 + 1, num_rows * 64 * 96):
        monkeypatch.setattr(wide_products, "_LEAST_WIDENED", least)
        WideProducts().linear(rows, weight)
    is_lone = num_rows == 1
    assert widened == ([num_rows] if is_emulated else [] if is_lone else [num_rows] * 2)


def exact(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3, 40, 70), (1, 1, 96, 8), (2, 300, 5, 64), (1, 20, 1700, 900)])
def test_a_wide_product_is_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *_, num_columns, width = shape
    shapes = ((*shape[:2], width), (num_columns, width), (num_columns,))
    rows, weight, bias = (numbers(*shape, dtype=dtype) for shape in shapes)
    for extra in ((), (bias,)):
        wanted = exact(rows, weight, *extra)
        error = (linear(rows, weight, *extra).double() - wanted).abs()
        assert (error <= torch.finfo(dtype).eps / 2 * wanted.abs() + 1e-4).all()


def test_rows_that_lie_otherwise_and_no_rows_at_all() -> None:
    rows, weight, bias = numbers(96, 5), numbers(64, 96), numbers(128)[::2]
    wanted = linear(rows.t().contiguous(), weight, bias.contiguous())
    for turned in (rows.t(), rows.t().expand(2, -1, -1)[1], torch.cat([rows, rows]).t()[:, :96]):
        assert_same_bits(linear(turned, weight, bias), wanted, Promise.SAME_PRODUCTS)
    assert linear(rows.t()[:0], weight, bias).shape == (0, 64)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(numbers(5, 80), weight)


@pytest.mark.usefixtures("narrow")
def test_all_products_of_a_model_are_wide_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, stack = numbers(1, 5, 64), numbers(96, 64), numbers(3, 64, 8)
    wanted = [linear(rows, weight), (rows.float() @ stack.float()).bfloat16()]
    states = [numbers(1, 2, 5, 32) for _ in range(3)]
    wanted.append(functional.scaled_dot_product_attention(*(tensor.float() for tensor in states)).bfloat16())
    products = WideProducts()
    got = [products.linear(rows, weight), products.multiply(torch.matmul, rows, stack), attend(*states)]
    assert all(torch.equal(*both) for both in zip(got, wanted, strict=True))
    # planted mistake: the library's own, which add up in another way or are rounded in between
    monkeypatch.setattr(wide_products, "lacks_products", lambda dtype: False)
    assert product_for(functional.linear, rows) is functional.linear


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("num_rows", [1, 4, 5, 70])
def test_rows_of_wide_products_have_the_same_bits(num_rows: int) -> None:
    rows, weight, factor = numbers(1, 300, 96), numbers(200, 96), numbers(96, 72)
    invariant = BatchInvariantProducts([1])
    whole, some = (
        (invariant.linear(part, weight), invariant.multiply(torch.matmul, part, factor))
        for part in (rows, rows[:, :num_rows])
    )
    if invariant.num_refused:
        pytest.skip("this processor: float32 has other bits for each number of rows")
    assert all(torch.equal(left[:, :num_rows], other) for left, other in zip(whole, some, strict=True))
    assert torch.allclose(whole[0].double(), exact(rows, weight), rtol=torch.finfo(torch.bfloat16).eps, atol=1e-3)


def test_rows_of_another_type_are_not_read_as_the_weights() -> None:
    """Bits of one type mean other numbers in the other."""
    rows, weight = numbers(3, 64, dtype=torch.float16), numbers(40, 64)
    tensor = linear(rows, weight)
    assert tensor.dtype == torch.float16
    torch.testing.assert_close(tensor.double(), exact(rows, weight), atol=2e-2, rtol=1e-2)
    assert not wide_products.is_widened(rows, weight)
