"""A 70B-shaped target beside a 7B-shaped draft on one GPU: each promise of the device path beside its ceiling.

    offload bench device --quick          # 18 layers, minutes
    offload bench device --gpu-mem 40GiB  # as many of 80 layers as host memory holds

The pair is the packaged one, inflated in host memory (`giant.py`), so trees have real acceptance and every token can be
proved against the small original. Nothing is timed before the gate has passed (`device_gate.py`); what breaks later is
a row of its own, and the last lines say of each promise what was wanted, what was seen and whether it is met.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from offload.bench.device_gate import gates
from offload.bench.device_rates import Rates, ceilings
from offload.bench.gate import WrongTokenError, draws_hold
from offload.bench.giant import Shape, giants, sketch
from offload.bench.host_device import HostDevice, PlainWay
from offload.bench.peers_on_device import accelerate_s
from offload.bench.promises import Row, attempt, failure, row, row_line, verdict_lines, verdicts
from offload.bench.timeline import record_steps, require_pictures, write_trace
from offload.calibration.kernel_comparison import rows_of
from offload.calibration.quick import draft_curve
from offload.cli.demo import PAIR, PROMPT
from offload.config import Sampling, format_bytes, parse_size
from offload.drafting.model import ModelDrafter
from offload.engine import load as loading
from offload.engine.decoder import Decoder
from offload.errors import UserError
from offload.machine import available_ram_bytes
from offload.planning import room
from offload.streaming.device import CudaDevice, Device, open_device
from offload.streaming.device_stream import DeviceStream
from offload.streaming.pinned import PinnedAllocator
from offload.tree.token_tree import TokenTree
from offload.tree.topology import DEFAULT_ACCEPTANCE, best_first, chain
from offload.tuning.audit import draw_gaps

LARGE = Shape(width_factor=64, layer_bytes=1_711_000_000, num_layers=80)  # Llama-2-70B's bytes and products per layer
LARGE_DRAFT = Shape(width_factor=16, layer_bytes=405_000_000, num_layers=32)  # Llama-2-7B's
TINY, TINY_DRAFT = Shape(4, 4_000_000, 8), Shape(4, 1_000_000, 3)
QUICK_LAYERS = 18
CONTEXT = 768
SIZES = (1, 64, 256, 768, 1024, 2048, 4096)
TREES = ("none", "sequences:16x48", "768x24")
_HOST_SHARE = 0.8  # of what is free, to the target's layers
_ROUNDS = 3
_DRAFT_WIDTH = 64  # rows of the draft step that was promised
_BURSTS = (1, 2, 4, 8, 16, 24)  # tokens that a sweep may yield


@dataclass(frozen=True)
class Setting:
    """One run of the bench."""

    target: Path
    draft: Path
    gpu_memory: str
    ram_bytes: int
    sizes: Sequence[int]
    hidden_size: int  # of these, the one whose compute must hide behind the link
    trees: Sequence[str]
    num_new: int  # tokens of each tree
    num_gate: int  # ... of each run of the gate
    num_soak: int  # sweeps
    draft_s: float  # time for the draft's curve
    card: Device

    @contextmanager
    def open(self, target: Path, draft: Path, **options: Any) -> Iterator[Decoder]:
        """A decoder on the GPU."""
        how: dict[str, Any] = {"ram": self.ram_bytes, "profile": "none", "context": CONTEXT, **options}
        with giants(), loading.load(target, draft, gpu_memory=self.gpu_memory, **how) as decoder:
            yield decoder


def measure_rates(setting: Setting, layer_bytes: int) -> tuple[list[Row], Rates]:
    """The ceilings, with nothing else in memory."""
    name, rates = ceilings(setting.card, setting.target, layer_bytes)
    first = {**row(name, rates.copy_bytes_per_s / 1e9, None, None, "GB/s"), **rates._asdict()}
    pace = (rates.odd_copy_bytes_per_s / 1e9, rates.copy_bytes_per_s / 1e9)
    return [first, row("copies from behind a page, as weights lie in files", *pace, None, "GB/s")], rates


def sweeps(setting: Setting, decoder: Decoder, rates: Rates) -> Iterator[Row]:
    """Sweeps of all sizes, one after the other, against moving their bytes and computing their products."""
    link_s = moved_bytes(decoder) / rates.copy_bytes_per_s
    weights = sum(decoder.plan.layer_bytes) // decoder.target._model.dtype.itemsize
    one_s = 0.0
    for size in setting.sizes:
        taken_s = sweep_s(decoder, size)
        one_s = one_s or taken_s
        compute_s = 2 * weights * size / rates.flops_per_s
        is_link = compute_s < link_s
        limit = 1.05 if is_link else None
        ceiling_s = max(link_s, compute_s) if size == setting.sizes[0] or not is_link else one_s
        name = "bytes / copy rate" if size == setting.sizes[0] else "one token" if is_link else "products / rate"
        promise = "link" if size == setting.sizes[0] else "hidden compute" if size == setting.hidden_size else None
        yield row(f"sweep of {size} rows against {name}", taken_s, ceiling_s, limit, "s", promise=promise)


def sweep_s(decoder: Decoder, num_nodes: int) -> float:
    """A sweep in a row of sweeps: the first of them finds slots that were filled before."""
    topology = best_first(DEFAULT_ACCEPTANCE, num_nodes, 24)
    tree = TokenTree(topology, torch.arange(num_nodes) % 1000 + 3)
    decoder.begin(Sampling(), decoder.rule)
    tokens, seconds = [5, 6, 7], []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        decoder.target.score(tree, tokens)
        decoder.target.wait()
        seconds.append(time.perf_counter() - started)
        decoder.target.reset()
    return statistics.median(seconds[1:])


def moved_bytes(decoder: Decoder) -> int:
    """What a sweep really moves: slabs are a little smaller than a plan made of headers allows for."""
    stream, before = decoder.target.stream, decoder.target.stream.bytes_read
    sweep_s_once(decoder)
    return stream.bytes_read - before


def sweep_s_once(decoder: Decoder) -> None:
    """One sweep of one row."""
    decoder.begin(Sampling(), decoder.rule)
    decoder.target.score(TokenTree(best_first(DEFAULT_ACCEPTANCE, 1, 1), torch.tensor([5])), [5])
    decoder.target.wait()


def drafting(setting: Setting, decoder: Decoder, rates: Rates) -> list[Row]:
    """A draft step against its width, beside reading the draft's weights once."""
    drafter = decoder.drafter
    assert isinstance(drafter, ModelDrafter), "the bench has a draft"
    curve = draft_curve(drafter, decoder.begin(Sampling(), decoder.rule), [5] * 32, budget_s=setting.draft_s)
    weights = sum(layout.slab_bytes for layout in drafter._draft._model.layer_layouts)
    least_s = weights / rates.memory_bytes_per_s
    return [
        row(
            f"draft step of {width} rows against reading its weights", seconds, least_s, 1.5, "s",
            promise="step" if width == _DRAFT_WIDTH else None,
        )
        for width, seconds in zip(curve.sizes, curve.seconds, strict=True)
    ]  # fmt: skip


