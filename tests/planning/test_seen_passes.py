"""The tree of one text and of many, on made-up machines: as good as the best, whatever was believed at first.

A machine is a true cost of passes by rows and texts, and a true acceptance. What `auto` knows of it at the start is
either the truth, or what a trial with weights in the processor's cache, one text and no reader beside it would say.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from expected import rank_trees
from known import selector
from matrix import matrix

from offload.engine.run_trees import TreeSelector
from offload.planning.choice import TrafficOf
from offload.planning.cost_model import Costs, Curve, Prediction, StepTime, Traffic, overlapped_s, step_time
from offload.planning.next_tree import next_tree
from offload.planning.observed_passes import ObservedPass, ObservedPasses, with_misses
from offload.planning.search import TreeSearch
from offload.sampling_options import Sampling
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape, Shape, Topology, chain, check_acceptance

GB = 10**9
MOST_NODES, ALLOWED = 512, 1.07
USUAL = check_acceptance(DEFAULT_ACCEPTANCE)
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Machine(NamedTuple):
    """Seconds of computing by rows, and of what every text adds; the link is of 1 GB/s."""

    base_s: float
    row_s: float
    text_s: float
    streamed_bytes: int
    step_rows: int = 1  # rows are computed in multiples of it
    overlap_penalty: float = 0.0  # of computing and the link at once, see `overlapped_s`
    draft_s: float = 2e-3
    misses: float = 1.0  # times as many as by the default acceptance

    def costs(self, num_texts: int) -> Costs:
        rows = sorted({*ROWS, *(row + 1 for row in ROWS)})
        seconds = [self.base_s + self.row_s * -(-row // self.step_rows) * self.step_rows for row in rows]
        compute = Curve(tuple(rows), tuple(row_s + self.text_s * num_texts for row_s in seconds))
        return Costs(compute_s=compute, draft_step_s=Curve((1, 512), (self.draft_s, 8 * self.draft_s)), verify_s=0.0,
                     link_bytes_per_s=1.0 * GB)  # fmt: skip

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.streamed_bytes, self.streamed_bytes // 40)

    @property
    def acceptance(self) -> np.ndarray:
        return with_misses(USUAL, self.misses)

    def step(self, shape: Shape, num_texts: int) -> tuple[StepTime, float]:
        """A step, and the seconds of its sweep."""
        step = step_time(self.costs(num_texts), self.traffic, shape, num_texts)
        return step, overlapped_s(step.compute_s, step.link_s, self.overlap_penalty)

    def s_per_token(self, shape: Shape, num_texts: int) -> float:
        tokens = trees_of(self.misses, num_texts).expected_dynamic(shape.num_nodes, shape.depth)
        step, sweep_s = self.step(shape, num_texts)
        return (step.draft_s + sweep_s) / (num_texts * tokens)


@cache
def trees_of(misses: float, num_texts: int) -> TreeSearch:
    return TreeSearch(with_misses(USUAL, misses), max_nodes=MOST_NODES // num_texts)


@cache
def least_s(machine: Machine, num_texts: int) -> float:
    """Seconds per token of the best tree of the grid, in truth."""
    forest, costs = trees_of(machine.misses, num_texts), machine.costs(num_texts)
    ranked = rank_trees(forest, costs, lambda _: machine.traffic, is_dynamic=True, num_texts=num_texts)
    return min(machine.s_per_token(prediction.shape, num_texts) for prediction in ranked)


@cache
def tree_of(misses: float, num_nodes: int, depth: int) -> Topology:
    return trees_of(misses, 1).whole.tree(num_nodes, depth)


MACHINES = {
    "link": Machine(0.2, 1e-3, 0.0, 2 * GB),
    "computing": Machine(0.2, 2e-2, 0.0, GB // 4),
    "mixed": Machine(0.4, 1e-2, 0.02, 1 * GB),
    "mixed, both at once cost more": Machine(0.3, 1e-2, 0.01, 1 * GB, overlap_penalty=0.3),
    "in parts of 64 rows": Machine(0.1, 1.2e-2, 0.01, GB // 2, step_rows=64),
    "costly texts": Machine(0.1, 4e-3, 0.15, GB // 2),
    "slow draft": Machine(0.1, 2e-3, 0.0, GB // 2, draft_s=0.05),
    "good guesses": Machine(0.3, 1.5e-2, 0.02, 1 * GB, misses=0.5),
    "bad guesses": Machine(0.3, 1.5e-2, 0.02, 1 * GB, misses=1.9),
    "resident": Machine(0.3, 1e-2, 0.02, 0),
}


def trees_with(machine: Machine, costs: Costs, traffic_of: TrafficOf | None = None) -> TreeSelector:
    room = {"max_nodes": MOST_NODES, "parallel": 16}
    return selector("auto", traffic_of or machine.traffic, **room, tried=costs, link=costs.link_bytes_per_s)


def chosen(trees: TreeSelector, num_texts: int) -> Shape:
    return trees.for_run(Sampling(), "match", num_texts=num_texts).shape


def tokens_of(machine: Machine, shape: Shape, rng: np.random.Generator) -> int:
    """Draw the tokens of one tree, position by position: a guess comes true as often as its rank does there."""
    tree = tree_of(machine.misses, shape.num_nodes, shape.depth)
    first_child = (1 + np.cumsum([0, *tree.num_children_N.tolist()])).tolist()
    chances, node, num_tokens = machine.acceptance, 0, 1
    while True:
        rank = int(np.searchsorted(np.cumsum(chances), rng.random()))
        if rank >= tree.num_children_N[node]:
            return num_tokens
        node, num_tokens = first_child[node] + rank, num_tokens + 1


def passes(machine: Machine, trees: TreeSelector, num_texts: int, num_passes: int, seed: int) -> Iterator[Shape]:
    """Shapes of passes that this machine runs, and tells of; times scatter, and one in twenty is late."""
    rng = np.random.default_rng(seed)
    for _ in range(num_passes):
        shape = chosen(trees, num_texts)
        yield shape
        step, quiet_s = machine.step(shape, num_texts)
        late = rng.normal(1.0, 0.03) * (1.5 if rng.random() < 0.05 else 1.0)
        sweep_s, tokens = quiet_s * late, [tokens_of(machine, shape, rng) for _ in range(num_texts)]
        stall_s = max(0.0, quiet_s - step.compute_s) * (step.link_s > step.compute_s)
        nodes, times = [shape.num_nodes] * num_texts, (step.draft_s, sweep_s, stall_s)
        link = (machine.streamed_bytes, machine.streamed_bytes / GB)
        trees.observe(ObservedPass([shape] * num_texts, nodes, tokens, *times, *link))


def believed(machine: Machine, belief: str, num_texts: int) -> Costs:
    true = machine.costs(num_texts)
    if belief == "truth":
        return true
    if belief == "slow link":  # as while something else uses the disk: rows seem to be free
        return replace(true, link_bytes_per_s=true.link_bytes_per_s / 4)
    known = machine._replace(text_s=0.0, step_rows=1, overlap_penalty=0.0)
    factor = {"half": 0.5, "twice": 2.0}[belief]
    known = known._replace(base_s=factor * known.base_s, row_s=factor * known.row_s, draft_s=known.draft_s / factor)
    costs = known.costs(num_texts)
    few = Curve((1, 16, 64, 256), tuple(costs.compute_s.at(rows) for rows in (1, 16, 64, 256)))
    return Costs(compute_s=few, draft_step_s=costs.draft_step_s, verify_s=0.0, link_bytes_per_s=factor * 1.2 * GB)


@pytest.mark.parametrize("num_texts", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", MACHINES)
def test_what_is_known_at_the_start_gives_the_best_tree(name: str, num_texts: int) -> None:
    machine = MACHINES[name]._replace(misses=1.0)  # which is not known then
    shape = chosen(trees_with(machine, machine.costs(num_texts)), num_texts)
    assert machine.s_per_token(shape, num_texts) <= ALLOWED * least_s(machine, num_texts)


def mean_cost(machine: Machine, belief: str, num_texts: int, seed: int, *, first: int = 24, last: int = 64) -> float:
    """Return, for these passes, seconds per token over those of the best tree."""
    trees = trees_with(machine, believed(machine, belief, num_texts))
    shapes = list(passes(machine, trees, num_texts, last, seed))[first:]
    costs = [machine.s_per_token(shape, num_texts) for shape in shapes]
    return float(1 / np.mean([1 / cost for cost in costs])) / least_s(machine, num_texts)


AXES = (MACHINES, (1, 2, 4, 8, 16), ("truth", "half", "twice", "slow link"))


@matrix("name, num_texts, belief", product(*AXES), daily=12)
def test_passes_correct_what_was_believed(name: str, num_texts: int, belief: str) -> None:
    """A lone text, whose passes are few, leaves its tree only where another promises far more: it ends no worse."""
    machine = MACHINES[name]
    allowed = ALLOWED
    if num_texts == 1:
        first = chosen(trees_with(machine, believed(machine, belief, 1)), 1)
        allowed *= max(1.25, machine.s_per_token(first, 1) / least_s(machine, 1))
    assert mean_cost(machine, belief, num_texts, seed=num_texts) <= allowed


AFTER, SETTINGS = (0, 30, 100, 300), ("link", "computing", "resident")


def off_by(name: str, belief: str, num_passes: int = 1 + AFTER[-1]) -> list[float]:
    """By pass, the seconds a token of a lone text's tree over those of the best of a sweep of all trees."""
    machine = MACHINES[name]
    trees = trees_with(machine, believed(machine, belief, 1))
    return [machine.s_per_token(shape, 1) / least_s(machine, 1) for shape in passes(machine, trees, 1, num_passes, 1)]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_tree_is_within_a_twentieth_of_the_best_at_any_time(name: str) -> None:
    """Where the link, computing and nothing but computing limits it; trials of neighbours take few of the passes."""
    off = off_by(name, "truth")
    assert max(off[number] for number in (0, 30, 300)) <= 1.05
    assert sum(ratio > 1.05 for ratio in off) <= 0.05 * len(off) and np.mean(off) <= 1.02


