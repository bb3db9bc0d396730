"""Will it fit, and how fast will it be: the answer of `offload plan`, for this machine or one that nobody here owns.

Headers tell what lies where. Rates come from `--hardware`, or for this machine and the GPU that a run would take from
the link, measured here and now, and from a profile of `offload tune` where one holds. What is not known is left out
rather than guessed.

No torch but where there is a GPU to ask. Invariant: no weights are fetched, and none are read but for the 0.3 s that
measure the link.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.hub import is_here, open_headers
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name
from offload.checkpoint.sizes import model_shape
from offload.config import Sampling, drafting_of, format_bytes, require
from offload.errors import UserError
from offload.machine import has_cuda_driver
from offload.memory.plan import MemoryPlan
from offload.memory.planner import default_gpu_bytes, default_ram_bytes, plan_memory, ram_warning
from offload.planning.cost_model import Costs, Traffic
from offload.planning.hardware import Hardware, find_hardware
from offload.planning.predict import Prediction, costs_on, is_disk_slower, predict, traffic_on
from offload.planning.profile import Identity, Machine, Profile, find_profile, parse_profile, read_profile
from offload.planning.tree_search import DEPTHS, Forest, choose
from offload.tree.spec import TreeSpec, label_of, tree_to_fill
from offload.tree.topology import (
    DEFAULT_ACCEPTANCE,
    DynamicShape,
    Shape,
    chain,
    check_acceptance,
    expected_tokens,
    isotonic,
)

if TYPE_CHECKING:  # it brings torch along, which other machines are planned without
    from offload.streaming.device import Device

_DEFAULT = "default acceptance, of a 16 M target and its 1 M draft writing code greedily"
MAX_NODES = 1024  # of a tree that is chosen for a GPU
_FILLED_SHARE = 0.5  # of the context, whose keys and values a pass reads on average


class Estimate(NamedTuple):
    """What is known before anything is loaded."""

    plan: MemoryPlan
    hardware: Hardware | None  # None for this machine
    link_bytes_per_s: float | None  # measured, or the hardware's; None where neither is known
    predictions: tuple[Prediction, ...]  # without a tree, then with the wanted one; empty where costs are not known
    basis: str  # of the tokens per sweep, in words
    notes: tuple[str, ...]

    @property
    def sweep_s(self) -> float | None:
        """What moving the weights of one sweep takes."""
        if self.link_bytes_per_s is None:
            return None
        if self.hardware is None:
            return self.plan.streamed_bytes / self.link_bytes_per_s
        return traffic_on(self.hardware, self.plan).streamed_bytes / self.link_bytes_per_s

    def as_dict(self) -> dict[str, object]:
        """The figures by the names that `--json` uses."""
        link = {"link_bytes_per_s": self.link_bytes_per_s, "sweep_s": self.sweep_s}
        return {
            "fits": True,
            **self.plan.as_dict(),
            "bytes_per_sweep": self.plan.streamed_bytes,
            **link,
            "hardware": self.hardware.name if self.hardware else None,
            "predictions": [prediction.as_dict() for prediction in self.predictions],
            "basis": self.basis,
            "notes": list(self.notes),
        }


class Wish(NamedTuple):
    """What is to be planned for."""

    ram: str | int | None = None
    gpu: str | int | None = None
    context: int | None = None
    dtype: str = "auto"
    tree: str = "auto"
    rule: str = "match"
    hardware: str | None = None
    profile: str | None = None
    tokens_per_sweep: float | None = None
    device: str = "auto"


class _Case(NamedTuple):
    """One question, opened."""

    target: Checkpoint
    draft: Checkpoint | None
    machine: Hardware | None  # that was named
    card: "Device | None"  # of this machine, that a run would take
    wish: Wish  # with the budgets of this machine filled in
    tree: TreeSpec

    @property
    def is_elsewhere(self) -> bool:
        """Whether no link of this machine and no profile made on it says anything."""
        return self.machine is not None or (self.wish.gpu is not None and self.card is None)

    @property
    def computer(self) -> Machine:
        """What a profile of this machine would be of."""
        name = self.card.name if self.card else "cpu"
        return Machine.here(compute_dtype_name(self.target, self.wish.dtype), name)

    def plan(self, num_nodes: int, *, with_draft: bool = True) -> MemoryPlan:
        """Memory for trees of so many nodes."""
        wish, machine, is_card = self.wish, self.machine, self.machine is not None or self.wish.gpu is not None
        return plan_memory(
            self.target,
            self.draft if with_draft else None,
            ram=wish.ram or (machine.ram_bytes if machine else None),
            gpu=wish.gpu or (machine.gpu_bytes if machine else None),
            device="cuda" if is_card else "cpu",
            dtype=wish.dtype,
            context=wish.context,
            num_nodes=num_nodes,
            rule=wish.rule,
        )

    def traffic(self, plan: MemoryPlan) -> Traffic:
        """What a sweep moves."""
        return traffic_on(self.machine, plan) if self.machine else Traffic.of(plan)


def estimate(model: str, draft: str | None, wish: Wish) -> Estimate:
    """Plan and predict. Raises `UserError` for whatever does not fit or cannot be read."""
    machine = find_hardware(wish.hardware) if wish.hardware else None
    files = open_headers(model), None if draft is None else open_headers(draft)
    tree, card = tree_to_fill(wish.tree, wish.rule, has_draft=draft is not None), _find_card(wish)
    # What is free is asked once: it changes while trees are compared.
    if machine is None and wish.ram is None:
        wish = wish._replace(ram=default_ram_bytes())
    if card is not None and wish.gpu is None:
        wish = wish._replace(gpu=default_gpu_bytes(str(card.place)))
    case = _Case(*files, machine, card, wish, tree)
    _check(case)
    plan = case.plan(case.tree.num_nodes)  # refuses before the link is measured
    profile, basis = _profile(case)
    costs = _costs(case, profile)
    if costs is None:
        return Estimate(plan, machine, _measured_link(case), (), basis, _notes(case))
    forest = _forest(profile, costs, case)
    predictions = _predictions(case, costs, forest)
    plan = case.plan(predictions[-1].shape.num_nodes)
    basis = "tokens per sweep as given" if wish.tokens_per_sweep else basis
    return Estimate(plan, machine, costs.link_bytes_per_s, predictions, basis, _notes(case, predictions, forest))


def _find_card(wish: Wish) -> "Device | None":
    """The GPU of this machine that a run would take; none for other machines, and for a budget on a GPU elsewhere."""
    if wish.hardware is not None:
        if wish.device != "auto":
            raise UserError(f"`device` {wish.device} is of this machine, `hardware` names another: give one of them")
        return None
    if (wish.device == "auto" and not has_cuda_driver()) or (wish.device == "cpu" and wish.gpu is None):
        return None
    from torch import cuda

    from offload.streaming.device import open_device

    if wish.device == "auto" and wish.gpu is not None and not cuda.is_available():
        return None
    return open_device(wish.device, wish.gpu)


def _check(case: _Case) -> None:
    given = case.wish.tokens_per_sweep
    if given is None:
        return
    require(given >= 1, "`tokens_per_sweep` must be 1 or more", given, "a sweep yields one token at least")
    if case.tree.kind in ("auto", "none"):
        raise UserError(f"`tokens_per_sweep` {given:g} belongs to one tree: name it, such as `tree` 128x20")
    if case.machine is None:
        raise UserError("`tokens_per_sweep` goes with `hardware`; on this machine offload tune measures it")


def _profile(case: _Case) -> tuple[Profile | None, str]:
    """What is known of acceptance, and in words where from."""
    named, is_open = case.wish.profile, case.draft is not None and is_here(case.target) and is_here(case.draft)
    if case.draft is None or named == "none":
        return None, _DEFAULT
    if named is not None:
        return _named_profile(case, Path(named), is_checked=is_open), f"acceptance of {named}"
    if case.is_elsewhere or not is_open:
        return None, _DEFAULT
    profile, where = find_profile(Identity.of(case.target, case.draft, Sampling(), case.wish.rule, case.computer))
    return profile, f"profile {where}" if profile else where


def _named_profile(case: _Case, path: Path, *, is_checked: bool) -> Profile:
    """A profile for these models; times of another machine do not matter where a GPU's are asked for."""
    profile = parse_profile(path)
    if is_checked:
        own = profile.identity
        here = case.computer if case.machine is None else own.machine
        sampling = Sampling(temperature=own.temperature, top_p=own.top_p, top_k=own.top_k)
        assert case.draft is not None, "a profile is of two models"
        return read_profile(path, Identity.of(case.target, case.draft, sampling, case.wish.rule, here))
    return profile


