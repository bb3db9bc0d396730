"""What the streams of a device did, told on the host's clock once it is over.

A device has a clock of its own. One event whose moment the host knows ties both together, and every other time is that
moment and what the device says has passed since. Invariant: after that first event nobody waits; what the device has
not got to when it is asked is left for later.
"""

import time
from collections import deque
from typing import NamedTuple

from offload.streaming.device import Device, Event
from offload.streaming.layer_stream import Record


class _Span(NamedTuple):
    """Work between two timed events of one stream."""

    kind: str
    layer: int
    before: Event
    after: Event


class Spans:
    """Collects spans; `add` may be called by any thread. Building it waits for what is enqueued.

    Args:
        tell: hears of each span, from whoever calls `tell_reached`.
    """

    def __init__(self, device: Device, tell: Record) -> None:
        self._device, self.tell = device, tell
        self._spans: deque[_Span] = deque()
        self._origin = device.record(device.compute, is_timed=True)
        device.synchronize(self._origin)
        self._origin_s = time.perf_counter()

    def add(self, kind: str, layer: int, before: Event, after: Event) -> None:
        """Work on `layer` that is enqueued between these events, both of them timed."""
        self._spans.append(_Span(kind, layer, before, after))

    def tell_reached(self) -> None:
        """Tell what is over; the rest stays."""
        for _ in range(len(self._spans)):
            span = self._spans.popleft()
            end_s = self._device.elapsed_s(self._origin, span.after)
            if end_s is None:
                self._spans.append(span)
                continue
            start_s = self._device.elapsed_s(self._origin, span.before)
            assert start_s is not None, "an event is reached before the one behind it"
            self.tell(span.kind, span.layer, self._origin_s + start_s, self._origin_s + end_s)
