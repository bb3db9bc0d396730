"""The devices that streaming uses: memory, copies, and events that order two streams of work.

`copies` moves weights, `compute` runs the model; the host goes on enqueueing. Every call names its
stream, because "the current one" differs inside a `with` block and in another thread. `HOST` does
everything at once, with times as events, so that a model streams on the CPU as on a GPU
(`cuda.CudaDevice`). Devices differ in two facts: whether they have memory of their own, to which
layers are sent (`has_own_memory`), and where their tensors lie (`torch_device`). A host that plays
a GPU in tests has the first, with tensors on the CPU. `Stall` tells how long compute has waited.

Invariant: nothing waits for the whole device. Without a GPU nothing here imports torch before
memory is allocated: plans for other machines work without it.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

from offload.checkpoint.layout import allocate
from offload.errors import UserError
from offload.machine import has_cuda_driver
from offload.rank_roles import find_place

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload.planning.hardware import Assumptions
    from offload.planning.load_options import LoadOptions
    from offload.streaming.pinned import PinnedAllocator

# a mark in a stream, reached or not; on a host the time at which it was set; None: reached
Event: TypeAlias = "torch.cuda.Event | float | None"
# a stream of work done in order; None: the host's own
Stream: TypeAlias = "torch.cuda.Stream | None"
# NaN in every float format that is streamed
POISON = 0xFF


class Device:
    """A device that computes. This one is the host, which does everything at once, in order. Others
    have memory of their own, and enqueue.

    Attributes:
        name: its model name; measurements hold for one kind of GPU.
        has_own_memory: whether layers are sent to it; else it computes from the buffers that a disk
            fills.
    """

    name = "cpu"
    has_own_memory = False
    copies: Stream = None
    compute: Stream = None

    @cached_property
    def torch_device(self) -> "torch.device":
        """Return where its tensors lie."""
        import torch

        return torch.device("cpu")

    def computing(self) -> AbstractContextManager[None]:
        """Within the body, enqueue this thread's unnamed work on `compute`."""
        return nullcontext()

    def allocate(self, num_bytes: int) -> "Tensor":
        """Return the device's memory as flat uint8; on the host whole pages, as disk reads need."""
        import torch

        return torch.from_numpy(allocate(num_bytes))

    def open_allocator(self) -> "PinnedAllocator":
        """Open an allocator of host memory from which this device can copy.

        The caller closes it.
        """
        from offload.streaming.pinned import PinnedAllocator, PinningMethod

        return PinnedAllocator([PinningMethod()])

    def copy(self, to: "Tensor", source: "Tensor", stream: Stream) -> None:
        """Enqueue a copy; both tensors stay untouched until an event behind it is reached."""
        to.copy_(source)

    def fill(self, tensor: "Tensor", value: int, stream: Stream) -> None:
        """Enqueue setting every byte."""
        tensor.fill_(value)

    def mark(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event that is reached when everything enqueued so far is done."""
        return time.perf_counter()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work on `stream` begin after `event`; the host does not wait."""

    def synchronize(self, event: Event) -> None:
        """Make the host wait for `event`."""

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        """Return seconds between two timed events, None until the later one is reached."""
        return cast(float, after) - cast(float, before)

    def open_uploads(self, resources: ExitStack) -> str | None:
        """Let uploads bypass the queued layers, while `resources` are open.

        Returns None, or a line with the reason why they cannot.
        """
        return None

    def upload(self, source: "Tensor") -> "Tensor":
        """Return a host tensor on the device, for work of the compute stream."""
        return source

    def peak_bytes(self) -> int:
        """Return the peak of this process's memory on the device."""
        return 0

    def bytes_beside_torch(self) -> int:
        """Return the bytes that a context and other programs hold on the device."""
        return 0


# the CPU of this machine
HOST = Device()


def is_host(name: str) -> bool:
    """Return True if this names the host, as far as that is known without torch."""
    return name.startswith("cpu") or (name == "auto" and not has_cuda_driver())


def host_for(gpu_memory: str | int | None) -> Device:
    """Return the host, which has no memory of a GPU to limit. Raises `UserError` for a limit."""
    if gpu_memory is not None:
        obstacle = "`gpu_memory` limits a CUDA device, and this run uses the CPU"
        raise UserError(f"{obstacle}: leave it out and use `ram`")
    return HOST


def device_of(options: "LoadOptions", assumed: "Assumptions | None" = None) -> Device:
    """Open what `options` compute on. Raises `UserError`.

    If nothing will be loaded, it is the host for a named machine, and for a budget of a GPU
    elsewhere.
    """
    name = options.device
    gpu_memory = options.gpu_memory
    if assumed is not None and assumed.hardware is not None:
        if name != "auto":
            requirement = f"`device` {name} is of this machine, `hardware` names another"
            raise UserError(f"{requirement}: give one of them")
        return HOST
    if assumed is not None and is_host(name) and (name == "auto" or gpu_memory is None):
        return HOST
    from torch import cuda

    from offload.streaming.cuda import find_card, open_device

    is_budget = name == "auto" and gpu_memory is not None
    if assumed is not None and is_budget and not cuda.is_available():
        return HOST
    place = find_place() if options.ranks is not None else None
    rank_on_host = 0 if place is None else place.rank_on_host
    cards = options.cards
    for card in cards:  # before any process is started for one
        find_card(card)
    here = cards[rank_on_host] if cards else name
    return open_device(here, gpu_memory, rank_on_host=rank_on_host)


class Stall:
    """Total time that compute has waited for bytes, by timed events; asking waits for nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known_s = 0.0
        self._waits = deque[tuple[Event, Event]]()

    def add(self, before: Event, after: Event) -> None:
        """Note that compute waited between these two events."""
        self._waits.append((before, after))

    @property
    def known_s(self) -> float:
        """Return the seconds of all waits that are over."""
        while self._waits and (waited_s := self._device.elapsed_s(*self._waits[0])) is not None:
            self._known_s += waited_s
            self._waits.popleft()
        return self._known_s
