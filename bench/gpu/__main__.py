"""The minutes that one has with a GPU: steps in order of value per second, in one budget of time.

    python3 -m offload.bench.gpu --out first --budget 560
    python3 -m offload.bench.gpu --out second --budget 560 --resume first/rows.jsonl

From a checkout with what the image has, nothing installed. Every row is on disk as it is measured,
whatever is killed. The file of rows has a mark where each step begins and ends, and rows between
are that step's. A step that was begun several times counts with all its rows; of two with the same
name the later one holds. A step is a child in a process group: asked to stop when its time is over,
then killed.

Invariant: when `run_child` returns or raises, nothing of the group runs any more; when this process
is killed, the child is killed with it.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from offload.bench.harness.process import ROOT, die_with_parent
from offload.bench.harness.record import add_row, read_rows
from offload.bench.harness.tables import Row, verdict_lines, verdicts
from offload.checkpoint.files import replacing
from offload.machine import available_ram_bytes

_ON_DEVICE = "streaming/test_on_a_device streaming/test_device_path "
_ON_DEVICE += "streaming/test_device sampling/test_sampler"
_OF_KERNELS = "kernels/test_kernels kernels/test_path_attention kernels/test_rms_norm "
_OF_KERNELS += "kernels/test_expansions calibration/test_kernel_selection"

DONE = "done"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
GRACE_S = 5.0  # between asking and making


class Step(NamedTuple):
    """One child process; `{rows}` and `{out}` in its command stand for the file and the folder."""

    name: str
    command: tuple[str, ...]  # behind the interpreter
    budget_s: float  # its share; what earlier steps left unused comes on top
    # with less time it is not begun
    least_s: float
    skips_after: tuple[str, ...] = ()  # steps whose wrong token makes this one pointless
    # whether it is wrong tokens of passes that promise the same bits, or of the others
    is_invariant: bool = True


def _tests(names: str, others: str = "") -> tuple[str, ...]:
    """Name the files of tests for a device: one of the others registers a device of its own."""
    usual = "-m pytest -q -m gpu -o filterwarnings=default --continue-on-collection-errors"
    rows = "-p no:cacheprovider -p offload.bench.gpu.pytest_rows --rows {rows}"
    files = (f"tests/{name}.py" for name in names.split())
    return (*usual.split(), *rows.split(), *others.split(), *files)


def _device(parts: str, place: str) -> tuple[str, ...]:
    named = (word for part in parts.split() for word in ("--part", part))
    return ("-m", "offload.bench.suite", "device", "--rows", "{rows}", *named, *place.split())


# With room for a 7B draft's tree of as many nodes as the largest sweep has rows, and layers that
# stream all the same.
_ON_GPU = "--device cuda --gpu-mem 32GiB --ram 100GiB"
# of host memory for the 67 of 80 layers that 45 GiB of a GPU have no room for, and for the program
_WHOLE_BYTES = 116 << 30


def all_steps(is_rehearsal: bool) -> tuple[Step, ...]:
    """Return the table on this machine; the large model is for what is left of a second call.

    It is the whole one in the memory of an L40, or what this machine's memory holds of it.
    """
    place = f"{_ON_GPU} --layers 18"
    large = "--device cuda --gpu-mem 45GiB --ram 128GiB --layers 80"
    if available_ram_bytes() < _WHOLE_BYTES:
        large = f"{_ON_GPU} --layers 40"
    if is_rehearsal:
        place = large = "--device pretend --layers 8"
    facts = "-m offload.bench.gpu.machine_facts --rows {rows}"
    kernels = "-m offload.bench.suite kernels --rows {rows}"
    several = "cpu,cpu" if is_rehearsal else "cuda:0,1"
    cards = f"-m offload.bench.gpu.cards --rows {{rows}} --device {several}"
    workers = "-p xdist -n 8" if find_spec("xdist") else ""
    promised = "enqueue sweeps drafting trees trace soak memory link accelerate"
    traced = f"--trace {{out}}/trace.json {place}"
    gate = ("gate",)
    return (
        Step("facts", tuple(facts.split()), 25, 5),
        Step("gate", _device("gate", place), 140, 60),
        Step("device", _device(promised, traced), 260, 120, gate),
        Step("plain", _device("plain", place), 90, 50, gate, is_invariant=False),
        Step("experts", _device("experts", place), 80, 30),
        Step("cards", tuple(cards.split()), 90, 30),
        Step("tests", _tests(_ON_DEVICE), 150, 30),
        Step("kernel-tests", _tests(_OF_KERNELS, workers), 120, 40),
        Step("kernels", tuple(kernels.split()), 80, 30),
        Step("large", _device("sweeps trees memory", large), 330, 200, gate),
    )


class Files:
    """What a run writes into its folder: rows and marks, a summary, output of children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = folder / "rows.jsonl"
        self.summary = folder / "summary.txt"
        self.log = folder / "log.txt"

    def end(self, step: Step, status: str, wall_s: float = 0.0) -> None:
        event = {"step": step.name, "event": "end", "status": status, "wall_s": round(wall_s, 1)}
        add_row(self.rows, event)

    def is_wrong(self, step: str, is_invariant: bool | None = None) -> bool:
        """Return True if a token was wrong, in the way of computing that `is_invariant` names.

        A row that says of neither way is of both.
        """
        return any(
            row.get("promise") == "exact" and row.get("is_met") is False
            for row in rows_of(read_rows(self.rows), step)
            if is_invariant is None or row.get("is_invariant", is_invariant) is is_invariant
        )


