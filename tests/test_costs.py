"""Which cases a quick run can afford, what it leaves out, and that nothing is left out unseen."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import matrix
import pytest
from costs import Cost, function_of, mark_costly, read_costs, slice_of_the_seed
from planted.mistakes import read_mistakes

HERE = Path(__file__).parent
MANY = ("a::many", "tests/test_tiny.py::many")


class _Item:
    def __init__(self, nodeid: str, marks: tuple[str, ...] = ()) -> None:
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def test_the_others_are_left_to_the_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costs.read_costs", lambda: {"a::dear": Cost(6.0, 1), **dict.fromkeys(MANY, Cost(1.6, 16))})
    monkeypatch.setattr("costs._QUICK_S", 0.1)
    items = [_Item("a::dear"), _Item("a::cheap"), _Item("a::many[x]", ("full",))]
    items += [_Item(f"{name}[{case}]") for name in MANY for case in range(15)]
    mark_costly(items)  # type: ignore[arg-type]
    quick = [item.nodeid for item in items if "full" not in item.marks]
    assert "a::cheap" in quick and "a::dear" not in quick
    assert len(quick) == 5, "one of the many, three where they guard a promise, and none that is marked by hand"


def test_a_case_that_notices_a_planted_mistake_always_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for mistake in read_mistakes() for case in mistake.cases)
    function = function_of(case)
    monkeypatch.setattr("costs.read_costs", lambda: {function: Cost(60.0, 16)})
    items = [_Item(case), *(_Item(f"{function}[other{number}]") for number in range(15))]
    mark_costly(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items if "full" not in item.marks] == [case] and items[0].marks == ["always"]


def test_each_test_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costs.read_costs", lambda: {"a::dear": Cost(600.0, 30)})
    items = [_Item(f"a::dear[{case}]") for case in range(30)] + [_Item("a::cheap")]
    seen = Counter[str]()
    for seed in range(20261127, 20261131):
        monkeypatch.setattr("costs.TEST_SEED", str(seed))
        seen.update(item.nodeid for item in slice_of_the_seed(items))  # type: ignore[arg-type]
    assert seen == Counter({item.nodeid: 1 for item in items})


def test_the_table_is_of_tests_that_exist() -> None:
    for function in read_costs():
        file, _, name = function.partition("::")
        assert re.search(rf"^def {name}\(", (HERE.parent / file).read_text(), re.MULTILINE), function


TABLE = [*range(20), pytest.param(99, id="named", marks=pytest.mark.gpu)]


def rows_on(day: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    monkeypatch.setattr(matrix, "TEST_SEED", day)
    return matrix.rows("number", TABLE, **options)


def values(rows: list[Any], is_full: bool) -> set[Any]:
    given = [(row.values[0], row.marks) if isinstance(row, type(TABLE[-1])) else (row, ()) for row in rows]
    return {value for value, marks in given if ("full" in [mark.name for mark in marks]) == is_full}


def test_what_always_runs_and_what_is_drawn_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    days = [values(rows_on(str(day), monkeypatch, always=[3, "named"], daily=4), False) for day in range(40)]
    assert all(len(day) == 6 and {3, 99} <= day for day in days)
    assert set().union(*days) == {*range(20), 99}, "each has its day"
    assert days[7] == values(rows_on("7", monkeypatch, always=[3, "named"], daily=4), False)
    result = rows_on("1", monkeypatch)
    assert values(result, True) == {*range(20), 99}, "every row is there"
    assert {mark.name for mark in result[-1].marks} == {"gpu", "full"} and result[-1].id == "named"
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


def test_the_seed_is_the_commits_and_make_has_the_same(tmp_path: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout
    assert matrix.seed_of_commit() == (str(int(commit[:8], 16)) if commit else matrix.NO_COMMIT)
    assert matrix.seed_of_commit(tmp_path) == matrix.NO_COMMIT, "no checkout"
    bare = {name: value for name, value in os.environ.items() if name not in ("TEST_SEED", "MAKEFLAGS")}
    show = ["make", "-s", "--eval", "show:; @echo $(TEST_SEED)", "show"]
    shown = subprocess.run(show, cwd=HERE.parent, env=bare, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == matrix.seed_of_commit()
