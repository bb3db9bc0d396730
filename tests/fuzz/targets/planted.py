"""Faults put in on purpose, one for each kind of finding: a harness that misses one is no use. Not run by default."""

import ctypes
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from case import Damage, Target
from damage import flip
from shell import Outcome, cli, shell

from offload.errors import ReadError, UserError


def _make(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(64))


def _faulty(name: str, fault: Callable[[Path], object], damage: Damage = flip) -> Target:
    """Sound as long as the file is all zeros."""

    def run(folder: Path) -> object:
        path = folder / "file"
        return fault(folder) if path.is_symlink() or any(path.read_bytes()) else None

    return Target(f"planted/{name}", _make, {"file": (damage,)}, run)


def _failing(error: Exception) -> Callable[[Path], Outcome]:
    """The command line, in which something fails that nobody expects there."""

    def fail(folder: Path) -> Outcome:
        with patch.object(cli.typer.main, "get_command", side_effect=error):
            return shell("plan")

    return fail


def _link_inside(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.symlink_to(rng.choice(("not-there", "..", ".")))
    return "a link"


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


def _trace(folder: Path) -> Outcome:
    return Outcome(0, "", "Traceback (most recent call last):\n")


def _trace_in_c(folder: Path) -> None:
    os.write(2, b"Traceback (most recent call last):\n")


def _read_system(folder: Path) -> None:
    Path("/etc/passwd").read_text()


def _rename(folder: Path) -> None:
    (folder / "file").rename(folder.parent / "stray")


def _link(folder: Path) -> None:
    os.link(folder / "file", folder.parent / "another")


def _link_away(folder: Path) -> None:
    os.symlink("../../outside/canary.txt", folder / "stray")


def _send(folder: Path) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as opened:
        opened.sendto(b"planted", ("127.0.0.1", 9))


def _ask_names(folder: Path) -> None:
    socket.getaddrinfo("localhost", 80)


WANTED = {
    "exception": _exception, "refused": _refused, "hang": _hang, "hang-spin": _spin, "crash": _crash,
    "crash-exit": _exit, "exception-space": _address_space, "memory": _resident, "outside": _read_outside,
    "outside-c": _read_outside_in_c, "outside-write": _write_outside, "changed": _change, "message": _two_lines,
    "memory-cli": _failing(MemoryError()), "memory-torch": _failing(RuntimeError("x: can't allocate memory")),
    "exception-cli": _failing(OSError(5, "planted")), "failed": _failing(ReadError("a file was cut short")),
    "exception-trace": _trace, "exception-trace-c": _trace_in_c, "outside-system": _read_system,
    "outside-rename": _rename, "outside-link": _link, "outside-symlink": _link_away, "outside-send": _send,
    "outside-names": _ask_names,
}  # fmt: skip

TARGETS = [_faulty(name, fault) for name, fault in WANTED.items()]
TARGETS += [_faulty("outside-linked", _read_outside_in_c, _link_inside)]
