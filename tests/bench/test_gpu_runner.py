"""The runner of steps with a GPU, on steps that are tiny processes: each is killed once, and nothing that was measured
is lost.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from matrix import matrix
from shell import ROOT

from offload.bench.gpu import __main__ as runner
from offload.bench.gpu.__main__ import Files, Step, all_steps, main, measured, statuses
from offload.bench.gpu.cards import WAYS
from offload.bench.harness.record import read_rows

ADD = "from offload.bench.harness.record import add_row; from pathlib import Path; import os, signal, sys, time\n"
ADD += "def add(name, **more):\n"
ADD += " add_row(Path('{rows}'), {'row': name, 'value': 1.0, 'unit': 's', 'ratio': None, **more})\n"
_MOST_S = 1500.0  # of all steps together; one has ten minutes at most, as a call with a device does
HANG = "\nwhile True: time.sleep(60)"
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN); "


def step(name: str, code: str, budget_s: float = 20.0, **options: Any) -> Step:
    return Step(name, ("-c", ADD + code), budget_s, 0.0, **options)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runner, "GRACE_S", 0.4)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(folder: Path, *steps: Step) -> int:
    budget_s = sum(each.budget_s for each in steps)
    return main(["--out", str(folder), "--budget", str(budget_s)], lambda is_rehearsal: steps)


def names_in(folder: Path) -> list[str]:
    return [row["row"] for row in measured(read_rows(Files(folder).rows))]


def ends_in(folder: Path) -> list[str]:
    """Return the steps in the order of their ends."""
    return [row["step"] for row in read_rows(Files(folder).rows) if "step" in row]


def status(folder: Path, name: str) -> str:
    return statuses(read_rows(Files(folder).rows))[name][0]


SAYS_MORE = "try: time.sleep(60)\nexcept KeyboardInterrupt: add('late')"
ENDS = {  # what a step does after its first row, its budget, and what is then said of it
    "is over": ("", 20.0, "done"),
    "misses a promise": ("add('two', is_met=False); sys.exit(1)", 20.0, "done"),
    "cannot be imported": ("import nothing_of_the_kind", 20.0, "failed with 1"),
    "is refused": ("sys.exit(2)", 20.0, "failed with 2"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 20.0, "failed with -9"),
    "is killed within a line": ("open('{rows}', 'ab', 0).write(b'{\"row\": \"ha'); os._exit(9)", 20.0, "failed with 9"),
    "hangs": (HANG, 3.0, "over its budget"),
    "hangs and is deaf": (DEAF + HANG, 3.0, "over its budget"),
    "says more when it is interrupted": (SAYS_MORE, 3.0, "over its budget"),
}  # fmt: skip


@matrix("ending", ENDS, daily=3)
def test_a_step_that_ends_in_any_way_keeps_its_rows_and_stops_no_other(ending: str, tmp_path: Path) -> None:
    code, budget_s, said = ENDS[ending]
    steps = step("first", "add('one')\n" + code, budget_s), step("second", "add('other')")
    out = tmp_path / "out"
    assert run(out, *steps) == 0
    names = names_in(out)
    assert names[0] == "one" and names[-1] == "other"
    assert status(out, "first") == said and status(out, "second") == "done"
    assert ("late" in names) == ("interrupted" in ending)
    assert f"{said}\n" in Files(out).summary.read_text() and len(list(out.iterdir())) <= 8
    assert run(out, *steps) == 0
    again = ["first"] if said != "done" else []
    assert ends_in(out) == ["first", "second", *again], "what is done is not repeated"


@pytest.mark.full
def test_nothing_of_a_step_outlives_it(tmp_path: Path) -> None:
    """Not even what a step has started and forgotten."""
    code = "import subprocess\npid = subprocess.Popen(['sleep', '60']).pid; add('pid', pid=pid)"
    run(tmp_path / "out", step("hangs", code + HANG, 1.0), step("ends", code))
    pids = [row["pid"] for row in read_rows(Files(tmp_path / "out").rows) if "pid" in row]
    assert len(pids) == 2 and all(is_gone(pid) for pid in pids)


def test_a_wrong_token_skips_timings_and_nothing_else(tmp_path: Path) -> None:
    wrong = "add('gate: failed', promise='exact', is_met=False, error='wrong'); sys.exit(2)"
    others = step("timing", "add('fast')", is_timing=True), step("tests", "add('green')")
    out = tmp_path / "out"
    run(out, step("gate", wrong), *others)
    assert status(out, "timing") == "skipped: wrong tokens" and names_in(out) == ["gate: failed", "green"]
    assert "MISSED exact" in Files(out).summary.read_text()
    run(out, step("gate", "add('gate: equal', promise='exact', is_met=True)"), *others)
    assert "fast" in names_in(out) and "met    exact" in Files(out).summary.read_text()
    assert ends_in(out) == ["gate", "timing", "tests", "gate", "timing"]


@contextmanager
def running(out: Path, code: str) -> "Iterator[tuple[subprocess.Popen[bytes], int]]":
    """The runner as a process of its own with one step that hangs, and the id of that step's process."""
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from offload.bench.gpu.__main__ import Step, main
code = {ADD + "add('pid', pid=os.getpid());" + code!r}
steps = [Step("hangs", ("-c", code), 60.0, 0.0), Step("later", ("-c", code), 60.0, 0.0)]
sys.exit(main(["--out", {str(out)!r}], lambda _: steps))
"""
    ran = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        pid = wait_for(lambda: next((row["pid"] for row in read_rows(Files(out).rows) if "pid" in row), None))
        yield ran, pid
    finally:
        ran.kill()
        ran.communicate()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_ends_all_of_it(number: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path / "out", "time.sleep(60)") as (ran, pid):
        ran.send_signal(number)
        out, err = ran.communicate(timeout=20)
    assert ran.returncode == 130 and not err, err
    assert is_gone(pid) and status(tmp_path / "out", "hangs") == "interrupted"
    assert b"interrupted" in out and b"open   exact" in out
    assert b"not begun" in out and ends_in(tmp_path / "out") == ["hangs"]


@pytest.mark.full
def test_a_runner_that_is_killed_takes_its_step_along(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running(out, DEAF + "time.sleep(60)") as (ran, pid):
        ran.kill()
        ran.wait()
        assert is_gone(pid)
    assert names_in(out) == ["pid"] and not ends_in(out)
    run(out, step("hangs", "add('more')"))
    assert names_in(out) == ["pid", "more"] and status(out, "hangs") == "done"


def test_what_the_table_names_is_there() -> None:
    from importlib.util import find_spec

    for planned in (*all_steps(True), *all_steps(False)):
        modules = [
            word for flag, word in zip(planned.command, planned.command[1:], strict=False) if flag in ("-m", "-p")
        ]
        assert all(find_spec(name) for name in modules if name.startswith("offload.")), planned
        assert all((ROOT / word).is_file() for word in planned.command if word.startswith("tests/")), planned
        assert planned.least_s <= planned.budget_s <= _MOST_S / 2
    names = [planned.name for planned in all_steps(False)]
    assert names == [planned.name for planned in all_steps(True)] and names[:3] == ["facts", "gate", "device"]
    assert sum(planned.budget_s for planned in all_steps(False)) <= _MOST_S
    assert json.dumps([planned._asdict() for planned in all_steps(False)]).count("{rows}") == len(all_steps(False)) - 3


def is_gone(pid: int) -> bool:
    """Within a second, for a signal takes a moment."""
    return bool(wait_for(lambda: not _runs(pid), 1.0))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # dead, and not waited for


def wait_for(ask: Callable[[], Any], most_s: float = 20.0) -> Any:
    give_up = time.monotonic() + most_s
    while not (answer := ask()) and time.monotonic() < give_up:
        time.sleep(0.02)
    return answer


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu,cpu", "cuda:0,1"])
def test_two_cards_are_rehearsed_and_skipped_by_name_where_there_are_not_two(device: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "offload.bench.gpu.cards", "--rows", str(tmp_path / "rows"), "--device", device]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=200)
    rows = read_rows(tmp_path / "rows")
    exact = [row["row"] for row in rows if row["promise"] == "exact" and row["is_met"]]
    assert len(exact) == (len(WAYS) if device == "cpu,cpu" else 0)
    assert device == "cpu,cpu" or [row["row"] for row in rows] == ["cards: skipped, 2 are wanted"]
