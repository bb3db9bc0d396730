"""Will it fit, and how fast will it be: the answer of `offload plan`, for any machine.

Headers tell what lies where. Rates come from `--hardware`, or on this machine from the link,
measured here and now, and from a profile of `offload tune`; where only the link is known, and
perhaps how fast this processor multiplies, a prediction is a lower bound and says so. Tokens per
pass are a range, from pairs that papers measured, where this pair was not.

Invariant: no weights are fetched, and none are read except in the .3 s that measure the link, and a
few pieces whose exponents tell what packing would win. No torch except for a GPU, for the speed of
products, or to count a model that only torch can build.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.open import ReadHeaders
from offload.checkpoint.sizes import ModelFacts, model_shape
from offload.engine.resolve import resolve
from offload.engine.setup import Setup
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.packing.forecast import BesideForecast, PackingForecast, as_beside, as_packed, forecast
from offload.planning.budget import prompt_costs
from offload.planning.cost_model import (
    NOTHING,
    Costs,
    Curve,
    Prediction,
    PromptPass,
    Traffic,
    link_alone,
    prompt_pass,
    step_time,
)
from offload.planning.hardware import Assumptions, Hardware
from offload.planning.load_options import LoadOptions
from offload.planning.selector import RunSettings, TreeSelector
from offload.trees.spec import MAX_TREE_NODES, label_of
from offload.trees.topology import Shape, chain
from offload.units import format_bytes


class Estimate(NamedTuple):
    """What is known before anything is loaded."""

    models: tuple[ModelFacts, ...]  # the target, and the draft if there is one
    plan: MemoryPlan
    hardware: Hardware | None  # None for this machine
    # measured, or as given; None where neither is known, infinite where nothing streams to a GPU
    link_bytes_per_s: float | None
    # without a tree, then with the wanted one; empty where no rate is known
    predictions: tuple[Prediction, ...]
    # whether computing is left out of the predictions, because its rates are not known
    is_link_alone: bool
    # whether they leave out all, or all but the products of weights, that a pass computes
    is_lower_bound: bool
    basis: str  # what the tokens per pass rest on, in words
    notes: tuple[str, ...]
    is_measured: bool  # whether the link was measured here and now
    packing: PackingForecast | None  # None where there is nothing to pack
    traffic: Traffic  # bytes that the plan moves
    # the largest pass over a prompt; None where computing is not known, or nothing streams
    prompt: PromptPass | None

    @property
    def sweep_bytes(self) -> int:
        """Bytes that one pass moves; with experts on demand, what one token may need."""
        experts = self.traffic.experts
        return self.plan.streamed_bytes + (round(experts.link_bytes_at(1)) if experts else 0)

    @property
    def sweep_s(self) -> float | None:
        """Seconds that moving these bytes takes, None where the link is not known."""
        if self.link_bytes_per_s is None:
            return None
        return self.traffic.bytes_at(1) / self.link_bytes_per_s

    @property
    def hit_share(self) -> float | None:
        """Share of a token's experts that are kept; None where experts come with their layers."""
        experts = self.traffic.experts
        return experts and experts.hit_share(1)

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        seconds = self.predictions[-1].s_per_token_range if self.predictions else None
        return {
            "fits": True,
            "s_per_token_range": seconds,
            "is_link_alone": self.is_link_alone,
            "is_lower_bound": self.is_lower_bound,
            "models": models_told(self.models),
            **self.plan.as_dict(),
            "bytes_per_sweep": self.sweep_bytes,
            **({} if self.hit_share is None else {"expert_hit_share": self.hit_share}),
            "link_bytes_per_s": None
            if self.link_bytes_per_s == math.inf
            else self.link_bytes_per_s,
            "sweep_s": self.sweep_s,
            "hardware": self.hardware.name if self.hardware else None,
            "predictions": [prediction.as_dict() for prediction in self.predictions],
            "basis": self.basis,
            "prompt": self.prompt and self.prompt.as_dict(),
            "packing": self.packing and self.packing.as_dict(),
            "notes": list(self.notes),
        }


def facts_of(setup: Setup) -> tuple[ModelFacts, ...]:
    """Return the facts of the target, and of the draft if there is one."""
    names = map(str, filter(None, (setup.options.model, setup.options.draft)))
    return tuple(map(ModelFacts.from_checkpoint, names, filter(None, setup.files)))


