"""Steps one after the other within one budget of time; what happens to one costs the others nothing but time."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from offload.bench.gpu.attempts import DONE, is_wrong, mark_begin, mark_end, rows_of, status_of, statuses
from offload.bench.gpu.child import GRACE_S, run_child
from offload.bench.gpu.steps import Step
from offload.bench.harness.promises import verdict_lines, verdicts
from offload.bench.harness.row_log import read_rows


class Files:
    """What a run writes into its folder: rows and marks between, a summary, all that children say; they add a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows, self.summary, self.log = (folder / name for name in ("rows.jsonl", "summary.txt", "log.txt"))


class _Clock:
    """The budget of all steps: what one leaves unused is the next one's."""

    def __init__(self, budget_s: float, wanted_s: float) -> None:
        self._end = time.monotonic() + budget_s - GRACE_S
        self._scale, self._unused_s = max(1.0, budget_s / max(1.0, wanted_s)), 0.0

    def limit_s(self, step: Step) -> float:
        return min(self._scale * step.budget_s + self._unused_s, self._end - time.monotonic())

    def take(self, step: Step, wall_s: float) -> None:
        self._unused_s = max(0.0, self._unused_s + self._scale * step.budget_s - wall_s)


def run_steps(steps: Sequence[Step], files: Files, budget_s: float) -> None:
    """Every step that is not done yet, and the summary after each.

    Raises:
        KeyboardInterrupt: after the running step has been ended and noted.
    """
    found = statuses(read_rows(files.rows))
    open_steps = [step for step in steps if found.get(step.name, ("",))[0] != DONE or _is_wrong(files, step.name)]
    clock = _Clock(budget_s, sum(step.budget_s for step in open_steps))
    with files.log.open("ab") as log:
        for step in open_steps:
            limit_s = clock.limit_s(step)
            wrong = next((name for name in step.skips_after if _is_wrong(files, name)), None)
            if wrong is not None:
                mark_end(files.rows, step.name, f"skipped: wrong tokens in {wrong}")
            elif limit_s < step.least_s:
                mark_end(files.rows, step.name, f"skipped: {max(0.0, limit_s):.0f} s are left")
            else:
                clock.take(step, _run_step(step, files, limit_s, log))
            write_summary(steps, files)


def write_summary(steps: Sequence[Step], files: Files) -> str:
    """Replace the summary at once, and return it."""
    rows = read_rows(files.rows)
    found, lines, measured = statuses(rows), [], []
    for step in steps:
        own = rows_of(rows, step.name)
        status, wall_s = found.get(step.name, ("not begun", 0.0))
        num_missed = sum(one.get("is_met") is False for one in own)
        lines.append(f"{step.name:14}{wall_s:7.1f} s  {len(own):4} rows  {num_missed:3} missed  {status}")
        measured += own
    text = "\n".join([*lines, "", *verdict_lines(verdicts(measured))]) + "\n"
    part = files.summary.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, files.summary)
    return text


def _run_step(step: Step, files: Files, limit_s: float, log: BinaryIO) -> float:
    """One child to its end; returns the seconds that it took."""
    print(f"{step.name}: at most {limit_s:.0f} s", flush=True)
    log.write(f"== {step.name}\n".encode())
    log.flush()
    mark_begin(files.rows, step.name, limit_s)
    started, status = time.monotonic(), "interrupted"
    try:
        exit_status, is_over = run_child(_command(step.command, files), limit_s, log)
        status = status_of(exit_status, is_over, rows_of(read_rows(files.rows), step.name))
    finally:
        mark_end(files.rows, step.name, status, time.monotonic() - started)
    print(f"{step.name}: {status}", flush=True)
    return time.monotonic() - started


def _command(arguments: Sequence[str], files: Files) -> list[str]:
    filled = [one.replace("{rows}", str(files.rows)).replace("{out}", str(files.folder)) for one in arguments]
    return [sys.executable, *filled]


def _is_wrong(files: Files, step: str) -> bool:
    return is_wrong(rows_of(read_rows(files.rows), step))
