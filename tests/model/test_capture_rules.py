"""Recording by the rules of CUDA and of torch's allocator, on paper: what a recording refuses breaks nothing else.

The allocator keeps a list of captures that are under way, and gives no memory back while there is one. Up to torch 2.11
a capture that ends broken stays on that list (pytorch/pytorch#180395), and whoever asks for memory back later is told.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from strict_place import OnCard, StrictDevice, place
from test_families import CHANGING, tiny_model
from tiny import FAMILIES, build, save

from offload.checkpoint.safetensors import Checkpoint, open_checkpoint
from offload.engine.build import resident_model
from offload.model.cuda_graphs import CudaRecorder, use_graphs
from offload.model.weights import StreamedModel

TORCHES = {"torch 2.11": False, "torch 2.13": True}
Pool = tuple[int, int]


class PaperStream:
    """A stream; what waits for work that is not captured ends a capture."""

    device = torch.device("cuda", 0)

    def __init__(self, paper: "Paper") -> None:
        self._paper = paper

    def wait_stream(self, other: "PaperStream") -> None:
        if self._paper.capturing is not None:
            self._paper.refuse("dependency created on uncaptured work in another stream")


class PaperGraph:
    """A graph: whole, once a capture has ended as it should."""

    def __init__(self, paper: "Paper") -> None:
        self._paper, self._pool, self._stream = paper, (0, 0), paper.default
        self.is_whole = False

    def capture_begin(self, *, pool: Pool, capture_error_mode: str) -> None:
        paper = self._paper
        if paper.capturing is not None:
            raise RuntimeError("CUDA graphs: a capture is under way already")
        self._pool, self._stream = pool, paper.now
        paper.underway.append(pool)  # before the driver is asked, which may refuse
        if paper.now is paper.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        paper.capturing, paper.is_broken = self, False

    def capture_end(self) -> None:
        paper = self._paper
        if paper.now is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if paper.capturing is not self:
            raise RuntimeError("CUDA error: the operation cannot be performed in the present state")
        paper.capturing = None
        if paper.is_broken and not paper.closes_first:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        paper.end_allocate(0, self._pool)
        if paper.is_broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.is_whole = True

    def replay(self) -> None:
        assert self.is_whole, "a graph that was never recorded is replayed"
        self._paper.num_replays += 1


class Paper:
    """`torch.cuda` and its allocator.

    Args:
        closes_first: a broken capture is taken off the allocator's list, as torch does from 2.12 on.
    """

    def __init__(self, *, closes_first: bool) -> None:
        self.closes_first, self.is_broken = closes_first, False
        self.default, self.underway, self.num_pools, self.num_replays = PaperStream(self), list[Pool](), 0, 0
        self.now, self.capturing = self.default, None

    def install(self, patch: pytest.MonkeyPatch) -> "Paper":
        for name, what in {
            "Stream": lambda place: PaperStream(self),
            "CUDAGraph": lambda: PaperGraph(self),
            "current_stream": lambda place: self.now,
            "stream": self.stream,
            "graph_pool_handle": self.pool,
            "empty_cache": self.empty_cache,
        }.items():
            patch.setattr(torch.cuda, name, what)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        return self

    def pool(self) -> Pool:
        self.num_pools += 1
        return 0, self.num_pools

    @contextmanager
    def stream(self, stream: PaperStream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def end_allocate(self, index: int, pool: Pool) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def empty_cache(self) -> None:
        if self.capturing is not None:
            self.refuse("operation not permitted when stream is capturing")
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def refuse(self, why: str) -> None:
        self.is_broken = True
        raise RuntimeError(f"CUDA error: {why}\nSearch for it in the documentation\n")


class Capturing(StrictDevice):
    """The card: while something is recorded it can neither be waited for nor be sent to."""

    def __init__(self, paper: Paper) -> None:
        super().__init__()
        self._paper = paper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.looks), len(self.sends)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._paper.capturing is not None and (len(self.looks), len(self.sends)) != before:
            self._paper.refuse("operation not permitted when stream is capturing")
        return out


@pytest.fixture(params=TORCHES)
def paper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Paper:
    return Paper(closes_first=TORCHES[request.param]).install(monkeypatch)


def looking(*_: Any) -> None:
    """A pass that asks for a number of the card."""
    float(torch.ones(2, device=place()).sum())


def failing(*_: Any) -> None:
    raise ValueError("this family goes by the length of a text")


def first_rows(model: StreamedModel) -> torch.Tensor:
    rows = torch.arange(3)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    logits = model.forward(rows + 5, rows, causal, model.new_cache(8))
    return logits.held if isinstance(logits, OnCard) else logits


def checkpoint_of(family: str, directory: Path) -> Checkpoint:
    model = tiny_model(CHANGING["dynamic"]()) if family in CHANGING else build(FAMILIES[family]())
    return open_checkpoint(save(model, directory))


@pytest.mark.parametrize(
    ("family", "hook", "line"),
    [
        ("dynamic", None, "not permitted when stream is capturing"),
        ("llama", looking, "not permitted when stream is capturing"),
        ("llama", failing, "goes by the length of a text"),
    ],
    ids=["dynamic rope", "looks", "fails"],
)
def test_a_draft_that_cannot_be_recorded_runs_on_without(
    family: str, hook: Callable[..., None] | None, line: str, paper: Paper, tmp_path: Path
) -> None:
    """The same logits, one line that says so, and an allocator that gives memory back to the layers that come next."""
    checkpoint = checkpoint_of(family, tmp_path)
    wanted = first_rows(resident_model(checkpoint, "float32"))
    with Capturing(paper):
        model = resident_model(checkpoint, "float32", place())
        if hook is not None:
            last = model.meta_model.get_decoder().layers[-1]
            last.register_forward_pre_hook(lambda *_: hook() if paper.capturing is not None else None)
        told = use_graphs(model)
        torch.cuda.empty_cache()
        got = first_rows(model)
    assert told is not None and told.startswith("the draft runs without CUDA graphs") and line in told
    assert "\n" not in told and not paper.underway and paper.num_replays == 0 and paper.now is paper.default
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_draft_that_can_be_is_recorded(paper: Paper, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    with Capturing(paper):
        model = resident_model(checkpoint, "float32", place())
        assert use_graphs(model) is None
        torch.cuda.empty_cache()
        first_rows(model)
    assert paper.num_replays == 2, "one to see whether it goes, and the pass"


def test_recordings_go_on_behind_one_that_failed(paper: Paper) -> None:
    """They share its pool."""
    record = CudaRecorder(torch.cuda.Stream(place()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            record(lambda: torch.cuda.empty_cache() if paper.capturing else None)
        torch.cuda.empty_cache()
        record(lambda: None)()
    assert paper.num_replays == 4


def test_a_capture_that_cannot_begin_is_closed_as_well(paper: Paper) -> None:
    record = CudaRecorder(paper.default)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="non-default stream"):
        record(lambda: None)
    torch.cuda.empty_cache()


def test_an_allocator_that_is_left_open_refuses(paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that was: nobody closes what a broken capture has opened. Torch 2.11 alone minds."""
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None)
    checkpoint = checkpoint_of("dynamic", tmp_path)
    with Capturing(paper):
        assert use_graphs(resident_model(checkpoint, "float32", place())) is not None
    if paper.closes_first:
        torch.cuda.empty_cache()
        return
    with pytest.raises(RuntimeError, match="captures_underway"):
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_memory_comes_back_behind_a_failed_recording() -> None:
    number = torch.zeros(8, device="cuda:0")
    record = CudaRecorder(torch.cuda.Stream(number.device))
    with pytest.raises(RuntimeError):
        record(lambda: print(float(number.sum())) if torch.cuda.is_current_stream_capturing() else None)
    torch.cuda.empty_cache()
    replay = record(lambda: number.add_(1))
    replay()
    assert number.tolist() == [3.0] * 8
