"""The errors that a user can mend: one line each, naming the rule, the value that broke it and the
remedy.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

TOLD = "every rank has been told"  # a note on an error: rank 0 tells the user, no other needs to
# descriptors, memory, processes
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
# of a message, and of its either end where it quotes more
_MAX_CHARS = 560
_KEPT_CHARS = 260


class UserError(ValueError):
    """A request, file or machine does not fit; the command line prints the line and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnreadError(UserError):
    """A file may well be sound, but it is of a kind that this program does not read."""


class RunError(OSError):
    """Something failed while a run was under way; what was generated until then is kept."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ReadError(RunError):
    """The disk failed."""


class RankError(RunError):
    """Another rank is gone, silent for too long, or has failed; the line says which, and why if it
    has told.

    Attributes:
        is_head_told: rank 0 has ended and said so: it tells the user why, and nobody else needs to.
        is_refusal: the other rank has refused what a user can mend; the command line exits with 2.
        is_death: the other rank has ended without a word; a launcher on its host knows more.
        is_head_silent: nothing was heard of rank 0 for too long; it cannot tell the user.
    """

    def __init__(
        self,
        message: str,
        *,
        is_head_told: bool = False,
        is_refusal: bool = False,
        is_death: bool = False,
        is_head_silent: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_head_told = is_head_told
        self.is_refusal = is_refusal
        self.is_death = is_death
        self.is_head_silent = is_head_silent


def ensure(holds: bool, rule: str) -> None:
    """Raise `ValueError` where a rule does not hold; who reads a file of ours says around it which
    file breaks it.
    """
    if not holds:
        raise ValueError(rule)


def reason(error: BaseException) -> str:
    """What a library says is wrong, short enough to stand inside a line of ours."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def require(holds: bool, rule: str, value: object, remedy: str) -> None:
    """Refuse a value that breaks a rule. Raises `UserError`."""
    if not holds:
        raise UserError(f"{rule}, got {value!s:.80}: {remedy}")


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Raises `UserError` for whatever goes wrong inside.

    What strangers give, files and grammars, fails as programs do, with any exception that lies at
    hand. What the machine lacks is not their fault, and stays what it is.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _LACKING:
            raise
        # of Rust, which is no `Exception`
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what} ({reason(error)}): {remedy}") from None
        raise


def one_line(message: str) -> str:
    """What a message quotes from a stranger's file may be long, and must not steer a terminal."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    return line if len(line) <= _MAX_CHARS else f"{line[:_KEPT_CHARS]} ... {line[-_KEPT_CHARS:]}"
