"""The measurement of expansions: each kind is there, and what gives other bits has no speed."""

import pytest
import torch
from fake_device import FakeDevice
from test_duels import clock

from offload.bench.gpu import expansions
from offload.bench.gpu.expansions import expand_all
from offload.bench.harness.expansions import samples
from offload.bench.studies import expansion
from offload.bench.studies.expansion import Effort, check, measure
from offload.errors import UserError
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, EXPANSION_KERNELS, Expansion
from offload.kernels.jit import HAS_TRITON


def test_each_kind_is_measured() -> None:
    assert {one.kind for one in samples(256, 256)} == set(Expansion._fields)


def test_rows_are_those_of_all_kinds_and_ways() -> None:
    rows = measure(Effort(256, 1), (1, 2))
    names = [one.name for one in samples(256, 256)]
    ways = {"torch", "numba"} if HAS_NUMBA else {"torch"}
    wanted = {(name, how, count) for name in names for how in ways for count in (1, 2)}
    wanted |= {("copy", "copy", count) for count in (1, 2)}
    assert {(row["name"], row["how"], row["threads"]) for row in rows} == wanted
    assert all(row["bytes_per_s"] > 0 for row in rows)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_stand_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which cuts what it stores as bfloat16."""
    size = (128, 256)
    found = list(expand_all(FakeDevice(), clock(1.0, 0.5, 2.0), size, torch.float32))
    assert [one.duel.outcome.shape for one in found] == [one.name for one in samples(*size)]
    assert [one.duel.outcome.reason for one in found] == [""] * len(found)
    assert found[0].of_copy == 2 and found[0].bytes_per_s == 4 * 128 * 256 / 0.5
    monkeypatch.setattr(
        expansions, "EXPANSION_KERNELS", EXPANSION_KERNELS._replace(float8=lambda *arguments: arguments[-1].fill_(3))
    )
    wrong = next(expand_all(FakeDevice(), clock(1.0), size, torch.float32))
    assert (wrong.duel.outcome.reason, wrong.bytes_per_s, wrong.of_copy) == ("its results differ", 0, 0)


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_other_bits_have_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def almost(*arguments: object, **named: object) -> None:
        out = arguments[-1]
        assert isinstance(out, torch.Tensor)
        COMPILED.float8(*arguments, **named)
        out.view(torch.int16)[0, 0] ^= 1

    monkeypatch.setattr(expansion, "COMPILED", COMPILED._replace(float8=almost))
    with pytest.raises(UserError, match="fp8, blocks: numba and torch give different bits"):
        check(samples(256, 256)[0])
