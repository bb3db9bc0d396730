"""Steps one after the other within one budget of time; a failing step costs the others only time.

The file of rows has a mark where each step begins and ends, and rows between are that step's. A
step that was begun several times counts with all its rows; of two with the same name the later one
holds.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from offload.bench.gpu.child import GRACE_S, run_child
from offload.bench.gpu.steps import Step
from offload.bench.harness.promises import verdict_lines, verdicts
from offload.bench.harness.record import Row, add_row, read_rows

DONE = "done"


class Files:
    """What a run writes into its folder: rows and marks, a summary, output of children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = folder / "rows.jsonl"
        self.summary = folder / "summary.txt"
        self.log = folder / "log.txt"

    def named_in(self, step: Step) -> list[str]:
        """Return a step's command with the names of these files."""
        named = {"{rows}": str(self.rows), "{out}": str(self.folder)}
        words = list(step.command)
        for mark, path in named.items():
            words = [word.replace(mark, path) for word in words]
        return words


class _Clock:
    """The budget of all steps: what one leaves unused is the next one's."""

    def __init__(self, budget_s: float, wanted_s: float) -> None:
        self._end = time.monotonic() + budget_s - GRACE_S
        self._scale = max(1.0, budget_s / max(1.0, wanted_s))
        self._unused_s = 0.0

    def limit_s(self, step: Step) -> float:
        return min(self._scale * step.budget_s + self._unused_s, self._end - time.monotonic())

    def take(self, step: Step, wall_s: float) -> None:
        self._unused_s = max(0.0, self._unused_s + self._scale * step.budget_s - wall_s)


def run_steps(steps: Sequence[Step], files: Files, budget_s: float) -> None:
    """Run every step that is not done yet, and write the summary after each.

    Raises:
        KeyboardInterrupt: after the running step has been ended and noted.
    """
    found = statuses(read_rows(files.rows))
    done = {name for name, (status, _) in found.items() if status == DONE}
    open_steps = [step for step in steps if step.name not in done or _is_wrong(files, step.name)]
    clock = _Clock(budget_s, sum(step.budget_s for step in open_steps))
    with files.log.open("ab") as log:
        for step in open_steps:
            limit_s = clock.limit_s(step)
            wrong = [one for one in step.skips_after if _is_wrong(files, one, step.is_invariant)]
            if wrong:
                _mark_end(files, step, f"skipped: wrong tokens in {wrong[0]}")
            elif limit_s < step.least_s:
                _mark_end(files, step, f"skipped: {max(0.0, limit_s):.0f} s are left")
            else:
                clock.take(step, _run_step(step, files, limit_s, log))
            write_summary(steps, files)


def write_summary(steps: Sequence[Step], files: Files) -> str:
    """Replace the summary at once, and return it."""
    rows = read_rows(files.rows)
    found = statuses(rows)
    lines = []
    measured = []
    for step in steps:
        own = rows_of(rows, step.name)
        status, wall_s = found.get(step.name, ("not begun", 0.0))
        num_missed = sum(one.get("is_met") is False for one in own)
        counts = f"{len(own):4} rows  {num_missed:3} missed"
        lines.append(f"{step.name:14}{wall_s:7.1f} s  {counts}  {status}")
        measured += own
    text = "\n".join([*lines, "", *verdict_lines(verdicts(measured))]) + "\n"
    part = files.summary.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, files.summary)
    return text


def _run_step(step: Step, files: Files, limit_s: float, log: BinaryIO) -> float:
    """Run one child to its end; return the seconds that it took."""
    print(f"{step.name}: at most {limit_s:.0f} s", flush=True)
    log.write(f"== {step.name}\n".encode())
    log.flush()
    add_row(files.rows, {"step": step.name, "event": "begin", "limit_s": round(limit_s, 1)})
    started = time.monotonic()
    status = "interrupted"
    try:
        exit_status, is_over = run_child([sys.executable, *files.named_in(step)], limit_s, log)
        status = status_of(exit_status, is_over, rows_of(read_rows(files.rows), step.name))
    finally:
        _mark_end(files, step, status, time.monotonic() - started)
    print(f"{step.name}: {status}", flush=True)
    return time.monotonic() - started


def _mark_end(files: Files, step: Step, status: str, wall_s: float = 0.0) -> None:
    """Mark that a step is over, or was not begun at all."""
    told = {"step": step.name, "event": "end", "status": status, "wall_s": round(wall_s, 1)}
    add_row(files.rows, told)


def _is_wrong(files: Files, step: str, is_invariant: bool | None = None) -> bool:
    """Return whether a token was wrong: nothing that is measured with it counts.

    Args:
        is_invariant: asks of the way of computing that gives rows the same bits in every pass, or
            of the other one; a row that says of neither is of both.
    """
    rows = rows_of(read_rows(files.rows), step)
    if is_invariant is not None:
        rows = [row for row in rows if row.get("is_invariant", is_invariant) is is_invariant]
    return any(row.get("promise") == "exact" and row.get("is_met") is False for row in rows)


def statuses(rows: Iterable[Row]) -> dict[str, tuple[str, float]]:
    """Return the last status and seconds of every step.

    A skipped step keeps what an earlier run says of it.
    """
    found: dict[str, tuple[str, float]] = {}
    for row in rows:
        if row.get("event") == "begin":
            found[row["step"]] = ("killed with the runner", 0.0)
        elif row.get("event") == "end" and not (
            row["status"].startswith("skipped") and row["step"] in found
        ):
            found[row["step"]] = (row["status"], row["wall_s"])
    return found


def rows_of(rows: Iterable[Row], step: str) -> list[Row]:
    """Return what was measured in a step; errors only of the last time."""
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


def status_of(exit_status: int | None, is_over_budget: bool, rows: Sequence[Row]) -> str:
    """Return what an exit status means.

    1 is that of a bench, or of tests, of which something is not met: then a row says so.
    """
    if exit_status is None:
        return "stuck, not even SIGKILL ended it"
    if is_over_budget:
        return "over its budget"
    if exit_status == 0 or (exit_status == 1 and any(row.get("is_met") is False for row in rows)):
        return DONE
    return f"failed with {exit_status}"
