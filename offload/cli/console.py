"""What a person sees beside the text: lines, and a bar of tqdm below them.

Text goes to stdout and all else to stderr, and both may be the same terminal. Where text stands in
mid-line, the bar lies in the row below, and the cursor goes back to where text goes on. A thread
keeps its clock moving, for an import or a large read tells nothing of itself. Invariant: no byte of
it is on the screen while text is written; a file, a pipe and `TERM=dumb` get no bar at all.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import UnsupportedOperation
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from offload.cli.flags import as_flags
from offload.cli.terminal import column_after, columns, fitted
from offload.engine.hooks import Hooks
from offload.interrupts import held_back
from offload.options import OutputOptions
from offload.units import is_decimal, plural

if TYPE_CHECKING:  # `offload --help` must not wait for what they import
    from tqdm import tqdm

    from offload.engine.generation import Run
    from offload.memory.plan import MemoryPlan
    from offload.stats import Stats


class Shown(NamedTuple):
    """A bar's content; another label begins another bar."""

    label: str
    done: float = 0
    total: float = 0  # 0 if the total is unknown
    unit: str = ""
    note: str = ""


@dataclass(kw_only=True)
class Progress:
    """Progress that a bar shows."""

    num_layers: int = 0  # layers that ran since it began

    def now(self) -> Shown:
        """Return the state to show."""
        raise NotImplementedError


@dataclass
class Phase(Progress):
    """A phase of work, with the share done if it is known."""

    label: str
    done: float = 0
    total: float = 0
    unit: str = ""  # "B" or "iB" for bytes, in powers of 1000 or 1024

    def now(self) -> Shown:
        """Return its share, and the layers that ran meanwhile."""
        note = f"{plural(self.num_layers, 'layer')} run" if self.num_layers else ""
        return Shown(self.label, self.done, self.total, self.unit, note)


@dataclass
class TextProgress(Progress):
    """A text being written, sweep by sweep."""

    stats: "Stats"  # the run's metrics, which go on changing
    layers_per_sweep: int
    num_prompt_sweeps: int
    max_new_tokens: int | None  # None if no limit was set

    def now(self) -> Shown:
        """Return layers while the prompt is read, then tokens, the layer and tokens a pass."""
        stats = self.stats
        if not stats.num_first_tokens:
            total = self.layers_per_sweep * self.num_prompt_sweeps
            return Shown("prompt", self.num_layers, total, " layers")
        num_run = self.num_layers % self.layers_per_sweep
        is_drafting = stats.tree_depth > 0 and not num_run
        notes = ["drafting" if is_drafting else f"layer {num_run} of {self.layers_per_sweep}"]
        if not self.num_layers:  # other ranks run them
            notes = []
        num_later = sum(stats.accepted_per_sweep)
        notes += [f"{stats.tokens_per_sweep:.1f} tokens a pass"] if num_later else []
        num_done = stats.num_first_tokens + num_later
        return Shown("writing", num_done, self.max_new_tokens or 0, " tokens", ", ".join(notes))


@dataclass
class BatchProgress(Progress):
    """Many texts, some of them being written."""

    num_texts: int
    num_done: int = 0
    num_passes: int = 0
    started_s: float = field(default_factory=time.monotonic)
    _num_finished_tokens: int = 0
    _under_way: Sequence["Run"] = ()

    def advance(self, runs: Sequence["Run"]) -> None:
        """Note that a pass over the weights begins for these texts."""
        self._under_way = runs
        self.num_passes += bool(runs)

    def finish(self, num_tokens: int) -> None:
        """Note that a text is finished, with this many new tokens."""
        self.num_done += 1
        self._num_finished_tokens += num_tokens
        self._under_way = [run for run in self._under_way if not run.is_finished]

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def num_tokens(self) -> int:
        return self._num_finished_tokens + sum(run.sequence.num_new for run in self._under_way)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.num_passes, 1)

    def now(self) -> Shown:
        """Return the number of finished texts, those being written, and the speed."""
        note = f"{len(self._under_way)} under way"
        if self.num_tokens:
            note += f", {self.tokens_per_s:.2f} tokens/s, {self.tokens_per_pass:.1f} tokens a pass"
        return Shown("writing", self.num_done, self.num_texts, " texts", note)


_TICK_S = 0.25
_WIDE = 90  # columns with room for a note behind the bar
# for one row below, scrolling if need be; the column stays
_LEAVE_ROOM = "\x1bD\x1b[A"
_UP = "\x1b[A"
_SAVE_CURSOR = "\x1b7"
_RESTORE_CURSOR = "\x1b8"
# `{bar}` at the end, which is blank, lets tqdm cut a line to the width of the terminal
_CLOCK = "{desc} [{elapsed}{postfix}]{bar}"
_COUNT = "{desc}: {n_fmt}{unit} [{elapsed}, {rate_noinv_fmt}{postfix}]{bar}"
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"


