"""Every kernel against what runs without it, on this GPU: whether both agree, then which is faster.

The comparisons are those that a run makes at its start, for shapes of Llama-2-70B and vocabularies
of 32,000 and 128,256. What expands weights stands beside a copy of what it writes, too, which reads
more, so none should take longer. Invariant: no time is told for what is wrong.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import geometric_mean, median
from typing import Any

import torch
import typer

from offload.bench.gpu.samples import samples
from offload.bench.harness.command import Bench, command
from offload.bench.harness.tables import Column, Row, say_table
from offload.calibration.kernel_shapes import Shapes
from offload.calibration.kernels import comparisons
from offload.calibration.trial import KernelComparison, compare
from offload.errors import UserError
from offload.kernels.expansion import EXPANSION_KERNELS, REFERENCE
from offload.kernels.jit import HAS_TRITON
from offload.streaming.cuda import CudaDevice
from offload.streaming.device import HOST, Device

Timer = Callable[[Callable[[], Any]], float]  # seconds that a piece of work takes
SIZE = (4096, 14336)  # of what is expanded: the largest matrix of a layer of an 8B model
DTYPE = torch.bfloat16
# written before each run: in a sweep a layer's weights have gone through the cache
_CACHE_BYTES = 64 << 20
_NUM_ROUNDS = 7


def time_kernel(comparison: KernelComparison, timer: Timer, device: Device = HOST) -> Row:
    """Time both sides in turn, if they agree; `ratio` is 0 where they do not."""
    outcome = compare(comparison, device)
    row: Row = {**outcome._asdict(), "kernel_s": None, "rival_s": None, "ratio": 0.0}
    if not outcome.reason:
        row["kernel_s"] = timer(comparison.challenger)
        row["rival_s"] = timer(comparison.rival)
        row["ratio"] = row["rival_s"] / row["kernel_s"]
    return row


def verdicts(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the geometric mean and the worst ratio of each kernel; 0 where one went wrong."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["kernel"], []).append(row["ratio"])
    return {
        kernel: {
            "mean_ratio": geometric_mean(kernel_ratios) if min(kernel_ratios) else 0.0,
            "worst_ratio": min(kernel_ratios),
        }
        for kernel, kernel_ratios in ratios.items()
    }


def device_timer(device: Device) -> Timer:
    """Return medians of runs with a cold cache, by the compute stream's events."""
    scratch = device.allocate(_CACHE_BYTES)

    def once(work: Callable[[], Any]) -> float:
        device.fill(scratch, 0, device.compute)
        before = device.mark(device.compute, is_timed=True)
        work()
        after = device.mark(device.compute, is_timed=True)
        device.synchronize(after)
        seconds = device.elapsed_s(before, after)
        assert seconds is not None, "the host has waited for it"
        return seconds

    def seconds_of(work: Callable[[], Any]) -> float:
        work()  # the first run of any code is not like the others
        return median(once(work) for _ in range(_NUM_ROUNDS))

    return seconds_of


def expand_all(device: Device, timer: Timer) -> Iterator[Row]:
    """Time the kernels of all kinds of words, bits first.

    `bytes_per_s` is what the kernel writes, 0 where it is wrong; `of_copy` is how long a copy of as
    much takes, in units of the kernel's time.
    """
    place = device.torch_device
    source, out = (torch.zeros(SIZE, dtype=DTYPE, device=place) for _ in range(2))
    copy_s = timer(partial(out.copy_, source))
    for sample in samples(*SIZE, place):
        got, wanted = (numbers.view(sample.out_shape) for numbers in (out, source))
        comparison = KernelComparison(
            f"expand {sample.kind}",
            sample.name,
            partial(sample.expand, EXPANSION_KERNELS, got),
            partial(sample.expand, REFERENCE, wanted),
            partial(sample.agrees, EXPANSION_KERNELS, got, wanted),
        )
        row = time_kernel(comparison, timer, device)
        runs_per_s = 1 / row["kernel_s"] if row["kernel_s"] else 0.0
        yield row | {"bytes_per_s": out.nbytes * runs_per_s, "of_copy": copy_s * runs_per_s}


COLUMNS = (
    Column("kernel", lambda row: f"{row['kernel']} {row['shape']}"),
    Column("kernel, ms", "kernel_s", ".4f", 1e-3),
    Column("without, ms", "rival_s", ".4f", 1e-3),
    Column("without / kernel", "ratio", ".2f"),
)
EXPANDED_COLUMNS = (
    *COLUMNS,
    Column("GB/s written", "bytes_per_s", ".0f", 1e9),
    Column("copy / kernel", "of_copy", ".2f"),
)


@command("kernels")
def main(bench: Bench) -> None:
    """Every kernel against what runs without it; the exit status is 1 where one of them is wrong."""
    if not torch.cuda.is_available():
        requirement = "bench kernels needs a CUDA device, this machine shows none"
        raise UserError(f"{requirement}: run it where there is one")
    if not HAS_TRITON:
        raise UserError("bench kernels needs Triton, which is not installed: pip install triton")
    device = CudaDevice(torch.cuda.current_device())
    timer = device_timer(device)
    rows = [
        time_kernel(comparison, timer, device)
        for comparison in comparisons(Shapes(), str(device.torch_device))
    ]
    say_table(COLUMNS, rows)
    expanded = list(expand_all(device, timer))
    say_table(EXPANDED_COLUMNS, expanded)
    names = ("kernel", "shape", "bytes_per_s")
    rates = [{name: row[name] for name in names} for row in expanded]
    for row in expanded:
        del row["bytes_per_s"], row["of_copy"]
    rows = [bench.row(row) for row in (*rows, *expanded)]
    head = {"bench": "kernels", "device": device.name, "verdicts": verdicts(rows)}
    bench.end({**head, "rows": rows, "rates": rates})
    if any(row["reason"] for row in rows):
        raise typer.Exit(1)
