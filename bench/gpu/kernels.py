"""Every kernel against what runs without it, on this GPU: first whether both agree, then which one is faster.

The same selection that a run makes at its start, for shapes of Llama-2-70B and vocabularies of 32,000 and 128,256. What
expands weights stands beside a copy of what it writes, too.
"""

import torch
import typer

from offload.bench.gpu.expansions import Expanded, expand_all
from offload.bench.harness.command import Bench, command, say_table
from offload.calibration.kernel_comparison import Outcome, rows_of, verdicts
from offload.calibration.kernel_selection import Shapes, choose_kernels, device_timer
from offload.errors import UserError
from offload.kernels.jit import HAS_TRITON
from offload.streaming.device import CudaDevice


def cells(one: Outcome) -> list[str]:
    times = [f"{seconds * 1000:.4f}" for seconds in (one.kernel_s, one.rival_s) if seconds is not None]
    return [one.kernel, one.shape, *(times or [one.reason, ""]), f"{one.ratio:.2f}" if times else ""]


def expanded_cells(one: Expanded) -> list[str]:
    return [*cells(one.outcome), f"{one.bytes_per_s / 1e9:.0f}", f"{one.of_copy:.2f}"]


@command("kernels")
def main(bench: Bench) -> None:
    """Every kernel against what runs without it; the exit status is 1 where one of them is wrong."""
    if not torch.cuda.is_available():
        raise UserError("bench kernels needs a CUDA device, this machine shows none: run it where there is one")
    if not HAS_TRITON:
        raise UserError("bench kernels needs Triton, which is not installed: pip install triton")
    device = CudaDevice(torch.cuda.current_device())
    _, outcomes = choose_kernels(Shapes(), device)
    say_table(["kernel", "shape", "kernel, ms", "without, ms", "without / kernel"], map(cells, outcomes))
    expanded = list(expand_all(device, device_timer(device)))
    head = ["kernel", "words", "kernel, ms", "torch, ms", "torch / kernel", "GB/s written", "copy / kernel"]
    say_table(head, map(expanded_cells, expanded))
    outcomes = (*outcomes, *(one.outcome for one in expanded))
    found = {kernel: verdict._asdict() for kernel, verdict in verdicts(outcomes).items()}
    rows = [bench.row(row) for row in rows_of(outcomes)]
    rates = [
        {"kernel": one.outcome.kernel, "shape": one.outcome.shape, "bytes_per_s": one.bytes_per_s} for one in expanded
    ]
    bench.end({"bench": "kernels", "device": device.name, "verdicts": found, "rows": rows, "rates": rates})
    if any(one.reason for one in outcomes):
        raise typer.Exit(1)
