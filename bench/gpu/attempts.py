"""What a file of rows says about steps: the runner marks where each begins and ends, and rows between are that step's.

A step that was begun several times counts with all its rows; of two with the same name the later one holds.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from offload.bench.harness.row_log import Row, add_row

DONE = "done"


def mark_begin(path: Path, step: str, limit_s: float) -> None:
    """Rows from here on are this step's."""
    add_row(path, {"step": step, "event": "begin", "limit_s": round(limit_s, 1)})


def mark_end(path: Path, step: str, status: str, wall_s: float = 0.0) -> None:
    """The step is over, or was not begun at all."""
    add_row(path, {"step": step, "event": "end", "status": status, "wall_s": round(wall_s, 1)})


def statuses(rows: Iterable[Row]) -> dict[str, tuple[str, float]]:
    """Of every step its last status, and seconds; a skipped one keeps what an earlier run says of it."""
    found: dict[str, tuple[str, float]] = {}
    for row in rows:
        if row.get("event") == "begin":
            found[row["step"]] = ("killed with the runner", 0.0)
        elif row.get("event") == "end" and not (row["status"].startswith("skipped") and row["step"] in found):
            found[row["step"]] = (row["status"], row["wall_s"])
    return found


def rows_of(rows: Iterable[Row], step: str) -> list[Row]:
    """What was measured in a step; errors only of the last time."""
    kept: dict[str, Row] = {}
    current = None
    for row in rows:
        if row.get("event") == "begin":
            current = row["step"]
            if current == step:
                kept = {name: one for name, one in kept.items() if not one.get("error")}
        elif row.get("event") == "end":
            current = None
        elif current == step and "row" in row:
            kept.pop(row["row"], None)
            kept[row["row"]] = row
    return list(kept.values())


def is_wrong(rows: Sequence[Row]) -> bool:
    """Whether a token was: nothing that is measured with it counts."""
    return any(row.get("promise") == "exact" and row.get("is_met") is False for row in rows)


def status_of(exit_status: int | None, is_over_budget: bool, rows: Sequence[Row]) -> str:
    """What an ending means; 1 is that of a bench, or of tests, of which something is not met: then a row says so."""
    if exit_status is None:
        return "stuck, not even SIGKILL ended it"
    if is_over_budget:
        return "over its budget"
    if exit_status == 0 or (exit_status == 1 and any(row.get("is_met") is False for row in rows)):
        return DONE
    return f"failed with {exit_status}"
