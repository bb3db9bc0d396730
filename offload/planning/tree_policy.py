"""Which tree a run gets: the one that was named, or the best one for the pair, the settings and the machine.

One selector serves decoding, predicting, tuning and measuring, so that all of them mean the same tree. It goes by a
profile of `offload tune` that holds for exactly this run, else by the default acceptance and a quick calibration at
start; where texts share passes, by what their passes have shown since. Every caller chooses from the same sizes: how
large a tree may be follows from what its rows and its memory cost. No torch, no clock. Invariant: no tree is larger
than memory was planned for, and what a choice rests on is said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

from offload.config import Sampling, drafting_of
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.planning.chains import ASSUMED_COST, ChainPolicy, tokens_per_run
from offload.planning.cost_model import NEVER, NOTHING, Costs, Curve, Prediction, Traffic, paced, step_of
from offload.planning.profile import Profile
from offload.planning.routing import Routing
from offload.planning.seen import Pass, SeenPasses
from offload.planning.tree_search import DEPTHS, Forest, search
from offload.planning.usual import SMALL, Usual
from offload.tree.sizes import SIZES
from offload.tree.spec import AUTO_DEPTH, AUTO_NODES, MAX_CHAIN, MAX_TREE_NODES, TreeSpec, parse_tree
from offload.tree.topology import DynamicShape, Floats, Shape, chain, check_acceptance, isotonic

LOOKUP_NODES = 64  # at most, of guesses alone, as REST has (2311.08252, section 4)
LOOKUP_DEPTH = 32  # ... and copies may be long
_SPARE_TRAFFIC = 1.01  # of a sweep with room for guesses over one without
NUM_SHOWN = 5
_MOST_KNOWN = 256  # choices that are kept
_OFTEN, _SELDOM = 8, 4  # passes after each of which a choice is made anew, and later every so many

FindProfile = Callable[[Sampling, str], tuple[Profile | None, str]]  # by settings and rule: it, or why there is none
TrafficOf = Callable[[int], Traffic | None]  # by nodes of the largest tree; None where that does not fit


class TreeChoice(NamedTuple):
    """A tree and what speaks for it."""

    shape: Shape
    why: str
    tokens_per_sweep: float = 1.0  # as predicted
    candidates: tuple[Prediction, ...] = ()  # the best few, best first; empty where nothing was chosen
    chains: ChainPolicy | None = None  # of `chain:auto`, whose first chain `shape` is: how long the later ones are

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
    max_nodes: int = SIZES[-1]  # of the trees of all texts that are chosen: what memory was planned for, if it was
    max_depth: int = DEPTHS[-1]  # what the context has room for
    has_draft: bool = True  # without one there are guesses alone, and nothing is known of them beforehand
    usual: Usual = SMALL  # what stands in for a profile
    num_texts: int = 1  # that share a pass, each with such a tree
    seen: SeenPasses = field(default_factory=SeenPasses)  # of this decoder, where texts share passes

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
        return self._named(default)._replace(why=f"a default, since nothing was measured ({self.note})")

    def _of_guesses(self, spec: TreeSpec) -> TreeChoice:
        """Bounds, within which every step takes the guesses that pay; a shape is filled as far as guesses reach."""
        num_nodes, depth = spec.num_nodes, spec.depth
        if spec.is_chosen:
            num_nodes, depth = min(LOOKUP_NODES, self._most), min(LOOKUP_DEPTH, self.max_depth)
        depth = min(depth, num_nodes - 1)
        if depth < 1:
            return TreeChoice(chain(0), "as named" if spec.kind == "none" else "there is room for no other")
        if spec.kind in ("auto", "best", "dynamic"):
            why = "at most, as many guesses as pay" if spec.is_chosen else "at most, all that is guessed"
            return TreeChoice(DynamicShape(num_nodes, depth), why)
        return TreeChoice(chain(depth) if spec.is_chosen else spec.build(), "as far as guesses reach")

    def _best(self, costs: Costs) -> TreeChoice:
        forest_of = partial(self._forest, max_depth=DEPTHS[-1])
        if self._learns and (traffic := self._traffic(1)):
            costs = self.seen.costs(costs, self.num_texts, traffic.slots_bytes)
        forest, ranked = search(
            forest_of, self._most, costs, self._traffic, self.max_depth, is_dynamic=self._is_dynamic,
            num_texts=self.num_texts,
        )  # fmt: skip
        if not ranked:
            return TreeChoice(chain(0), "memory has no room for any tree")
        best, why = self.seen.pick(ranked, self.num_texts) if self._learns else ranked[0], self._basis
        if isinstance(best.shape, DynamicShape):
            counted = sum(one.num_sweeps for one in forest.counted)
            why += f", growth repeated for {counted} sweeps" if counted else ", as if static: dynamic trees yield more"
        return TreeChoice(best.shape, why, best.tokens_per_sweep / self.num_texts, tuple(ranked[:NUM_SHOWN]))

    def _chain(self) -> TreeChoice:
        """Of the integer lengths the one with the largest gain, by the first entry of the acceptance vector."""
        alpha = (self.usual.acceptance if self.profile is None else self.profile.acceptance)[0]
        most, why = min(MAX_CHAIN, self._most - 1, self.max_depth), f"alpha {alpha:.2f} at first ({self._basis})"
        traffic = self._traffic(most + 1)
        if self.costs is None or traffic is None:
            policy, why = ChainPolicy.assumed(alpha, most), f"{why}; a draft step as a {ASSUMED_COST:g} of a sweep"
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
        forest = self._forest(spec.num_nodes, spec.depth if spec.kind == "best" else max(spec.depth, DEPTHS[-1]))
        if spec.kind == "best":
            tokens = forest.expected(spec.count, spec.depth)
            return TreeChoice(forest.tree(spec.count, spec.depth), self._basis, tokens)
        shape = spec.build()
        if isinstance(shape, DynamicShape):
            shape = paced(shape, self.costs) if self.costs else shape
            why = "at most, as the draft's scores suggest"
            return TreeChoice(shape, why, forest.expected_dynamic(shape.num_nodes, shape.depth))
        return TreeChoice(shape, "as named", forest.expected_of(shape))

    def _forest(self, max_nodes: int, max_depth: int) -> Forest:
        if self.profile is None:
            p_K, counted = check_acceptance(self.usual.acceptance), self.usual.dynamic_yields
            if self._learns and not counted:
                p_K = self.seen.acceptance(p_K, self._expected)
            return Forest(p_K, max_nodes=max_nodes, max_depth=max_depth, counted=counted)
        known = self.profile
        p_K = isotonic(known.acceptance)  # far ranks are noisy
        return Forest(p_K, known.traces, known.smoothing, max_nodes, max_depth, known.dynamic_yields)

    def _expected(self, p_K: Floats, shape: Shape) -> float:
        """Tokens of a tree of the product form."""
        forest = _assumed_forest(tuple(p_K.tolist()), max(self.max_nodes, shape.num_nodes))
        return forest.expected(shape.num_nodes, shape.depth)

    @property
    def _learns(self) -> bool:
        """Whether passes may change the choice: not where a text for a seed depends on its trees, or is alone."""
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


@lru_cache(maxsize=64)
def _assumed_forest(acceptance: tuple[float, ...], max_nodes: int) -> Forest:
    return Forest(check_acceptance(acceptance), max_nodes=max_nodes, max_depth=DEPTHS[-1])


def routing_in(profile: Profile | None) -> Routing | None:
    """As a profile has counted it; None where no experts were counted."""
    uses = None if profile is None else profile.expert_uses
    return None if uses is None else Routing.counted(uses.uses_LE, uses.num_rows)


@dataclass
class Trees:
    """The trees of one decoder."""

    wish: TreeSpec  # what `load` was asked for
    find: FindProfile
    traffic_of: TrafficOf  # once memory is planned, what that plan moves
    link_bytes_per_s: float | None = None  # measured just now; disks drift, so a profile's own figure may be old
    costs: Costs | None = None  # as known at start, for runs without a profile of their own
    exchange_s: Curve = NOTHING  # what a sweep of many ranks takes beside computing
    num_threads: int | None = None  # the most that this run computes with
    max_nodes: int = MAX_TREE_NODES
    context: int | None = None  # positions that there is room for: a tree must be less deep
    has_draft: bool = True
    usual: Usual = SMALL
    routing: Routing | None = None  # of the texts that this is about, where experts were counted
    parallel: int = 1  # texts that may share a pass
    _known: dict[tuple[TreeSpec, str, str, int], TreeChoice] = field(default_factory=dict)
    _seen: SeenPasses = field(default_factory=SeenPasses)

    def took(self, one: Pass) -> None:
        """What a pass of several texts has shown; the next choice for several goes by it."""
        self._seen.add(one)
        if self._seen.num_passes <= _OFTEN or self._seen.num_passes % _SELDOM == 0:
            for key in [*self._known]:  # which another thread may be adding to
                if key[-1] > 1:
                    self._known.pop(key, None)

    def check(self, sampling: Sampling, rule: str) -> None:
        """Refuse, before anything is measured, a named tree or profile that cannot serve. Raises `UserError`."""
        self.find(sampling, rule)
        if not self.wish.is_chosen:
            self.for_run(sampling, rule)

    @property
    def most_nodes(self) -> int:
        """Of the trees that memory will be planned for; of those that are yet to be chosen the most they may have."""
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
        most_bytes = alone.bytes_at(1) * _SPARE_TRAFFIC  # of the same pass: what guesses add is weighed in every step
        for size in reversed([self.parallel * size for size in SIZES if size <= LOOKUP_NODES]):
            traffic = self._traffic_of(size)
            if traffic and traffic.bytes_at(1) <= most_bytes and traffic.slots_bytes >= alone.slots_bytes:
                return size
        return 1

    def nodes_to_plan(self, sampling: Sampling, rule: str) -> int:
        """Of the largest trees that runs with these settings will take: of `chain:auto` its longest chain."""
        if self.wish.kind == "auto_chain":
            return self.most_nodes
        return max(num * self.for_run(sampling, rule, num_texts=num).shape.num_nodes for num in {1, self.parallel})

    def settle(self, plan: MemoryPlan) -> None:
        """Memory is planned: from now on no tree may be larger than that."""
        traffic = Traffic.of(plan)
        self.traffic_of, self.max_nodes, self.context = (lambda _: traffic), plan.num_nodes, plan.context

    def for_run(self, sampling: Sampling, rule: str, tree: str | None = None, num_texts: int = 1) -> TreeChoice:
        """The one that was named for this run or for all, or the best beside other texts of the same pass.

        Raises `UserError` where it is too large or too deep.
        """
        spec = self.wish if tree is None else parse_tree(tree)
        profile, note = self._profile(spec, sampling, rule)
        key = (spec, note, rule, num_texts)  # a note names its profile: without one any sampling has the same tree
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

    def _selector(self, spec: TreeSpec, profile: Profile | None, note: str, rule: str, num_texts: int) -> TreeSelector:
        costs = self._costs_of(profile)
        max_nodes = min(self.max_nodes, SIZES[-1] if self.has_draft else self.most_nodes)
        max_depth = DEPTHS[-1] if self.context is None else self.context - 1
        if spec.kind == "auto_chain":  # it may grow, whoever else is there by then
            max_nodes //= self.parallel
        return TreeSelector(
            rule, profile, note, costs, self._traffic_of, max_nodes, max_depth, self.has_draft, self.usual, num_texts,
            self._seen,
        )  # fmt: skip

    def ahead_rows(self) -> int:
        """The least rows from which a sweep had better read all experts ahead of their routers, see `Traffic`."""
        traffic = self._traffic_of(self.max_nodes)
        return NEVER if traffic is None else traffic.ahead_rows(self._costs_of(None))

    def _traffic_of(self, num_nodes: int) -> Traffic | None:
        traffic = self.traffic_of(num_nodes)
        return None if traffic is None else traffic.routed_by(self.routing)

    def step_s(self, num_rows: int, draft_widths: Sequence[int]) -> float:
        """Seconds of a step by rows of its sweep and its draft passes; always the same where nothing was measured."""
        traffic, costs = self._traffic_of(num_rows), self._costs_of(None)
        if costs is None or traffic is None:
            return 1.0
        return step_of(costs, traffic, num_rows, draft_widths).total_s

    def _costs_of(self, profile: Profile | None) -> Costs | None:
        """The profile's curves where its most threads are ours, else what was measured at start; today's link."""
        is_usable = profile is not None and self.num_threads in (None, profile.num_threads)
        costs = profile.costs if profile is not None and is_usable else self.costs
        if costs is None or self.link_bytes_per_s is None:
            return costs
        compute_s = costs.compute_s if self.exchange_s is NOTHING else costs.compute_s.plus(self.exchange_s)
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
