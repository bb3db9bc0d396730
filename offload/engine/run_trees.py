"""The trees of runs: what is known before loading, then of one decoder as its passes end.

Invariant: while a decoder runs, `TreeSelector.observe` alone changes what is known; a choice is made
again at most as often as that takes a small share of the time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offload.calibration.kernels import KernelChoice
from offload.calibration.startup import calibrate
from offload.checkpoint.layout import SlabLayout
from offload.engine.setup import Setup
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.model.tree_model import TreeModel
from offload.planning.choice import (
    TreeChoice,
    TreeRequest,
    TreeRoom,
    choose,
    first_choices,
    most_nodes,
    planned_nodes,
)
from offload.planning.cost_model import NEVER, Costs, Curve, step_of
from offload.planning.knowledge import Knowledge, RunSettings
from offload.planning.observed_passes import ObservedPass
from offload.planning.profile import NOT_WANTED, FindProfile, Profile
from offload.sampling_options import Sampling
from offload.threads import ThreadPolicy
from offload.trees.spec import MAX_TREE_NODES, TreeSpec, parse_tree

_MOST_KNOWN = 256  # choices that are kept
# A choice is made again when passes have taken this many times as long as choosing takes.
_SELDOM = 25
_CHOICE_S = 0.02  # measured on one core at 2.4 GHz


class TreeSelector:
    """The trees of one decoder.

    Args:
        spec: the tree that `load` was asked for.
        find: finds the profile of a run's settings.
        room: what memory is planned for.
        fills_bounds: dynamic trees grow up to their bounds, whatever a row costs.
    """

    def __init__(
        self,
        spec: TreeSpec,
        knowledge: Knowledge,
        room: TreeRoom,
        find: FindProfile,
        *,
        fills_bounds: bool = False,
    ) -> None:
        self.spec = spec
        self.room = room
        self.find = find
        self._fills_bounds = fills_bounds
        self._knowledge = knowledge
        self._step_costs: tuple[Knowledge | None, Costs | None] = None, None
        # choices that were made, and how much passes had shown then
        self._known: dict[object, tuple[TreeChoice, int]] = {}
        self._num_learnt = 0
        self._since_s = 0.0

    def remember(self, note: str, settings: RunSettings, choices: Mapping[int, TreeChoice]) -> None:
        """Keep choices by number of texts that were made before memory was planned for them."""
        for num_texts, choice in choices.items():
            key = _key(self.spec, note, settings, num_texts)
            self._known[key] = choice, 0

    @classmethod
    def without_trees(cls, plan: MemoryPlan) -> "TreeSelector":
        """Return the selector of a decoder whose trees other ranks choose."""
        room = TreeRoom.from_plan(plan)._replace(max_nodes=MAX_TREE_NODES)
        return cls(TreeSpec("none"), Knowledge(prior=None), room, lambda *_: NOT_WANTED)

    @property
    def knowledge(self) -> Knowledge:
        return self._knowledge

    @property
    def is_ranked(self) -> bool:
        """Return True if a draft ranks every candidate."""
        return self._knowledge.is_ranked

    def observe(self, observed: ObservedPass) -> None:
        """Learn from a pass; a later choice uses it."""
        self._knowledge = self._knowledge.observe(observed)
        self._since_s += observed.draft_s + observed.sweep_s
        if self._since_s > _SELDOM * _CHOICE_S:
            self._since_s = 0.0
            self._num_learnt += 1

    def for_run(
        self, sampling: Sampling, rule: str, tree: str | None = None, num_texts: int = 1
    ) -> TreeChoice:
        """Return the tree named for this run or for all, or the best one. Raises `UserError`."""
        spec = self.spec if tree is None else parse_tree(tree)
        settings = RunSettings(sampling, rule)
        profile, note = profile_for(spec, self.find, settings)
        key = _key(spec, note, settings, num_texts)
        choice, num_learnt = self._known.get(key, (None, 0))
        if choice is None or (spec.is_chosen and num_learnt < self._num_learnt):
            request = TreeRequest(self.room, rule, num_texts, choice and choice.shape, tree)
            known = self._knowledge.with_profile(profile, note).assuming(sampling, spec)
            choice = choose(spec, known, request)
            if len(self._known) >= _MOST_KNOWN:  # a server is asked for any settings
                self._known.clear()
            self._known[key] = choice, self._num_learnt
        return choice

    def observed_costs(self) -> Costs:
        """Return the costs of a lone text's step, as all passes so far have corrected them."""
        traffic = self.room.traffic_at(1, self._knowledge)
        costs = self._knowledge.costs
        assert traffic is not None and costs is not None, "they were timed at start"
        return self._knowledge.passes.costs(costs, 1, traffic.slots_bytes)

    def ahead_rows(self) -> int:
        """Return the least rows for which a sweep should prefetch all experts, see `Traffic`."""
        traffic = self.room.traffic_at(self.room.max_nodes, self._knowledge)
        return NEVER if traffic is None else traffic.ahead_rows(self._knowledge.costs)

    def step_s(self, num_rows: int, draft_widths: Sequence[int]) -> float:
        """Return the seconds of a step from its rows; constant where bounds are to be filled.

        They are as well where nothing was measured.
        """
        knowledge = self._knowledge
        traffic = self.room.traffic_at(num_rows, knowledge)
        if traffic is None or self._fills_bounds:
            return 1.0
        known, costs = self._step_costs
        if known is not knowledge:
            costs = knowledge.costs_of_steps(traffic)
            self._step_costs = knowledge, costs
        return 1.0 if costs is None else step_of(costs, traffic, num_rows, draft_widths).total_s


