"""Messages and activations between ranks: the protocol, its wire format, and gloo as its carrier.

Ranks exchange what lies in host memory, on whatever device they compute. A message is a kind, whole
numbers, and at most one tensor. Messages of one (sender, receiver, channel) arrive in the order in
which they were sent; of two channels either may come first. A header of fixed size says how many
numbers follow and of which type and shape the payload is. Nothing is pickled: a peer is a stranger,
and nothing is allocated before the sizes that it names are found to be possible.

Over torch.distributed's gloo, each channel has a process group of its own, and exchanges
(`broadcast`, `gather`) have one, of bytes. Gloo's receiver must know the size, so a header comes
first; and a send lasts until the other side takes it, so a thread waits for it and keeps its
tensors alive. By itself gloo takes the network that the host's own name resolves to, which on many
systems is an address that no other host reaches; `choose_interface` takes the one that leads to
where ranks meet.

Invariant: a wait for a lost rank ends with an error that names the rank, from the box that is
waited at or from the watch.
"""

import fcntl
import math
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
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from offload.distributed.watch import Loss, Watch
from offload.errors import RankError, ensure
from offload.interrupts import held_back


class Channel(IntEnum):
    """Ways between two ranks that do not wait for each other."""

    DATA = 0  # work, in the order in which it is to be done
    RESULT = 1  # what was drawn
    CONTROL = 2  # what must not wait behind work: cancellations, the end
    DRAFT = 3  # between the head and the rank that drafts


class Kind(IntEnum):
    """What a message asks for, or tells."""

    RESET = 0  # a text begins; how it is sampled, and how many committed positions stay
    RUN = 1  # rows to be scored, behind those that were issued before
    COMMIT = 2  # accepted rows, and those that stay uncommitted
    DRAWN = 3  # what the target draws after each row of a run
    CANCEL = 4  # runs that are not needed any more
    GROW = 5  # the head has room for so many nodes
    TREE = 6  # nodes that a draft proposes
    ACCEPT = 7  # tokens that were accepted
    STOP = 8  # the end
    ERROR = 9  # why a rank has failed
    WORD = 10  # anything small, as JSON


class Message(NamedTuple):
    """One message; the sender of a kind documents what its numbers are."""

    kind: Kind
    numbers: Sequence[int] = ()
    payload: Tensor | None = None  # contiguous, in host memory


class Transport(Protocol):
    """One rank's way to all others.

    Every method but `close` raises `RankError` where a peer is lost.
    """

    rank: int  # 0 is the head
    num_ranks: int
    # by kind of message, `broadcast` and `gather`: headers included, as often as there are receivers
    bytes_sent: Counter[str]
    exchange_s: float  # in `broadcast` and `gather`, waiting for slower ranks included

    def send(self, to: int, channel: Channel, message: Message) -> None:
        """Send, also to oneself, and return at once; the payload must not be written to."""

    def receive(self, source: int, channel: Channel) -> Message:
        """Return the next message, waiting for as long as a user may be idle."""

    def poll(self, source: int, channel: Channel) -> Message | None:
        """Return the next message, None if it has not arrived."""

    def wait_any(self, ways: Sequence[tuple[int, Channel]]) -> tuple[int, Channel]:
        """Wait until one of these (source, channel) has a message; return it, and take none."""

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        """Return the source's rows on every rank; others give a tensor like it, to be filled.

        It lies in host memory, as in `gather`: ranks that chose a way by place might never meet.
        """

    def gather(self, part_TR: Tensor, widths: Sequence[int]) -> Tensor:
        """Return all ranks' columns side by side; rank r has `widths[r]`, this one `part_TR`."""

    def close(self, reason: str = "", *, is_refusal: bool = False) -> None:
        """Tell the others that this rank has ended, and let go.

        `reason` says why it has failed, where others raise `RankError`; a user can mend a refusal.
        """


# 512 rows of the widest models take a tenth of it
MAX_PAYLOAD_BYTES = 2**30
# a row says which of some thousand rows it sees
MAX_NUMBERS = 2**22
MAX_DIMENSIONS = 2
# numbers of 32 bits: what is drawn returns in 16 bytes a row, for runs of four rows
HEADER_NUMBERS = 2 + MAX_DIMENSIONS
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
_NO_PAYLOAD = 0  # in place of a type; types count from 1
# in place of the first number: nothing will follow
_END = -1


class MessageHeader(NamedTuple):
    """What a header says will follow."""

    kind: Kind
    num_numbers: int
    dtype: torch.dtype | None  # None: no payload
    shape: tuple[int, ...]


