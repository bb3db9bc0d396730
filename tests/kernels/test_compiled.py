"""What numba compiles: rounding and gated delta rules against torch's, shares of rows, what is kept on disk."""

import os
import platform
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from shell import ROOT, run_python

from offload.kernels import gated_delta
from offload.kernels.compiled import Compiled, compiled, share_rows
from offload.kernels.gated_delta import AFTER, BASE, DeltaRows, agrees, walk_heads_compiled, walk_heads_reference
from offload.kernels.rounding import ByType, numbers, pairs, rounded, rounded_pair, widened

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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_are_rounded_and_read_as_by_torch(dtype: torch.dtype) -> None:
    value_S = all_kinds()
    wanted_S = value_S.to(dtype)
    one_S, two_S = torch.empty_like(wanted_S), torch.empty_like(wanted_S)
    round_all.to(dtype)(value_S.numpy(), numbers(one_S))
    round_pairs.to(dtype)(value_S.numpy(), pairs(two_S))
    for got_S in (one_S, two_S):
        assert bool(got_S[-2].isnan()) and not bool(got_S[:-2].isnan().any())
        assert np.array_equal(numbers(got_S[:-2].clone()), numbers(wanted_S[:-2].clone()))
    # Numbers are read as by torch.
    number_S = torch.arange(-(2**15), 2**15).short().view(dtype) if dtype.itemsize == 2 else all_kinds()
    wanted_S, found_S = number_S.float(), torch.empty(len(number_S))
    widen_all.to(dtype)(numbers(number_S), found_S.numpy())
    is_number_S = ~wanted_S.isnan()
    assert torch.equal(found_S[is_number_S].view(torch.int32), wanted_S[is_number_S].view(torch.int32))
    assert found_S[~is_number_S].isnan().all()


_REFUSED = """
import torch
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.encode_exponents import encode_exponents
from offload.kernels.gated_delta import agrees
from offload.kernels.int4_blocks import encode_int4, expand_int4, layout_for
assert HAS_NUMBA and not agrees(64, 64)
weight_NK = torch.randn(64, 64)
layout = layout_for(weight_NK.device)
expand_int4(*encode_int4(weight_NK, 64, layout), layout, torch.empty(64, 64))
encode_exponents(weight_NK.bfloat16().flatten(), 120, 4)
"""


def test_what_numba_refuses_torch_does(tmp_path: Path) -> None:
    """The mistake that was: beside a NumPy that is too new for it nothing was packed, and no draft quantised."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')")
    run_python("-c", _REFUSED, environment={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})


def test_only_compiled_functions_round() -> None:
    assert isinstance(rounded, ByType) and isinstance(rounded.for_dtype(torch.float16), Compiled)
    with pytest.raises(TypeError, match="only compiled functions"):
        rounded(1.0)


def test_importing_the_engine_imports_no_numba() -> None:
    script = "import sys, offload.engine.load, offload.kernels.expansion; print('numba' in sys.modules)"
    assert run_python("-c", script).strip() == "False"


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


_FORK = """
import os, signal
import torch
from offload.kernels.compiled import share_rows
torch.set_num_threads(2)
done = []
def work(lo, hi):
    done.append(lo)
share_rows(work, 100)
child = os.fork()
if not child:
    signal.alarm(20)
    share_rows(work, 100)
    os._exit(sorted(done) != [0, 0, 50, 50])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    """The mistake that was: it waited for threads that only its parent has."""
    run_python("-c", _FORK)


STEPS = torch.tensor([[5, BASE, AFTER], [0, BASE, 0], [1, 0, 1], [2, AFTER, 2], [3, 1, 1], [4, 0, 0]])


def rows_of(key_size: int, value_size: int, num_decays: int) -> DeltaRows:
    """Four heads of values, two of keys."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((6, 2, key_size), (6, 2, key_size), (6, 4, value_size), (6, 4), (6, 4, num_decays))
    return DeltaRows(*(torch.randn(*shape, generator=generator) for shape in shapes))


@pytest.mark.parametrize("is_by_channel", [False, True])
@pytest.mark.parametrize(("key_size", "value_size"), [(128, 128), (64, 64), (72, 128), (256, 128), (16, 12), (300, 64)])
def test_where_forms_agree_any_rows_have_the_same_bits(key_size: int, value_size: int, is_by_channel: bool) -> None:
    base = torch.randn(4, key_size, value_size)
    rows = rows_of(key_size, value_size, key_size if is_by_channel else 1)
    results = []
    for walk in (walk_heads_reference, walk_heads_compiled):
        out, after = torch.full_like(rows.value_THV, torch.nan), torch.empty_like(base)
        for lo in range(0, 4, 2):
            states = torch.empty(3, *base.shape[1:])
            walk((base, after), rows, STEPS, (lo, lo + 2), states, out)
        results.append((out, after, states))
    assert agrees(key_size, value_size) == all(map(torch.equal, *results))
    assert all(torch.allclose(*both, rtol=1e-3, atol=1e-3) for both in zip(*results, strict=True))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="how torch adds up differs elsewhere")
def test_they_agree_at_sizes_that_models_have() -> None:
    assert all(agrees(size, size) for size in (64, 128)) and not agrees(512, 128)


def test_another_order_of_sums_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a torch that adds up from the other end."""
    walk = gated_delta.walk_heads_reference

    def other(ends: tuple[torch.Tensor, torch.Tensor], rows: DeltaRows, *others: object) -> None:
        walk(
            (ends[0].flip(1), ends[1]),
            rows._replace(query_TGK=rows.query_TGK.flip(2), key_TGK=rows.key_TGK.flip(2)),
            *others,
        )

    monkeypatch.setattr(gated_delta, "walk_heads_reference", other)
    assert not agrees.__wrapped__(64, 64)