def models_told(models: Sequence[ModelFacts]) -> dict[str, dict[str, object]]:
    """Return the figures of the target, and of the draft if there is one, for `--json`."""
    return {
        role: summary._asdict() for role, summary in zip(("target", "draft"), models, strict=False)
    }


def estimate(
    options: LoadOptions,
    hardware: str | None = None,
    disk_speed: str | int | None = None,
    *,
    tokens_per_sweep: float | None = None,
    has_packing: bool = True,
    read: ReadHeaders | None = None,
) -> Estimate:
    """Plan and predict. Raises `UserError` for what does not fit or cannot be read.

    Args:
        hardware: name or file of another machine; None is this one.
        disk_speed: bytes per second, such as `3GB`; None measures it here, or takes the machine's.
        tokens_per_sweep: of the named tree; None takes what is known of the pair.
        has_packing: whether to forecast what packing the target would win.
        read: reads headers by name and config; `cache(describe)` where several estimates are of the
            same models.
    """
    assumed = Assumptions.from_flags(hardware, disk_speed)
    has_rates = assumed.hardware is not None or assumed.disk_bytes_per_s is not None
    tree = options.planned_tree(tokens_per_sweep)
    if tokens_per_sweep is not None and not has_rates:
        rule = "`tokens_per_sweep` goes with `hardware` or `disk_speed`"
        raise UserError(f"{rule}; on this machine offload tune measures it")
    setup = replace(resolve(options, assumed=assumed, read=read), tree=tree)
    settings = setup.settings()
    trees = setup.tree_selector(settings.sampling)
    profile, _ = trees.find(*settings)
    link = setup.measure_link(trees.most_nodes) if setup.knows_link else None
    products_s = _products_s(setup)
    costs = trees.settle_link(link, profile, is_here=setup.hardware is None, products_s=products_s)
    plan = setup.plan_for(trees.planned_nodes(*settings))
    # passes of a self draft are no small matter, so the link says nothing
    is_unknown = costs is None and trees.is_copy
    predictions: tuple[Prediction, ...] = ()
    basis = _basis(setup, trees, settings)
    if link is not None and not is_unknown and (costs or plan.is_streamed):
        known = costs or trees.costs or link_alone(link)
        predictions, basis = _predictions(setup, trees, settings, known, plan, tokens_per_sweep)
    traffic = _traffic(setup, trees, plan)
    return Estimate(
        models=facts_of(setup),
        plan=plan,
        hardware=setup.hardware,
        link_bytes_per_s=link,
        predictions=predictions,
        is_link_alone=costs is None and products_s is NOTHING,
        is_lower_bound=costs is None,
        basis=basis,
        notes=(*([_NO_COSTS] if is_unknown else []), *setup.notes, *_notes(setup, link, plan)),
        is_measured=link not in (None, math.inf) and not has_rates,
        packing=_packing(setup, plan.num_nodes, link) if has_packing else None,
        traffic=traffic,
        prompt=_prompt(setup, costs, traffic, plan),
    )


def _packing(
    setup: Setup, num_nodes: int, link_bytes_per_s: float | None
) -> PackingForecast | None:
    """Return the gain of packing the target, None where there is nothing to pack."""
    packing = forecast(setup.files.target)
    if packing is None or not packing.is_worth_it:
        return packing
    packing = packing._replace(beside=_beside(setup, packing, num_nodes, link_bytes_per_s))
    packed = as_packed(setup.files.target, packing)
    # stacks that `by_expert` does not take apart come whole
    if setup.budget.experts == "demand" and model_shape(packed).experts is None:
        return None
    try:
        plan = replace(setup, files=setup.files._replace(target=packed)).plan_for(num_nodes)
    # what weights are expanded into takes room as well
    except UserError:
        return packing
    sweep_s = None
    if link_bytes_per_s is not None:
        sweep_s = Traffic.from_plan(plan, setup.hardware).bytes_at(1) / link_bytes_per_s
    return packing._replace(
        streamed_bytes=round(Traffic.from_plan(plan).bytes_at(1)), sweep_s=sweep_s
    )


def _beside(
    setup: Setup, packing: PackingForecast, num_nodes: int, link_bytes_per_s: float | None
) -> BesideForecast | None:
    """Return the time of a pass beside a copy that drafts; None where that needs more memory."""
    files = as_beside(setup.files.target, packing)
    if files is None:
        return None
    try:
        plan = replace(setup, files=files).plan_for(num_nodes)
    except UserError:
        return None
    traffic = Traffic.from_plan(plan, setup.hardware)
    return BesideForecast(
        model_shape(files.target, setup.dtype).companion_bytes,
        round(Traffic.from_plan(plan).bytes_at(1)),
        None if link_bytes_per_s is None else traffic.bytes_at(1) / link_bytes_per_s,
    )


