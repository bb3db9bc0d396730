"""Standard output that fails: whose fault it was, and how to leave without a word more."""

import os
import sys
from typing import NoReturn


def is_stuck() -> bool:
    """Return whether standard output cannot be written to.

    Then that has failed, and no other file.
    """
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def leave(code: int) -> NoReturn:
    """End where the reader of stdout has gone or has no room.

    The interpreter must not try to write more at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
