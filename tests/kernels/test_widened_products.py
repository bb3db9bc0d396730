"""Products that widen weights as they go: chains of fused operations, whatever rows and columns lie beside."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import Promise, assert_same_bits
from shell import run_python
from torch import Tensor

from offload.kernels import machine_code, widened_products
from offload.kernels.widened_products import can_multiply, product_of
from offload.model import wide_products

CHANCE = torch.Generator().manual_seed(7)
TYPES = (torch.bfloat16, torch.float16)
DEPTH = 768


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=CHANCE)


@pytest.fixture(autouse=True)
def _where_it_can() -> None:
    if not can_multiply(numbers(32, 16).bfloat16()):
        pytest.skip("this processor: no registers of eight float32 with fused products, or no llvmlite")


def chained(row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, depth: int = DEPTH) -> Tensor:
    """Add up as the kernel promises: a product is exact in float64, so each step rounds once."""
    sums = None if bias_N is None else np.broadcast_to(bias_N.numpy(), (len(row_TK), len(weight_NK)))
    for start in range(0, row_TK.shape[1], depth):
        places = torch.arange(start, min(start + depth, row_TK.shape[1]))
        for lane in range(8):
            chain = np.zeros((len(row_TK), len(weight_NK)), np.float32)
            for at in places[(places - start) % 16 // 2 == lane]:
                products = row_TK[:, at, None].double() * weight_NK[:, at].double()
                chain = (products.numpy() + chain).astype(np.float32)
            sums = chain if sums is None else sums + chain
    return torch.from_numpy(sums).to(weight_NK.dtype)


def multiplied(row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    product = product_of(row_TK.to(weight_NK.dtype), weight_NK, bias_N)
    room = torch.full((product.num_room + 1,), torch.nan)
    room[-1] = 1e30
    product.begin(1)
    product.take_parts(room)
    assert product.call[0] == product.num_parts + 1, "each part is taken once"
    assert room[-1] == 1e30, "no more room is taken than was asked for"
    return product.out


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "width"),
    [
        *[(1, 40, 64), (4, 32, 208), (7, 51, 400), (5, 96, 192), (1, 33, 200), (3, 7, 13), (1, 1, 1), (6, 40, 393)],
        # more than a depth: whole steps behind it, and not
        *[(1, 24, 816), (2, 17, 1552), (3, 18, 832), (4, 20, 781)],
    ],
)
def test_chains_are_added_as_promised(
    num_rows: int, num_columns: int, width: int, lanes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widened_products, "fused_lanes", lambda: lanes)
    row_TK = numbers(num_rows, width).to(dtype)
    weight_NK, bias_N = numbers(num_columns, width).to(dtype), numbers(num_columns)
    least = torch.tensor([6e-8, -6e-8, 0.0, -0.0]).to(dtype)  # the least float16 there are
    weight_NK.view(-1)[:4] = least[: weight_NK.numel()]
    for bias in (None, bias_N):
        wanted_TN = chained(row_TK, weight_NK, bias)
        assert_same_bits(multiplied(row_TK, weight_NK, bias), wanted_TN, Promise.SAME_PRODUCTS)


def test_chains_of_other_depths_have_other_bits() -> None:
    """Planted: what would be told apart above."""
    row_TK, weight_NK = numbers(4, 1600).bfloat16(), numbers(64, 1600)
    like_NK = torch.cat([weight_NK[:, :800], -weight_NK[:, :800].flip(1)], 1).bfloat16()
    row_TK[:, 800:] = row_TK[:, :800].flip(1)  # so that nothing but the rounding is left
    wanted_TN = chained(row_TK, like_NK, None)
    assert not torch.equal(wanted_TN, chained(row_TK, like_NK, None, DEPTH + 16))
    for num_rows in (4, 1):
        found_TN = multiplied(row_TK[:num_rows], like_NK)
        assert_same_bits(found_TN, wanted_TN[:num_rows], Promise.SAME_PRODUCTS)


def test_a_row_has_the_same_bits_alone_among_others_and_with_another_usual_type() -> None:
    row_TK, weight_NK = numbers(70, 1000).bfloat16(), numbers(300, 1000).bfloat16()
    whole_TN = multiplied(row_TK, weight_NK)
    for lo, hi in ((0, 1), (0, 2), (3, 6), (0, 69), (33, 38), (69, 70)):
        assert_same_bits(multiplied(row_TK[lo:hi], weight_NK), whole_TN[lo:hi], Promise.INVARIANT)
    # Another usual type of torch changes nothing.
    row_TK, weight_NK = numbers(3, 64), numbers(40, 64).bfloat16()
    wanted_TN = wide_products.linear(row_TK.bfloat16(), weight_NK)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found_TN = wide_products.linear(row_TK.bfloat16(), weight_NK)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(found_TN, wanted_TN, Promise.SAME_PRODUCTS)


def test_zeros_keep_their_sign_and_what_is_no_number_is_none() -> None:
    row_TK, weight_NK = torch.zeros(1, 32), -torch.ones(64, 32).bfloat16()
    assert not multiplied(row_TK, weight_NK).signbit().any(), "0.0 + -0.0 is 0.0"
    row_TK[0, 3] = torch.inf
    weight_NK[5, 3] = 0.0
    found_N = multiplied(row_TK, weight_NK)[0]
    assert found_N[5].isnan() and found_N.isneginf().sum() == 63


@pytest.mark.parametrize("num_rows", [1, 5, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_what_blocks_are_within_rounding(num_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row_TK, weight_NK = numbers(num_rows, 448).bfloat16(), numbers(512, 448).bfloat16()
    bias_N = numbers(512).bfloat16() if has_bias else None
    found_TN = wide_products.linear(row_TK, weight_NK, bias_N)
    monkeypatch.setattr(wide_products, "can_multiply", lambda weight_NK: False)
    blocks_TN = wide_products.linear(row_TK, weight_NK, bias_N)
    torch.testing.assert_close(found_TN, blocks_TN)


def test_what_it_cannot_do_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_multiply(numbers(64, 32))
    assert not can_multiply(numbers(64, 0).bfloat16())
    with monkeypatch.context() as patch:
        patch.setattr(widened_products, "fused_lanes", lambda: 0)
        assert not can_multiply(numbers(64, 32).bfloat16())

    def refuse(*_: object) -> None:
        raise RuntimeError("no memory may be executed")

    machine_code.fused_lanes.cache_clear()
    monkeypatch.setattr(machine_code, "_compile_module", refuse)
    try:
        assert machine_code.fused_lanes() == 0
        assert wide_products.linear(numbers(2, 64).bfloat16(), numbers(8, 64).bfloat16()).shape == (2, 8)
    finally:
        machine_code.fused_lanes.cache_clear()


_GROWTH = """
from pathlib import Path
import torch
from offload.kernels import machine_code, widened_products
def mapped():
    pages = Path("/proc/self/smaps").read_text().split("libllvmlite")[1:]
    return sum(int(page.split("Rss:")[1].split()[0]) for page in pages)
