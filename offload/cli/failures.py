"""What the machine refuses wherever it likes: files, memory, threads, and standard output.

Where a refusal is expected it has a message of its own; what is left is one line, no traceback.
"""

import errno
import os
import resource
import sys
from typing import NoReturn

from offload.errors import REMEDIES

_LOOK = "look at the disk, and at who may read and write there"
_NO_MEMORY = "memory ran out, more was needed than there is"
_LARGER_SPACE = "raise the limit of address space (ulimit -v)"
_NO_DEVICE_MEMORY = (
    "device memory ran out, more was needed than planned: lower --context or take a smaller --tree; "
    "where other programs use the GPU, lower --gpu-mem"
)
# What torch and Python say in a RuntimeError of no class of its own.
_NO_THREAD = "can't start new thread"
_TORCH_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def machine_failure(error: BaseException) -> str | None:
    """Return the line for an error of the machine; None for any other error."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, and torch may not be loaded
        return _NO_DEVICE_MEMORY
    is_torch = isinstance(error, RuntimeError) and any(
        phrase in text for phrase in _TORCH_NO_MEMORY
    )
    if isinstance(error, MemoryError) or is_torch:
        return f"{_NO_MEMORY}: {_space_remedy(errno.ENOMEM)}"
    if isinstance(error, RuntimeError) and _NO_THREAD in text:
        return f"the system starts no more threads: {_space_remedy(errno.EAGAIN)}"
    if isinstance(error, OSError):
        problem = error.strerror or " ".join(text.split()) or type(error).__name__
        where = f" ({error.filename!s:.200})" if error.filename else ""
        return f"the system refused{where}: {problem}; {_remedy(error)}"
    return None


def _remedy(error: OSError) -> str:
    number = error.errno or 0
    return _space_remedy(number) if number == errno.ENOMEM else REMEDIES.get(number, _LOOK)


def _space_remedy(number: int) -> str:
    """Return the remedy where memory or threads lack: both also for want of address space."""
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return f"{_LARGER_SPACE}, or {REMEDIES[number]}" if is_limited else REMEDIES[number]


def is_stuck() -> bool:
    """Return True if standard output cannot be written to: then that failed, and no other file."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def leave(code: int) -> NoReturn:
    """End where stdout has no reader or no room, so that the interpreter does not write more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
