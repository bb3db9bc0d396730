"""The tree of a run: the named one, or the best one for the pair, the settings and the machine.

One selector serves decoding, predicting, tuning and measuring, so that all of them mean the same
tree. It uses a profile of `offload tune` that holds for exactly this run, else the default
acceptance and a quick calibration at start; and in any case what passes have shown since. Every
caller chooses from the same sizes: how large a tree may be follows from what its rows and its
memory cost.

No torch, no clock. Invariant: no tree is larger than memory was planned for, an explicit choice is
never changed, and the basis of a choice is reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.planning.acceptance import SMALL, AcceptancePrior, prior_for
from offload.planning.chains import ASSUMED_COST, ChainPolicy, tokens_per_pass
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
from offload.planning.profile import FindProfile, Profile
from offload.planning.search import DEPTHS, SOURCE, TreeSearch, known_trees, range_for, search
from offload.planning.seen import ObservedPass, ObservedPasses
from offload.rules import drafting_of
from offload.sampling_options import Sampling
from offload.trees.spec import (
    AUTO_DEPTH,
    AUTO_NODES,
    MAX_CHAIN,
    MAX_TREE_NODES,
    TreeSpec,
    parse_tree,
)
from offload.trees.topology import SIZES, DynamicShape, Floats, Shape, chain, isotonic

LOOKUP_NODES = 64  # of trees of retrieved guesses alone, as in REST (2311.08252, section 4)
LOOKUP_DEPTH = 32  # of such trees; copied passages may be long
NUM_SHOWN = 5
_SPARE_TRAFFIC = 1.01  # bytes of a sweep with room for guesses over one without, at most
# Times the least seconds per token: what is known of acceptance is no better than that.
_ALIKE = 1.02
_GROWTH = 4  # times the nodes of a tree that may yet change
_FEW_NODES = 64  # of trees whose nodes are ordered at once
_MOST_KNOWN = 256  # choices that are kept
# A choice is made again when passes have taken this many times as long as choosing takes.
_SELDOM = 25
_CHOICE_S = 0.02  # measured on one core at 2.4 GHz
_AS_STATIC = "; a dynamic tree counted as the static one of its size, which yields less"


class RunSettings(NamedTuple):
    """What a tree is chosen for."""

    sampling: Sampling
    rule: str


# takes nodes of the largest tree; returns None where they do not fit
TrafficOf = Callable[[int], Traffic | None]


class TreeChoice(NamedTuple):
    """A tree and the reasons for it."""

    shape: Shape
    why: str
    tokens_per_sweep: float = 1.0  # as predicted
    # the best few, best first; empty where nothing was chosen
    candidates: tuple[Prediction, ...] = ()
    # with `chain:auto` the policy for later chains; `shape` is the first one
    chains: ChainPolicy | None = None
    is_measured: bool = False  # whether the prediction rests on a profile of this pair

    @property
    def is_dynamic(self) -> bool:
        """Return True if size and depth are bounds, and every step has a shape of its own."""
        return isinstance(self.shape, DynamicShape)

    def tokens_range(
        self, files: ModelFiles, dtype: str, profile: Profile | None, basis: str
    ) -> tuple[tuple[float, float], str]:
        """Return the least and most tokens per pass of this pair, and what they rest on."""
        tokens = (self.tokens_per_sweep, self.tokens_per_sweep)
        usual = prior_for(files)
        if profile is None and usual is not None and usual.is_copy:
            why = f"{usual.source}, no measurement of this one"
            return tokens, f"{why}; {basis}" if basis else why
        if profile is None:
            target, draft = (
                model_shape(checkpoint, dtype).num_weights for checkpoint in filter(None, files)
            )
            like = range_for(draft / target)
            why = f"a range, as measured for {' and '.join(like.pairs)} ({SOURCE})"
            tokens = like.around(self.tokens_per_sweep)
            basis = f"{why}; {basis}" if basis else why
        is_guess = self.is_dynamic and not (profile and profile.dynamic_yields)
        return tokens, basis + (_AS_STATIC if is_guess else "")

    def as_dict(self) -> dict[str, object]:
        """Return the field `tree_choice` of `--json`."""
        return {
            "num_nodes": self.shape.num_nodes,
            "depth": self.shape.depth,
            "is_dynamic": self.is_dynamic,
            "why": self.why,
            "tokens_per_sweep": self.tokens_per_sweep,
            "candidates": [candidate.as_dict() for candidate in self.candidates],
            **({"chains": self.chains.as_dict()} if self.chains else {}),
        }


@dataclass(frozen=True)
class _Selection:
    """One choice of a `TreeSelector`."""

    known: "TreeSelector"
    rule: str  # of acceptance; decides whether chosen trees may be dynamic
    profile: Profile | None  # None takes the usual acceptance, and `note` says why
    note: str
    num_texts: int  # that share a pass, each with such a tree
    max_nodes: int  # of all texts' trees together

    @property
    def acceptance(self) -> Profile | AcceptancePrior:
        """Return the acceptance, measured or assumed."""
        known = self.profile or self.known.usual
        assert known is not None, "something ranks candidates"
        return known

    @cached_property
    def costs(self) -> Costs | None:
        return self.known.costs_of(self.profile)

    @property
    def most(self) -> int:
        """Return the number of nodes that each text may have."""
        return max(1, self.max_nodes // self.num_texts)

    @property
    def is_dynamic(self) -> bool:
        return is_free_of_trees(self.rule)

    @property
    def basis(self) -> str:
        if isinstance(known := self.acceptance, AcceptancePrior):
            return f"{known.source}, {self.note}"
        return f"{known.num_tokens} traced tokens, profile of {known.created}"

    def choose(self, spec: TreeSpec, current: Shape | None = None) -> TreeChoice:
        """Return the tree for this spec. Raises `UserError` if the rule does not allow it.

        Args:
            current: what was chosen before passes have shown more.
        """
        if not self.known.is_ranked:
            return self._of_guesses(spec)
        spec.check_rule(self.rule)
        if spec.kind == "auto_chain":
            return self._chain()
        if spec.kind != "auto":
            return self._named(spec)
        if self.costs is not None:
            return self._best(self.costs, current)
        default = TreeSpec(
            "dynamic" if self.is_dynamic and min(self.most - 1, self.known.max_depth) else "best",
            min(AUTO_NODES, self.most),
            min(
                AUTO_NODES - 1 if self.known.is_copy else AUTO_DEPTH,
                self.known.max_depth,
            ),
        )
        return self._named(default)._replace(
            why=f"a default, since nothing was measured ({self.note})"
        )

    def _of_guesses(self, spec: TreeSpec) -> TreeChoice:
        """Return the tree where guesses come from retrieval alone.

        Bounds are filled by the guesses that pay, a fixed shape as far as guesses reach.
        """
        num_nodes = spec.num_nodes
        depth = spec.depth
        if spec.is_chosen:
            num_nodes = min(LOOKUP_NODES, self.most)
            depth = min(LOOKUP_DEPTH, self.known.max_depth)
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

    def _best(self, costs: Costs, current: Shape | None) -> TreeChoice:
        trees_of = partial(self._trees, max_depth=DEPTHS[-1])
        known = self.acceptance
        most = self.most
        if isinstance(known, AcceptancePrior) and known.is_copy:
            # beyond the trees that were counted a copy's guesses are not known, its passes grow wide
            most = min(most, max(counted.num_nodes for counted in known.dynamic_yields))
        if self.is_dynamic and (traffic := self._traffic(1)):
            costs = self.known.seen.costs(costs, self.num_texts, traffic.slots_bytes)
        trees, ranked = search(
            trees_of,
            most,
            costs,
            self._traffic,
            self.known.max_depth,
            is_dynamic=self.is_dynamic,
            num_texts=self.num_texts,
            most=NUM_SHOWN,
        )
        if not ranked:
            return TreeChoice(chain(0), "memory has no room for any tree")
        if self.is_dynamic and self.known.seen.has_passes:
            best = self.known.seen.choose(ranked, self.num_texts, current)
        else:
            best = self._beside_prompts(ranked)
        why = self.basis
        if isinstance(best.shape, DynamicShape):
            counted = sum(shape.num_sweeps for shape in trees.counted)
            why += (
                f", growth repeated for {counted} passes"
                if counted
                else ", as if static: dynamic trees yield more"
            )
        return TreeChoice(
            best.shape,
            why,
            best.tokens_per_sweep / self.num_texts,
            tuple(ranked[:NUM_SHOWN]),
            is_measured=self.profile is not None,
        )

    def _beside_prompts(self, ranked: Sequence[Prediction]) -> Prediction:
        """Return the fastest tree, or one hardly slower that leaves room for more of a prompt.

        A pass too many for a prompt takes longer than a whole text gains by a tree that is a
        hundredth quicker.
        """
        alike = [
            prediction
            for prediction in ranked
            if prediction.s_per_token <= _ALIKE * ranked[0].s_per_token
        ]

        def prompt_rows(prediction: Prediction) -> int:
            traffic = self._traffic(self.num_texts * prediction.shape.num_nodes)
            return 0 if traffic is None else traffic.prompt_rows

        return max(alike, key=prompt_rows)

    def _chain(self) -> TreeChoice:
        """Return the chain of the length with the largest gain, by the first acceptance entry."""
        alpha = self.acceptance.acceptance[0]
        most = min(MAX_CHAIN, self.most - 1, self.known.max_depth)
        why = f"alpha {alpha:.2f} at first ({self.basis})"
        traffic = self._traffic(most + 1)
        if self.costs is None or traffic is None:
            policy = ChainPolicy.assumed(alpha, most)
            why = f"{why}; a draft step as a {ASSUMED_COST:g} of a pass"
        else:
            policy = ChainPolicy.from_costs(alpha, self.costs, traffic, most)
        ranked = [policy.predicted(gamma) for gamma in range(most + 1)]
        ranked.sort(key=lambda prediction: prediction.s_per_token)
        gamma = policy.length()
        candidates = () if self.costs is None or traffic is None else tuple(ranked[:NUM_SHOWN])
        return TreeChoice(chain(gamma), why, tokens_per_pass(alpha, gamma), candidates, policy)

    def _traffic(self, num_nodes: int) -> Traffic | None:
        traffic = self.known.traffic_at(num_nodes)
        return None if traffic is None else traffic.routed_by(routing_in(self.profile))

    def _named(self, spec: TreeSpec) -> TreeChoice:
        trees = self._trees(
            spec.num_nodes, spec.depth if spec.kind == "best" else max(spec.depth, DEPTHS[-1])
        )
        if spec.kind == "best":
            tokens = trees.expected(spec.count, spec.depth)
            return TreeChoice(trees.whole.tree(spec.count, spec.depth), self.basis, tokens)
        shape = spec.build()
        if isinstance(shape, DynamicShape):
            shape = paced(shape, self.costs) if self.costs else shape
            why = "at most, as the draft's scores suggest"
            return TreeChoice(shape, why, trees.expected_dynamic(shape.num_nodes, shape.depth))
        return TreeChoice(shape, "as named", trees.expected_of(shape))

    def _trees(self, max_nodes: int, max_depth: int) -> TreeSearch:
        measured = self.acceptance
        p_K = isotonic(measured.acceptance)  # far ranks are noisy
        counted = measured.dynamic_yields
        if self.profile is None and self.is_dynamic and not counted:
            p_K = self.known.seen.corrected_acceptance(p_K, self._expected)
        law = tuple(p_K.tolist())
        return known_trees(law, measured.traces, measured.smoothing, max_nodes, max_depth, counted)

    def _expected(self, p_K: Floats, num_nodes: int, depth: int) -> float:
        """Return the tokens of a tree by the product form."""
        trees = known_trees(tuple(p_K.tolist()), max_nodes=max(_FEW_NODES, num_nodes))
        return trees.expected(num_nodes, depth)


def is_free_of_trees(rule: str) -> bool:
    """Return True if a seed's text is the same with every tree, which then may be dynamic."""
    return not drafting_of(rule).keeps_distributions


