"""How bytes go to this device: each policy is tried on it, and one that lets small uploads past layers is taken.

Invariant: what was not tried, or does not bring the same bytes, or slows layers down, is not used.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.streaming.copy_policy import AT_ONCE, CopyPolicy
from offload.streaming.device import CudaDevice
from offload.streaming.pinned import PinnedAllocator

STAGING_BYTES = 32 << 20  # twice the embeddings of the largest trees
_COPY_BYTES, _NUM_QUEUED = 128 << 20, 3  # as a sweep leaves it: every slot has a layer on its way
_UPLOAD_BYTES = 40_000
_NUM_ROUNDS = 4  # of which the first is not like the others
_LEAST_RATE, _LEAST_GAIN = 0.98, 2.0
CANDIDATES = (
    AT_ONCE,
    CopyPolicy(chunk_bytes=32 << 20),
    CopyPolicy(chunk_bytes=16 << 20),
    CopyPolicy(stages_uploads=True),
)


class Observed(NamedTuple):
    """One policy on one device."""

    upload_s: float  # until a small tensor is there that was asked for behind several layers
    copy_bytes_per_s: float  # of these layers


def choose_copies(card: CudaDevice, arena: PinnedAllocator) -> CopyPolicy:
    """Try all candidates and let `GPU` go by the best.

    Args:
        pinned allocator: stays open as long as the device is used: uploads may pass through memory of it.
    """
    staging, layer = arena.allocate(STAGING_BYTES), arena.allocate(_COPY_BYTES)
    found: dict[CopyPolicy, Observed] = {}
    if layer.is_pinned:  # otherwise copies are the host's own work, and nothing is queued
        slot = card.allocate(_COPY_BYTES)
        for policy in CANDIDATES:
            if staging.is_pinned or not policy.stages_uploads:
                with using(card, policy, staging.array):
                    found |= {policy: observe(card, layer.array, slot)} if is_right(card) else {}
    arena.release(layer)
    chosen = best_of(found)
    if chosen.stages_uploads:
        card.stage_uploads(staging.array)
    else:
        arena.release(staging)
    card.policy = chosen
    return chosen


def best_of(found: Mapping[CopyPolicy, Observed]) -> CopyPolicy:
    """The default, unless another is clearly sooner with small tensors and as fast with large ones."""
    if AT_ONCE not in found:
        return AT_ONCE
    usual = found[AT_ONCE]
    as_fast = [one for one in found if found[one].copy_bytes_per_s >= _LEAST_RATE * usual.copy_bytes_per_s]
    best = min(as_fast, key=lambda one: found[one].upload_s)
    return best if _LEAST_GAIN * found[best].upload_s <= usual.upload_s else AT_ONCE


@contextmanager
def using(card: CudaDevice, policy: CopyPolicy, staging: np.ndarray) -> Iterator[None]:
    """Meanwhile `GPU` goes by `policy`, and nothing is on its way when it ends."""
    card.policy = policy
    try:
        card.stage_uploads(staging if policy.stages_uploads else None)
        yield
        for stream in (card.copies, card.compute):
            card.synchronize(card.record(stream))
    finally:
        card.policy = AT_ONCE
        card.stage_uploads(None)


def is_right(card: CudaDevice) -> bool:
    """Whether uploads of any type and size bring what was sent, one behind the other."""
    sources = [torch.arange(size, dtype=dtype) % 2 for size in (1, 77, 9001) for dtype in (torch.int64, torch.float32)]
    sources += [torch.arange(1001) % 3 == 0, torch.tensor(5)]
    sent = [card.upload(source) for source in sources]
    return all(torch.equal(there.cpu(), source) for there, source in zip(sent, sources, strict=True))


def observe(
    card: CudaDevice,
    layer: np.ndarray,
    slot: Tensor,
    *,
    num_bytes: int = _UPLOAD_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Queue some layers, ask for a small tensor, and wait for it; medians over rounds."""
    source, upload_s, rates = torch.zeros(num_bytes, dtype=torch.uint8), list[float](), list[float]()
    weights = torch.from_numpy(layer)
    card.wait(card.copies, card.record(card.compute))  # memory of the slot may still be in use there
    for _ in range(_NUM_ROUNDS):
        before = card.record(card.copies, is_timed=True)
        for _ in range(_NUM_QUEUED):
            card.copy(slot, weights, card.copies)
        after, started = card.record(card.copies, is_timed=True), clock()
        card.upload(source)
        card.synchronize(card.record(card.compute))
        upload_s.append(clock() - started)
        card.synchronize(after)
        rates.append(_NUM_QUEUED * layer.nbytes / max(card.elapsed_s(before, after) or 0.0, 1e-9))
    return Observed(median(upload_s[1:]), median(rates[1:]))
