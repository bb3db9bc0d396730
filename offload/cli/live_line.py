"""One line that lives at the bottom of a terminal while text is streamed above it.

Text goes to stdout and the line to stderr, and both may be the same terminal. Where text stands in
mid-line, the line lies in the row below, and the cursor goes back to where text goes on. A thread
keeps it moving, for an import or a large read tells nothing of itself. Invariant: no byte of the
line is on the screen while text is written; what cannot be drawn over (`TERM=dumb`, a file, a pipe)
gets a plain line now and then instead.

How far something is comes as the parts of the line, the most telling first: a narrow terminal
shows no more.
"""

import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import UnsupportedOperation
from typing import TYPE_CHECKING, TextIO

from offload.cli.flags import error_line
from offload.interrupts import held_back
from offload.units import format_bytes

if TYPE_CHECKING:  # `offload --help` must not wait for what they bring along
    from offload.engine.generation import Run
    from offload.stats import Stats

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
# a name of a list, and the blanks before what is said of it
_NAMED = re.compile(r" *(?=\S)[^\n]{1,20}?\S {2,}(?=\S)")
_QUIET_S = 1.0  # what is over sooner needs no clock
_TELLING_SHARE = 0.02  # of the work, from which on the rest can be foretold


@dataclass
class Phase:
    """Something under way, of which a share may be known to be done."""

    label: str
    done: float = 0
    total: float = 0  # 0 where it is not known how much there is
    is_in_bytes: bool = False
    is_decimal: bool = False
    num_layers: int = 0  # that have run meanwhile
    started_s: float = field(default_factory=time.monotonic)
    reached_s: float = 0.0  # when so much was done, counted from the start

    def reach(self, done: float, total: float) -> None:
        """Note that so much is done by now."""
        self.done = done
        self.total = total
        self.reached_s = time.monotonic() - self.started_s

    def parts(self) -> list[str]:
        """Return such as `reading layers: 1.2 of 4.0 GiB`, `12 s left`, `1.5 GiB/s`."""
        elapsed_s = time.monotonic() - self.started_s
        layers = [f"{plural(self.num_layers, 'layer')} run"] if self.num_layers else []
        clock = [duration(elapsed_s)] if elapsed_s >= _QUIET_S else []
        if not self.total:
            return [self.label, *clock, *layers]
        share = self.done / self.total
        left = clock
        if clock and share >= _TELLING_SHARE:
            left = [f"{duration(self.reached_s / share - elapsed_s)} left"]
        amount = f"{self.done:.0f} of {self.total:.0f}"
        rate = list[str]()
        if self.is_in_bytes:
            size = partial(format_bytes, is_decimal=self.is_decimal)
            total = size(self.total)
            amount = f"{size(self.done).removesuffix(total[total.index(' ') :])} of {total}"
            rate = [f"{size(self.done / self.reached_s)}/s"] if clock and self.reached_s else []
        return [f"{self.label}: {amount}", *left, *rate, *layers]


@dataclass
class TextProgress:
    """A text that is being written, sweep by sweep."""

    stats: "Stats"  # of the run, which goes on changing
    layers_per_sweep: int
    num_prompt_sweeps: int
    max_new_tokens: int | None  # None where no limit was set
    num_layers: int = 0  # that have run since it began
    started_s: float = field(default_factory=time.monotonic)

    def parts(self) -> list[str]:
        """Return such as `31 of 128 tokens`, `layer 12 of 80`, `1.31 tokens/s`, `1:14 left`."""
        elapsed_s = time.monotonic() - self.started_s
        stats = self.stats
        if not stats.num_first_tokens:
            total = self.layers_per_sweep * self.num_prompt_sweeps
            parts = ["reading the prompt", f"layer {self.num_layers} of {total}"]
            if elapsed_s < _QUIET_S or not self.num_layers:
                return parts
            left_s = (total - self.num_layers) * elapsed_s / self.num_layers
            return [*parts, f"{duration(left_s)} left"]
        num_later = sum(stats.accepted_per_sweep)
        num_done = stats.num_first_tokens + num_later
        num_run = self.num_layers % self.layers_per_sweep
        is_drafting = stats.tree_depth > 0 and not num_run
        layer = ["drafting" if is_drafting else f"layer {num_run} of {self.layers_per_sweep}"]
        if not self.num_layers:  # other ranks run them
            layer = []
        if self.max_new_tokens is None:
            written = plural(num_done, "token")
        else:
            written = f"{num_done} of {plural(self.max_new_tokens, 'token')}"
        if not num_later or not stats.decode_s:
            return [written, *layer]
        rate = num_later / stats.decode_s
        speed = [f"{rate:.2f} tokens/s"]
        if self.max_new_tokens is not None:
            # the sweep under way has had some of the time until the limit
            since_s = max(0.0, elapsed_s - stats.ttft_s - stats.decode_s)
            left_s = (self.max_new_tokens - num_done) / rate - since_s
            speed.append(f"{duration(left_s)} left")
        return [written, *layer, *speed, f"{stats.tokens_per_sweep:.1f} tokens a pass"]


