"""A CUDA device: its memory, its two streams, and a way for small tensors past queued layers.

`StagingRing` brings small tensors to a GPU past the layers that are queued. Invariant: every call
names its stream, and nothing waits for the whole device.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from offload.errors import UserError, reason
from offload.planning.load_options import check_device_name
from offload.streaming.device import Device, Event, Stream, host_for
from offload.streaming.pinned import PinnedAllocator, open_pinned_allocator
from offload.units import format_bytes, parse_size

# twice the embeddings of the largest trees
STAGING_BYTES = 32 << 20
_ALIGN_BYTES = 256
_WORD_BYTES = 8
# small tensors in a row share an event up to this size, to need few events
_PART_BYTES = 1 << 20
# bytes of a CUDA context; beyond that memory belongs to other programs
_MAX_CONTEXT_BYTES = 1 << 30
# a context grows as kernels are used first, and torch must leave room for that: .82 GiB in the end
# on an H200
_LEAST_CONTEXT_BYTES = 7 << 27


@dataclass(eq=False)
class StagingRing:
    """A ring of locked host memory that kernels read: small tensors reach a device without a copy.

    A device serves copies of one direction in their order, on any stream, so a copy would wait for
    all layers queued before it. A part of the ring is written again only after the event behind its
    last reader has been reached.
    """

    # flat uint8, locked, a multiple of 256 bytes
    _array: np.ndarray
    # the same memory by the device's address, int64
    _seen: Tensor
    # returns an event after all work enqueued on the compute stream
    _mark: Callable[[], Event]
    # waits for an event
    _synchronize: Callable[[Event], None]
    # by the position of a part: an event of the compute stream after its last reader; positions
    # keep counting when the ring wraps
    _parts: deque[tuple[int, Event]] = field(default_factory=deque)
    _next: int = 0

    def has_room_for(self, source: Tensor) -> bool:
        """Return True if the ring is large enough for a tensor."""
        return 0 < source.numel() * source.element_size() <= len(self._array)

    def send(self, source: Tensor) -> Tensor:
        """Return the tensor on the device, for work enqueued on the compute stream from now on."""
        given = source.contiguous().flatten().view(torch.uint8).numpy()
        place = self._free_place(len(given))
        lo = place % len(self._array)
        self._array[lo : lo + len(given)] = given
        words = self._seen[lo // _WORD_BYTES : -(-(lo + len(given)) // _WORD_BYTES)]
        # this is a kernel; `copy_` would wait in the queue of all copies
        sent = words.bitwise_or(0)
        if self._parts and place + len(given) - self._parts[-1][0] <= _PART_BYTES:
            place = self._parts.pop()[0]
        self._parts.append((place, self._mark()))
        return sent.view(torch.uint8)[: len(given)].view(source.dtype).view(source.shape)

    def _free_place(self, num_bytes: int) -> int:
        """Return the position for the next bytes, in one piece; waits for readers of that part."""
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


class CudaDevice(Device):
    """One CUDA device; computes on the stream that was current at construction."""

    has_own_memory = True

    def __init__(self, index: int, limit_bytes: int | None = None) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_name(self.torch_device))
        # graphs are recorded on the current device
        torch.cuda.set_device(self.torch_device)
        self.compute = torch.cuda.current_stream(self.torch_device)
        # kernels between copies must not wait long
        self.copies = torch.cuda.Stream(self.torch_device, priority=-1)
        self._ring: StagingRing | None = None
        # cuDNN would plan again for every length, tens of milliseconds each
        torch.backends.cuda.enable_cudnn_sdp(False)
        multiply_by_ieee()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._context_bytes = self._own_context_bytes()
        # torch keeps to a limit, so that a large GPU can stand in for a small one; this replaces an
        # earlier limit.
        beside_bytes = max(self._context_bytes, _LEAST_CONTEXT_BYTES)
        share = 1.0
        # no plan works with less, and the planner's error says so better
        if limit_bytes is not None and limit_bytes > beside_bytes:
            share = (limit_bytes - beside_bytes) / torch.cuda.mem_get_info(self.torch_device)[1]
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make device and stream current in this thread.

        Without this another thread would compute on the first GPU, and Triton launch there.
        """
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self.compute):
            yield

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory of the device as flat uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def open_allocator(self) -> PinnedAllocator:
        """Open an allocator of page-locked memory, as far as this machine allows it."""
        return open_pinned_allocator(self.torch_device)

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy; the host waits for it if the memory is not page-locked."""
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def open_uploads(self, resources: ExitStack) -> str | None:
        """Let uploads bypass the queued layers, which needs kernels that can read locked memory."""
        pinned = self.open_allocator()
        resources.callback(pinned.close)
        buffer = pinned.allocate(STAGING_BYTES, is_seen=True)
        if not buffer.is_seen:
            why = pinned.note
            if buffer.is_pinned:
                why = "kernels of this GPU cannot read it where the host does"
            requirement = "what a step sends waits behind layers, it needs memory locked by cupy"
            return f"{requirement} ({why}): install cupy"
        seen = torch.as_tensor(_SeenByKernels(buffer.array), device=self.torch_device)
        mark = partial(self.mark, self.compute)
        self._ring = StagingRing(buffer.array, seen, mark, self.synchronize)
        resources.callback(self._unstage)
        return None

    def _unstage(self) -> None:
        # kernels may still read the last uploads
        self.synchronize(self.mark(self.compute))
        self._ring = None

    def upload(self, source: Tensor) -> Tensor:
        """Return a host tensor on the device, for what computes there."""
        if self._ring is None or source.device.type != "cpu" or not self._ring.has_room_for(source):
            return source.to(self.torch_device)
        with torch.cuda.stream(self.compute):
            return self._ring.send(source)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Enqueue setting every byte."""
        with torch.cuda.stream(stream):
            tensor.fill_(value)

    def mark(self, stream: Stream, *, is_timed: bool = False) -> Event:
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
        """Return torch's own peak, plus what CUDA uses in addition."""
        self._context_bytes = max(self._context_bytes, self._own_context_bytes())
        return int(torch.cuda.max_memory_reserved(self.torch_device)) + self._context_bytes

    def bytes_beside_torch(self) -> int:
        """Return the bytes of the context and of all other programs.

        The context includes kernels loaded and graphs recorded so far.
        """
        # this makes the context first
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.torch_device)
        return max(0, all_bytes - free_bytes - int(torch.cuda.memory_reserved(self.torch_device)))

    def _own_context_bytes(self) -> int:
        return min(_MAX_CONTEXT_BYTES, self.bytes_beside_torch())


