"""Ranks that are threads of one process, with delays that a test chooses."""

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.distributed.transport import Channel, Message, Transport
from offload.errors import RankError

Delay = Callable[[int, int, Channel], float]  # seconds from sending to arriving, by sender, receiver and channel


class _Hub:
    """What the ranks share."""

    def __init__(self, num_ranks: int, delay: Delay) -> None:
        self.num_ranks, self.delay = num_ranks, delay
        self.boxes: dict[tuple[int, int, Channel], queue.Queue[tuple[float, Message]]] = defaultdict(queue.Queue)
        self.barrier = threading.Barrier(num_ranks)
        self.parts: list[Tensor | None] = [None] * num_ranks
        self.sent = threading.Condition()


class InMemory(Transport):
    """One of `in_memory(n)`; waits at most `limit_s`, so that a test that would hang fails."""

    def __init__(self, hub: _Hub, rank: int, limit_s: float) -> None:
        self._hub, self.rank, self.num_ranks, self._limit_s = hub, rank, hub.num_ranks, limit_s
        self.sent: list[tuple[int, Channel, Message]] = []
        self.bytes_sent, self.exchange_s = Counter[str](), 0.0

    def send(self, to: int, channel: Channel, message: Message) -> None:
        self.sent.append((to, channel, message))
        due = time.perf_counter() + self._hub.delay(self.rank, to, channel)
        with self._hub.sent:
            self._box(self.rank, to, channel).put((due, message))
            self._hub.sent.notify_all()

    def receive(self, source: int, channel: Channel) -> Message:
        try:
            due, message = self._box(source, self.rank, channel).get(timeout=self._limit_s)
        except queue.Empty:
            raise RankError(f"rank {source} is silent on {channel.name}") from None
        time.sleep(max(0.0, due - time.perf_counter()))
        return message

    def poll(self, source: int, channel: Channel) -> Message | None:
        box = self._box(source, self.rank, channel)
        with box.mutex:
            is_due = bool(box.queue) and box.queue[0][0] <= time.perf_counter()
        return box.get()[1] if is_due else None

    def wait_any(self, ways: Sequence[tuple[int, Channel]]) -> tuple[int, Channel]:
        limit_s = time.perf_counter() + self._limit_s
        with self._hub.sent:
            while (now_s := time.perf_counter()) < limit_s:
                boxes = {way: self._box(way[0], self.rank, way[1]) for way in ways}
                due_s, way = min(
                    ((box.queue[0][0], way) for way, box in boxes.items() if box.queue), default=(limit_s, None)
                )
                if way is not None and due_s <= now_s:
                    return way
                self._hub.sent.wait(due_s - now_s)
        raise RankError(f"{list(ways)} are silent")

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        self.bytes_sent["broadcast"] += rows.nbytes * (self.num_ranks - 1) * (self.rank == source)
        return self._exchange(rows)[source].clone()

    def gather(self, part_TR: Tensor, widths: Sequence[int]) -> Tensor:
        self.bytes_sent["gather"] += len(part_TR) * max(widths) * part_TR.itemsize * (self.num_ranks - 1)
        parts = self._exchange(part_TR)
        assert [part.shape[-1] for part in parts] == list(widths), "widths are not those of the parts"
        return torch.cat(parts, -1)

    def close(self, reason: str = "", *, is_refusal: bool = False) -> None:
        self._hub.barrier.abort()

    def _box(self, source: int, to: int, channel: Channel) -> "queue.Queue[tuple[float, Message]]":
        with self._hub.sent:
            return self._hub.boxes[source, to, channel]

    def _exchange(self, part: Tensor) -> list[Tensor]:
        assert part.device.type == "cpu", "torch.distributed goes by where rows lie, so two kinds would never meet"
        try:
            self._hub.parts[self.rank] = part.clone()
            self._hub.barrier.wait(self._limit_s)
            parts = [one for one in self._hub.parts if one is not None]
            self._hub.barrier.wait(self._limit_s)
        except threading.BrokenBarrierError:
            raise RankError("another rank has left") from None
        return parts


def in_memory(num_ranks: int, delay: Delay = lambda *_: 0.0, limit_s: float = 30.0) -> list[InMemory]:
    """The transports of so many ranks."""
    hub = _Hub(num_ranks, delay)
    return [InMemory(hub, rank, limit_s) for rank in range(num_ranks)]
