"""A transport over torch.distributed's gloo, whatever ranks compute on: what they exchange lies in host memory.

Messages of each channel go through a process group of their own. Gloo's receiver must know the size, so a header comes
first; and a send lasts until the other side takes it, so a thread waits for it and keeps its tensors alive. Exchanges
(`broadcast`, `gather`) have a group, too, and are of bytes, whatever the type. Invariant: whoever waits for a rank
that is lost is told so, and which one: by the box that it waits at, or by the watch that knows.
"""

import queue
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import RankError
from offload.ranks.messages import Channel, Message
from offload.ranks.transport import Transport
from offload.ranks.watch import Loss, Watch
from offload.ranks.wire import HEADER_NUMBERS, as_bytes, end_header, header_of, read_header
from offload.threads.interrupts import held_back

_Box = queue.Queue[Message | Loss]
_Sent = tuple[list[dist.Work], list[Tensor]]
_Reaped = queue.Queue[_Sent | None]
_ORDER_LIMIT = timedelta(days=30)  # an idle user's; also for what is sent to a rank that computes for long
_CLOSE_S = 3.0  # for all others to close as well; who is in the middle of a pass is not waited for any longer
# Under its new name where torch has one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Groups(NamedTuple):
    """What ranks talk through."""

    channels: dict[Channel, dist.ProcessGroup]
    exchange: dist.ProcessGroup  # its limit: how long one may keep the others waiting
    watched: dist.ProcessGroup


