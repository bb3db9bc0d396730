"""Thread counts and ways of waiting, for passes and for drafting, adapted to real steps.

A pass of many rows needs every core, drafting's small products few, and threads that spin while
they wait stall the others when another process takes a core. So now and then a step is tried with
the next larger or smaller count, or the other way of waiting, and the faster one is kept.

Invariant: trials cost about a percent of the time, since the wait for the next one grows with the
loss of the last.
"""

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

_NUM_RECENT = 7  # steps whose median is the time of the mode in use
_NUM_TRIED = 3  # steps in a row whose median judges another mode
_HOPELESS = 1.1  # times as slow as usual: such a trial ends at its first step
_ALIKE = 4  # steps of at most that many times as many rows begin with each other's modes
# share of the usual time below which a mode that takes more of the cores is kept; one that takes
# less is kept at the same time
_MORE_BAR = 0.95
_SLOWED = 1.2  # times as slow as when modes were last compared: something has changed
_LOST_SHARE = 0.01  # of all time, for trials
_BYTES_PER_THREAD = 1 << 17  # of an addition that torch spreads over all threads
# steps until the next trial
_FIRST_WAIT = 3
_LEAST_WAIT = 8
_MOST_WAIT = 128


class Mode(NamedTuple):
    """A number of threads and how they wait."""

    num_threads: int
    is_asleep: bool = False  # while they wait; else they look for work for a while first


class StepModes(NamedTuple):
    """The modes of one step."""

    draft: Mode  # while the tree grows
    sweep: Mode  # while the target scores it


class ThreadPolicy:
    """The modes of one decoder, with counts from a rising ladder; `start` holds at first.

    Args:
        seen_s: seconds by mode of products like those of drafting, and of sweeps, as measured at
            start; the slower a mode was, the later it is tried.
    """

    def __init__(
        self,
        ladder: Sequence[int],
        start: StepModes,
        seen_s: Sequence[Mapping[Mode, float]] = ({}, {}),
    ) -> None:
        self.most = ladder[-1]
        self.start = start
        self._ladder = ladder
        self._seen_s = seen_s
        self._choices: dict[int, tuple[_Choice, _Choice]] = {}

    @classmethod
    def fixed(cls, num_threads: int) -> "ThreadPolicy":
        """Return the policy that uses this many threads in all steps."""
        mode = Mode(num_threads)
        return cls([num_threads], StepModes(mode, mode))

    def modes(self, num_rows: int) -> StepModes:
        """Return the modes for the next step, of this many rows."""
        if known := self._choices.get(num_rows):
            return StepModes(*(choice.mode for choice in known))
        return self._found_nearby(num_rows)

    def took(self, num_rows: int, *, draft_s: float, sweep_s: float) -> None:
        """Record the times of a step in the modes that `modes` gave; a prompt's step is no example."""
        if num_rows not in self._choices:
            starts = zip(self._found_nearby(num_rows), self._seen_s, strict=True)
            draft, sweep = (_Choice(self._ladder, *start) for start in starts)
            self._choices[num_rows] = draft, sweep
        for index, seconds in enumerate((draft_s, sweep_s)):
            choice = self._choices[num_rows][index]
            if choice.took(seconds):
                for rows, choices in self._choices.items():
                    if _are_alike(rows, num_rows) and rows != num_rows:
                        choices[index].hear(choice)

    def _found_nearby(self, num_rows: int) -> StepModes:
        """Return the modes of steps with nearly as many rows, since trees vary among texts."""
        near = [rows for rows in self._choices if _are_alike(rows, num_rows)]
        if not near:
            return self.start
        nearest = min(near, key=lambda rows: max(rows, num_rows) / min(rows, num_rows))
        draft, sweep = self._choices[nearest]
        return StepModes(draft.usual, sweep.usual)


def _are_alike(rows: int, other_rows: int) -> bool:
    return max(rows, other_rows) <= _ALIKE * min(rows, other_rows)


def thread_ladder(most: int) -> list[int]:
    """Return counts worth trying: powers of two, all cores, one less for a busy neighbour."""
    powers = {2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most}
    return sorted(powers | {most, max(1, most - 1)})


_REVERSE = {"fewer": "more", "more": "fewer", "other way": "other way"}


