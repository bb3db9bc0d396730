"""What `offload plan` prints: whether it runs and how fast; with `-v` where each byte and second goes."""

import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial

from offload.checkpoint.sizes import ModelFacts
from offload.cli.terminal import columns
from offload.memory.plan import MemoryPlan
from offload.memory.tiers import LayerTier
from offload.planning.cost_model import Prediction, PromptPass
from offload.planning.hardware import KNOWN
from offload.planning.knowledge import Provenance
from offload.reports.cards import CardsPlan
from offload.reports.drafts import DraftCandidate
from offload.reports.estimate import Estimate
from offload.units import format_bytes

_gb = partial(format_bytes, is_decimal=True)
_LINE_WIDTH = 79
_BAR_WIDTH = 32
_BAR_COLUMN = 48
_LABEL_WIDTH = 10


def answer_lines(
    answer: Estimate,
    drafts: Sequence[DraftCandidate] = (),
    *,
    is_verbose: bool = False,
    is_decimal: bool = False,
) -> str:
    """Return seconds per token as the headline, then its grounds; verbose, all terms."""
    plan = answer.plan
    rows = [("model", model_words(answer.models[0]))]
    for draft in answer.models[1:]:
        rows.append(("draft", f"{model_words(draft)}, stays {_where(plan)}{_but_experts(plan)}"))
    rows.append(("machine", _machine_words(answer, is_decimal)))
    rows.append(("layers", _layers_words(plan)))
    if plan.has_experts and plan.is_streamed:
        rows.append(("experts", _experts_words(answer)))
    if plan.is_streamed:
        rows.append(("a pass", _sweep_words(answer)))
    if answer.prompt:
        rows.append(
            ("prompt", _prompt_words(answer.prompt, is_least=not answer.computing.is_whole))
        )
    if len(answer.predictions) > 1:
        rows.append(("tokens", _tokens_words(answer, is_verbose=is_verbose)))
    rows += _drafts_rows(drafts)
    rows += [("note", note) for note in answer.notes]
    lines = [_headline(answer), "", *(wrapped(*row) for row in rows)]
    if is_verbose:
        lines += ["", plan_picture(plan, is_decimal=is_decimal), *_table(answer.predictions)]
    return "\n".join(lines)


def _but_experts(plan: MemoryPlan) -> str:
    """Return which of a draft's experts come on demand; nothing where all stay."""
    if plan.draft_experts is None:
        return ""
    total = plan.draft_experts.num_records
    left = total - plan.num_kept_draft_experts
    return f", but for {left:,} of {total:,} experts, read when they are needed" if left else ""


def cards_lines(cards_plan: CardsPlan, *, is_decimal: bool = False) -> str:
    """Return the seconds of a pass as the headline, then the models and each card's share."""
    target, *others = cards_plan.models
    way = "shards, which read at once" if cards_plan.is_sharded else "stages, which take turns"
    headline = f"A pass takes at least {seconds_words(cards_plan.pass_s)} seconds, as {way}."
    if not cards_plan.pass_s:
        headline = "All of it stays on the cards: computing alone decides how fast."
    rows = [("model", model_words(target))]
    rows += [("draft", f"{model_words(draft)}, on the first card") for draft in others]
    for card in cards_plan.cards:
        plan = card.plan
        kept_bytes = plan.gpu_total_bytes if card.machine.gpu_bytes else plan.total_bytes
        words = f"{card.share:.0%} of the layers, {format_bytes(kept_bytes, is_decimal=is_decimal)}"
        if plan.streamed_bytes:
            words += f"; {_gb(plan.streamed_bytes)} a pass in {seconds_words(card.link_s)} s"
        rows.append((card.machine.name, words))
    rows += [("note", note) for note in cards_plan.notes]
    rows.append(("note", "computing and exchanges come on top: a run measures them at its start"))
    return "\n".join([headline, "", *(wrapped(*row) for row in rows)])