def header_of(message: Message) -> Tensor:
    """Return a message's header, `HEADER_NUMBERS` int32.

    A byte each of kind, type and number of dimensions, the count of numbers, then sizes.
    """
    payload = message.payload
    shape = [] if payload is None else list(payload.shape)
    assert len(shape) <= MAX_DIMENSIONS, f"a payload has {MAX_DIMENSIONS} dimensions at most"
    dtype = _NO_PAYLOAD if payload is None else 1 + _DTYPES.index(payload.dtype)
    header = [int(message.kind) | dtype << 8 | len(shape) << 16, len(message.numbers), *shape]
    return torch.tensor(header + [0] * (HEADER_NUMBERS - len(header)), dtype=torch.int32)


def end_header() -> Tensor:
    """Return the last header of a channel."""
    return torch.full((HEADER_NUMBERS,), _END, dtype=torch.int32)


def read_header(header: Tensor) -> MessageHeader | None:
    """Return what follows a header, None for the end. Raises `ValueError` for what cannot be."""
    first, num_numbers, *dimensions = header.tolist()
    if first == _END:
        return None
    kind = first & 0xFF
    dtype = first >> 8 & 0xFF
    num_dimensions = first >> 16
    ensure(kind in Kind.__members__.values(), f"kind {kind} is none")
    ensure(
        0 <= num_numbers <= MAX_NUMBERS,
        f"{num_numbers} numbers are not between 0 and {MAX_NUMBERS}",
    )
    if dtype == _NO_PAYLOAD:
        return MessageHeader(Kind(kind), num_numbers, None, ())
    ensure(dtype <= len(_DTYPES), f"type {dtype} is none")
    ensure(
        0 <= num_dimensions <= MAX_DIMENSIONS,
        f"{num_dimensions} dimensions are not between 0 and {MAX_DIMENSIONS}",
    )
    shape = tuple(dimensions[:num_dimensions])
    own = _DTYPES[dtype - 1]
    is_possible = (
        min(shape, default=0) >= 0 and math.prod(shape) * own.itemsize <= MAX_PAYLOAD_BYTES
    )
    ensure(
        is_possible,
        f"a payload of shape {shape} is not possible, or larger than {MAX_PAYLOAD_BYTES} bytes",
    )
    return MessageHeader(Kind(kind), num_numbers, own, shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as flat bytes, which gloo takes for any type."""
    return tensor.reshape(-1).view(torch.uint8)


_Box = queue.Queue[Message | Loss]
_Sent = tuple[list[dist.Work], list[Tensor]]
_Reaped = queue.Queue[_Sent | None]
# waits for an idle user, and for sends to a rank that computes for long
_ORDER_LIMIT = timedelta(days=30)
# waits for all others to close as well; a rank in the middle of a pass is not waited for any longer
_CLOSE_S = 3.0
# the new name, where torch has it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Gloo(Transport):
    """One rank of an initialised process group, over groups for this use alone.

    The limit of `exchange` is how long a rank may keep others waiting, `silence_s` that of
    `watched`.
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
        self.bytes_sent = Counter[str]()
        self.exchange_s = 0.0
        self._groups = channels
        self._exchanges = [exchange]
        self._boxes = dict[tuple[int, Channel], _Box]()
        # what keeps parts of a message together, and where they wait until they are taken
        self._sent = dict[tuple[int, Channel], tuple[threading.Lock, _Reaped]]()
        self._threads = list[threading.Thread]()
        self._is_closed = False
        self._lock = threading.Lock()
        self._arrived = threading.Condition()
        self._watch = Watch(watched, silence_s, self._wake)

    def send(self, to: int, channel: Channel, message: Message) -> None:
        """Send, and return at once; a payload must not be written to any more."""
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
        """Return the next message, waited for as long as the channel's limit says."""
        return self._opened(self._box(source, channel), is_waited_for=True)

    def poll(self, source: int, channel: Channel) -> Message | None:
        """Return the next message, None if it has not arrived."""
        try:
            return self._opened(self._box(source, channel), is_waited_for=False)
        except queue.Empty:
            return None

    def wait_any(self, ways: Sequence[tuple[int, Channel]]) -> tuple[int, Channel]:
        """Return one of these whose next message has arrived, or never will; nothing is taken."""
        boxes = {way: self._box(*way) for way in ways}
        with self._arrived:
            while (
                found := next((way for way, box in boxes.items() if not box.empty()), None)
            ) is None:
                self._arrived.wait()
        return found

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        """Return the source's rows on every rank; what others give is filled."""
        rows = rows.contiguous()
        with self._exchange():
            dist.broadcast(as_bytes(rows), source, group=self._exchanges[0])
        if self.rank == source:
            self.bytes_sent["broadcast"] += rows.nbytes * (self.num_ranks - 1)
        return rows

    def gather(self, part_TR: Tensor, widths: Sequence[int]) -> Tensor:
        """Gather columns; narrower parts are padded on the way, since gloo wants all alike."""
        T = part_TR.shape[0]
        widest = max(widths)
        mine = torch.nn.functional.pad(part_TR, (0, widest - part_TR.shape[1])).contiguous()
        parts = mine.new_empty(self.num_ranks, T, widest)
        with self._exchange():
            _all_gather(as_bytes(parts), as_bytes(mine), group=self._exchanges[0])
        self.bytes_sent["gather"] += mine.nbytes * (self.num_ranks - 1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], -1)

    def lost(self) -> RankError | None:
        """Return what `receive` would raise now, if another rank is known to be lost."""
        return None if self._watch.loss is None else self._watch.loss.error()

    def close(self, reason: str = "", *, is_refusal: bool = False) -> None:
        """Tell the others that this rank has ended, and why if it failed; wait a moment for them.

        What they sent is taken from them until they say that they have ended, too: a thread that is
        still in gloo when Python ends would abort the process as soon as something arrives.
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
                self._send(peer, channel, [end_header()])
        for _, sent in self._sent.values():
            sent.put(None)
        due_s = time.monotonic() + _CLOSE_S
        for thread in (*self._threads, *self._watch.threads):
            thread.join(max(0.0, due_s - time.monotonic()))
        if not any(thread.is_alive() for thread in (*self._threads, *self._watch.threads)):
            dist.destroy_process_group()

    def _send(self, to: int, channel: Channel, parts: list[Tensor]) -> None:
        """Send all parts, or raise where the receiver is lost; Ctrl-C comes before or after."""
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
            # frames hold the group, whose end others wait for in `close`
            traceback.clear_frames(error.__traceback__)
            raise self._watch.verdict(_line(None, error)) from error
        finally:
            self.exchange_s += time.perf_counter() - began_s

    def _opened(self, box: _Box, *, is_waited_for: bool) -> Message:
        found = box.get(block=is_waited_for)
        if isinstance(found, Message):
            return found
        # the next one who asks must find it, too
        box.put(found)
        raise found.error() if found.is_told else self._watch.verdict(found.line, found.rank)

    def _box(self, source: int, channel: Channel) -> _Box:
        """Return where a channel's messages of a rank arrive; a thread fills it."""
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
            self._watch.lose(
                Loss(source, f"rank {source} sent what cannot be: {error}", is_told=False)
            )

    def _put(self, box: _Box, found: Message | Loss) -> None:
        with self._arrived:
            box.put(found)
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
        """Put the loss into every box, so that no one waits in vain."""
        with self._lock:
            for box in self._boxes.values():
                if (loss := self._watch.loss) is not None:
                    self._put(box, loss)