class _Choice:
    """The mode for one kind of work, and trials of others."""

    def __init__(self, ladder: Sequence[int], start: Mode, seen_s: Mapping[Mode, float]) -> None:
        self._ladder = ladder
        self.mode = start
        self.usual = start
        self._move = ""
        self._seen_s = seen_s
        self._recent = deque[float](maxlen=_NUM_RECENT)
        self._tried = list[float]()
        self._wait = self._waits(_FIRST_WAIT)  # steps until each is tried
        self._compared_s = float("inf")  # the usual time when modes were last compared
        self._has_judged = False

    def took(self, seconds: float) -> bool:
        """Record the seconds of a step, and begin a trial where one is due.

        Returns True if a trial has ended with this step.
        """
        if self._move:
            self._tried.append(seconds)
            return self._judge()
        self._recent.append(seconds)
        self._wait = {move: wait - 1 for move, wait in self._wait.items()}
        lately = list(self._recent)[-_NUM_TRIED:]
        if len(lately) == _NUM_TRIED and self._compared_s == float("inf"):
            self._compared_s = median(lately)  # if there is nothing to try for long
        if len(lately) == _NUM_TRIED and median(lately) > _SLOWED * self._compared_s:
            # the usual time before is outdated
            self._recent = deque(lately, _NUM_RECENT)
            # others are there: leave more
            self._compared_s = median(self._recent)
            self._wait["fewer"] = 0
            if not self.usual.is_asleep:
                self._wait["other way"] = 0
        for move in sorted(self._wait, key=self._wait.__getitem__):
            mode = self._after(move)
            if mode is not None and self._wait[move] <= 0:
                self.mode = mode
                self._move = move
                self._tried = []
                self._compared_s = median(self._recent)
                break
        return False

    def hear(self, other: "_Choice") -> None:
        """Adopt the mode that steps of nearly as many rows have found, before any trial of its own."""
        if self._has_judged or self._move:
            return
        if self.usual != other.usual:
            self.mode = self.usual = other.usual
            self._recent.clear()
            self._compared_s = float("inf")
        self._wait = dict(other._wait)

    def _waits(self, least: int) -> dict[str, int]:
        """Return steps until each move is tried, by what it led to at start."""
        usual_s = self._seen_s.get(self.usual)
        waits = dict.fromkeys(("other way", "fewer", "more"), least)
        for move in waits:
            mode = self._after(move)
            if mode and usual_s and (lost_s := self._seen_s.get(mode, 0.0) - usual_s) > 0:
                waits[move] = max(least, _steps_for(lost_s, usual_s))
        return waits

    def _after(self, move: str) -> Mode | None:
        """Return the mode that a move leads to, if there is one."""
        count, is_asleep = self.usual
        if len(self._ladder) == 1 or (move == "other way" and count == 1):
            return None
        if move == "other way":
            return Mode(count, not is_asleep)
        at = self._ladder.index(count) + (1 if move == "more" else -1)
        return Mode(self._ladder[at], is_asleep=True) if 0 <= at < len(self._ladder) else None

    def _judge(self) -> bool:
        """End a trial that has had enough steps, and keep the faster mode; return True if it ended.

        The median of a few steps decides, since other processes slow some of them. A mode that is
        much slower is given up at its first step.
        """
        usual_s = median(self._recent)
        tried_s = median(self._tried)
        if len(self._tried) < _NUM_TRIED and min(self._tried) < _HOPELESS * usual_s:
            return False
        self._has_judged = True
        takes_more = _cores_taken(self.mode) > _cores_taken(self.usual)
        if tried_s > usual_s * (_MORE_BAR if takes_more else 1.0):
            lost_s = sum(self._tried) - len(self._tried) * usual_s
            self._wait[self._move] = _steps_for(lost_s, usual_s)
            self.mode = self.usual
            self._move = ""
        else:
            self.usual = self.mode
            self._recent = deque(self._tried, _NUM_RECENT)
            self._wait = self._waits(1)
            self._wait[_REVERSE[self._move]] = _steps_for(usual_s - tried_s, tried_s)
            self._move = ""
            self._compared_s = tried_s
        return True


def _cores_taken(mode: Mode) -> tuple[int, bool]:
    return mode.num_threads, not mode.is_asleep


def _steps_for(lost_s: float, step_s: float) -> int:
    """Return the number of steps until the same loss is affordable again."""
    return min(_MOST_WAIT, max(_LEAST_WAIT, round(lost_s / (_LOST_SHARE * step_s))))


class ThreadWaiting:
    """Sets how the compute threads of this process wait for each other; at first they spin.

    Spinning is quicker where the cores are ours, and far slower beside a process that needs one.
    libgomp reads `GOMP_SPINCOUNT` once, at start, but with more OpenMP threads than cores it spins a
    hundred times at most, says its manual: an idle team is kept while the others shall sleep.
    """

    def __init__(self) -> None:
        self._ended: threading.Event | None = None
        self._thread = threading.Thread()

    def compute_in(self, mode: Mode) -> None:
        """Compute with this mode's threads from now on, which wait as it says."""
        import torch  # the rest of this file is for those who compute nothing, too

        torch.set_num_threads(mode.num_threads)
        if mode.num_threads > 1:
            self.let_sleep(mode.is_asleep)

    def let_sleep(self, is_asleep: bool) -> None:
        """Let waiting threads sleep at once, or spin for a while first."""
        if is_asleep and self._ended is None:
            self._ended = threading.Event()
            started = threading.Event()
            self._thread = threading.Thread(
                target=_keep_team, args=(started, self._ended), name="offload-idle", daemon=True
            )
            self._thread.start()
            started.wait()
        elif not is_asleep and self._ended is not None:
            self.close()

    def close(self) -> None:
        """End the idle team."""
        if self._ended is not None:
            self._ended.set()
            self._thread.join()
            self._ended = None


def _keep_team(started: threading.Event, ended: threading.Event) -> None:
    import torch

    num_threads = max(2, len(os.sched_getaffinity(0)))
    torch.set_num_threads(num_threads)
    torch.zeros(num_threads * _BYTES_PER_THREAD, dtype=torch.uint8).add_(1)
    started.set()
    ended.wait()
