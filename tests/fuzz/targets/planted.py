"""Faults put in on purpose, one for each kind of finding: a harness that misses one is no use. Not run by default."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

from case import Target
from damage import flip

from offload.errors import UserError


def _make(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(64))


def _faulty(name: str, fault: Callable[[Path], object]) -> Target:
    """Sound as long as the file is all zeros."""

    def run(folder: Path) -> None:
        if any((folder / "file").read_bytes()):
            fault(folder)

    return Target(f"planted/{name}", _make, {"file": (flip,)}, run)


def _exception(folder: Path) -> None:
    raise KeyError("planted")


def _refused(folder: Path) -> None:
    raise UserError("this is planted: take another file")


def _hang(folder: Path) -> None:
    time.sleep(1000)


def _spin(folder: Path) -> None:
    while True:
        pass


def _crash(folder: Path) -> None:
    ctypes.string_at(0)


def _exit(folder: Path) -> None:
    os._exit(3)


def _address_space(folder: Path) -> None:
    bytearray(1 << 40)


def _resident(folder: Path) -> None:
    bytearray(b"x") * (800 << 20)


def _read_outside(folder: Path) -> None:
    (folder / "../outside/canary.json").read_text()


def _read_outside_in_c(folder: Path) -> None:
    libc = ctypes.CDLL(None)
    libc.close(libc.open(bytes(folder / "../outside/canary.txt"), os.O_RDONLY))


def _write_outside(folder: Path) -> None:
    (folder / "../outside/new").write_text("x")


def _change(folder: Path) -> None:
    (folder / "new").write_text("x")


def _two_lines(folder: Path) -> None:
    error = UserError("a")
    error.args = ("a\nb",)
    raise error


WANTED = {
    "exception": _exception, "refused": _refused, "hang": _hang, "hang-spin": _spin, "crash": _crash,
    "crash-exit": _exit, "exception-space": _address_space, "memory": _resident, "outside": _read_outside,
    "outside-c": _read_outside_in_c, "outside-write": _write_outside, "changed": _change, "message": _two_lines,
}  # fmt: skip

TARGETS = [_faulty(name, fault) for name, fault in WANTED.items()]
