"""The parent's side of one compared program: find an interpreter, run it under the cap, prove it.

Invariant: an `Outcome` without a reason holds tokens that were all found to be the original model's
own.
"""

import json
import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import offload
from offload.bench.harness.memory_cap import new_cap
from offload.bench.harness.record import partial_path
from offload.bench.peers.child import Measured, Order
from offload.units import Sampling

_HAS_ALL = "import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, sys.argv[1:])))"
# imports, reading, the copy that some programs make of the weights at their first start
_START_S = 300.0


class Outcome(NamedTuple):
    """What became of one program."""

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
        """Return both measurements of the same program as one."""
        if self.reason or later.reason:
            return Outcome(reason=self.reason or later.reason)
        peaks = [one.peak_bytes for one in (self, later) if one.peak_bytes is not None]
        near = self.num_near
        runs = [*self.runs, *later.runs]
        is_capped = self.is_capped and later.is_capped
        same = later._replace(runs=runs, num_near=near + later.num_near, is_capped=is_capped)
        return same._replace(
            peak_bytes=max(peaks, default=None), rss_bytes=max(self.rss_bytes, later.rss_bytes)
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
    try:
        order = order._replace(group=str(cap.processes) if cap else None)
        figures = _run_json(python, order)
        outcome = Outcome(reason=figures) if isinstance(figures, str) else _outcome(figures)
        return outcome._replace(
            is_capped=cap is not None, peak_bytes=cap.peak_bytes() if cap else None
        )
    finally:
        if cap:
            cap.remove()


def proved(
    outcome: Outcome, model: Path, prompts: Sequence[Sequence[int]], noise: float | None = None
) -> Outcome:
    """Return the outcome if every token is what `model` chooses in float32, else its refusal.

    Scores may differ by `noise`: by default what rounding to bf16 makes of them.
    """
    from offload.reports.proof import BF16_NOISE, draw_gaps

    if outcome.reason:
        return outcome
    gaps = [
        gap
        for run in outcome.runs
        for gap in draw_gaps(model, prompts[run.prompt], run.token_ids, Sampling())
    ]
    if max(gaps) > (noise or BF16_NOISE):
        return Outcome(
            reason=f"refused: a token misses the original model's choice by {max(gaps):.3f}"
        )
    return outcome._replace(num_near=sum(gap > 0 for gap in gaps))


def gguf_file(source: Path, folder: Path, python: str, kind: str = "BF16") -> Path:
    """Return the GGUF of a checkpoint, its blocks of `kind`, written once.

    The interpreter that writes it has the `gguf` package.

    Raises:
        subprocess.CalledProcessError: the writer failed.
    """
    shards = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in source.glob("*.safetensors")
    ]
    own = "" if kind == "BF16" else f"-{kind}"
    path = folder / f"{source.name}{own}-{zlib.crc32(repr(sorted(shards)).encode()):08x}.gguf"
    if not path.is_file():
        command = [python, "-m", "offload.bench.peers.gguf_writer", str(source), str(path), kind]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
        finally:
            partial_path(path).unlink(missing_ok=True)  # a writer that was killed cleans nothing
    return path


def _run_json(python: str, order: Order) -> dict[str, Any] | str:
    """Return the child's last line, or why there is none."""
    command = [python, "-m", "offload.bench.peers.child", json.dumps(order)]
    limit_s = _START_S + order.limit_s * (len(order.threads) + len(order.prompts))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=environment()
        )
    except subprocess.TimeoutExpired:
        return f"failed: took longer than {limit_s:.0f} s"
    if done.returncode < 0:
        return f"failed: killed by signal {-done.returncode}" + (
            ", out of memory" if done.returncode == -9 else ""
        )
    figures: dict[str, Any] = {} if done.returncode else json.loads(last_line(done.stdout))
    return figures or f"failed: {last_line(done.stderr)}"


def _outcome(figures: dict[str, Any]) -> Outcome:
    runs = [
        Measured(prompt, [(at_s, tokens) for at_s, tokens in bursts])
        for prompt, bursts in figures.pop("runs")
    ]
    if not all(run.bursts and run.num_decoded for run in runs):
        return Outcome(reason="failed: no token after the first within the time limit")
    return Outcome(runs=runs, **figures)


def last_line(text: str) -> str:
    """Return the last line with anything on it, cut to what fits into a table."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def environment() -> dict[str, str]:
    """Return our environment and, in a checkout, the way to this package for others."""
    root = Path(offload.__file__).resolve().parents[1]
    paths = [str(root)] if (root / "pyproject.toml").is_file() else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    # set by our own import
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