def _costs(case: _Case, profile: Profile | None) -> Costs | None:
    """Of the named GPU, or of this machine where it was measured."""
    if case.machine is not None:
        wish, context = case.wish, case.plan(1, with_draft=False).context
        draft = model_shape(case.draft, wish.dtype) if case.draft else None
        return costs_on(case.machine, model_shape(case.target, wish.dtype), draft, int(_FILLED_SHARE * context))
    link = _measured_link(case)
    return None if profile is None or link is None else replace(profile.costs, link_bytes_per_s=link)


def _measured_link(case: _Case) -> float | None:
    if case.is_elsewhere or not is_here(case.target):
        return None
    if case.card is not None:
        from offload.calibration.device_link import card_link_bytes_per_s

        return card_link_bytes_per_s(case.card, case.plan(case.tree.num_nodes), case.target.shards)
    return link_bytes_per_s(max(case.target.shards, key=lambda path: path.stat().st_size))


def _forest(profile: Profile | None, costs: Costs, case: _Case) -> Forest:
    """The trees to choose from; here none is larger than what was timed, unless it was named."""
    max_nodes = MAX_NODES if case.machine else costs.compute_s.sizes[-1]
    max_nodes = max(max_nodes, case.tree.count if case.tree.kind == "grown" else 1)
    if profile is None:
        return Forest(check_acceptance(DEFAULT_ACCEPTANCE), max_nodes=max_nodes)
    return Forest(isotonic(profile.acceptance), profile.traces, profile.smoothing, max_nodes, profile.grown)


