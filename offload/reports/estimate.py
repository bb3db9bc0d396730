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

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.hub import is_here, require_one_vocabulary
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name, settled_dtype
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.machine import has_cuda_driver
from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles, ram_warning
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
    costs_on,
    link_alone,
    prompt_pass,
    step_time,
)
from offload.planning.expert_traffic import ExpertRouting
from offload.planning.hardware import Hardware, find_hardware, rates_of
from offload.planning.model_facts import ModelFacts
from offload.planning.near_copy import check_held, copy_bits, files_of, models_to_read
from offload.planning.options import LoadOptions
from offload.planning.profile import (
    Identity,
    Machine,
    Profile,
    find_profile,
    parse_profile,
    read_profile,
)
from offload.planning.room import MemoryBudget
from offload.planning.search import SOURCE, range_for
from offload.planning.selector import TreeChoice, TreeSelector, routing_in, with_experts
from offload.trees.spec import TreeSpec, label_of
from offload.trees.topology import Shape, chain
from offload.units import Sampling, format_bytes, parse_rate, require

# it brings torch along, which other machines are planned without
if TYPE_CHECKING:
    from offload.streaming.device import Device


Read = Callable[..., Checkpoint]
# share of the context whose keys and values a pass reads on average
_FILLED_SHARE = 0.5


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


class _Case(NamedTuple):
    """One question, with its files opened."""

    files: ModelFiles
    options: LoadOptions
    tree: TreeSpec
    # the machine that was named
    hardware: Hardware | None
    # the device of this machine that a run would take
    device: "Device | None"
    budget: MemoryBudget
    # yield of the named tree, as given
    tokens_per_sweep: float | None
    # as given, instead of a measurement
    disk_bytes_per_s: float | None
    # how experts are routed, as a profile has counted it
    routing: ExpertRouting | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether no link of this machine and no profile made on it says anything."""
        return self.hardware is not None or (
            self.options.gpu_memory is not None and self.device is None
        )

    @property
    def is_open(self) -> bool:
        """Whether both models lie here, with their weights."""
        return self.files.draft is not None and all(map(is_here, filter(None, self.files)))

    @property
    def machine(self) -> Machine:
        """The machine that a profile of this one would be for."""
        name = self.device.name if self.device else "cpu"
        return Machine.here(compute_dtype_name(self.files.target, self.options.dtype), name)

    def plan(self, num_nodes: int) -> MemoryPlan:
        """Return the memory plan for trees of `num_nodes`."""
        return self.budget.plan(self.files, num_nodes)

    def traffic(self, plan: MemoryPlan) -> Traffic:
        """Return the bytes that a plan moves."""
        return Traffic.of(plan, self.hardware).routed_by(self.routing)

    def plan_without_draft(self) -> MemoryPlan:
        """Return the memory plan for one token per pass."""
        return self.budget.plan(ModelFiles(self.files.target), 1)


def estimate(
    model: str,
    draft: str | None,
    options: LoadOptions,
    *,
    hardware: str | None = None,
    disk_speed: str | int | None = None,
    tokens_per_sweep: float | None = None,
    has_packing: bool = True,
    read: Read = describe,
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
    check_held(draft, options.draft_dtype, None)
    names = list(map(str, models_to_read(model, draft)))
    files = files_of(list(map(read, names, [options.config, None])), draft, options.draft_dtype)
    if files.draft is not None and copy_bits(draft) is None:
        require_one_vocabulary(files.target, files.draft)
    tree = planned_tree(options, draft, tokens_per_sweep)
    device = _find_device(options, machine)
    budget = _budget(options, machine, device)
    dtype, dtype_notes = settled_dtype(files.target, options.dtype, is_on_cpu=budget.gpu is None)
    options = replace(options, dtype=dtype)
    budget = replace(budget, dtype=dtype)
    if machine is None and device is None:
        budget = _with_rates(budget, files, tree, disk_bytes_per_s)
    budget = with_experts(budget, files, num_nodes=None if tree.is_chosen else tree.num_nodes)
    case = _Case(files, options, tree, machine, device, budget, tokens_per_sweep, disk_bytes_per_s)
    _check(case)
    # refuses before the link is measured
    plan = case.plan(options.parallel * tree.num_nodes)
    profile, basis = _profile(case)
    link = _link(case)
    case = case._replace(routing=routing_in(profile))
    costs = _costs(case, profile, link)
    models = tuple(
        ModelFacts.of(*one)
        for one in zip(filter(None, (model, draft)), filter(None, files), strict=True)
    )
    predictions: tuple[Prediction, ...] = ()
    # passes of a self draft are no small matter, so the link says nothing
    is_unknown = costs is None and _is_copy(files)
    if link is not None and not is_unknown and (costs or plan.is_streamed):
        predictions, basis = _predictions(case, costs, link, profile, basis)
        # `chain:auto` keeps room for longer chains than its first
        if tree.kind != "auto_chain":
            plan = case.plan(options.parallel * predictions[-1].shape.num_nodes)
    is_measured = link is not None and machine is None and disk_bytes_per_s is None
    notes = (*([_NO_COSTS] if is_unknown else []), *dtype_notes, *_notes(case, link, plan))
    packing = packing_of(files, budget, plan.num_nodes, machine, link) if has_packing else None
    return Estimate(
        models,
        plan,
        machine,
        link,
        predictions,
        costs is None,
        basis,
        notes,
        is_measured,
        packing,
        case.traffic(plan),
        _prompt(case, costs, plan),
    )


def _with_rates(
    budget: MemoryBudget, files: ModelFiles, tree: TreeSpec, disk_bytes_per_s: float | None
) -> MemoryBudget:
    # imported here, because it times a product
    from offload.calibration.link import with_rates

    num_nodes = 1 if tree.is_chosen else tree.num_nodes
    return with_rates(budget, files, num_nodes, disk_bytes_per_s=disk_bytes_per_s)


def _prompt(case: _Case, costs: Costs | None, plan: MemoryPlan) -> PromptPass | None:
    """Return the largest pass over a prompt, by the curves or by the rates that chose its rows."""
    rates = case.budget.rates
    most = plan.max_prompt_rows
    if rates is not None and costs is None and case.device is None:
        seconds = most * row_s(
            model_shape(case.files.target, case.options.dtype), rates.flops_per_s
        )
        costs = replace(
            link_alone(rates.link_bytes_per_s),
            compute_s=Curve((1, most), (seconds / most, seconds)),
        )
    return prompt_pass(costs, case.traffic(plan), most) if costs and plan.is_streamed else None


def _is_copy(files: ModelFiles) -> bool:
    return files.draft is not None and files.draft.is_copy


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


def _find_device(options: LoadOptions, hardware: Hardware | None) -> "Device | None":
    """Return the GPU of this machine that a run would take.

    None for other machines, and for a budget on a GPU elsewhere.
    """
    if hardware is not None:
        if options.device != "auto":
            raise UserError(
                f"`device` {options.device} is of this machine, `hardware` names another: give one of them"
            )
        return None
    is_cpu = options.device == "cpu" and options.gpu_memory is None
    if is_cpu or (options.device == "auto" and not has_cuda_driver()):
        return None
    from torch import cuda

    from offload.streaming.device import open_device

    if options.device == "auto" and options.gpu_memory is not None and not cuda.is_available():
        return None
    return open_device(options.device, options.gpu_memory)


def _budget(
    options: LoadOptions, hardware: Hardware | None, device: "Device | None"
) -> MemoryBudget:
    """Return the memory budget; what is not given is the named machine's, or what is free here."""
    place = str(device.place) if device else None if options.gpu_memory is None else "cuda"
    if hardware is not None:
        ram = options.ram or hardware.ram_bytes
        gpu = hardware.gpu_bytes
        place = "cuda" if hardware.gpu_bytes else None
        require(
            bool(gpu) or not options.gpu_memory,
            f"{hardware.name} has no GPU",
            options.gpu_memory,
            "leave it out",
        )
        options = replace(options, ram=ram, gpu_memory=options.gpu_memory or gpu)
    budget = MemoryBudget.of(options, place)
    return budget if hardware is None else replace(budget, rates=rates_of(hardware))


