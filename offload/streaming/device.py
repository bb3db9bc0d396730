"""What streaming asks of an accelerator: memory, copies, and events that order two streams of work.

`copies` moves weights, `compute` runs the model; the host goes on enqueueing. Every call names its
stream, because "the current one" is another inside a `with` block and in another thread.
`CudaDevice` is a GPU; a plain `Device` does the same at once on the CPU, with times for events, so
that models on the CPU stream as those on a GPU do. `StagingRing` brings small tensors to a GPU past
the layers that are queued, and `Spans` and `Stall` tell what the streams did and where they waited.

Invariant: nothing waits for the whole device.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from offload.errors import UserError, reason
from offload.planning.load_options import check_device_name
from offload.streaming.disk import allocate
from offload.streaming.pinned import PinnedAllocator, PinningMethod, open_pinned_allocator
from offload.units import format_bytes, parse_size

# a mark in a stream, reached or not yet; on a host the time at which it was passed; None: reached
Event = torch.cuda.Event | float | None
# work that is done in order; None: the host's own
Stream = torch.cuda.Stream | None
# twice the embeddings of the largest trees
STAGING_BYTES = 32 << 20
_ALIGN_BYTES = 256
_WORD_BYTES = 8
# NaN in every float format that is streamed
POISON = 0xFF
# small tensors in a row share an event up to this size, so that events are few
_PART_BYTES = 1 << 20
# memory of a CUDA context; more than that belongs to other programs
_MAX_CONTEXT_BYTES = 1 << 30
# a context grows as kernels are used for the first time, and torch must leave room for that: 0.82
# GiB in the end on an H200
_LEAST_CONTEXT_BYTES = 7 << 27


@dataclass(eq=False)
class StagingRing:
    """A ring of locked host memory that kernels read: small tensors get to a device without a copy.

    A device serves copies of one direction in their order, on any stream, so a copy would wait for
    all layers queued before it. A part of the ring is written again only after the event behind its
    last reader has been reached.
    """

    # flat uint8, locked, a multiple of 256 bytes
    _array: np.ndarray
    # the same memory as the device sees it, int64
    _seen: Tensor
    # gives an event behind all that has been given to the stream that computes
    _record: Callable[[], Event]
    # waits for an event
    _synchronize: Callable[[Event], None]
    # by part where it begins, and an event of the stream that computes, behind its last reader;
    # positions go on counting where the ring begins anew
    _parts: deque[tuple[int, Event]] = field(default_factory=deque)
    _next: int = 0

    def has_room_for(self, source: Tensor) -> bool:
        """Return whether the ring is large enough for a tensor."""
        return 0 < source.numel() * source.element_size() <= len(self._array)

    def send(self, source: Tensor) -> Tensor:
        """Return the tensor on the device, for what is enqueued from now on where it computes."""
        given = source.contiguous().flatten().view(torch.uint8).numpy()
        place = self._free_place(len(given))
        lo = place % len(self._array)
        self._array[lo : lo + len(given)] = given
        words = self._seen[lo // _WORD_BYTES : -(-(lo + len(given)) // _WORD_BYTES)]
        # this is a kernel; `copy_` would be a copy, in the queue of all others
        sent = words.bitwise_or(0)
        if self._parts and place + len(given) - self._parts[-1][0] <= _PART_BYTES:
            place = self._parts.pop()[0]
        self._parts.append((place, self._record()))
        return sent.view(torch.uint8)[: len(given)].view(source.dtype).view(source.shape)

    def _free_place(self, num_bytes: int) -> int:
        """Return where the next bytes go, in one piece; waits for what still reads there."""
        size = len(self._array)
        lo = self._next
        if lo % size + num_bytes > size:
            lo = (lo // size + 1) * size
        last = None
        while self._parts and self._parts[0][0] + size < lo + num_bytes:
            _, last = self._parts.popleft()
        # readers finish in the order in which they were enqueued
        if last is not None:
            self._synchronize(last)
        self._next = -(-(lo + num_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        return lo


class Device:
    """What computes. This one is the host: it does everything at once, in the order in which it is
    asked. Others have memory of their own, and enqueue.

    Attributes:
        name: what it calls itself; measurements hold for one kind of GPU.
    """

    name = "host"
    place = torch.device("cpu")
    copies: Stream = None
    compute: Stream = None

    def computing(self) -> AbstractContextManager[None]:
        """Enqueue on `compute` meanwhile what this thread computes without naming a stream."""
        return nullcontext()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the device's memory as flat uint8; on the host whole pages, for a disk."""
        return torch.from_numpy(allocate(num_bytes))

    def open_allocator(self) -> PinnedAllocator:
        """Open an allocator of host memory that copies to this device can be made from.

        The caller closes it.
        """
        return PinnedAllocator([PinningMethod()])

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy; both tensors stay untouched until an event behind it is reached."""
        to.copy_(source)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Enqueue setting every byte."""
        tensor.fill_(value)

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event that is reached when everything enqueued so far is done."""
        return time.perf_counter()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work on `stream` begin after `event`; the host does not wait."""

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`."""

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        """Return seconds between two timed events, None while the later one is not reached."""
        return cast(float, after) - cast(float, before)

    def peak_bytes(self) -> int:
        """Return the most memory of its own that this process has taken at once."""
        return 0


class CudaDevice(Device):
    """One CUDA device; compute runs on the stream that was current where this was built."""

    def __init__(self, index: int, limit_bytes: int | None = None) -> None:
        self.place = torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_name(self.place))
        # graphs are recorded on the current device
        torch.cuda.set_device(self.place)
        self.compute = torch.cuda.current_stream(self.place)
        # kernels between copies must not wait long
        self.copies = torch.cuda.Stream(self.place, priority=-1)
        self._ring: StagingRing | None = None
        # cuDNN plans for every length anew, tens of milliseconds each
        torch.backends.cuda.enable_cudnn_sdp(False)
        multiply_by_ieee()
        torch.cuda.reset_peak_memory_stats(self.place)
        self._context_bytes = self._own_context_bytes()
        # torch keeps to a limit, so that a large GPU can stand in for a small one; an earlier limit
        # no longer holds.
        beside_bytes = max(self._context_bytes, _LEAST_CONTEXT_BYTES)
        share = 1.0
        # with less no plan works, and the planner's error says so better
        if limit_bytes is not None and limit_bytes > beside_bytes:
            share = (limit_bytes - beside_bytes) / torch.cuda.mem_get_info(self.place)[1]
        torch.cuda.set_per_process_memory_fraction(share, self.place)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make device and stream current: both are a thread's own.

        Without this another thread would compute, and Triton launch, on the first GPU.
        """
        with torch.cuda.device(self.place), torch.cuda.stream(self.compute):
            yield

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory of the device as flat uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.place)

    def open_allocator(self) -> PinnedAllocator:
        """Open an allocator of page-locked memory, as far as this machine has it."""
        return open_pinned_allocator(self.place)

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy, for which the host waits where memory is not page-locked."""
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def stage_uploads(self, resources: ExitStack) -> str | None:
        """Let uploads pass the layers that are queued, while `resources` are open.

        Returns a line that says why they cannot, or None.
        """
        pinned = self.open_allocator()
        resources.callback(pinned.close)
        buffer = pinned.allocate(STAGING_BYTES)
        if not buffer.is_seen:
            why = pinned.note
            if buffer.is_pinned:
                why = "kernels of this GPU cannot read it where the host does"
            what = "what a step sends waits behind layers, it needs memory locked by cupy"
            return f"{what} ({why}): install cupy"
        seen = torch.as_tensor(_SeenByKernels(buffer.array), device=self.place)
        record = partial(self.record, self.compute)
        self._ring = StagingRing(buffer.array, seen, record, self.synchronize)
        resources.callback(self._unstage)
        return None

    def _unstage(self) -> None:
        # the last uploads may still be read
        self.synchronize(self.record(self.compute))
        self._ring = None

    def upload(self, source: Tensor) -> Tensor:
        """Return a host tensor on the device, for what computes there."""
        if self._ring is None or source.device.type != "cpu" or not self._ring.has_room_for(source):
            return source.to(self.place)
        with torch.cuda.stream(self.compute):
            return self._ring.send(source)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Enqueue setting every byte."""
        with torch.cuda.stream(stream):
            tensor.fill_(value)

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event; a thread that waits for it sleeps: spinning takes a reader's core."""
        event = torch.cuda.Event(enable_timing=is_timed, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Order `stream` behind `event`."""
        cast(torch.cuda.Stream, stream).wait_event(cast(torch.cuda.Event, event))

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`."""
        cast(torch.cuda.Event, event).synchronize()

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        """Return seconds between two timed events, None while the later one is not reached."""
        ended = cast(torch.cuda.Event, after)
        begun = cast(torch.cuda.Event, before)
        return begun.elapsed_time(ended) / 1e3 if ended.query() else None

    def peak_bytes(self) -> int:
        """Return torch's own high-water mark, plus what CUDA keeps beside it."""
        self._context_bytes = max(self._context_bytes, self._own_context_bytes())
        return int(torch.cuda.max_memory_reserved(self.place)) + self._context_bytes

    def bytes_beside_torch(self) -> int:
        """Return the bytes of the context and of all that other programs hold.

        The context includes kernels loaded and graphs recorded so far.
        """
        # this makes the context first
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.place)
        return max(0, all_bytes - free_bytes - int(torch.cuda.memory_reserved(self.place)))

    def _own_context_bytes(self) -> int:
        return min(_MAX_CONTEXT_BYTES, self.bytes_beside_torch())


