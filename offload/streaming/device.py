"""What streaming asks of an accelerator: memory, copies, and events that order two streams of work.

`copies` moves weights, `compute` runs the model; the host goes on enqueueing. Every call names its stream, because "the
current one" is another inside a `with` block and in another thread. Invariant: nothing waits for the whole device.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offload.config import format_bytes, parse_size
from offload.errors import UserError, reason
from offload.streaming.pinned import PinnedAllocator, open_pinned_allocator
from offload.streaming.staging import STAGING_BYTES, StagingRing

Event = Any  # a mark in a stream, reached or not yet
Stream = Any  # work that is done in order
_MAX_CONTEXT_BYTES = 1 << 30  # what is taken beyond that is somebody else's
_LEAST_CONTEXT_BYTES = 3 << 28  # it grows as kernels are used for the first time, and torch must leave room for that


class Device(Protocol):
    """An accelerator with memory of its own."""

    name: str  # what it calls itself; measurements are of one kind of GPU
    place: torch.device
    copies: Stream
    compute: Stream

    def computing(self) -> AbstractContextManager[None]:
        """Meanwhile what this thread computes without naming a stream is enqueued on `compute`."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory of the device as flat uint8."""

    def open_allocator(self) -> PinnedAllocator:
        """Of host memory that copies to this device can be made from; whoever opens it closes it."""

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy; both tensors must stay untouched until an event recorded after it is reached."""

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Enqueue setting every byte."""

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """An event that is reached when everything enqueued so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is enqueued on `stream` from now on begin after `event`; the host does not wait."""

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`."""

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        """Seconds between two timed events; None while the later one is not reached."""

    def peak_bytes(self) -> int:
        """The most device memory that this process has taken at once."""


class CudaDevice:
    """One CUDA device; compute runs on the stream that was current where this was built."""

    def __init__(self, index: int, limit_bytes: int | None = None) -> None:
        self.place = torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_name(self.place))
        torch.cuda.set_device(self.place)  # graphs are recorded on the current one
        self.compute = torch.cuda.current_stream(self.place)
        self.copies = torch.cuda.Stream(self.place, priority=-1)  # of kernels between copies, which must not wait long
        self._ring: StagingRing | None = None
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for every length anew, tens of milliseconds each
        multiply_by_ieee()
        torch.cuda.reset_peak_memory_stats(self.place)
        self._context_bytes = self._own_context_bytes()
        # torch keeps to a limit, so that a large GPU can stand in for a small one; one from before no longer holds.
        beside_bytes, share = max(self._context_bytes, _LEAST_CONTEXT_BYTES), 1.0
        if limit_bytes is not None and limit_bytes > beside_bytes:  # with less no plan works, and that says so better
            share = (limit_bytes - beside_bytes) / torch.cuda.mem_get_info(self.place)[1]
        torch.cuda.set_per_process_memory_fraction(share, self.place)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Both are a thread's own: without this, another one would compute, and Triton launch, on the first GPU."""
        with torch.cuda.device(self.place), torch.cuda.stream(self.compute):
            yield

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory of the device as flat uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.place)

    def open_allocator(self) -> PinnedAllocator:
        """Of page-locked memory, as far as this machine has it."""
        return open_pinned_allocator(self.place)

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy; from page-locked memory the host does not wait for it."""
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def stage_uploads(self, resources: ExitStack) -> str | None:
        """Let uploads pass the layers that are queued, while `resources` are open; or a line why they cannot."""
        pinned = self.open_allocator()
        resources.callback(pinned.close)
        buffer = pinned.allocate(STAGING_BYTES)
        if not buffer.is_seen:
            why = "kernels of this GPU cannot read it where the host does" if buffer.is_pinned else pinned.note
            return f"what a step sends waits behind layers, it needs memory locked by cupy ({why}): install cupy"
        seen = torch.as_tensor(_SeenByKernels(buffer.array), device=self.place)
        self._ring = StagingRing(buffer.array, seen, lambda: self.record(self.compute), self.synchronize)
        resources.callback(self._unstage)
        return None

    def _unstage(self) -> None:
        self.synchronize(self.record(self.compute))  # the last uploads may still be read
        self._ring = None

    def upload(self, source: Tensor) -> Tensor:
        """A tensor of the host for what computes; one that is here already is itself."""
        if self._ring is None or source.device.type != "cpu" or not self._ring.has_room_for(source):
            return source.to(self.place)
        with torch.cuda.stream(self.compute):
            return self._ring.send(source)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Enqueue setting every byte."""
        with torch.cuda.stream(stream):
            tensor.fill_(value)

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """An event on `stream`; a thread that waits for it sleeps, because spinning would take a reader's core."""
        event = torch.cuda.Event(enable_timing=is_timed, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Order `stream` behind `event`."""
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`."""
        event.synchronize()

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        """Seconds between two timed events; None while the later one is not reached."""
        return before.elapsed_time(after) / 1e3 if after.query() else None

    def peak_bytes(self) -> int:
        """torch's own high-water mark, and what CUDA keeps beside it."""
        self._context_bytes = max(self._context_bytes, self._own_context_bytes())
        return int(torch.cuda.max_memory_reserved(self.place)) + self._context_bytes

    def bytes_beside_torch(self) -> int:
        """The context, with the kernels loaded and the graphs recorded so far, and all that other programs hold."""
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.place)  # makes the context first
        return max(0, all_bytes - free_bytes - int(torch.cuda.memory_reserved(self.place)))

    def _own_context_bytes(self) -> int:
        return min(_MAX_CONTEXT_BYTES, self.bytes_beside_torch())


