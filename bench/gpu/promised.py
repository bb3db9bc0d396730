"""Each promise of the device path beside its ceiling, on a pair in the shape of a 70B and a 7B.

The pair is made in host memory, and computes what the packaged one computes: every token can be
proved. The parts are those of the other commands (`gate`, `passes`, `decode`, `link`, `peers`) on
one decoder that is loaded once, and passes once more on one that does not give rows the same bits
in every pass. Nothing is timed in a way whose gate has not passed. What breaks, a refusal at load
among it, is missed by each promise that hangs on it, and the last lines say of each promise what
was wanted, what was seen and whether it is met.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from offload.bench.gpu import experts
from offload.bench.gpu.rates import copy_rates
from offload.bench.harness.command import PLACE, Bench, command, one_of
from offload.bench.harness.gate import Written
from offload.bench.harness.promises import (
    Row,
    attempt,
    failures,
    row,
    row_line,
    verdict_lines,
    verdicts,
)
from offload.bench.harness.prompts import Prompt
from offload.bench.harness.record import writable
from offload.bench.harness.setting import (
    PRETEND,
    Setting,
    place_of,
    resident_pair,
    synthetic_setting,
)
from offload.bench.harness.steps import PassRunner, record_steps, repeated_scores
from offload.bench.harness.synthetic import LLAMA_2_70B
from offload.bench.harness.timeline import write_trace
from offload.bench.latency import passes
from offload.bench.latency.decode import Case, timed_run
from offload.bench.latency.exact import gates
from offload.bench.peers.accelerate_offload import accelerate_s
from offload.calibration.trial import rows_of
from offload.cli.demo import PROMPT
from offload.engine.decoder import Decoder
from offload.errors import UserError
from offload.machine import available_ram_bytes
from offload.memory.plan import LayerTier
from offload.streaming.carriers import DeviceCarrier
from offload.streaming.device import CudaDevice, Device
from offload.units import Sampling, parse_size

QUICK_LAYERS = 18
PROMISED: dict[str, tuple[str, ...]] = {  # what each part is to show
    "gate": ("exact",), "experts": ("exact",), "enqueue": (), "sweeps": ("link", "hidden compute"),
    "drafting": ("step",), "trees": ("step",), "trace": (), "soak": ("soak",), "memory": ("memory",), "link": (),
    "accelerate": ("against accelerate",), "plain": ("link", "hidden compute"),
}  # fmt: skip
# share of free memory for the target's layers
_HOST_SHARE = 0.8
# the host must be done enqueueing within this share of a pass
_ENQUEUED_SHARE = 0.8
_GIB = 2**30


class Amounts(NamedTuple):
    """How much is measured."""

    sizes: tuple[int, ...] = passes.ON_DEVICE.sizes
    # the one of these sizes whose compute must hide behind the link
    hidden_size: int = 768
    # from the third on promised
    trees: tuple[str, ...] = ("none", "sequences:16x48", "768x24", "grown:768x24")
    num_new: int = 96  # tokens of each tree
    num_gate: int = 60  # ... of each run of the gate
    num_soak: int = 10  # sweeps
    draft_s: float = 6.0  # time for the draft's curve
    draft_width: int = 64  # rows of the draft step that was promised
    context: int = 768

    @property
    def largest(self) -> str:
        """The tree that a decoder is opened with: its rows are those of the largest pass."""
        return f"{max(self.sizes)}x24"


TINY = Amounts((1, 8, 24), 24, ("none", "sequences:4x4", "24x8"), 6, 6, 3, 1.5, 1, 512)


@dataclass
class Job:
    """One run: what it measures with, and what later parts ask of earlier ones."""

    setting: Setting
    amounts: Amounts
    parts: Sequence[str]
    trace: Path | None
    copy_bytes_per_s: float = 0.0
    best_s: float | None = None  # per token
    num_resident: int = 0

    @property
    def device(self) -> Device:
        assert self.setting.opened is not None, "a device was named"
        return self.setting.opened


def link(job: Job) -> Iterator[Row]:
    found = copy_rates(
        job.device, LLAMA_2_70B.layer_bytes if isinstance(job.device, CudaDevice) else 4 << 20
    )
    job.copy_bytes_per_s = found.bytes_per_s
    yield row(found.how, found.bytes_per_s / 1e9, None, None, "GB/s")
    pace = found.odd_bytes_per_s / 1e9, found.bytes_per_s / 1e9
    yield row("copies from behind a page, as weights lie in files", *pace, None, "GB/s")


def enqueue(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Time the host's part of one pass beside the device's.

    A pass waits for a host that is not done sooner.
    """
    size = job.amounts.hidden_size
    runner = PassRunner(decoder, decoder.encode(PROMPT, raw=True))
    # the first pass takes the prompt in, the first of a size chooses kernels for it
    for num_rows in (1, size):
        runner.run(num_rows)
    found = runner.run(size)
    job.setting.prove([runner.written()])
    name = f"a pass of {size} rows: enqueued by the host, against its whole time"
    told = {"stall_s": found.stall_s, "compute_s": found.seconds - found.stall_s}
    yield row(name, found.host_s, found.seconds, _ENQUEUED_SHARE, "s") | told


