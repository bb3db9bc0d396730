"""What a pass spends its time on, layer by layer: copies, waits, computing, and drafting.

Written as a Chrome trace, for ui.perfetto.dev. Times come from the stream's own `record` hook and
from the figures of each step; nothing is inferred but the moment at which a copy really began: it
is asked for while the ones before it still read, so it begins when they end, at the earliest.
"""

import threading
from pathlib import Path
from typing import NamedTuple

from offload.bench.harness.record import store

LANES = ("sweep", "draft", "verify", "wait", "compute", "copy")  # from top to bottom


class Event(NamedTuple):
    """Something that took time."""

    kind: str  # one of LANES
    layer: int  # -1 where it concerns none
    start_s: float
    end_s: float


class Timeline:
    """Collects events; `add` may be called by any thread."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, kind: str, layer: int, start_s: float, end_s: float) -> None:
        with self._lock:
            self._events.append(Event(kind, layer, start_s, end_s))

    def events(self) -> list[Event]:
        """Return all events in the order of their starts, copies one behind the other."""
        with self._lock:
            found = list(self._events)
        free_s = float("-inf")
        events = []
        for event in sorted(found, key=lambda event: event.end_s):
            if event.kind == "copy":
                event = event._replace(start_s=min(max(event.start_s, free_s), event.end_s))
                free_s = event.end_s
            events.append(event)
        return sorted(events, key=lambda event: event.start_s)

    def write(self, path: Path) -> None:
        """Write complete events in microseconds, one row per kind. Raises `UserError`."""
        events = self.events()
        zero_s = min((event.start_s for event in events), default=0.0)
        told = list[dict[str, object]]()
        for at, kind in enumerate(LANES):
            named = {"name": "thread_name", "args": {"name": kind}}
            told.append({"ph": "M", "pid": 1, "tid": at, **named})
        for kind, layer, start_s, end_s in events:
            spans = {"ts": (start_s - zero_s) * 1e6, "dur": (end_s - start_s) * 1e6}
            named = {"name": kind, "cat": kind, "args": {"layer": layer}}
            told.append({"ph": "X", "pid": 1, "tid": LANES.index(kind), **named, **spans})
        store({"displayTimeUnit": "ms", "traceEvents": told}, path)