def _products_s(setup: Setup) -> Curve:
    """Return the seconds of a pass's products on this CPU against its rows, if they were timed."""
    if setup.budget.gpu_bytes is not None or setup.hardware is not None:
        return NOTHING
    costs = prompt_costs(setup.budget, setup.files, MAX_TREE_NODES)
    return NOTHING if costs is None else costs.compute_s


def _basis(setup: Setup, trees: TreeSelector, settings: RunSettings) -> str:
    """Return in words what acceptance rests on; empty without a draft."""
    if not trees.is_ranked:
        return ""
    profile, where = trees.find(*settings)
    if profile is None:
        return where
    return f"profile {where}" if setup.options.profile is None else f"acceptance of {where}"


def _predictions(
    setup: Setup,
    trees: TreeSelector,
    settings: RunSettings,
    costs: Costs,
    plan: MemoryPlan,
    tokens_per_sweep: float | None,
) -> tuple[tuple[Prediction, ...], str]:
    """Return the predictions without a tree and with the wanted one, and what tokens rest on."""
    alone = replace(setup, files=setup.files.alone).minimal_plan
    plain = _predict(setup, trees, costs, alone, chain(0), (1.0, 1.0))
    basis = _basis(setup, trees, settings)
    if not trees.is_ranked or setup.tree.kind == "none":
        return (plain,), basis
    choice = trees.for_run(*settings, num_texts=setup.options.parallel)
    profile, _ = trees.find(*settings)
    tokens, basis = choice.tokens_range(setup.files, setup.dtype, profile, basis)
    if tokens_per_sweep is not None:
        tokens = (tokens_per_sweep, tokens_per_sweep)
        basis = "tokens per pass as given"
    return (plain, _predict(setup, trees, costs, plan, choice.shape, tokens)), basis


def _traffic(setup: Setup, trees: TreeSelector, plan: MemoryPlan) -> Traffic:
    return Traffic.from_plan(plan, setup.hardware).routed_by(trees.routing)


def _prompt(
    setup: Setup, costs: Costs | None, traffic: Traffic, plan: MemoryPlan
) -> PromptPass | None:
    """Return the largest pass over a prompt, by the curves or by the rates that chose its rows."""
    most = plan.max_prompt_rows
    if costs is None and not setup.device.has_own_memory:
        costs = prompt_costs(setup.budget, setup.files, most)
    return prompt_pass(costs, traffic, most) if costs and plan.is_streamed else None


def _predict(
    setup: Setup,
    trees: TreeSelector,
    costs: Costs,
    plan: MemoryPlan,
    shape: Shape,
    tokens: tuple[float, float],
) -> Prediction:
    kind = setup.tree.kind
    label = label_of(shape) if kind == "auto" or shape.num_nodes == 1 else setup.tree.label
    if kind == "auto_chain":
        label = f"chain:{shape.depth}"
    num = setup.options.parallel
    step = step_time(costs, _traffic(setup, trees, plan), shape, num)
    return Prediction(label, shape, step, (num * tokens[0], num * tokens[1]))


def _notes(setup: Setup, link: float | None, plan: MemoryPlan) -> list[str]:
    """Return which GPU this is about, and what the figures leave out."""
    notes = []
    if setup.device.has_own_memory and plan.gpu_bytes is not None:
        gpu = f"{setup.device.torch_device} is a {setup.device.name}, {format_bytes(plan.gpu_bytes)} of it to use"
        notes.append(f"{gpu}; `device` cpu does without")
    if not plan.draft_bytes and plan.is_streamed:
        notes.append(_NO_DRAFT)
    if link is None and plan.is_streamed:
        notes.append(_NO_DISK if plan.gpu_bytes is None else _NO_GPU)
    return notes


_NO_COSTS = "what passes of a copy take is not known here: offload tune measures it, or name a machine by `hardware`"
_NO_DRAFT = (
    "without a draft text that repeats itself yields more, and so does a datastore of its kind"
)
_NO_DISK = "the weights are not here, so the disk was not measured: give `disk_speed`, such as 3GB"
_NO_GPU = "weights or GPU are not here, so nothing was measured: name the machine by `hardware`"
