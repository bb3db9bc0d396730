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


def choose_copies(device: CudaDevice, allocator: PinnedAllocator) -> CopyPolicy:
    """Try all candidates and let `device` go by the best; uploads may pass through memory of `allocator` ever after."""
    staging, layer = allocator.allocate(STAGING_BYTES), allocator.allocate(_COPY_BYTES)
    found: dict[CopyPolicy, Observed] = {}
    if layer.is_pinned:  # otherwise copies are the host's own work, and nothing is queued
        slot = device.allocate(_COPY_BYTES)
        for policy in CANDIDATES:
            if staging.is_pinned or not policy.stages_uploads:
                with using(device, policy, staging.array):
                    found |= {policy: observe(device, layer.array, slot)} if is_right(device) else {}
    allocator.release(layer)
    chosen = best_of(found)
    if chosen.stages_uploads:
        device.stage_uploads(staging.array)
    else:
        allocator.release(staging)
    device.policy = chosen
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
def using(device: CudaDevice, policy: CopyPolicy, staging: np.ndarray) -> Iterator[None]:
    """Meanwhile `device` goes by `policy`, and nothing is on its way when it ends."""
    device.policy = policy
    try:
        device.stage_uploads(staging if policy.stages_uploads else None)
        yield
        for stream in (device.copies, device.compute):
            device.synchronize(device.record(stream))
    finally:
        device.policy = AT_ONCE
        device.stage_uploads(None)


def is_right(device: CudaDevice) -> bool:
    """Whether uploads of any type and size bring what was sent, one behind the other."""
    sources = [torch.arange(size, dtype=dtype) % 2 for size in (1, 77, 9001) for dtype in (torch.int64, torch.float32)]
    sources += [torch.arange(1001) % 3 == 0, torch.tensor(5)]
    sent = [device.upload(source) for source in sources]
    return all(torch.equal(there.cpu(), source) for there, source in zip(sent, sources, strict=True))


def observe(
    device: CudaDevice,
    layer: np.ndarray,
    slot: Tensor,
    *,
    num_bytes: int = _UPLOAD_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Queue some layers, ask for a small tensor, and wait for it; medians over rounds."""
    source, upload_s, rates = torch.zeros(num_bytes, dtype=torch.uint8), list[float](), list[float]()
    weights = torch.from_numpy(layer)
    device.wait(device.copies, device.record(device.compute))  # memory of the slot may still be in use there
    for _ in range(_NUM_ROUNDS):
        before = device.record(device.copies, is_timed=True)
        for _ in range(_NUM_QUEUED):
            device.copy(slot, weights, device.copies)
        after, started = device.record(device.copies, is_timed=True), clock()
        device.upload(source)
        device.synchronize(device.record(device.compute))
        upload_s.append(clock() - started)
        device.synchronize(after)
        rates.append(_NUM_QUEUED * layer.nbytes / max(device.elapsed_s(before, after) or 0.0, 1e-9))
    return Observed(median(upload_s[1:]), median(rates[1:]))
