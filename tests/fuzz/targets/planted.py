"""Faults put in on purpose, some for each kind of finding: a harness that misses one is no use. Not run by default."""

import ctypes
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import typer
from case import Target
from damage import flip
from shell import Outcome, shell

from offload.errors import ReadError, UserError

_LIBC = ctypes.CDLL(None)


def _faulty(name: str, fault: Callable[[Path], object]) -> Target:
    """Sound as long as the file is all zeros."""

    def run(folder: Path) -> object:
        path = folder / "file"
        return fault(folder) if any(path.read_bytes()) else None

    return Target(f"planted/{name}", lambda folder: (folder / "file").write_bytes(bytes(64)), {"file": (flip,)}, run)


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


WANTED: dict[str, Callable[[Path], object]] = {
    "refused": _raising(UserError("this is planted: take another file")),
    "failed": _failing(ReadError("a file was cut short")),
    "exception": _raising(KeyError("planted")),
    "message": _raising(UserError("a"), "a\nb"),
    "hang": lambda folder: time.sleep(1000),
    "crash": lambda folder: ctypes.string_at(0),
    "memory": lambda folder: bytearray(b"x") * (160 << 20),
    "changed": lambda folder: (folder / "new").write_text("x"),
    "outside-c": _read_in_c,
    "outside-write": lambda folder: (folder / "../outside/new").write_text("x"),
    "outside-send": lambda folder: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
}

TARGETS = [_faulty(name, fault) for name, fault in WANTED.items()]
