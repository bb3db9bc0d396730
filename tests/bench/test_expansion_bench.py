"""The measurement of expansions: each kind is there, and what gives other bits has no speed."""

import pytest
import torch

from offload.bench.harness.expansions import samples
from offload.bench.studies import expansion
from offload.bench.studies.expansion import Effort, check, measure
from offload.errors import UserError
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, Expansion


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
