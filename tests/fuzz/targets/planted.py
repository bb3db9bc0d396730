"""Faults put in on purpose, some for each kind of finding: a harness that misses one is no use. Not run by default."""

import ctypes
import os
import random
import socket
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from unittest.mock import patch

import typer
from case import Damage, Target
from damage import flip
from shell import Outcome, shell

from offload.errors import ReadError, UserError

_LIBC = ctypes.CDLL(None)
_TRACE = "Traceback (most recent call last):\n"


def _faulty(name: str, fault: Callable[[Path], object], damage: Damage = flip) -> Target:
    """Sound as long as the file is all zeros."""

    def run(folder: Path) -> object:
        path = folder / "file"
        return fault(folder) if path.is_symlink() or any(path.read_bytes()) else None

    return Target(f"planted/{name}", lambda folder: (folder / "file").write_bytes(bytes(64)), {"file": (damage,)}, run)


def _failing(error: Exception) -> Callable[[Path], Outcome]:
    """The command line, in which something fails that is not expected there."""

    def fail(folder: Path) -> Outcome:
        with patch.object(typer.main, "get_command", side_effect=error):
            return shell("plan")

    return fail


def _raising(error: Exception, *arguments: str) -> Callable[[Path], None]:
    def fail(folder: Path) -> None:
        error.args = arguments or error.args
        raise error

    return fail


def _read_in_c(folder: Path) -> None:
    _LIBC.close(_LIBC.open(bytes(folder / "../outside/canary.txt"), os.O_RDONLY))


def _link_inside(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.symlink_to(rng.choice(("not-there", "..", ".")))
    return "a link"


WANTED: dict[str, Callable[[Path], object]] = {
    "refused": _raising(UserError("this is planted: take another file")),
    "failed": _failing(ReadError("a file was cut short")),
    "exception": _raising(KeyError("planted")),
    "exception-space": lambda folder: bytearray(1 << 40),
    "exception-cli": _failing(OSError(5, "planted")),
    "exception-trace": lambda folder: Outcome(0, "", _TRACE),
    "exception-trace-c": lambda folder: os.write(2, _TRACE.encode()),
    "message": _raising(UserError("a"), "a\nb"),
    "hang": lambda folder: time.sleep(1000),
    "hang-spin": lambda folder: any(repeat(0)),
    "crash": lambda folder: ctypes.string_at(0),
    "crash-exit": lambda folder: os._exit(3),
    "memory": lambda folder: bytearray(b"x") * (160 << 20),
    "memory-cli": _failing(MemoryError()),
    "memory-torch": _failing(RuntimeError("x: can't allocate memory")),
    "changed": lambda folder: (folder / "new").write_text("x"),
    "outside": lambda folder: (folder / "../outside/canary.json").read_text(),
    "outside-c": _read_in_c,
    "outside-system": lambda folder: Path("/etc/passwd").read_text(),
    "outside-folder": lambda folder: os.listdir("/"),
    "outside-write": lambda folder: (folder / "../outside/new").write_text("x"),
    "outside-rename": lambda folder: (folder / "file").rename(folder.parent / "stray"),
    "outside-link": lambda folder: os.link(folder / "file", folder.parent / "another"),
    "outside-symlink": lambda folder: os.symlink("../../outside/canary.txt", folder / "stray"),
    "outside-send": lambda folder: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
    "outside-names": lambda folder: socket.getaddrinfo("localhost", 80),
}

TARGETS = [_faulty(name, fault) for name, fault in WANTED.items()]
TARGETS += [_faulty("outside-linked", _read_in_c, _link_inside)]