class Gloo(Transport):
    """One rank of a process group that is initialised.

    Args:
        groups: process groups that nobody else uses.
        silence_s: the time limit of the group that is watched.
    """

    def __init__(self, groups: Groups, silence_s: float) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.bytes_sent, self.exchange_s = Counter[str](), 0.0
        self._groups, self._exchanges = groups.channels, [groups.exchange]
        self._boxes, self._sent = dict[tuple[int, Channel], _Box](), dict[tuple[int, Channel], _Reaped]()
        self._threads, self._is_closed = list[threading.Thread](), False
        self._locks, self._lock = defaultdict[object, threading.Lock](threading.Lock), threading.Lock()
        self._arrived = threading.Condition()
        self._watch = Watch(groups.watched, silence_s, self._wake)

    def send(self, to: int, channel: Channel, message: Message) -> None:
        """Returns at once. A payload must not be written to any more."""
        if (loss := self._watch.loss) is not None:
            raise loss.error()
        if to == self.rank:
            self._put(self._box(to, channel), message)
            return
        parts = [header_of(message)]
        if message.numbers:
            parts.append(torch.tensor(message.numbers, dtype=torch.int64))
        if message.payload is not None and message.payload.numel():
            parts.append(as_bytes(message.payload))
        self._send(to, channel, parts)
        self.bytes_sent[message.kind.name] += sum(part.nbytes for part in parts)

    def receive(self, source: int, channel: Channel) -> Message:
        """The next message, waited for as long as the channel's limit says."""
        return self._opened(self._box(source, channel), is_waited_for=True)

    def poll(self, source: int, channel: Channel) -> Message | None:
        """The next message, if it has arrived."""
        try:
            return self._opened(self._box(source, channel), is_waited_for=False)
        except queue.Empty:
            return None

    def wait_any(self, ways: Sequence[tuple[int, Channel]]) -> tuple[int, Channel]:
        """One of these whose next message has arrived, or never will; nothing is taken."""
        boxes = {way: self._box(*way) for way in ways}
        with self._arrived:
            while (found := next((way for way, box in boxes.items() if not box.empty()), None)) is None:
                self._arrived.wait()
        return found

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        """The source's rows on every rank; what others give is filled."""
        rows = rows.contiguous()
        with self._exchange():
            dist.broadcast(as_bytes(rows), source, group=self._exchanges[0])
        if self.rank == source:
            self.bytes_sent["broadcast"] += rows.nbytes * (self.num_ranks - 1)
        return rows

    def gather(self, part_TR: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side; narrower parts are filled up on the way: gloo wants them alike."""
        T, widest = part_TR.shape[0], max(widths)
        mine = torch.nn.functional.pad(part_TR, (0, widest - part_TR.shape[1])).contiguous()
        parts = mine.new_empty(self.num_ranks, T, widest)
        with self._exchange():
            _all_gather(as_bytes(parts), as_bytes(mine), group=self._exchanges[0])
        self.bytes_sent["gather"] += mine.nbytes * (self.num_ranks - 1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], -1)

    def lost(self) -> RankError | None:
        """What `receive` would raise now, if another rank is known to be lost."""
        return None if self._watch.loss is None else self._watch.loss.error()

    def close(self, reason: str = "", *, is_refusal: bool = False) -> None:
        """Tell the others that this rank has ended, and why where it has failed; then wait for them, not for long.

        What they sent is taken from them until they say that they have ended, too: a thread that is still in gloo when
        Python ends would abort the process as soon as something arrives.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.end(reason, is_refusal=is_refusal)
        dist.destroy_process_group(self._exchanges.pop())  # whoever waits there for this rank wakes up
        for peer, channel in product(set(range(self.num_ranks)) - {self.rank}, Channel):
            self._box(peer, channel)
            with suppress(RankError):
                self._send(peer, channel, [end_header()])
        for sent in self._sent.values():
            sent.put(None)
        due_s = time.monotonic() + _CLOSE_S
        for thread in (*self._threads, *self._watch.threads):
            thread.join(max(0.0, due_s - time.monotonic()))
        if not any(thread.is_alive() for thread in (*self._threads, *self._watch.threads)):
            dist.destroy_process_group()

    def _send(self, to: int, channel: Channel, parts: list[Tensor]) -> None:
        """All of it or, where the receiver is lost, an error; Ctrl-C comes before or after."""
        with held_back(), self._lock_of(to, channel):
            try:
                works = [dist.isend(part, to, group=self._groups[channel]) for part in parts]
            except RuntimeError as error:
                raise self._watch.verdict(_line(to, error), to) from error
            self._reaper(to, channel).put(([work for work in works if work is not None], parts))

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            with held_back():
                yield
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the group, whose end others wait for in `close`
            raise self._watch.verdict(_line(None, error)) from error
        finally:
            self.exchange_s += time.perf_counter() - began_s

    def _opened(self, box: _Box, *, is_waited_for: bool) -> Message:
        found = box.get(block=is_waited_for)
        if isinstance(found, Message):
            return found
        box.put(found)  # for whoever asks next
        raise found.error() if found.is_told else self._watch.verdict(found.line, found.rank)

    def _box(self, source: int, channel: Channel) -> _Box:
        """Where a channel's messages of a rank arrive; a thread fills it from the first question on."""
        with self._lock:
            if (box := self._boxes.get((source, channel))) is None:
                box = self._boxes[source, channel] = queue.Queue()
                if source != self.rank:
                    self._start(self._fill, box, source, channel)
                if (loss := self._watch.loss) is not None:
                    self._put(box, loss)
        return box

    def _fill(self, box: _Box, source: int, channel: Channel) -> None:
        try:
            while (message := _received(source, self._groups[channel])) is not None:
                self._put(box, message)
            self._put(box, Loss(source, f"rank {source} has ended"))
        except RuntimeError as error:
            self._put(box, Loss(source, _line(source, error), is_told=False))
        except ValueError as error:
            self._watch.lose(Loss(source, f"rank {source} sent what cannot be: {error}", is_told=False))

    def _put(self, box: _Box, found: Message | Loss) -> None:
        with self._arrived:
            box.put(found)
            self._arrived.notify_all()

    def _reaper(self, to: int, channel: Channel) -> _Reaped:
        with self._lock:
            if (sent := self._sent.get((to, channel))) is None:
                sent = self._sent[to, channel] = queue.Queue()
                self._start(_wait_for_each, sent)
        return sent

    def _lock_of(self, to: int, channel: Channel) -> threading.Lock:
        with self._lock:
            return self._locks[to, channel]

    def _start(self, work: Callable[..., None], *of: object) -> None:
        self._threads.append(threading.Thread(target=work, args=of, name="offload-rank", daemon=True))
        self._threads[-1].start()

    def _wake(self) -> None:
        """Whoever waits has waited in vain."""
        with self._lock:
            for box in self._boxes.values():
                if (loss := self._watch.loss) is not None:
                    self._put(box, loss)


def _received(source: int, group: dist.ProcessGroup) -> Message | None:
    """One message; None after the last. Raises `ValueError` for a header that cannot be, `RuntimeError` for a loss."""
    header = torch.empty(HEADER_NUMBERS, dtype=torch.int32)
    _receive(header, source, group)
    if (announced := read_header(header)) is None:
        return None
    numbers = torch.empty(announced.num_numbers, dtype=torch.int64)
    if announced.num_numbers:
        _receive(numbers, source, group)
    payload = announced.empty_payload()
    if payload is not None and payload.numel():
        _receive(as_bytes(payload), source, group)
    return Message(announced.kind, numbers.tolist(), payload)


def _receive(into: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill it, however long that takes: the group's own limit is for ranks that find each other."""
    if (work := dist.irecv(into, source, group=group)) is not None:
        work.wait(_ORDER_LIMIT)


def _wait_for_each(sent: _Reaped) -> None:
    """Keep what is sent alive until it is taken; the watch tells of those who no longer take anything."""
    try:
        while (one := sent.get()) is not None:
            for work in one[0]:
                work.wait(_ORDER_LIMIT)
            del one
    except RuntimeError:
        return


def _line(source: int | None, error: Exception) -> str:
    """What an error of gloo's says, where the watch knows nothing better."""
    who = "ranks" if source is None else f"rank {source}"
    if "imed out" in str(error):
        return f"{who} kept this one waiting for too long: {' '.join(str(error).split())[:120]}"
    return f"{who} cannot be reached: {' '.join(str(error).split())[:120]}"