def _predictions(case: _Case, costs: Costs, forest: Forest) -> tuple[Prediction, ...]:
    """One token per sweep and no draft, then the wanted tree, or the best."""
    plain = case.plan(1, with_draft=False)
    found = [_predict(case, costs, plain, "none", Guess(chain(0), 1.0))]
    if case.draft is not None and case.tree.kind != "none":
        guess = _best(case, costs, forest) if case.tree.kind == "auto" else _named(case, forest)
        label = label_of(guess.shape) if case.tree.kind == "auto" else case.wish.tree
        found.append(_predict(case, costs, case.plan(guess.shape.num_nodes), label, guess))
    return tuple(found)


class Guess(NamedTuple):
    """A tree and what it is expected to yield."""

    shape: Shape
    tokens_per_sweep: float


def _predict(case: _Case, costs: Costs, plan: MemoryPlan, label: str, guess: Guess) -> Prediction:
    is_slower = case.machine is not None and is_disk_slower(case.machine, plan)
    return predict(label, costs, case.traffic(plan), *guess, is_disk_slower=is_slower)


def _best(case: _Case, costs: Costs, forest: Forest) -> Guess:
    @cache
    def traffic_of(num_nodes: int) -> Traffic | None:
        try:
            return case.traffic(case.plan(num_nodes))
        except UserError:
            return None

    max_depth, is_dynamic = (
        min(DEPTHS[-1], case.plan(1).context - 1),
        not drafting_of(case.wish.rule).keeps_distributions,
    )
    best = choose(forest, costs, traffic_of, max_depth, is_dynamic=is_dynamic)
    return Guess(best[0].shape, best[0].tokens_per_sweep) if best else Guess(chain(0), 1.0)


def _named(case: _Case, forest: Forest) -> Guess:
    """The tree that was named, with the tokens that were given for it or that follow from what is known."""
    kind, size = case.tree.kind, (case.tree.count, case.tree.depth)
    tree = forest.tree(*size) if kind == "best" else None
    shape = case.tree.build() if tree is None else tree
    if case.wish.tokens_per_sweep is not None:
        return Guess(shape, case.wish.tokens_per_sweep)
    if isinstance(shape, DynamicShape):
        return Guess(shape, forest.expected_dynamic(shape.num_nodes, shape.depth))
    if tree is not None:
        return Guess(tree, forest.expected(*size))
    p_K = np.zeros(max(forest.p_K.size, int(shape.rank_N.max()) + 1))
    p_K[: forest.p_K.size] = forest.p_K
    return Guess(shape, expected_tokens(shape, p_K))


def _notes(case: _Case, predictions: Sequence[Prediction] = (), forest: Forest | None = None) -> tuple[str, ...]:
    """Lines about what the figures leave out."""
    warning = ram_warning(case.wish.ram) if case.machine is None and case.wish.ram is not None else None
    absent = None if case.machine or is_here(case.target) else "the weights are not here: their link was not measured"
    is_guess = forest is not None and not forest.counted and case.wish.tokens_per_sweep is None
    grown = _AS_FIXED if is_guess and any(isinstance(row.shape, DynamicShape) for row in predictions) else None
    return tuple(note for note in (_card_note(case), warning, absent, grown) if note)


def _card_note(case: _Case) -> str | None:
    """Which GPU this is about, and how much of it."""
    if case.card is None:
        return None
    gpu_bytes = case.plan(1).gpu_bytes
    assert gpu_bytes is not None, "a plan for a card has a budget on it"
    return f"{case.card.place} is a {case.card.name}, {format_bytes(gpu_bytes)} of it to use; `device` cpu does without"


_AS_FIXED = (
    "a grown tree is predicted as the fixed one of its size, which yields less: offload tune counts what grown ones do"
)