class _SeenByKernels:
    """Page-locked memory by the address that a kernel reads it at, which is the host's own."""

    def __init__(self, array: np.ndarray) -> None:
        place = (array.ctypes.data, False)
        words = {"shape": (len(array) // _WORD_BYTES,), "typestr": "<i8"}
        self.__cuda_array_interface__ = {"data": place, **words, "version": 3}


def computing_on(device: Device | None) -> AbstractContextManager[None]:
    """Return `Device.computing`; None is the CPU, on which every thread computes."""
    return nullcontext() if device is None else device.computing()


def multiply_by_ieee() -> None:
    """Let no float32 product use TF32, whatever `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE` says."""
    # setting the newer names alone leaves a mixture, with which torch refuses to multiply
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def open_device(
    name: str | Device, gpu_memory: str | int | None = None, *, rank_on_host: int = 0
) -> Device | None:
    """Return the device that `name` says, limited to `gpu_memory`; None is the CPU.

    `name` is `auto`, `cpu`, `cuda`, `cuda:N`, or a device, which is returned. Of several GPUs,
    `cuda` and `auto` give each rank of this host the next one.

    Raises `UserError`: no such name, driver or GPU, or a budget where there is none or larger than
    the GPU.
    """
    if not isinstance(name, str):
        return name
    check_device_name(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if gpu_memory is not None:
            parse_size(gpu_memory, "`gpu_memory`")
            what = "`gpu_memory` limits a CUDA device, and this run uses the CPU"
            raise UserError(f"{what}: leave it out and use `ram`")
        return None
    if not torch.cuda.is_available():
        what = " and driver, this machine shows none"
        if torch.version.cuda is None:
            what = ", and a torch that is built for CUDA, this one is not"
        raise UserError(f"`device` {name} needs a CUDA device{what}: use `device` cpu")
    count = torch.cuda.device_count()
    index = int(name.partition(":")[2] or rank_on_host % max(1, count))
    if index >= count:
        what = f"this machine shows {count} of them"
        raise UserError(f"`device` {name} does not exist, {what}: use cuda:0")
    limit_bytes = None if gpu_memory is None else parse_size(gpu_memory, "`gpu_memory`")
    try:
        # an earlier decoder in this process may have left memory there
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(index)[0]
    # busy, in a bad state, or without room for a context
    except RuntimeError as error:
        what = f"`device` {name} cannot be opened ({reason(error)})"
        raise UserError(f"{what}: free it, or use `device` cpu") from None
    if limit_bytes is not None and limit_bytes > free_bytes:
        wish = format_bytes(limit_bytes)
        free = format_bytes(free_bytes)
        rule = f"`gpu_memory` must be at most what is free on {name}, {free}"
        raise UserError(f"{rule}, got {wish}: lower it")
    return CudaDevice(index, limit_bytes)


# takes the kind of work (copy, wait, compute), the layer, its start and end by perf_counter
Record = Callable[[str, int, float, float], None]


class Spans:
    """Collects spans of work (copies, waits and uses) while a listener is set; any thread may call
    `mark` and `add`.

    One event whose moment the host knows ties the device's clock to its own, and after that event
    nothing waits: what the device has not got to when it is asked is left out.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._listener: Record | None = None
        # kinds of work, layers, and the timed events before and after
        self._spans = deque[tuple[str, int, Event, Event]]()
        self._origin: Event = None
        self._origin_s = 0.0

    @property
    def listener(self) -> Record | None:
        """Return what hears of spans. Before another is set, it hears of all queued work."""
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
        """Return a timed event while a listener is set, None otherwise."""
        return None if self._listener is None else self._device.record(stream, is_timed=True)

    def add(self, kind: str, layer: int, before: Event, after: Event) -> None:
        """Note work on `layer` between these timed events; nothing where one is None."""
        if before is not None and after is not None and self._listener is not None:
            self._spans.append((kind, layer, before, after))

    def _tell_reached(self) -> None:
        while self._spans:
            kind, layer, before, after = self._spans.popleft()
            end_s = self._device.elapsed_s(self._origin, after)
            if end_s is not None and self._listener is not None:
                start_s = self._device.elapsed_s(self._origin, before)
                assert start_s is not None, "an event is reached before the one behind it"
                self._listener(kind, layer, self._origin_s + start_s, self._origin_s + end_s)


class Stall:
    """How long compute has waited for bytes, by timed events; asking waits for nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known_s = 0.0
        self._waits = deque[tuple[Event, Event]]()

    def add(self, before: Event, after: Event) -> None:
        """Note that compute waited between these two events."""
        self._waits.append((before, after))

    @property
    def known_s(self) -> float:
        """Return the seconds of the waits that are over."""
        while self._waits and (waited_s := self._device.elapsed_s(*self._waits[0])) is not None:
            self._known_s += waited_s
            self._waits.popleft()
        return self._known_s
