"""What the streams of a device did, told on the host's clock once it is over.

One event whose moment the host knows ties the device's clock to its own. Invariant: after that event nobody waits; what
the device has not got to when it is asked is left out.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from offload.streaming.device import Device, Event, Stream

Record = Callable[[str, int, float, float], None]  # what (copy, wait, compute), layer, start and end of perf_counter


class _Span(NamedTuple):
    """Work between two timed events."""

    kind: str
    layer: int
    before: Event
    after: Event


class Spans:
    """Collects spans while somebody listens; any thread may call `mark` and `add`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._listener: Record | None = None
        self._spans: deque[_Span] = deque()
        self._origin, self._origin_s = None, 0.0

    @property
    def listener(self) -> Record | None:
        """Who hears, when it is set again, of spans that are over by then. Setting it waits for what is enqueued."""
        return self._listener

    @listener.setter
    def listener(self, listener: Record | None) -> None:
        self._tell_reached()
        self._listener = listener
        if listener is not None:
            self._origin = self._device.record(self._device.compute, is_timed=True)
            self._device.synchronize(self._origin)
            self._origin_s = time.perf_counter()

    def mark(self, stream: Stream) -> Event:
        """A timed event while somebody listens, None otherwise."""
        return None if self._listener is None else self._device.record(stream, is_timed=True)

    def add(self, kind: str, layer: int, before: Event, after: Event) -> None:
        """Work on `layer` that is enqueued between these events, both of them timed; nothing where one is None."""
        if before is not None and after is not None and self._listener is not None:
            self._spans.append(_Span(kind, layer, before, after))

    def _tell_reached(self) -> None:
        while self._spans:
            span = self._spans.popleft()
            end_s = self._device.elapsed_s(self._origin, span.after)
            if end_s is not None and self._listener is not None:
                start_s = self._device.elapsed_s(self._origin, span.before)
                assert start_s is not None, "an event is reached before the one behind it"
                self._listener(span.kind, span.layer, self._origin_s + start_s, self._origin_s + end_s)


class Stall:
    """How long compute has waited for bytes, by timed events of its stream; nobody is kept waiting to find out."""

    def __init__(self, device: Device) -> None:
        self._device, self._known_s = device, 0.0
        self._waits = deque[tuple[Event, Event]]()

    def add(self, before: Event, after: Event) -> None:
        """Between these two it waited."""
        self._waits.append((before, after))

    @property
    def known_s(self) -> float:
        """Of the waits that are over."""
        while self._waits and (waited_s := self._device.elapsed_s(*self._waits[0])) is not None:
            self._known_s += waited_s
            self._waits.popleft()
        return self._known_s
