"""Devices by name, and a CUDA device on a driver made of paper: who is refused, and which stream is meant."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.errors import UserError
from offload.streaming import device
from offload.streaming.device import CudaDevice, StagingRing, computing_on, open_device
from offload.streaming.disk import allocate
from offload.streaming.pinned import HostBuffer

GIB = 1 << 30


class PaperCuda:
    """Stands in for `torch.cuda`: one kind of GPU, with a log of what was asked on which stream."""

    def __init__(self, count: int, free_bytes: int = 40 * GIB) -> None:
        self.count, self.free_bytes = count, free_bytes
        self.log: list[tuple[Any, ...]] = []
        self.share: float | None = None
        self.current = threading.local()
        self.reserved_bytes, self.broken, self.has_cudnn_sdp = 0, "", True
        self.matmul, self.cudnn = (SimpleNamespace(allow_tf32=True) for _ in range(2))
        paper = self

        class Stream:
            def __init__(self, place: Any = None, priority: int = 0) -> None:
                self.place, self.priority = place, priority

            def wait_event(self, event: Any) -> None:
                paper.log.append(("wait", self, event))

        class Event:
            def __init__(self, **how: bool) -> None:
                self.how = how

            def record(self, stream: Stream) -> None:
                paper.log.append(("record", stream, self))

            def synchronize(self) -> None:
                paper.log.append(("synchronize", self))

            def query(self) -> bool:
                return True

            def elapsed_time(self, other: Any) -> float:
                return 2500.0

        self.Stream, self.Event = Stream, Event
        self.default = Stream()

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

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

    def get_device_name(self, place: Any) -> str:
        return "Paper 9000"

    def empty_cache(self) -> None: ...

    def memory_reserved(self, place: Any) -> int:
        return self.reserved_bytes

    def enable_cudnn_sdp(self, enabled: bool) -> None:
        self.has_cudnn_sdp = enabled

    def reset_peak_memory_stats(self, place: Any) -> None: ...

    def max_memory_reserved(self, place: Any) -> int:
        return 3 * GIB

    def set_per_process_memory_fraction(self, share: float, place: Any) -> None:
        self.share = share


def paper_torch(monkeypatch: pytest.MonkeyPatch, cuda: PaperCuda, version: str | None = "13.0") -> PaperCuda:
    kept = {name: getattr(torch, name) for name in ("device", "uint8", "Tensor")}
    empty = lambda *size, **how: torch.empty(*size, dtype=how.get("dtype"))  # noqa: E731
    kept |= {"version": SimpleNamespace(cuda=version), "backends": SimpleNamespace(cuda=cuda, cudnn=cuda.cudnn)}
    monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda, empty=empty, **kept))
    return cuda


@pytest.mark.parametrize(
    ("count", "name", "gpu_memory", "words"),
    [
        (0, "cuda", None, "`device` cuda needs a CUDA device and driver, this machine shows none: use `device` cpu"),
        (0, "cuda:3", "4GiB", "`device` cuda:3 needs a CUDA device"),
        (2, "cuda:2", None, "`device` cuda:2 does not exist, this machine shows 2 of them: use cuda:0"),
        (1, "cuda", "64GiB", "`gpu_memory` must be at most what is free on cuda, 40 GiB, got 64 GiB: lower it"),
        (1, "cpu", "4GiB", "`gpu_memory` limits a CUDA device, and this run uses the CPU"),
        (0, "auto", "4GiB", "`gpu_memory` limits a CUDA device, and this run uses the CPU"),
    ],
)
def test_what_cannot_be_opened_is_refused(
    count: int, name: str, gpu_memory: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper_torch(monkeypatch, PaperCuda(count))
    with pytest.raises(UserError) as refused:
        open_device(name, gpu_memory)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_auto_takes_a_card_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    paper_torch(monkeypatch, PaperCuda(0))
    assert open_device("auto") is None and open_device("cpu") is None
    cuda = paper_torch(monkeypatch, PaperCuda(2))
    assert open_device("cpu") is None
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:1", 1)):
        cuda.share = None
        opened = open_device(name)
        assert cuda.share == 1, "an earlier run's budget no longer holds"
        assert opened is not None and opened.place == torch.device("cuda", index)


def test_ranks_of_a_host_take_one_card_each(monkeypatch: pytest.MonkeyPatch) -> None:
    paper_torch(monkeypatch, PaperCuda(2))
    for name, rank, index in (("auto", 0, 0), ("auto", 1, 1), ("cuda", 2, 0), ("cuda:1", 0, 1), ("cuda:0", 1, 0)):
        opened = open_device(name, rank_on_host=rank)
        assert opened is not None and opened.place == torch.device("cuda", index)


def test_a_torch_for_the_cpu_is_told_from_a_missing_card(monkeypatch: pytest.MonkeyPatch) -> None:
    paper_torch(monkeypatch, PaperCuda(0), version=None)
    with pytest.raises(UserError, match=r"cuda needs a CUDA device, and a torch .* built for CUDA.*: use `device` cpu"):
        open_device("cuda")


def test_a_card_that_cannot_be_opened_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = paper_torch(monkeypatch, PaperCuda(1))
    cuda.broken = "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be ..."
    for name in ("auto", "cuda"):
        with pytest.raises(
            UserError, match=r"cannot be opened \(.*busy or unavailable.*\): free it, or use"
        ) as refused:
            open_device(name)
        assert "\n" not in str(refused.value)


def test_a_budget_binds_torch_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context counts, of which torch knows nothing, and room for it to grow; what others hold does not."""
    for free_bytes, context_bytes, kept_bytes in (
        (47.5 * GIB, GIB // 2, 7 * GIB // 8),
        (47.1 * GIB, 0.9 * GIB, 0.9 * GIB),
        (30 * GIB, GIB, GIB),
    ):
        cuda = paper_torch(monkeypatch, PaperCuda(1, int(free_bytes)))
        opened = open_device("cuda", "24GiB")
        assert opened is not None and cuda.share is not None
        assert cuda.share * 48 * GIB == pytest.approx(24 * GIB - kept_bytes)
        assert opened.peak_bytes() == pytest.approx(3 * GIB + context_bytes, abs=2)


def test_a_budget_that_no_plan_fits_leaves_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused later, and whoever tries again in this process must not find a GPU without memory."""
    cuda = paper_torch(monkeypatch, PaperCuda(1))
    open_device("cuda", "1MiB")
    assert cuda.share == 1


def test_the_peak_counts_what_was_loaded_later_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = paper_torch(monkeypatch, PaperCuda(1, 46 * GIB))
    cuda.reserved_bytes = 3 * GIB // 2  # by an earlier decoder of this process
    opened = open_device("cuda")
    assert opened is not None and opened.peak_bytes() == 3 * GIB + GIB // 2
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


def test_every_call_names_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is current where it is called: inside another stream's block, and in another thread."""
    cuda = paper_torch(monkeypatch, PaperCuda(1))
    card = CudaDevice(0)
    assert card.compute is cuda.default and card.copies is not card.compute
    assert card.copies.priority < card.compute.priority, "kernels between copies would wait for those of a layer"

    class Target:
        def copy_(self, source: Any, non_blocking: bool) -> None:
            cuda.log.append(("copy", cuda.current_stream(None), non_blocking))

        def fill_(self, value: int) -> None:
            cuda.log.append(("fill", cuda.current_stream(None), value))

    def calls() -> None:
        card.copy(Target(), None, card.copies)  # type: ignore[arg-type]
        card.fill(Target(), 7, card.compute)  # type: ignore[arg-type]
        event = card.record(card.copies, is_timed=True)
        card.wait(card.compute, event)
        card.synchronize(event)
        assert card.elapsed_s(event, event) == 2.5

    wanted = ["copy", "fill", "record", "wait", "synchronize"]
    streams = [card.copies, card.compute, card.copies, card.compute]
    for run in (calls, lambda: _in_thread(calls), lambda: _inside(cuda, card.copies, calls)):
        cuda.log.clear()
        run()
        assert [entry[0] for entry in cuda.log] == wanted
        assert [entry[1] for entry in cuda.log[:4]] == streams
        assert cuda.log[0][2] is True, "the host must not wait for a copy"
        assert cuda.log[2][2].how == {"enable_timing": True, "blocking": True}


def _in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _inside(cuda: PaperCuda, stream: Any, work: Any) -> None:
    with cuda.stream(stream):
        work()


class Staging:
    """Locked memory of the size that is asked for, closed in time."""

    note = "2 GiB of locked memory are the limit"

    def __init__(self, *, is_pinned: bool = True, is_seen: bool = True) -> None:
        self.buffer, self.is_closed = HostBuffer(allocate(1 << 16), is_pinned, is_seen), False

    def allocate(self, num_bytes: int) -> HostBuffer:
        return self.buffer

    def close(self) -> None:
        self.is_closed = True


def staging_card(monkeypatch: pytest.MonkeyPatch, staging: Staging) -> tuple[PaperCuda, CudaDevice]:
    cuda = paper_torch(monkeypatch, PaperCuda(1))
    seen = torch.from_numpy(staging.buffer.array).view(torch.int64)
    monkeypatch.setattr(device.torch, "as_tensor", lambda _, device: seen, raising=False)
    card = CudaDevice(0)
    monkeypatch.setattr(card, "open_allocator", lambda: staging)
    return cuda, card


def test_what_fits_is_staged_for_as_long_as_its_memory_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, sent = Staging(), list[int]()
    cuda, card = staging_card(monkeypatch, staging)

    def send(ring: StagingRing, source: torch.Tensor) -> torch.Tensor:
        sent.append(len(source))
        return source

    monkeypatch.setattr(StagingRing, "send", send)
    card.place = torch.device("cpu")
    with ExitStack() as resources:
        assert card.stage_uploads(resources) is None
        for size in (3, 1 << 20):
            assert len(card.upload(torch.zeros(size))) == size
        cuda.log.clear()
    assert [entry[0] for entry in cuda.log] == ["record", "synchronize"], "the last ones may still be read"
    assert staging.is_closed
    card.upload(torch.zeros(3))
    assert sent == [3]


@pytest.mark.parametrize(
    ("staging", "words"),
    [
        (Staging(is_seen=False), "cannot read it where the host does"),
        (Staging(is_pinned=False, is_seen=False), "2 GiB of locked memory are the limit"),
    ],
    ids=["not seen", "not locked"],
)
def test_memory_that_kernels_cannot_read_is_not_staged_through(
    staging: Staging, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that is the host's alone ends the context of whoever reads it."""
    _, card = staging_card(monkeypatch, staging)
    card.place = torch.device("cpu")
    with ExitStack() as resources:
        refusal = card.stage_uploads(resources)
        assert refusal is not None and words in refusal and refusal.endswith("install cupy") and card._ring is None
        assert len(card.upload(torch.zeros(3))) == 3


def test_every_thread_computes_where_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that begins on the first GPU, and one inside somebody's own stream; afterwards all is as it was."""
    cuda = paper_torch(monkeypatch, PaperCuda(2))
    card, seen = CudaDevice(1), list[Any]()

    def compute() -> None:
        before = cuda.current_place, cuda.current_stream(None)
        with card.computing():
            seen.append((cuda.current_place, cuda.current_stream(None)))
        assert (cuda.current_place, cuda.current_stream(None)) == before

    for run in (compute, lambda: _in_thread(compute), lambda: _inside(cuda, card.copies, compute)):
        run()
    assert seen == [(card.place, card.compute)] * 3
    with computing_on(None):
        pass


_IEEE = """
import torch
from offload.streaming.device import multiply_by_ieee
assert torch.backends.cuda.matmul.allow_tf32, "the environment asks for it"
multiply_by_ieee()
assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cuda.matmul.fp32_precision != "tf32"
assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
assert "tf32" not in (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision)
"""


def test_products_are_never_tf32_whatever_the_environment_says() -> None:
    """In a process of its own, where warnings are errors: every way of asking torch gives the same answer."""
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", _IEEE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
