"""Host memory that a device can copy from by itself: page-locked, in buffers of exact size.

Caching allocators round up, by a quarter for a layer of a 70B model; so memory comes from the
driver. There are three methods; the first that works is used: pages of ours, touched by many
threads and registered with the driver; cupy's `PinnedMemory`, whose pages the driver makes one
after the other (measured: 2 GB/s instead of 16, and copies at the same rate); plain pages, which
reach the device through a small locked bounce buffer. A method that refused a size is only tried
again for much smaller ones. Processors next to the device touch the memory first, so that it lies
there: with several sockets, copies from the far one run at half the speed or less. If the sockets
are unknown, this is left out.

Invariant: a buffer says whether it is locked.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.checkpoint.layout import allocate
from offload.errors import reason
from offload.machine import cpus_near, stay_on
from offload.units import format_bytes

_PAGE_BYTES = 4096
_NO_LIMIT = 1 << 62
# Bytes that one thread touches at a time.
_TOUCH_BYTES = 64 << 20
# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_HOST_POINTER = 91
# threads that touch pages: more gain nothing, since the kernel's own locks are the limit then
_NUM_THREADS = 8


class RefusedError(Exception):
    """This way of locking pages is not available here; the message says why."""


class HostBuffer(NamedTuple):
    """Host memory of exact size."""

    # flat uint8, page-aligned
    array: np.ndarray
    # whether a device may copy from it asynchronously
    is_pinned: bool
    # whether the device's kernels may read it, by the host's address
    is_seen: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """Return the same memory for torch."""
        return torch.from_numpy(self.array)


class PinningMethod:
    """One way to get page-locked memory. This one takes plain pages, which count as locked where no
    device copies from them on its own.

    Attributes:
        is_seen: whether kernels may read it by the host's address; where they may not, that ends
            the context.
    """

    name = "plain"
    is_seen = True

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return exactly `num_bytes` locked bytes. Raises `RefusedError`."""
        return allocate(num_bytes)

    def free(self, array: np.ndarray) -> None:
        """Unlock an allocation, unless its last view does so; nothing copies from it."""


