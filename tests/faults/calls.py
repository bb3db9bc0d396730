"""System calls that can fail on the way of the bytes, and what each of them fails with."""

import errno
import signal
from typing import NamedTuple

# In the order of shim.c.
CALLS = (
    *("open", "read", "write", "print", "input", "stat", "list", "sync", "rename", "unlink", "mkdir", "resize", "lock"),
    *("room", "mmap", "madvise", "thread", "socket", "recv", "send", "create", "close"),
)
ANY = len(CALLS)
NOTHING, ERROR, SHORT, SIGNAL, SLOW = range(5)  # kinds of faults


class Fault(NamedTuple):
    """What happens at the so-many-th call of a kind; `is_lasting` if at all later ones, too."""

    name: str  # for the table
    call: int
    kind: int
    value: int = 0
    is_lasting: bool = False


STOP = Fault("stop", ANY, SIGNAL, int(signal.SIGSTOP))  # until what shall happen meanwhile has happened


def _error(call: str, number: int, *, is_lasting: bool = False) -> Fault:
    return Fault(f"{errno.errorcode[number]}{'...' * is_lasting}", CALLS.index(call), ERROR, number, is_lasting)


_ERRORS = {
    "open": ("EIO", "EMFILE", "EACCES", "ENOENT", "EINTR"),
    "read": ("EIO", "EINTR"),
    "write": ("ENOSPC", "EDQUOT", "EIO", "EINTR"),
    "print": ("ENOSPC", "EIO", "EPIPE", "EINTR"),
    "input": ("EIO", "EINTR"),
    "stat": ("EIO", "EACCES"),
    "list": ("EIO", "EMFILE", "EACCES"),
    "sync": ("EIO", "ENOSPC", "EINTR"),
    "rename": ("EIO", "ENOSPC", "EACCES"),
    "unlink": ("EIO", "EACCES"),
    "mkdir": ("ENOSPC", "EACCES"),
    "resize": ("ENOSPC", "EIO"),
    "lock": ("ENOLCK", "EINTR"),
    "room": ("EIO",),
    "mmap": ("ENOMEM",),
    "madvise": ("EINVAL",),
    "thread": ("EAGAIN",),
    "socket": ("EMFILE", "EADDRINUSE"),
    "recv": ("ECONNRESET", "EINTR"),
    "send": ("EPIPE", "ECONNRESET"),
    "create": ("EIO", "EMFILE", "EACCES", "ENOSPC", "EROFS"),
    "close": ("EIO",),
}
_LASTING = {"open": "EMFILE", "read": "EIO", "write": "ENOSPC", "print": "EPIPE", "mmap": "ENOMEM", "sync": "EIO"}
_IN_PARTS = ("read", "write", "print", "input", "send")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGSTOP)
_SLOW_US = 4000

FAULTS: tuple[Fault, ...] = (
    *(_error(call, getattr(errno, name)) for call, names in _ERRORS.items() for name in names),
    *(_error(call, getattr(errno, name), is_lasting=True) for call, name in _LASTING.items()),
    *(Fault("short", CALLS.index(call), SHORT) for call in _IN_PARTS),
    *(Fault("short...", CALLS.index(call), SHORT, 0, True) for call in ("read", "write")),
    Fault("slow...", CALLS.index("read"), SLOW, _SLOW_US, True),
    *(Fault(number.name, ANY, SIGNAL, int(number)) for number in _SIGNALS),
)
