"""Devices by name, and a CUDA device on a driver made of paper: what is refused, and where threads compute.

And locked host memory: exact sizes, and every way in which a machine can refuse it.
"""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from marks import needs_cuda
from shell import run_python

from offload.checkpoint.layout import allocate
from offload.errors import UserError
from offload.planning.load_options import LoadOptions
from offload.streaming import cuda as driver
from offload.streaming.cuda import CudaDevice, open_device
from offload.streaming.device import HOST, device_of
from offload.streaming.pinned import (
    CupyPinning,
    HostBuffer,
    PinnedAllocator,
    RefusedError,
    RegisteredPinning,
    sees_registered,
)

GIB = 1 << 30


class PaperCuda:
    """Stands in for `torch.cuda`: one kind of GPU."""

    def __init__(
        self, count: int, free_bytes: int = 40 * GIB, *, broken: str = "", version: str | None = "13.0"
    ) -> None:
        self.free_bytes, self.broken, self.version = free_bytes, broken, version
        self.share: float | None = None
        self.current = threading.local()
        self.reserved_bytes, self.has_cudnn_sdp = 0, True
        self.matmul, self.cudnn = (SimpleNamespace(allow_tf32=True) for _ in range(2))
        self.is_available, self.device_count = lambda: count > 0, lambda: count
        self.get_device_name = lambda place: "Paper 9000"
        self.empty_cache = self.reset_peak_memory_stats = lambda *_: None
        self.memory_reserved, self.max_memory_reserved = lambda place: self.reserved_bytes, lambda place: 3 * GIB
        self.Stream = lambda place=None, priority=0: SimpleNamespace(priority=priority)
        self.default = self.Stream()

    def mem_get_info(self, place: Any) -> tuple[int, int]:
        if self.broken:
            raise RuntimeError(self.broken)
        return self.free_bytes, 48 * GIB

    def current_stream(self, place: Any) -> Any:
        return getattr(self.current, "stream", self.default)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current.stream = self.current_stream(None), stream
        yield
        self.current.stream = before

    def set_device(self, place: Any) -> None:
        self.current.place = place

    @property
    def current_place(self) -> Any:
        return getattr(self.current, "place", torch.device("cuda", 0))

    @contextmanager
    def device(self, place: Any) -> Iterator[None]:
        before = self.current_place
        self.set_device(place)
        yield
        self.set_device(before)

    def enable_cudnn_sdp(self, enabled: bool) -> None:
        self.has_cudnn_sdp = enabled

    def set_per_process_memory_fraction(self, share: float, place: Any) -> None:
        self.share = share


def paper_torch(monkeypatch: pytest.MonkeyPatch, cuda: PaperCuda) -> PaperCuda:
    kept = {name: getattr(torch, name) for name in ("device", "uint8", "Tensor")}
    empty = lambda *size, **options: torch.empty(*size, dtype=options.get("dtype"))  # noqa: E731
    kept |= {"version": SimpleNamespace(cuda=cuda.version), "backends": SimpleNamespace(cuda=cuda, cudnn=cuda.cudnn)}
    monkeypatch.setattr(driver, "torch", SimpleNamespace(cuda=cuda, empty=empty, **kept))
    return cuda


BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be ..."
CANNOT = r"cannot be opened \(.*busy or unavailable.*\): free it, or use"