def _drafts_rows(drafts: Sequence[DraftCandidate]) -> list[tuple[str, str]]:
    """Return all ways to draft, the best first; those that do not work are in `--json` only."""
    rows = list[tuple[str, str]]()
    for candidate in drafts:
        if candidate.prediction is not None:
            words = (
                f"{candidate.label}: {seconds_words(candidate.prediction.s_per_token)} s per token"
            )
            if candidate.draft_bytes:
                words += f" with {_gb(candidate.draft_bytes)}, tree {candidate.prediction.label}"
            rows.append(("" if rows else "drafts", f"{len(rows) + 1}. {words}"))
    if drafts and not rows:
        return [("drafts", "nothing is known of computing here")]
    return [] if len(rows) == 1 else rows  # the headline has this one already


def _headline(answer: Estimate) -> str:
    """Return the sentence on seconds per token, with and without a draft where both are known."""
    if not answer.computing.is_whole and not answer.plan.is_streamed:
        where = _where(answer.plan)
        return f"It runs, and all of it stays {where}: computing alone decides how fast."
    if not answer.predictions:
        return "It runs. How fast is not known yet."
    wanted = answer.predictions[-1]
    plain = answer.predictions[0]
    best = min(plain, wanted, key=lambda prediction: prediction.s_per_token)
    alone = ""
    other = ""
    if wanted is not plain and best is plain:
        alone = " without a draft"
        other = f" ({_seconds_span(wanted)} with it)"
    elif wanted is not plain:
        other = f" ({_seconds_span(plain)} without a draft)"
    least = "" if answer.computing.is_whole else "at least "
    texts = f" over {answer.plan.parallel} texts" if answer.plan.parallel > 1 else ""
    return f"It runs: {least}{_seconds_span(best)} seconds per token{texts}{alone}{other}."


def _span(ends: tuple[float, float], say: Callable[[float], str] = "{:.1f}".format) -> str:
    """Return least and most in words, once if they read the same; tokens unless a format is given."""
    low, high = map(say, ends)
    return low if low == high else f"{low} to {high}"


def _seconds_span(prediction: Prediction) -> str:
    return _span(prediction.s_per_token_range, seconds_words)


def _where(plan: MemoryPlan) -> str:
    return "in memory" if plan.gpu_bytes is None else "on the GPU"


def seconds_words(seconds: float) -> str:
    """Return seconds with two digits, or whole seconds."""
    form = ".0f" if seconds >= 9.95 else ".2g" if seconds >= 0.1 else ".2f"
    return f"{seconds:{form}}"


def model_words(model: ModelFacts) -> str:
    """Return a model and its size, in words."""
    form = "in memory" if model.is_held else "as stored"
    words = (
        f"{model.name}: {_count(model.num_parameters)} parameters, {_gb(model.num_bytes)} {form}"
    )
    left_out = [f"{_gb(num_bytes)} of {part}" for part, num_bytes in model.left_out.items()]
    return f"{words}; left out: {' and '.join(left_out)}" if left_out else words


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _machine_words(answer: Estimate, is_decimal: bool) -> str:
    """Return memory, link and disk of the machine, and whether they are assumed."""
    plan = answer.plan
    hardware = answer.hardware
    size = partial(format_bytes, is_decimal=is_decimal)
    parts = [f"{size(plan.gpu_bytes)} on the GPU"] if plan.gpu_bytes else []
    parts.append(f"{size(plan.ram_bytes)} of memory")
    if hardware and hardware.gpu_bytes:
        parts.append(f"{_gb(hardware.feed_bytes_per_s)}/s to the GPU")
    disk = None if plan.gpu_bytes else answer.link.bytes_per_s
    if hardware:
        disk = hardware.disk_bytes_per_s
    if disk:
        parts.append(
            f"a disk of {_gb(disk)}/s{', measured just now' if answer.link.source is Provenance.MEASURED else ''}"
        )
    if hardware is None:
        return ", ".join(parts)
    usual = KNOWN.get(hardware.name)
    assumed = " (assumed: --ram and --disk-speed say otherwise)" if usual is hardware else ""
    return f"{hardware.name}: {', '.join(parts)}{assumed}"


