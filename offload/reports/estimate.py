"""Will it fit, and how fast will it be: the answer of `offload plan`, for any machine.

Headers tell what lies where. Rates come from `--hardware`, or on this machine from the link,
measured here and now, and from a profile of `offload tune`; where only the link is known, a
prediction is a lower bound and says so. Tokens per pass are a range, from pairs that papers
measured, where this pair was not measured. What `offload pack` would win is forecast from the
exponents of a few weights where these lie here. No torch but for a GPU, or to count a model that
only torch can build.

Invariant: no weights are fetched, and none are read but for the 0.3 s that measure the link, and a
few pieces whose exponents tell what packing would win.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from offload.checkpoint.hub import require_one_vocabulary
from offload.checkpoint.sizes import model_shape
from offload.engine.resolve import Assumptions, ReadHeaders, ResolvedRun, resolve
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import MemoryBudget, ModelFiles
from offload.memory.prompt_rows import row_s
from offload.model.headers import describe
from offload.packing.forecast import PackingForecast, as_packed, forecast
from offload.planning.acceptance import prior_for
from offload.planning.cost_model import (
    Costs,
    Curve,
    Prediction,
    PromptPass,
    Traffic,
    link_alone,
    prompt_pass,
    step_time,
)
from offload.planning.hardware import Hardware, find_hardware
from offload.planning.model_facts import ModelFacts
from offload.planning.options import LoadOptions
from offload.planning.profile import Profile, parse_profile
from offload.planning.search import SOURCE, range_for
from offload.planning.selector import TreeChoice, TreeSelector
from offload.trees.spec import TreeSpec, label_of
from offload.trees.topology import Shape, chain
from offload.units import Sampling, format_bytes, parse_rate, require


class Packing(NamedTuple):
    """What `offload pack` would make of the target, and of a weight pass with the same tree."""

    forecast: PackingForecast
    # bytes of one pass; None where packing is not worth it, or needs more memory than there is
    streamed_bytes: int | None
    sweep_s: float | None

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        own = {"bytes_per_sweep": self.streamed_bytes, "sweep_s": self.sweep_s}
        return {**self.forecast._asdict(), "share": self.forecast.share, **own}


def packing_of(
    files: ModelFiles,
    budget: MemoryBudget,
    num_nodes: int,
    hardware: Hardware | None,
    link_bytes_per_s: float | None,
) -> Packing | None:
    """Return what packing the target would win, None where there is nothing to pack."""
    found = forecast(files.target)
    if found is None:
        return None
    if not found.is_worth_it:
        return Packing(found, None, None)
    packed = as_packed(files.target, found)
    # a packed stack of experts comes whole
    if budget.experts == "demand" and model_shape(packed).experts is None:
        return None
    try:
        plan = budget.plan(files._replace(target=packed), num_nodes)
    # what weights are expanded into takes room as well
    except UserError:
        return Packing(found, None, None)
    streamed_bytes = Traffic.of(plan, hardware).bytes_at(1)
    return Packing(
        found,
        round(Traffic.of(plan).bytes_at(1)),
        None if link_bytes_per_s is None else streamed_bytes / link_bytes_per_s,
    )


class Estimate(NamedTuple):
    """What is known before anything is loaded."""

    # the target, and the draft if there is one
    models: tuple[ModelFacts, ...]
    plan: MemoryPlan
    # None for this machine
    hardware: Hardware | None
    # measured, or as given; None where neither is known
    link_bytes_per_s: float | None
    # without a tree, then with the wanted one; empty where no rate is known
    predictions: tuple[Prediction, ...]
    # whether computing is left out of the predictions, because its rates are not known
    is_link_alone: bool
    # what the tokens per pass rest on, in words
    basis: str
    notes: tuple[str, ...]
    # whether the link was measured here and now
    is_measured: bool
    # None where there is nothing to pack
    packing: Packing | None
    # bytes that the plan moves
    traffic: Traffic
    # the largest pass over a prompt; None where computing is not known, or nothing streams
    prompt: PromptPass | None

    @property
    def sweep_bytes(self) -> int:
        """Bytes that one pass moves; with experts on demand, what one token is expected to need."""
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
            "models": {
                role: one._asdict()
                for role, one in zip(("target", "draft"), self.models, strict=False)
            },
            **self.plan.as_dict(),
            "bytes_per_sweep": self.sweep_bytes,
            **({} if self.hit_share is None else {"expert_hit_share": self.hit_share}),
            "link_bytes_per_s": self.link_bytes_per_s,
            "sweep_s": self.sweep_s,
            "hardware": self.hardware.name if self.hardware else None,
            "predictions": [prediction.as_dict() for prediction in self.predictions],
            "basis": self.basis,
            "prompt": self.prompt and self.prompt.as_dict(),
            "packing": self.packing and self.packing.as_dict(),
            "notes": list(self.notes),
        }


def estimate(
    model: str,
    draft: str | None,
    options: LoadOptions,
    *,
    hardware: str | None = None,
    disk_speed: str | int | None = None,
    tokens_per_sweep: float | None = None,
    has_packing: bool = True,
    read: ReadHeaders = describe,
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
    disk_bytes_per_s = parse_rate(disk_speed, "`disk_speed`")
    machine = find_hardware(hardware) if hardware else None
    if machine is not None and disk_bytes_per_s is not None:
        machine = replace(machine, disk_bytes_per_s=disk_bytes_per_s)
    tree = planned_tree(options, draft, tokens_per_sweep)
    if tokens_per_sweep is not None and machine is None and disk_bytes_per_s is None:
        raise UserError(
            "`tokens_per_sweep` goes with `hardware` or `disk_speed`; on this machine offload tune measures it"
        )
    assumed = Assumptions(machine, disk_bytes_per_s, read)
    run = replace(resolve(model, draft, options, assumed=assumed), tree=tree)
    is_copy = run.files.draft is not None and run.files.draft.is_copy
    if run.files.draft is not None and not is_copy:
        require_one_vocabulary(run.files.target, run.files.draft)
    settings = run.settings(profiled_sampling(options))
    trees = run.trees(settings.sampling)
    profile, where = trees.find(*settings)
    link = run.measure_link() if run.knows_link else None
    costs = _settle_costs(run, trees, profile, link)
    plan = run.plan_for(trees.nodes_to_plan(*settings))
    predictions: tuple[Prediction, ...] = ()
    basis = "" if draft is None else _basis(options, profile, where)
    # passes of a self draft are no small matter, so the link says nothing
    is_unknown = costs is None and is_copy
    if link is not None and not is_unknown and (costs or plan.is_streamed):
        known = costs or link_alone(link)
        alone = run.budget.plan(ModelFiles(run.files.target), 1)
        predictions = (_predict(run, trees, known, alone, chain(0), (1.0, 1.0)),)
        if draft is not None and tree.kind != "none":
            choice = trees.for_run(*settings, num_texts=options.parallel)
            tokens, basis = tokens_of(run.files, run.options.dtype, choice, profile, basis)
            if tokens_per_sweep is not None:
                tokens = (tokens_per_sweep, tokens_per_sweep)
                basis = "tokens per sweep as given"
            predictions += (_predict(run, trees, known, plan, choice.shape, tokens),)
    names = filter(None, (model, draft))
    traffic = _traffic(run, trees, plan)
    return Estimate(
        models=tuple(map(ModelFacts.of, names, filter(None, run.files))),
        plan=plan,
        hardware=machine,
        link_bytes_per_s=link,
        predictions=predictions,
        is_link_alone=costs is None,
        basis=basis,
        notes=(*([_NO_COSTS] if is_unknown else []), *run.notes, *_notes(run, link, plan)),
        is_measured=link is not None and machine is None and disk_bytes_per_s is None,
        packing=packing_of(run.files, run.budget, plan.num_nodes, machine, link)
        if has_packing
        else None,
        traffic=traffic,
        prompt=_prompt(run, costs, traffic, plan),
    )


def planned_tree(
    options: LoadOptions, draft: str | None, tokens_per_sweep: float | None
) -> TreeSpec:
    """Return the tree to plan for.

    Raises `UserError` for a tree without a draft, and for a yield that belongs to no one tree.
    """
    tree = options.tree_spec(has_draft=draft is not None)
    # what guesses yield depends on the text, and by themselves they take no room that there is not
    if draft is None:
        rule = "`tree` needs a `draft` to be planned for"
        require(
            tree.is_chosen or tree.kind == "none",
            rule,
            repr(options.tree),
            "give `draft`, or leave `tree` out",
        )
        tree = TreeSpec("none")
    if tokens_per_sweep is not None:
        rule = "`tokens_per_sweep` must be 1 or more"
        remedy = "a sweep yields one token at least"
        require(tokens_per_sweep >= 1, rule, tokens_per_sweep, remedy)
        if tree.is_chosen or tree.kind == "none":
            raise UserError(
                f"`tokens_per_sweep` {tokens_per_sweep:g} belongs to one tree: name it, such as `tree` 128x20"
            )
    return tree


def profiled_sampling(options: LoadOptions) -> Sampling:
    """Return the settings that the named profile is for; greedy ones where none is named."""
    if options.profile is None or options.has_no_profile:
        return Sampling()
    own = parse_profile(Path(options.profile)).identity
    return Sampling(temperature=own.temperature, top_p=own.top_p, top_k=own.top_k)


def _settle_costs(
    run: ResolvedRun, trees: TreeSelector, profile: Profile | None, link: float | None
) -> Costs | None:
    """Tell `trees` what is known without measuring, and return the costs of a step.

    They are None where nothing is known of computing. Then trees are no larger than memory has
    room for, and weighed only where each row asks for bytes of its own.
    """
    if run.hardware is None:
        trees.link_bytes_per_s = link
        trees.has_own_times = link is not None
    costs = trees.costs_of(profile)
    if costs is None:
        trees.costs = link_alone(link) if link and run.plan_for(1).has_experts else None
        trees.max_nodes = trees.most_nodes if run.tree.is_chosen else trees.max_nodes
    return costs


def _basis(options: LoadOptions, profile: Profile | None, where: str) -> str:
    """Return in words what acceptance rests on."""
    if profile is None:
        return where
    return f"profile {where}" if options.profile is None else f"acceptance of {where}"


def _traffic(run: ResolvedRun, trees: TreeSelector, plan: MemoryPlan) -> Traffic:
    return Traffic.of(plan, run.hardware).routed_by(trees.routing)


def _prompt(
    run: ResolvedRun, costs: Costs | None, traffic: Traffic, plan: MemoryPlan
) -> PromptPass | None:
    """Return the largest pass over a prompt, by the curves or by the rates that chose its rows."""
    rates = run.budget.rates
    most = plan.max_prompt_rows
    if rates is not None and costs is None and run.device is None:
        seconds = most * row_s(model_shape(run.files.target, run.options.dtype), rates.flops_per_s)
        costs = replace(
            link_alone(rates.link_bytes_per_s),
            compute_s=Curve((1, most), (seconds / most, seconds)),
        )
    return prompt_pass(costs, traffic, most) if costs and plan.is_streamed else None


def tokens_of(
    files: ModelFiles, dtype: str, choice: TreeChoice, profile: Profile | None, basis: str
) -> tuple[tuple[float, float], str]:
    """Return the least and most tokens per pass of a tree for this pair, and what they rest on."""
    tokens = (choice.tokens_per_sweep, choice.tokens_per_sweep)
    usual = prior_for(files.draft)
    if profile is None and usual.is_copy:
        return tokens, f"{usual.source}, no measurement of this one" + (
            f"; {basis}" if basis else ""
        )
    if profile is None:
        target, draft = (model_shape(one, dtype).num_weights for one in filter(None, files))
        like = range_for(draft / target)
        why = f"a range, as measured for {' and '.join(like.pairs)} ({SOURCE})"
        tokens = like.of(choice.tokens_per_sweep)
        basis = f"{why}; {basis}" if basis else why
    is_guess = choice.is_dynamic and not (profile and profile.dynamic_yields)
    return tokens, basis + (_AS_STATIC if is_guess else "")


def _predict(
    run: ResolvedRun,
    trees: TreeSelector,
    costs: Costs,
    plan: MemoryPlan,
    shape: Shape,
    tokens: tuple[float, float],
) -> Prediction:
    kind = run.tree.kind
    label = label_of(shape) if kind == "auto" or shape.num_nodes == 1 else run.tree.label
    if kind == "auto_chain":
        label = f"chain:{shape.depth}"
    num = run.options.parallel
    step = step_time(costs, _traffic(run, trees, plan), shape, num)
    return Prediction(label, shape, step, (num * tokens[0], num * tokens[1]))


def _notes(run: ResolvedRun, link: float | None, plan: MemoryPlan) -> list[str]:
    """Return which GPU this is about, and what the figures leave out."""
    notes = []
    if run.device is not None and plan.gpu_bytes is not None:
        gpu = f"{run.device.place} is a {run.device.name}, {format_bytes(plan.gpu_bytes)} of it to use"
        notes.append(f"{gpu}; `device` cpu does without")
    if run.files.draft is None and plan.is_streamed:
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
_AS_STATIC = "; a dynamic tree counted as the static one of its size, which yields less"
