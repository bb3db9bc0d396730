"""The tree of a run: the named one, or the best one for the pair, the settings and the machine.

Decoding, predicting, tuning and measuring ask the same function of the same value, so that all of
them mean the same tree. Every caller chooses from the same sizes: how large a tree may be follows
from what its rows and its memory cost.

No torch, no clock, nothing is changed. Invariant: no tree is larger than memory was planned for,
and an explicit choice is never changed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.planning.acceptance import AcceptancePrior, DynamicYield
from offload.planning.cost_model import (
    Costs,
    Prediction,
    StepTime,
    Traffic,
    paced,
    step_time,
)
from offload.planning.knowledge import Knowledge, Provenance
from offload.planning.next_tree import next_tree
from offload.planning.search import (
    DEPTHS,
    SOURCE,
    SearchTerms,
    TreeSearch,
    known_trees,
    range_for,
    search,
)
from offload.rules import drafting_of
from offload.trees.spec import (
    AUTO_DEPTH,
    AUTO_NODES,
    MAX_CHAIN,
    MAX_TREE_NODES,
    TreeSpec,
    label_of,
)
from offload.trees.topology import SIZES, DynamicShape, Floats, Shape, chain, isotonic

LOOKUP_NODES = 64  # of trees of retrieved guesses alone, as in REST (2311.08252, section 4)
LOOKUP_DEPTH = 32  # of such trees; copied passages may be long
NUM_SHOWN = 5
# A draft step beside a pass where nothing was measured: "always less than 0.05" in the experiments
# of Leviathan et al. (2211.17192, section 3.3).
CHAIN_COST = 0.05
_SPARE_TRAFFIC = 1.01  # bytes of a sweep with room for guesses over one without, at most
# Times the least seconds per token: what is known of acceptance is no better than that.
_ALIKE = 1.02
_GROWTH = 4  # times the nodes of a tree that may yet change
_FEW_NODES = 64  # of trees whose nodes are ordered at once
_AS_STATIC = "; a dynamic tree counted as the static one of its size, which yields less"


# takes nodes of the largest tree; returns None where they do not fit
TrafficOf = Callable[[int], Traffic | None]


class TreeRoom(NamedTuple):
    """What memory leaves to trees."""

    traffic_of: TrafficOf  # what a plan for this many nodes moves, of all texts together
    max_nodes: int = MAX_TREE_NODES  # of all texts together
    context: int | None = None  # positions that there is room for: a tree must be less deep
    parallel: int = 1  # texts that may share a pass

    @classmethod
    def from_plan(cls, plan: MemoryPlan) -> "TreeRoom":
        """Return the room that memory is now planned for."""
        traffic = Traffic.from_plan(plan)
        return cls(lambda _: traffic, plan.num_nodes, plan.context, plan.parallel)

    @property
    def max_depth(self) -> int:
        """Return the greatest depth of a chosen tree."""
        return DEPTHS[-1] if self.context is None else self.context - 1

    def traffic_at(self, num_nodes: int, knowledge: Knowledge) -> Traffic | None:
        """Return the traffic of a sweep with memory planned for `num_nodes`, routed as counted."""
        traffic = self.traffic_of(num_nodes)
        return None if traffic is None else traffic.routed_by(knowledge.routing)


class TreeRequest(NamedTuple):
    """Whose tree is asked for."""

    room: TreeRoom
    rule: str = "match"  # of acceptance; decides whether chosen trees may be dynamic
    num_texts: int = 1  # that share a pass, each with such a tree
    current: Shape | None = None  # what was chosen before passes have shown more
    named: str | None = None  # the tree as this run names it; None where it was named at loading

    @property
    def is_dynamic(self) -> bool:
        return is_free_of_trees(self.rule)


def is_free_of_trees(rule: str) -> bool:
    """Return True if a seed's text is the same with every tree, which then may be dynamic."""
    return not drafting_of(rule).keeps_distributions


class TreeChoice(NamedTuple):
    """A tree and the reasons for it."""

    shape: Shape
    why: str
    tokens_per_sweep: float = 1.0  # as predicted
    # the best few, best first; empty where nothing was chosen
    candidates: tuple[Prediction, ...] = ()
    acceptance: Provenance = (
        Provenance.ASSUMED
    )  # whether the prediction rests on a profile of this pair

    @property
    def is_dynamic(self) -> bool:
        """Return True if size and depth are bounds, and every step has a shape of its own."""
        return isinstance(self.shape, DynamicShape)

    def tokens_range(
        self, files: ModelFiles, dtype: str, knowledge: Knowledge, basis: str
    ) -> tuple[tuple[float, float], str]:
        """Return the least and most tokens per pass of this pair, and what they rest on."""
        tokens = (self.tokens_per_sweep, self.tokens_per_sweep)
        prior = knowledge.prior
        profile = knowledge.profile
        if profile is None and prior is not None and prior.is_copy:
            why = f"{prior.source}, no measurement of this one"
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
        }


