"""The run table by itself, and 200 schedules of a simulated pipeline: the target's own text, whatever arrives when."""

import random

import pytest
from simulator import Speeds, World, own_text, simulated, written

from offload.distributed.head import CutOff, RowPrice
from offload.distributed.orders import Least
from offload.distributed.runs import RunNode, RunTable
from offload.rank_roles import FixedCutoff, PipelineOptions, Roles

ON, A, MAT, RUG, HAT = range(10, 15)
END = 40


def picture() -> tuple[RunTable, dict[str, RunNode]]:
    """That of `runs.py`: "on" was drawn after the prompt "the cat sat", the others are guessed."""
    table = RunTable(credits=4, capacity=8)
    table.begin(2, position=2, end=20)
    table.commit_prompt(table.new_run(), 3)
    table.drawn(0, False, [ON])
    assert table.walk().tokens == [ON]
    on = table.root
    assert table.offer(1, 0, ON, 1.0) is None and table.root is on, "the draft's node is the one that is there"
    a, rug = table.offer(2, 1, A, 0.9), table.offer(4, 1, RUG, 0.1)
    mat, hat = table.offer(3, 2, MAT, 0.8), table.offer(5, 2, HAT, 0.05)
    return table, {"on": on, "a": a, "mat": mat, "rug": rug, "hat": hat}


def test_rows_are_committed_kept_and_renumbered_as_drawn_in_the_docstring() -> None:
    table, node = picture()
    runs = [table.issue([node[name] for name in names]) for names in (["on"], ["a"], ["mat", "rug"], ["hat"])]
    sees = [run.rows(before)[2] for run, before in zip(runs, (0, 1, 2, 4), strict=True)]
    seen = [[sees_U.nonzero()[:, 0].tolist() for sees_U in sees_WU] for sees_WU in sees]
    assert seen == [[[0]], [[0, 1]], [[0, 1, 2], [0, 3]], [[0, 1, 4]]]
    assert runs[2].positions == [5, 4] and not table.has_credit
    table.drawn(runs[0].number, False, [A])
    assert table.walk() == ([A], [0, 1], [2, 4], [])
    assert (table.num_committed, table.num_rows, node["mat"].row, node["hat"].row) == (5, 2, 0, 1)
    table.drawn(runs[1].number, False, [HAT])
    assert table.walk() == ([HAT], [1], [], [runs[2].number]), "the run of mat and rug is dead"
    assert table.root is node["hat"] and table.num_committed == 6


def test_a_token_that_nobody_guessed_is_the_root_and_has_no_row() -> None:
    table, node = picture()
    run = table.issue([node["on"], node["a"]]).number
    table.drawn(run, False, [RUG + 50, MAT])
    assert table.walk() == ([RUG + 50], [0], [], [])
    assert table.root.run is None and table.best(5) == [], "what was guessed is dead"
    assert table.offer(9, 2, HAT, 1.0) is None and table.offer(9, 77, HAT, 1.0) is None
    table.offer(10, 1, RUG + 50, 1.0)
    assert table.offer(11, 10, MAT, 0.5).parent is table.root, "a draft that hears of it later means the same node"


def test_the_best_come_parents_first_and_leave_a_row_for_the_root() -> None:
    table, node = picture()
    assert table.best(9) == [node["a"], node["mat"], node["rug"], node["hat"]]
    assert table.best(9, least_f=0.2) == [node["a"], node["mat"]]
    assert RunTable(1, 1).best(3) == []
    chain = [table.offer(20 + depth, 19 + depth if depth else 3, 1, float("nan")) for depth in range(3)]
    assert table.best(9)[-3:] == chain, "a chance that is no number is none"


