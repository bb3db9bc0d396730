"""What numba compiles: rounding against torch's, shares of rows, when it is imported, and what it keeps on disk."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.kernels import team
from offload.kernels.compiled import HAS_NUMBA, Compiled, compiled
from offload.kernels.rounding import ByType, numbers, pairs, rounded, rounded_pair, widened
from offload.kernels.team import share_rows

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


@compiled
def add_one(lo, hi, step, source, out):  # type: ignore[no-untyped-def]
    for row in range(lo, hi):
        out[row, 0] += source[row, 0] * step


@compiled
def add_one_but_for_the_last(lo, hi, step, source, out):  # type: ignore[no-untyped-def]
    for row in range(lo, hi - 1):
        out[row, 0] += source[row, 0] * step


@compiled
def fail_late(lo, hi, limit):  # type: ignore[no-untyped-def]
    if lo >= limit:
        raise ValueError("too far")


BY_POOL = pytest.param(True, id="pool")


def rows_done(work: Compiled, num_rows: int) -> np.ndarray:
    """How often each was; source and out lie with gaps, and one of them in columns."""
    source = np.full((3, num_rows), 2, np.int16).T[:, 1:]
    out = np.zeros((num_rows, 5), np.int64)[:, 2:4]
    work.share(torch.float32, num_rows, 3, source, out)
    assert not out[:, 1].any()
    return out[:, 0]


@needs_numba
@pytest.mark.parametrize("by_pool", [False, BY_POOL])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 100, 9999])
def test_the_team_does_each_row_once(
    num_rows: int, num_threads: int, by_pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_pool:
        monkeypatch.setattr(team, "_parallel", lambda: None)
    torch.set_num_threads(num_threads)
    assert (rows_done(add_one, num_rows) == 6).all()


@needs_numba
def test_a_row_that_nobody_does_is_seen() -> None:
    torch.set_num_threads(2)
    assert (rows_done(add_one_but_for_the_last, 9999) != 6).any()


@needs_numba
@pytest.mark.parametrize("by_pool", [False, BY_POOL])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numba tells where no caller listens
def test_a_share_that_fails_is_told(num_threads: int, by_pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_pool:
        monkeypatch.setattr(team, "_parallel", lambda: None)
    torch.set_num_threads(num_threads)
    fail_late.share(torch.float32, 1000, 1000)
    with pytest.raises(RuntimeError, match="has failed"):
        fail_late.share(torch.float32, 1000, 500 if num_threads > 1 else 0)


@needs_numba
def test_torch_has_a_team() -> None:
    if "OpenMP not found" in torch.__config__.parallel_info() or sys.platform != "linux":
        pytest.skip("this torch computes without OpenMP")
    assert team._parallel() is not None


@needs_numba
def test_jobs_are_told_apart_by_what_they_are_made_of() -> None:
    def shifted(by: int) -> Compiled:
        @compiled
        def shift(lo, hi, out):  # type: ignore[no-untyped-def]
            for row in range(lo, hi):
                out[row] += by

        return shift

    out = np.zeros(40, np.int64)
    for by in (1, 20):
        shifted(by).share(torch.float32, len(out), out)
    assert (out == 21).all()
