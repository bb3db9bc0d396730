"""What is fuzzed, and how one case of it ended.

A target writes a sound folder once; each case is a copy of it with one to three damages, drawn from `seed/target/index`
alone, so that any case can be repeated by itself. Invariant: a case may end in a result or in one line that tells what
is wrong, and in nothing else.
"""

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import RunError, UserError

SOUND = -1  # the index of the case that is not damaged
MAX_LINE_CHARS = 640  # of what an error says, a prefix of the command line's included
_MOST_BYTES = 64 << 20
Damage = Callable[[Path, random.Random], str]  # of one file; returns what it did
RESULT, REFUSED, FAILED = "result", "refused", "failed"  # what may be
ENDS = (RESULT, REFUSED, FAILED)
EXITS = {0: RESULT, 2: REFUSED, 1: FAILED}  # of the command line
TRACEBACK = "Traceback (most recent call last)"
# All that a command may end with 1 for: a file that fails or changes, lines without a text, damage it looked for
_FAILURES = re.compile(
    r"cut short|(opened|read) any more|reading .*failed|(changed|written to) (since|while)|their lines|: DAMAGED in "
)
_NO_MEMORY = re.compile(r"MemoryError|allocate|bad_alloc|memory ran out|more threads")


class Target(NamedTuple):
    """A family of files, and what reads them."""

    name: str
    make: Callable[[Path], object]  # writes sound files into an empty folder
    files: Mapping[str, Sequence[Damage]]  # by pattern: what may happen to such a file
    run: Callable[[Path], Any]  # reads the folder; returns an `Outcome` of the command line, or anything
    writes: tuple[str, ...] = ()  # patterns of what it may change


class Case(NamedTuple):
    target: Target
    seed: int
    index: int

    @property
    def name(self) -> str:
        return f"{self.seed}/{self.target.name}/{self.index}"

    def damage(self, folder: Path) -> str:
        """Break a copy of the sound folder; returns what was done."""
        if self.index == SOUND:
            return "nothing"
        rng, done = random.Random(self.name), list[str]()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            pattern = rng.choice(sorted(self.target.files))
            result = sorted(path for path in folder.glob(pattern) if _is_plain(path))
            if result:
                path = rng.choice(result)
                done.append(
                    f"{path.relative_to(folder)}: {_damaged(rng.choice(self.target.files[pattern]), path, rng)}"
                )
        return "; ".join(done)


def _damaged(damage: Damage, path: Path, rng: random.Random) -> str:
    try:
        return damage(path, rng)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "nothing more, too little of it is whole"


def _is_plain(path: Path) -> bool:
    """Whether it can be damaged once more: it is no link, and no damage has made it huge or unreadable."""
    is_file = path.is_file() and not path.is_symlink() and os.access(path, os.R_OK | os.W_OK)
    return is_file and path.stat().st_size < _MOST_BYTES


class End(NamedTuple):
    kind: str  # one of `ENDS`, or a finding
    line: str  # what was said
    detail: str = ""  # a traceback, or what was printed

    @property
    def is_finding(self) -> bool:
        return self.kind not in ENDS


def end_of(run: Callable[[Path], Any], folder: Path, traceback: Callable[[], str]) -> End:
    """Run a target, and judge what comes of it; `traceback` is asked for where it is no error of ours."""
    try:
        outcome = run(folder)
    except (UserError, RunError) as error:
        kind = REFUSED if isinstance(error, UserError) else FAILED
        return _said(kind, str(error), "")
    except BaseException as error:
        return End("exception", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", traceback())
    if getattr(outcome, "code", 0) == 0 and getattr(outcome, "err", "") == "":
        return End(RESULT, str(getattr(outcome, "out", "")))
    return _end_of_command(outcome.code, outcome.out, outcome.err)


def _end_of_command(code: int, out: str, err: str) -> End:
    """By its exit code, and what it said."""
    if code not in EXITS or TRACEBACK in err:
        return End("exception", f"exit code {code}", err)
    if code == 0:
        is_plain = all(line.isprintable() for line in err.splitlines())
        return End(RESULT, out) if is_plain else End("message", "not printable", repr(err))
    return _said(EXITS[code], err.removesuffix("\n") or out.rstrip().rpartition("\n")[2], err or out)


def _said(kind: str, line: str, detail: str) -> End:
    """An error's line, which must be one, not too long, and must not steer a terminal."""
    if not line.isprintable() or not line or len(line) > MAX_LINE_CHARS:
        return End("message", f"{len(line.splitlines())} lines of {len(line)} characters: {line[:200]!r}", repr(line))
    if _NO_MEMORY.search(line):
        return End("memory", line, detail)
    is_known = kind != FAILED or _FAILURES.search(line)
    return End(kind, line, detail) if is_known else End("exception", f"no failure of reading: {line}", detail)
