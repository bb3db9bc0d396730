"""Small passes of a resident model, recorded once and replayed.

A draft step is hundreds of kernels of a few microseconds each, which no host launches as fast as a device runs them. A
recording has fixed shapes: rows are padded to one of a few widths, keys and values are looked at up to a multiple of
some slots, and what changes (ids, positions, slots to write to, masks) lies in tensors that are filled before a replay.

Invariant: nothing sees padding, whose keys go to a slot of their own; and padding sees numbers, since a row without a
key is NaN in some attention kernels.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.kernels.tree_attention import Window
from offload.model.attention import tree_mask
from offload.model.kv_cache import KVCache
from offload.model.weights import StreamedModel
from offload.streaming.device import Stream

Work = Callable[[], None]
Record = Callable[[Work], Work]  # runs the work at least once; what it returns does it again on the same tensors

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_EXTENT_STEP = 1024  # slots: attending to a few more than there are costs less than another recording
_PATIENCE = 32  # passes of another text in a row, until it gets the recordings: to make them takes as long as many


@dataclass(slots=True)
class _Recording:
    token_W: Tensor
    position_W: Tensor
    slot_W: Tensor
    masks: dict[Window, Tensor]  # (1, 1, W, extent) by attention window
    replay: Work | None = None


class Graphs:
    """Recordings of one model's passes over one cache at a time, each with a recorder of its own; for `replay_with`."""

    def __init__(self, model: StreamedModel, open_recorder: Callable[[], Record]) -> None:
        assert not model.experts, "what a pass asks for while it runs cannot be recorded"
        self._model, self._open_recorder = model, open_recorder
        self._cache: KVCache | None = None
        self._next: tuple[KVCache, int] | None = None  # which other one was asked for last, and how often in a row
        self._record: Record | None = None
        self._logits_WV: Tensor | None = None  # of the pass that was replayed last; as wide as the widest
        self._recordings: dict[tuple[int, int], _Recording] = {}

    def __call__(
        self, token_T: Tensor, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache, num_logits: int
    ) -> Tensor | None:
        """See `StreamedModel.forward`; declines more rows than the largest width, and texts that take turns."""
        if not self._turn_to(cache):
            return None
        num_rows, num_uncommitted = ancestor_TU.shape
        width = next((width for width in WIDTHS if width >= num_rows), None)
        if width is None:
            return None
        cache.place(num_uncommitted - num_rows, num_rows)
        extent = min(-(-(cache.length + num_uncommitted) // _EXTENT_STEP) * _EXTENT_STEP, cache.num_slots)
        recording = self._recordings.get((width, extent)) or self._blank(width, extent)
        self._fill(recording, token_T, position_U, ancestor_TU, cache)
        self._run(recording, cache, extent)
        self._recordings[width, extent] = recording
        assert self._logits_WV is not None, "a recording that has run has logits"
        return self._logits_WV[:num_rows][-num_logits:].clone()  # the next replay overwrites them

    def _turn_to(self, cache: KVCache) -> bool:
        """Whether this cache has the recordings; of texts side by side one that is alone for a while gets them."""
        if cache is self._cache:
            self._next = None
            return True
        cache.fix()
        num_asked = self._next[1] + 1 if self._next and self._next[0] is cache else 1
        if self._cache is not None and self._cache.is_beside(cache) and num_asked < _PATIENCE:
            self._next = cache, num_asked
            return False
        self._cache, self._next, self._recordings, self._record = cache, None, {}, self._open_recorder()
        return True

    def _run(self, recording: _Recording, cache: KVCache, extent: int) -> None:
        if recording.replay is not None:
            recording.replay()
            return

        def work() -> None:
            with cache.recorded(recording.slot_W, extent):
                logits_WV = self._model.run(recording.token_W, recording.position_W, recording.masks, cache)
            if self._logits_WV is None:  # in the first run, before anything is recorded
                self._logits_WV = logits_WV.new_empty(WIDTHS[-1], logits_WV.shape[1])
            self._logits_WV[: len(logits_WV)].copy_(logits_WV)

        assert self._record is not None, "a pass over a cache has opened a recorder for it"
        recording.replay = self._record(work)

    def _blank(self, width: int, extent: int) -> _Recording:
        place = self._model.place
        token_W, position_W, slot_W = (torch.zeros(width, dtype=torch.long, device=place) for _ in range(3))
        masks = {
            window: torch.empty(1, 1, width, extent, dtype=self._model.dtype, device=place)
            for window in self._model.windows
        }
        return _Recording(token_W, position_W, slot_W, masks)

    def _fill(
        self, recording: _Recording, token_T: Tensor, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache
    ) -> None:
        """Inputs of one pass; the rest of each tensor is what padding gets."""
        num_rows, num_uncommitted = ancestor_TU.shape
        lo = cache.length + num_uncommitted - num_rows
        row_T = torch.arange(lo, lo + num_rows)
        padding = cache.num_slots  # the slot behind all others
        for held_W, value_T, rest in (
            (recording.token_W, token_T, 0),
            (recording.position_W, position_U[-num_rows:], 0),
            (recording.slot_W, row_T, padding),
        ):
            held_W.fill_(rest)
            held_W[:num_rows].copy_(self._model.send(value_T))
        least = torch.finfo(self._model.dtype).min
        position_U, ancestor_TU = self._model.send(position_U), self._model.send(ancestor_TU)
        for window, mask in recording.masks.items():
            seen = tree_mask(cache.length, position_U, ancestor_TU, window, self._model.dtype)
            mask[:, :, :num_rows].fill_(least)
            mask[:, :, num_rows:].zero_()
            mask[:, :, :num_rows, : seen.shape[-1]] = seen


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory, for as long as the first of them lives.

    `side` is the stream of all: the matrix library keeps up to 32 MiB for each stream it has ever seen.
    """

    def __init__(self, side: Stream) -> None:
        self._side, self._pool = side, torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Warm up, since first runs allocate and choose kernels, then record and replay."""
        current = torch.cuda.current_stream(self._side.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            work()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side):
            self._capture(graph, work)
        graph.replay()
        return graph.replay

    def _capture(self, graph: Any, work: Work) -> None:
        """Without `torch.cuda.graph`, which waits for the whole device, hence for all layers on their way to it."""
        try:
            # Other threads copy layers meanwhile, and must be let.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # says again that it failed, and less of why
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            # Up to torch 2.11 a capture that ends broken stays open in the allocator, which then refuses to give
            # memory back (pytorch/pytorch#180395); where it is closed already, the allocator says so.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._side.device.index, self._pool)
            raise


def use_graphs(model: StreamedModel) -> str | None:
    """Let a resident CUDA model replay its small passes; tried at once, returns a line for the user where it cannot."""
    open_recorder = partial(CudaRecorder, torch.cuda.Stream(model.place))
    graphs = Graphs(model, open_recorder)
    one = torch.zeros(1, dtype=torch.long)
    cache = KVCache(model.num_layers, 1)
    cache.fix()
    try:
        with torch.inference_mode():
            graphs(one, one, torch.ones(1, 1, dtype=torch.bool), cache, 1)
    except Exception as error:  # whatever a family does in its pass that a recording does not take
        why = str(error).partition("\n")[0] or type(error).__name__
        return f"the draft runs without CUDA graphs, which is slower ({why[:120]})"
    model.replay_with(Graphs(model, open_recorder))
    return None
