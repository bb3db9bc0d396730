"""Ranks that are threads of one process, with delays that a test chooses."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.distributed.orders import Order, decode, encode
from offload.distributed.transport import Channel
from offload.errors import RankError

Delay = Callable[[int, int, Channel], float]  # seconds from sending to arriving, by sender, receiver and channel
Way = tuple[int, Channel]


class _Hub:
    """What the ranks share."""

    def __init__(self, num_ranks: int, delay: Delay) -> None:
        self.num_ranks, self.delay = num_ranks, delay
        self.boxes: dict[tuple[int, int, Channel], deque[tuple[float, Order]]] = defaultdict(deque)
        self.barrier = threading.Barrier(num_ranks)
        self.parts: list[Tensor | None] = [None] * num_ranks
        self.changed = threading.Condition()
        self.ended = set[int]()
        self.losses: dict[int, RankError] = {}  # by the rank that must hear of it


class InMemory:
    """One of `in_memory(n)`, as a `Transport`; waits at most `limit_s`, so that a test that would hang fails."""

    def __init__(self, hub: _Hub, rank: int, limit_s: float) -> None:
        self._hub, self.rank, self.num_ranks, self._limit_s = hub, rank, hub.num_ranks, limit_s
        self.sent: list[tuple[int, Channel, Order]] = []
        self.bytes_sent, self.exchange_s = Counter[str](), 0.0
        self.noted = list[bool]()  # of work: whether it is under way

    def send(self, to: int, channel: Channel, order: Order) -> None:
        """Over the wire, also to oneself."""
        self.sent.append((to, channel, order))
        due_s = time.perf_counter() + self._hub.delay(self.rank, to, channel)
        with self._hub.changed:
            self._hub.boxes[self.rank, to, channel].append((due_s, decode(encode(order))))
            self._hub.changed.notify_all()

    def receive(self, source: int, channel: Channel) -> Order:
        self.wait_any([(source, channel)])
        return self._hub.boxes[source, self.rank, channel].popleft()[1]

    def poll(self, source: int, channel: Channel) -> Order | None:
        box = self._hub.boxes[source, self.rank, channel]
        with self._hub.changed:
            self._raise_loss()
            return box.popleft()[1] if box and box[0][0] <= time.perf_counter() else None

    def wait_any(self, ways: Sequence[Way]) -> Way:
        limit_s = time.perf_counter() + self._limit_s
        boxes = {way: self._hub.boxes[way[0], self.rank, way[1]] for way in ways}
        with self._hub.changed:
            while (now_s := time.perf_counter()) < limit_s:
                due_s, result = min(((box[0][0], way) for way, box in boxes.items() if box), default=(limit_s, None))
                if result is not None and due_s <= now_s:
                    return result
                self._raise_loss()
                if result is None and self._hub.ended.issuperset(source for source, _ in ways):
                    raise RankError(f"{list(ways)} have ended")
                self._hub.changed.wait(due_s - now_s)
        raise RankError(f"{list(ways)} are silent")

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        self.bytes_sent["broadcast"] += rows.nbytes * (self.num_ranks - 1) * (self.rank == source)
        return self._exchange(rows)[source].clone()

    def gather(self, part_TR: Tensor, widths: Sequence[int]) -> Tensor:
        self.bytes_sent["gather"] += len(part_TR) * max(widths) * part_TR.itemsize * (self.num_ranks - 1)
        parts = self._exchange(part_TR)
        assert [part.shape[-1] for part in parts] == list(widths), "widths are not those of the parts"
        return torch.cat(parts, -1)

    is_stalled = False

    def note_work(self, work: str, *, is_under_way: bool) -> None:
        self.noted.append(is_under_way)

    def fail(self, reason: str) -> None:
        self._lose([self.rank], f"rank {self.rank}: {reason}")

    def close(self, reason: str = "", *, is_refusal: bool = False) -> None:
        self._hub.barrier.abort()
        self._hub.ended.add(self.rank)
        others = [rank for rank in range(self.num_ranks) if rank != self.rank and reason]
        self._lose(others, f"rank {self.rank}{'' if is_refusal else ' ended'}: {reason}")

    def _lose(self, ranks: Sequence[int], line: str) -> None:
        with self._hub.changed:
            for rank in ranks:
                self._hub.losses.setdefault(rank, RankError(line))
            self._hub.changed.notify_all()

    def _raise_loss(self) -> None:
        if (loss := self._hub.losses.get(self.rank)) is not None:
            raise loss

    def _exchange(self, part: Tensor) -> list[Tensor]:
        assert part.device.type == "cpu", "torch.distributed goes by where rows lie, so two kinds would never meet"
        try:
            self._hub.parts[self.rank] = part.clone()
            self._hub.barrier.wait(self._limit_s)
            parts = [part for part in self._hub.parts if part is not None]
            self._hub.barrier.wait(self._limit_s)
        except threading.BrokenBarrierError:
            raise RankError("another rank has left") from None
        return parts


def in_memory(num_ranks: int, delay: Delay = lambda *_: 0.0, limit_s: float = 30.0) -> list[InMemory]:
    """The transports of all ranks."""
    hub = _Hub(num_ranks, delay)
    return [InMemory(hub, rank, limit_s) for rank in range(num_ranks)]