def choose(spec: TreeSpec, knowledge: Knowledge, request: TreeRequest) -> TreeChoice:
    """Return the tree for this spec. Raises `UserError` where rule, memory or context forbid it."""
    choice = _choose(spec, knowledge, request)
    _check(choice.shape, spec, request)
    return choice


def _choose(spec: TreeSpec, knowledge: Knowledge, request: TreeRequest) -> TreeChoice:
    room = request.room
    most = SIZES[-1] if knowledge.is_ranked else most_nodes(spec, knowledge, room)
    most = max(1, min(room.max_nodes, most) // request.num_texts)
    if not knowledge.is_ranked:
        return _of_guesses(spec, most, room.max_depth)
    spec.check_rule(request.rule)
    if spec.kind == "auto_chain":
        return _chain(knowledge, request, most)
    if spec.kind != "auto":
        return _named(spec, knowledge, request)
    if knowledge.costs is not None:
        return _best(knowledge, knowledge.costs, request, most)
    depth = min(AUTO_NODES - 1 if knowledge.is_copy else AUTO_DEPTH, room.max_depth)
    is_dynamic = request.is_dynamic and min(most - 1, room.max_depth) > 0
    default = TreeSpec("dynamic" if is_dynamic else "best", min(AUTO_NODES, most), depth)
    why = f"a default, since nothing was measured ({knowledge.note})"
    return _named(default, knowledge, request)._replace(why=why)


def _check(shape: Shape, spec: TreeSpec, request: TreeRequest) -> None:
    # a tree that is chosen is bounded where it is
    room = request.room
    is_named = request.named is not None and not spec.is_chosen
    most = room.max_nodes // room.parallel if is_named else room.max_nodes
    if shape.num_nodes > most:
        raise UserError(
            f"`tree` {request.named} has {shape.num_nodes} nodes, memory was planned for {most}: "
            "name a smaller one, or load the model with this one"
        )
    if room.context is not None and shape.depth >= room.context:
        raise UserError(
            f"the tree is {shape.depth} deep, the context has {room.context} positions: "
            "raise `context` or name a tree that is less deep"
        )


def _of_guesses(spec: TreeSpec, most: int, max_depth: int) -> TreeChoice:
    """Return the tree where guesses come from retrieval alone.

    Bounds are filled by the guesses that pay, a fixed shape as far as guesses reach.
    """
    num_nodes = spec.num_nodes
    depth = spec.depth
    if spec.is_chosen:
        num_nodes = min(LOOKUP_NODES, most)
        depth = min(LOOKUP_DEPTH, max_depth)
    depth = min(depth, num_nodes - 1)
    if depth < 1:
        why = "as named" if spec.kind == "none" else "there is room for no other"
        return TreeChoice(chain(0), why)
    if spec.kind in ("auto", "best", "dynamic"):
        paying = "as many guesses as pay" if spec.is_chosen else "all that is guessed"
        return TreeChoice(DynamicShape(num_nodes, depth), f"at most, {paying}")
    shape = chain(depth) if spec.is_chosen else spec.build()
    return TreeChoice(shape, "as far as guesses reach")


def _best(knowledge: Knowledge, costs: Costs, request: TreeRequest, most: int) -> TreeChoice:
    room = request.room
    known = knowledge.acceptance
    if isinstance(known, AcceptancePrior) and known.is_copy:
        # beyond the trees that were counted a copy's guesses are not known, its passes grow wide
        most = min(most, max(counted.num_nodes for counted in known.dynamic_yields))
    traffic_of = partial(room.traffic_at, knowledge=knowledge)
    num_texts = request.num_texts
    if request.is_dynamic and (traffic := traffic_of(1)):
        costs = knowledge.passes.costs(costs, num_texts, traffic.slots_bytes)
    terms = SearchTerms(costs, traffic_of, room.max_depth, request.is_dynamic, num_texts)
    trees_of = partial(_trees, knowledge, request, max_depth=DEPTHS[-1])
    trees, ranked = search(trees_of, most, terms, NUM_SHOWN)
    if not ranked:
        return TreeChoice(chain(0), "memory has no room for any tree")
    if request.is_dynamic and knowledge.passes.has_passes:
        best = next_tree(knowledge.passes, ranked, num_texts, request.current)
    else:
        best = _beside_prompts(ranked, traffic_of, num_texts)
    why = knowledge.basis
    if isinstance(best.shape, DynamicShape):
        counted = sum(shape.num_sweeps for shape in trees.counted)
        tuned = f", its dynamic trees in {counted} passes"
        why += tuned if counted else ", as if static: dynamic trees yield more"
    return TreeChoice(
        best.shape,
        why,
        best.tokens_per_sweep / num_texts,
        tuple(ranked[:NUM_SHOWN]),
        Provenance.ASSUMED if knowledge.profile is None else Provenance.MEASURED,
    )


def _beside_prompts(
    ranked: Sequence[Prediction], traffic_of: TrafficOf, num_texts: int
) -> Prediction:
    """Return the fastest tree, or one hardly slower that leaves room for more of a prompt.

    A pass too many for a prompt takes longer than a whole text gains by a tree that is a hundredth
    quicker.
    """
    most_s = _ALIKE * ranked[0].s_per_token

    def prompt_rows(prediction: Prediction) -> int:
        traffic = traffic_of(num_texts * prediction.shape.num_nodes)
        return 0 if traffic is None else traffic.prompt_rows

    alike = [prediction for prediction in ranked if prediction.s_per_token <= most_s]
    return max(alike, key=prompt_rows)


def chain_tokens(alpha: float, gamma: int) -> float:
    """Return the tokens of a pass after `gamma` guesses, its own included (2211.17192, Eq. 1)."""
    assert 0 <= alpha <= 1 and gamma >= 0, f"alpha {alpha} is a chance, gamma {gamma} a number"
    # (1 - alpha^(gamma+1)) / (1 - alpha), 1 included
    return math.fsum(alpha**length for length in range(gamma + 1))


def _chain(knowledge: Knowledge, request: TreeRequest, most: int) -> TreeChoice:
    """Return the chain with the most tokens per second, the shortest of equals (section 3.5).

    The paper's step costs gamma c + 1 passes. Where weights are streamed, a draft step may hide
    behind the link and a longer chain may compute longer, so seconds are those of `step_time`.
    Alpha is the acceptance of first guesses, corrected by chains that were run: only by what was
    settled before the step that the length is for, since a ratio test is biased otherwise.
    """
    alpha = knowledge.passes.chain_alpha(knowledge.acceptance.acceptance[0])
    lengths = range(min(MAX_CHAIN, most - 1, request.room.max_depth) + 1)
    why = f"alpha {alpha:.2f} ({knowledge.basis})"
    num_texts = request.num_texts
    traffic = request.room.traffic_at(num_texts * (1 + lengths[-1]), knowledge)
    costs = knowledge.costs
    if costs is None or traffic is None:
        why = f"{why}; a draft step as a {CHAIN_COST:g} of a pass"
        steps = [StepTime(gamma * CHAIN_COST, 1.0, 0.0, 0.0) for gamma in lengths]
    else:
        steps = [step_time(costs, traffic, chain(gamma), num_texts) for gamma in lengths]
    ranked = list[Prediction]()
    for gamma, step in zip(lengths, steps, strict=True):
        tokens = num_texts * chain_tokens(alpha, gamma)
        ranked.append(Prediction(f"chain:{gamma}", chain(gamma), step, (tokens, tokens)))
    ranked.sort(key=lambda prediction: prediction.s_per_token)
    shown = () if costs is None or traffic is None else tuple(ranked[:NUM_SHOWN])
    return TreeChoice(ranked[0].shape, why, ranked[0].tokens_per_sweep / num_texts, shown)


def _named(spec: TreeSpec, knowledge: Knowledge, request: TreeRequest) -> TreeChoice:
    depth = spec.depth if spec.kind == "best" else max(spec.depth, DEPTHS[-1])
    trees = _trees(knowledge, request, spec.num_nodes, max_depth=depth)
    if spec.kind == "best":
        tokens = trees.expected(spec.count, spec.depth)
        return TreeChoice(trees.whole.tree(spec.count, spec.depth), knowledge.basis, tokens)
    shape = spec.build()
    if isinstance(shape, DynamicShape):
        shape = paced(shape, knowledge.costs) if knowledge.costs else shape
        why = "at most, as the draft's scores suggest"
        return TreeChoice(shape, why, trees.expected_dynamic(shape.num_nodes, shape.depth))
    return TreeChoice(shape, "as named", trees.expected_of(shape))


def _trees(
    knowledge: Knowledge, request: TreeRequest, max_nodes: int, *, max_depth: int
) -> TreeSearch:
    measured = knowledge.acceptance
    p_K = isotonic(measured.acceptance)  # far ranks are noisy
    counted = measured.dynamic_yields
    if knowledge.profile is None and request.is_dynamic:
        expected = partial(_expected, p_K, counted)
        p_K = knowledge.passes.corrected_acceptance(p_K, expected)
        counted = tuple(
            replace(known, tokens_per_sweep=max(1.0, expected(p_K, known.num_nodes, known.depth)))
            for known in counted
        )
    return known_trees(tuple(p_K.tolist()), max_nodes, max_depth, counted)


def _expected(
    assumed_K: Floats,
    counted: tuple[DynamicYield, ...],
    p_K: Floats,
    num_nodes: int,
    depth: int,
) -> float:
    """Return the tokens of a pass with a dynamic tree if the acceptance is `p_K`.

    Its gain over a static tree stays what it was with the assumed acceptance, where that was
    `counted`.
    """
    # few sizes are ordered, since trees of many sizes are run
    most = next(size for size in SIZES if size >= max(_FEW_NODES, min(num_nodes, SIZES[-1])))
    tokens = known_trees(tuple(p_K.tolist()), max_nodes=most).expected(num_nodes, depth)
    if not counted:
        return tokens
    usual = known_trees(tuple(assumed_K.tolist()), max_nodes=most, counted=counted)
    return tokens * usual.expected_dynamic(num_nodes, depth) / usual.expected(num_nodes, depth)


def predict(
    spec: TreeSpec,
    costs: Costs,
    traffic: Traffic,
    shape: Shape,
    tokens: tuple[float, float],
    num_texts: int = 1,
) -> Prediction:
    """Return the cost of decoding with a tree; least and most `tokens` of a pass are each text's."""
    is_chosen = spec.kind == "auto" or shape.num_nodes == 1
    label = label_of(shape) if is_chosen else spec.label
    if spec.kind == "auto_chain":
        label = f"chain:{shape.depth}"
    step = step_time(costs, traffic, shape, num_texts)
    return Prediction(label, shape, step, (num_texts * tokens[0], num_texts * tokens[1]))


def most_nodes(spec: TreeSpec, knowledge: Knowledge, room: TreeRoom) -> int:
    """Return the most nodes of all trees together that memory will be planned for."""
    if not spec.is_chosen:
        return room.parallel * spec.num_nodes
    if not knowledge.is_ranked:
        return _nodes_to_spare(knowledge, room)
    sizes: Sequence[int] = SIZES
    if spec.kind == "auto_chain":
        longest = min(MAX_CHAIN, room.max_depth)
        sizes = [room.parallel * num_nodes for num_nodes in range(1, 2 + longest)]
    return next((size for size in reversed(sizes) if room.traffic_of(size) is not None), 1)


def _nodes_to_spare(knowledge: Knowledge, room: TreeRoom) -> int:
    """Return the nodes that retrieved guesses may have at next to no cost."""
    alone = room.traffic_at(room.parallel, knowledge)
    if alone is None:
        return 1
    # for a pass of one row; what guesses add to it is weighed in every step
    most_bytes = alone.bytes_at(1) * _SPARE_TRAFFIC
    for size in reversed([room.parallel * size for size in SIZES if size <= LOOKUP_NODES]):
        traffic = room.traffic_at(size, knowledge)
        if (
            traffic
            and traffic.bytes_at(1) <= most_bytes
            and traffic.slots_bytes >= alone.slots_bytes
        ):
            return size
    return 1


def first_choices(
    spec: TreeSpec, knowledge: Knowledge, room: TreeRoom, rule: str
) -> dict[int, TreeChoice]:
    """Return the trees of runs that begin alone, and among as many texts as there may be."""
    return {
        num_texts: choose(spec, knowledge, TreeRequest(room, rule, num_texts))
        for num_texts in {1, room.parallel}
    }


def planned_nodes(
    spec: TreeSpec,
    knowledge: Knowledge,
    room: TreeRoom,
    rule: str,
    choices: Mapping[int, TreeChoice],
) -> int:
    """Return the nodes of the largest trees that runs with these settings will take.

    With `chain:auto` it is the longest chain. Trees that passes may yet change have room to grow,
    as far as it moves no more bytes.
    """
    if spec.kind == "auto_chain":
        return most_nodes(spec, knowledge, room)
    chosen = max(num_texts * choice.shape.num_nodes for num_texts, choice in choices.items())
    may_change = spec.kind == "auto" and knowledge.is_ranked and is_free_of_trees(rule)
    if not may_change or chosen == 1:
        return chosen
    traffic = room.traffic_at(chosen, knowledge)
    sizes = (size for size in reversed(SIZES) if chosen < size <= _GROWTH * chosen)
    same = (size for size in sizes if room.traffic_at(size, knowledge) == traffic)
    return chosen if traffic is None else next(same, chosen)