def _layers_words(plan: MemoryPlan) -> str:
    if not plan.streamed_bytes:
        words = f"all {len(plan.tier_L)} stay {_where(plan)}"
        return words + (", but for routed experts" if plan.has_experts and plan.is_streamed else "")
    come = list[str]()
    for tier, place in ((LayerTier.PINNED, "memory"), (LayerTier.DISK, "the disk")):
        if count := plan.num_layers_in(tier):
            come.append(f"{count} come from {place}")
    stay = f"{plan.num_resident} of {len(plan.tier_L)} stay {_where(plan)}"
    return f"{stay}, {' and '.join(come)} in every pass"


def _experts_words(answer: Estimate) -> str:
    plan = answer.plan
    share = plan.num_kept_experts / plan.num_experts
    words = f"{plan.num_kept_experts:,} of {plan.num_experts:,} stay ({share:.0%})"
    if answer.hit_share is not None:
        words += f", which is {answer.hit_share:.0%} of what a token needs"
    if plan.num_host_expert_slots:
        words += f"; {plan.num_host_expert_slots:,} more in memory"
    return words


def _sweep_words(answer: Estimate) -> str:
    """Return the bytes of a pass, its seconds, and the side that limits it."""
    plan = answer.plan
    words = f"one pass over the weights moves {_gb(answer.sweep_bytes)}"
    if plan.has_experts:
        words = f"a pass for one token moves about {_gb(answer.sweep_bytes)}"
    if plan.pinned_bytes and plan.disk_streamed_bytes:
        words += f", {_gb(plan.disk_streamed_bytes)} of it from the disk"
    if answer.sweep_s is None:
        return words
    if not answer.predictions:
        return f"{words}: {seconds_words(answer.sweep_s)} s"
    limit = answer.predictions[-1].step.limit
    limit = "disk" if limit == "link" and plan.gpu_bytes is None else limit
    decides = (
        "computing is not counted" if answer.computing is Provenance.UNKNOWN else _LIMITS[limit]
    )
    if answer.computing is Provenance.ASSUMED:
        decides += "; of computing only the products of weights count, as timed on this processor"
    return f"{words}: {seconds_words(answer.sweep_s)} s; {decides}"


_LIMITS = {
    "disk": "the disk is the limit",
    "link": "the link to the GPU is the limit",
    "compute": "computing is the limit",
    "draft": "drafting is the limit",
}


def _prompt_words(prompt: PromptPass, *, is_least: bool) -> str:
    form = ".3g" if prompt.tokens_per_s < 1000 else ",.0f"
    speed = f"{prompt.tokens_per_s:{form}} tokens/s"
    took = seconds_words(prompt.pass_s)
    words = f"read at {speed}, in passes of {prompt.rows_per_pass:,} tokens that take {took} s each"
    # on another machine computing is counted for all passes, or for none
    return f"{words}; with computing, as timed on this processor" if is_least else words


def _tokens_words(answer: Estimate, *, is_verbose: bool) -> str:
    best = answer.predictions[-1]
    words = f"{_span(best.tokens_range)} a pass with the tree {best.label}"
    basis = answer.basis if is_verbose else answer.basis.partition(";")[0]
    return words if best.shape.num_nodes == 1 else f"{words}: {basis}"


def _screen_width() -> int:
    """Return the width of the terminal, or a usual width without one."""
    return columns(sys.stdout) if sys.stdout.isatty() else _LINE_WIDTH + 1


def wrapped(label: str, words: str) -> str:
    """Return a label and its text, wrapped to the screen."""
    return textwrap.fill(
        words,
        min(_screen_width(), _LINE_WIDTH),
        initial_indent=f"  {label:<{_LABEL_WIDTH}}",
        subsequent_indent=" " * (_LABEL_WIDTH + 2),
        break_long_words=False,
    )