def run_steps(steps: Sequence[Step], files: Files, budget_s: float) -> None:
    """Run every step that is not done; at `KeyboardInterrupt` the running one is ended first."""
    known = statuses(read_rows(files.rows))
    done = {name for name, (status, _) in known.items() if status == DONE}
    open_steps = [step for step in steps if step.name not in done or files.is_wrong(step.name)]
    end_s = time.monotonic() + budget_s - GRACE_S
    scale = max(1.0, budget_s / max(1.0, sum(step.budget_s for step in open_steps)))
    unused_s = 0.0
    with files.log.open("ab") as log:
        for step in open_steps:
            share_s = scale * step.budget_s + unused_s
            limit_s = min(share_s, end_s - time.monotonic())
            wrong = [
                needed for needed in step.skips_after if files.is_wrong(needed, step.is_invariant)
            ]
            if wrong:
                files.end(step, f"skipped: wrong tokens in {wrong[0]}")
            elif limit_s < step.least_s:
                files.end(step, f"skipped: {max(0.0, limit_s):.0f} s are left")
            else:
                unused_s = max(0.0, share_s - _run_step(step, files, limit_s, log))
            write_summary(steps, files)


def write_summary(steps: Sequence[Step], files: Files) -> str:
    """Replace the summary at once, and return it."""
    rows = read_rows(files.rows)
    known = statuses(rows)
    lines = []
    measured = []
    for step in steps:
        step_rows = rows_of(rows, step.name)
        status, wall_s = known.get(step.name, ("not begun", 0.0))
        num_missed = sum(row.get("is_met") is False for row in step_rows)
        counts = f"{len(step_rows):4} rows  {num_missed:3} missed"
        lines.append(f"{step.name:14}{wall_s:7.1f} s  {counts}  {status}")
        measured += step_rows
    text = "\n".join([*lines, "", *verdict_lines(verdicts(measured))]) + "\n"
    with replacing(files.summary) as part:
        part.write_text(text, encoding="utf-8")
    return text


def _run_step(step: Step, files: Files, limit_s: float, log: BinaryIO) -> float:
    print(f"{step.name}: at most {limit_s:.0f} s", flush=True)
    log.write(f"== {step.name}\n".encode())
    log.flush()
    add_row(files.rows, {"step": step.name, "event": "begin", "limit_s": round(limit_s, 1)})
    words = [
        word.replace("{rows}", str(files.rows)).replace("{out}", str(files.folder))
        for word in (sys.executable, *step.command)
    ]
    started = time.monotonic()
    status = "interrupted"
    try:
        exit_status, is_over = run_child(words, limit_s, log)
        step_rows = rows_of(read_rows(files.rows), step.name)
        # of a bench, or of tests, of which something is not met: then a row says so
        is_missed = exit_status == 1 and any(row.get("is_met") is False for row in step_rows)
        if exit_status is None:
            status = "stuck, not even SIGKILL ended it"
        elif is_over:
            status = "over its budget"
        else:
            status = DONE if exit_status == 0 or is_missed else f"failed with {exit_status}"
    finally:
        files.end(step, status, time.monotonic() - started)
    print(f"{step.name}: {status}", flush=True)
    return time.monotonic() - started


