"""Will it fit, and how fast will it be: the answer of `offload plan`, for any machine.

Bytes follow from headers. Rates are those of `--hardware`; on this machine the link is measured now,
and a profile of `offload tune` has the rest. Where only the link is known, and perhaps how fast this
processor multiplies, a prediction is a lower bound and says so. Where this pair was not measured,
tokens per pass are a range, from pairs that papers measured.

Invariant: no weights are fetched, and none are read except in the .3 s that measure the link. No
torch except for a GPU, for the speed of products, or to count a model that only torch can build.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.open import ReadHeaders
from offload.checkpoint.sizes import ModelFacts
from offload.engine.resolve import resolve
from offload.engine.setup import Setup
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.planning.budget import prompt_costs
from offload.planning.choice import (
    TreeChoice,
    TreeRoom,
    first_choices,
    most_nodes,
    planned_nodes,
    predict,
)
from offload.planning.cost_model import (
    NOTHING,
    Curve,
    Prediction,
    PromptPass,
    Traffic,
    link_alone,
    prompt_pass,
    with_draft_reads,
)
from offload.planning.hardware import Assumptions, Hardware
from offload.planning.knowledge import Knowledge, LinkRate, Provenance
from offload.planning.load_options import LoadOptions
from offload.trees.topology import SIZES, chain
from offload.units import format_bytes


class Estimate(NamedTuple):
    """What is known before anything is loaded."""

    models: tuple[ModelFacts, ...]  # the target, and the draft if there is one
    plan: MemoryPlan
    hardware: Hardware | None  # None for this machine
    link: LinkRate
    # without a tree, then with the wanted one; empty where no rate is known
    predictions: tuple[Prediction, ...]
    # where the times of computing come from: assumed are those of the products of weights alone,
    # unknown ones are left out of the predictions
    computing: Provenance
    basis: str  # what the tokens per pass rest on, in words
    notes: tuple[str, ...]
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
        rate = self.link.bytes_per_s
        return None if rate is None else self.traffic.bytes_at(1) / rate

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
            "is_link_alone": self.computing is Provenance.UNKNOWN,
            "is_lower_bound": not self.computing.is_whole,
            "models": models_told(self.models),
            **self.plan.as_dict(),
            "bytes_per_sweep": self.sweep_bytes,
            **({} if self.hit_share is None else {"expert_hit_share": self.hit_share}),
            "link_bytes_per_s": None
            if self.link.bytes_per_s == math.inf
            else self.link.bytes_per_s,
            "sweep_s": self.sweep_s,
            "hardware": self.hardware.name if self.hardware else None,
            "predictions": [prediction.as_dict() for prediction in self.predictions],
            "basis": self.basis,
            "prompt": self.prompt and self.prompt.as_dict(),
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
    read: ReadHeaders | None = None,
) -> Estimate:
    """Plan and predict. Raises `UserError` for what does not fit or cannot be read.

    Args:
        hardware: name or file of another machine; None is this one.
        disk_speed: bytes per second, such as `3GB`; None measures it here, or takes the machine's.
        tokens_per_sweep: of the named tree; None takes what is known of the pair.
        read: reads headers by name and config; `cache(describe)` where several estimates are of the
            same models.
    """
    assumed = Assumptions.from_flags(hardware, disk_speed)
    tree = options.planned_tree(tokens_per_sweep)
    if tokens_per_sweep is not None and assumed == Assumptions():
        requirement = "`tokens_per_sweep` goes with `hardware` or `disk_speed`"
        raise UserError(f"{requirement}; on this machine offload tune measures it")
    setup = replace(resolve(options, assumed=assumed, read=read), tree=tree)
    known, room = _known_of(setup)
    rule = setup.options.rule
    choices = first_choices(tree, known, room, rule)
    plan = setup.plan_for(planned_nodes(tree, known, room, rule, choices))
    traffic = _traffic(setup, known, plan)
    choice = choices[options.parallel]
    predictions, basis = _predictions(setup, known, choice, plan, tokens_per_sweep)
    link = known.link.bytes_per_s
    return Estimate(
        models=facts_of(setup),
        plan=plan,
        hardware=setup.hardware,
        link=known.link,
        predictions=predictions,
        computing=known.computing,
        basis=basis,
        notes=(*_unknown_copy(known), *setup.notes, *_notes(setup, link, plan)),
        traffic=traffic,
        prompt=_prompt(setup, known, traffic, plan),
    )


def _known_of(setup: Setup) -> tuple[Knowledge, TreeRoom]:
    """Return the knowledge and the room that trees are chosen by, with the link measured now.

    Where nothing of computing is known, the least that a step takes stands in.
    """
    settings = setup.settings()
    room = setup.room
    known = setup.knowledge(settings)
    known = known.with_link(setup.link(most_nodes(setup.tree, known, room)))
    known = known.with_profile(*setup.find_profile(*settings))
    if known.costs is not None:
        return known, room
    traffic = room.traffic_of(1)
    counts_link = traffic is not None and traffic.experts is not None
    known = known.with_least_costs(_products_s(setup), counts_link=counts_link)
    if setup.tree.is_chosen:
        room = room._replace(max_nodes=most_nodes(setup.tree, known, room))
    return known, room


def _unknown_copy(known: Knowledge) -> tuple[str, ...]:
    """Return a line where the passes of a copy are not known: by the link alone it seems free."""
    return (_NO_COSTS,) if known.is_copy and not known.computing.is_whole else ()


def _products_s(setup: Setup) -> Curve:
    """Return the seconds of a pass's products on this CPU against its rows, if they were timed."""
    if setup.budget.gpu_bytes is not None or setup.hardware is not None:
        return NOTHING
    costs = prompt_costs(setup.budget, setup.files, SIZES[-1])
    return NOTHING if costs is None else costs.compute_s


