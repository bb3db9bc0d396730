"""Small passes of a resident model, recorded once and replayed.

A draft step is hundreds of kernels of a few microseconds each, and no host launches them as fast as
a device runs them. A recording has fixed shapes: rows are padded to one of a few widths. What
changes (ids, positions, slots, walks of the rows) lies in one tensor that is filled before a
replay.

Invariant: no row sees padding, whose keys go to a slot of their own. Padding does see keys, since a
row without any would be NaN.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.kernels.path_attention import BLOCK, HEADER, PathRows
from offload.kernels.registry import KernelSet
from offload.model.kv_cache import KVCache
from offload.model.norms import set_norm_kernel
from offload.model.parts import BatchPart, PassCache, causal
from offload.model.path_attention import path_rows
from offload.model.tree_model import TreeModel

Work = Callable[[], None]
# runs the work at least once, and returns a function that repeats it on the same tensors
Recorder = Callable[[Work], Work]

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# Consecutive passes after which another text gets the recordings: making them takes as long.
_PATIENCE = 32
# Each row has a token, a position, the slot that it is written to, and its walk.
_INPUTS = 3
_WITHOUT = "the draft runs without CUDA graphs, which is slower"
# A walk lists what lies after the shared prefix, a few hundred nodes deep.
_MOST_COLUMNS = 4 * BLOCK
# otherwise work that another thread enqueues meanwhile would be recorded
_recording = threading.Lock()


class _Recording(NamedTuple):
    input_WI: Tensor  # int32
    replay: Work


class Graphs:
    """Recordings of one model's passes over one cache at a time, for `set_graph_runner`."""

    def __init__(self, model: TreeModel, open_recorder: Callable[[], Recorder]) -> None:
        assert not model.experts, "what a pass asks for while it runs cannot be recorded"
        assert model.attend is not None, "the shapes of masks change with the prefix"
        self._model = model
        self._open_recorder = open_recorder
        self._attend = model.attend
        self._cache: KVCache | None = None
        # the other cache last asked for, and how often in a row
        self._next: tuple[KVCache, int] | None = None
        self._record: Recorder | None = None
        # logits of the last replay; as wide as the widest pass
        self._logits_WV: Tensor | None = None
        self._recordings: dict[int, _Recording] = {}  # by width

    def __call__(self, part: BatchPart, num_logits: int) -> Tensor | None:
        """See `TreeModel.forward`; returns None for texts that take turns, and wide or deep passes."""
        ancestor_TU = part.ancestor_TU
        cache = part.cache
        if not self._turn_to(cache):
            return None
        num_rows = len(ancestor_TU)
        width = next((width for width in WIDTHS if width >= num_rows), None)
        if width is None:
            return None
        rows = path_rows(cache.length, ancestor_TU, self._attend)
        if rows.walk_TL.shape[1] > HEADER + _MOST_COLUMNS:
            return None
        lo = cache.reserve(ancestor_TU.shape[1] - num_rows, num_rows)
        input_WI = torch.zeros(width, _INPUTS + HEADER + _MOST_COLUMNS, dtype=torch.int32)
        # padding goes to the slot after all others, and sees what the last row sees
        input_WI[:, 2] = cache.num_slots
        own_T3 = torch.stack(
            [part.token_T, part.position_U[-num_rows:], torch.arange(lo, lo + num_rows)], 1
        )
        input_WI[:num_rows, :_INPUTS] = own_T3
        walk_WL = rows.walk_TL[torch.arange(width).clamp(max=num_rows - 1)]
        input_WI[:, _INPUTS : _INPUTS + walk_WL.shape[1]] = walk_WL
        self._run(width, self._model.send(input_WI), cache)
        assert self._logits_WV is not None, "a recording that has run has logits"
        return self._logits_WV[:num_rows][-num_logits:].clone()  # the next replay overwrites them

    def _turn_to(self, cache: KVCache) -> bool:
        """Return True if this cache has the recordings; a cache used alone for a while gets them."""
        if cache is self._cache:
            self._next = None
            return True
        cache.fix()
        num_asked = self._next[1] + 1 if self._next and self._next[0] is cache else 1
        if self._cache is not None and self._cache.is_beside(cache) and num_asked < _PATIENCE:
            self._next = cache, num_asked
            return False
        self._cache = cache
        self._next = None
        self._recordings = {}
        self._record = self._open_recorder()
        return True

    def _run(self, width: int, input_WI: Tensor, cache: KVCache) -> None:
        """Replay the pass of this width, or run and record it for the first time."""
        if width in self._recordings:
            recording = self._recordings[width]
            recording.input_WI.copy_(input_WI)
            recording.replay()
            return
        held_WI = input_WI.clone()

        def work() -> None:
            token_W, position_W, slot_W = held_WI[:, :_INPUTS].T.contiguous().long()
            rows = PathRows(held_WI[:, _INPUTS:], None, self._attend)
            masks = {window: replace(rows, window=window) for window in self._model.windows}
            pass_cache = PassCache(
                [BatchPart(token_W, position_W, causal(width), cache, first=cache.length)], slot_W
            )
            logits_WV = self._model.run(token_W, position_W, masks, pass_cache)
            if self._logits_WV is None:  # in the first run, before anything is recorded
                self._logits_WV = logits_WV.new_empty(WIDTHS[-1], logits_WV.shape[1])
            self._logits_WV[: len(logits_WV)].copy_(logits_WV)

        assert self._record is not None, "a pass over a cache has opened a recorder for it"
        self._recordings[width] = _Recording(held_WI, self._record(work))


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory, for as long as the first of them lives.

    `side` is the stream on which they are recorded.
    """

    def __init__(self, side: torch.cuda.Stream) -> None:
        self._side = side
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Warm up, since first runs allocate and choose kernels, then record and replay."""
        current = torch.cuda.current_stream(self._side.device)
        graph = torch.cuda.CUDAGraph()
        with _recording:
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                work()
            current.wait_stream(self._side)
            with torch.cuda.stream(self._side):
                self._capture(graph, work)
        graph.replay()
        return graph.replay

    def _capture(self, graph: Any, work: Work) -> None:
        """Capture without `torch.cuda.graph`, which would wait for all layers on their way."""
        try:
            # Other threads copy layers meanwhile, and must be let.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # this repeats the failure with less of its reason
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            # Up to torch 2.11 a capture that ends broken stays open in the allocator, which then
            # refuses to give memory back (pytorch/pytorch#180395); where it is closed already, the
            # allocator says so.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._side.device.index, self._pool)
            raise


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all models of a device are recorded.

    The matrix library keeps up to 32 MiB for each stream that it has ever seen: with one for each
    model that is loaded, memory would be lost with each.
    """
    return torch.cuda.Stream(device)


def use_graphs(model: TreeModel) -> str | None:
    """Let a resident CUDA model replay small passes; return a line with the reason if it cannot."""
    if model.has_states:
        return f"{_WITHOUT} (it has recurrent layers)"
    if model.has_index:
        return f"{_WITHOUT} (its layers choose by an index)"
    if model.attend is None:
        return f"{_WITHOUT} (its attention takes masks)"
    open_recorder = partial(CudaRecorder, side_stream(model.torch_device))
    graphs = Graphs(model, open_recorder)
    zero_1 = torch.zeros(1, dtype=torch.long)
    cache = KVCache(model.num_layers, 1)
    cache.fix()
    try:
        with torch.inference_mode():
            graphs(BatchPart(zero_1, zero_1, causal(1), cache), 1)
    except Exception as error:  # anything in a family's pass that cannot be recorded
        why = str(error).partition("\n")[0] or type(error).__name__
        return f"{_WITHOUT} ({why[:120]})"
    model.set_graph_runner(Graphs(model, open_recorder))
    return None


def use_kernels(
    target: TreeModel, draft: TreeModel | None, kernels: KernelSet, device: torch.device
) -> str | None:
    """Make both models compute with these kernels, and record the draft's small passes.

    Matrices at 4 bits use theirs only if they lie on the kernels' device. Return a line with the
    reason if a draft there cannot be recorded.
    """
    for model in filter(None, (target, draft)):
        model.set_attention_kernel(kernels.path_attention)
        set_norm_kernel(model.meta_model, kernels.rms_norm)
        if model.held is not None and model.torch_device.type == device.type:
            model.held.set_kernel(kernels.multiply_int4)
    if draft is None or draft.torch_device.type != "cuda":
        return None
    return use_graphs(draft)
