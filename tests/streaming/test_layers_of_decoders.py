"""Layers of whole decoders: bytes of the plan, other sources of bytes, nothing read from a slot that was released."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from plans import make_plan
from tiny import FAMILIES, build, save

import offload
from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout
from offload.checkpoint.safetensors import open_checkpoint
from offload.errors import UserError
from offload.memory.planner import model_shape
from offload.model.kv_cache import KVCache
from offload.model.streamed import StreamedModel
from offload.streaming.disk import ByteSource, finish


def tiny_target(directory: Path) -> tuple[Path, int]:
    """A checkpoint and a budget under which its four layers stream through three slots."""
    target = save(build(FAMILIES["llama"]()), directory / "target")
    shape = model_shape(open_checkpoint(target))
    roomy = make_plan(shape, None, 1 << 40, context=128, num_nodes=1)
    return target, roomy.fixed_bytes + 3 * max(roomy.layer_bytes) + 100


def test_a_sweep_moves_the_bytes_of_the_plan(tmp_path: Path) -> None:
    target, ram = tiny_target(tmp_path)
    with offload.load(target, ram=ram, context=128, threads=1, tree="none") as decoder:
        plan, stream = decoder.plan, decoder.target.stream
        assert plan.num_slots == 3 and plan.num_resident == 0
        num_runs = sum(len(layout.pieces) for layout in stream.carrier.layouts)
        moved, counted = [], []
        for _ in range(2):
            for num_new in (4, 9):
                decoder.generate([5, 6, 7], max_new_tokens=num_new)
                for transfer in stream.stage._transfers:
                    finish(transfer.parts)
                moved.append(stream.carrier.source.bytes_read)
                counted.append(stream.bytes_read)
    # every token but the last needs one sweep of its own, and read-ahead is the same after each generation
    for figures in (moved, counted):
        for more, num_sweeps in zip(np.diff(figures).tolist(), (9, 4, 9), strict=True):
            assert more % num_sweeps == 0
            assert plan.streamed_bytes - 2 * BLOCK_BYTES * num_runs <= more / num_sweeps <= plan.streamed_bytes


class MemorySource(ByteSource):
    """Files that were read beforehand."""

    opened: ClassVar[list["MemorySource"]] = []

    def __init__(self, paths: Sequence[Path], rate_limit_bytes_per_s: float | None = None, **_: object) -> None:
        self.paths, self.rate_limit_bytes_per_s, self.num_reads = paths, rate_limit_bytes_per_s, 0
        self.reading_s = 0.0
        self._files = [np.fromfile(path, np.uint8) for path in paths]
        self.opened.append(self)

    @property
    def note(self) -> str | None:
        return None

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        self.num_reads += 1
        for shard, lo, hi, slab_lo in layout.pieces:
            slab[slab_lo : slab_lo + hi - lo] = self._files[shard][lo:hi]
        done = Future[None]()
        done.set_result(None)
        return [done]

    def fetch(self, layout: SlabLayout) -> np.ndarray:
        slab = np.empty(layout.slab_bytes, np.uint8)
        self.read(layout, slab)
        return slab

    def close(self) -> None:
        self._files.clear()


@pytest.mark.usefixtures("_no_weights")
def test_bytes_may_come_from_anywhere(tmp_path: Path) -> None:
    """A model and its draft, without one read from the disk."""
    target, _ = tiny_target(tmp_path)
    MemorySource.opened.clear()
    with offload.load(
        target, target, 1 << 30, "2x1", context=128, threads=1, open_source=MemorySource, link_limit="1GB"
    ) as decoder:
        assert len(decoder.generate([5, 6, 7], max_new_tokens=3).token_ids) == 3
    source, draft = MemorySource.opened
    assert source.num_reads == draft.num_reads == 1 + 4, "embeddings and head, and the layers"
    assert (source.rate_limit_bytes_per_s, draft.rate_limit_bytes_per_s) == (10**9, None)
    assert not source._files and not draft._files, "both are closed"


def logits_of_a_generation(target: Path, ram: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    seen, forward = [], StreamedModel.forward

    def watch(self: StreamedModel, token_T: Any, position_U: Any, ancestor_TU: Any, cache: KVCache, **how: Any) -> Any:
        seen.append(forward(self, token_T, position_U, ancestor_TU, cache, **how))
        return seen[-1]

    with offload.load(target, ram=ram, context=128, threads=1, invariant=False, tree="none") as decoder:
        monkeypatch.setattr(StreamedModel, "forward", watch)
        decoder.target.stream.poison_released = True
        decoder.generate([5, 6, 7], max_new_tokens=12)
    monkeypatch.setattr(StreamedModel, "forward", forward)
    return seen


def test_a_generation_never_reads_a_released_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ram = tiny_target(tmp_path)
    streamed = logits_of_a_generation(target, ram, monkeypatch)
    resident = logits_of_a_generation(target, 1 << 31, monkeypatch)
    assert len(streamed) == len(resident) == 12
    for ours, theirs in zip(streamed, resident, strict=True):
        assert torch.equal(ours, theirs) and not ours.isnan().any()


def test_a_layer_used_after_its_release_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ram = tiny_target(tmp_path)
    borrow = StreamedModel.stream_layers

    def borrow_and_release_early(
        self: StreamedModel, acquire: Callable[[int], np.ndarray], release: Callable[[int], None]
    ) -> None:
        def hurry(layer: int) -> np.ndarray:
            slab = acquire(layer)
            release(layer)
            return slab

        borrow(self, hurry, lambda layer: None)

    monkeypatch.setattr(StreamedModel, "stream_layers", borrow_and_release_early)
    with pytest.raises(UserError, match="scores are not finite numbers"):
        logits_of_a_generation(target, ram, monkeypatch)