class _SeenByKernels:
    """Page-locked memory by the address that a kernel reads it at, which is the host's own."""

    def __init__(self, array: np.ndarray) -> None:
        address = {"data": (array.ctypes.data, False), "shape": (len(array) // 8,), "typestr": "<i8"}
        self.__cuda_array_interface__ = {**address, "version": 3}


def computing_on(device: Device | None) -> AbstractContextManager[None]:
    """`Device.computing`; None is the CPU, which every thread computes on."""
    return nullcontext() if device is None else device.computing()


def multiply_by_ieee() -> None:
    """Let no float32 product be one of TF32, whatever the environment says (`TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`)."""
    with warnings.catch_warnings():  # the newer names alone leave a mixture, which torch refuses to multiply by
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def open_device(name: str | Device, gpu_memory: str | int | None = None, *, rank_on_host: int = 0) -> Device | None:
    """The device that `name` says (`auto`, `cpu`, `cuda`, `cuda:N`), or is, limited to `gpu_memory`; None is the CPU.

    Of several GPUs, `cuda` and `auto` give each rank of this host the next one.

    Raises `UserError`: no such name, driver or GPU, or a budget where there is none or larger than the GPU.
    """
    if not isinstance(name, str):
        return name
    if name not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", name):
        raise UserError(f"`device` must be auto, cpu, cuda or cuda:N, got {name!r}: try `device` auto")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if gpu_memory is not None:
            parse_size(gpu_memory, "`gpu_memory`")
            raise UserError("`gpu_memory` limits a CUDA device, and this run uses the CPU: leave it out and use `ram`")
        return None
    if not torch.cuda.is_available():
        raise UserError(f"`device` {name} {_what_lacks()}: use `device` cpu")
    count = torch.cuda.device_count()
    index = int(name.partition(":")[2] or rank_on_host % max(1, count))
    if index >= count:
        raise UserError(f"`device` {name} does not exist, this machine shows {count} of them: use cuda:0")
    limit_bytes = None if gpu_memory is None else parse_size(gpu_memory, "`gpu_memory`")
    try:
        torch.cuda.empty_cache()  # of an earlier decoder in this process
        free_bytes = torch.cuda.mem_get_info(index)[0]
    except RuntimeError as error:  # busy, in a bad state, or without room for a context
        raise UserError(f"`device` {name} cannot be opened ({reason(error)}): free it, or use `device` cpu") from None
    if limit_bytes is not None and limit_bytes > free_bytes:
        wish, free = format_bytes(limit_bytes), format_bytes(free_bytes)
        raise UserError(f"`gpu_memory` must be at most what is free on {name}, {free}, got {wish}: lower it")
    return CudaDevice(index, limit_bytes)


def _what_lacks() -> str:
    if torch.version.cuda is None:
        return "needs a CUDA device, and a torch that is built for CUDA, this one is not"
    return "needs a CUDA device and driver, this machine shows none"
