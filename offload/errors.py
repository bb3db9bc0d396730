"""The program's errors, each one line: requirement, wrong value and remedy.

`UserError` is for what a user can correct, before or during a run; `RunError` for what fails during
a run: `ReadError` for the disk, `RankError` for another rank. `require` and `ensure` raise the first
and `ValueError`. Nothing here takes time to import.
"""

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

TOLD = "every rank has been told"  # a note on an error that only rank 0 reports to the user
# the machine lacks descriptors, memory or processes
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end other programs",
    errno.ENOSPC: "free some room",
    errno.EDQUOT: "free some room",
    errno.ENOMEM: "lower --ram, or end other programs",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or end other programs",
}
_MAX_CHARS = 560  # of a message
# least similarity, by difflib, of words that may be meant by each other
_ALIKE = 0.7
_KEPT_CHARS = 260  # at either end of a message that is too long


class UserError(ValueError):
    """A request, file or machine does not fit; the command line prints it and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnreadError(UserError):
    """A file may well be sound, but it is of a kind that this program does not read."""


class HostFault(UserError):  # noqa: N818
    """What is wrong with the model or the decoder, and with no request: its owner can mend it."""


class RunError(OSError):
    """A run failed while under way; what was generated until then is kept."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ReadError(RunError):
    """The disk failed."""


class RankError(RunError):
    """Another rank has ended, failed or fallen silent; the message says which, and why if known.

    Attributes:
        is_head_told: rank 0 has ended and said so: it alone tells the user why.
        is_refusal: the other rank has refused what a user can mend; the command line exits with 2.
        is_death: the other rank has ended without a message; a launcher on its host knows more.
        is_head_silent: rank 0 was silent for too long and cannot tell the user.
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


def ensure(holds: bool, requirement: str) -> None:
    """Raise `ValueError` with the requirement unless it holds; callers add the file and the remedy."""
    if not holds:
        raise ValueError(requirement)


def reason(error: BaseException) -> str:
    """Return a library's message, short enough to stand inside a line of ours."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def system_reason(error: OSError) -> str:
    """Return the system's message, and the remedy where its error number tells that."""
    remedy = REMEDIES.get(error.errno or 0)
    return f"{error.strerror or reason(error)}{f': {remedy}' if remedy else ''}"


def installing(*packages: str) -> str:
    """Return the command that installs packages beside this program, such as `offload[serve]`."""
    names = " ".join(f"'{package}'" if "[" in package else package for package in packages)
    pip = shutil.which("pip")
    beside = os.path.join(sys.prefix, "bin")
    # the pip of another environment would install them there
    is_ours = pip is not None and os.path.dirname(os.path.abspath(pip)) == beside
    return f"{'pip' if is_ours else f'{sys.executable} -m pip'} install {names}"


def require(holds: bool, requirement: str, value: object, remedy: str) -> None:
    """Raise `UserError` for a value unless the requirement holds."""
    if not holds:
        raise UserError(f"{requirement}, got {value!s:.80}: {remedy}")


@contextmanager
def refusing(failure: str, remedy: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Raise `UserError`, or this kind of it, for any exception inside that the input caused.

    Files and grammars fail inside libraries with exceptions of any type. A lack of memory or
    descriptors is not their fault, and passes unchanged.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _LACKING:
            raise
        # Rust's panic is no `Exception`
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{failure} ({reason(error)}): {remedy}") from None
        raise


@contextmanager
def os_errors_as_user_error(failure: str, remedy: str) -> Iterator[None]:
    """Raise `UserError` where the system does not let a file be read or written.

    An error of a run that has begun passes unchanged.
    """
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        remedy = REMEDIES[error.errno] if error.errno in _LACKING else remedy
        raise UserError(f"{failure} ({error.strerror or reason(error)}): {remedy}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `. Did you mean that?` where a known word is nearly `word`, else nothing."""
    named = {name.lstrip("-"): name for name in known}
    alike = get_close_matches(word.lstrip("-"), named, n=1, cutoff=_ALIKE)
    return f". Did you mean {named[alike[0]]}?" if alike else ""


def plain_requirement(message: str) -> str:
    """Return a library's "... should be ..." as "must be ..."; empty for other messages."""
    text, num_replaced = re.subn(r"^\w+ should ", "must ", message.partition(", unable to ")[0])
    text = text.replace("greater than or equal to", "at least")
    return text.replace("less than or equal to", "at most") if num_replaced else ""


def one_line(message: str) -> str:
    """Return a message short and without control characters: it may quote a hostile file."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    return line if len(line) <= _MAX_CHARS else f"{line[:_KEPT_CHARS]} ... {line[-_KEPT_CHARS:]}"
