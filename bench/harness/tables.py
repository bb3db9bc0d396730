"""What a bench shows: a line of what is under way, tables, figures beside what was wanted of them.

What was promised of a GPU is told row by row, as soon as each is known. A promise is met when every
row that counts for it is; one without a row was not measured, which is not the same.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from offload.errors import UserError, reason

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
    """One bar on standard error, if that is a terminal. Nothing is shown when `is_quiet`."""

    def __init__(self, *, is_quiet: bool) -> None:
        # so long a delay that nothing is drawn before there is a label
        self._bar = tqdm(leave=False, dynamic_ncols=True, disable=is_quiet or None, delay=1e9)
        self._next_s = 0.0

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def wait(self, label: str) -> None:
        self._show(label, "{desc}{bar}")

    def count(self, done: float, total: float, label: str) -> None:
        self._bar.total = total
        self._bar.n = done
        if self._bar.disable or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _LEAST_S
        self._show(label, "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} [{elapsed}]")

    def make_target(self, done_bytes: int, total_bytes: int) -> None:
        self.count(done_bytes / 1e6, total_bytes / 1e6, "making the target, MB")

    def clear(self) -> None:
        self._bar.clear()

    def _show(self, label: str, form: str) -> None:
        self._bar.bar_format = form
        self._bar.set_description_str(label)


class Column(NamedTuple):
    """One column of a table: its head, and the figure of a row that stands there."""

    head: str
    # the row's key, or what makes the figure of the row; one that is None is shown as a dash
    value: str | Callable[[Row], Any]
    form: str = ""  # as `format` takes it
    # of what the figure counts, in one of the unit that is shown
    unit: float = 1

    def cell(self, row: Row) -> str:
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if value is None:
            return "-"
        return format(value if self.unit == 1 else value / self.unit, self.form)


def say_table(columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """Print a table, first column to the left; a row with a `reason` has no figures, but says why."""
    lines = [[column.head for column in columns]]
    for row in rows:
        why = row.get("reason")
        lines.append(
            [columns[0].cell(row), why] if why else [column.cell(row) for column in columns]
        )
    whole = [line for line in lines if len(line) == len(columns)]
    widths = [max(len(line[at]) for line in whole) for at in range(1, len(columns))]
    for first, *others in lines:
        if len(others) == len(widths):
            others = [cell.rjust(width) for cell, width in zip(others, widths, strict=True)]
        print("  ".join([first.ljust(max(len(line[0]) for line in lines)), *others]).rstrip())


def values(rows: Iterable[Row], key: str, **where: Any) -> list[Any]:
    """Return the values of rows with these fields under a key."""
    return [row[key] for row in rows if where.items() <= row.items()]


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Return sample over sample, where there is something to divide by."""
    return [number / other for number, other in zip(above, below, strict=True) if other]