@matrix("name, belief", product(MACHINES, AXES[2]), always=[("in parts of 64 rows", "twice")], daily=2)
def test_nothing_that_was_believed_lasts_a_hundred_passes(name: str, belief: str) -> None:
    """The mistake that was: a lone text never tried a larger tree, and took 1.8 times as long for ever.

    Six rows compute for as long as 64 there, which no pass of six rows can show.
    """
    off = off_by(name, belief)
    assert max(off[100], off[300]) <= 1.05 and np.mean(off[100:]) <= 1.05


@pytest.mark.full
def test_most_trees_are_right_after_thirty_passes() -> None:
    off = [off_by(*case) for case in product(MACHINES, AXES[2])]
    assert np.median([ratios[30] for ratios in off]) <= 1.02
    assert max(ratios[30] for ratios in off) <= 1.8 < max(ratios[0] for ratios in off), "as believed, or better"


def test_what_was_believed_alone_would_be_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the passes would have had nothing to correct."""
    monkeypatch.setattr(TreeSelector, "observe", lambda self, seen: None)
    costs = [mean_cost(MACHINES["mixed"], "half", num, 0) for num in (1, 2, 4, 8, 16)]
    assert max(costs) > 1.2, costs


def test_a_lone_text_keeps_a_tree_that_is_good_and_leaves_one_that_is_not() -> None:
    """A disk that seemed slow makes rows seem free: then the first trees are far too large."""
    machine = MACHINES["computing"]
    shapes = list(passes(machine, trees_with(machine, believed(machine, "slow link", 1)), 1, 24, seed=0))
    assert shapes[0].num_nodes > 4 * shapes[-1].num_nodes
    costs = [machine.s_per_token(shape, 1) / least_s(machine, 1) for shape in shapes]
    assert costs[0] > 1.5 and costs[3] < 1.25
    kept = set(passes(machine, trees_with(machine, machine.costs(1)), 1, 24, seed=0))
    assert len({(shape.num_nodes, shape.depth) for shape in kept}) == 1
    current, near, far = (
        Prediction("", DynamicShape(num_nodes, 4), StepTime(0.0, seconds, 0.0, 0.0), (1.0, 1.0))
        for num_nodes, seconds in ((16, 1.2), (32, 1.0), (64, 0.9))
    )
    assert next_tree(ObservedPasses(), [near, current], 1, current.shape) is current, "a quarter faster is worth it"
    assert next_tree(ObservedPasses(), [far, near, current], 1, current.shape) is far
    assert next_tree(ObservedPasses(), [near, current], 2, current.shape) is near, "several texts take the best"


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_twelve_times_slower_than_foretold_costs_one_pass(name: str) -> None:
    """It was quiet while it was tried, and the disk was not: the next tree is near the best for what passes take."""
    machine = MACHINES[name]
    true = machine.costs(1)
    quiet = Curve(true.compute_s.sizes, tuple(seconds / 12 for seconds in true.compute_s.seconds))
    believed_costs = replace(true, compute_s=quiet, link_bytes_per_s=true.link_bytes_per_s / 4)
    shapes = list(passes(machine, trees_with(machine, believed_costs), 1, 12, seed=0))
    costs = [machine.s_per_token(shape, 1) / least_s(machine, 1) for shape in shapes]
    assert max(costs[1:]) <= 1.25 and (costs[0] > 3) == (name not in ("link", "slow draft", "resident")), costs


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("num_texts", [1, 8])
def test_a_tree_that_is_hardly_quicker_takes_no_room_from_prompts(name: str, num_texts: int) -> None:
    machine = MACHINES[name]
    trees = trees_with(machine, machine.costs(num_texts))
    fastest = chosen(trees, num_texts)

    def traffic_of(num_nodes: int) -> Traffic:
        return machine.traffic._replace(prompt_rows=512 if num_nodes < num_texts * fastest.num_nodes else 256)

    beside = trees_with(machine, machine.costs(num_texts), traffic_of)
    choice = beside.for_run(Sampling(), "match", num_texts=num_texts)
    first_s = choice.candidates[0].s_per_token
    is_smaller = choice.shape.num_nodes < fastest.num_nodes
    assert is_smaller or (name, num_texts) not in {("slow draft", 1), ("costly texts", 1)}
    taken_s = step_time(machine.costs(num_texts), machine.traffic, choice.shape, num_texts).total_s
    assert taken_s / (choice.tokens_per_sweep * num_texts) <= 1.03 * first_s


def test_a_pass_may_end_while_a_server_asks_for_a_tree() -> None:
    """The mistake that was: another thread's request failed, since what it went through had grown."""
    before = ObservedPasses()
    after = before.with_pass(ObservedPass([chain(2)], [3], [2], 0.1, 1.0, 0.0, 5))
    assert not before.has_passes and before.among(1) == ()
    for _ in range(99):
        after = after.with_pass(ObservedPass([chain(2)] * 3, [3] * 3, [1] * 3, 0.1, 1.0, 0.0, 5))
    assert len(after.among(3)) == 48 and len(after.among(1)) == 1
