"""Rows of a table of which a quick run takes some: those that always run, and a few that the commit's seed draws.

Everything runs in `make test-full`, so nothing that a table proves is lost; a quick run has each row now and then.
Invariant: which rows are drawn depends on the seed and on the table alone, so that every worker collects the same ones,
and `TEST_SEED=...` repeats a run. The seed is the commit's: what is green stays green until something changes.
"""

import os
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

NO_COMMIT = "1"  # the seed of a checkout without git


def seed_of_commit(folder: Path = Path(__file__).parent) -> str:
    """Return the first 32 bits of the commit's hash in decimals, as the Makefile has them, or `NO_COMMIT`."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return NO_COMMIT
    return str(int(commit[:8], 16))


# Set for the workers, too: a commit meanwhile does not change a run.
TEST_SEED = os.environ.get("TEST_SEED") or os.environ.setdefault("TEST_SEED", seed_of_commit())


def matrix(
    name: str,
    all_: Iterable[Any],
    always: Iterable[Any] = (),
    daily: int = 0,
    ids: Sequence[str] | Callable[[Any], Any] | None = None,
) -> pytest.MarkDecorator:
    """Return a `parametrize` of all rows, of which those outside of a quick run are marked `full`.

    `name` is one name, or several with commas between. `always` names rows by their value or, where a row is a
    `pytest.param` with an id, by that id. `daily` counts the other rows that the seed draws.
    """
    return pytest.mark.parametrize(name, rows(name, all_, always, daily), ids=ids)


def rows(name: str, all_: Iterable[Any], always: Iterable[Any] = (), daily: int = 0) -> list[Any]:
    """Return the rows of `matrix`, for the `params` of a fixture."""
    results = [*all_]
    wanted = [*always]
    unknown = [name for name in wanted if not any(_is_named(row, name) for row in results)]
    assert not unknown, f"{unknown} are no rows of the table of {name}"
    others = [index for index, row in enumerate(results) if not any(_is_named(row, name) for name in wanted)]
    chosen = random_of_the_seed(name, len(results)).sample(others, min(daily, len(others)))
    left_out = set(others) - set(chosen)
    is_single = "," not in name
    return [_only_in_full(row, is_single) if index in left_out else row for index, row in enumerate(results)]


def random_of_the_seed(*others: object) -> random.Random:
    """Return numbers of the seed, other ones for each `what`."""
    return random.Random(" ".join(map(str, (TEST_SEED, *others))))


def _is_named(row: Any, name: Any) -> bool:
    if not _is_param(row):
        return bool(row is name or row == name)
    values = row.values[0] if len(row.values) == 1 else tuple(row.values)
    return bool(row.id == name or values is name or values == name)


def _only_in_full(row: Any, is_single: bool) -> Any:
    if _is_param(row):
        return pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.full])
    values = (row,) if is_single else tuple(row)
    return pytest.param(*values, marks=pytest.mark.full)


def _is_param(row: Any) -> bool:
    return isinstance(row, type(pytest.param()))
