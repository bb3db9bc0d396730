"""Which tree a run gets: the one that was named, or the best one for the pair, the settings and the
machine.

One selector serves decoding, predicting, tuning and measuring, so that all of them mean the same
tree. It goes by a profile of `offload tune` that holds for exactly this run, else by the default
acceptance and a quick calibration at start; where texts share passes, by what their passes have
shown since. Every caller chooses from the same sizes: how large a tree may be follows from what its
rows and its memory cost. No torch, no clock. Invariant: no tree is larger than memory was planned
for, and what a choice rests on is said.

Whether routed experts had better come one by one or with their layers: told from headers, before
anything is built.

What either way needs for a token is its bytes, with the tree that is best for it by the usual
acceptance, since how fast this machine computes is not known yet. Where a mixture chooses few of
many experts one by one wins by far; where its best tree needs nearly all of them anyway, both ways
read the same, and whole layers keep nobody waiting. This is the one place that decides it. No
torch, no clock. Invariant: what was named is what is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles
from offload.planning.acceptance import SMALL, AcceptancePrior, usual_for
from offload.planning.chains import ASSUMED_COST, ChainPolicy, tokens_per_run
from offload.planning.cost_model import (
    NEVER,
    NOTHING,
    Costs,
    Curve,
    Prediction,
    Traffic,
    link_alone,
    paced,
    step_of,
)
from offload.planning.expert_traffic import ExpertRouting
from offload.planning.profile import Profile
from offload.planning.room import MemoryBudget
from offload.planning.search import DEPTHS, TreeSearch, known_forest, search
from offload.planning.seen import ObservedPass, ObservedPasses
from offload.trees.spec import (
    AUTO_DEPTH,
    AUTO_NODES,
    MAX_CHAIN,
    MAX_TREE_NODES,
    TreeSpec,
    parse_tree,
)
from offload.trees.topology import (
    SIZES,
    DynamicShape,
    Floats,
    Shape,
    chain,
    check_acceptance,
    isotonic,
)
from offload.units import Sampling, drafting_of

LOOKUP_NODES = 64  # at most, of guesses alone, as REST has (2311.08252, section 4)
LOOKUP_DEPTH = 32  # ... and copies may be long
_SPARE_TRAFFIC = 1.01  # of a sweep with room for guesses over one without
NUM_SHOWN = 5
_MOST_KNOWN = 256  # choices that are kept
# passes after each of which a choice is made anew, and later every so many
_OFTEN = 8
_SELDOM = 4

# by settings and rule: it, or why there is none
FindProfile = Callable[[Sampling, str], tuple[Profile | None, str]]
# by nodes of the largest tree; None where that does not fit
TrafficOf = Callable[[int], Traffic | None]


class TreeChoice(NamedTuple):
    """A tree and what speaks for it."""

    shape: Shape
    why: str
    tokens_per_sweep: float = 1.0  # as predicted
    # the best few, best first; empty where nothing was chosen
    candidates: tuple[Prediction, ...] = ()
    # of `chain:auto`, whose first chain `shape` is: how long the later ones are
    chains: ChainPolicy | None = None

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
            "tokens_per_sweep": self.tokens_per_sweep,
            "candidates": [candidate.as_dict() for candidate in self.candidates],
            **({"chains": self.chains.as_dict()} if self.chains else {}),
        }


@dataclass(frozen=True)
class TreeSelector:
    """What is known of a pair and a machine; `choose` makes a tree of it."""

    rule: str  # of acceptance, which says whether the draft's scores may shape a chosen tree
    profile: Profile | None = None  # None takes the default acceptance
    note: str = ""  # why there is no profile
    costs: Costs | None = None  # of a step; None where nothing was measured
    traffic_of: TrafficOf = lambda _: None
    # of the trees of all texts that are chosen: what memory was planned for, if it was
    max_nodes: int = SIZES[-1]
    max_depth: int = DEPTHS[-1]  # what the context has room for
    # without one there are guesses alone, and nothing is known of them beforehand
    has_draft: bool = True
    usual: AcceptancePrior = SMALL  # what stands in for a profile
    num_texts: int = 1  # that share a pass, each with such a tree
    # of this decoder, where texts share passes
    seen: ObservedPasses = field(default_factory=ObservedPasses)

    def choose(self, spec: TreeSpec) -> TreeChoice:
        """The tree that is meant here; raises `UserError` for one that the rule does not allow."""
        if not self.has_draft:
            return self._of_guesses(spec)
        spec.check_rule(self.rule)
        if spec.kind == "auto_chain":
            return self._chain()
        if spec.kind != "auto":
            return self._named(spec)
        if self.costs is not None:
            return self._best(self.costs)
        default = TreeSpec(
            "dynamic" if self._is_dynamic and min(self._most - 1, self.max_depth) else "best",
            min(AUTO_NODES, self._most),
            min(AUTO_NODES - 1 if self.usual.is_copy else AUTO_DEPTH, self.max_depth),
        )
        return self._named(default)._replace(
            why=f"a default, since nothing was measured ({self.note})"
        )

    def _of_guesses(self, spec: TreeSpec) -> TreeChoice:
        """Bounds, within which every step takes the guesses that pay; a shape is filled as far as
        guesses reach.
        """
        num_nodes = spec.num_nodes
        depth = spec.depth
        if spec.is_chosen:
            num_nodes = min(LOOKUP_NODES, self._most)
            depth = min(LOOKUP_DEPTH, self.max_depth)
        depth = min(depth, num_nodes - 1)
        if depth < 1:
            return TreeChoice(
                chain(0), "as named" if spec.kind == "none" else "there is room for no other"
            )
        if spec.kind in ("auto", "best", "dynamic"):
            why = (
                "at most, as many guesses as pay"
                if spec.is_chosen
                else "at most, all that is guessed"
            )
            return TreeChoice(DynamicShape(num_nodes, depth), why)
        return TreeChoice(
            chain(depth) if spec.is_chosen else spec.build(), "as far as guesses reach"
        )

    def _best(self, costs: Costs) -> TreeChoice:
        forest_of = partial(self._forest, max_depth=DEPTHS[-1])
        if self._learns and (traffic := self._traffic(1)):
            costs = self.seen.costs(costs, self.num_texts, traffic.slots_bytes)
        forest, ranked = search(
            forest_of,
            self._most,
            costs,
            self._traffic,
            self.max_depth,
            is_dynamic=self._is_dynamic,
            num_texts=self.num_texts,
            most=NUM_SHOWN,
        )
        if not ranked:
            return TreeChoice(chain(0), "memory has no room for any tree")
        best = self.seen.pick(ranked, self.num_texts) if self._learns else ranked[0]
        why = self._basis
        if isinstance(best.shape, DynamicShape):
            counted = sum(one.num_sweeps for one in forest.counted)
            why += (
                f", growth repeated for {counted} sweeps"
                if counted
                else ", as if static: dynamic trees yield more"
            )
        return TreeChoice(
            best.shape, why, best.tokens_per_sweep / self.num_texts, tuple(ranked[:NUM_SHOWN])
        )

    def _chain(self) -> TreeChoice:
        """Of the integer lengths the one with the largest gain, by the first entry of the
        acceptance vector.
        """
        alpha = (self.usual.acceptance if self.profile is None else self.profile.acceptance)[0]
        most = min(MAX_CHAIN, self._most - 1, self.max_depth)
        why = f"alpha {alpha:.2f} at first ({self._basis})"
        traffic = self._traffic(most + 1)
        if self.costs is None or traffic is None:
            policy = ChainPolicy.assumed(alpha, most)
            why = f"{why}; a draft step as a {ASSUMED_COST:g} of a sweep"
        else:
            policy = ChainPolicy.of(alpha, self.costs, traffic, most)
        ranked = [policy.predicted(gamma) for gamma in range(most + 1)]
        ranked.sort(key=lambda one: one.s_per_token)
        gamma = policy.length()
        candidates = () if self.costs is None or traffic is None else tuple(ranked[:NUM_SHOWN])
        return TreeChoice(chain(gamma), why, tokens_per_run(alpha, gamma), candidates, policy)

    def _traffic(self, num_nodes: int) -> Traffic | None:
        traffic = self.traffic_of(num_nodes)
        return None if traffic is None else traffic.routed_by(routing_in(self.profile))

    def _named(self, spec: TreeSpec) -> TreeChoice:
        forest = self._forest(
            spec.num_nodes, spec.depth if spec.kind == "best" else max(spec.depth, DEPTHS[-1])
        )
        if spec.kind == "best":
            tokens = forest.expected(spec.count, spec.depth)
            return TreeChoice(forest.tree(spec.count, spec.depth), self._basis, tokens)
        shape = spec.build()
        if isinstance(shape, DynamicShape):
            shape = paced(shape, self.costs) if self.costs else shape
            why = "at most, as the draft's scores suggest"
            return TreeChoice(shape, why, forest.expected_dynamic(shape.num_nodes, shape.depth))
        return TreeChoice(shape, "as named", forest.expected_of(shape))

    def _forest(self, max_nodes: int, max_depth: int) -> TreeSearch:
        if self.profile is None:
            p_K = check_acceptance(self.usual.acceptance)
            counted = self.usual.dynamic_yields
            if self._learns and not counted:
                p_K = self.seen.acceptance(p_K, self._expected)
            return known_forest(
                tuple(p_K.tolist()), max_nodes=max_nodes, max_depth=max_depth, counted=counted
            )
        known = self.profile
        p_K = isotonic(known.acceptance)  # far ranks are noisy
        return known_forest(
            tuple(p_K.tolist()),
            known.traces,
            known.smoothing,
            max_nodes,
            max_depth,
            known.dynamic_yields,
        )

    def _expected(self, p_K: Floats, shape: Shape) -> float:
        """Tokens of a tree of the product form."""
        forest = known_forest(tuple(p_K.tolist()), max_nodes=max(self.max_nodes, shape.num_nodes))
        return forest.expected(shape.num_nodes, shape.depth)

    @property
    def _learns(self) -> bool:
        """Whether passes may change the choice: not where a text for a seed depends on its trees,
        or is alone.
        """
        return self._is_dynamic and self.num_texts > 1

    @property
    def _most(self) -> int:
        """Nodes that each text may have."""
        return max(1, self.max_nodes // self.num_texts)

    @property
    def _is_dynamic(self) -> bool:
        return not drafting_of(self.rule).keeps_distributions

    @property
    def _basis(self) -> str:
        if self.profile is None:
            return f"{self.usual.source}, {self.note}"
        return f"{self.profile.num_tokens} traced tokens, profile of {self.profile.created}"


def routing_in(profile: Profile | None) -> ExpertRouting | None:
    """As a profile has counted it; None where no experts were counted."""
    uses = None if profile is None else profile.expert_uses
    return None if uses is None else ExpertRouting.counted(uses.uses_LE, uses.num_rows)


@dataclass
class Trees:
    """The trees of one decoder."""

    wish: TreeSpec  # what `load` was asked for
    find: FindProfile
    traffic_of: TrafficOf  # once memory is planned, what that plan moves
    # measured just now; disks drift, so a profile's own figure may be old
    link_bytes_per_s: float | None = None
    costs: Costs | None = None  # as known at start, for runs without a profile of their own
    exchange_s: Curve = NOTHING  # what a sweep of many ranks takes beside computing
    num_threads: int | None = None  # the most that this run computes with
    max_nodes: int = MAX_TREE_NODES
    context: int | None = None  # positions that there is room for: a tree must be less deep
    has_draft: bool = True
    usual: AcceptancePrior = SMALL
    # of the texts that this is about, where experts were counted
    routing: ExpertRouting | None = None
    parallel: int = 1  # texts that may share a pass
    _known: dict[tuple[TreeSpec, str, str, int], TreeChoice] = field(default_factory=dict)
    _seen: ObservedPasses = field(default_factory=ObservedPasses)

    def took(self, one: ObservedPass) -> None:
        """What a pass of several texts has shown; the next choice for several goes by it."""
        self._seen.add(one)
        if self._seen.num_passes <= _OFTEN or self._seen.num_passes % _SELDOM == 0:
            for key in [*self._known]:  # which another thread may be adding to
                if key[-1] > 1:
                    self._known.pop(key, None)

    def check(self, sampling: Sampling, rule: str) -> None:
        """Refuse, before anything is measured, a named tree or profile that cannot serve. Raises
        `UserError`.
        """
        self.find(sampling, rule)
        if not self.wish.is_chosen:
            self.for_run(sampling, rule)

    @property
    def most_nodes(self) -> int:
        """Of the trees that memory will be planned for; of those that are yet to be chosen the most
        they may have.
        """
        if not self.wish.is_chosen:
            return self.parallel * self.wish.num_nodes
        if not self.has_draft:
            return self._nodes_to_spare()
        sizes: Sequence[int] = SIZES
        if self.wish.kind == "auto_chain":
            longest = MAX_CHAIN if self.context is None else min(MAX_CHAIN, self.context - 1)
            sizes = [self.parallel * num_nodes for num_nodes in range(1, 2 + longest)]
        return next((size for size in reversed(sizes) if self.traffic_of(size) is not None), 1)

    def _nodes_to_spare(self) -> int:
        """Of trees of guesses, which may find none: as many as have room at next to no cost."""
        alone = self._traffic_of(self.parallel)
        if alone is None:
            return 1
        # of the same pass: what guesses add is weighed in every step
        most_bytes = alone.bytes_at(1) * _SPARE_TRAFFIC
        for size in reversed([self.parallel * size for size in SIZES if size <= LOOKUP_NODES]):
            traffic = self._traffic_of(size)
            if (
                traffic
                and traffic.bytes_at(1) <= most_bytes
                and traffic.slots_bytes >= alone.slots_bytes
            ):
                return size
        return 1

    def nodes_to_plan(self, sampling: Sampling, rule: str) -> int:
        """Of the largest trees that runs with these settings will take: of `chain:auto` its longest
        chain.
        """
        if self.wish.kind == "auto_chain":
            return self.most_nodes
        return max(
            num * self.for_run(sampling, rule, num_texts=num).shape.num_nodes
            for num in {1, self.parallel}
        )

    def settle(self, plan: MemoryPlan) -> None:
        """Memory is planned: from now on no tree may be larger than that."""
        traffic = Traffic.of(plan)
        self.traffic_of, self.max_nodes, self.context = (
            (lambda _: traffic),
            plan.num_nodes,
            plan.context,
        )

    def for_run(
        self, sampling: Sampling, rule: str, tree: str | None = None, num_texts: int = 1
    ) -> TreeChoice:
        """The one that was named for this run or for all, or the best beside other texts of the
        same pass.

        Raises `UserError` where it is too large or too deep.
        """
        spec = self.wish if tree is None else parse_tree(tree)
        profile, note = self._profile(spec, sampling, rule)
        # a note names its profile: without one any sampling has the same tree
        key = (spec, note, rule, num_texts)
        choice = self._known.get(key)
        if choice is None:
            choice = self._selector(spec, profile, note, rule, num_texts).choose(spec)
            self._check(choice.shape, tree)
            if len(self._known) >= _MOST_KNOWN:  # a server is asked for any settings
                self._known.clear()
            self._known[key] = choice
        return choice

    def _profile(self, spec: TreeSpec, sampling: Sampling, rule: str) -> tuple[Profile | None, str]:
        try:
            return self.find(sampling, rule)
        except UserError as error:
            if spec.is_chosen or spec.kind == "best":
                raise
            return None, str(error)  # only the prediction rests on it

    def _selector(
        self, spec: TreeSpec, profile: Profile | None, note: str, rule: str, num_texts: int
    ) -> TreeSelector:
        costs = self._costs_of(profile)
        max_nodes = min(self.max_nodes, SIZES[-1] if self.has_draft else self.most_nodes)
        max_depth = DEPTHS[-1] if self.context is None else self.context - 1
        if spec.kind == "auto_chain":  # it may grow, whoever else is there by then
            max_nodes //= self.parallel
        return TreeSelector(
            rule,
            profile,
            note,
            costs,
            self._traffic_of,
            max_nodes,
            max_depth,
            self.has_draft,
            self.usual,
            num_texts,
            self._seen,
        )

    def ahead_rows(self) -> int:
        """The least rows from which a sweep had better read all experts ahead of their routers, see
        `Traffic`.
        """
        traffic = self._traffic_of(self.max_nodes)
        return NEVER if traffic is None else traffic.ahead_rows(self._costs_of(None))

    def _traffic_of(self, num_nodes: int) -> Traffic | None:
        traffic = self.traffic_of(num_nodes)
        return None if traffic is None else traffic.routed_by(self.routing)

    def step_s(self, num_rows: int, draft_widths: Sequence[int]) -> float:
        """Seconds of a step by rows of its sweep and its draft passes; always the same where
        nothing was measured.
        """
        traffic = self._traffic_of(num_rows)
        costs = self._costs_of(None)
        if costs is None or traffic is None:
            return 1.0
        return step_of(costs, traffic, num_rows, draft_widths).total_s

    def _costs_of(self, profile: Profile | None) -> Costs | None:
        """The profile's curves where its most threads are ours, else what was measured at start;
        today's link.
        """
        is_usable = profile is not None and self.num_threads in (None, profile.num_threads)
        costs = profile.costs if profile is not None and is_usable else self.costs
        if costs is None or self.link_bytes_per_s is None:
            return costs
        compute_s = (
            costs.compute_s if self.exchange_s is NOTHING else costs.compute_s.plus(self.exchange_s)
        )
        return replace(costs, link_bytes_per_s=self.link_bytes_per_s, compute_s=compute_s)

    def _check(self, shape: Shape, tree: str | None) -> None:
        most = self.max_nodes // self.parallel if tree is not None else self.max_nodes
        if shape.num_nodes > most:
            raise UserError(
                f"tree {tree} has {shape.num_nodes} nodes, memory was planned for {most}: "
                "give the largest tree to load()"
            )
        if self.context is not None and shape.depth >= self.context:
            raise UserError(
                f"the tree is {shape.depth} deep, the context has {self.context} positions: "
                "raise `context` or name a tree that is less deep"
            )


# of the trees that are compared
_MAX_NODES = 128
_MAX_DEPTH = 16


def with_experts(
    room: MemoryBudget, files: ModelFiles, *, num_nodes: int | None = None
) -> MemoryBudget:
    """The same room, in which `experts` is demand or layers, whatever tree memory is planned for.

    Routing is taken as is usual: profiles are looked for later, since their counts are of experts
    that come one by one.

    Args:
        num_nodes: of the tree that was named; None compares the best ones.
    """
    if room.experts != "auto":
        return room
    if model_shape(files.target, room.dtype).experts is None or not _is_streamed(
        room, files, num_nodes or 1
    ):
        return replace(room, experts="layers")
    sizes = (
        [num_nodes]
        if num_nodes
        else [size for size in SIZES if size <= _MAX_NODES and (size == 1 or files.draft)]
    )
    ways = [replace(room, experts=experts) for experts in ("demand", "layers")]
    return min(ways, key=partial(_s_per_token, files=files, sizes=sizes))  # of equals the first


def _is_streamed(room: MemoryBudget, files: ModelFiles, num_nodes: int) -> bool:
    """Whether not everything stays; what has no room at all is refused later."""
    try:
        return room.plan(files, num_nodes).is_streamed
    except UserError:
        return True


def _s_per_token(room: MemoryBudget, files: ModelFiles, sizes: list[int]) -> float:
    """At a byte per second, with the best tree of these sizes; infinite where none has room."""
    forest = known_forest(
        usual_for(files.draft).acceptance, max_nodes=max(sizes), max_depth=_MAX_DEPTH
    )
    found = [float("inf")]
    for size in sizes:
        traffic = room.traffic(files, size)
        if traffic is not None:
            found.append(_sweep_s(traffic, size) / forest.expected(size, min(_MAX_DEPTH, size)))
    return min(found)


def _sweep_s(traffic: Traffic, num_rows: int) -> float:
    return step_of(link_alone(1.0), traffic, num_rows, ()).sweep_s
