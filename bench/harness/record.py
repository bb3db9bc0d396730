"""What a bench keeps: one result as JSON, and its rows, each on disk before the next is measured.

A result has `bench`, `created`, `commit`, `machine`, `settings`, `ceiling`, `rows` and `guards`;
the last are the figures that `--compare` watches. Rows of a run under way are a line of JSON each,
appended by several processes if need be.

Invariant: what is stored is what was printed, and a file that lacks any of these names is refused
when it is read. At whatever point a process is killed, all rows before are read again.
"""

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from offload.checkpoint.files import replacing
from offload.errors import UserError, reason
from offload.machine import available_ram_bytes, cpu_name

SCHEMA = 1
STDOUT = Path("-")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Guard:
    """A figure with the observations behind it."""

    samples: list[float]
    better: Literal["higher", "lower"]
    # of samples that another run repeats, such as its prompts
    labels: list[str] = field(default_factory=list)


def this_machine() -> Row:
    return {
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_ram_bytes(),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def checkout_commit() -> str | None:
    """Return this checkout's commit, with a `+` where files differ; None outside of one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None
    ask = f"git -C {folder} describe --always --abbrev=12 --exclude=* --dirty=+".split()
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    bench: str
    settings: Row
    ceiling: Row
    rows: list[Row]
    guards: dict[str, Guard]
    machine: Row = field(default_factory=this_machine)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    # the commit of the checkout that it ran from
    commit: str | None = field(default_factory=checkout_commit)

    def as_dict(self) -> Row:
        told = asdict(self)
        for guard in told["guards"].values():
            guard["value"] = median(guard["samples"])
        return {"schema": SCHEMA, **told}


class ProcessorClock:
    """Which share of this machine's processor time others take, from now on."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._others_s = self._taken_s()

    def others_share(self) -> float:
        """Return what was taken by processes that are neither this one nor ended children of it."""
        passed_s = max(1e-3, time.monotonic() - self._started_s)
        share = (self._taken_s() - self._others_s) / passed_s / (os.cpu_count() or 1)
        return min(1.0, max(0.0, share))

    @staticmethod
    def _taken_s() -> float:
        told = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, told)
        all_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return all_s - sum(os.times()[:4])


def store(found: Row, path: Path) -> None:
    """Write what JSON can hold, whole or not at all. Raises `UserError` where that cannot be."""
    text = json.dumps(found, indent=1) + "\n"
    path = path.resolve()  # a link stays one, and what it points to is replaced
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a pipe or a device takes what is written, and is not to be replaced
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        with replacing(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): name another file") from None


def writable(path: Path | None) -> Path | None:
    """Return the path, where a file can be written there. Raises `UserError`.

    It is called before anything is measured.
    """
    if path is None or path == STDOUT:
        return path
    folder = next(one for one in (path.parent, *path.absolute().parents) if one.exists())
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"{folder} is no folder"
    elif not os.access(folder, os.W_OK):
        why = f"{folder} is not yours"
    elif path.exists() and not os.access(path, os.W_OK):
        why = "it is not yours to write"
    if why:
        raise UserError(f"cannot write {path} ({why}): name another file")
    return path


def read(path: Path) -> Result:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        told = f"cannot read {path} ({reason(error)})"
        raise UserError(f"{told}: give a file written by offload bench --json") from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise UserError(f"{path} is no result of offload bench: give a file written with --json")
    if missing := {"machine", "created", "commit"} - stored.keys():
        raise UserError(f"{path} is no whole result of offload bench ({missing}): measure again")
    try:
        return msgspec.convert(stored, Result)
    except msgspec.ValidationError as error:
        told = f"{path} is no whole result of offload bench ({error})"
        raise UserError(f"{told}: measure again") from None


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row, and return when the disk has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        # the last writer was killed within a line
        is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * is_torn + json.dumps(row, default=str) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_rows(path: Path) -> list[Row]:
    """Return all whole rows; what a killed process left of its last line is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    rows = []
    for line in text.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]
