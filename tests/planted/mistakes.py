"""Mistakes in the program, each against one promise of README.md or docs/, and the tests that ought to see it.

`mistakes.txt` has four lines for each: the promise; the file, and behind a bar the tests below tests/ that are asked;
what stands once in the file; and what is to stand there instead. Of a file of tests it may name a case, which then runs
each time: where the cases that notice are few among many, a quick run would draw them for some commits alone.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_TABLE = Path(__file__).with_suffix(".txt")


class Mistake(NamedTuple):
    """One line of the program written wrongly."""

    promise: str
    file: str
    tests: tuple[str, ...]
    right: str
    wrong: str
    cases: tuple[str, ...] = ()

    def plant(self, source: str) -> str:
        """Return the file's text with the mistake. Raises `ValueError` where it no longer has one place for it."""
        if source.count(self.right) != 1:
            raise ValueError(f"{self.file} has {self.right!r} {source.count(self.right)} times, not once")
        return source.replace(self.right, self.wrong)


def read_mistakes() -> list[Mistake]:
    """Return all mistakes of the table."""
    rows = [row.splitlines() for row in _TABLE.read_text(encoding="utf-8").split("\n\n")]
    return [_mistake(*row) for row in rows]


def _mistake(promise: str, where: str, right: str, wrong: str) -> Mistake:
    file, _, asked = where.partition(" | ")
    assert (right[:2], wrong[:2]) == ("- ", "+ "), promise
    tests = [f"tests/{test}" for test in asked.split()]
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    cases = tuple(test for test in tests if "::" in test)
    return Mistake(promise, file, (*files,), right[2:], wrong[2:], cases)