def sweeps(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Time passes of all sizes against moving their bytes and computing their products."""
    sizes = job.amounts.sizes
    effort = passes.ON_DEVICE._replace(sizes=sizes)
    measured = passes.measure(job.setting, decoder, [Prompt("demo", PROMPT)], effort)
    job.setting.prove(measured.written)
    found = {
        one["num_nodes"]: one
        for one in passes.rows_of(measured, decoder.plan.streamed_bytes)
        if "limit" in one
    }
    one_s = found[sizes[0]]["sweep_s"]
    # the quickest copies are the ceiling
    job.copy_bytes_per_s = decoder.plan.streamed_bytes / min(measured.read_s)
    link_s = found[sizes[0]]["bytes_moved"] / job.copy_bytes_per_s
    for size in sizes:
        compute_s = passes.compute_s(job.setting, size)
        is_link = compute_s < link_s
        is_first = size == sizes[0]
        ceiling_s = max(link_s, compute_s) if is_first or not is_link else one_s
        name = "bytes / copy rate" if is_first else "one token" if is_link else "products / rate"
        promise = (
            "link" if is_first else "hidden compute" if size == job.amounts.hidden_size else None
        )
        about = f"sweep of {size} rows against {name}"
        limit = 1.05 if is_link else None
        yield row(about, found[size]["sweep_s"], ceiling_s, limit, "s", promise=promise)


def drafting(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Time a draft step against its width, beside reading the draft's weights once."""
    for one in passes.draft_rows(job.setting, decoder, [5] * 32, job.amounts.draft_s):
        name = f"draft step of {one['num_draft_rows']} rows against reading its weights"
        promise = "step" if one["num_draft_rows"] == job.amounts.draft_width else None
        yield row(name, one["draft_step_s"], one["weights_s"], 1.5, "s", promise=promise)


def trees(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Measure tokens per pass and seconds per token of all trees.

    A tree whose tokens are wrong has no figures.
    """
    for tree in job.amounts.trees:
        promise = "step" if tree in job.amounts.trees[2:] else None
        for one in attempt(
            tree, [promise] if promise else [], one_tree(job, decoder, tree, promise)
        ):
            if "s_per_token" in one:
                job.best_s = min(job.best_s or one["s_per_token"], one["s_per_token"])
            yield one


def one_tree(job: Job, decoder: Decoder, tree: str, promise: str | None) -> Iterator[Row]:
    """Generate once, and prove every token against the small original."""
    ids = decoder.encode(PROMPT, raw=True)
    case = Case(0.0, "match", tree)
    timed_run(decoder, ids, case, 2, seed=0)  # the first steps with a tree record its widths
    num_new = job.amounts.num_new if tree != "none" else max(4, job.amounts.num_new // 8)
    _, result = timed_run(decoder, ids, case, num_new, seed=0)
    job.setting.prove([Written(ids, result.token_ids, Sampling(), "match")])
    stats = result.stats
    num_sweeps = max(1, result.stats.num_sweeps)
    draft_s = stats.draft_s / num_sweeps
    step_s = stats.decode_s / num_sweeps
    slower_s = max(
        draft_s,
        stats.sweep_s / num_sweeps,
        decoder.plan.streamed_bytes / (job.copy_bytes_per_s or 1e12),
    )
    yield {
        **row(
            f"{tree}: draft + sweep against the slower of both",
            step_s,
            slower_s,
            1.15,
            "s",
            promise=promise,
        ),
        "s_per_token": stats.tpot_s,
        "tokens_per_sweep": stats.tokens_per_sweep,
        "draft_s": draft_s,
        "stall_s": stats.stall_s / num_sweeps,
        "verify_s": stats.verify_s / num_sweeps,
    }


def trace(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Trace two steps by the device's own clock."""
    if job.trace is not None:
        ids = decoder.encode(PROMPT, raw=True)
        timeline, new_ids = record_steps(decoder, ids, job.amounts.trees[-1], 2)
        job.setting.prove([Written(ids, new_ids, Sampling(), "match")])
        write_trace(timeline.events(), job.trace)
        yield row(f"two steps in {job.trace}", float(len(timeline.events())), None, None, "events")


def soak(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Run pass after pass with NaN in every free slot: the same scores, and no more memory."""
    num_sweeps = job.amounts.num_soak
    place = job.device.place
    held = partial(torch.cuda.memory_allocated, place) if place.type == "cuda" else lambda: 0
    num_same, lost_bytes = repeated_scores(decoder, job.amounts.sizes[1], num_sweeps, held)
    name = "soak: sweeps with poisoned slots that repeat their scores"
    yield row(name, num_same, num_sweeps, 1.0, "sweeps", promise="soak")
    yield row(
        "soak: device memory that was not given back",
        lost_bytes / 2**20,
        1.0,
        1.0,
        "MiB",
        promise="soak",
    )


def memory(job: Job, decoder: Decoder) -> Iterator[Row]:
    """Compare peaks with budgets; nothing else may use the device, since all use counts as ours."""
    plan = decoder.plan
    budget = parse_size(job.setting.gpu_memory or 0, "--gpu-mem")
    carrier = decoder.target.stream.carrier
    held = plan.bytes_in(LayerTier.HOST)
    assert isinstance(carrier, DeviceCarrier), "layers are streamed to a device"
    pinned = carrier.pinned.pinned_bytes
    # by torch at most, in tensors, and what CUDA keeps beside it now
    reserved = allocated = beside = 0
    if isinstance(job.device, CudaDevice):
        reserved = torch.cuda.max_memory_reserved(job.device.place)
        allocated = torch.cuda.max_memory_allocated(job.device.place)
        beside = job.device.bytes_beside_torch()
    counted = plan.gpu_total_bytes - plan.gpu_runtime_bytes
    name = "device memory at its peak against --gpu-mem"
    yield row(name, (reserved + beside) / _GIB, budget / _GIB, 1.0, "GiB", promise="memory")
    yield row(
        "page-locked bytes against layers held",
        pinned / _GIB,
        held / _GIB,
        1.02,
        "GiB",
        promise="memory",
    )
    own = "... of it beside torch: context, kernels, graphs"
    yield row(own, beside / _GIB, plan.gpu_runtime_bytes / _GIB, None, "GiB")
    yield row(
        "... of it in tensors, against what the plan counts",
        allocated / _GIB,
        counted / _GIB,
        None,
        "GiB",
    )


def accelerate(job: Job) -> Iterator[Row]:
    """Time accelerate's CPU offload: as it comes, and with page-locked weights."""
    is_cuda = job.device.place.type == "cuda"
    for is_pinned, how in (
        (False, "as it comes"),
        *([(True, "weights page-locked for it")] if is_cuda else []),
    ):
        peer_s = accelerate_s(job.setting.target, job.device, job.num_resident, is_pinned=is_pinned)
        yield row(f"accelerate, CPU offload, one token, {how}", peer_s, None, None, "s")
        if job.best_s is None:
            rule = "no tree has seconds per token to compare"
            remedy = "look at what became of the part `trees`"
            raise UserError(f"{rule}: {remedy}")
        name = f"best tree against accelerate, {how} (s/token)"
        promise = None if is_pinned else "against accelerate"
        yield {
            **row(name, job.best_s, peer_s, 0.1, "s", promise=promise),
            "times": peer_s / job.best_s,
        }


ON_DECODER = {
    "enqueue": enqueue, "sweeps": sweeps, "drafting": drafting, "trees": trees, "trace": trace, "soak": soak,
    "memory": memory,
}  # fmt: skip
_ON_PLAIN = ("enqueue", "sweeps")


def measure(job: Job) -> Iterator[Row]:
    """Yield all rows, each as soon as it is known.

    What is timed in a way whose tokens the gate finds wrong is left out.
    """
    right = set[bool]()  # ways, by whether they promise the same bits
    for is_invariant in (False, True):
        found = list[Row]()
        for one in gate(job, is_invariant) if "gate" in job.parts else ():
            found.append(one)
            yield one
        if not any(one["promise"] == "exact" and one["is_met"] is False for one in found):
            right.add(is_invariant)
    if not right:
        return
    if "experts" in job.parts:
        yield from attempt("experts", PROMISED["experts"], experts.measure(job.device))
    wanted = [name for name in ON_DECODER if name in job.parts]
    if wanted and True in right:
        yield from attempt("loading", promised_of(wanted), on_decoder(job, wanted))
    if "link" in job.parts:
        yield from attempt("link", PROMISED["link"], link(job))
    if "accelerate" in job.parts and True in right:
        yield from attempt("accelerate", PROMISED["accelerate"], accelerate(job))
    if "plain" in job.parts and False in right:
        for one in attempt(
            "loading", PROMISED["plain"], on_decoder(job, _ON_PLAIN, invariant=False)
        ):
            yield one | {"row": f"not invariant, {one['row']}"}


def gate(job: Job, is_invariant: bool) -> Iterator[Row]:
    """Return whether tokens are right, with or without the same bits in every pass."""
    small = resident_pair("4GiB")._replace(opened=job.setting.opened, device=job.setting.device)
    asked = gates(small, PROMPT, job.amounts.num_gate, None if is_invariant else False)
    for one in attempt("gate", PROMISED["gate"], asked):
        how = "" if is_invariant else "not invariant, "
        yield one | {"row": how + one["row"], "is_invariant": is_invariant}


def promised_of(parts: Sequence[str]) -> list[str]:
    """Return each promise that these parts are to show, once."""
    return list(dict.fromkeys(promise for name in parts for promise in PROMISED[name]))


def on_decoder(job: Job, wanted: Sequence[str], invariant: bool | None = None) -> Iterator[Row]:
    """Measure what needs the large model, which is loaded once."""
    started = time.perf_counter()
    amounts = job.amounts
    with job.setting.open(amounts.largest, context=amounts.context, invariant=invariant) as decoder:
        yield row("loading", time.perf_counter() - started, None, None, "s")
        plan = decoder.plan
        job.num_resident = decoder.plan.num_resident
        told = {
            "notes": decoder.notes,
            "plan": plan.as_dict(),
            "kernels": rows_of(decoder.comparisons),
        }
        yield {**row("layers", len(plan.layer_bytes), None, None, ""), **told}
        for name in wanted:
            yield from attempt(name, PROMISED[name], ON_DECODER[name](job, decoder))


Layers = Annotated[
    int | None, typer.Option(metavar="N", help=f"default: what fits; {QUICK_LAYERS} with --quick")
]
Part = Annotated[
    list[str] | None, typer.Option(metavar="PART", help=f"of {', '.join(PROMISED)}; default: all")
]
MaxTokens = Annotated[
    int | None, typer.Option("-n", "--max-tokens", metavar="N", min=2, help="with each tree")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="two steps", callback=writable)
]


@command(
    "device",
    PLACE,
    "quick",
    examples=["offload bench device --quick", "offload bench device --device pretend"],
)
def main(
    bench: Bench,
    layers: Layers = None,
    part: Part = None,
    max_tokens: MaxTokens = None,
    trace_file: Trace = None,
) -> None:
    """What a device gives, each promise beside its ceiling; exits with 1 where one is missed."""
    one_of(part or (), tuple(PROMISED), "--part")
    asked = bench.given("device")
    amounts = TINY if asked == PRETEND else Amounts()
    amounts = amounts._replace(num_new=max_tokens or amounts.num_new)
    if asked != PRETEND and not torch.cuda.is_available():
        raise UserError(
            "bench device needs a CUDA device, this machine shows none: run it where there is one, or "
            "rehearse it with --device pretend"
        )
    rows = list[Row]()
    job = None
    refusal = None
    with ExitStack() as resources:
        try:
            job = _open_job(bench, resources, layers, part or tuple(PROMISED), amounts, trace_file)
            measured = measure(job)
        except UserError as error:
            refusal = error
            measured = failures("opening", promised_of(part or tuple(PROMISED)), error)
        try:
            for one in measured:
                rows.append(bench.row(one))
                print(row_line(one), flush=True)
        finally:
            found = verdicts(rows)
            print("\n".join(verdict_lines(found)))
            name = job.device.name if job else asked
            bench.end({"bench": "device", "device": name, "promises": found, "rows": rows})
    if refusal is not None:
        raise refusal
    missed: dict[str, Any] = {
        one["promise"]: one["seen"] for one in found if one["is_met"] is False
    }
    if "exact" in missed:
        raise UserError(f"tokens are wrong ({missed['exact']}): no speed is worth printing")
    if missed:
        raise typer.Exit(1)


def _open_job(
    bench: Bench,
    resources: ExitStack,
    layers: int | None,
    parts: Sequence[str],
    amounts: Amounts,
    trace: Path | None,
) -> Job:
    """Open the models on the device. Raises `UserError`."""
    asked = bench.given("device")
    ram = bench.given("ram")
    place = place_of(asked, bench.given("gpu_mem") or (None if asked == PRETEND else "40GiB"))
    num_layers = layers or _num_layers(bench.quick, asked, ram)
    setting = resources.enter_context(synthetic_setting(num_layers, ram, place["opened"]))
    return Job(setting._replace(**place), amounts, parts, trace)


def _num_layers(is_quick: bool, asked: str, ram: str | None) -> int:
    if asked == PRETEND:
        return 8
    fitting = int(
        _HOST_SHARE
        * (parse_size(ram, "--ram") if ram else available_ram_bytes())
        / LLAMA_2_70B.layer_bytes
    )
    return min(QUICK_LAYERS if is_quick else LLAMA_2_70B.num_layers, fitting)