class CupyPinning(PinningMethod):
    """Locked memory by way of cupy. Raises `RefusedError` if it is missing, or for another CUDA."""

    name = "cupy"

    def __init__(
        self,
        index: int,
        import_cupy: Callable[[], Any],
        cuda_version: str | None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        try:
            self._cupy = import_cupy()
            major = int(self._cupy.cuda.runtime.runtimeGetVersion()) // 1000
        # a package for another driver fails in its own ways
        except Exception as error:
            raise RefusedError(f"cupy: {reason(error)}") from error
        if cuda_version and major != int(cuda_version.partition(".")[0]):
            wanted = cuda_version.partition(".")[0]
            mismatch = f"cupy is made for CUDA {major}, torch for {wanted}"
            raise RefusedError(f"{mismatch}: install cupy-cuda{wanted}x")
        self._index = index
        self._cpus = cpus

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return locked memory; `PinnedMemory` is exact, cupy's pool is not."""
        try:
            with ThreadPoolExecutor(1, initializer=stay_on, initargs=(self._cpus,)) as near:
                memory = near.submit(self._allocate_here, num_bytes).result()
        # a CUDARuntimeError, which only cupy can name; cupy has cleared the driver's state
        except Exception as error:
            raise RefusedError(f"cupy: {reason(error)}") from error
        pointer = self._cupy.cuda.PinnedMemoryPointer(memory, 0)
        array = np.frombuffer(pointer, np.uint8, count=num_bytes)
        # small allocations may be cut from larger ones, but O_DIRECT needs whole pages
        if array.ctypes.data % _PAGE_BYTES:
            raise RefusedError(f"cupy: {format_bytes(num_bytes)} do not begin with a page")
        return array

    def _allocate_here(self, num_bytes: int) -> Any:
        cuda = self._cupy.cuda
        # cupy's current device is not torch's
        with cuda.Device(self._index):
            return cuda.PinnedMemory(num_bytes, cuda.runtime.hostAllocPortable)


@dataclass
class RegisteredPinning(PinningMethod):
    """Pages of ours, touched in parallel, then locked by the driver."""

    # has `cudaHostRegister(address, size, flags)`, 0 for success, and `cudaHostUnregister(address)`
    _runtime: Any
    # clears the error of a refused call, which torch would report at its next kernel
    _forget_error: Callable[[], None]
    # makes pages real before the driver would, one after the other
    _touch: Callable[[np.ndarray], None] = lambda _: None
    _: KW_ONLY
    # the device's properties of such memory; see `PinningMethod`
    is_seen: bool = False
    name = "registered"

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return anonymous pages: a mapped file must never be locked.

        A forked child gets none of them: the system would copy each, since a device reads it.
        """
        array = allocate(num_bytes, is_inherited=False)
        self._touch(array)
        code = int(self._runtime.cudaHostRegister(array.ctypes.data, num_bytes, 0))
        if code:
            self._forget_error()
            raise RefusedError(f"cudaHostRegister returned {code} for {format_bytes(num_bytes)}")
        return array

    def free(self, array: np.ndarray) -> None:
        """Unlock; the pages go with the last view of them."""
        if int(self._runtime.cudaHostUnregister(array.ctypes.data)):
            self._forget_error()


class PinnedAllocator:
    """Host buffers for one device, locked in the first of `methods` that works.

    `refusals` say why better ones are missing.
    """

    def __init__(self, methods: Sequence[PinningMethod], refusals: Sequence[str] = ()) -> None:
        self.methods = list(methods)
        self._refusals = list(refusals)
        self._limits_bytes = [_NO_LIMIT] * len(self.methods)
        self._owners: list[tuple[PinningMethod, np.ndarray]] = []
        self.pinned_bytes = self.pageable_bytes = 0

    def allocate(self, num_bytes: int, *, is_seen: bool = False) -> HostBuffer:
        """Return a buffer of exactly this size, locked if any way is left.

        One that kernels are to read (`is_seen`) comes from such a way if there is one.
        """
        ways = list(enumerate(self.methods))
        if is_seen:
            ways.sort(key=lambda way: not way[1].is_seen)
        for index, way in ways:
            if not 0 < num_bytes < self._limits_bytes[index]:
                continue
            try:
                array = way.allocate(num_bytes)
            except RefusedError as refusal:
                self._refusals.append(str(refusal))
                self._limits_bytes[index] = num_bytes // 2
                continue
            self._owners.append((way, array))
            self.pinned_bytes += num_bytes
            return HostBuffer(array, True, way.is_seen)
        self.pageable_bytes += num_bytes
        return HostBuffer(allocate(num_bytes), num_bytes == 0)

    @property
    def ways(self) -> str:
        """Return in words how memory in use was locked."""
        return " and ".join(sorted({way.name for way, _ in self._owners})) or "not locked"

    @property
    def note(self) -> str | None:
        """Return a line for the user when memory could not be locked, with every way's reason."""
        if not self.pageable_bytes:
            return None
        all_bytes = self.pinned_bytes + self.pageable_bytes
        shortage = f"{format_bytes(self.pageable_bytes)} of {format_bytes(all_bytes)} host memory"
        shortage = f"{shortage} could not be page-locked, copies from it are slower"
        why = "; ".join(self._refusals) or "no way to lock pages"
        return f"{shortage} ({why}): let more be locked, or lower `ram`"

    def release(self, buffer: HostBuffer) -> None:
        """Take a buffer back before the others; no copy from it may be under way."""
        for index, (way, array) in enumerate(self._owners):
            if array is buffer.array:
                way.free(array)
                del self._owners[index]
                self.pinned_bytes -= len(array)
                return
        self.pageable_bytes -= len(buffer.array)

    def close(self) -> None:
        """Unlock everything; no copy may be under way."""
        while self._owners:
            way, array = self._owners.pop()
            way.free(array)


def open_pinned_allocator(torch_device: torch.device) -> PinnedAllocator:
    """Open the pinned allocator of a CUDA device."""
    cpus = cpus_near(_pci_address(torch_device))
    index = torch_device.index or 0
    touch = partial(touch_pages, cpus=cpus)
    registered = RegisteredPinning(
        torch.cuda.cudart(), forget_cuda_error, touch, is_seen=sees_registered(index)
    )
    try:
        cupy = CupyPinning(index, _import_cupy, torch.version.cuda, cpus)
    except RefusedError as refusal:
        return PinnedAllocator([registered], [str(refusal)])
    return PinnedAllocator([registered, cupy])


def touch_pages(array: np.ndarray, cpus: frozenset[int] | None = None) -> None:
    """Make every page real by threads on `cpus`: the first touch decides on its memory node."""

    def touch(lo: int) -> None:
        array[lo : lo + _TOUCH_BYTES : _PAGE_BYTES] = 0

    with ThreadPoolExecutor(_NUM_THREADS, initializer=stay_on, initargs=(cpus,)) as pool:
        list(pool.map(touch, range(0, len(array), _TOUCH_BYTES)))


def sees_registered(index: int, open_library: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Return True if kernels read registered memory by the host's address; False if unknown."""
    value = ctypes.c_int(0)
    try:
        ask = open_library("libcuda.so.1").cuDeviceGetAttribute
    except (OSError, AttributeError):
        return False
    return not ask(ctypes.byref(value), _HOST_POINTER, index) and bool(value.value)


def forget_cuda_error(
    maps: Path = Path("/proc/self/maps"), open_library: Callable[[str], Any] = ctypes.CDLL
) -> None:
    """Clear the error that a refused CUDA call has left in this thread.

    torch has no binding for it, and each copy of the runtime that is mapped keeps an error of its
    own, so all are cleared.
    """
    lines = maps.read_text().splitlines()
    files = {line.split(maxsplit=5)[-1].strip() for line in lines if "libcudart" in line}
    for file in sorted(name.removesuffix(" (deleted)") for name in files):
        open_library(file).cudaGetLastError()


def _import_cupy() -> Any:
    import cupy

    return cupy


def _pci_address(torch_device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(torch_device)
    numbers = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)
