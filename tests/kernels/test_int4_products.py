"""Products of a few rows and 4-bit words: near to the reference on every kind of processor, row by row the same."""

import pytest
import torch
from torch import Tensor

from offload.kernels import int4_products
from offload.kernels.int4_blocks import WordLayout, encode_int4, expand_int4_reference, pack_int4
from offload.kernels.int4_products import Instructions, Int4RowsProduct, instructions, int4_rows_reference
from offload.kernels.machine_code import processor_features
from offload.model import thread_team
from offload.model.thread_team import TEAM, compute, compute_with_torch

CHANCE = torch.Generator().manual_seed(11)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
# beside what each product is rounded to: a last place of the result
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-4}
HERE = instructions()


def kinds() -> list[Instructions]:
    """Return the instructions that can run here: those that other processors have less of."""
    features = processor_features()
    known = []
    if HERE is not None:
        known += [HERE, Instructions(8, has_dots=False)]
    if features.get("avx512vnni") and features.get("avx512vl"):
        known.append(Instructions(8, has_dots=True))
    return [*dict.fromkeys(known)]


@pytest.fixture(autouse=True)
def _where_it_can() -> None:
    if HERE is None:
        pytest.skip("this processor: no products of bytes, or no llvmlite")


def matrix(num_rows: int, width: int, group: int, dtype: torch.dtype, block_rows: int) -> tuple[Tensor, Tensor]:
    code_NK = torch.randint(0, 16, (num_rows, width), generator=CHANCE, dtype=torch.uint8)
    scale_GN2 = torch.randn(width // group, num_rows, 2, generator=CHANCE).to(dtype)
    return pack_int4(code_NK, WordLayout(block_rows, has_product=False)), scale_GN2


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("block_rows", [64, 32])
@pytest.mark.parametrize(("num_columns", "width", "group"), [(64, 64, 64), (192, 320, 64), (128, 96, 32)])
def test_it_is_the_reference_within_a_rounding(
    num_columns: int, width: int, group: int, block_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_NK, scale_GN2 = matrix(num_columns, width, group, dtype, block_rows)
    layout = WordLayout(block_rows, has_product=False)
    row_MK = torch.randn(16, width, generator=CHANCE).to(dtype)
    row_MK[3, :group] = 0.0
    wanted_MN = int4_rows_reference(row_MK, word_NK, scale_GN2, layout)
    size = wanted_MN.float().norm() / wanted_MN.numel() ** 0.5
    for kind in kinds():
        monkeypatch.setattr(int4_products, "instructions", lambda kind=kind: kind)
        whole_MN = compute(Int4RowsProduct([(word_NK, scale_GN2)], layout)(row_MK))
        for num_rows in (1, 2, 3, 7, 16):
            found_MN = compute(Int4RowsProduct([(word_NK, scale_GN2)], layout)(row_MK[:num_rows]))
            assert torch.equal(found_MN, whole_MN[:num_rows]), f"{kind}: a row's bits depend on others"
        error = (whole_MN.float() - wanted_MN.float()).abs()
        assert (error <= TOLERANCE[dtype] * (wanted_MN.float().abs() + size)).all(), kind


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("block_rows", [64, 32])
def test_products_side_by_side_have_the_bits_of_each_alone(
    block_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = WordLayout(block_rows, has_product=False)
    matrices = [matrix(num_columns, 128, 64, dtype, block_rows) for num_columns in (64, 320, 128)]
    for kind in kinds():
        monkeypatch.setattr(int4_products, "instructions", lambda kind=kind: kind)
        together = Int4RowsProduct(matrices, layout)
        for num_rows in (1, 5, 16):
            row_MK = torch.randn(num_rows, 128, generator=CHANCE).to(dtype)
            alone = [compute(Int4RowsProduct([weights], layout)(row_MK)) for weights in matrices]
            assert torch.equal(compute(together(row_MK)), torch.cat(alone, 1)), kind


def test_rounding_rows_loses_far_less_than_the_weights_have_lost() -> None:
    weight_NK = torch.randn(256, 1024, generator=CHANCE)
    layout = WordLayout(64, has_product=False)
    words = encode_int4(weight_NK, 64, layout)
    row_MK = torch.randn(8, 1024, generator=CHANCE)
    # as in states of models, a few numbers are many times the others
    row_MK[:, ::171] *= 50.0
    held_KN = torch.empty(1024, 256)
    expand_int4_reference(*words, layout, held_KN)
    found_MN = compute(Int4RowsProduct([words], layout)(row_MK))
    of_rows = (found_MN - row_MK @ held_KN).norm()
    of_weights = (row_MK @ (held_KN - weight_NK.t())).norm()
    assert 0.001 * of_weights < of_rows < 0.25 * of_weights


def test_threads_of_torch_and_of_the_team_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    word_NK, scale_GN2 = matrix(1024, 1024, 64, torch.bfloat16, 64)
    layout = WordLayout(64, has_product=False)
    row_MK = torch.randn(9, 1024, generator=CHANCE).bfloat16()
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            results.append(compute_with_torch(Int4RowsProduct([(word_NK, scale_GN2)], layout)(row_MK)))
            with TEAM.in_place_of_torch():
                results.append(compute_with_torch(Int4RowsProduct([(word_NK, scale_GN2)], layout)(row_MK)))
        monkeypatch.setattr(thread_team, "_run_in_parallel", lambda: None)
        results.append(compute_with_torch(Int4RowsProduct([(word_NK, scale_GN2)], layout)(row_MK)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(product, results[0]) for product in results)


def test_words_in_another_layout_give_another_product() -> None:
    """Planted: what would be told apart above."""
    word_NK, scale_GN2 = matrix(128, 128, 64, torch.float32, 64)
    row_MK = torch.randn(2, 128, generator=CHANCE)
    right, wrong = (WordLayout(size, has_product=False) for size in (64, 32))
    wanted_MN = int4_rows_reference(row_MK, word_NK, scale_GN2, right)
    found_MN = compute(Int4RowsProduct([(word_NK, scale_GN2)], wrong)(row_MK))
    assert (found_MN - wanted_MN).norm() > 0.5 * wanted_MN.norm()