class _SeenByKernels:
    """Page-locked memory by the address that kernels use, which is the host's own."""

    def __init__(self, array: np.ndarray) -> None:
        place = (array.ctypes.data, False)
        words = {"shape": (len(array) // _WORD_BYTES,), "typestr": "<i8"}
        self.__cuda_array_interface__ = {"data": place, **words, "version": 3}


def multiply_by_ieee() -> None:
    """Forbid TF32 for float32 products, whatever `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE` says."""
    # setting only the newer names would leave a mixture, with which torch refuses to multiply
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def find_card(name: str, *, rank_on_host: int = 0) -> int | None:
    """Return the GPU's number of a device name, None for the host; see `open_device`.

    Raises `UserError` where there is none.
    """
    check_device_name(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return None
    if not torch.cuda.is_available():
        lacking = " and driver, this machine shows none"
        if torch.version.cuda is None:
            lacking = ", and a torch that is built for CUDA, this one is not"
        raise UserError(f"`device` {name} needs a CUDA device{lacking}: use `device` cpu")
    count = torch.cuda.device_count()
    index = int(name.partition(":")[2] or rank_on_host % max(1, count))
    if index >= count:
        mismatch = f"`device` {name} does not exist, this machine shows {count} of them"
        raise UserError(f"{mismatch}: use cuda:0")
    return index


def open_device(name: str, gpu_memory: str | int | None = None, *, rank_on_host: int = 0) -> Device:
    """Return the device called `name`, limited to `gpu_memory`.

    `name` is `auto`, `cpu`, `cuda` or `cuda:N`. Of several GPUs, `cuda` and `auto` give each rank of
    this host the next one.

    Raises `UserError` for a missing device, driver or GPU, and for a budget without a GPU or larger
    than the GPU.
    """
    index = find_card(name, rank_on_host=rank_on_host)
    if index is None:
        return host_for(gpu_memory)
    limit_bytes = None if gpu_memory is None else parse_size(gpu_memory, "`gpu_memory`")
    free_bytes = _free_bytes(index, name)
    if limit_bytes is not None and limit_bytes > free_bytes:
        requirement = f"must be at most what is free on {name}, {format_bytes(free_bytes)}"
        got = format_bytes(limit_bytes)
        raise UserError(f"`gpu_memory` {requirement}, got {got}: lower it")
    return CudaDevice(index, limit_bytes)


def _free_bytes(index: int, name: str) -> int:
    """Return the free memory of a GPU. Raises `UserError` if it cannot be opened."""
    try:
        # an earlier decoder in this process may have left memory there
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(index)[0]
    # busy, in a bad state, or without room for a context
    except RuntimeError as error:
        failure = f"`device` {name} cannot be opened ({reason(error)})"
        raise UserError(f"{failure}: free it, or use `device` cpu") from None