@dataclass
class BatchProgress:
    """Many texts, of which some are written at a time."""

    num_texts: int
    layers_per_pass: int
    num_done: int = 0
    num_passes: int = 0
    num_layers: int = 0  # that have run since it began
    started_s: float = field(default_factory=time.monotonic)
    _num_finished_tokens: int = 0
    _under_way: Sequence["Run"] = ()

    def advance(self, runs: Sequence["Run"]) -> None:
        """Note that a pass over the weights begins for these."""
        self._under_way = runs
        self.num_passes += bool(runs)

    def finish(self, num_tokens: int) -> None:
        """Note that one more is finished, with so many new tokens."""
        self.num_done += 1
        self._num_finished_tokens += num_tokens
        self._under_way = [run for run in self._under_way if not run.is_finished]

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def num_tokens(self) -> int:
        return self._num_finished_tokens + sum(len(run.sequence.new_ids) for run in self._under_way)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.num_passes, 1)

    def parts(self) -> list[str]:
        """Return such as `31 of 128 texts`, `8 under way`, `7.31 tokens/s`, `12:14 left`."""
        texts = f"{self.num_done:,} of {plural(self.num_texts, 'text')}"
        elapsed_s = self.elapsed_s
        layer = f"layer {self.num_layers % self.layers_per_pass} of {self.layers_per_pass}"
        under_way = f"{len(self._under_way)} under way"
        if not self.num_tokens:
            return [texts, under_way, layer]
        speed = [f"{self.tokens_per_s:.2f} tokens/s"]
        if self.num_done and self.num_done < self.num_texts:
            left_s = elapsed_s * (self.num_texts - self.num_done) / self.num_done
            speed.append(f"{duration(left_s)} left")
        return [texts, under_way, *speed, f"{self.tokens_per_pass:.1f} tokens/pass", layer]


Progress = Phase | TextProgress | BatchProgress


def plural(count: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`, `1,234 tokens`, `2 passes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def duration(seconds: float) -> str:
    """Return `7 s`, `1:05`, `2 h 05 min`: as exact as a person wants to know it, and never nothing."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class LiveLine:
    """Shows how far something is, in one line at the bottom of a terminal.

    What else goes there goes by it: text to stdout, and lines to stderr.
    """

    def __init__(self, *, is_off: bool) -> None:
        self._is_off = is_off
        self._stream = sys.stderr
        is_terminal = not is_off and self._stream.isatty()
        self._redraws = is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._pause_s = _TICK_S if self._redraws else _DUMB_S if is_terminal else _FILE_S
        self._is_shared = not is_off and _is_same_file(sys.stdout, self._stream)
        self._begins_at_once = is_terminal
        # one's own thread may have it, where a signal or a destructor has something to say
        self._lock = threading.RLock()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.progress: Progress | None = None
        self._column = 0
        self._is_drawn = False
        self._has_wrapped = False
        self.num_written = 0

    def show(self, progress: Progress, *, is_at_once: bool = False) -> None:
        """Let the line tell of this from now on; `is_at_once` also in a file or a pipe."""
        if self._is_off:
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

    def text(self, text: str) -> None:
        """Write a piece of text to stdout, and draw the line anew."""
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

    @contextmanager
    def keeping(self, what: str) -> Iterator[None]:
        """Show what is written to a file, and let what would end the program wait until it is."""
        with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            try:
                self.show(Phase(f"keeping {what}"))
                yield
            finally:
                self.clear()

    def print(self, lines: str) -> None:
        """Print lines on stderr, above what is under way."""
        with self._lock:
            self._erase()
            print(fitted(lines, self._stream), file=self._stream)
            if self._redraws:
                self._draw()

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
        line = _fitting(self.progress.parts(), width - 1)
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


def columns(stream: TextIO) -> int:
    """Return the width of the terminal behind a stream; 80 where it has none, or says nothing."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return width or shutil.get_terminal_size().columns


def fitted(text: str, stream: TextIO) -> str:
    """Return lines broken between words where a terminal is narrower.

    What follows a name and two spaces goes on below itself. For a file or a pipe lines stay whole.
    """
    if not stream.isatty():
        return text
    width = columns(stream)
    lines = list[str]()
    for line in text.split("\n"):
        named = _NAMED.match(line)
        indent = " " * (named.end() if named else 2 + len(line) - len(line.lstrip()))
        how = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, width, **how) or [""]  # type: ignore[arg-type]
    return "\n".join(lines)


def print_error(message: str) -> None:
    """Print an error's line on stderr, as wide as the terminal."""
    print(fitted(error_line(message), sys.stderr), file=sys.stderr)


def column_after(text: str, column: int, width: int) -> int:
    """Return where a terminal's cursor stands after a text; `width` says that the row is full."""
    for char in text:
        if char in "\r\n":
            column = 0
        elif char == "\t":
            column = min(column // 8 * 8 + 8, width - 1)
        elif unicodedata.category(char) not in ("Cc", "Cf", "Me", "Mn"):  # which take no room
            cells = 2 if unicodedata.east_asian_width(char) in "WF" else 1
            column = cells if column + cells > width else column + cells
    return column


def _fitting(parts: list[str], width: int) -> str:
    """Return as many parts as fit, and of the first as much as does."""
    line = parts[0][:width]
    for part in parts[1:]:
        if len(line) + len(part) + 2 > width:
            break
        line += f", {part}"
    return line


def _is_same_file(one: TextIO, other: TextIO) -> bool:
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, UnsupportedOperation):  # of a stream in memory
        return False
