"""Processes of the program, forked from one that has imported everything: they do not start for four seconds of CPU.

Why not in the test's own process: streams, descriptors, signals, terminals and exit codes are those of a real one.
Invariant: a child differs from a new interpreter in nothing but the modules that are there already, so what is about
imports, or about a cold start, takes `subprocess` itself. One process forks all that a worker asks for, and ends with
it.
"""

import array
import atexit
import contextlib
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_STATUS = struct.Struct("id")  # a pid, or how a child has ended and the processor seconds that it took
_PRELOADED = (
    "offload.engine.load",
    "offload.commands",
    "offload.cli.text_run",
    "offload.cli.chat_command",
    "offload.cli.generate_command",
    "offload.cli.repl",
    "offload.distributed.join",
    "transformers.models.llama.modeling_llama",
)
_SETTLED = ("TRANSFORMERS_VERBOSITY", "TRITON_INTERPRET", "PYTHONUNBUFFERED")  # read when modules are imported
SPENT_S: list[float] = []  # by children that have ended: they are none of this process
HAS_FORKS = hasattr(os, "pidfd_open")  # else every process is a cold one


class Warm(subprocess.Popen[Any]):
    """A `Popen` of this Python with `-m module`, `-c code` or a script, and arguments: forked and not started."""

    # fmt: off
    def _execute_child(  # the order is that of the class above
        self, args: Sequence[Any], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
        env: Mapping[str, str] | None, startupinfo: Any, creationflags: int, shell: bool, p2cread: int, p2cwrite: int,
        c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: bool, gid: Any, gids: Any, uid: Any,
        umask: int, start_new_session: bool, *others: Any,
    ) -> None:
        """Ask for a child that has these files and this environment."""
        assert not (preexec_fn or pass_fds or shell) and args[0] == sys.executable, args
        wish = {
            "argv": [os.fspath(arg) for arg in args[1:]],
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "starts_session": start_new_session,
        }
        files = [file if file != -1 else number for number, file in enumerate((p2cread, c2pwrite, errwrite))]
        self._channel = _server().connect()
        _send(self._channel, wish, files)
        self.pid, _ = _STATUS.unpack(_received(self._channel, _STATUS.size))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    # fmt: on

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self._take_status()
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """Return (pid, a status as of `waitpid`), or (0, 0) where the process runs on and `flags` forbid to wait."""
        if flags & os.WNOHANG and not select.select([self._channel], [], [], 0)[0]:
            return 0, 0
        status, seconds = _STATUS.unpack(_received(self._channel, _STATUS.size))
        self._channel.close()
        SPENT_S.append(seconds)
        return self.pid, status

    def _take_status(self) -> None:
        _, status = self._try_wait(0)
        self.returncode = os.waitstatus_to_exitcode(status)


def popen(command: Sequence[Any], **options: Any) -> "subprocess.Popen[Any]":
    """Return a process of this Python as `subprocess.Popen` would, but warm where that can be."""
    return (Warm if HAS_FORKS else subprocess.Popen)(command, **options)


class _Server:
    """The process that forks, and the socket by which it is asked."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + f"offload-tests-{os.getpid()}-{os.urandom(8).hex()}")  # abstract: no file to remove
        self._listener.listen(64)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        for name in _SETTLED:
            environment.pop(name, None)
        # Its standard input is a pipe that ends with us.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            env=environment,
        )
        self._pid = os.getpid()
        atexit.register(self.close)

    def connect(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(self._listener.getsockname())
        return channel

    def is_ours(self) -> bool:
        return self._pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        if self._pid == os.getpid():
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)
            self._listener.close()


_servers: list[_Server] = []


def _server() -> _Server:
    if not (_servers and _servers[-1].is_ours()):
        _servers.append(_Server())
    return _servers[-1]


def _send(channel: socket.socket, wish: Mapping[str, Any], files: Sequence[int]) -> None:
    said = json.dumps(wish).encode()
    channel.sendmsg([_STATUS.pack(len(said), 0.0)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    channel.sendall(said)


def _received(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        assert part, "the process that forks has ended"
        data += part
    return data


# From here on: the process that forks.


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each wish; return None when the test run has ended, and the wish in a child."""
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([0, listener, *running], [], [])
        for pidfd in [ready_file for ready_file in ready if ready_file in running]:
            pid, channel = running.pop(pidfd)
            os.close(pidfd)
            _, status, used = os.wait4(pid, 0)
            with contextlib.suppress(OSError):  # who asked has gone
                channel.sendall(_STATUS.pack(status, used.ru_utime + used.ru_stime))
            channel.close()
        if listener in ready:
            channel, _ = listener.accept()
            first, rights, _, _ = channel.recvmsg(_STATUS.size, socket.CMSG_SPACE(3 * array.array("i").itemsize))
            files = array.array("i", rights[0][2])
            wish = json.loads(_received(channel, _STATUS.unpack(first)[0]))
            pid = os.fork()
            if pid == 0:
                channel.detach()
                listener.detach()
                for _, other in running.values():
                    other.detach()
                return {**wish, "files": [*files]}
            for file in files:
                os.close(file)
            channel.sendall(_STATUS.pack(pid, 0.0))
            running[os.pidfd_open(pid)] = (pid, channel)
        elif 0 in ready:
            return None


def _become(wish: Mapping[str, Any]) -> None:
    """Be what a new interpreter would be before it runs its first line."""
    if wish["starts_session"]:
        os.setsid()
    os.chdir(wish["folder"])
    os.environ.clear()
    os.environ.update(wish["environment"])
    high = [os.dup2(file, 100 + number) for number, file in enumerate(wish["files"])]
    for number, file in enumerate(high):
        os.dup2(file, number)
    os.closerange(3, 1024)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    coding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), coding)
    sys.stdout = _stream(1, coding, "strict", is_unbuffered)
    sys.stderr = _stream(2, coding, "backslashreplace", is_unbuffered)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _stream(number: int, coding: str, errors: str, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    if is_unbuffered:
        return io.TextIOWrapper(raw, coding, errors, write_through=True)  # type: ignore[arg-type]
    return io.TextIOWrapper(io.BufferedWriter(raw), coding, errors, line_buffering=number == 2 or raw.isatty())


def _run(wish: Mapping[str, Any]) -> None:
    options, *arguments = wish["argv"]
    if options == "-m":
        name, *sys.argv[1:] = arguments
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif options == "-c":
        code, *sys.argv[1:] = arguments
        sys.argv[0] = options
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.argv[:] = wish["argv"]
        sys.path.insert(0, os.path.dirname(options))
        runpy.run_path(options, run_name="__main__")


def _main() -> None:
    import gc
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    wish = _serve(listener)
    if wish is not None:
        _become(wish)
        _run(wish)


if __name__ == "__main__":
    _main()