@pytest.mark.parametrize(
    ("card", "name", "gpu_memory", "words"),
    [
        (PaperCuda(0), "cuda", None, "cuda needs a CUDA device and driver, this machine shows none: use `device` cpu"),
        (PaperCuda(0), "cuda:3", "4GiB", "`device` cuda:3 needs a CUDA device"),
        (PaperCuda(2), "cuda:2", None, "`device` cuda:2 does not exist, this machine shows 2 of them: use cuda:0"),
        (PaperCuda(2), "cuda:0,2", None, "`device` cuda:2 does not exist, this machine shows 2 of them: use cuda:0"),
        (PaperCuda(1), "cuda", "64GiB", "must be at most what is free on cuda, 40 GiB, got 64 GiB: lower it"),
        (PaperCuda(1), "cpu", "4GiB", "`gpu_memory` limits a CUDA device, and this run uses the CPU"),
        (PaperCuda(0), "auto", "4GiB", "`gpu_memory` limits a CUDA device, and this run uses the CPU"),
        (
            PaperCuda(0, version=None),
            "cuda",
            None,
            r"cuda needs a CUDA device, and a torch .* built for CUDA.*: use `device` cpu",
        ),
        (PaperCuda(1, broken=BUSY), "auto", None, CANNOT),
        (PaperCuda(1, broken=BUSY), "cuda", None, CANNOT),
    ],
)
def test_what_cannot_be_opened_is_refused(
    card: PaperCuda, name: str, gpu_memory: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper_torch(monkeypatch, card)
    several = "," in name
    with pytest.raises(UserError, match=words) as refused:
        device_of(LoadOptions(device=name)) if several else open_device(name, gpu_memory)
    assert "\n" not in str(refused.value)


def test_auto_takes_a_card_where_there_is_one_and_ranks_of_a_host_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    paper_torch(monkeypatch, PaperCuda(0))
    assert open_device("auto") is open_device("cpu") is HOST
    cuda = paper_torch(monkeypatch, PaperCuda(2))
    assert open_device("cpu") is HOST
    alone = [("auto", {}, 0), ("cuda", {}, 0), ("cuda:1", {}, 1)]
    ranks = [("auto", 0, 0), ("auto", 1, 1), ("cuda", 2, 0), ("cuda:1", 0, 1), ("cuda:0", 1, 0)]
    for name, options, index in [*alone, *((name, {"rank_on_host": rank}, index) for name, rank, index in ranks)]:
        cuda.share = None
        opened = open_device(name, **options)
        assert cuda.share == 1, "an earlier run's budget no longer holds"
        assert opened.has_own_memory and opened.torch_device == torch.device("cuda", index)


def test_a_budget_binds_torch_and_the_peak_counts_what_was_loaded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context counts, of which torch knows nothing, and room for it to grow; what others hold does not."""
    for free_bytes, context_bytes, kept_bytes in (
        (47.5 * GIB, GIB // 2, 7 * GIB // 8),
        (47.1 * GIB, 0.9 * GIB, 0.9 * GIB),
        (30 * GIB, GIB, GIB),
    ):
        cuda = paper_torch(monkeypatch, PaperCuda(1, int(free_bytes)))
        opened = open_device("cuda", "24GiB")
        assert isinstance(opened, CudaDevice) and cuda.share is not None
        assert cuda.share * 48 * GIB == pytest.approx(24 * GIB - kept_bytes)
        assert opened.peak_bytes() == pytest.approx(3 * GIB + context_bytes, abs=2)
    cuda = paper_torch(monkeypatch, PaperCuda(1))
    open_device("cuda", "1MiB")
    assert cuda.share == 1, "no plan fits it: the next try in this process finds a GPU with memory"
    # The peak counts what was loaded later and nothing twice.
    cuda = paper_torch(monkeypatch, PaperCuda(1, 46 * GIB))
    cuda.reserved_bytes = 3 * GIB // 2  # by an earlier decoder of this process
    opened = open_device("cuda")
    assert isinstance(opened, CudaDevice) and opened.peak_bytes() == 3 * GIB + GIB // 2
    cuda.free_bytes -= GIB // 4  # kernels, graphs
    assert opened.peak_bytes() == 3 * GIB + 3 * GIB // 4
    cuda.free_bytes, cuda.reserved_bytes = 28 * GIB, 17 * GIB
    assert opened.peak_bytes() == 4 * GIB, "what is more than any context needs is another program's"
    assert opened.bytes_beside_torch() == 3 * GIB


def test_a_device_multiplies_by_ieee_and_attends_without_plans_made_for_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = paper_torch(monkeypatch, PaperCuda(1))
    assert cuda.matmul.allow_tf32 and cuda.cudnn.allow_tf32 and cuda.has_cudnn_sdp
    CudaDevice(0)
    assert not cuda.matmul.allow_tf32 and not cuda.cudnn.allow_tf32 and not cuda.has_cudnn_sdp


def _in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _inside(cuda: PaperCuda, stream: Any, work: Any) -> None:
    with cuda.stream(stream):
        work()


class Staging:
    """Locked memory of the size that is asked for."""

    note = "2 GiB of locked memory are the limit"

    def __init__(self, *, is_pinned: bool = True, is_seen: bool = True) -> None:
        self.buffer = HostBuffer(allocate(1 << 16), is_pinned, is_seen)

    def allocate(self, num_bytes: int, *, is_seen: bool) -> HostBuffer:
        assert is_seen
        return self.buffer

    def close(self) -> None:
        """There is nothing to unlock."""


def staging_card(monkeypatch: pytest.MonkeyPatch, staging: Staging) -> tuple[PaperCuda, CudaDevice]:
    cuda = paper_torch(monkeypatch, PaperCuda(1))
    seen = torch.from_numpy(staging.buffer.array).view(torch.int64)
    monkeypatch.setattr(driver.torch, "as_tensor", lambda _, device: seen, raising=False)
    card = CudaDevice(0)
    monkeypatch.setattr(card, "open_allocator", lambda: staging)
    return cuda, card


@pytest.mark.parametrize(
    ("staging", "words"),
    [
        (Staging(is_seen=False), "cannot read it where the host does"),
        (Staging(is_pinned=False, is_seen=False), "2 GiB of locked memory are the limit"),
    ],
)
def test_memory_that_kernels_cannot_read_is_not_staged_through(
    staging: Staging, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that reads an address of the host's alone ends its context."""
    _, card = staging_card(monkeypatch, staging)
    card.torch_device = torch.device("cpu")
    with ExitStack() as resources:
        refusal = card.open_uploads(resources)
        assert refusal is not None and words in refusal and refusal.endswith("install cupy") and card._ring is None
        assert len(card.upload(torch.zeros(3))) == 3


def test_every_thread_computes_where_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that begins on the first GPU, and one inside a caller's own stream; afterwards all is as it was."""
    cuda = paper_torch(monkeypatch, PaperCuda(2))
    card, seen = CudaDevice(1), list[Any]()

    def compute() -> None:
        before = cuda.current_place, cuda.current_stream(None)
        with card.computing():
            seen.append((cuda.current_place, cuda.current_stream(None)))
        assert (cuda.current_place, cuda.current_stream(None)) == before

    for run in (compute, lambda: _in_thread(compute), lambda: _inside(cuda, card.copies, compute)):
        run()
    assert seen == [(card.torch_device, card.compute)] * 3
    with HOST.computing():
        pass


_IEEE = """
import warnings
warnings.simplefilter("error", UserWarning)
import torch
from offload.streaming.cuda import multiply_by_ieee
assert torch.backends.cuda.matmul.allow_tf32, "the environment asks for it"
multiply_by_ieee()
assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cuda.matmul.fp32_precision != "tf32"
assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
assert "tf32" not in (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision)
"""


def test_products_are_never_tf32_whatever_the_environment_says() -> None:
    """In a process of its own, where warnings are errors: every way of asking torch gives the same answer."""
    run_python("-c", _IEEE, environment={**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"})


ODD_BYTES = 3 * 4096 * 5  # no power of two


class PaperCupy:
    """The part of cupy that is used; allocates plain memory and notes what was asked."""

    def __init__(self, version: int = 12090, error: Exception | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.devices: list[int] = []
        self.error, self.shift = error, 0
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(runtimeGetVersion=lambda: version, hostAllocPortable=1),
            PinnedMemory=self._allocate,
            PinnedMemoryPointer=lambda memory, offset: memory,
            Device=self._device,
        )

    def _allocate(self, num_bytes: int, flags: int) -> np.ndarray:
        if self.error:
            raise self.error
        self.asked.append((num_bytes, flags))
        return allocate(num_bytes + self.shift)[self.shift :]

    def _device(self, index: int) -> Any:
        self.devices.append(index)
        return open(os.devnull)  # anything with __enter__


class PaperRuntime:
    """Registers as long as it likes to; remembers the error that a refusal leaves behind."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.pending_error = code, 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pending_error = self.code
        if not self.code:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def forget(self) -> None:
        self.pending_error = 0


def no_cupy() -> Any:
    raise ImportError("No module named 'cupy'")


def test_cupy_gives_exactly_what_is_asked() -> None:
    cupy = PaperCupy()
    arena = PinnedAllocator([CupyPinning(1, lambda: cupy, "12.8")])
    buffer = arena.allocate(ODD_BYTES)
    assert buffer.is_pinned and buffer.array.shape == (ODD_BYTES,) and buffer.array.dtype == np.uint8
    assert cupy.asked == [(ODD_BYTES, 1)] and cupy.devices == [1], "no rounding, and on the card in use"
    buffer.array[:] = 7
    assert arena.note is None and arena.pinned_bytes == ODD_BYTES and arena.ways == "cupy"
    arena.close()


def test_cupy_that_cannot_be_used_says_why() -> None:
    with pytest.raises(RefusedError, match="No module named 'cupy'"):
        CupyPinning(0, no_cupy, "12.8")
    with pytest.raises(RefusedError, match="CUDA 13, torch for 12: install cupy-cuda12x"):
        CupyPinning(0, lambda: PaperCupy(13000), "12.8")


def test_a_cupy_that_refuses_or_is_not_aligned_gives_way_to_registered_pages() -> None:
    runtime = PaperRuntime()
    cupy = PaperCupy(error=RuntimeError("cudaErrorMemoryAllocation: out of memory"))
    arena = PinnedAllocator([CupyPinning(0, lambda: cupy, None), RegisteredPinning(runtime, runtime.forget)])
    buffers = [arena.allocate(ODD_BYTES) for _ in range(2)]
    assert all(buffer.is_pinned for buffer in buffers) and arena.note is None
    assert sorted(runtime.registered.values()) == [ODD_BYTES] * 2
    assert all(buffer.array.ctypes.data % 4096 == 0 for buffer in buffers)
    arena.close()
    assert not runtime.registered
    # O_DIRECT would refuse it, at the first layer from disk.
    runtime, cupy = PaperRuntime(), PaperCupy()
    cupy.shift = 512
    arena = PinnedAllocator([CupyPinning(0, lambda: cupy, None), RegisteredPinning(runtime, runtime.forget)])
    buffer = arena.allocate(ODD_BYTES)
    assert buffer.is_pinned and buffer.array.ctypes.data % 4096 == 0 and runtime.registered
    arena.close()


def test_a_refused_registration_leaves_no_error_and_a_buffer_says_whether_kernels_see_it() -> None:
    runtime = PaperRuntime(code=2)  # cudaErrorMemoryAllocation
    arena = PinnedAllocator([RegisteredPinning(runtime, runtime.forget)], ["cupy: missing"])
    buffer = arena.allocate(ODD_BYTES)
    assert not buffer.is_pinned and len(buffer.array) == ODD_BYTES
    assert runtime.pending_error == 0, "torch would blame the next kernel for it"
    assert arena.note and "cupy: missing; cudaHostRegister returned 2" in arena.note and "\n" not in arena.note
    assert arena.note.endswith("let more be locked, or lower `ram`")
    arena.close()
    # A buffer says whether kernels see it.
    runtime = PaperRuntime()
    for is_seen in (True, False):
        arena = PinnedAllocator([RegisteredPinning(runtime, runtime.forget, is_seen=is_seen)])
        buffer = arena.allocate(ODD_BYTES)
        assert buffer.is_pinned and buffer.is_seen == is_seen
        arena.close()
    cupy = PinnedAllocator([CupyPinning(0, PaperCupy, None)]).allocate(ODD_BYTES)
    assert cupy.is_seen, "what the driver has allocated has one address for both"
    plain = PinnedAllocator([]).allocate(ODD_BYTES)
    assert not plain.is_pinned and not plain.is_seen
    # What kernels must see comes from a way that they do, all else from the quickest.
    arena = PinnedAllocator([RegisteredPinning(runtime, runtime.forget), CupyPinning(0, PaperCupy, None)])
    assert [arena.allocate(ODD_BYTES, is_seen=is_seen).is_seen for is_seen in (False, True)] == [False, True]
    assert arena.ways == "cupy and registered"


def test_children_of_a_fork_get_none_of_what_is_registered() -> None:
    """The system would copy every page of it, since a device may be reading."""
    runtime = PaperRuntime()
    arena = PinnedAllocator([RegisteredPinning(runtime, runtime.forget)])
    at = arena.allocate(ODD_BYTES).array.ctypes.data
    plain = allocate(ODD_BYTES)
    flags = dict[int, list[str]]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            lo = int(match[1], 16)
        elif line.startswith("VmFlags:"):
            flags[lo] = line.split()[1:]
    assert "dc" in flags[at] and "dc" not in flags[plain.ctypes.data]


@pytest.mark.parametrize("answer", [(0, 1), (0, 0), (1, 1), None], ids=["yes", "no", "an error", "no driver"])
def test_the_device_says_whether_its_kernels_see_registered_memory(answer: tuple[int, int] | None) -> None:
    """Attribute 91; where it cannot be asked, memory is not shown to kernels."""
    asked = list[tuple[int, int]]()

    def ask(value: Any, attribute: int, index: int) -> int:
        asked.append((attribute, index))
        assert answer is not None
        value._obj.value = answer[1]
        return answer[0]

    def open_library(file: str) -> Any:
        if answer is None:
            raise OSError(f"{file}: cannot open shared object file")
        return SimpleNamespace(cuDeviceGetAttribute=ask)

    assert sees_registered(1, open_library) == (answer == (0, 1))
    assert asked == ([] if answer is None else [(91, 1)])


@pytest.mark.gpu
@needs_cuda
def test_on_a_card_the_arena_is_locked_and_exact() -> None:
    from offload.streaming.pinned import open_pinned_allocator

    arena = open_pinned_allocator(torch.device("cuda", 0))
    buffer = arena.allocate(ODD_BYTES)
    assert buffer.is_pinned and torch.from_numpy(buffer.array).is_pinned(), arena.note
    arena.close()
