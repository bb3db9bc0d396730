"""What a bench shows: the line of what is under way on a terminal, tables, medians and ratios of
rows, and figures beside what was wanted of them.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

_LEAST_S = 0.1  # between two states of the line

Row = dict[str, Any]
Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Guard:
    samples: list[float]
    better: Better
    # of samples that another run repeats, such as its prompts
    labels: list[str] = field(default_factory=list)


class Screen:
    """One live line on standard error. Nothing is shown when `is_quiet`."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_shown = not is_quiet and sys.stderr.isatty()
        self._next_s = 0.0

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def wait(self, label: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{label[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def count(self, done: float, total: float, label: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LEAST_S
            self.wait(f"{label}: {done:.0f} of {total:.0f}")

    def make_target(self, done_bytes: int, total_bytes: int) -> None:
        self.count(done_bytes / 1e6, total_bytes / 1e6, "making the target, MB")

    def clear(self) -> None:
        self.wait("")


class Column(NamedTuple):
    """One column of a table: its head, and the figure of a row that stands there."""

    head: str
    # the row's key, or what makes the figure of the row; one that is None is shown as a dash
    value: str | Callable[[Row], Any]
    form: str = ""  # as `format` takes it

    def cell(self, row: Row) -> str:
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return "-" if found is None else format(found, self.form)


def say_table(columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """Print a table, first column to the left; a row with a `reason` has no figures, but says why."""
    lines = [[column.head for column in columns]]
    for row in rows:
        why = row.get("reason")
        lines.append([columns[0].cell(row), why] if why else [one.cell(row) for one in columns])
    whole = [line for line in lines if len(line) == len(columns)]
    widths = [max(len(line[at]) for line in whole) for at in range(1, len(columns))]
    for first, *others in lines:
        if len(others) == len(widths):
            others = [cell.rjust(width) for cell, width in zip(others, widths, strict=True)]
        print("  ".join([first.ljust(max(len(line[0]) for line in lines)), *others]).rstrip())


def values(rows: Iterable[Row], key: str, **where: Any) -> list[Any]:
    """Return what rows with these fields have under a key."""
    return [row[key] for row in rows if where.items() <= row.items()]


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Return sample over sample, where there is something to divide by."""
    return [one / other for one, other in zip(above, below, strict=True) if other]


def medians(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Return one row for all that agree in `keys`, in their order: medians of what is a float."""
    groups = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            name: median(one[name] for one in own) if isinstance(value, float) else value
            for name, value in own[0].items()
        }
        for own in groups.values()
    ]


def check(
    name: str, samples: Sequence[float], wanted: float, better: Better, value: float | None = None
) -> Row:
    """Return a figure for which at least, or at most, `wanted` was asked: the median of samples."""
    found = median(samples) if value is None else value
    is_met = found >= wanted if better == "higher" else found <= wanted
    told = {"name": name, "value": found, "wanted": wanted, "is_met": is_met, "better": better}
    return {**told, "samples": [*samples]}


def say_checks(rows: Sequence[Row]) -> dict[str, Guard]:
    """Print checks, with their `notes`; return what `--compare` watches."""

    def wanted(row: Row) -> str:
        return f"{'>=' if row['better'] == 'higher' else '<='} {row['wanted']:g}"

    def verdict(row: Row) -> str:
        return "; ".join(["met" if row["is_met"] else "MISSED", *row.get("notes", ())])

    if rows:
        seen = Column("seen", "value", ".6g")
        say_table((Column("", "name"), seen, Column("wanted", wanted), Column("", verdict)), rows)
    return {row["name"]: Guard(row["samples"], row["better"]) for row in rows}
