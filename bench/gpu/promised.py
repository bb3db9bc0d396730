"""Each promise of the device path beside its ceiling, on a pair in the shape of a 70B and a 7B.

It computes what the packaged pair does: every token can be proved. The parts are those of other
commands on one decoder that is loaded once, and passes once more on one that does not give rows the
same bits in every pass. Nothing is timed in a way whose gate has not passed. What breaks, a refusal
at load among it, is missed by each promise that hangs on it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated

import torch
import typer

from offload.bench.gpu import experts, parts
from offload.bench.gpu.parts import TINY, Amounts, Job
from offload.bench.harness.command import Bench, command, flag, one_of
from offload.bench.harness.models import PRETEND, place_of, resident_pair, synthetic_setting
from offload.bench.harness.steps import kernel_rows
from offload.bench.harness.synthetic import LLAMA_2_70B
from offload.bench.harness.tables import (
    Row,
    attempt,
    failures,
    row,
    row_line,
    verdict_lines,
    verdicts,
)
from offload.bench.latency.exact import gates
from offload.bench.peers.accelerate_offload import accelerate_s
from offload.checkpoint.packaged import PROMPT
from offload.errors import UserError
from offload.machine import available_ram_bytes
from offload.units import parse_size

QUICK_LAYERS = 18
PROMISED: dict[str, tuple[str, ...]] = {  # what each part is to show
    "gate": ("exact",),
    "experts": ("exact",),
    "enqueue": (),
    "sweeps": ("link", "hidden compute"),
    "drafting": ("step",),
    "trees": ("step",),
    "soak": ("soak",),
    "memory": ("memory",),
    "link": (),
    "accelerate": ("against accelerate",),
    "plain": ("link", "hidden compute"),
}
# share of free memory for the target's layers
_HOST_SHARE = 0.8
_ON_PLAIN = ("enqueue", "sweeps")


def accelerate(job: Job) -> Iterator[Row]:
    ways = {"as it comes": False}
    if job.device.torch_device.type == "cuda":
        ways["weights page-locked for it"] = True
    for way, is_pinned in ways.items():
        peer_s = accelerate_s(job.setting.target, job.device, job.num_resident, is_pinned=is_pinned)
        yield row(f"accelerate, CPU offload, one token, {way}", peer_s, "s")
        if job.best_s is None:
            requirement = "no tree has seconds per token to compare"
            raise UserError(f"{requirement}: look at what became of the part `trees`")
        name = f"best tree against accelerate, {way} (s/token)"
        promise = None if is_pinned else "against accelerate"
        compared = row(name, job.best_s, "s", peer_s, 0.1, promise=promise)
        yield compared | {"times": peer_s / job.best_s}


def measure(job: Job) -> Iterator[Row]:
    """Yield all rows as they are known, without timings of a way whose tokens are wrong."""
    right = set[bool]()  # ways, by whether they promise the same bits
    for is_invariant in (False, True):
        seen = list[Row]()
        for measured_row in gate(job, is_invariant) if "gate" in job.parts else ():
            seen.append(measured_row)
            yield measured_row
        if not any(row["promise"] == "exact" and row["is_met"] is False for row in seen):
            right.add(is_invariant)
    if not right:
        return
    if "experts" in job.parts:
        yield from attempt("experts", PROMISED["experts"], experts.measure(job.device))
    wanted = [name for name in parts.ON_DECODER if name in job.parts]
    if wanted and True in right:
        yield from attempt("loading", promised_of(wanted), on_decoder(job, wanted))
    if "link" in job.parts:
        yield from attempt("link", PROMISED["link"], parts.link(job))
    if "accelerate" in job.parts and True in right:
        yield from attempt("accelerate", PROMISED["accelerate"], accelerate(job))
    if "plain" in job.parts and False in right:
        plain = on_decoder(job, _ON_PLAIN, invariant=False)
        for measured_row in attempt("loading", PROMISED["plain"], plain):
            yield measured_row | {"row": f"not invariant, {measured_row['row']}"}


def gate(job: Job, is_invariant: bool) -> Iterator[Row]:
    """Return True if tokens are right, with or without the same bits in every pass."""
    small = resident_pair("4GiB")._replace(opened=job.setting.opened, device=job.setting.device)
    asked = gates(small, PROMPT, job.amounts.num_gate, None if is_invariant else False)
    for measured_row in attempt("gate", PROMISED["gate"], asked):
        prefix = "" if is_invariant else "not invariant, "
        yield measured_row | {"row": prefix + measured_row["row"], "is_invariant": is_invariant}


def promised_of(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(promise for name in names for promise in PROMISED[name]))


def on_decoder(job: Job, wanted: Sequence[str], invariant: bool | None = None) -> Iterator[Row]:
    started = time.perf_counter()
    amounts = job.amounts
    with job.setting.open(amounts.largest, context=amounts.context, invariant=invariant) as decoder:
        yield row("loading", time.perf_counter() - started, "s")
        plan = decoder.plan
        job.num_resident = plan.num_resident
        yield row("layers", len(plan.layer_bytes), "") | {
            "notes": decoder.notes,
            "plan": plan.as_dict(),
            "kernels": kernel_rows(decoder),
        }
        for name in wanted:
            yield from attempt(name, PROMISED[name], parts.ON_DECODER[name](job, decoder))


@command(
    *("device", "place max_tokens quick"),
    examples=["offload bench device --quick", "offload bench device --device pretend"],
)
def main(
    bench: Bench,
    layers: Annotated[
        int | None, flag("N", f"default: what fits; {QUICK_LAYERS} with --quick")
    ] = None,
    part: Annotated[
        list[str] | None, flag("PART", f"of {', '.join(PROMISED)}; default: all")
    ] = None,
) -> None:
    """What a device gives, each promise beside its ceiling; exits with 1 where one is missed."""
    one_of(part or (), tuple(PROMISED), "--part")
    asked = bench.given.device
    if asked != PRETEND and not torch.cuda.is_available():
        raise UserError(
            "bench device needs a CUDA device, this machine shows none: run it where there is one, or "
            "rehearse it with --device pretend"
        )
    wanted = part or tuple(PROMISED)
    rows = list[Row]()
    refusal = None
    name = asked
    with ExitStack() as resources:
        try:
            job = _open_job(bench, resources, layers, wanted)
            name = job.device.name
            measured = measure(job)
        except UserError as error:
            refusal = error
            measured = failures("opening", promised_of(wanted), error)
        try:
            for row in measured:
                rows.append(bench.row(row))
                print(row_line(row), flush=True)
        finally:
            promises = verdicts(rows)
            print("\n".join(verdict_lines(promises)))
            bench.end({"bench": "device", "device": name, "promises": promises, "rows": rows})
    if refusal is not None:
        raise refusal
    missed = {
        promise["promise"]: promise["seen"] for promise in promises if promise["is_met"] is False
    }
    if "exact" in missed:
        raise UserError(f"tokens are wrong ({missed['exact']}): no speed is worth printing")
    if missed:
        raise typer.Exit(1)


def _open_job(bench: Bench, resources: ExitStack, layers: int | None, wanted: Sequence[str]) -> Job:
    asked = bench.given.device
    ram = bench.given.ram
    amounts = TINY
    gpu_memory = bench.given.gpu_mem
    num_layers = 8
    if asked != PRETEND:
        amounts = Amounts()
        gpu_memory = gpu_memory or "40GiB"
        ram_bytes = parse_size(ram, "--ram") if ram else available_ram_bytes()
        fitting = int(_HOST_SHARE * ram_bytes / LLAMA_2_70B.layer_bytes)
        num_layers = min(bench.effort(LLAMA_2_70B.num_layers, QUICK_LAYERS), fitting)
    amounts = amounts._replace(num_new=bench.given.max_tokens or amounts.num_new)
    place = place_of(asked, gpu_memory)
    made = synthetic_setting(layers or num_layers, ram, place["opened"])
    setting = resources.enter_context(made)._replace(**place)
    return Job(setting, amounts, wanted)
