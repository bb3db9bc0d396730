"""Every kernel against what runs without it, on this GPU: first whether both agree, then which one is faster.

The same selection that a run makes at its start, for shapes of Llama-2-70B and vocabularies of 32,000 and 128,256.
"""

import torch
import typer

from offload.bench.harness.command import Bench, command, say_table
from offload.calibration.kernel_comparison import Outcome, rows_of, verdicts
from offload.calibration.kernel_selection import Shapes, choose_kernels
from offload.errors import UserError
from offload.kernels.jit import HAS_TRITON
from offload.streaming.device import CudaDevice


def cells(one: Outcome) -> list[str]:
    times = [f"{seconds * 1000:.4f}" for seconds in (one.kernel_s, one.rival_s) if seconds is not None]
    return [one.kernel, one.shape, *(times or [one.reason, ""]), f"{one.ratio:.2f}" if times else ""]


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
    found = {kernel: verdict._asdict() for kernel, verdict in verdicts(outcomes).items()}
    rows = [bench.row(row) for row in rows_of(outcomes)]
    bench.end({"bench": "kernels", "device": device.name, "verdicts": found, "rows": rows})
    if any(one.reason for one in outcomes):
        raise typer.Exit(1)
