"""Locked host memory: exact sizes, and every way in which a machine can refuse it; on drivers made of paper."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offload.streaming.disk import allocate
from offload.streaming.pinned import (
    CupyPinning,
    PinnedAllocator,
    RefusedError,
    RegisteredPinning,
    cpus_near,
    forget_cuda_error,
    sees_registered,
    stay_on,
    touch_pages,
)

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


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: CupyPinning(0, no_cupy, "12.8"), "No module named 'cupy'"),
        (lambda: CupyPinning(0, lambda: PaperCupy(13000), "12.8"), "CUDA 13, torch for 12: install cupy-cuda12x"),
    ],
    ids=["missing", "wrong CUDA"],
)  # fmt: skip
def test_cupy_that_cannot_be_used_says_why(build: Any, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        build()


def test_a_refusing_cupy_gives_way_to_registered_pages() -> None:
    runtime = PaperRuntime()
    cupy = PaperCupy(error=RuntimeError("cudaErrorMemoryAllocation: out of memory"))
    arena = PinnedAllocator([CupyPinning(0, lambda: cupy, None), RegisteredPinning(runtime, runtime.forget)])
    buffers = [arena.allocate(ODD_BYTES) for _ in range(2)]
    assert all(buffer.is_pinned for buffer in buffers) and arena.note is None
    assert sorted(runtime.registered.values()) == [ODD_BYTES] * 2
    assert all(buffer.array.ctypes.data % 4096 == 0 for buffer in buffers)
    arena.close()
    assert not runtime.registered


def test_memory_that_does_not_begin_with_a_page_is_not_read_into() -> None:
    """O_DIRECT would refuse it, at the first layer from disk."""
    runtime, cupy = PaperRuntime(), PaperCupy()
    cupy.shift = 512
    arena = PinnedAllocator([CupyPinning(0, lambda: cupy, None), RegisteredPinning(runtime, runtime.forget)])
    buffer = arena.allocate(ODD_BYTES)
    assert buffer.is_pinned and buffer.array.ctypes.data % 4096 == 0 and runtime.registered
    arena.close()


def test_a_refused_registration_leaves_no_error_behind() -> None:
    runtime = PaperRuntime(code=2)  # cudaErrorMemoryAllocation
    arena = PinnedAllocator([RegisteredPinning(runtime, runtime.forget)], ["cupy: missing"])
    buffer = arena.allocate(ODD_BYTES)
    assert not buffer.is_pinned and len(buffer.array) == ODD_BYTES
    assert runtime.pending_error == 0, "torch would blame the next kernel for it"
    assert arena.note and "cupy: missing; cudaHostRegister returned 2" in arena.note and "\n" not in arena.note
    assert arena.note.endswith("let more be locked, or lower `ram`")
    arena.close()


def test_a_way_that_refused_is_asked_again_only_for_less() -> None:
    class Wall:
        name, is_seen = "wall", False

        def __init__(self) -> None:
            self.asked: list[int] = []

        def allocate(self, num_bytes: int) -> np.ndarray:
            self.asked.append(num_bytes)
            if num_bytes > 5000:
                raise RefusedError("a wall")
            return np.zeros(num_bytes, np.uint8)

        def free(self, array: np.ndarray) -> None: ...

    wall = Wall()
    arena = PinnedAllocator([wall])
    assert [arena.allocate(size).is_pinned for size in (100_000, 100_000, 90_000, 4000)] == [False, False, False, True]
    assert wall.asked == [100_000, 4000]
    assert arena.pageable_bytes == 290_000 and arena.pinned_bytes == 4000


def test_pages_are_touched_before_they_are_registered() -> None:
    order: list[str] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: order.append("register") or 0)
    RegisteredPinning(runtime, lambda: None, lambda array: order.append("touch")).allocate(4096)
    assert order == ["touch", "register"]


def test_touching_reaches_every_page_and_moves_nobody_else() -> None:
    allowed = os.sched_getaffinity(0)
    array = np.full(70 << 20, 1, np.uint8)
    touch_pages(array, frozenset({min(allowed)}))
    assert not array[::4096].any() and array[1::4096].all()
    assert os.sched_getaffinity(0) == allowed, "only the threads that touch are bound"
    stay_on(None)


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


def test_a_buffer_says_whether_kernels_see_it() -> None:
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


def test_every_loaded_runtime_forgets(tmp_path: Path) -> None:
    """Its name may carry a hash, and a library that was replaced on disk is marked as deleted."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1  /a/libcudart-9335f6a2.so.12\n"
        "7f01-7f02 r--p 00000000 08:01 1  /a/libcudart-9335f6a2.so.12\n"
        "7f02-7f03 r-xp 00000000 08:01 2  /with space/libcudart.so.13 (deleted)\n"
        "7f03-7f04 r-xp 00000000 08:01 3  /usr/lib/libc.so.6\n"
        "7ffd-7ffe rw-p 00000000 00:00 0\n"
    )
    asked: list[str] = []

    def open_library(file: str) -> Any:
        return SimpleNamespace(cudaGetLastError=lambda: asked.append(file))

    forget_cuda_error(maps, open_library)
    assert asked == ["/a/libcudart-9335f6a2.so.12", "/with space/libcudart.so.13"]
    forget_cuda_error()  # without CUDA there is nothing to ask


def test_processors_next_to_a_card(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    card, node = tmp_path / "bus/pci/devices/0000:3b:00.0", tmp_path / "devices/system/node/node1"
    for folder in (card, node):
        folder.mkdir(parents=True)
    assert cpus_near("0000:3B:00.0", tmp_path) is None, "the system does not say"
    (card / "numa_node").write_text("-1\n")
    assert cpus_near("0000:3B:00.0", tmp_path) is None, "a single node is -1"
    (card / "numa_node").write_text("1\n")
    (node / "cpulist").write_text(f"{mine[0]}-{mine[-1]},4000\n")
    assert cpus_near("0000:3B:00.0", tmp_path) == frozenset(mine)
    (node / "cpulist").write_text("4000-4001\n")
    assert cpus_near("0000:3B:00.0", tmp_path) is None, "none of them is ours"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_the_arena_is_locked_and_exact() -> None:
    from offload.streaming.pinned import open_pinned_allocator

    arena = open_pinned_allocator(torch.device("cuda", 0))
    buffer = arena.allocate(ODD_BYTES)
    assert buffer.is_pinned and torch.from_numpy(buffer.array).is_pinned(), arena.note
    arena.close()