drop = machine_code.drop_library_pages
machine_code.drop_library_pages = lambda: (print(mapped()), drop(), print(mapped()))
weight = torch.ones(64, 64).bfloat16()
for bias in (None, torch.ones(64)):
    product = widened_products.product_of(torch.ones(1, 64).bfloat16(), weight, bias)
    product.begin(8)
    product.take_parts(torch.empty(product.num_room))
    assert product.out.eq(64 + (bias is not None)).all()
"""


def test_the_compiler_gives_its_memory_back_and_compiles_in_a_forked_process() -> None:
    first, kept, again, kept_again = map(int, run_python("-c", _GROWTH).split())
    assert kept < first / 2 and kept_again < again / 2
    # Pages of the library that were written to, and may only be read by now, are shared then.
    run_python("-c", _FORK)


def test_pages_of_a_file_that_was_just_installed_are_given_back(tmp_path: Path) -> None:
    """They are dirty until they are on the disk, which says nothing of this process."""
    library = tmp_path / "libllvmlite.so"
    library.write_bytes(bytes(1 << 20))
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        assert _resident_kib(library) == 1024
        machine_code.drop_library_pages()
        assert _resident_kib(library) == 0


def _resident_kib(file: Path) -> int:
    return int(Path("/proc/self/smaps").read_text().split(str(file))[1].split("Rss:")[1].split()[0])


_FORK = """
import os
import torch
from offload.kernels.widened_products import product_of
def multiply(bias):
    product = product_of(torch.ones(1, 64).bfloat16(), torch.ones(64, 64).bfloat16(), bias)
    product.begin(8)
    product.take_parts(torch.empty(product.num_room, dtype=torch.float32))
    assert product.out.eq(64 + (bias is not None)).all()
multiply(None)
child = os.fork()
multiply(torch.ones(64))
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
