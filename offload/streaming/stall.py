"""How long compute has waited for bytes, as far as the device has got; nobody is kept waiting to find out."""

from collections import deque

from offload.streaming.device import Device, Event


class Stall:
    """Sums the times between timed events of the stream that computes."""

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
