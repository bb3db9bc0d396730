"""Rows as a table, and figures beside what was wanted of them."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from offload.bench.harness.record import Guard, Row

Better = Literal["higher", "lower"]


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
    head = [column.head for column in columns]
    lines = [head]
    for row in rows:
        cells = [column.cell(row) for column in columns[: 1 if row.get("reason") else None]]
        lines.append([*cells, row["reason"]] if row.get("reason") else cells)
    widths = [
        max(len(line[at]) for line in lines if len(line) == len(head)) for at in range(len(head))
    ]
    widths[0] = max(len(line[0]) for line in lines)
    for first, *others in lines:
        if len(others) == len(head) - 1:
            others = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *others]).rstrip())


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


_CHECKED = (
    Column("", "name"),
    Column("seen", "value", ".6g"),
    Column(
        "wanted", lambda row: f"{'>=' if row['better'] == 'higher' else '<='} {row['wanted']:g}"
    ),
    Column(
        "", lambda row: "; ".join(["met" if row["is_met"] else "MISSED", *row.get("notes", ())])
    ),
)


def say_checks(rows: Sequence[Row]) -> dict[str, Guard]:
    """Print checks, with their `notes`; return what `--compare` watches."""
    if rows:
        say_table(_CHECKED, rows)
    return {row["name"]: Guard(row["samples"], row["better"]) for row in rows}
