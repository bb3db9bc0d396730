"""What a sweep spends its time on, layer by layer: copies, waits, computing, and the drafting around it.

Written as a Chrome trace (open it in ui.perfetto.dev) and drawn as a picture of one step. Times come from the stream's
own `record` hook and from the figures of each step; nothing is inferred but the moment at which a copy really began: it
is asked for while the ones before it still read, so it begins when they end, at the earliest.
"""

import json
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offload.bench.harness.whole_file import whole
from offload.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LANES = ("draft", "verify", "wait", "compute", "copy")  # from top to bottom
_NAMES = {"draft": "draft", "verify": "verify", "wait": "wait for the link", "compute": "compute", "copy": "copy"}


class Event(NamedTuple):
    """Something that took time."""

    kind: str  # one of LANES, or `sweep`
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
        """All events, in the order of their starts, copies one behind the other."""
        with self._lock:
            found = list(self._events)
        free_s, events = float("-inf"), []
        for event in sorted(found, key=lambda event: event.end_s):
            if event.kind == "copy":
                event = event._replace(start_s=min(max(event.start_s, free_s), event.end_s))
                free_s = event.end_s
            events.append(event)
        return sorted(events, key=lambda event: event.start_s)


def require_pictures() -> None:
    """Raises `UserError` where pictures cannot be drawn; ask before measuring."""
    if find_spec("matplotlib") is None:
        raise UserError("--trace draws a picture and needs matplotlib: pip install 'offload[bench]'")


def chrome_trace(events: Sequence[Event]) -> dict[str, object]:
    """The trace event format: complete events in microseconds, one row per kind."""
    zero_s = min((event.start_s for event in events), default=0.0)
    lanes, told = ("sweep", *LANES), list[dict[str, object]]()
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": at, "args": {"name": kind}} for at, kind in enumerate(lanes)
    ]
    for kind, layer, start_s, end_s in events:
        named = {"name": kind, "args": {}} if layer < 0 else {"name": f"{kind} {layer}", "args": {"layer": layer}}
        when = {"ts": (start_s - zero_s) * 1e6, "dur": (end_s - start_s) * 1e6}
        told.append({"ph": "X", "cat": kind, "pid": 1, "tid": lanes.index(kind), **named, **when})
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *told]}


def trace_files(path: Path) -> tuple[Path, Path]:
    """Where the trace and its picture go, whichever of the two `path` names."""
    return path.with_suffix(".json") if path.suffix == ".svg" else path, path.with_suffix(".svg")


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Write the trace as FILE.json and one step as FILE.svg, whichever of them is named. Raises `UserError`."""
    traced, drawn = trace_files(path)
    try:
        with whole(traced) as place:
            place.write_text(json.dumps(chrome_trace(events)) + "\n", encoding="utf-8")
        with whole(drawn) as place:
            draw(last_step(events)).savefig(place)
    except OSError as error:
        raise UserError(f"cannot write --trace {path} ({error.strerror}): name another file") from None


def read_trace(path: Path) -> list[Event]:
    """The events of a written trace. Raises `UserError` for any other file."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        spans = [(e["cat"], e["args"].get("layer", -1), e["ts"], e["ts"] + e["dur"]) for e in told if e["ph"] == "X"]
        return [Event(kind, layer, start / 1e6, end / 1e6) for kind, layer, start, end in spans]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no trace of offload bench decode ({error}): write one with --trace") from None


def last_step(events: Sequence[Event]) -> list[Event]:
    """What happened between the beginning of the last draft and the end of its step."""
    lo = max((event.start_s for event in events if event.kind == "draft"), default=0.0)
    hi = max((event.end_s for event in events if event.kind == "verify"), default=float("inf"))
    return [event for event in events if event.end_s > lo and event.start_s < hi]


def draw(events: Sequence[Event]) -> "Figure":
    from offload.bench.harness.picture import COLOURS, new_figure

    figure, (panel,) = new_figure(width=11)
    zero_s = min((event.start_s for event in events if event.kind == "draft"), default=0.0)
    for row, kind in enumerate(LANES):
        spans = [event for event in events if event.kind == kind]
        for shade in (0, 1):
            bars = [(e.start_s - zero_s, e.end_s - e.start_s) for e in spans if e.layer % 2 == shade]
            panel.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[row], alpha=(0.95, 0.6)[shade], linewidth=0)
    panel.set_yticks(range(len(LANES)), [_NAMES[kind] for kind in LANES])
    panel.invert_yaxis()
    panel.set_xlabel("seconds since the step began; layers in turn in two shades")
    panel.set_title("One step: what runs when")
    return figure
