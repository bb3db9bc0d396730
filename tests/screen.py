"""A command in a terminal of a given size, and what a person then sees: a small model of a screen reads its bytes.

It knows what any terminal does with printed characters, the end of a row, and the few sequences that the program sends;
an unknown one fails the test that meets it.
"""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from forked import ROOT, popen

_TOKEN = re.compile(r"\x1b(?:\[(\d*)([A-Za-z])|([78D]))|(.)", re.DOTALL)


class Screen:
    """Rows of cells, one character each; rows that have scrolled away are kept in front."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.num_rows, self.num_columns = num_rows, num_columns
        self.rows: list[list[str]] = [[] for _ in range(num_rows)]
        self.row = self.column = 0  # of the cursor; the column equals the width where the next character wraps
        self._top, self._saved = 0, (0, 0)

    def feed(self, text: str) -> None:
        """Do what a terminal does with these characters."""
        for match in _TOKEN.finditer(text):
            count, command, short, char = match.groups()
            if char is not None:
                self._put(char)
            else:
                self._obey(command or short, int(count or 0))

    @property
    def lines(self) -> list[str]:
        """All rows without blanks at their ends, and without empty ones at the end."""
        return "\n".join("".join(row).rstrip() for row in self.rows).rstrip("\n").split("\n")

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self._down()
        elif char == "\x07":
            return
        else:
            assert char != "\x1b" and char.isprintable(), f"the screen knows nothing of {char!r}"
            cells = [char, ""] if unicodedata.east_asian_width(char) in "WF" else [char]  # a wide one takes two
            if self.column + len(cells) > self.num_columns:
                self._down()
                self.column = 0
            row = self.rows[self.row]
            row += [" "] * (self.column - len(row))
            row[self.column : self.column + len(cells)] = cells
            self.column += len(cells)

    def _obey(self, command: str, count: int) -> None:
        if command == "D":
            self._down()
            self.column = min(self.column, self.num_columns - 1)  # as xterm does: it no longer wraps
        elif command == "A":
            self.row = max(self._top, self.row - max(1, count))
            self.column = min(self.column, self.num_columns - 1)
        elif command == "7":
            self._saved = (self.row - self._top, self.column)
        elif command == "8":
            self.row, self.column = self._top + self._saved[0], self._saved[1]
        elif command == "K" and count == 0:
            del self.rows[self.row][self.column :]
        elif command == "J" and count == 0:
            del self.rows[self.row][self.column :]
            self.rows[self.row + 1 :] = [[] for _ in self.rows[self.row + 1 :]]
        else:
            raise AssertionError(f"the screen knows nothing of {command!r} with {count}")

    def _down(self) -> None:
        self.row += 1
        if self.row == self._top + self.num_rows:
            self._top += 1
            self.rows.append([])


class Recording(NamedTuple):
    """What came, and when."""

    code: int
    chunks: list[tuple[float, str]]  # seconds after the start, and characters

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for _, text in self.chunks)

    def screen(self, num_columns: int = 80, until_s: float = float("inf"), num_rows: int = 24) -> Screen:
        """The screen at some time."""
        screen = Screen(num_rows, num_columns)
        for at_s, text in self.chunks:
            if at_s <= until_s:
                screen.feed(text)
        return screen


def record(
    *arguments: object, num_columns: int = 80, stdout: int | None = None, environment: Mapping[str, str] = {}
) -> Recording:
    """Run `offload ARGUMENTS` in a terminal; `stdout` may be another file."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, num_columns))
    command = [sys.executable, "-m", "offload", *map(str, arguments)]
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    given = {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    given |= environment
    started, chunks, pending = time.monotonic(), list[tuple[float, str]](), b""
    out = theirs if stdout is None else stdout
    with popen(command, stdin=theirs, stdout=out, stderr=theirs, env=given, start_new_session=True) as running:
        os.close(theirs)
        while time.monotonic() - started < 300:
            if select.select([ours], [], [], 1)[0]:
                try:
                    pending += os.read(ours, 1 << 16)
                except OSError:  # what a terminal says when the last program has left it
                    break
                whole = len(pending) - len(re.search(rb"(?:[\xc0-\xff][\x80-\xbf]{0,2}|\x1b\[?\d*)?\Z", pending)[0])  # type: ignore[index]
                chunks.append((time.monotonic() - started, pending[:whole].decode()))
                pending = pending[whole:]
        else:
            running.kill()
        code = running.wait()
    os.close(ours)
    assert not pending, f"{pending!r} was left"
    return Recording(code, chunks)


class Typist:
    """A person at a terminal, who waits for what is shown before typing on."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, is_cold: bool = False) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(self._ours, (24, 80))
        given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        run = subprocess.Popen if is_cold else popen
        self.running = run(command, stdin=theirs, stdout=theirs, stderr=theirs, env=given, start_new_session=True)
        os.close(theirs)
        self.seen = ""

    def types(self, keys: str, *shown: str) -> None:
        """Wait until all that comes of it is shown, one after the other."""
        os.write(self._ours, keys.encode())
        for wanted in shown:
            self.sees(wanted)

    def sees(self, wanted: str, act: Callable[[], object] = lambda: None) -> str:
        """Whatever is shown before this, which must come. `act` is done at first, and while nothing comes."""
        for _ in range(60):
            if wanted in self.seen:
                before, self.seen = self.seen.split(wanted, 1)
                return before
            act()
            while wanted not in self.seen and select.select([self._ours], [], [], 2)[0]:
                try:
                    self.seen += os.read(self._ours, 4096).decode()
                except OSError:  # the other side is closed
                    break
        raise AssertionError(f"{wanted!r} never came, only {self.seen!r}")

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def leaves(self) -> None:
        self.running.kill()
        self.running.wait()
        os.close(self._ours)
