"""A 70B-shaped target beside a 7B-shaped draft on one card: each promise of the device path beside its ceiling.

    python -m offload.bench.device --quick          # 18 layers, minutes
    python -m offload.bench.device --gpu-mem 40GiB  # as many of 80 layers as host memory holds

The pair is the packaged one, inflated in host memory (`giant.py`), so trees have real acceptance and every token can be
proved against the small original. Nothing is timed before the gate has passed.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer

from offload import loading
from offload.arena import Arena, open_arena
from offload.audit import draw_gaps
from offload.bench.gate import draws_hold
from offload.bench.giant import Shape, giants, sketch
from offload.bench.host_device import HostDevice, PlainWay
from offload.bench.peers_on_device import accelerate_s
from offload.calibrate import copy_bytes_per_s
from offload.checkpoint import read_json
from offload.config import Sampling, format_bytes, parse_size
from offload.decode import Decoder
from offload.demo import PAIR, PROMPT
from offload.device import Device, open_device
from offload.device_stream import DeviceStream
from offload.drafters.lm import ModelDrafter
from offload.duel import rows_of
from offload.errors import UserError
from offload.machine import available_ram_bytes
from offload.plan import MemoryPlan, Tier
from offload.probe import draft_curve
from offload.topology import DEFAULT_ACCEPTANCE, best_first
from offload.tree import TokenTree

Row = dict[str, Any]

LARGE = Shape(width_factor=64, layer_bytes=1_711_000_000, num_layers=80)  # Llama-2-70B's bytes and products per layer
LARGE_DRAFT = Shape(width_factor=16, layer_bytes=405_000_000, num_layers=32)  # Llama-2-7B's
TINY, TINY_DRAFT = Shape(4, 4_000_000, 8), Shape(4, 1_000_000, 3)
QUICK_LAYERS = 18
CONTEXT = 768
SIZES = (1, 64, 256, 768, 1024, 2048, 4096)
TREES = ("none", "sequences:16x48", "768x24")
_HOST_SHARE = 0.8  # of what is free, to the target's layers
_ROUNDS = 3


@dataclass(frozen=True)
class Setting:
    """One run of the bench."""

    target: Path
    draft: Path
    gpu_memory: str
    ram_bytes: int
    sizes: Sequence[int]
    trees: Sequence[str]
    num_new: int
    num_soak: int  # sweeps
    draft_s: float  # time for the draft's curve
    card: Device

    @contextmanager
    def open(self, target: Path, draft: Path, **options: Any) -> Iterator[Decoder]:
        """A decoder on the card."""
        how = {"gpu_memory": self.gpu_memory, "ram": self.ram_bytes, "device": "auto", "profile": "none", **options}
        with giants(), offload_load(target, draft, context=CONTEXT, threads=None, **how) as decoder:
            yield decoder


def offload_load(target: Path, draft: Path, **options: Any) -> Decoder:
    """`offload.load`, by the module that the stand-ins are put into."""
    return loading.load(target, draft, **options)


def gate(setting: Setting) -> Row:
    """float32, every layer streamed: the ids that transformers computes on the same device."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(PAIR / "target")(PROMPT, return_tensors="pt")["input_ids"]
    place = setting.card.place
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).to(place).eval()
    out = model.generate(ids.to(place), max_new_tokens=setting.num_new, do_sample=False)[0, ids.shape[1] :].tolist()
    plan_memory = loading.plan_memory

    def streamed(*args: Any, **more: Any) -> MemoryPlan:
        plan = plan_memory(*args, **more)
        sizes: dict[str, Any] = {"slot_bytes": max(plan.layer_bytes), "num_slots": 2}
        return replace(plan, tier_L=(Tier.HOST,) * len(plan.layer_bytes), num_host_slots=0, **sizes)

    with (
        mock.patch.object(loading, "plan_memory", streamed),
        setting.open(PAIR / "target", PAIR / "draft", tree="64x16", dtype="float32") as decoder,
    ):
        for tree in ("none", "64x16"):
            ours = decoder.generate(ids[0].tolist(), max_new_tokens=setting.num_new, tree=tree).token_ids
            assert ours == out[: len(ours)] and ours, f"{tree}: not the ids of transformers, so nothing is timed"
    return row("gate: float32 greedy ids equal transformers", len(out), 1.0, 1.0, "tokens")


class Rates(NamedTuple):
    """What this machine gives, measured with nothing else in memory."""

    copy_bytes_per_s: float  # page-locked host memory to the card, a layer at a time
    flops_per_s: float  # the target's own largest matrix
    memory_bytes_per_s: float  # of the card, read and written