def warm_up(decoder: Decoder) -> None:
    """Let the draft take in bursts of all sizes: the first run of a width is recorded, which takes long."""
    sampler = decoder.begin(Sampling(), decoder.rule)
    for width in _BURSTS:
        decoder.drafter.reset()
        decoder.drafter.grow(chain(1), [5] * width, sampler)
    decoder.drafter.reset()


def trees(setting: Setting, decoder: Decoder, rates: Rates) -> Iterator[Row]:
    """Tokens per sweep and seconds per token of all trees; one whose tokens are wrong has no figures."""
    link_s = moved_bytes(decoder) / rates.copy_bytes_per_s
    warm_up(decoder)
    for tree in setting.trees:
        promise = "step" if tree == setting.trees[-1] else None
        yield from attempt(tree, promise, one_tree(setting, decoder, tree, link_s, promise))


def one_tree(setting: Setting, decoder: Decoder, tree: str, link_s: float, promise: str | None) -> Iterator[Row]:
    """One generation, every token of it proved against the small original."""
    decoder.generate(PROMPT, max_new_tokens=2, tree=tree)  # the first steps with a tree record its widths
    num_new = setting.num_new if tree != "none" else max(4, setting.num_new // 8)
    result = decoder.generate(PROMPT, max_new_tokens=num_new, tree=tree)
    prompt_ids = decoder.encode(PROMPT, raw=True)
    draws_hold(draw_gaps(PAIR / "target", prompt_ids, result.token_ids, Sampling()), Sampling())
    stats = result.stats
    num_sweeps = max(1, stats.num_sweeps)
    draft_s, stall_s = stats.draft_s / num_sweeps, stats.stall_s / num_sweeps
    step_s = draft_s + (stats.sweep_s + stats.verify_s) / num_sweeps
    slower_s = max(link_s, stats.sweep_s / num_sweeps - stall_s, draft_s)
    told = row(f"{tree}: draft and sweep against the slower side", step_s, slower_s, 1.15, "s", promise=promise)
    more = {"s_per_token": stats.tpot_s, "tokens_per_sweep": stats.tokens_per_sweep}
    yield {**told, **more, "draft_s": draft_s, "stall_s": stall_s}


def traced(setting: Setting, decoder: Decoder, path: Path) -> Iterator[Row]:
    """Two steps with the last tree, layer by layer; `path` is written when their tokens have been proved."""
    ids = decoder.encode(PROMPT, raw=True)
    timeline, new_ids = record_steps(decoder, ids, setting.trees[-1], 2)
    draws_hold(draw_gaps(PAIR / "target", ids, new_ids, Sampling()), Sampling())
    write_trace(timeline.events(), path)
    yield row(f"trace in {path.name}", len(timeline.events()), None, None, "events")


def soak(setting: Setting, decoder: Decoder) -> list[Row]:
    """Sweep after sweep with NaN in every slot that is free: the same scores each time, and no more memory."""
    stream = decoder.target.stream
    assert isinstance(stream, DeviceStream), "the bench streams to a device"
    stream._poison_released = True
    size = setting.sizes[1]
    tree = TokenTree(best_first(DEFAULT_ACCEPTANCE, size, 12), torch.arange(size) + 3)
    decoder.begin(Sampling(), decoder.rule)
    wanted = decoder.target.score(tree, [5, 6, 7]).whole()
    num_same, before_bytes = 0, held_bytes(setting.card)
    for _ in range(setting.num_soak):
        decoder.target.reset()
        num_same += int(torch.equal(decoder.target.score(tree, [5, 6, 7]).whole(), wanted))
    stream._poison_released = False
    assert not wanted.isnan().any(), "a slot was read before its layer had arrived"
    drift_mib = (held_bytes(setting.card) - before_bytes) / 2**20
    name = "soak: sweeps with poisoned slots that repeat their scores"
    return [
        row(name, num_same, setting.num_soak, 1.0, "sweeps", promise="soak"),
        row("soak: device memory that was not given back", drift_mib, 1.0, 1.0, "MiB", promise="soak"),
    ]


def held_bytes(card: Device) -> int:
    """Device memory in use now."""
    return int(torch.cuda.memory_allocated(card.place)) if card.place.type == "cuda" else 0


def memory(setting: Setting, decoder: Decoder) -> list[Row]:
    """Peaks beside budgets; nothing else may use the GPU, for all that CUDA keeps there is taken to be ours."""
    stream, plan, gib = decoder.target.stream, decoder.plan, 2**30
    assert isinstance(stream, DeviceStream), "the bench streams to a device"
    held = sum(stream._layouts[layer].slab_bytes for layer in stream._of_host)
    pinned, budget = stream._arena.pinned_bytes, parse_size(setting.gpu_memory, "--gpu-mem")
    reserved, allocated, beside = peaks(setting.card)
    counted = plan.gpu_total_bytes - plan.gpu_runtime_bytes
    name = "device memory at its peak against --gpu-mem"
    return [
        row(name, (reserved + beside) / gib, budget / gib, 1.0, "GiB", promise="memory"),
        row("page-locked bytes against layers held", pinned / gib, held / gib, 1.02, "GiB", promise="memory"),
        row(
            "... of it beside torch: context, kernels, graphs", beside / gib, plan.gpu_runtime_bytes / gib, None, "GiB"
        ),
        row("... of it in tensors, against what the plan counts", allocated / gib, counted / gib, None, "GiB"),
    ]


def peaks(card: Device) -> tuple[int, int, int]:
    """What torch has reserved and allocated at most, and what CUDA keeps beside it now; nothing on the host."""
    if not isinstance(card, CudaDevice):
        return 0, 0, 0
    reserved, allocated = (ask(card.place) for ask in (torch.cuda.max_memory_reserved, torch.cuda.max_memory_allocated))
    return int(reserved), int(allocated), card.bytes_beside_torch()


def against_accelerate(setting: Setting, decoder: Decoder, best_s: float | None) -> Iterator[Row]:
    """Seconds per token of accelerate's CPU offload: weights page-locked for it, and as its users have them."""
    for is_pinned, how in ((True, "weights page-locked for it"), (False, "as it comes")):
        peer_s = accelerate_s(decoder, setting.card, is_pinned=is_pinned)
        if peer_s is None:
            yield {
                **row(f"accelerate, {how}", 0.0, None, None, "s"),
                "notes": "no room for a second copy of the weights",
            }
            continue
        yield row(f"accelerate, CPU offload, one token, {how}", peer_s, None, None, "s")
        if best_s is not None:
            name = f"best tree against accelerate, {how} (s/token)"
            promise = None if is_pinned else "against accelerate"
            yield {**row(name, best_s, peer_s, 0.1, "s", promise=promise), "times": peer_s / best_s}


def measure(setting: Setting, layer_bytes: int, trace: Path | None = None) -> Iterator[Row]:
    """All rows, each as soon as it is known; after a wrong token in the gate there are no others."""
    try:
        yield from gates(setting.open, PAIR, PROMPT, setting.card.place, setting.num_gate)
    except WrongTokenError as error:
        yield failure("gate", "exact", error)
        return
    rows, rates = measure_rates(setting, layer_bytes)
    yield from rows
    started = time.perf_counter()
    with setting.open(setting.target, setting.draft, tree=f"{max(setting.sizes)}x24") as decoder:
        plan = decoder.plan
        yield row("loading", time.perf_counter() - started, None, None, "s")
        yield {**row("layers", len(plan.layer_bytes), None, None, ""), "notes": decoder.notes, "plan": plan.as_dict(),
               "kernels": rows_of(decoder.comparisons)}  # fmt: skip
        yield from attempt("sweeps", "link", sweeps(setting, decoder, rates))
        yield from attempt("drafting", "step", _later(drafting, setting, decoder, rates))
        best_s: float | None = None
        for one in attempt("trees", "step", trees(setting, decoder, rates)):
            best_s = min(best_s or one["s_per_token"], one["s_per_token"]) if "s_per_token" in one else best_s
            yield one
        if trace is not None:
            yield from attempt("trace", None, traced(setting, decoder, trace))
        yield from attempt("soak", "soak", _later(soak, setting, decoder))
        yield from attempt("memory", "memory", _later(memory, setting, decoder))
        yield from attempt("accelerate", "against accelerate", against_accelerate(setting, decoder, best_s))


def _later(rows: Callable[..., Sequence[Row]], *args: Any) -> Iterator[Row]:
    """Called when the first of them is wanted, so that whoever iterates hears of what breaks."""
    yield from rows(*args)


def main(
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_LAYERS} layers instead of all that fit")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="a few megabytes on the CPU: whether the script works")] = False,
    gpu_mem: Annotated[str, typer.Option(help="of the card, so that a large one stands in for a small one")] = "40GiB",
    device: Annotated[str, typer.Option(help="cuda or cuda:N")] = "cuda",
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="two steps for ui.perfetto.dev, and .svg")] = None,
) -> None:
    """What a CUDA device gives, each promise beside its ceiling; the exit status is 1 where one is missed."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if trace is not None:
            require_pictures()
        setting = _setting(Path(folder), stack, is_quick=quick, is_tiny=tiny, gpu_memory=gpu_mem, device=device)
        rows = list[Row]()
        try:
            for one in measure(setting, (TINY if tiny else LARGE).layer_bytes, trace):
                rows.append(one)
                print(row_line(one), flush=True)
        finally:
            found = verdicts(rows)
            print("\n".join(verdict_lines(found)))
            print(
                json.dumps({"bench": "device", "device": setting.card.name, "promises": found, "rows": rows}),
                flush=True,
            )
    missed = {one["promise"]: one["seen"] for one in found if one["is_met"] is False}
    if "exact" in missed:
        raise UserError(f"tokens are wrong ({missed['exact']}): no speed is worth printing")
    if missed:
        raise typer.Exit(1)


def _setting(folder: Path, stack: ExitStack, *, is_quick: bool, is_tiny: bool, gpu_memory: str, device: str) -> Setting:
    if is_tiny:
        card: Device | None = HostDevice()
        stack.enter_context(mock.patch.object(loading, "open_device", lambda name, gpu: card))
        stack.enter_context(
            mock.patch.object(loading, "open_pinned_allocator", lambda place: PinnedAllocator([PlainWay()]))
        )
        plan_memory = room.plan_memory
        as_cuda = lambda *args, **more: plan_memory(*args, **{**more, "device": "cuda"})  # noqa: E731
        stack.enter_context(mock.patch.object(room, "plan_memory", as_cuda))
    else:
        if not torch.cuda.is_available():
            raise UserError("bench device needs a CUDA device, this machine shows none: run it where there is one")
        card = open_device(device, gpu_memory)
        stack.enter_context(mock.patch.object(loading, "open_device", lambda name, gpu: card))
    assert card is not None, "a device was named"
    free_bytes = available_ram_bytes()
    shape, draft = (TINY, TINY_DRAFT) if is_tiny else (LARGE, LARGE_DRAFT)
    if not is_tiny:
        fitting = int(_HOST_SHARE * free_bytes / shape.layer_bytes)
        shape = shape._replace(num_layers=min(QUICK_LAYERS if is_quick else shape.num_layers, fitting))
        free, each = format_bytes(free_bytes), format_bytes(shape.layer_bytes)
        print(f"{shape.num_layers} layers of {each}; {free} of host memory is free")
    return Setting(
        target=sketch(PAIR / "target", folder / "target", shape),
        draft=sketch(PAIR / "draft", folder / "draft", draft),
        gpu_memory="1116MiB" if is_tiny else gpu_memory,
        ram_bytes=int(0.95 * free_bytes),
        sizes=(1, 8, 24) if is_tiny else SIZES,
        hidden_size=24 if is_tiny else 768,
        trees=("none", "sequences:4x4", "24x8") if is_tiny else TREES,
        num_new=6 if is_tiny else 96,
        num_gate=6 if is_tiny else 200,
        num_soak=3 if is_tiny else 30,
        draft_s=1.5 if is_tiny else 6.0,
        card=card,
    )


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("device")
