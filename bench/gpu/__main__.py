"""The minutes that one has with a GPU: steps in order of value per second, in one budget of time.

    python3 -m offload.bench.gpu --out proof --budget 560
    python3 -m offload.bench.gpu --out proof --budget 560      # later: what is left

From a checkout with what the image has, nothing installed. Every row is on disk as it is measured,
whatever is killed; behind a step a row tells how it ended, and a step that is done is not repeated
in the same folder. A step is a child in a process group: asked to stop when its time is over, then
killed.

Invariant: when `run_child` returns or raises, nothing of the group runs any more; when this process
is killed, the child is killed with it.
"""

import argparse
import os
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
EXIT_INTERRUPTED = 130
GRACE_S = 5.0  # between asking and making


class Step(NamedTuple):
    """One child process; `{rows}` in its command stands for the file."""

    name: str
    command: tuple[str, ...]  # behind the interpreter
    budget_s: float
    # with less time it is not begun
    least_s: float
    # whether a wrong token makes it pointless
    is_timing: bool = False
    # ... of passes that promise the same bits, or of the others
    is_invariant: bool = True


def _tests(names: str, others: str = "") -> tuple[str, ...]:
    """Name the files of tests for a device: one of the others registers a device of its own."""
    usual = "-m pytest -q -m gpu -o filterwarnings=default --continue-on-collection-errors"
    files = (f"tests/{name}.py" for name in names.split())
    return (*usual.split(), "-p", "no:cacheprovider", *others.split(), *files)


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
    kernels = "-m offload.bench.suite kernels --rows {rows}"
    several = "cpu,cpu" if is_rehearsal else "cuda:0,1"
    cards = f"-m offload.bench.gpu.cards --rows {{rows}} --device {several}"
    workers = "-p xdist -n 8" if find_spec("xdist") else ""
    promised = "enqueue sweeps drafting trees soak memory link accelerate"
    return (
        Step("facts", ("-m", "torch.utils.collect_env"), 40, 5),
        Step("gate", _device("gate", place), 140, 60),
        Step("device", _device(promised, place), 260, 120, is_timing=True),
        Step("plain", _device("plain", place), 90, 50, is_timing=True, is_invariant=False),
        Step("experts", _device("experts", place), 80, 30),
        Step("cards", tuple(cards.split()), 90, 30),
        Step("tests", _tests(_ON_DEVICE), 150, 30),
        Step("kernel-tests", _tests(_OF_KERNELS, workers), 120, 40),
        Step("kernels", tuple(kernels.split()), 80, 30),
        Step("large", _device("sweeps trees memory", large), 330, 200, is_timing=True),
    )


class Files:
    """What a run writes into its folder: rows, a summary, output of children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = folder / "rows.jsonl"
        self.summary = folder / "summary.txt"
        self.log = folder / "log.txt"


def run_steps(steps: Sequence[Step], files: Files, budget_s: float) -> None:
    """Run every step that is not done; at `KeyboardInterrupt` the running one is ended first."""
    known = statuses(read_rows(files.rows))
    end_s = time.monotonic() + budget_s - GRACE_S
    with files.log.open("ab") as log:
        for step in steps:
            if known.get(step.name, ("", 0.0))[0] == DONE:
                continue
            began_s = time.monotonic()
            left_s = end_s - began_s
            status = "interrupted"
            try:
                if step.is_timing and has_wrong_tokens(read_rows(files.rows), step.is_invariant):
                    status = "skipped: wrong tokens"
                elif left_s < step.least_s:
                    status = f"skipped: {max(0.0, left_s):.0f} s are left"
                else:
                    status = _run_step(step, files, min(step.budget_s, left_s), log)
            finally:
                wall_s = round(time.monotonic() - began_s, 1)
                add_row(files.rows, {"step": step.name, "status": status, "wall_s": wall_s})
                print(f"{step.name}: {status}", flush=True)
            write_summary(steps, files)


def write_summary(steps: Sequence[Step], files: Files) -> str:
    """Replace the summary at once, and return it."""
    rows = read_rows(files.rows)
    known = statuses(rows)
    ends = [(step.name, *known.get(step.name, ("not begun", 0.0))) for step in steps]
    lines = [f"{name:14}{wall_s:7.1f} s  {status}" for name, status, wall_s in ends]
    text = "\n".join([*lines, "", *verdict_lines(verdicts(measured(rows)))]) + "\n"
    with replacing(files.summary) as part:
        part.write_text(text, encoding="utf-8")
    return text


def _run_step(step: Step, files: Files, limit_s: float, log: BinaryIO) -> str:
    """Run a step; return its status."""
    print(f"{step.name}: at most {limit_s:.0f} s", flush=True)
    log.write(f"== {step.name}\n".encode())
    log.flush()
    num_before = len(read_rows(files.rows))
    words = [word.replace("{rows}", str(files.rows)) for word in (sys.executable, *step.command)]
    exit_status, is_over = run_child(words, limit_s, log)
    if exit_status is None:
        return "stuck, not even SIGKILL ended it"
    if is_over:
        return "over its budget"
    # of a bench of which something is not met: then a row says so
    added = read_rows(files.rows)[num_before:]
    is_missed = exit_status == 1 and any(row.get("is_met") is False for row in added)
    return DONE if exit_status == 0 or is_missed else f"failed with {exit_status}"


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
    """Return the last status and the seconds of each step."""
    return {row["step"]: (row["status"], row["wall_s"]) for row in rows if "step" in row}


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the measurements of all steps; of two with the same name the later one holds.

    Rows lie before that of their step's end. Errors hold until the step has other rows.
    """
    kept: dict[str, dict[str, Row]] = {}
    since: dict[str, Row] = {}
    for row in rows:
        if "row" in row:
            since[row["row"]] = row
        elif since and "step" in row:
            before = kept.get(row["step"], {}).items()
            kept[row["step"]] = {name: old for name, old in before if not old.get("error")} | since
            since = {}
    return [row for of_step in (*kept.values(), since) for row in of_step.values()]


def has_wrong_tokens(rows: Iterable[Row], is_invariant: bool) -> bool:
    """Return True if a token was wrong in one way of computing; a row may be of both."""
    return any(
        row.get("promise") == "exact" and row.get("is_met") is False
        for row in measured(rows)
        if row.get("is_invariant", is_invariant) is is_invariant
    )


def main(
    arguments: Sequence[str] | None = None, find_steps: Callable[[bool], Sequence[Step]] = all_steps
) -> int:
    """Run the steps and print the summary; the exit status is 130 after Ctrl-C or SIGTERM."""
    names = [step.name for step in find_steps(False)]
    parser = argparse.ArgumentParser(
        prog="python3 -m offload.bench.gpu", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="rows, summary, log; may go on")
    add("--budget", type=float, default=560.0, metavar="S", help="seconds for all steps together")
    add("--steps", nargs="+", choices=names, default=names, help="these alone")
    add("--rehearse", action="store_true", help="on a device that is the host: whether steps run")
    options = parser.parse_args(arguments)
    steps = find_steps(options.rehearse)
    files = Files(options.out.absolute())
    files.folder.mkdir(parents=True, exist_ok=True)
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


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