def _table(predictions: Sequence[Prediction]) -> list[str]:
    columns = f"{'tokens':>7} {'drafting s':>10} {'link left s':>11} {'computing s':>11} {'s/token':>8}  limit"
    return [f"{'':>19} {columns}", *map(_row, predictions)] if predictions else []


def _row(prediction: Prediction) -> str:
    step = prediction.step
    terms = f"{prediction.tokens_per_sweep:>7.2f} {step.draft_s:>10.3f} {step.link_s:>11.3f} {step.compute_s:>11.3f}"
    return f"{prediction.label:>19} {terms} {prediction.s_per_token:>8.3f}  {step.limit}"


def plan_picture(plan: MemoryPlan, *, is_decimal: bool) -> str:
    """Return a row with a bar for each use of memory: first a GPU's, then its host's."""
    num_streamed = len(plan.layer_bytes) - plan.num_resident
    num_experts = plan.num_expert_slots
    positions = f"{plan.context} positions"
    if plan.parallel > 1:
        positions = f"{plan.parallel} x {positions}"
    slots_bytes = plan.num_layer_slots * plan.layer_slot_bytes
    computing = [
        (f"{plan.num_resident} resident layers", plan.resident_bytes),
        (f"{plan.num_layer_slots} slots for {num_streamed} streamed layers", slots_bytes),
        (f"{num_experts:,} slots for experts", num_experts * plan.expert_slot_bytes),
        ("encoder", plan.encoder_bytes),
        ("embeddings and head" if plan.gpu_bytes is None else "norms and head", plan.rest_bytes),
        ("draft with its cache", plan.draft_bytes),
        ("distributions of the draft's guesses", plan.distribution_bytes),
        (f"keys and values, {positions}", plan.kv_bytes),
        (f"activations, {plan.num_nodes} tree nodes", plan.activation_bytes),
    ]
    prompts = ("prompts that were read", plan.prompt_cache_bytes)
    if plan.gpu_bytes is None:
        rows = [*computing, prompts, ("program", plan.runtime_bytes)]
        return _picture(rows, plan.ram_bytes, is_decimal)
    computing.append(("driver and its libraries", plan.gpu_runtime_bytes))
    num_disk = plan.num_layers_in(LayerTier.DISK)
    num_experts = plan.num_host_expert_slots
    slots_bytes = plan.num_host_layer_slots * plan.layer_slot_bytes
    feeding = [
        (f"{plan.num_layers_in(LayerTier.PINNED)} layers in pinned memory", plan.pinned_bytes),
        (f"{plan.num_host_layer_slots} slots for {num_disk} layers from disk", slots_bytes),
        (f"{num_experts:,} slots for experts", num_experts * plan.expert_slot_bytes),
        ("embeddings", plan.table_bytes),
        prompts,
        ("loading", plan.staging_bytes),
        ("program and driver", plan.runtime_bytes),
    ]
    device = _picture(computing, plan.gpu_bytes, is_decimal)
    return f"on the GPU\n{device}\non the host\n{_picture(feeding, plan.ram_bytes, is_decimal)}"


def _picture(rows: Sequence[tuple[str, int]], budget_bytes: int, is_decimal: bool) -> str:
    lines = list[str]()
    most = max(1, min(_BAR_WIDTH, _screen_width() - _BAR_COLUMN))
    free_bytes = max(0, budget_bytes - sum(size for _, size in rows))
    for label, size_bytes in (*rows, ("free", free_bytes)):
        if size_bytes:
            cells = max(1, round(most * size_bytes / budget_bytes))
            size = format_bytes(size_bytes, is_decimal=is_decimal)
            lines.append(f"  {label:<34} {size:>9}  {'█' * min(cells, most)}")
    return "\n".join(lines)