def _key(spec: TreeSpec, note: str, settings: RunSettings, num_texts: int) -> object:
    """Return all that a choice depends on; a note names its profile, if there is one."""
    return spec, note, settings.rule, settings.sampling.is_greedy, num_texts


def profile_for(
    spec: TreeSpec, find: FindProfile, settings: RunSettings
) -> tuple[Profile | None, str]:
    """Return the profile for a run's settings; else None and the reason.

    Raises `UserError` for one that the user has named for other runs, unless the tree does without.
    """
    try:
        return find(*settings)
    except UserError as error:
        if spec.is_chosen or spec.kind == "best":
            raise
        return None, str(error)  # only the prediction rests on it


class RunTrees(NamedTuple):
    """The tree that a setup asks for, and what it is chosen by; `known` has the run's profile."""

    setup: Setup
    settings: RunSettings
    known: Knowledge

    @classmethod
    def from_setup(
        cls, setup: Setup, sampling: Sampling | None, exchange_s: Curve | None
    ) -> "RunTrees":
        """Return the trees of a setup before anything is measured.

        Raises `UserError` for a named tree or profile that cannot serve.
        """
        settings = setup.settings(sampling)
        known = replace(setup.knowledge(settings), exchange_s=exchange_s)
        known = known.with_profile(*profile_for(setup.tree, setup.find_profile, settings))
        known = known.assuming(settings.sampling, setup.tree)
        if not setup.tree.is_chosen:
            choose(setup.tree, known, TreeRequest(setup.room, settings.rule))
        return cls(setup, settings, known)

    @property
    def most_nodes(self) -> int:
        """Return the most nodes that memory may be planned for."""
        return most_nodes(self.setup.tree, self.known, self.setup.room)

    def calibrated(
        self,
        target: TreeModel,
        draft: TreeModel | None,
        fetch: Callable[[SlabLayout], np.ndarray],
        *,
        threads: ThreadPolicy,
        choice: KernelChoice,
    ) -> "RunTrees":
        """Return these with the link and the costs of a step, where a choice needs them."""
        if not (self.setup.tree.is_chosen or self.setup.is_timed):
            return self
        known = replace(self.known, link=self.setup.startup_link(self.most_nodes))
        known = calibrate(
            known,
            target,
            draft,
            fetch,
            self.settings,
            threads=threads,
            choice=choice,
            traffic_of=self.setup.room.traffic_of,
        )
        return self._replace(known=known)

    def plan(self) -> tuple[MemoryPlan, TreeSelector]:
        """Return the memory for the largest trees of such runs, and the selector of its decoder.

        The steps of a tree that was named go by no times but those of its passes. Raises
        `UserError`.
        """
        setup = self.setup
        tree = setup.tree
        rule = self.settings.rule
        choices = first_choices(tree, self.known, setup.room, rule)
        plan = setup.plan_for(planned_nodes(tree, self.known, setup.room, rule, choices))
        known = self.known if tree.is_chosen else self.known.with_profile(None, "")
        room = TreeRoom.from_plan(plan)
        find = setup.find_profile
        # a tune counts what trees of a size yield and take
        trees = TreeSelector(tree, known, room, find, fills_bounds=setup.is_timed)
        trees.remember(self.known.note, self.settings, choices)
        return plan, trees
