"""One result of a bench as JSON: what was measured, where, when and with which code.

Every file has `bench`, `created`, `commit`, `machine`, `settings`, `ceiling`, `rows` and `guards`;
the last are the figures that `--compare` watches. Invariant: what is stored is what was printed,
and a file that lacks any of these names is refused when it is read.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

from offload.errors import UserError, reason
from offload.machine import available_ram_bytes, cpu_name

SCHEMA = 1
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Guard:
    """A figure with the observations behind it."""

    samples: list[float]
    better: Literal["higher", "lower"]
    # of samples that another run repeats, such as its prompts
    labels: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        return median(self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run of one bench."""

    bench: str
    settings: Row
    ceiling: Row
    rows: list[Row]
    guards: dict[str, Guard]
    machine: Row
    created: str
    # the commit of the checkout that it ran from
    commit: str | None

    def as_dict(self) -> Row:
        fields = asdict(self)
        guards = {
            name: {**fields["guards"][name], "value": guard.value}
            for name, guard in self.guards.items()
        }
        return {"schema": SCHEMA, **fields, "guards": guards}


def new_result(
    bench: str, *, settings: Row, ceiling: Row, rows: Sequence[Row], guards: dict[str, Guard]
) -> Result:
    what: Row = {"bench": bench, "settings": settings, "ceiling": ceiling, "rows": list(rows)}
    kept = {name: guard for name, guard in guards.items() if guard.samples}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Result(
        **what, guards=kept, machine=this_machine(), created=now, commit=checkout_commit()
    )


def this_machine() -> Row:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {"num_cores": len(os.sched_getaffinity(0)), "memory_bytes": memory_bytes}
    now = {"available_bytes": available_ram_bytes(), "load_average": os.getloadavg()[0]}
    libraries = {name: version(name) for name in ("torch", "transformers")}
    system = {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    return {"cpu": cpu_name(), **sizes, **now, **system, **libraries}


def checkout_commit() -> str | None:
    """Return this checkout's commit, with a `+` where files differ; None outside of one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None
    ask = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--abbrev=12",
        "--exclude=*",
        "--dirty=+",
    ]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() or None


STDOUT = Path("-")


def store(found: Row, path: Path) -> None:
    """Write what JSON can hold. Raises `UserError` where that cannot be."""
    try:
        with whole(path) as place:
            place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): name another file") from None


def writable(path: Path | None) -> Path | None:
    """Return the path, where a file can be written there. Raises `UserError`.

    It is called before anything is measured.
    """
    if path is not None and path != STDOUT:
        folder = next(
            parent for parent in (path.parent, *path.absolute().parents) if parent.exists()
        )
        why = (
            "it is a folder"
            if path.is_dir()
            else None
            if os.access(folder, os.W_OK)
            else f"{folder} is not yours"
        )
        why = why if folder.is_dir() else f"{folder} is no folder"
        if why or (path.exists() and not os.access(path, os.W_OK)):
            raise UserError(
                f"cannot write {path} ({why or 'it is not yours to write'}): name another file"
            )
    return path


def read(path: Path) -> Result:
    """Return a stored result. Raises `UserError` for anything else."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path} ({reason(error)}): give a file written by offload bench --json"
        ) from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise UserError(f"{path} is no result of offload bench: give a file written with --json")
    names = ("bench", "settings", "ceiling", "rows", "machine", "created", "commit")
    try:
        guards = dict[str, Guard]()
        for name, told in stored["guards"].items():
            guards[name] = Guard(
                [float(value) for value in told["samples"]], told["better"], list(told["labels"])
            )
        return Result(guards=guards, **{name: stored[name] for name in names})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is no whole result of offload bench ({error!r}): measure again"
        ) from None


def partial_path(path: Path) -> Path:
    """Return where `path` is written to until it is whole; the suffix stays, for libraries."""
    return path.with_name(f".writing-{path.name}")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a place to write to, which becomes `path` if the block ends well.

    Folders are made. Raises `OSError`.
    """
    path = path.resolve()  # a link stays one, and what it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    # a pipe or a device takes what is written, and is not to be replaced
    if path.exists() and not path.is_file():
        yield path
        return
    partial = partial_path(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
