"""What is measured on one decoder that is loaded once on a device, part by part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import per_pass
from offload.bench.harness.prompts import Prompt
from offload.bench.harness.rates import copy_rates, lock_rates
from offload.bench.harness.setting import Setting
from offload.bench.harness.steps import PassRunner, repeated_scores
from offload.bench.harness.tables import Row, attempt, row
from offload.bench.latency import passes
from offload.bench.latency.decode import Case, timed_run
from offload.checkpoint.packaged import PROMPT
from offload.engine.decoder import Decoder
from offload.memory.tiers import LayerTier
from offload.streaming.carriers import DeviceCarrier
from offload.streaming.device import Device
from offload.units import parse_size

# the host must be done enqueueing within this share of a pass
_ENQUEUED_SHARE = 0.8
_GIB = 2**30


class Amounts(NamedTuple):
    sizes: tuple[int, ...] = passes.ON_DEVICE.sizes
    # the one of these sizes whose compute must hide behind the link
    hidden_size: int = 768
    # from the third on promised
    trees: tuple[str, ...] = ("none", "sequences:16x48", "768x24", "grown:768x24", "auto")
    num_new: int = 96  # tokens of each tree
    num_gate: int = 60  # ... of each run of the gate
    num_soak: int = 10  # sweeps
    draft_s: float = 6.0  # time for the draft's curve
    draft_width: int = 64  # rows of the draft step that was promised
    context: int = 768
    layer_bytes: int = 1_711_000_000  # of one copy: a layer of Llama-2-70B

    @property
    def largest(self) -> str:
        """The tree that a decoder is opened with: its rows are those of the largest pass."""
        return f"{max(self.sizes)}x24"


TINY = Amounts(
    (1, 8, 24), 24, ("none", "sequences:4x4", "24x8", "auto"), 6, 6, 3, 1.5, 1, 512, 4 << 20
)


@dataclass
class Job:
    setting: Setting
    amounts: Amounts
    parts: Sequence[str]
    copy_bytes_per_s: float = 0.0
    best_s: float | None = None  # per token
    num_resident: int = 0

    @property
    def device(self) -> Device:
        return self.setting.opened


def link(job: Job) -> Iterator[Row]:
    label, (rate, odd_rate) = copy_rates(job.device, job.amounts.layer_bytes)
    job.copy_bytes_per_s = rate
    yield row(label, rate / 1e9, "GB/s")
    name = "copies from behind a page, as weights lie in files"
    yield row(name, odd_rate / 1e9, "GB/s", rate / 1e9)
    for way, rate in lock_rates(job.device, job.amounts.layer_bytes):
        yield row(f"locking memory of a layer: {way}", rate / 1e9, "GB/s")


def enqueue(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Time the host's part of one pass, which waits for it, beside the device's."""
    size = job.amounts.hidden_size
    runner = PassRunner(decoder, decoder.encode(PROMPT, raw=True))
    # the first pass takes the prompt in, the first of a size chooses kernels for it
    for num_rows in (1, size):
        runner.run(num_rows)
    timed = runner.run(size)
    job.setting.prove([runner.written()])
    name = f"a pass of {size} rows: enqueued by the host, against its whole time"
    split = {"stall_s": timed.stall_s, "compute_s": timed.seconds - timed.stall_s}
    yield row(name, timed.host_s, "s", timed.seconds, _ENQUEUED_SHARE) | split


