"""The parent's side of one compared program: find an interpreter, run it under the cap, prove it.

Invariant: an `Outcome` without a reason holds tokens that were all found to be the original model's
own.
"""

import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.bench.harness.process import call, environment, new_cap
from offload.bench.peers.child import Measured, Order
from offload.checkpoint.files import replacing
from offload.errors import RunError
from offload.sampling_options import Sampling

_HAS_ALL = "import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, sys.argv[1:])))"
# imports, reading, the copy that some programs make of the weights at their first start
_START_S = 300.0


class Outcome(NamedTuple):
    reason: str = ""  # why there are no figures; empty when there are
    runs: Sequence[Measured] = ()
    num_near: int = 0  # tokens that differ from the float32 choice by less than bf16 rounding
    num_threads: int = 0  # 0: not told
    trial_tokens_per_s: dict[str, float] | None = None  # by number of threads
    is_capped: bool = False
    # peak of the group, page cache included
    peak_bytes: int | None = None
    # peak of the process
    rss_bytes: int = 0
    load_s: float = 0.0

    def joined(self, later: "Outcome") -> "Outcome":
        if self.reason or later.reason:
            return Outcome(reason=self.reason or later.reason)
        peaks = [one.peak_bytes for one in (self, later) if one.peak_bytes is not None]
        return later._replace(
            runs=[*self.runs, *later.runs],
            num_near=self.num_near + later.num_near,
            is_capped=self.is_capped and later.is_capped,
            peak_bytes=max(peaks, default=None),
            rss_bytes=max(self.rss_bytes, later.rss_bytes),
        )


def interpreter_with(modules: Sequence[str], pythons: Sequence[str]) -> str | None:
    """Return the first interpreter that can import all modules; None when none can."""
    for python in pythons:
        if subprocess.run([python, "-c", _HAS_ALL, *modules], capture_output=True).returncode == 0:
            return python
    return None


def run_child(python: str, order: Order) -> Outcome:
    """Run an order in a process and a memory group of its own; the tokens are not proved yet."""
    cap = new_cap(order.cap_bytes)
    limit_s = _START_S + order.limit_s * (len(order.threads) + len(order.prompts))
    try:
        order = order._replace(group=str(cap.processes) if cap else None)
        try:
            outcome = with_runs(
                call("offload.bench.peers.child", order, python=python, limit_s=limit_s)
            )
        except RunError as error:
            outcome = Outcome(reason=str(error))
        peak_bytes = cap.peak_bytes() if cap else None
        return outcome._replace(is_capped=cap is not None, peak_bytes=peak_bytes)
    finally:
        if cap:
            cap.remove()


def with_runs(figures: dict[str, Any]) -> Outcome:
    told: Sequence[tuple[int, list[tuple[float, list[int]]]]] = figures.pop("runs")
    runs = [Measured(prompt, [(at_s, ids) for at_s, ids in bursts]) for prompt, bursts in told]
    if not all(run.bursts and run.num_decoded for run in runs):
        return Outcome(reason="failed: no token after the first within the time limit")
    return Outcome(runs=runs, **figures)


def proved(
    outcome: Outcome, model: Path, prompts: Sequence[Sequence[int]], noise: float | None = None
) -> Outcome:
    """Return the outcome if every token is what `model` chooses in float32, else its refusal.

    Scores may differ by `noise`: by default what rounding to bf16 makes of them.
    """
    from offload.reports.proof import BF16_NOISE, draw_gaps

    if outcome.reason:
        return outcome
    gaps = list[float]()
    for run in outcome.runs:
        gaps += draw_gaps(model, prompts[run.prompt], run.token_ids, Sampling())
    if max(gaps) > (noise or BF16_NOISE):
        told = f"a token misses the original model's choice by {max(gaps):.3f}"
        return Outcome(reason=f"refused: {told}")
    return outcome._replace(num_near=sum(gap > 0 for gap in gaps))


def gguf_file(source: Path, folder: Path, python: str, kind: str = "BF16") -> Path:
    """Return the GGUF of a checkpoint, its blocks of `kind`, written once.

    The interpreter that writes it has the `gguf` package.

    Raises:
        subprocess.CalledProcessError: the writer failed.
    """
    stats = [(path.name, path.stat()) for path in source.glob("*.safetensors")]
    shards = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    own = "" if kind == "BF16" else f"-{kind}"
    path = folder / f"{source.name}{own}-{zlib.crc32(repr(shards).encode()):08x}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            writer = [python, "-m", "offload.bench.peers.gguf_writer", str(source), str(part), kind]
            subprocess.run(writer, check=True, capture_output=True, text=True, env=environment())
    return path
