"""What a case does beyond its own folder: a hook on Python's opens and calls, and a watched folder beside it.

The hook sees what Python opens by any name; inotify sees what libraries in C and Rust do to the canaries. A link to a
canary may be followed, as those of the hub's cache are; a name inside a file may not lead there.
"""

import ctypes
import os
import struct
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

_READS, _WRITES = 0x21, 0x3C6  # inotify: access and open; modify, attributes, move, create, delete
_EVENT = struct.Struct("iIII")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.mkdir", "os.symlink", "os.link")
_LOOKS = ("open", "os.listdir", "os.scandir")
_WITH_TWO_NAMES = ("os.rename", "os.symlink", "os.link")
_NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect",
    "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")  # fmt: skip
_ETC = ("mime.types", "localtime", "os-release")  # what libraries look at; a stranger's name is another
_SYSTEM = ("/proc", "/sys", "/dev/null", "/dev/urandom", *(f"/etc/{name}" for name in _ETC), "/usr", "/lib")
CANARIES = ("canary.json", "canary.safetensors", "canary.txt")


class Outside:
    """A folder beside the cases that no case is about."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        folder.mkdir()
        for name in CANARIES:
            (folder / name).write_text('{"canary": "this may not be read"}')
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = self._libc.inotify_add_watch(self._fd, bytes(folder), _READS | _WRITES)
        if self._fd < 0 or watch < 0:
            raise OSError(ctypes.get_errno(), "inotify does not work here")

    def seen(self) -> tuple[set[str], set[str]]:
        """Names of (what was read, what was changed) since the last call."""
        read, changed = set[str](), set[str]()
        for mask, name in self._events():
            (changed if mask & _WRITES else read).add(name)
        return read, changed

    def close(self) -> None:
        """Stop watching."""
        os.close(self._fd)

    def _events(self) -> list[tuple[int, str]]:
        try:
            raw, events, at = os.read(self._fd, 1 << 16), list[tuple[int, str]](), 0
        except BlockingIOError:
            return []
        while at < len(raw):
            _, mask, _, num_bytes = _EVENT.unpack_from(raw, at)
            name = raw[at + _EVENT.size : at + _EVENT.size + num_bytes].rstrip(b"\0").decode()
            events.append((mask, name))
            at += _EVENT.size + num_bytes
        return events


def watch_python(own_folders: tuple[Path, ...]) -> list[str]:
    """From now on note what this process opens, changes or starts elsewhere than in its own folders; for ever."""
    roots = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *filter(None, sys.path)]
    readable = tuple(os.path.realpath(root) for root in (*roots, Path(__file__).parents[2])) + _SYSTEM
    mine, strange = tuple(map(str, own_folders)), list[str]()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NEVER and not _is_own_program(event, arguments):
            strange.append(f"{event} {str(arguments)[:120]}")
        elif event in (*_LOOKS, *_CHANGES) and not isinstance(arguments[0], int | None):
            is_opened_to_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            is_write = event in _CHANGES or bool(is_opened_to_write)
            allowed = (*mine, "/dev/null") if is_write else (*mine, *readable)
            for path in _paths(event, arguments):
                is_cache = path.startswith(readable) and "/__pycache__" in path  # Python's and numba's, which unpickles
                if not is_cache and not any(path == root or path.startswith(f"{root}/") for root in allowed):
                    strange.append(f"{event} {path}{' to write' if is_write else ''}")

    sys.addaudithook(hook)
    return strange


def _paths(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """Those that a call names; where a symbolic link leads is seen from its own folder."""
    names = [os.fsdecode(name) for name in arguments[: 2 if event in _WITH_TWO_NAMES else 1]]
    if event == "os.symlink":
        names[0] = os.path.join(os.path.dirname(names[1]), names[0])
    return [os.path.normpath(os.path.join(_here(), name)) for name in names]


def links_outside(folder: Path) -> set[str]:
    """Names of the files beyond a folder that links in it lead to."""
    ends = {os.path.realpath(path) for path in folder.rglob("*") if path.is_symlink()}
    return {os.path.basename(end) for end in ends if not end.startswith(f"{os.path.realpath(folder)}/")}


def _is_own_program(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether it is Python that is started, or numba that reads what it has compiled before."""
    if event == "subprocess.Popen":
        return str(arguments[0]) == sys.executable
    frame: FrameType | None = sys._getframe()
    while frame is not None and "/numba/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"
