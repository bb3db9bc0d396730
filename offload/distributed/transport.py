"""Messages between ranks over torch.distributed's gloo: orders to one rank, exchanges among all.

Ranks exchange host memory, whatever device they compute on. Orders of one (sender, receiver,
channel) arrive in the order in which they were sent; those of two channels may overtake each other.
Each channel has a process group, and exchanges (`broadcast`, `gather`) have one. Gloo's receiver
must know the size, so the number of an order's bytes is sent first, and nothing is allocated before
it is known to be possible. A send lasts until the other side takes it, so a thread waits for it and
keeps its bytes alive. By default gloo takes the network that the host's name resolves to, on many
systems an address that no other host can reach; `chosen_interface` takes the one that leads to
where ranks meet.

Invariant: a wait for a lost rank ends with an error that names the rank, from the box that is
waited at or from the watch.
"""

import fcntl
import os
import queue
import socket
import struct
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from offload.distributed.orders import Order, as_bytes, decode, encode
from offload.distributed.watch import Loss, Watch
from offload.errors import RankError, ensure, reason
from offload.interrupts import held_back


class Channel(IntEnum):
    """Channels between two ranks that do not wait for each other."""

    DATA = 0  # work, in the order in which it is to be done
    RESULT = 1  # draws and guesses
    CONTROL = 2  # orders that must not wait behind work: cancellations, the end
    DRAFT = 3  # from the head to the rank that drafts


