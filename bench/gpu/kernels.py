"""Every kernel against what runs without it, on this GPU: whether both agree, then which is faster.

The comparisons are those that a run makes at its start, for shapes of Llama-2-70B and vocabularies
of 32,000 and 128,256. What expands weights stands beside a copy of what it writes, too.
"""

import torch
import typer

from offload.bench.gpu.duels import Duel, device_timer, time_duel, verdicts
from offload.bench.gpu.expansions import Expanded, expand_all
from offload.bench.harness.command import Bench, command, say_table
from offload.calibration.kernels import Shapes, comparisons
from offload.errors import UserError
from offload.kernels.jit import HAS_TRITON
from offload.streaming.device import CudaDevice


def cells(one: Duel) -> list[str]:
    times = [
        f"{seconds * 1000:.4f}" for seconds in (one.kernel_s, one.rival_s) if seconds is not None
    ]
    kernel, shape, reason = one.outcome
    return [kernel, shape, *(times or [reason, ""]), f"{one.ratio:.2f}" if times else ""]


def expanded_cells(one: Expanded) -> list[str]:
    return [*cells(one.duel), f"{one.bytes_per_s / 1e9:.0f}", f"{one.of_copy:.2f}"]


@command("kernels")
def main(bench: Bench) -> None:
    """Every kernel against what runs without it; the exit status is 1 where one of them is wrong."""
    if not torch.cuda.is_available():
        raise UserError(
            "bench kernels needs a CUDA device, this machine shows none: run it where there is one"
        )
    if not HAS_TRITON:
        raise UserError("bench kernels needs Triton, which is not installed: pip install triton")
    device = CudaDevice(torch.cuda.current_device())
    timer = device_timer(device)
    duels = [time_duel(one, timer, device) for one in comparisons(Shapes(), str(device.place))]
    say_table(
        ["kernel", "shape", "kernel, ms", "without, ms", "without / kernel"], map(cells, duels)
    )
    expanded = list(expand_all(device, timer))
    head = [
        "kernel",
        "words",
        "kernel, ms",
        "torch, ms",
        "torch / kernel",
        "GB/s written",
        "copy / kernel",
    ]
    say_table(head, map(expanded_cells, expanded))
    duels += [one.duel for one in expanded]
    found = {kernel: verdict._asdict() for kernel, verdict in verdicts(duels).items()}
    rows = [bench.row(duel.as_row()) for duel in duels]
    rates = [
        {
            "kernel": one.duel.outcome.kernel,
            "shape": one.duel.outcome.shape,
            "bytes_per_s": one.bytes_per_s,
        }
        for one in expanded
    ]
    bench.end(
        {"bench": "kernels", "device": device.name, "verdicts": found, "rows": rows, "rates": rates}
    )
    if any(one.outcome.reason for one in duels):
        raise typer.Exit(1)