def _received(source: int, group: dist.ProcessGroup) -> Message | None:
    """Return one message, None after the last. Raises `ValueError`, `RuntimeError` for a loss."""
    header = torch.empty(HEADER_NUMBERS, dtype=torch.int32)
    _receive(header, source, group)
    if (announced := read_header(header)) is None:
        return None
    numbers = torch.empty(announced.num_numbers, dtype=torch.int64)
    if announced.num_numbers:
        _receive(numbers, source, group)
    payload = None
    if announced.dtype is not None:
        payload = torch.empty(announced.shape, dtype=announced.dtype)
    if payload is not None and payload.numel():
        _receive(as_bytes(payload), source, group)
    return Message(announced.kind, numbers.tolist(), payload)


def _receive(into: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill a tensor, however long that takes: the group's own limit is for ranks that meet."""
    if (work := dist.irecv(into, source, group=group)) is not None:
        work.wait(_ORDER_LIMIT)


def _wait_for_each(sent: _Reaped) -> None:
    """Keep what is sent alive until it is taken; the watch reports ranks that take nothing."""
    try:
        while (one := sent.get()) is not None:
            for work in one[0]:
                work.wait(_ORDER_LIMIT)
            del one
    except RuntimeError:
        return


def _line(source: int | None, error: Exception) -> str:
    """Return what an error of gloo's says, where the watch knows nothing better."""
    who = "ranks" if source is None else f"rank {source}"
    if "imed out" in str(error):
        return f"{who} kept this one waiting for too long: {' '.join(str(error).split())[:120]}"
    return f"{who} cannot be reached: {' '.join(str(error).split())[:120]}"


_SIOCGIFADDR = 0x8915
_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(address: str, port: int) -> None:
    """Set gloo's variable, unless it is set, to the interface that leads to where ranks meet."""
    if _VARIABLE in os.environ:
        return
    own = _own_address(address, port)
    names = [
        name for _, name in socket.if_nameindex() if own is not None and _address_of(name) == own
    ]
    if names:
        os.environ[_VARIABLE] = names[0]


def _own_address(address: str, port: int) -> str | None:
    """Return the address that this host has in the eyes of another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
            )
        except OSError:
            return None
        return socket.inet_ntoa(found[20:24])