def routing_in(profile: Profile | None) -> ExpertRouting | None:
    """Return the routing that a profile has counted, or None."""
    uses = None if profile is None else profile.expert_uses
    return None if uses is None else ExpertRouting.counted(uses.uses_LE, uses.num_rows)


@dataclass
class TreeSelector:
    """What is known of a pair, a machine and its decoder; `for_run` selects the tree of a run."""

    spec: TreeSpec  # the tree that `load` was asked for
    find: FindProfile
    # what a plan for this many nodes moves; after `limit_to` the plan's own
    traffic_of: TrafficOf = lambda _: None
    # measured at start: disks drift, so a profile's own figure may be old
    link_bytes_per_s: float | None = None
    costs: Costs | None = None  # from the start, for runs without a profile of their own
    has_own_times: bool = True  # whether the times of a profile are of the machine that decodes
    exchange_s: Curve = NOTHING  # of a sweep of many ranks, beside computing
    num_threads: int | None = None  # the most that this run computes with
    max_nodes: int = MAX_TREE_NODES
    context: int | None = None  # positions that there is room for: a tree must be less deep
    # stands in for a profile; None where there are retrieved guesses alone, of which nothing is
    # known beforehand
    usual: AcceptancePrior | None = SMALL
    routing: ExpertRouting | None = None  # where experts were counted
    parallel: int = 1  # texts that may share a pass
    # choices, and when they were made
    _known: dict[tuple[TreeSpec, str, str, int], tuple[TreeChoice, int]] = field(
        default_factory=dict
    )
    seen: ObservedPasses = field(default_factory=ObservedPasses)  # passes of this decoder
    _since_s: float = 0.0  # of passes that no choice has used
    _num_learnt: int = 0  # how often choices became old
    # costs as they were measured, and as passes have corrected them since
    _corrected: tuple[Costs | None, Costs | None] = (None, None)

    @classmethod
    def without_trees(cls, plan: MemoryPlan) -> "TreeSelector":
        """Return a selector of no tree, for a decoder whose guesses are made elsewhere."""
        traffic = Traffic.from_plan(plan)
        none = (None, "no profile is wanted")
        return cls(
            TreeSpec("none"),
            lambda *_: none,
            lambda _: traffic,
            context=plan.context,
            usual=None,
        )

    def took(self, observed: ObservedPass) -> None:
        """Record a pass; a later choice uses it."""
        self.seen.add(observed)
        self._corrected = None, None
        self._since_s += observed.draft_s + observed.sweep_s
        if self._since_s > _SELDOM * _CHOICE_S:
            self._since_s = 0.0
            self._num_learnt += 1

    def check(self, sampling: Sampling, rule: str) -> None:
        """Raise `UserError`, before measuring, for a named tree or profile that cannot serve."""
        self.find(sampling, rule)
        if not self.spec.is_chosen:
            self.for_run(sampling, rule)

    @property
    def is_ranked(self) -> bool:
        """Return True if a draft ranks every candidate."""
        return self.usual is not None

    @property
    def is_copy(self) -> bool:
        """Return True if that draft is a copy of the target."""
        return self.usual is not None and self.usual.is_copy

    @property
    def max_depth(self) -> int:
        """Return the greatest depth of a chosen tree."""
        return DEPTHS[-1] if self.context is None else self.context - 1

    @property
    def most_nodes(self) -> int:
        """Return the most nodes of all trees together that memory will be planned for."""
        if not self.spec.is_chosen:
            return self.parallel * self.spec.num_nodes
        if not self.is_ranked:
            return self._nodes_to_spare()
        sizes: Sequence[int] = SIZES
        if self.spec.kind == "auto_chain":
            longest = min(MAX_CHAIN, self.max_depth)
            sizes = [self.parallel * num_nodes for num_nodes in range(1, 2 + longest)]
        return next((size for size in reversed(sizes) if self.traffic_of(size) is not None), 1)

    def _nodes_to_spare(self) -> int:
        """Return the nodes that retrieved guesses may have at next to no cost."""
        alone = self.traffic_at(self.parallel)
        if alone is None:
            return 1
        # for a pass of one row; what guesses add to it is weighed in every step
        most_bytes = alone.bytes_at(1) * _SPARE_TRAFFIC
        for size in reversed([self.parallel * size for size in SIZES if size <= LOOKUP_NODES]):
            traffic = self.traffic_at(size)
            if (
                traffic
                and traffic.bytes_at(1) <= most_bytes
                and traffic.slots_bytes >= alone.slots_bytes
            ):
                return size
        return 1

    def planned_nodes(self, sampling: Sampling, rule: str) -> int:
        """Return the nodes of the largest trees that runs with these settings will take.

        With `chain:auto` it is the longest chain. Trees that passes may yet change have room to
        grow, as far as it moves no more bytes.
        """
        if self.spec.kind == "auto_chain":
            return self.most_nodes
        chosen = max(
            num * self.for_run(sampling, rule, num_texts=num).shape.num_nodes
            for num in {1, self.parallel}
        )
        may_change = self.spec.kind == "auto" and self.is_ranked and is_free_of_trees(rule)
        return self._largest_with_same_traffic(chosen) if may_change and chosen > 1 else chosen

    def _largest_with_same_traffic(self, num_nodes: int) -> int:
        """Return the most nodes, up to `_GROWTH` times as many, whose plan moves the same bytes."""
        traffic = self.traffic_at(num_nodes)
        if traffic is None:
            return num_nodes
        sizes = (size for size in reversed(SIZES) if num_nodes < size <= _GROWTH * num_nodes)
        return next((size for size in sizes if self.traffic_at(size) == traffic), num_nodes)

    def settle_link(
        self,
        link_bytes_per_s: float | None,
        profile: Profile | None,
        *,
        is_here: bool,
        products_s: Curve = NOTHING,
    ) -> Costs | None:
        """Note the rate of the link, and return the costs of a step that are known unmeasured.

        They are None where a step was never measured. Then trees are no larger than memory has
        room for, and weighed only where each row takes time or asks for bytes of its own.

        Args:
            is_here: this machine will decode.
            products_s: the least that a pass computes against its rows, where that is known.
        """
        if is_here:
            self.link_bytes_per_s = link_bytes_per_s
            self.has_own_times = link_bytes_per_s is not None
        costs = self.costs_of(profile)
        if costs is None:
            traffic = self.traffic_of(1)
            asks = traffic is not None and traffic.experts is not None
            if link_bytes_per_s and (asks or products_s is not NOTHING):
                self.costs = replace(link_alone(link_bytes_per_s), compute_s=products_s)
            self.max_nodes = self.most_nodes if self.spec.is_chosen else self.max_nodes
        return costs

    def limit_to(self, plan: MemoryPlan) -> None:
        """Limit trees to those that memory is now planned for."""
        traffic = Traffic.from_plan(plan)
        self.traffic_of = lambda _: traffic
        self.max_nodes = plan.num_nodes
        self.context = plan.context

    def for_run(
        self, sampling: Sampling, rule: str, tree: str | None = None, num_texts: int = 1
    ) -> TreeChoice:
        """Return the tree named for this run or for all, or the best one. Raises `UserError`."""
        spec = self.spec if tree is None else parse_tree(tree)
        profile, note = self._profile(spec, sampling, rule)
        # a note names its profile: without one any sampling has the same tree
        key = (spec, note, rule, num_texts)
        choice, num_learnt = self._known.get(key, (None, 0))
        is_old = spec.kind == "auto" and num_learnt < self._num_learnt
        if choice is None or is_old:
            max_nodes = min(self.max_nodes, SIZES[-1] if self.is_ranked else self.most_nodes)
            if spec.kind == "auto_chain":  # it may grow after other texts have joined
                max_nodes //= self.parallel
                num_texts = 1
            selection = _Selection(self, rule, profile, note, num_texts, max_nodes)
            choice = selection.choose(spec, choice and choice.shape)
            self._check(choice.shape, tree, spec)
            if len(self._known) >= _MOST_KNOWN:  # a server is asked for any settings
                self._known.clear()
            self._known[key] = choice, self._num_learnt
        return choice

    def _profile(self, spec: TreeSpec, sampling: Sampling, rule: str) -> tuple[Profile | None, str]:
        try:
            return self.find(sampling, rule)
        except UserError as error:
            if spec.is_chosen or spec.kind == "best":
                raise
            return None, str(error)  # only the prediction rests on it

    def ahead_rows(self) -> int:
        """Return the least rows for which a sweep should prefetch all experts, see `Traffic`."""
        traffic = self.traffic_at(self.max_nodes)
        return NEVER if traffic is None else traffic.ahead_rows(self.costs_of(None))

    def traffic_at(self, num_nodes: int) -> Traffic | None:
        """Return the traffic of a sweep with memory planned for `num_nodes`, routed as counted."""
        traffic = self.traffic_of(num_nodes)
        return None if traffic is None else traffic.routed_by(self.routing)

    def step_s(self, num_rows: int, draft_widths: Sequence[int]) -> float:
        """Return the seconds of a step from its rows; constant where nothing was measured."""
        traffic = self.traffic_at(num_rows)
        costs = self._costs_of_steps(traffic)
        if costs is None or traffic is None:
            return 1.0
        return step_of(costs, traffic, num_rows, draft_widths).total_s

    def _costs_of_steps(self, traffic: Traffic | None) -> Costs | None:
        """Return the costs, those of a copy as the last passes of a lone text have corrected them.

        A copy's passes are most of what its drafting takes. Of a small draft as much again goes by
        beside them, once a step: charged to each pass it would end trees too early.
        """
        costs = self.costs_of(None)
        if costs is None or traffic is None or not self.is_copy:
            return costs
        known, corrected = self._corrected
        if known != costs:
            corrected = self.seen.costs_of_passes(costs, traffic.slots_bytes)
            self._corrected = costs, corrected
        return corrected

    def costs_of(self, profile: Profile | None) -> Costs | None:
        """Return the profile's costs if they hold here, else those from start, on today's link."""
        is_usable = profile is not None and self.num_threads in (None, profile.num_threads)
        is_usable = is_usable and self.has_own_times
        costs = profile.costs if profile is not None and is_usable else self.costs
        if costs is None or self.link_bytes_per_s is None:
            return costs
        compute_s = (
            costs.compute_s if self.exchange_s is NOTHING else costs.compute_s.plus(self.exchange_s)
        )
        return replace(costs, link_bytes_per_s=self.link_bytes_per_s, compute_s=compute_s)

    def _check(self, shape: Shape, tree: str | None, spec: TreeSpec) -> None:
        # a tree that is chosen is bounded where it is
        is_named = tree is not None and not spec.is_chosen
        most = self.max_nodes // self.parallel if is_named else self.max_nodes
        if shape.num_nodes > most:
            raise UserError(
                f"`tree` {tree} has {shape.num_nodes} nodes, memory was planned for {most}: "
                "name a smaller one, or load the model with this one"
            )
        if self.context is not None and shape.depth >= self.context:
            raise UserError(
                f"the tree is {shape.depth} deep, the context has {self.context} positions: "
                "raise `context` or name a tree that is less deep"
            )
