"""CUDA's rules of recording, and those of torch's allocator, on paper.

The allocator keeps a list of captures that are under way, and gives no memory back while there is one. Up to torch 2.11
a capture that ends broken stays on that list (pytorch/pytorch#180395), and what asks for memory back later is told.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from strict_place import StrictDevice, attend_on_card, place

from offload.checkpoint.checkpoint import Checkpoint
from offload.engine.build import resident_model
from offload.model.cuda_graphs import side_stream
from offload.model.tree_model import TreeModel

Pool = tuple[int, int]


class PaperStream:
    """A stream; what waits for work that is not captured ends a capture."""

    device = torch.device("cuda", 0)

    def __init__(self, paper: "Paper", name: str) -> None:
        self._paper, self.name = paper, name

    def wait_stream(self, other: "PaperStream") -> None:
        if self._paper.capturing is not None:
            self._paper.refuse("dependency created on uncaptured work in another stream")
        self._paper.waits(self, other)


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
        self._paper.replays(self)


class Paper:
    """`torch.cuda` and its allocator.

    Args:
        closes_first: a broken capture is taken off the allocator's list, as torch does from 2.12 on.
    """

    def __init__(self, *, closes_first: bool) -> None:
        self.closes_first, self.is_broken = closes_first, False
        self.default, self.underway, self.num_pools, self.num_replays = PaperStream(self, "compute"), list[Pool](), 0, 0
        self.now, self.capturing = self.default, None

    def install(self, patch: pytest.MonkeyPatch) -> "Paper":
        for name, stand_in in {
            "Stream": lambda place: PaperStream(self, "side"),
            "CUDAGraph": lambda: PaperGraph(self),
            "current_stream": lambda place: self.now,
            "stream": self.stream,
            "graph_pool_handle": self.pool,
            "empty_cache": self.empty_cache,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        side_stream.cache_clear()  # it is another paper's
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

    def waits(self, stream: PaperStream, other: PaperStream) -> None:
        """One stream waits for what another one has to do so far."""

    def replays(self, graph: PaperGraph) -> None:
        """What was recorded is done once more, on the stream that is current."""

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


def draft_on_card(checkpoint: Checkpoint) -> TreeModel:
    """A draft that may be recorded; to be made while the card is there."""
    model = resident_model(checkpoint, "float32", place())
    model.set_attention_kernel(attend_on_card)
    return model