# most bytes of an order: 512 rows of the widest models take a tenth
MAX_BYTES = 2**30
# in place of a number of bytes: no order will follow
_END = -1
_Box = queue.Queue[Order | Loss]
_Sent = tuple[list[dist.Work], list[Tensor]]
_Reaped = queue.Queue[_Sent | None]
# longest wait for an idle user, and for sends to a rank that computes for long
_ORDER_LIMIT = timedelta(days=30)
# longest wait for all others to close as well; a rank in the middle of a pass may take longer
_CLOSE_S = 3.0
# the new name, if torch has it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport:
    """One rank's connections to all others, over process groups of their own.

    Every method except `fail` and `close` raises `RankError` if a peer is lost.

    Args:
        exchange: its limit is how long a rank may keep others waiting.
        watched: the group of the watch, whose limit is `silence_s`.
    """

    def __init__(
        self,
        channels: dict[Channel, dist.ProcessGroup],
        exchange: dist.ProcessGroup,
        watched: dist.ProcessGroup,
        silence_s: float,
    ) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        # bytes by type of order, `broadcast` and `gather`; counted once for each receiver
        self.bytes_sent = Counter[str]()
        # seconds in exchanges, including waits for slower ranks
        self.exchange_s = 0.0
        self._groups = channels
        self._exchanges = [exchange]
        self._boxes = dict[tuple[int, Channel], _Box]()
        # locks that keep a message's parts together, and boxes where orders wait until they are
        # taken
        self._sent = dict[tuple[int, Channel], tuple[threading.Lock, _Reaped]]()
        self._threads = list[threading.Thread]()
        self._is_closed = False
        self._lock = threading.Lock()
        self._arrived = threading.Condition()
        self._watch = Watch(watched, silence_s, self._wake)

    def send(self, to: int, channel: Channel, order: Order) -> None:
        """Send, also to this rank itself, and return at once."""
        if (loss := self._watch.loss) is not None:
            raise loss.error()
        if to == self.rank:
            self._put(self._box(to, channel), order)
            return
        content = torch.frombuffer(encode(order), dtype=torch.uint8)
        parts = [_size(content.numel()), content]
        self._send(to, channel, parts)
        self.bytes_sent[type(order).__name__] += sum(part.nbytes for part in parts)

    def receive(self, source: int, channel: Channel) -> Order:
        """Return the next order; waits as long as a user may be idle."""
        return self._take_from(self._box(source, channel), is_waited_for=True)

    def poll(self, source: int, channel: Channel) -> Order | None:
        """Return the next order, None if it has not arrived."""
        try:
            return self._take_from(self._box(source, channel), is_waited_for=False)
        except queue.Empty:
            return None

    def wait_any(self, ways: Sequence[tuple[int, Channel]]) -> tuple[int, Channel]:
        """Wait for an order of one of these, or its loss; return which one, and take nothing."""
        boxes = {way: self._box(*way) for way in ways}
        with self._arrived:
            while (
                arrived := next((way for way, box in boxes.items() if not box.empty()), None)
            ) is None:
                self._arrived.wait()
        return arrived

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        """Return the source's rows on every rank; others give a tensor of that shape to fill.

        It lies in host memory, as in `gather`: if ranks chose by device, some might wait for ever.
        """
        rows = rows.contiguous()
        with self._exchange():
            dist.broadcast(as_bytes(rows), source, group=self._exchanges[0])
        if self.rank == source:
            self.bytes_sent["broadcast"] += rows.nbytes * (self.num_ranks - 1)
        return rows

    def gather(self, part_TR: Tensor, widths: Sequence[int]) -> Tensor:
        """Return all ranks' columns side by side; rank r has `widths[r]`, this one `part_TR`.

        Narrower parts are padded on the way, since gloo needs equal ones.
        """
        T = part_TR.shape[0]
        widest = max(widths)
        mine = torch.nn.functional.pad(part_TR, (0, widest - part_TR.shape[1])).contiguous()
        parts = mine.new_empty(self.num_ranks, T, widest)
        with self._exchange():
            _all_gather(as_bytes(parts), as_bytes(mine), group=self._exchanges[0])
        self.bytes_sent["gather"] += mine.nbytes * (self.num_ranks - 1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], -1)

    def lost(self) -> RankError | None:
        """Return the error that `receive` would raise now; None if no rank is known to be lost."""
        return None if self._watch.loss is None else self._watch.loss.error()

    def note_work(self, kind: str, *, is_under_way: bool) -> None:
        """Note that work of a kind begins or goes on, or that it waits for other ranks.

        If it stands still for ten times as long as a rank may be silent, all ranks end.
        """
        self._watch.note_work(kind, is_under_way=is_under_way)

    @property
    def is_stalled(self) -> bool:
        """Return True if work of this rank stood still for too long."""
        return self._watch.is_stalled

    def fail(self, reason: str) -> None:
        """End all that wait on this rank, now or later: one of its services has failed."""
        self._watch.lose(Loss(self.rank, f"rank {self.rank}: {reason}", is_told=False))

    def close(self, reason: str = "", *, is_refusal: bool = False) -> None:
        """Announce that this rank has ended, and wait a moment for the others.

        With a reason they raise `RankError`, or `UserError` if it is a refusal. Their messages are
        received until they have ended, too: a thread that is still in gloo when Python ends would
        abort the process as soon as something arrives.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.end(reason, is_refusal=is_refusal)
        # this wakes ranks that wait in an exchange for this one
        dist.destroy_process_group(self._exchanges.pop())
        for peer, channel in product(set(range(self.num_ranks)) - {self.rank}, Channel):
            self._box(peer, channel)
            with suppress(RankError):
                self._send(peer, channel, [_size(_END)])
        for _, sent in self._sent.values():
            sent.put(None)
        due_s = time.monotonic() + _CLOSE_S
        for thread in (*self._threads, *self._watch.threads):
            thread.join(max(0.0, due_s - time.monotonic()))
        if not any(thread.is_alive() for thread in (*self._threads, *self._watch.threads)):
            dist.destroy_process_group()

    def _send(self, to: int, channel: Channel, parts: list[Tensor]) -> None:
        """Send all parts, or raise if the receiver is lost; Ctrl-C takes effect before or after."""
        with held_back():
            together, sent = self._way_to(to, channel)
            with together:
                try:
                    works = [dist.isend(part, to, group=self._groups[channel]) for part in parts]
                except RuntimeError as error:
                    raise self._watch.verdict(_line(to, error), to) from error
                sent.put(([work for work in works if work is not None], parts))

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            with held_back():
                yield
        except RuntimeError as error:
            # a traceback's frames would keep the group, whose end others wait for in `close`
            traceback.clear_frames(error.__traceback__)
            raise self._watch.verdict(_line(None, error)) from error
        finally:
            self.exchange_s += time.perf_counter() - began_s

    def _take_from(self, box: _Box, *, is_waited_for: bool) -> Order:
        order = box.get(block=is_waited_for)
        if not isinstance(order, Loss):
            return order
        # the next caller must find it, too
        box.put(order)
        raise order.error() if order.is_told else self._watch.verdict(order.line, order.rank)

    def _box(self, source: int, channel: Channel) -> _Box:
        """Return the box in which a channel's orders of a rank arrive; a thread fills it."""
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
            while (order := _received(source, self._groups[channel])) is not None:
                self._put(box, order)
            self._put(box, Loss(source, f"rank {source} has ended"))
        # before `RuntimeError`, since RecursionError is one
        except (ValueError, RecursionError, MemoryError) as error:
            fault = f"rank {source} sent what cannot be: {reason(error)}"
            self._watch.lose(Loss(source, fault, is_told=False))
        except RuntimeError as error:
            self._put(box, Loss(source, _line(source, error), is_told=False))

    def _put(self, box: _Box, order: Order | Loss) -> None:
        with self._arrived:
            box.put(order)
            self._arrived.notify_all()

    def _way_to(self, to: int, channel: Channel) -> tuple[threading.Lock, _Reaped]:
        with self._lock:
            if (to, channel) not in self._sent:
                self._sent[to, channel] = (threading.Lock(), queue.Queue())
                self._start(_wait_for_each, self._sent[to, channel][1])
            return self._sent[to, channel]

    def _start(self, work: Callable[..., None], *of: object) -> None:
        self._threads.append(
            threading.Thread(target=work, args=of, name="offload-rank", daemon=True)
        )
        self._threads[-1].start()

    def _wake(self) -> None:
        """Put the loss into every box, so that no thread waits in vain."""
        with self._lock:
            for box in self._boxes.values():
                if (loss := self._watch.loss) is not None:
                    self._put(box, loss)