def run_child(command: Sequence[str], limit_s: float, log: BinaryIO) -> tuple[int | None, bool]:
    """Return the exit status of a child, None where not even SIGKILL ended it, and whether it
    took too long. Where the wait is interrupted, the child is ended as at its limit.
    """
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        return child.wait(limit_s), False
    except subprocess.TimeoutExpired:
        return _end(child), True
    except KeyboardInterrupt:
        _end(child)
        raise
    finally:
        with suppress(ProcessLookupError):  # all that it has started have ended
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


def _end(child: "subprocess.Popen[bytes]") -> int | None:
    """Ask the group to end, wait, then kill it; a second Ctrl-C shortens the wait."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            return child.wait(GRACE_S)
    return None


def statuses(rows: Iterable[Row]) -> dict[str, tuple[str, float]]:
    """Return the last status and seconds of each step; a skipped one keeps its earlier ones."""
    known: dict[str, tuple[str, float]] = {}
    for row in rows:
        if row.get("event") == "begin":
            known[row["step"]] = ("killed with the runner", 0.0)
        elif row.get("event") == "end" and not (
            row["status"].startswith("skipped") and row["step"] in known
        ):
            known[row["step"]] = (row["status"], row["wall_s"])
    return known


def rows_of(rows: Iterable[Row], step: str) -> list[Row]:
    """Return the measurements of a step; errors only of the last time."""
    kept: dict[str, Row] = {}
    current = None
    for row in rows:
        if row.get("event") == "begin":
            current = row["step"]
            if current == step:
                kept = {name: row for name, row in kept.items() if not row.get("error")}
        elif row.get("event") == "end":
            current = None
        elif current == step and "row" in row:
            kept.pop(row["row"], None)
            kept[row["row"]] = row
    return list(kept.values())


def main(
    arguments: Sequence[str] | None = None, find_steps: Callable[[bool], Sequence[Step]] = all_steps
) -> int:
    """Run the steps and print the summary; the exit status is 130 after Ctrl-C or SIGTERM."""
    names = [step.name for step in find_steps(False)]
    parser = argparse.ArgumentParser(
        prog="python3 -m offload.bench.gpu", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="for rows, summary and log")
    add("--budget", type=float, default=560.0, metavar="S", help="seconds for all steps together")
    add("--steps", nargs="+", choices=names, default=names, help="these alone")
    add("--resume", type=Path, metavar="FILE", help="a rows.jsonl: what is done is not repeated")
    add("--rehearse", action="store_true", help="on a device that is the host: whether steps run")
    options = parser.parse_args(arguments)
    steps = find_steps(options.rehearse)
    files = Files(options.out.absolute())
    if refusal := _prepare(files, options.resume):
        print(f"error: {refusal}", file=sys.stderr)
        return EXIT_USAGE
    # Shells start background jobs with SIGINT ignored, and children would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        run_steps([step for step in steps if step.name in options.steps], files, options.budget)
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        print(write_summary(steps, files), end="", flush=True)


def _prepare(files: Files, resumed: Path | None) -> str | None:
    """Bring the rows of an earlier run along; return what the user must mend."""
    if resumed is not None and not resumed.is_file():
        return f"--resume {resumed} is no file: name the rows.jsonl of an earlier run"
    is_same = resumed is not None and files.rows.exists() and resumed.samefile(files.rows)
    if files.rows.exists() and not is_same:
        return f"--out {files.folder} holds the rows of another run: name another folder, or --resume {files.rows}"
    files.folder.mkdir(parents=True, exist_ok=True)
    if resumed is not None and not is_same:
        shutil.copyfile(resumed, files.rows)
    return None


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
