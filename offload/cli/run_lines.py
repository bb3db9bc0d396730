"""Lines about a run: what runs, where and how fast to expect it; then its speed and memory."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload.calibration.trial import ComparisonOutcome, used
from offload.stats import Stats
from offload.units import format_bytes, plural

if TYPE_CHECKING:  # `offload --help` must not wait for what they import
    from offload.engine.decoder import Decoder
    from offload.memory.plan import MemoryPlan
    from offload.planning.choice import TreeChoice
    from offload.planning.cost_model import Prediction

_CHOICES_SHOWN = 2


def draft_name(draft: str | os.PathLike[str] | None) -> str | None:
    """Return the name of a draft in lines: the last parts of the paths it was named by, if any."""
    from offload.planning.quantised_drafts import copy_and_scout

    parts = () if draft is None else filter(None, copy_and_scout(draft))
    return "+".join(Path(part).absolute().name for part in parts) or None


def opening_lines(
    model: str,
    draft: str | None,
    decoder: "Decoder",
    choice: "TreeChoice | None",
    *,
    is_decimal: bool = False,
) -> str:
    """Return lines on slow parts, on the models and their places, and on the speed to expect.

    Models are named as the user named them. Where texts choose their own trees, no choice is
    reported.
    """
    # memory was reported before loading
    notes = [note for note in decoder.notes if not note.startswith("`ram` ")]
    lines = [*notes, place_line(model, decoder.plan, is_decimal=is_decimal)]
    sources = str(decoder.sources)
    if draft and choice and choice.shape.num_nodes > 1:
        # a common name for the folder of weights
        called = draft if draft == "draft" else f"draft {draft}"
        lines.append(f"{called}{sources and f' with {sources}'}, {_expectation(choice)}")
    elif choice and choice.shape.num_nodes > 1:
        lines.append(f"no draft: up to {choice.shape.num_nodes - 1} guesses a pass by {sources}")
    return "\n".join(lines)


def place_line(name: str, plan: "MemoryPlan", *, is_decimal: bool = False) -> str:
    """Return a line with the places of the layers and the bytes that a sweep moves."""
    from offload.memory.tiers import LayerTier

    num_layers = len(plan.layer_bytes)
    moved = format_bytes(plan.streamed_bytes, is_decimal=is_decimal)
    if plan.gpu_bytes is not None:
        num_host = plan.num_layers_in(LayerTier.PINNED)
        num_disk = plan.num_layers_in(LayerTier.DISK)
        where = f"{plan.num_resident} of {num_layers} layers on the GPU, {num_host} in RAM, {num_disk} on disk"
        return f"{name}: {where}" + (f"; {moved} a pass" if plan.num_layer_slots else "")
    budget = format_bytes(plan.ram_bytes, is_decimal=is_decimal)
    layers = f"{plan.num_resident} of {num_layers} layers"
    where = f"{layers} in RAM ({budget} allowed), {moved} a pass from disk"
    if plan.has_experts:
        experts = f"{plan.num_kept_experts:,} of {plan.num_experts:,} experts and {layers}"
        where = f"{experts} around them in RAM ({budget} allowed), others come as they are needed"
    elif not plan.num_layer_slots:
        where = f"all {num_layers} layers fit into RAM ({budget} allowed), nothing is streamed"
    return f"{name}: {where}"


def _expectation(choice: "TreeChoice") -> str:
    """Return the tree and the speed to expect from it."""
    from offload.planning.knowledge import Provenance  # it imports numpy
    from offload.trees.spec import label_of

    speed = f"{choice.tokens_per_sweep:.1f} tokens a pass expected"
    if choice.candidates:
        speed = f"{1 / choice.candidates[0].s_per_token:.2f} tokens/s"
        # for a usual draft, and as if nothing else used the machine
        is_measured = choice.acceptance is Provenance.MEASURED
        speed = f"{speed} expected" if is_measured else f"at best {speed}"
    tree = f"tree {label_of(choice.shape)}"
    return f"{tree}, {speed}"


def detail_lines(decoder: "Decoder", choice: "TreeChoice | None") -> str:
    """Return threads, slots, kernels, and the reason for this tree."""
    plan = decoder.plan
    modes = decoder.threads.start
    threads = plural(modes.sweep.num_threads, "compute thread")
    if modes.draft.num_threads != modes.sweep.num_threads:
        threads += f", {modes.draft.num_threads} for drafting"
    slots = (
        f"streamed layers pass through {plan.num_layer_slots} slots; "
        if plan.num_layer_slots
        else ""
    )
    lines = [f"{slots}{threads}"]
    if decoder.comparisons:
        lines.append(kernel_line(decoder.comparisons))
    if choice:
        lines.append(choice_lines(choice))
    return "\n".join(lines)


def kernel_line(outcomes: Sequence[ComparisonOutcome]) -> str:
    """Return which kernels and expansions of weights run here, and why others do not."""
    reasons = {outcome.kernel: outcome.reason for outcome in outcomes if outcome.reason}
    running = ", ".join(kernel for kernel, is_used in used(outcomes).items() if is_used) or "none"
    left_out = ", ".join(f"{kernel} ({reason})" for kernel, reason in reasons.items()) or "none"
    return f"kernels: {running}; left out: {left_out}"


def choice_lines(choice: "TreeChoice") -> str:
    """Return which tree is used and why; a chosen one is compared with the next best."""
    tree = _tree_words(choice.shape.num_nodes, choice.shape.depth, choice.is_dynamic)
    first = f"{tree}: {choice.why}"
    return "\n".join([first, *candidate_rows(choice.candidates[:_CHOICES_SHOWN])])


def _tree_words(num_nodes: int, depth: int, is_dynamic: bool) -> str:
    if not depth:
        return "no tree"
    return f"{'dynamic tree of at most' if is_dynamic else 'tree of'} {plural(num_nodes, 'node')}, {depth} deep"


def candidate_rows(candidates: Sequence["Prediction"]) -> list[str]:
    """Return the predictions for the best few trees."""
    return [
        f"  {c.label:>14}: {c.tokens_per_sweep:5.2f} tokens in {c.step.total_s:.3f} s, "
        f"{c.s_per_token:.4f} s/token, {c.step.limit}-bound"
        for c in candidates
    ]


def closing_lines(
    stats: Stats, plan: "MemoryPlan", own_bytes: int, *, is_decimal: bool = False
) -> str:
    """Return speed, tokens a pass, link and memory; the program had `own_bytes` before loading."""
    if stats.num_new_tokens == 0:
        return "no tokens generated"
    first = f"{plural(stats.num_new_tokens, 'token')}, the first after {stats.ttft_s:.2f} s"
    memory = memory_line(stats, plan, own_bytes, is_decimal=is_decimal)
    if not stats.num_sweeps or not stats.tpot_s:
        return f"{first}\n{memory}"
    if stats.runs:
        count = Counter(kind for _, kind, _, _ in stats.runs)
        runs = f"{plural(count['issued'], 'run')}, {count['cancelled']} cancelled"
        return f"{first}; then {stats.tokens_per_s:.2f} tokens/s ({runs})\n{memory}"
    tree = _tree_words(stats.tree_num_nodes, stats.tree_depth, stats.is_tree_dynamic)
    speed = f"{stats.tokens_per_s:.2f} tokens/s, {stats.tokens_per_sweep:.2f} tokens a pass"
    lines = [f"{first}; then {speed} ({plural(stats.num_sweeps, 'pass')}, {tree})", memory]
    if stats.bytes_streamed:
        waited = f"{stats.stall_s / stats.sweep_s:.0%} of a pass is waiting for it"
        link = f"link {stats.link_bytes_per_s / 1e9:.2f} GB/s, {waited}"
        if stats.expert_hit_rate is not None:
            link += f"; {stats.expert_hit_rate:.0%} of the experts that were needed were there"
        lines.insert(1, link)
    return "\n".join(lines)


def alpha_line(stats: Stats) -> str:
    """Return a line on how well draft and target agreed, empty where that is unknown."""
    if stats.alpha is None:
        return ""
    error = stats.alpha.standard_error
    doubt = "" if error is None else f"±{error:.3f}"
    positions = plural(stats.alpha.count, "position")
    return f"alpha {stats.alpha.mean:.3f}{doubt}, the chance of a first guess, by {positions}"


def memory_line(
    stats: Stats, plan: "MemoryPlan", own_bytes: int, *, is_decimal: bool = False
) -> str:
    """Return the most memory that was held, and its limit: of the budget, and of the program."""
    sizes = (stats.peak_rss_bytes, plan.ram_bytes, own_bytes, stats.peak_device_bytes)
    peak, budget, base, on_gpu = (format_bytes(size, is_decimal=is_decimal) for size in sizes)
    allowed = format_bytes(plan.ram_bytes + own_bytes, is_decimal=is_decimal)
    line = f"peak memory {peak}; allowed {allowed} = {budget} (--ram) + {base} for Python"
    return f"{line}; {on_gpu} on the GPU" if stats.peak_device_bytes else line


def clipped_line(asked: int, num_new: int, num_prompt: int, plan: "MemoryPlan") -> str:
    """Return a line on requested tokens that exceed the room; empty if they fit."""
    if num_new >= asked or asked == sys.maxsize:
        return ""
    room = f"the context of {plan.context} has no more room"
    behind = f"behind a prompt of {plural(num_prompt, 'token')}"
    return f"at most {num_new} new tokens and not {asked}: {room} {behind}{_longer(plan)}"


def fills_context(stats: Stats, plan: "MemoryPlan") -> bool:
    """Return True if a text uses all the room there is."""
    return stats.num_prompt_tokens + stats.num_new_tokens >= plan.context


def cut_line(stats: Stats, finish_reason: str, plan: "MemoryPlan") -> str:
    """Return a line on what cut a text short; empty if it came to its end."""
    if finish_reason != "length" or not stats.num_new_tokens:
        return ""
    if fills_context(stats, plan):
        return f"the text is cut off where the context of {plan.context} ends{_longer(plan)}"
    num = plural(stats.num_new_tokens, "token")
    return f"the text is cut off after {num}: -n -1 writes as many as the context has room for"


def _longer(plan: "MemoryPlan") -> str:
    longest = ", the longest that this model is run with"
    return longest if plan.has_longest_context else ": --context N makes it longer"


def turn_line(stats: Stats, finish_reason: str) -> str:
    """Return a line on an answer's time, and on the tokens that were read again for it."""
    ending = {"interrupted": ", stopped", "length": ", cut off by its limit"}.get(finish_reason, "")
    speed = ""
    if stats.tpot_s:
        speed = f", {stats.tokens_per_s:.2f} tokens/s, {stats.tokens_per_sweep:.2f} tokens a pass"
    num_read = stats.num_prompt_tokens - stats.num_kept_tokens
    read = f"{num_read} of the prompt's {plural(stats.num_prompt_tokens, 'token')} read"
    new = f"{plural(stats.num_new_tokens, 'token')}{ending}"
    return f"({new}, the first after {stats.ttft_s:.1f} s{speed}; {read})"