def _received(source: int, group: dist.ProcessGroup) -> Order | None:
    """Return one order, None after the last. Raises `ValueError`, and `RuntimeError` for a loss."""
    size = _size(0)
    _receive(size, source, group)
    num_bytes = int(size)
    if num_bytes == _END:
        return None
    ensure(0 < num_bytes <= MAX_BYTES, f"an order of {num_bytes} bytes, {MAX_BYTES} at most")
    content = torch.empty(num_bytes, dtype=torch.uint8)
    _receive(content, source, group)
    return decode(content.numpy().data)


def _size(num_bytes: int) -> Tensor:
    return torch.tensor([num_bytes], dtype=torch.int64)


def _receive(into: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill a tensor, however long that takes: the group's own limit is for ranks that meet."""
    if (work := dist.irecv(into, source, group=group)) is not None:
        work.wait(_ORDER_LIMIT)


def _wait_for_each(sent: _Reaped) -> None:
    """Keep sent bytes alive until they are taken; the watch reports ranks that take nothing."""
    try:
        while (parcel := sent.get()) is not None:
            for work in parcel[0]:
                work.wait(_ORDER_LIMIT)
            del parcel
    except RuntimeError:
        return


def _line(source: int | None, error: Exception) -> str:
    """Return the message of a gloo error, unless the watch knows a better one."""
    who = "ranks" if source is None else f"rank {source}"
    if "imed out" in str(error):
        return f"{who} kept this one waiting for too long: {' '.join(str(error).split())[:120]}"
    return f"{who} cannot be reached: {' '.join(str(error).split())[:120]}"


_SIOCGIFADDR = 0x8915
_VARIABLE = "GLOO_SOCKET_IFNAME"


@contextmanager
def chosen_interface(address: str, port: int) -> Iterator[None]:
    """Let gloo's variable, unless it is set, name the interface that leads to where ranks meet."""
    address_here = None if _VARIABLE in os.environ else _own_address(address, port)
    names = [
        name
        for _, name in socket.if_nameindex()
        if address_here is not None and _address_of(name) == address_here
    ]
    if names:
        os.environ[_VARIABLE] = names[0]
    try:
        yield
    finally:
        if names:
            os.environ.pop(_VARIABLE, None)


def _own_address(address: str, port: int) -> str | None:
    """Return this host's address as another host sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
            )
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])