def _basis(setup: Setup, known: Knowledge) -> str:
    """Return in words what acceptance rests on; empty without a draft."""
    if not known.is_ranked:
        return ""
    if known.profile is None:
        return known.note
    return f"{'profile' if setup.options.profile is None else 'acceptance of'} {known.note}"


def _predictions(
    setup: Setup,
    known: Knowledge,
    choice: TreeChoice,
    plan: MemoryPlan,
    tokens_per_sweep: float | None,
) -> tuple[tuple[Prediction, ...], str]:
    """Return the predictions without a tree and with the wanted one, and what tokens rest on.

    There are none where no rate is known that limits a pass.
    """
    basis = _basis(setup, known)
    link = known.link.bytes_per_s
    has_limit = known.computing.is_whole or (plan.is_streamed and not known.is_copy)
    if link is None or not has_limit:
        return (), basis
    traffic = _traffic(setup, known, plan)
    costs = known.costs or with_draft_reads(link_alone(link), traffic)
    alone = _traffic(setup, known, replace(setup, files=setup.files.alone).minimal_plan)
    num_texts = setup.options.parallel
    plain = predict(setup.tree, costs, alone, chain(0), (1.0, 1.0), num_texts)
    if not known.is_ranked or setup.tree.kind == "none":
        return (plain,), basis
    tokens, basis = choice.tokens_range(setup.files, setup.dtype, known, basis)
    if tokens_per_sweep is not None:
        tokens = (tokens_per_sweep, tokens_per_sweep)
        basis = "tokens per pass as given"
    wanted = predict(setup.tree, costs, traffic, choice.shape, tokens, num_texts)
    return (plain, wanted), basis


def _traffic(setup: Setup, known: Knowledge, plan: MemoryPlan) -> Traffic:
    return Traffic.from_plan(plan, setup.hardware).routed_by(known.routing)


def _prompt(
    setup: Setup, known: Knowledge, traffic: Traffic, plan: MemoryPlan
) -> PromptPass | None:
    """Return the largest pass over a prompt, by the curves or by the rates that chose its rows."""
    most = plan.max_prompt_rows
    costs = known.costs if known.computing.is_whole else None
    if costs is None and not setup.device.has_own_memory:
        costs = prompt_costs(setup.budget, setup.files, most)
    return prompt_pass(costs, traffic, most) if costs and plan.is_streamed else None


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