def _check(case: _Case) -> None:
    if (
        case.tokens_per_sweep is not None
        and case.hardware is None
        and case.disk_bytes_per_s is None
    ):
        raise UserError(
            "`tokens_per_sweep` goes with `hardware` or `disk_speed`; on this machine offload tune measures it"
        )


def _profile(case: _Case) -> tuple[Profile | None, str]:
    """Return what is known of acceptance, and in words where from."""
    target, draft = case.files
    rule = case.options.rule
    named = case.options.profile
    if (
        draft is None
        or case.options.has_no_profile
        or (named is None and (case.is_elsewhere or not case.is_open))
    ):
        return None, ""
    experts = case.budget.experts_of(case.files)
    if named is None:
        profile, where = find_profile(Identity.of(target, draft, Sampling(), rule, case.machine))
        return profile and profile.of_experts(experts), f"profile {where}" if profile else where
    known = parse_profile(Path(named))
    # times of another machine do not matter where those of hardware are asked for
    if case.is_open:
        own = known.identity
        sampling = Sampling(temperature=own.temperature, top_p=own.top_p, top_k=own.top_k)
        machine = own.machine if case.hardware else case.machine
        read_profile(Path(named), Identity.of(target, draft, sampling, rule, machine))
    return known.of_experts(experts, is_named=True), f"acceptance of {named}"