def measure_rates(setting: Setting, layer_bytes: int) -> tuple[Row, Rates]:
    """The ceilings; what they needed is given back before a model is loaded."""
    name, copy_bytes_per_s = _copy_rate(setting, layer_bytes)
    rates = Rates(copy_bytes_per_s, _flops_rate(setting), _memory_rate(setting))
    if setting.card.place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.card.place)
    return {**row(name, copy_bytes_per_s / 1e9, None, None, "GB/s"), **rates._asdict()}, rates


def _copy_rate(setting: Setting, num_bytes: int) -> tuple[str, float]:
    card, arena = setting.card, loading.open_arena(setting.card.place)
    rate = copy_bytes_per_s(card, arena.allocate(num_bytes).array)
    name = f"copies of {format_bytes(num_bytes)}: {arena.note or 'page-locked'}"
    arena.close()
    return name, rate


def _flops_rate(setting: Setting) -> float:
    config, place = read_json(setting.target / "config.json"), setting.card.place
    weight = torch.randn(config["intermediate_size"], config["hidden_size"], device=place, dtype=torch.bfloat16)
    rows = torch.randn(2048 if place.type == "cuda" else 64, weight.shape[1], device=place, dtype=torch.bfloat16)
    seconds = [timed(setting, lambda: torch.nn.functional.linear(rows, weight)) for _ in range(8)]
    return 2 * len(rows) * weight.numel() / statistics.median(seconds[3:])


def _memory_rate(setting: Setting) -> float:
    size = (1 << 30) if setting.card.place.type == "cuda" else (16 << 20)
    one, two = (torch.zeros(size, dtype=torch.uint8, device=setting.card.place) for _ in range(2))
    return 2 * size / statistics.median([timed(setting, lambda: two.copy_(one)) for _ in range(8)][3:])


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
        yield row(f"sweep of {size} rows against {name}", taken_s, ceiling_s, limit, "s")


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
        row(f"draft step of {width} rows against reading its weights", seconds, least_s, 1.5, "s")
        for width, seconds in zip(curve.sizes, curve.seconds, strict=True)
    ]