def test_chances_are_those_below_the_root_and_answers_those_that_were_asked_for() -> None:
    table, node = picture()
    assert node["mat"].f == pytest.approx(0.72)
    table.drawn(table.issue([node["on"]]).number, False, [A])
    table.walk()
    assert (node["mat"].f, node["hat"].f) == (0.8, 0.05)
    table, node = picture()
    run = table.issue([node["on"]]).number
    with pytest.raises(ValueError, match="not on its way"):
        table.drawn(run + 1, False, [1])
    with pytest.raises(ValueError, match="is needed"):
        table.drawn(run, True, [])
    with pytest.raises(AssertionError, match="a child before its parent"):
        table.issue([node["mat"]])


def some_world(seed: int) -> World:
    """A pipeline, speeds and options, all by chance."""
    draw = random.Random(seed)
    num_stages, first = draw.randint(1, 4), draw.randint(0, 1)
    mode = draw.choice(["plain", "sync", "async", "async", "async", "async"])
    is_async = mode == "async"
    options = PipelineOptions(
        mode=mode,
        cancels=not is_async or draw.random() < 0.7,
        is_continuous=not is_async or draw.random() < 0.7,
        credits=draw.choice([None, 1, 2, 7]) if is_async else None,
        micro_batch=draw.choice([None, 1, 2, 9]) if mode != "plain" else None,
        cut=draw.choice([None, FixedCutoff(0.5, 0.2, 0.1), FixedCutoff(0.1, 0.0, 0.0)]) if mode != "plain" else None,
    )
    roles = Roles(first + num_stages + 1, tuple(range(first, first + num_stages)), draw.choice([0, first + num_stages]))
    speeds = Speeds(*(10 ** draw.uniform(-2, 1) for _ in range(4)))
    price = RowPrice(draw.choice([0.0, speeds.row_s]))
    accuracy, capacity = draw.choice([0.0, 0.5, 0.9, 1.0]), draw.choice([1, 2, 5, 40])
    return simulated(options, seed, roles=roles, speeds=speeds, accuracy=accuracy, capacity=capacity, price=price)


def prompt_of(seed: int) -> list[int]:
    return [seed % 7, *(index % 5 for index in range(seed % 11))]


@pytest.mark.parametrize("part", range(4))
def test_any_schedule_gives_the_targets_own_text(part: int) -> None:
    for seed in range(50 * part, 50 * part + 50):
        world = some_world(seed)
        assert written(world, prompt_of(seed), END) == own_text(prompt_of(seed), END), f"schedule {seed}"
        assert world.most_on_way <= world.head._options.num_runs(len(world.stages))
        world.head.stop()
        world.run_out()
        last = world.stages[-1]
        assert all(stage.num_orders == last.num_orders for stage in world.stages), "a stage has not done everything"


def test_a_row_has_to_be_worth_its_time() -> None:
    price = CutOff(row_s=0.002)
    assert price.least(token_s=0) == Least(0.0, 0.0), "nothing is known yet"
    assert price.least(token_s=0.1) == Least(0.02, 0.0)
    assert price.least(token_s=0.001) == Least(1.0, 0.0), "only what is certain"
    assert not price.failed()


def test_the_papers_cut_rises_with_every_batch_falls_with_failures_and_is_reset_by_acceptance() -> None:
    cut = CutOff(0.0, FixedCutoff(start=0.3, recovery=0.4, decay=0.25))
    results = [cut.least(1.0).p]
    cut.speculated()
    results.append(cut.least(1.0).p)
    assert cut.failed()
    results.append(cut.least(1.0).p)
    cut.reset()
    assert [*results, cut.least(1.0).p] == pytest.approx([0.3, 0.7, 0.45, 0.3])
    assert cut.least(1.0).f == 0
    cut = CutOff(0.0, FixedCutoff(start=0.5, recovery=0.0, decay=0.125))
    assert [cut.failed() for _ in range(6)] == [True, True, True, True, False, False], "anything would do"
    assert cut.least(1.0).p == 0
    assert not CutOff(0.0, FixedCutoff(0.3, 0.4, 0.0)).failed(), "a cut that never falls needs no other attempt"
