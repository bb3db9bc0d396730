"""What is typed or piped into a conversation: questions of one line or several, and commands.

A block between two lots of three quotes is one question, and so is what was pasted: terminals that
bracket a paste say so, of the others whatever waits already when a line ends belongs to it. What
waits before there is a prompt was typed ahead, and comes line by line.
"""

import os
import select
import sys
import termios
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import cache_folder, text_of
from offload.errors import UserError
from offload.interrupts import held_back

_QUOTES = '"""'
_TAKE_BLOCKS = ("", "/system")
_PASTE_PAUSE_S = 0.05  # between two lines of a paste; too fast for typing
_NUM_REMEMBERED = 1000
# a window may be closed at any time, and what is to be kept must not be lost by it
_while_there = suppress(termios.error)
# nor does a user without a home, or with one that cannot be written to, go without a conversation
_where_there = suppress(OSError, UserError)


class SilentTerminal:
    """Keeps what is typed from being shown while it is entered; the next question has it."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> "SilentTerminal":
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            _set_flag(termios.ECHO, is_on=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Show again what is typed."""
        if self._before is not None:
            with _while_there:
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._before)
            self._before = None


class Entry(NamedTuple):
    """One question, or one command."""

    command: str  # `/set`; empty for a question
    text: str


class ChatInput:
    """Reads entries from standard input; at a terminal lines are edited, and called back later."""

    def __init__(self, hint: str) -> None:
        self._hint = hint
        self._is_typed = sys.stdin.isatty()
        self._has_ended = False
        self._asks = self._is_typed and sys.stdout.isatty()
        self._readline: Any = None
        if self._is_typed and find_spec("readline"):
            self._readline = import_module("readline")

    def __enter__(self) -> "ChatInput":
        if self._is_typed:
            # Ctrl-C is for an answer, and not for the lines that were typed ahead meanwhile
            self._is_flushed = not termios.tcgetattr(sys.stdin)[3] & termios.NOFLSH
            _set_flag(termios.NOFLSH, is_on=True)
        if self._readline is not None:
            is_gnu = "libedit" not in (self._readline.__doc__ or "")
            if is_gnu and os.environ.get("TERM", "dumb") != "dumb":
                self._readline.parse_and_bind("set enable-bracketed-paste on")
            with _where_there:
                self._readline.read_history_file(_history())
            self._num_known = self._readline.get_current_history_length()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with held_back():
            if self._is_typed:
                if kind is not None:  # what was typed ahead was not meant for the shell
                    with _while_there:
                        termios.tcflush(sys.stdin, termios.TCIFLUSH)
                _set_flag(termios.NOFLSH, is_on=not self._is_flushed)
            if self._readline is not None:
                self._readline.set_history_length(_NUM_REMEMBERED)
                with _where_there:
                    _history().parent.mkdir(parents=True, exist_ok=True)
                    self._keep_history()

    def read(self) -> Entry | None:
        """Return the next entry, None at the end. Raises `UserError` if it is not UTF-8."""
        try:
            line = self._line("> ")
            if line is None:
                return None
            command, quotes, rest = line.partition(_QUOTES)
            if quotes and command.strip() in _TAKE_BLOCKS:
                return Entry(command.strip(), self._block(rest))
        except KeyboardInterrupt:
            print(f"\n{self._hint}", file=sys.stderr)
            return Entry("", "")
        if not line.startswith("/") or "\n" in line:
            return Entry("", line)
        command, _, rest = line.strip().partition(" ")
        return Entry(command, rest.strip())

    def _keep_history(self) -> None:
        """Append to the file as it is by now: another conversation may have ended meanwhile."""
        if not hasattr(self._readline, "append_history_file"):  # as with some builds of libedit
            self._readline.write_history_file(_history())
            return
        _history().touch(mode=0o600)
        num_new = self._readline.get_current_history_length() - self._num_known
        self._readline.append_history_file(max(0, num_new), _history())

    def _block(self, first: str) -> str:
        """Return the text between quotes, the first just read; the end of input closes them."""
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES) and (line := self._line("... ")) is not None:
            lines.append(line)
        return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Return a line, or a pasted block of lines; None at the end of input."""
        if not self._is_typed:
            raw = sys.stdin.buffer.readline()
            return text_of(raw, "the prompt", "standard input").rstrip("\r\n") if raw else None
        lines: list[str] = []
        is_ahead = self._waits(0)
        try:
            while not lines or (not is_ahead and self._waits(_PASTE_PAUSE_S)):
                lines.append(self._typed_line(prompt if not lines else "... "))
        except EOFError:
            self._has_ended = True
            if not lines:
                print(file=sys.stderr)
                return None
        return "\n".join(lines).rstrip("\n")

    def _waits(self, at_most_s: float) -> bool:
        return not self._has_ended and bool(select.select([sys.stdin], [], [], at_most_s)[0])

    def _typed_line(self, prompt: str) -> str:
        if self._has_ended:
            raise EOFError
        try:
            return text_of(
                os.fsencode(input(prompt if self._asks else "")), "the prompt", "the line"
            )
        except UnicodeDecodeError:
            raise UserError("a line must be UTF-8: set the terminal to it") from None


def _set_flag(flag: int, *, is_on: bool) -> None:
    with _while_there:
        mode = termios.tcgetattr(sys.stdin)
        mode[3] = mode[3] | flag if is_on else mode[3] & ~flag
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)


def _history() -> Path:
    return cache_folder() / "chat-history"