def trees(setting: Setting, decoder: Decoder, rates: Rates) -> list[Row]:
    """Tokens per sweep and seconds per token, every token proved against the small original."""
    link_s, out = moved_bytes(decoder) / rates.copy_bytes_per_s, []
    prompt_ids = decoder.encode(PROMPT, raw=True)
    for tree in setting.trees:
        num_new = setting.num_new if tree != "none" else max(4, setting.num_new // 8)
        result = decoder.generate(PROMPT, max_new_tokens=num_new, tree=tree)
        draws_hold(draw_gaps(PAIR / "target", prompt_ids, result.token_ids, Sampling()), Sampling())
        stats = result.stats
        num_sweeps = max(1, stats.num_sweeps)
        draft_s, stall_s = stats.draft_s / num_sweeps, stats.stall_s / num_sweeps
        step_s = draft_s + (stats.sweep_s + stats.verify_s) / num_sweeps
        slower_s = max(link_s, stats.sweep_s / num_sweeps - stall_s, draft_s)
        more = {"s_per_token": stats.tpot_s, "tokens_per_sweep": stats.tokens_per_sweep}
        name = f"{tree}: draft and sweep against the slower side"
        out.append({**row(name, step_s, slower_s, 1.15, "s"), **more, "draft_s": draft_s, "stall_s": stall_s})
    return out


def soak(setting: Setting, decoder: Decoder) -> Row:
    """Sweep after sweep with NaN in every slot that is free: the same scores each time."""
    stream = decoder.target.stream
    assert isinstance(stream, DeviceStream), "the bench streams to a device"
    stream._poison_released = True
    size = setting.sizes[1]
    tree = TokenTree(best_first(DEFAULT_ACCEPTANCE, size, 12), torch.arange(size) + 3)
    decoder.begin(Sampling(), decoder.rule)
    wanted = decoder.target.score(tree, [5, 6, 7]).whole()
    num_same = 0
    for _ in range(setting.num_soak):
        decoder.target.reset()
        num_same += int(torch.equal(decoder.target.score(tree, [5, 6, 7]).whole(), wanted))
    stream._poison_released = False
    assert not wanted.isnan().any(), "a slot was read before its layer had arrived"
    return row("soak: sweeps with poisoned slots that repeat their scores", num_same, setting.num_soak, 1.0, "sweeps")


def memory(setting: Setting, decoder: Decoder) -> list[Row]:
    """Peaks beside budgets."""
    stream = decoder.target.stream
    assert isinstance(stream, DeviceStream), "the bench streams to a device"
    held = sum(stream._layouts[layer].slab_bytes for layer in stream._of_host)
    peak, budget = setting.card.peak_bytes(), parse_size(setting.gpu_memory, "--gpu-mem")
    return [
        row("device memory at its peak against --gpu-mem", peak / 2**30, budget / 2**30, 1.0, "GiB"),
        row("page-locked bytes against layers held", stream._arena.pinned_bytes / 2**30, held / 2**30, 1.02, "GiB"),
    ]


def row(name: str, value: float, ceiling: float | None, limit: float | None, unit: str) -> Row:
    """A figure beside its ceiling; `limit` is what their ratio may be at most, where something was promised."""
    ratio = value / ceiling if ceiling else None
    is_met = None if limit is None or ratio is None else ratio <= limit
    if unit in ("tokens", "sweeps"):  # of counts as many as possible
        is_met = ratio is None or ratio >= 1.0
    figures = {"value": value, "unit": unit, "ceiling": ceiling, "ratio": ratio}
    return {"row": name, **figures, "at_most": limit, "is_met": is_met}


def timed(setting: Setting, work: Callable[[], object]) -> float:
    """Seconds of work on the compute stream."""
    card = setting.card
    card.synchronize(card.record(card.compute))
    started = time.perf_counter()
    work()
    card.synchronize(card.record(card.compute))
    return time.perf_counter() - started


def measure(setting: Setting, layer_bytes: int) -> Iterator[Row]:
    """All rows, each as soon as it is known."""
    yield gate(setting)
    first, rates = measure_rates(setting, layer_bytes)
    yield first
    with setting.open(setting.target, setting.draft, tree=f"{max(setting.sizes)}x24") as decoder:
        plan = decoder.plan
        yield {**row("layers", len(plan.layer_bytes), None, None, ""), "notes": decoder.notes, "plan": plan.as_dict(),
               "kernels": rows_of(decoder.duels)}  # fmt: skip
        yield from sweeps(setting, decoder, rates)
        yield from drafting(setting, decoder, rates)
        rows = trees(setting, decoder, rates)
        yield from rows
        yield soak(setting, decoder)
        yield from memory(setting, decoder)
        peer_s = accelerate_s(decoder, setting.card)
        best_s = min(one["s_per_token"] for one in rows)
        yield row("accelerate, CPU offload, one token", peer_s, None, None, "s")
        yield {**row("best tree against accelerate (s/token)", best_s, peer_s, 0.1, "s"), "times": peer_s / best_s}


def print_row(one: Row) -> None:
    """A line of the table."""
    value = f"{one['value']:10.4g} {one['unit']:6}"
    beside = f"ceiling {one['ceiling']:9.4g}  ratio {one['ratio']:6.3f}" if one.get("ratio") else ""
    verdict = {True: "met", False: "MISSED", None: ""}[one.get("is_met")]
    shown = ("s_per_token", "tokens_per_sweep", "draft_s", "stall_s", "times")
    more = " ".join(f"{key} {one[key]:.4g}" for key in shown if key in one)
    print(f"{one['row'][:70]:70} {value} {beside:34} {verdict:6} {more}".rstrip(), flush=True)


def main(
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_LAYERS} layers instead of all that fit")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="a few megabytes on the CPU: whether the script works")] = False,
    gpu_mem: Annotated[str, typer.Option(help="of the card, so that a large one stands in for a small one")] = "40GiB",
    device: Annotated[str, typer.Option(help="cuda or cuda:N")] = "cuda",
) -> None:
    """Print every row as it is measured, and all of them as JSON on the last line."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            setting = _setting(Path(folder), stack, is_quick=quick, is_tiny=tiny, gpu_memory=gpu_mem, device=device)
        except UserError as error:
            typer.echo(f"bench.device: {error}", err=True)
            raise typer.Exit(2) from None
        rows = []
        for one in measure(setting, (TINY if tiny else LARGE).layer_bytes):
            rows.append(one)
            print_row(one)
        print(json.dumps(rows))


def _setting(folder: Path, stack: ExitStack, *, is_quick: bool, is_tiny: bool, gpu_memory: str, device: str) -> Setting:
    if is_tiny:
        card: Device | None = HostDevice()
        stack.enter_context(mock.patch.object(loading, "open_device", lambda name, gpu: card))
        stack.enter_context(mock.patch.object(loading, "open_arena", lambda place: Arena([PlainWay()])))
        plan_memory = loading.plan_memory
        as_cuda = lambda *args, **more: plan_memory(*args, **{**more, "device": "cuda"})  # noqa: E731
        stack.enter_context(mock.patch.object(loading, "plan_memory", as_cuda))
    else:
        card = open_device(device, gpu_memory)
        stack.enter_context(mock.patch.object(loading, "open_device", lambda name, gpu: card))
        stack.enter_context(mock.patch.object(loading, "open_arena", open_arena))
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
        trees=("none", "sequences:4x4", "24x8") if is_tiny else TREES,
        num_new=6 if is_tiny else 64,
        num_soak=3 if is_tiny else 30,
        draft_s=0.2 if is_tiny else 6.0,
        card=card,
    )


if __name__ == "__main__":
    typer.run(main)
