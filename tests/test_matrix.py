"""What a quick run leaves out, and that nothing is left out unseen."""

from types import SimpleNamespace
from typing import Any

import conftest
import matrix
import pytest
from rounding import Promise, assert_same_bits

TABLE = [*range(20), pytest.param(99, id="named", marks=pytest.mark.gpu)]


def rows_on(day: str, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[Any]:
    monkeypatch.setattr(matrix, "TEST_SEED", day)
    return matrix.rows("number", TABLE, **how)


def values(rows: list[Any], is_full: bool) -> set[Any]:
    given = [(row.values[0], row.marks) if isinstance(row, type(TABLE[-1])) else (row, ()) for row in rows]
    return {value for value, marks in given if ("full" in [mark.name for mark in marks]) == is_full}


def test_what_always_runs_and_what_is_drawn_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    days = [values(rows_on(str(day), monkeypatch, always=[3, "named"], daily=4), False) for day in range(40)]
    assert all(len(day) == 6 and {3, 99} <= day for day in days)
    assert set().union(*days) == {*range(20), 99}, "each has its day"
    assert days[7] == values(rows_on("7", monkeypatch, always=[3, "named"], daily=4), False)


def test_every_row_is_there_and_keeps_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_on("1", monkeypatch)
    assert values(found, True) == {*range(20), 99}
    assert {mark.name for mark in found[-1].marks} == {"gpu", "full"} and found[-1].id == "named"


def test_a_row_that_there_is_not_is_no_row_that_always_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"\[21\] are no rows of the table of number"):
        rows_on("1", monkeypatch, always=[21])


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("Skipped: this transformers has no lfm3", "skipped"),
        ("Skipped: needs numba", "failed"),
        ("Skipped: curl is not installed today", "failed"),
    ],
)
def test_a_test_that_is_skipped_for_another_reason_fails(reason: str, outcome: str) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=""))
    report = SimpleNamespace(skipped=True, longrepr=("a file", 1, reason), outcome="skipped")
    assert conftest._told_if_skipped(config, report).outcome == outcome


def test_bits_that_differ_are_told_with_what_was_promised() -> None:
    import torch

    one = torch.tensor([1.0, 2.0])
    assert_same_bits(one, one.clone(), Promise.INVARIANT)
    with pytest.raises(AssertionError, match=r"here: 1 of 2 numbers differ, by up to 2.4e-07, but .* aligned alike"):
        assert_same_bits(one, torch.nextafter(one, torch.tensor([1.0, 3.0])), Promise.SAME_PRODUCTS, "here")
    with pytest.raises(AssertionError, match="bfloat16"):
        assert_same_bits(one, one.bfloat16(), Promise.SAME_PRODUCTS)
