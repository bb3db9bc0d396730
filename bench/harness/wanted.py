"""A figure beside what was wanted of it: a row, a line of a table, and a guard."""

from collections.abc import Callable, Sequence
from typing import Literal

from offload.bench.harness.command import say_table
from offload.bench.harness.record import Guard, Row

Better = Literal["higher", "lower"]


def wanted_row(
    name: str, value: float, wanted: float, samples: Sequence[float], better: Better
) -> Row:
    """Return a row of a figure for which at least, or at most, `wanted` was asked."""
    is_met = value >= wanted if better == "higher" else value <= wanted
    return {
        "name": name,
        "value": value,
        "wanted": wanted,
        "is_met": is_met,
        "better": better,
        "samples": [*samples],
    }


def say_wanted(
    rows: Sequence[Row], told: Callable[[Row], list[str]] = lambda _: []
) -> dict[str, Guard]:
    """Print the rows, with what else there is to tell; return what `--compare` watches."""
    say_table(["", "seen", "wanted", ""], [_cells(row, told(row)) for row in rows])
    return {row["name"]: Guard(row["samples"], row["better"]) for row in rows}


def _cells(row: Row, told: list[str]) -> list[str]:
    verdict = "met" if row["is_met"] else "MISSED"
    sign = ">=" if row["better"] == "higher" else "<="
    return [
        row["name"],
        f"{row['value']:.6g}",
        f"{sign} {row['wanted']:g}",
        "; ".join([verdict, *told]),
    ]
