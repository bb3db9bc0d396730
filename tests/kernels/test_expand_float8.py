"""Weights of 8-bit floating-point numbers: each form against a product in float32 that is rounded once, to the bit."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from offload.kernels import expand_float8
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expand_float8 import expand_float8_compiled, expand_float8_kernel, expand_float8_reference
from offload.kernels.jit import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # on a GPU they are tests of the GPU
KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMS = [
    expand_float8_reference,
    pytest.param(expand_float8_compiled, marks=pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")),
    pytest.param(expand_float8_kernel, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]
SHAPES = [  # rows, columns and a block: ragged both ways, a scale a row, one for all, odd rows, one number
    (130, 140, (128, 128)),
    (20, 256, (16, 64)),
    (18, 96, (1, 96)),
    (17, 64, (17, 64)),
    (5, 77, (2, 3)),
    (1, 1, (128, 128)),
]


def weights(num_rows: int, num_columns: int, kind: torch.dtype) -> Tensor:
    """Every code there is, if they fit."""
    random = torch.Generator().manual_seed(num_rows)
    code = torch.randint(0, 256, (num_rows, num_columns), generator=random).to(torch.uint8)
    code.view(-1)[:256] = torch.arange(min(256, code.numel())).to(torch.uint8)
    return code.view(kind)


def scales(num_rows: int, num_columns: int, block: tuple[int, int]) -> Tensor:
    """Return scales of many sizes, so that results overflow and underflow in half precision."""
    shape = (-(-num_rows // block[0]), -(-num_columns // block[1]))
    random = torch.Generator().manual_seed(num_columns)
    return torch.randn(shape, generator=random) * torch.logspace(-6, 3, shape[0] * shape[1]).view(shape)


def product(weight_NK: Tensor, scale_AB: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    scale_NK = scale_AB.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight_NK.float() * scale_NK[: weight_NK.shape[0], : weight_NK.shape[1]]).to(dtype)


def are_equal(got: Tensor, wanted: Tensor) -> bool:
    """To the bit, but for those of NaN."""
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    got, wanted = (one.masked_fill(one.isnan(), 7.0).view(bits) for one in (got, wanted))
    return torch.equal(got, wanted)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, in Triton's interpreter
def test_numbers_are_those_of_a_product_rounded_once(
    form: Callable[..., None], kind: torch.dtype, dtype: torch.dtype
) -> None:
    if form is expand_float8_kernel and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter cuts what it stores as bfloat16")
    where = "cpu" if form is expand_float8_compiled else DEVICE
    for num_rows, num_columns, block in SHAPES:
        weight_NK, scale_AB = weights(num_rows, num_columns, kind), scales(num_rows, num_columns, block)
        out_NK = torch.full((num_rows, num_columns), 7.0, dtype=dtype, device=where)
        form(weight_NK.to(where), scale_AB.to(where), block, out_NK)
        wanted_NK = product(weight_NK, scale_AB, block, dtype)
        assert are_equal(out_NK.cpu(), wanted_NK), (num_rows, num_columns, block)


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_threads_write_all_rows_and_no_other(threads: int) -> None:
    for num_rows in (1, 15, 16, 31, 47, 48, 100):
        weight_NK, scale_AB = weights(num_rows, 64, KINDS[0]), scales(num_rows, 64, (16, 16))
        around = torch.full((num_rows + 2, 64), 5.0, dtype=torch.bfloat16)
        expand_float8_compiled(weight_NK, scale_AB, (16, 16), around[1:-1])
        assert are_equal(around[1:-1], product(weight_NK, scale_AB, (16, 16), torch.bfloat16))
        assert bool((around[0] == 5).all() and (around[-1] == 5).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_reference_looks_up_pairs_that_are_not_aligned(dtype: torch.dtype) -> None:
    flat = weights(9, 64, KINDS[0]).view(torch.uint8).view(-1)[1:].view(KINDS[0])
    for lo in (0, 1):
        weight_NK, out_NK = flat[lo : lo + 512].view(8, 64), torch.empty(8, 64, dtype=dtype)
        expand_float8_reference(weight_NK, torch.ones(1, 1), (8, 64), out_NK)
        assert are_equal(out_NK, weight_NK.to(dtype))


def test_both_layouts_say_what_torch_does() -> None:
    for kind, layout in expand_float8._LAYOUTS.items():
        value_C = torch.arange(128).to(torch.uint8).view(kind).float()
        assert float(value_C[1]) == layout.unit
        assert bool(value_C[: layout.first_special].isfinite().all()) and not bool(
            value_C[layout.first_special].isfinite()
        )