def sweeps(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Time passes of all sizes against moving their bytes and computing their products."""
    sizes = job.amounts.sizes
    effort = passes.ON_DEVICE._replace(sizes=sizes)
    measured = passes.measure(job.setting, decoder, [Prompt("demo", PROMPT)], effort)
    job.setting.prove(measured.written)
    streamed_bytes = decoder.plan.streamed_bytes
    rows = passes.rows_of(measured, streamed_bytes)
    by_size = {row["num_nodes"]: row for row in rows if "limit" in row}
    link_s = 0.0
    if measured.read_s:
        # the quickest copies are the ceiling
        job.copy_bytes_per_s = streamed_bytes / min(measured.read_s)
        link_s = by_size[sizes[0]]["bytes_moved"] / job.copy_bytes_per_s
    for size in sizes:
        compute_s = passes.compute_s(job.setting, size)
        is_link = compute_s < link_s
        promise = "hidden compute" if size == job.amounts.hidden_size else None
        if size == sizes[0]:
            name, ceiling_s, promise = "bytes / copy rate", max(link_s, compute_s), "link"
        elif is_link:
            name, ceiling_s = "one token", by_size[sizes[0]]["sweep_s"]
        else:
            name, ceiling_s = "products / rate", max(link_s, compute_s)
        about = f"sweep of {size} rows against {name}"
        limit = 1.05 if is_link else None
        yield row(about, by_size[size]["sweep_s"], "s", ceiling_s, limit, promise=promise)


def drafting(job: Job, decoder: Decoder) -> Iterator[Row]:
    for drafted in passes.draft_rows(job.setting, decoder, [5] * 32, job.amounts.draft_s):
        name = f"draft step of {drafted['num_draft_rows']} rows against reading its weights"
        promise = "step" if drafted["num_draft_rows"] == job.amounts.draft_width else None
        yield row(name, drafted["draft_step_s"], "s", drafted["weights_s"], 1.5, promise=promise)


def trees(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Measure tokens per pass and seconds per token of each tree whose tokens are right."""
    for tree in job.amounts.trees:
        promise = "step" if tree in job.amounts.trees[2:] else None
        measured = one_tree(job, decoder, tree, promise)
        for measured_row in attempt(tree, [promise] if promise else [], measured):
            if "s_per_token" in measured_row:
                job.best_s = min(
                    job.best_s or measured_row["s_per_token"], measured_row["s_per_token"]
                )
            yield measured_row


def one_tree(job: Job, decoder: Decoder, tree: str, promise: str | None) -> Iterator[Row]:
    ids = decoder.encode(PROMPT, raw=True)
    case = Case(0.0, "match", tree)
    timed_run(decoder, ids, case, 2, seed=0)  # the first steps with a tree record its widths
    num_new = job.amounts.num_new if tree != "none" else max(4, job.amounts.num_new // 8)
    _, result = timed_run(decoder, ids, case, num_new, seed=0)
    job.setting.prove([Written(ids, result.token_ids)])
    stats = result.stats
    num_sweeps = max(1, stats.num_sweeps)
    means = per_pass(stats)
    slower_s = max(means["draft_s"], means["pass_s"])
    if job.copy_bytes_per_s:
        slower_s = max(slower_s, decoder.plan.streamed_bytes / job.copy_bytes_per_s)
    name = f"{tree}: draft + sweep against the slower of both"
    yield row(name, stats.decode_s / num_sweeps, "s", slower_s, 1.15, promise=promise) | {
        "s_per_token": means["token_s"],
        "tokens_per_sweep": means["tokens_per_pass"],
        "draft_s": means["draft_s"],
        "stall_s": means["stall_s"],
        "verify_s": stats.verify_s / num_sweeps,
    }


def soak(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Run pass after pass with NaN in every free slot: the same scores, and no more memory."""
    num_sweeps = job.amounts.num_soak
    where = job.device.torch_device
    held = partial(torch.cuda.memory_allocated, where) if where.type == "cuda" else lambda: 0
    num_same, lost_bytes = repeated_scores(decoder, job.amounts.sizes[1], num_sweeps, held)
    name = "soak: sweeps with poisoned slots that repeat their scores"
    yield row(name, num_same, "sweeps", num_sweeps, 1.0, promise="soak")
    name = "soak: device memory that was not given back"
    yield row(name, lost_bytes / 2**20, "MiB", 1.0, 1.0, promise="soak")


def memory(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Compare peaks with budgets; nothing else may use the device, since all use counts as ours."""
    plan = decoder.plan
    budget = parse_size(job.setting.gpu_memory or 0, "--gpu-mem")
    carrier = decoder.target.stream.carrier
    held = plan.bytes_in(LayerTier.PINNED)
    assert isinstance(carrier, DeviceCarrier), "layers are streamed to a device"
    pinned = carrier.pinned.pinned_bytes
    # by torch at most, in tensors, and what CUDA keeps beside it now
    reserved = allocated = 0
    if job.device.torch_device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(job.device.torch_device)
        allocated = torch.cuda.max_memory_allocated(job.device.torch_device)
    beside = job.device.bytes_beside_torch()
    counted = plan.gpu_total_bytes - plan.gpu_runtime_bytes
    for name, num_bytes, most, limit in (
        ("device memory at its peak against --gpu-mem", reserved + beside, budget, 1.0),
        ("page-locked bytes against layers held", pinned, held, 1.02),
        ("... of it beside torch: context, kernels, graphs", beside, plan.gpu_runtime_bytes, None),
        ("... of it in tensors, against what the plan counts", allocated, counted, None),
    ):
        promise = "memory" if limit else None
        yield row(name, num_bytes / _GIB, "GiB", most / _GIB, limit, promise=promise)


ON_DECODER = {part.__name__: part for part in (enqueue, sweeps, drafting, trees, soak, memory)}
