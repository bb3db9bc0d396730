"""What numba compiles: rounding against torch's, shares of rows, when it is imported, and what it keeps on disk."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.kernels.compiled import HAS_NUMBA, Compiled, compiled, share_rows
from offload.kernels.rounding import ByType, numbers, pairs, rounded, rounded_pair, widened

ROOT = Path(__file__).resolve().parents[2]
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
TYPES = [torch.bfloat16, torch.float16, torch.float32]


@compiled
def round_all(values, out):  # type: ignore[no-untyped-def]
    for index in range(values.size):
        out[index] = rounded(values[index])


@compiled
def round_pairs(values, out):  # type: ignore[no-untyped-def]
    for index in range(out.size):
        out[index] = rounded_pair(values[2 * index], values[2 * index + 1])


@compiled
def widen_all(bits, out):  # type: ignore[no-untyped-def]
    for index in range(out.size):
        out[index] = widened(bits[index])


def all_kinds() -> torch.Tensor:
    """Random bits, every number of 20 bits with its neighbours (ties among them), infinities and a NaN."""
    at_random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).int()
    ties = torch.arange(2**20).int() << 12
    value = torch.cat([at_random, ties, ties + 1, ties - 1]).view(torch.float32)
    finite = value[value.isfinite()]
    return torch.cat([finite[: len(finite) // 2 * 2], torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])])


@needs_numba
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_are_rounded_as_by_torch(dtype: torch.dtype) -> None:
    value_S = all_kinds()
    wanted_S = value_S.to(dtype)
    one_S, two_S = torch.empty_like(wanted_S), torch.empty_like(wanted_S)
    round_all.to(dtype)(value_S.numpy(), numbers(one_S))
    round_pairs.to(dtype)(value_S.numpy(), pairs(two_S))
    for got_S in (one_S, two_S):
        assert bool(got_S[-2].isnan()) and not bool(got_S[:-2].isnan().any())
        assert np.array_equal(numbers(got_S[:-2].clone()), numbers(wanted_S[:-2].clone()))


@needs_numba
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_are_read_as_by_torch(dtype: torch.dtype) -> None:
    number_S = torch.arange(-(2**15), 2**15).short().view(dtype) if dtype.itemsize == 2 else all_kinds()
    wanted_S, found_S = number_S.float(), torch.empty(len(number_S))
    widen_all.to(dtype)(numbers(number_S), found_S.numpy())
    is_number_S = ~wanted_S.isnan()
    assert torch.equal(found_S[is_number_S].view(torch.int32), wanted_S[is_number_S].view(torch.int32))
    assert found_S[~is_number_S].isnan().all()


@needs_numba
def test_what_is_kept_is_not_used_for_another_function_that_it_calls() -> None:
    names = {dtype: round_all.bound(dtype).__qualname__ for dtype in TYPES}
    assert len(set(names.values())) == 3
    assert all(name.startswith("round_all_") for name in names.values())
    assert names == {dtype: round_all.bound(dtype).__qualname__ for dtype in TYPES}


@needs_numba
def test_it_is_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import CompileResultCacheImpl

    @compiled
    def double(values):  # type: ignore[no-untyped-def]
        for index in range(values.size):
            values[index] *= 2

    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])
    value_S = np.arange(3, dtype=np.float32)
    double(value_S)
    assert value_S.tolist() == [0, 2, 4]


def test_only_compiled_functions_round() -> None:
    assert isinstance(rounded, ByType) and isinstance(rounded.of(torch.float16), Compiled)
    with pytest.raises(TypeError, match="only compiled functions"):
        rounded(1.0)


def test_importing_the_engine_imports_no_numba() -> None:
    script = "import sys, offload.engine.load, offload.kernels.expansion; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("num_rows", "num_threads"), [(0, 2), (1, 2), (31, 2), (32, 2), (100, 3), (100, 1)])
def test_each_row_is_somebodys(num_rows: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    done, who = np.zeros(num_rows, dtype=int), set()

    def work(lo: int, hi: int) -> None:
        done[lo:hi] += 1
        who.add((lo, threading.get_ident() == threading.main_thread().ident))

    share_rows(work, num_rows)
    assert (done == 1).all()
    assert len(who) == max(1, min(num_threads, num_rows // 16))
    assert (0, True) in who


@pytest.mark.parametrize("failing", [0, 50])
def test_the_others_end_before_an_error_is_raised(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ended, may_end = [], threading.Event()

    def work(lo: int, hi: int) -> None:
        if lo == failing:
            may_end.set()
            raise ValueError(f"rows from {lo}")
        assert may_end.wait(10)
        ended.append(lo)

    with pytest.raises(ValueError, match=f"rows from {failing}"):
        share_rows(work, 100)
    assert ended == [50 - failing]
