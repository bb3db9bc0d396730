"""Each kind of words expanded on a GPU: Triton's kernel, plain torch, and a copy in memory.

A copy reads as much as it writes, an expansion less: none should take longer than the copy of what
it writes.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from offload.bench.gpu.duels import Duel, Timer, time_duel
from offload.bench.harness.expansions import Sample, samples
from offload.calibration.trial import KernelComparison
from offload.kernels.expansion import EXPANSION_KERNELS, REFERENCE, Expansion
from offload.streaming.device import Device

SIZE = (4096, 14336)  # the largest matrix of a layer of an 8B model
_BITS = {2: torch.int16, 4: torch.int32}


class Expanded(NamedTuple):
    """One kind of words."""

    duel: Duel
    bytes_per_s: float  # written by the kernel; 0 where it is wrong
    of_copy: float  # seconds of a copy of as many bytes / of the kernel


def expand_all(
    device: Device, timer: Timer, size: tuple[int, int] = SIZE, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Expanded]:
    """Time the kernels of all kinds, bits first."""
    source, out = (torch.zeros(size, dtype=dtype, device=device.place) for _ in range(2))
    copy_s = timer(partial(out.copy_, source))

    for sample in samples(*size, device.place):
        got, wanted = (one.view(sample.out_shape) for one in (out, source))
        run, run_reference = (
            partial(sample.expand, how, into)
            for how, into in ((EXPANSION_KERNELS, got), (REFERENCE, wanted))
        )
        agrees = partial(_agree, sample, got, wanted, EXPANSION_KERNELS)
        duel = time_duel(
            KernelComparison(f"expand {sample.kind}", sample.name, run, run_reference, agrees),
            timer,
            device,
        )
        kernel_s = duel.kernel_s
        yield Expanded(
            duel, out.nbytes / kernel_s if kernel_s else 0.0, copy_s / kernel_s if kernel_s else 0.0
        )


def _agree(sample: Sample, got: torch.Tensor, wanted: torch.Tensor, kernels: Expansion) -> bool:
    sample.expand(kernels, got)
    sample.expand(REFERENCE, wanted)
    bits = _BITS[got.element_size()]
    return torch.equal(got.view(bits), wanted.view(bits))