def _costs(case: _Case, profile: Profile | None, link: float | None) -> Costs | None:
    """Return the costs of the named machine, or of this one where it was measured.

    None where nothing is known of computing.
    """
    if case.hardware is not None and case.hardware.flops_per_s:
        dtype = case.options.dtype
        positions = int(_FILLED_SHARE * case.plan_without_draft().context)
        draft = model_shape(case.files.draft, dtype) if case.files.draft else None
        return costs_on(case.hardware, model_shape(case.files.target, dtype), draft, positions)
    if case.hardware is not None or profile is None or link is None:
        return None
    return replace(profile.costs, link_bytes_per_s=link)


def _link(case: _Case) -> float | None:
    """Return bytes per second at which layers arrive; None where unknown.

    They are those of the named machine, as given, or measured.
    """
    target = case.files.target
    disk_bytes_per_s = case.disk_bytes_per_s
    if case.hardware is not None:
        return case.hardware.feed_bytes_per_s
    if case.is_elsewhere or not (disk_bytes_per_s or is_here(target)):
        return None
    if case.device is not None:
        from offload.calibration.link import device_link_bytes_per_s

        plan = case.plan(case.tree.num_nodes)
        return device_link_bytes_per_s(
            case.device, plan, target.shards, disk_bytes_per_s=disk_bytes_per_s
        )
    return disk_bytes_per_s or link_bytes_per_s(target.shards)


def _predictions(
    case: _Case, costs: Costs | None, link: float, profile: Profile | None, basis: str
) -> tuple[tuple[Prediction, ...], str]:
    """Return predictions without a draft and with the wanted or best tree.

    Also what its yield rests on, in words.
    """
    known = costs or link_alone(link)
    found = [_predict(case, known, case.plan_without_draft(), chain(0), (1.0, 1.0))]
    if case.files.draft is not None and case.tree.kind != "none":
        max_depth = case.plan(1).context - 1
        traffic_of = cache(partial(case.budget.traffic, case.files, hardware=case.hardware))
        # rows ask for bytes there, which is what is known
        weighed = known if case.plan(1).has_experts else costs
        num_texts = case.options.parallel
        known_of = (profile, basis, weighed, traffic_of)
        usual = prior_for(case.files.draft)
        selector = TreeSelector(
            case.options.rule, *known_of, max_depth=max_depth, usual=usual, num_texts=num_texts
        )
        choice = selector.choose(case.tree)
        tokens, basis = _tokens(case, choice, profile, basis)
        found.append(
            _predict(
                case, known, case.plan(num_texts * choice.shape.num_nodes), choice.shape, tokens
            )
        )
    return tuple(found), basis


def _tokens(
    case: _Case, choice: TreeChoice, profile: Profile | None, basis: str
) -> tuple[tuple[float, float], str]:
    """Return the least and most tokens per pass, and what they rest on.

    They are given, measured, or what like pairs have yielded.
    """
    if case.tokens_per_sweep:
        return (case.tokens_per_sweep, case.tokens_per_sweep), "tokens per sweep as given"
    return tokens_of(case.files, case.options.dtype, choice, profile, basis)


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
    case: _Case, costs: Costs, plan: MemoryPlan, shape: Shape, tokens: tuple[float, float]
) -> Prediction:
    label = label_of(shape) if case.tree.kind == "auto" or shape.num_nodes == 1 else case.tree.label
    if case.tree.kind == "auto_chain":
        label = f"chain:{shape.depth}"
    num = case.options.parallel
    step = step_time(costs, case.traffic(plan), shape, case.options.parallel)
    return Prediction(label, shape, step, (num * tokens[0], num * tokens[1]))


def _notes(case: _Case, link: float | None, plan: MemoryPlan) -> tuple[str, ...]:
    """Return which GPU this is about, and what the figures leave out."""
    notes: list[str | None] = []
    if case.device is not None and plan.gpu_bytes is not None:
        gpu = f"{case.device.place} is a {case.device.name}, {format_bytes(plan.gpu_bytes)} of it to use"
        notes.append(f"{gpu}; `device` cpu does without")
    if case.hardware is None and case.disk_bytes_per_s is None and is_here(case.files.target):
        notes.append(ram_warning(case.budget.ram))
    if case.files.draft is None and plan.is_streamed and case.tree.kind == "none":
        notes.append(_NO_DRAFT)
    if link is None and plan.is_streamed:
        notes.append(_NO_DISK if plan.gpu_bytes is None else _NO_GPU)
    return tuple(note for note in notes if note)


_NO_COSTS = "what passes of a copy take is not known here: offload tune measures it, or name a machine by `hardware`"
_NO_DRAFT = (
    "without a draft text that repeats itself yields more, and so does a datastore of its kind"
)
_NO_DISK = "the weights are not here, so the disk was not measured: give `disk_speed`, such as 3GB"
_NO_GPU = "weights or GPU are not here, so nothing was measured: name the machine by `hardware`"
_AS_STATIC = "; a dynamic tree counted as the static one of its size, which yields less"
