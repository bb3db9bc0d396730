"""What a person sees beside the text: lines, and one that lives at the bottom of a terminal.

Text goes to stdout and all else to stderr, and both may be the same terminal. Where text stands in
mid-line, the live line lies in the row below, and the cursor goes back to where text goes on. A
thread keeps it moving, for an import or a large read tells nothing of itself. Invariant: no byte of
it is on the screen while text is written; what cannot be drawn over (`TERM=dumb`, a file, a pipe)
gets a plain line now and then instead.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import UnsupportedOperation
from typing import TYPE_CHECKING, TextIO

from offload.cli.flags import as_flags
from offload.cli.progress import Phase, Progress, TextProgress
from offload.cli.terminal import column_after, columns, fitted, fitting
from offload.engine.hooks import Hooks
from offload.interrupts import held_back
from offload.options import OutputOptions
from offload.units import is_decimal

if TYPE_CHECKING:  # they bring numpy along, and `offload --help` must not wait for it
    from offload.engine.generation import Run
    from offload.memory.plan import MemoryPlan

# between two lines on a terminal, on one that cannot redraw, in a file
_TICK_S = 0.25
_DUMB_S = 5.0
_FILE_S = 30.0
# for one row below, scrolling if need be; the column stays
_LEAVE_ROOM = "\x1bD\x1b[A"
_UP = "\x1b[A"
_SAVE_CURSOR = "\x1b7"
_RESTORE_CURSOR = "\x1b8"
_CLEAR_ROW = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


class Console:
    """Shows the lines of one run, and the live one below them; nothing where JSON or quiet is wanted.

    Args:
        sizes_like: sizes as the user has written them, for the unit of those that are shown.
        is_silent: show nothing, whatever is wanted.

    Attributes:
        progress: what the live line tells of; None while there is none.
        num_written: characters of text.
    """

    def __init__(
        self,
        output: OutputOptions,
        *sizes_like: str | int | None,
        is_silent: bool = False,
    ) -> None:
        self._is_quiet = output.quiet or output.as_json or is_silent
        self._is_verbose = output.verbose
        self.is_decimal = is_decimal(*sizes_like)
        self.progress: Progress | None = None
        self.num_written = 0
        self._stream = sys.stderr
        is_terminal = not self._is_quiet and self._stream.isatty()
        self._redraws = is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._pause_s = _TICK_S if self._redraws else _DUMB_S if is_terminal else _FILE_S
        self._is_shared = not self._is_quiet and _is_same_file(sys.stdout, self._stream)
        self._begins_at_once = is_terminal
        # one's own thread may have it, where a signal or a destructor has something to say
        self._lock = threading.RLock()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._column = 0
        self._is_drawn = False
        self._has_wrapped = False

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def hooks(self) -> Hooks:
        """What loading tells of its progress, and a decoder of its sweeps."""
        return Hooks(self.wait, self.bytes_landed, self.count, self.layer_done, self.say)

    def say(self, lines: str) -> None:
        """Print lines for the user, above what is under way."""
        if self._is_quiet or not lines:
            return
        with self._lock:
            self._erase()
            print(fitted(as_flags(lines), self._stream), file=self._stream)
            if self._redraws:
                self._draw()

    def detail(self, lines: str) -> None:
        """Print lines that only `--verbose` shows."""
        if self._is_verbose:
            self.say(lines)

    def text(self, text: str) -> None:
        """Write a piece of text to stdout, and draw the line again."""
        if not text:
            return
        with self._lock:
            self._erase()
            up = _UP if self._has_wrapped and text.startswith("\n") else ""
            # before the writing, because Ctrl-C strikes right after it
            self.num_written += len(text)
            sys.stdout.write(up + text)
            if self._is_shared:
                self._follow(text)
            sys.stdout.flush()
            if self._redraws:
                self._draw()

    def write(self, pieces: Iterable[str]) -> BaseException | None:
        """Write pieces of text as they come; return what ended them, to raise it behind the text."""
        failure: BaseException | None = None
        try:
            for piece in pieces:
                self.text(piece)
        except BaseException as error:
            failure = error
        return failure

    def show(self, progress: Progress, *, is_at_once: bool = False) -> None:
        """Let the line tell of this from now on; `is_at_once` also in a file or a pipe."""
        if self._is_quiet:
            return
        with self._lock:
            self.progress = progress
            if self._redraws or self._begins_at_once or is_at_once:
                self._draw()
        self._begins_at_once = False
        if self._thread is None:
            # one that Ctrl-C met as it began could not be waited for
            with held_back():
                self._thread = threading.Thread(
                    target=self._keep_moving, name="offload-line", daemon=True
                )
                self._thread.start()

    def wait(self, label: str, *, is_at_once: bool = False) -> None:
        """Show that something is under way of which it is not known how much is left."""
        self.show(Phase(label), is_at_once=is_at_once)

    def bytes_landed(self, done_bytes: int, total_bytes: int, label: str = "") -> None:
        """Show the progress in bytes of something; without a label, of what is under way."""
        phase = self._phase(label)
        phase.is_in_bytes = True
        phase.is_decimal = self.is_decimal
        phase.reach(done_bytes, total_bytes)

    def count(self, done: int, total: int, label: str) -> None:
        """Show the progress of something that is counted."""
        self._phase(label).reach(done, total)

    def follow(self, run: "Run", plan: "MemoryPlan", max_new_tokens: int | None) -> None:
        """Show a text that is about to be written: the next calls of `layer_done` are its sweeps."""
        stats = run.sequence.stats
        num_sweeps = plan.num_prompt_sweeps(stats.num_prompt_tokens - stats.num_kept_tokens)
        self.show(TextProgress(stats, len(plan.layer_bytes), num_sweeps, max_new_tokens))

    def layer_done(self) -> None:
        """Count one more layer that has run."""
        if self.progress is not None:
            self.progress.num_layers += 1

    @contextmanager
    def keeping(self, kept: str) -> Iterator[None]:
        """Show what is written to a file, and let what would end the program wait until it is."""
        with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            try:
                self.show(Phase(f"keeping {kept}"))
                yield
            finally:
                self.clear()

    def clear(self) -> None:
        """Take the line away until something else is shown."""
        with self._lock:
            self._erase()
            self.progress = None

    def close(self) -> None:
        """Take it away, and its thread; what is shown later begins another one."""
        self.clear()
        if self._thread is not None:
            self._has_ended.set()
            self._thread.join()
            self._thread = None
            self._has_ended.clear()

    def _phase(self, label: str) -> Phase:
        """Return the phase under way, or a new one where it has another label."""
        shown = self.progress
        if not isinstance(shown, Phase) or label not in ("", shown.label):
            shown = Phase(label)
            self.show(shown)
        return shown

    def _keep_moving(self) -> None:
        try:
            while not self._has_ended.wait(self._pause_s):
                with self._lock:
                    self._draw()
        # stderr is gone, which the writer of text will find out by itself
        except (OSError, ValueError):
            return

    def _draw(self) -> None:
        if self.progress is None:
            return
        width = columns(self._stream)
        line = fitting(self.progress.parts(), width - 1)
        if not self._redraws:
            line = "" if self._column else f"{line}\n"
        elif self._column:
            line = f"{_LEAVE_ROOM}{_SAVE_CURSOR}\n\r{line}{_CLEAR_ROW}{_RESTORE_CURSOR}"
        else:
            line = f"\r{line}{_CLEAR_ROW}"
        self._stream.write(line)
        self._stream.flush()
        self._is_drawn = self._redraws

    def _erase(self) -> None:
        if self._is_drawn:
            self._stream.write(_CLEAR_BELOW if self._column else f"\r{_CLEAR_BELOW}")
            self._stream.flush()
        self._is_drawn = False

    def _follow(self, text: str) -> None:
        """Note the column where text has left the cursor.

        Behind the last one terminals differ, so the row is ended there by a blank that goes.
        """
        width = columns(self._stream)
        self._column = column_after(text, self._column, width)
        self._has_wrapped = self._redraws and self._column >= width
        if self._has_wrapped:
            sys.stdout.write(" \r")
            self._column = 0


def _is_same_file(file: TextIO, other: TextIO) -> bool:
    try:
        return os.path.sameopenfile(file.fileno(), other.fileno())
    except (OSError, UnsupportedOperation):  # of a stream in memory
        return False
