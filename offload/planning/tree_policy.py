"""Which tree a run gets: the one that was named, or the best one for the pair, the settings and the machine.

A profile of `offload tune` is used when it holds for exactly this run. Without one the acceptance is the default vector
and the times are those of a quick look at start. Invariant: no tree is larger than memory was planned for, and what a
choice rests on is said.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offload.config import Sampling, drafting_of
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.planning.cost_model import Costs, Traffic
from offload.planning.profile import Profile
from offload.planning.tree_search import DEPTHS, SIZES, Candidate, Forest, choose
from offload.tree.spec import AUTO_DEPTH, AUTO_NODES, MAX_TREE_NODES, TreeSpec, parse_tree
from offload.tree.topology import (
    DEFAULT_ACCEPTANCE,
    AcceptanceVector,
    DynamicShape,
    Shape,
    Topology,
    best_first,
    chain,
    check_acceptance,
    isotonic,
    optimal,
)

AUTO_MAX_NODES = 512  # of a chosen tree whose size was not measured
NUM_SHOWN = 5
_MAX_EXACT_NODES = 256  # up to here the dynamic program takes a fraction of a second

FindProfile = Callable[[Sampling, str], tuple[Profile | None, str]]  # by settings and rule: it, or why there is none
TrafficOf = Callable[[int], Traffic | None]  # by nodes of the largest tree; None where that does not fit


class TreeChoice(NamedTuple):
    """A tree and what speaks for it."""

    shape: Shape
    why: str
    candidates: tuple[Candidate, ...] = ()  # the best few, best first; empty where nothing was chosen

    @property
    def is_dynamic(self) -> bool:
        """Whether size and depth are bounds, and every step has a shape of its own."""
        return isinstance(self.shape, DynamicShape)

    def as_dict(self) -> dict[str, object]:
        """The field `tree_choice` of `--json`."""
        return {
            "num_nodes": self.shape.num_nodes,
            "depth": self.shape.depth,
            "is_grown": self.is_dynamic,
            "why": self.why,
            "candidates": [candidate.as_dict() for candidate in self.candidates],
        }


@dataclass
class Trees:
    """The trees of one decoder.

    Attributes:
        wish: what `load` was asked for.
        find: looks a profile up.
        traffic_of: what a sweep moves with trees of so many nodes; once memory is planned, what that plan moves.
        link_bytes_per_s: measured just now; disks drift, so a profile's own figure may be old.
        costs: measured at start, for runs without a profile; None where nothing was measured.
        num_threads: that this run computes with.
        context: positions that there is room for: a tree must be less deep; None where that is not known yet.
    """

    wish: TreeSpec
    find: FindProfile
    traffic_of: TrafficOf
    link_bytes_per_s: float | None = None
    costs: Costs | None = None
    num_threads: int | None = None
    max_nodes: int = MAX_TREE_NODES
    context: int | None = None
    _known: dict[tuple[TreeSpec, Sampling, str], TreeChoice] = field(default_factory=dict)

    def check(self, sampling: Sampling, rule: str) -> None:
        """Refuse, before anything is measured, a named tree or profile that cannot serve. Raises `UserError`."""
        self.find(sampling, rule)
        if self.wish.kind != "auto":
            self.for_run(sampling, rule)

    @property
    def most_nodes(self) -> int:
        """Of the tree that memory will be planned for; of one that is yet to be chosen the most that it may have."""
        if self.wish.kind != "auto":
            return self.wish.num_nodes
        sizes = (size for size in reversed(SIZES) if size <= AUTO_MAX_NODES)
        return next((size for size in sizes if self.traffic_of(size) is not None), 1)

    def settle(self, plan: MemoryPlan) -> None:
        """Memory is planned: from now on no tree may be larger than that."""
        traffic = Traffic.of(plan)
        self.traffic_of, self.max_nodes, self.context = (lambda _: traffic), plan.num_nodes, plan.context

    def for_run(self, sampling: Sampling, rule: str, tree: str | None = None) -> TreeChoice:
        """The tree of one run. Raises `UserError` where it is larger than planned, or deeper than the context.

        Args:
            tree: named for this run; None takes what was named for all.
        """
        spec = self.wish if tree is None else parse_tree(tree)
        spec.check_rule(rule)
        key = (spec, replace(sampling, seed=0), rule)
        if key not in self._known:
            choice = self._auto(sampling, rule) if spec.kind == "auto" else self._named(spec, sampling, rule)
            self._check(choice.shape, tree)
            self._known[key] = choice
        return self._known[key]

    def _auto(self, sampling: Sampling, rule: str) -> TreeChoice:
        profile, note = self.find(sampling, rule)
        costs, is_dynamic = self._costs_of(profile), not drafting_of(rule).keeps_distributions
        if costs is None:
            why = f"a default, since nothing was measured ({note})"
            default = self._default()
            return TreeChoice(DynamicShape(default.num_nodes, default.depth) if is_dynamic else default, why)
        forest, basis = self._forest(profile, costs, note)
        max_depth = DEPTHS[-1] if self.context is None else self.context - 1
        best = choose(forest, costs, self.traffic_of, max_depth, is_dynamic=is_dynamic)
        if not best:
            return TreeChoice(chain(0), "memory has no room for any tree")
        return TreeChoice(best[0].shape, basis + dynamic_note(forest, best[0].shape), tuple(best[:NUM_SHOWN]))

    def _costs_of(self, profile: Profile | None) -> Costs | None:
        """The profile's curves where they are of as many threads, else what was measured at start; today's link."""
        is_usable = profile is not None and self.num_threads in (None, profile.num_threads)
        costs = profile.costs if profile is not None and is_usable else self.costs
        if costs is None or self.link_bytes_per_s is None:
            return costs
        return replace(costs, link_bytes_per_s=self.link_bytes_per_s)

    def _forest(self, profile: Profile | None, costs: Costs, note: str) -> tuple[Forest, str]:
        """The trees to choose from, and what is known about them in words."""
        max_nodes = min(self.max_nodes, AUTO_MAX_NODES)
        if profile is None:
            return Forest(check_acceptance(DEFAULT_ACCEPTANCE), max_nodes=max_nodes), f"default acceptance, {note}"
        max_nodes = min(self.max_nodes, costs.compute_s.sizes[-1])
        p_K = isotonic(profile.acceptance)
        basis = f"{profile.num_tokens} traced tokens, profile of {profile.created}"
        return Forest(p_K, profile.traces, profile.smoothing, max_nodes, profile.grown), basis

    def _named(self, spec: TreeSpec, sampling: Sampling, rule: str) -> TreeChoice:
        """A tree as named; where a profile holds, NxD is the best for its acceptance vector."""
        if spec.kind == "grown":
            return TreeChoice(spec.build(), "at most, as the draft's scores suggest")
        if spec.kind != "best":
            return TreeChoice(spec.build(), "as named")
        profile, note = self.find(sampling, rule)
        if profile is None:
            return TreeChoice(spec.build(), f"default acceptance, {note}")
        topology, how = tree_for(profile.acceptance, spec.count, spec.depth)
        return TreeChoice(topology, f"acceptance of {profile.num_tokens} traced tokens{how}")

    def _default(self) -> Topology:
        return best_first(DEFAULT_ACCEPTANCE, min(AUTO_NODES, self.max_nodes), AUTO_DEPTH)

    def _check(self, shape: Shape, tree: str | None) -> None:
        if shape.num_nodes > self.max_nodes:
            raise UserError(
                f"tree {tree} has {shape.num_nodes} nodes, memory was planned for {self.max_nodes}: "
                "give the largest tree to load()"
            )
        if self.context is not None and shape.depth >= self.context:
            raise UserError(
                f"the tree is {shape.depth} deep, the context has {self.context} positions: "
                "raise `context` or name a tree that is less deep"
            )


def dynamic_note(forest: Forest, shape: Shape) -> str:
    """What the tokens per sweep of a dynamic tree rest on, in words to follow others."""
    if not isinstance(shape, DynamicShape):
        return ""
    counted = sum(one.num_sweeps for one in forest.counted)
    return f", growth repeated for {counted} sweeps" if counted else ", as if fixed: grown trees yield more"


def tree_for(p: AcceptanceVector, num_nodes: int, max_depth: int) -> tuple[Topology, str]:
    """The best tree for a measured acceptance vector, and in words what had to be done to a noisy one."""
    p_K = check_acceptance(p)
    if (p_K[1:] <= p_K[:-1]).all():
        return best_first(p_K, num_nodes, max_depth), ""
    if num_nodes <= _MAX_EXACT_NODES:
        return optimal(p_K, num_nodes, max_depth), ", exact for ranks that do not fall evenly"
    return best_first(isotonic(p_K), num_nodes, max_depth), ", evened out where ranks do not fall"