class _BarRow:
    """The stream that a bar is written to: its row is below the cursor where text stands there."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.column = 0  # of the text

    def write(self, drawn: str) -> None:
        if drawn and self.column:
            drawn = f"{_LEAVE_ROOM}{_SAVE_CURSOR}\n{drawn}{_RESTORE_CURSOR}"
        self._stream.write(drawn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Console:
    """Shows the lines of one run, and the bar below them; nothing where JSON or quiet is wanted.

    Args:
        sizes_like: sizes as the user has written them, for the unit of those that are shown.
        is_silent: show nothing, whatever is wanted.

    Attributes:
        progress: what the bar tells of; None while there is none.
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
        is_terminal = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._has_bar = is_terminal and not self._is_quiet and "TQDM_DISABLE" not in os.environ
        self._is_shared = self._has_bar and _is_same_file(sys.stdout, self._stream)
        # one's own thread may have it, where a signal or a destructor has something to say
        self._lock = threading.RLock()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._row = _BarRow(self._stream)
        self._bar: tqdm[Any] | None = None
        self._has_wrapped = False

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def hooks(self) -> Hooks:
        """Callbacks that show the progress of loading and of a decoder's sweeps."""
        return Hooks(self.wait, self.bytes_landed, self.count, self.layer_done, self.say)

    def say(self, lines: str) -> None:
        """Print lines for the user, above the bar."""
        if self._is_quiet or not lines:
            return
        with self._lock:
            self._erase()
            print(fitted(as_flags(lines), self._stream), file=self._stream)
            self._draw()

    def detail(self, lines: str) -> None:
        """Print lines that only `--verbose` shows."""
        if self._is_verbose:
            self.say(lines)

    def text(self, text: str) -> None:
        """Write a piece of text to stdout, and draw the bar again."""
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

    def show(self, progress: Progress) -> None:
        """Make the bar show this progress from now on."""
        if self._is_quiet:
            return
        with self._lock:
            self.progress = progress
            self._draw()
        if self._thread is None and self._has_bar:
            # one that Ctrl-C met as it began could not be waited for
            with held_back():
                self._thread = threading.Thread(
                    target=self._keep_moving, name="offload-line", daemon=True
                )
                self._thread.start()

    def wait(self, label: str) -> None:
        """Show a phase of unknown length."""
        self.show(Phase(label))

    def bytes_landed(self, done_bytes: int, total_bytes: int, label: str = "") -> None:
        """Show progress in bytes; without a label, of the current phase."""
        self._reach(label, done_bytes, total_bytes, "B" if self.is_decimal else "iB")

    def count(self, done: int, total: int, label: str) -> None:
        """Show progress as a count."""
        self._reach(label, done, total)

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
        """Show that a file is written; signals that would end the program wait until it is."""
        with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            try:
                self.show(Phase(f"keeping {kept}"))
                yield
            finally:
                self.clear()

    def clear(self) -> None:
        """Take the bar away until something else is shown."""
        with self._lock:
            self.progress = None
            self._drop()

    def close(self) -> None:
        """Take it away, and its thread; what is shown later begins another one."""
        self.clear()
        if self._thread is not None:
            self._has_ended.set()
            self._thread.join()
            self._thread = None
            self._has_ended.clear()

    def _reach(self, label: str, done: float, total: float, unit: str = "") -> None:
        """Update the current phase, or begin one if the label is another."""
        shown = self.progress
        if not isinstance(shown, Phase) or label not in ("", shown.label):
            # what an earlier run has done is no part of this one's speed
            self.show(Phase(label, done, total, unit))
            return
        shown.unit = unit
        shown.total = total
        shown.done = done

    def _keep_moving(self) -> None:
        try:
            while not self._has_ended.wait(_TICK_S):
                with self._lock:
                    self._draw()
        # stderr is gone, which the writer of text will find out by itself
        except (OSError, ValueError):
            return

    def _draw(self) -> None:
        """Draw the bar with its current state; another label begins another bar."""
        if self.progress is None or not self._has_bar:
            return
        shown = self.progress.now()
        # what steers a terminal would take the bar apart
        label = "".join(char if char.isprintable() else "?" for char in shown.label)
        if self._bar is None or self._bar.desc != label:
            self._drop()
            self._bar = _bar_of(label, shown, self._row)
        self._bar.n = shown.done
        self._bar.total = shown.total or None
        self._bar.unit = shown.unit
        self._bar.unit_scale = shown.unit in ("B", "iB")
        self._bar.unit_divisor = 1024 if shown.unit == "iB" else 1000
        self._bar.bar_format = _BAR if shown.total else _COUNT if shown.done else _CLOCK
        is_wide = columns(self._stream) >= _WIDE
        self._bar.set_postfix_str(shown.note if is_wide else "", refresh=False)
        self._bar.refresh()

    def _erase(self) -> None:
        if self._bar is not None:
            self._bar.clear()

    def _drop(self) -> None:
        if self._bar is not None:
            self._bar.clear()
            self._bar.close()
        self._bar = None

    def _follow(self, text: str) -> None:
        """Note the column where text has left the cursor.

        Behind the last one terminals differ, so the row is ended there by a blank that goes.
        """
        width = columns(self._stream)
        self._row.column = column_after(text, self._row.column, width)
        self._has_wrapped = self._row.column >= width
        if self._has_wrapped:
            sys.stdout.write(" \r")
            self._row.column = 0


def _bar_of(label: str, shown: Shown, row: _BarRow) -> "tqdm[Any]":
    from tqdm import tqdm

    class Bar(tqdm):
        """A bar that is drawn when the console says so, and by no thread of tqdm's."""

        monitor_interval = 0

    # so long a delay that it is drawn by `refresh` alone; whether there is a bar was decided before
    settings = {"leave": False, "dynamic_ncols": True, "delay": 1e9, "disable": False}
    return Bar(desc=label, initial=shown.done, file=row, **settings)


def _is_same_file(file: TextIO, other: TextIO) -> bool:
    try:
        return os.path.sameopenfile(file.fileno(), other.fileno())
    except (OSError, UnsupportedOperation):  # of a stream in memory
        return False
