"""Builds the shim, keeps the warm process, and hands it cases."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from faults.calls import ANY, Fault

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_SILENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}

_PATIENCE_S, _WRITING_S = 120.0, 0.3
_USUAL: dict[str, object] = {
    "limits": {},  # of `files`, or of `file_bytes` in each
    "meanwhile": [],  # how, and which file, is damaged where the command stops
    "visits": [],  # requests to a server at the `port`
    "port": 0,
    "timeout_s": 60.0,
    "is_rehearsal": False,  # in the warm process itself
    "is_recorded": False,  # where its calls come from
    "is_blind": False,  # to a file that was changed
}


class Ended(NamedTuple):
    """How a command has ended; a signal that killed it is a negative code."""

    code: int
    out: str
    err: str
    seconds: float
    is_hung: bool
    is_struck: bool = True  # false where the fault waits for a call that never came
    replies: tuple[str, ...] = ()  # to the requests of the visitor


class Forge:
    """A warm process, and a folder `root` outside of which nothing is counted."""

    def __init__(self, folder: Path) -> None:
        if not hasattr(ctypes.pythonapi, "_Py_DumpTraceback"):  # by which the shim knows places in a program
            raise SystemExit("faults need a Python that exports _Py_DumpTraceback: 3.12, or an earlier one")
        self.root, self._place = folder / "root", folder / "place"
        self._place.mkdir()
        self._told = self._place / "replies"
        shim = folder / "shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-o", shim, HERE / "shim.c", "-ldl"], check=True)
        environment = {**os.environ, **_SILENT, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(shim)}
        environment.pop("TRITON_INTERPRET", None)
        command, pipe = [sys.executable, str(HERE / "warm.py")], subprocess.PIPE
        self._warm = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True, bufsize=1)

    def run(
        self, argv: Sequence[object], fault: Fault | None = None, at: int = 1, *, stdin: str = "", **options: object
    ) -> Ended:
        """A command under a fault at the so-many-th call; `how` else as in `_USUAL`."""
        assert options.keys() <= _USUAL.keys(), options
        self._told.unlink(missing_ok=True)
        (self._place / "in").write_text(stdin)
        case = {
            "argv": [*map(str, argv)],
            "fault": [fault.call, at, fault.kind, fault.value, int(fault.is_lasting)] if fault else None,
            "root": str(self.root),
            "place": str(self._place),
            "environment": self._own(),
        }
        ended = self._ask({**case, **_USUAL, **options})
        out, err = ((self._place / name).read_bytes().decode(errors="replace") for name in ("out", "err"))
        return Ended(out=out, err=err, replies=self._replies(), **ended)

    def interrupt(
        self,
        argv: Sequence[object],
        signals: Sequence[tuple[float, int]],
        *,
        stdin: str,
        visits: Sequence[str],
        port: int,
    ) -> Ended:
        """As a process of its own, which has to import everything; signals come that many seconds after each other."""
        command, begun_s, pipe = [sys.executable, "-m", "offload", *map(str, argv)], time.monotonic(), subprocess.PIPE
        environment = {**os.environ, **_SILENT, **self._own(), "PYTHONPATH": str(ROOT)}
        self._told.unlink(missing_ok=True)
        running = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True)
        with self._visited(visits, port, running.pid):
            (out, err), is_struck, is_hung = _heard(running, stdin, signals)
            seconds = time.monotonic() - begun_s
        return Ended(running.returncode, out, err, seconds, is_hung, is_struck, self._replies())

    @contextmanager
    def _visited(self, visits: Sequence[str], port: int, process: int) -> Iterator[None]:
        if not visits:
            yield
            return
        visitor = subprocess.Popen(
            [sys.executable, "-S", HERE / "visit.py", str(port), json.dumps([*visits]), str(process), self._told]
        )
        yield
        with suppress(subprocess.TimeoutExpired):
            visitor.wait(_WRITING_S)
        visitor.kill()
        visitor.wait()

    def sites(self) -> dict[int, list[list[int]]]:
        """Return, for the run that was recorded last, by kind, the numbers of calls that come from the same place."""
        mapping: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        for entry in (self._place / "calls").read_text(errors="replace").split("@ ")[1:]:
            head, _, trace = entry.partition("\n")
            call, number, of_any = map(int, head.split())
            numbers, all_numbers = mapping.setdefault((call, trace or str(number)), ([], []))
            numbers.append(number)
            all_numbers += [of_any] if of_any else []
        by_call: dict[int, list[list[int]]] = {}
        for (call, _), (numbers, all_numbers) in mapping.items():
            by_call.setdefault(call, []).append(numbers)
            by_call.setdefault(ANY, []).append(all_numbers)
        return by_call

    def close(self) -> None:
        """End the warm process."""
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait(timeout=2 * _PATIENCE_S)
        self._warm.stdout.close()

    def _own(self) -> dict[str, str]:
        return {"XDG_CACHE_HOME": f"{self.root}/cache", "XDG_CONFIG_HOME": f"{self.root}/config"}

    def _ask(self, wish: Mapping[str, Any]) -> Any:
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(wish) + "\n")
        return json.loads(self._warm.stdout.readline())

    def _replies(self) -> tuple[str, ...]:
        return tuple(json.loads(self._told.read_text())) if self._told.exists() else ()


def _heard(
    running: "subprocess.Popen[str]", stdin: str | None, signals: Sequence[tuple[float, int]]
) -> tuple[tuple[str, str], bool, bool]:
    """What it prints; whether all signals came before its end; whether it had to be killed."""
    for after_s, number in signals:
        try:
            return running.communicate(stdin, after_s), False, False
        except subprocess.TimeoutExpired:
            running.send_signal(number)
            stdin = None
    try:
        return running.communicate(stdin, _PATIENCE_S), True, False
    except subprocess.TimeoutExpired:
        running.kill()
        return running.communicate(), True, True


def restore(root: Path, pristine: Path) -> None:
    """The folder as it was before anything ran in it; paths and times of files are the same."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(pristine, root, symlinks=True)