def medians(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Return one row for all that agree in `keys`, in their order: medians of what is a float."""
    groups = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            name: median(row[name] for row in rows) if isinstance(value, float) else value
            for name, value in rows[0].items()
        }
        for rows in groups.values()
    ]


def check(
    name: str, samples: Sequence[float], wanted: float, better: Better, value: float | None = None
) -> Row:
    """Return a figure for which at least, or at most, `wanted` was asked: the median of samples."""
    value_seen = median(samples) if value is None else value
    is_met = value_seen >= wanted if better == "higher" else value_seen <= wanted
    verdict = {
        "name": name,
        "value": value_seen,
        "wanted": wanted,
        "is_met": is_met,
        "better": better,
    }
    return {**verdict, "samples": [*samples]}


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


PROMISES = {
    "link": "one-token sweep <= 1.05 x bytes / measured copy rate",
    "hidden compute": "sweep of 768 rows <= 1.05 x the one-token sweep where the link is slower than computing",
    "step": "draft + sweep <= 1.15 x the slower of both; draft step of 64 rows <= 1.5 x reading its weights",
    "memory": "device peak <= --gpu-mem; page-locked <= 1.02 x the layers held",
    "exact": "float32: the ids of transformers, all trees; bf16: where they part, a gap below rounding",
    "same bits": "bf16, fp16: the ids of all trees are those of none, where the decoder promises it",
    "against accelerate": ">= 10 x the tokens/s of accelerate's CPU offload",
    "soak": "sweeps with poisoned slots: the same scores, no NaN, no drift in memory",
}
_SHOWN = ("s_per_token", "tokens_per_sweep", "draft_s", "stall_s", "times", "parts_at")


class WrongTokenError(UserError):
    """A token is not the reference's: nothing that was measured with it counts."""

    def __init__(self, complaint: str) -> None:
        super().__init__(f"{complaint}: no speed is worth printing")


def row(
    name: str,
    value: float,
    unit: str,
    ceiling: float | None = None,
    limit: float | None = None,
    *,
    promise: str | None = None,
) -> Row:
    """Return a figure beside its ceiling; `limit` bounds their ratio, from below for counts."""
    assert promise is None or promise in PROMISES, f"{promise} is no promise"
    ratio = value / ceiling if ceiling else None
    is_met = None if limit is None or ratio is None else ratio <= limit
    if unit in ("tokens", "sweeps"):
        is_met = ratio is None or ratio >= 1.0
    figures = {"value": value, "unit": unit, "ceiling": ceiling, "ratio": ratio}
    return {"row": name, **figures, "at_most": limit, "is_met": is_met, "promise": promise}


def attempt(name: str, promises: Iterable[str], rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows; what breaks misses all of `promises`, and a wrong token exactness, too."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        wrong = ["exact"] if isinstance(error, WrongTokenError) else []
        yield from failures(name, dict.fromkeys([*wrong, *promises]), error)


def failures(name: str, promises: Iterable[str], error: Exception) -> Iterator[Row]:
    """Yield a row for each promise that is missed, or one of none, with names of their own."""
    for promise in [*promises] or (None,):
        about = f"{name}: failed" if promise is None else f"{name}: failed ({promise})"
        outcome = {"error": f"{type(error).__name__}: {reason(error)}", "is_met": False}
        yield {"row": about, "value": 0.0, "unit": "", "promise": promise, **outcome}


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Return for every promise what was wanted and seen, and whether it is met, if it was seen."""

    def seen(row: Row) -> str:
        if row.get("error"):
            return f"{row['row']} ({row['error']})"
        ratio = "" if row["ratio"] is None else f", ratio {row['ratio']:.3f}"
        return f"{row['value']:.4g} {row['unit']}{ratio}"

    judged = []
    for promise, wanted in PROMISES.items():
        promised = [row for row in rows if row.get("promise") == promise]
        outcomes = {row["is_met"] for row in promised} - {None}
        is_met = all(outcomes) if outcomes else None
        said = "; ".join(map(seen, promised)) or "not measured"
        judged.append({"promise": promise, "wanted": wanted, "seen": said, "is_met": is_met})
    return judged


def row_line(row: Row) -> str:
    value = f"{row['value']:10.4g} {row['unit']:6}"
    beside = ""
    if row.get("ratio") is not None:
        beside = f"ceiling {row['ceiling']:9.4g}  ratio {row['ratio']:6.3f}"
    verdict = {True: "met", False: "MISSED", None: ""}[row.get("is_met")]
    figures = " ".join(f"{key} {row[key]:.4g}" for key in _SHOWN if row.get(key) is not None)
    notes = " ".join(str(row[key]) for key in ("error", "notes") if row.get(key))
    return f"{row['row'][:70]:70} {value} {beside:34} {verdict:6} {figures} {notes}".rstrip()


def verdict_lines(promises: Sequence[Row]) -> list[str]:
    words = {True: "met", False: "MISSED", None: "open"}
    return [
        f"{words[promise['is_met']]:6} {promise['promise']}: {promise['wanted']} | {promise['seen']}"
        for promise in promises
    ]
