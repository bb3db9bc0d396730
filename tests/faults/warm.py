"""A process that has imported everything, and forks for every case: a command under a fault takes 0.3 s, not 6.

It is started with the shim before the C library (see `forge.py`), reads cases as lines of JSON, and answers each.
"""

import ctypes
import gc
import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from visit import visit

_LIMITS = {"files": resource.RLIMIT_NOFILE, "file_bytes": resource.RLIMIT_FSIZE}
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WORD_BYTES = 4
_ASK_S, _WRITING_S = 0.005, 0.1  # the latter has a visitor, to write what it has heard


def main() -> None:
    shim = ctypes.CDLL(None)
    shim.faults_mark.restype = ctypes.POINTER(ctypes.c_ubyte)
    mark = shim.faults_mark()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    for line in sys.stdin:
        case = json.loads(line)
        place = Path(case["place"])
        mark[0] = not case["fault"]
        process = os.getpid() if case["is_rehearsal"] else os.fork()
        if process == 0:
            _become(case, place, shim)
            return  # as the interpreter ends: what it prints then counts, too
        visitor = _visitor(case, process, place) if case["visits"] else 0
        outcome = _rehearse(case, place) if case["is_rehearsal"] else _watched(case, process)
        if visitor:
            time.sleep(_WRITING_S)
            os.kill(visitor, signal.SIGKILL)
            os.waitpid(visitor, 0)
        answers.write(json.dumps(outcome | {"is_struck": bool(mark[0])}) + "\n")


def _rehearse(case: dict[str, Any], place: Path) -> dict[str, Any]:
    """Once in this process: afterwards no child has to import, compile or look up what all of them need."""
    streams, files = (sys.stdin, sys.stdout, sys.stderr), [os.dup(number) for number in range(3)]
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    _redirect(place)
    _begin(case)
    try:
        _offload()
    except SystemExit as leaving:
        code = leaving.code
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.stdout.flush()
    for number, saved in enumerate(files):
        os.dup2(saved, number)
        os.close(saved)
    sys.stdin, sys.stdout, sys.stderr = streams
    gc.collect()
    gc.freeze()
    return {"code": code, "seconds": 0.0, "is_hung": False}


def _offload() -> None:
    from offload.__main__ import main as run

    run()


def _become(case: dict[str, Any], place: Path, shim: ctypes.CDLL) -> None:
    os.setpgid(0, 0)
    _redirect(place)
    _begin(case)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, most in case["limits"].items():
        resource.setrlimit(_LIMITS[name], (most, most))
    shim.faults_watch(case["root"].encode())
    if case["is_recorded"]:
        shim.faults_record(os.open(place / "calls", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    if case["fault"]:
        call, at, kind, value, is_lasting = case["fault"]
        shim.faults_arm(call, ctypes.c_long(at), kind, ctypes.c_long(value), is_lasting)
    _offload()


def _redirect(place: Path) -> None:
    """Standard streams are files, in objects like those of a new interpreter."""
    for number, name in enumerate(("in", "out", "err")):
        opened = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    errors = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(errors, "utf-8", "backslashreplace", line_buffering=True)


def _begin(case: dict[str, Any]) -> None:
    if case["is_blind"]:
        from offload.checkpoint.files import Stamp

        Stamp.__ne__ = lambda *_: False  # a file is what it was
    sys.argv = ["offload", *case["argv"]]
    os.environ.update(case["environment"])


def _visitor(case: dict[str, Any], process: int, place: Path) -> int:
    visitor = os.fork()
    if visitor:
        return visitor
    visit(case["port"], case["visits"], process, place / "replies")
    os._exit(0)


def _watched(case: dict[str, Any], process: int) -> dict[str, Any]:
    """How the child ends; it goes on when it stops, after what shall happen meanwhile has happened."""
    begun, is_hung = time.monotonic(), False
    while True:
        ended, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            _damage(case["meanwhile"])
            os.kill(process, signal.SIGCONT)
        elif ended:
            break
        elif not is_hung and time.monotonic() - begun > case["timeout_s"]:
            is_hung = True
            os.killpg(process, signal.SIGKILL)
        time.sleep(_ASK_S)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {"code": code, "seconds": time.monotonic() - begun, "is_hung": is_hung}


def _damage(wish: list[str]) -> None:
    """`cut`, `replace`, `delete` or `overwrite` a file; other numbers are as good as those that were there."""
    if not wish:
        return
    options, path = wish[0], Path(wish[1])
    if options == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif options == "delete":
        path.unlink()
    elif options == "replace":
        path.with_name("other").write_bytes(_other(path.read_bytes()))
        path.with_name("other").replace(path)
    else:
        data = _other(path.read_bytes())
        with path.open("r+b") as file:
            file.write(data)


def _other(data: bytes) -> bytes:
    """The last two quarters change places, in whole numbers: no header tells, and all of them are finite."""
    lo = len(data) // 4 // _WORD_BYTES * _WORD_BYTES
    return data[: len(data) - 2 * lo] + data[len(data) - lo :] + data[len(data) - 2 * lo : len(data) - lo]


if __name__ == "__main__":
    main()
