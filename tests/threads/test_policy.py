"""Thread counts: the policy fed with simulated times, where it starts, what a run computes with, how threads spin."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shell import run_python
from tiny import FAMILIES, Pair, save_pair

import offload
from offload import machine as cores
from offload.calibration import threads as fastest
from offload.engine.step import learning
from offload.threads import Mode, StepModes, ThreadPolicy, thread_ladder

NUM_STEPS, NUM_FIRST, NUM_ROWS = 110, 10, 64  # in the first steps a wrong start is left behind
COUNT_CORES = cores.num_cores  # in tests there is one
Cost = Callable[[int, int, bool], float]  # seconds of a step by its threads, its number and whether they sleep


def quiet(count: int, step: int, is_asleep: bool = True) -> float:
    return 0.05 + (1.2 if is_asleep and count > 1 else 1) / count


def hogged(num_cores: int) -> Cost:
    """One core is shared with another process: the slowest of equal shares sets the time."""
    return lambda count, step, is_asleep: 1 / count if count < num_cores else (1.2 if is_asleep else 4) / count


# by name, with the numbers of cores and threads that are begun with
COSTS: dict[str, tuple[Cost, list[tuple[int, int]]]] = {
    "quiet": (quiet, [(1, 1), (2, 2), (2, 1), (64, 64)]),
    "small": (lambda count, step, is_asleep: 1 + 0.2 * count, [(2, 1), (64, 1)]),
    "link": (lambda count, step, is_asleep: 1.0, [(16, 16)]),
    # the disk becomes slower for all counts alike, twice
    "slowed": (lambda count, step, is_asleep: quiet(count, step, is_asleep) * (1 + step // 30), [(4, 4)]),
    "spinning": (lambda count, step, is_asleep: 1.0 if count == 1 else 1.1 if is_asleep else 2.0, [(2, 1), (2, 2)]),
    "hogged": (hogged(2), [(2, 2), (2, 1)]),
    "hogged, many": (hogged(8), [(8, 8)]),
}


def simulate(cost: Cost, num_cores: int, start: int, *, noise: float = 0.05, seed: int = 0) -> list[float]:
    """True seconds of every step under the policy, which is told of them with noise."""
    noises, policy = random.Random(seed), ThreadPolicy(thread_ladder(num_cores), both(start))
    taken = []
    for step in range(NUM_STEPS):
        modes = policy.modes(NUM_ROWS)
        taken.append(cost(modes.sweep.num_threads, step, modes.sweep.is_asleep))
        true_s = (cost(mode.num_threads, step, mode.is_asleep) for mode in modes)
        draft_s, sweep_s = (seconds * noises.lognormvariate(0, noise) for seconds in true_s)
        policy.took(NUM_ROWS, draft_s=draft_s, sweep_s=sweep_s)
    return taken


def best_s(cost: Cost, num_cores: int) -> float:
    """Return the seconds of all steps but the first, with the best mode that is fixed."""
    modes = [(count, is_asleep) for count in thread_ladder(num_cores) for is_asleep in (True, False)]
    steps = range(NUM_FIRST, NUM_STEPS)
    return min(sum(cost(count, step, is_asleep) for step in steps) for count, is_asleep in modes)


def both(count: int) -> StepModes:
    return StepModes(Mode(count, is_asleep=True), Mode(count, is_asleep=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "num_cores", "start"), [(name, *start) for name in COSTS for start in COSTS[name][1]])
def test_within_five_percent_of_the_best_count(name: str, num_cores: int, start: int, seed: int) -> None:
    cost, _ = COSTS[name]
    assert sum(simulate(cost, num_cores, start, seed=seed)[NUM_FIRST:]) <= 1.05 * best_s(cost, num_cores)


@pytest.mark.parametrize("is_leaving", [True, False])
def test_follows_a_neighbour_that_comes_or_goes(is_leaving: bool) -> None:
    def cost(count: int, step: int, is_asleep: bool) -> float:
        is_hogged = (step < NUM_STEPS // 2) == is_leaving
        return COSTS["spinning" if is_hogged else "quiet"][0](count, step, is_asleep)

    late = slice(NUM_STEPS - 10, NUM_STEPS)
    best = [min(cost(1, step, True), cost(2, step, True), cost(2, step, False)) for step in range(NUM_STEPS)]
    taken = simulate(cost, 2, 1 if is_leaving else 2)
    assert sum(taken[late]) <= 1.05 * sum(best[late]), "it has settled again"
    assert sum(taken[NUM_FIRST:]) <= 1.05 * best_s(cost, 2)


@pytest.mark.parametrize(
    ("asleep_s", "looking_s", "mode"),
    [(0.5, 0.49, Mode(2, True)), (0.5, 0.4, Mode(2)), (0.95, 0.95, Mode(1, True)), (3.0, 2.0, Mode(1, True))],
)
def test_the_start_is_measured_and_ties_go_to_what_leaves_more_to_others(
    asleep_s: float, looking_s: float, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, times = torch.get_num_threads(), iter([1.0, asleep_s, looking_s])
    monkeypatch.setattr(fastest, "median_s", lambda *_, **__: next(times))
    assert fastest.fastest_mode([1, 2], 4, 8, torch.float32).mode == mode
    assert torch.get_num_threads() == before


QUIET_S, HOGGED_S = (
    {Mode(1, is_asleep=True): one_s, Mode(2, is_asleep=True): asleep_s, Mode(2): looking_s}
    for one_s, asleep_s, looking_s in ((1.24, 1.0, 0.82), (1.31, 1.36, 3.6))
)


def test_a_process_that_takes_a_core_is_noticed_while_nothing_is_tried() -> None:
    policy, took = ThreadPolicy([1, 2], StepModes(Mode(2), Mode(2)), (QUIET_S, QUIET_S)), list[float]()
    for step in range(40):
        took.append((QUIET_S if step < 10 else HOGGED_S)[policy.modes(64).sweep])
        policy.took(64, draft_s=took[-1], sweep_s=took[-1])
    assert max(took[:10]) == QUIET_S[Mode(2)], "nothing was"
    assert max(took[12:]) < 1.05 * min(HOGGED_S.values())


# Cores


def write_files(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_cpu_quotas_of_both_versions(tmp_path: Path) -> None:
    root, membership = tmp_path / "fs", tmp_path / "self"
    write_files(root / "a" / "b", cpu__max="150000 100000")
    write_files(root / "a", cpu__max="max 100000")
    write_files(root / "cpu" / "x", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    write_files(root / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    membership.write_text("3:cpu,cpuacct:/x\n4:memory:/y\n0::/a/b\n")
    assert cores.cpu_quotas(root, membership) == [4.0, 1.5]
    assert cores.cpu_quotas(root, tmp_path / "absent") == []


@pytest.mark.parametrize(("quotas", "num_cores"), [([], 6), ([1.5, 8.0], 2), ([0.2], 1)])
def test_cores_are_those_that_may_be_kept_busy(
    quotas: list[float], num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr(cores, "cpu_quotas", lambda root, membership: quotas)
    assert COUNT_CORES() == num_cores


# Runs


class Alternating(ThreadPolicy):
    def __init__(self) -> None:
        super().__init__([1, 2], both(1))
        self.heard: list[tuple[int, StepModes]] = []

    def modes(self, num_rows: int) -> StepModes:
        single, asleep, looking = Mode(1), Mode(2, is_asleep=True), Mode(2)
        turns = [StepModes(single, asleep), StepModes(looking, single), StepModes(asleep, looking), both(1)]
        return turns[len(self.heard) % len(turns)]

    def took(self, num_rows: int, *, draft_s: float, sweep_s: float) -> None:
        self.heard.append((num_rows, self.modes(num_rows)))


def test_ids_do_not_depend_on_modes_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, policy = save_pair(FAMILIES["llama"](), tmp_path, noise=0.003), Alternating()
    options = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3}
    with offload.load(*pair, "1GiB", "12x3", dtype="float32", context=128, threads=1) as decoder:
        wanted = decoder.generate([5, 6, 7], **options)
        steps = decoder._speculation
        counting, _ = steps._listeners
        monkeypatch.setattr(steps, "_threads", policy)
        monkeypatch.setattr(steps, "_listeners", (counting, learning(policy, decoder.trees.observe)))
        got = decoder.generate([5, 6, 7], **options)
    assert got.token_ids == wanted.token_ids
    assert len(policy.heard) == got.stats.num_sweeps >= 4, "every step but the prompt's is told"
    assert {num_rows for num_rows, _ in policy.heard} == {16}, "of 12 rows, told as what is like them"
    last = policy.heard[-1][1]
    assert got.stats.threads == last
    assert got.as_dict()["stats"]["threads"]["sweep"] == last.sweep._asdict()


@pytest.mark.parametrize("tree", ["auto", "8x3"])
def test_a_named_count_is_used_for_everything(tree: str, pair: Pair) -> None:
    with offload.load(*pair, "1GiB", tree, context=128, threads=2, profile="none") as decoder:
        result = decoder.generate([5, 6, 7], max_new_tokens=4)
        assert torch.get_num_threads() == 2 == decoder.num_threads
    assert result.stats.threads == (Mode(2), Mode(2))


def test_without_a_named_count_no_more_threads_than_cores(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: 3)
    with offload.load(*pair, "1GiB", "8x3", context=128, profile="none") as decoder:
        assert decoder.num_threads == 3 and max(mode.num_threads for mode in decoder.threads.start) <= 3


# Spinning

WATCH = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            import os
            print(os.environ.get("GOMP_SPINCOUNT"))
            os._exit(0)
sys.meta_path.insert(0, Watch())
import {module}
import torch
"""


@pytest.mark.parametrize("module", ["offload", "offload.engine.load"])
@pytest.mark.parametrize(
    ("variables", "seen"), [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_spin_for_a_bounded_time_unless_the_user_says_otherwise(
    module: str, variables: dict[str, str], seen: str
) -> None:
    others = {name: value for name, value in os.environ.items() if "OMP" not in name}
    assert run_python("-c", WATCH.format(module=module), environment=others | variables).strip() == seen


PRODUCTS = """
import offload, torch
from offload.machine import rss_bytes
def multiply(counts):
    for num_rows in counts:
        torch.nn.functional.linear(torch.ones(num_rows, 512, dtype=torch.bfloat16), weight)
torch.set_num_threads(1)
weight = torch.ones(512, 512, dtype=torch.bfloat16)
multiply(range(1, 200))
before = rss_bytes()
multiply(range(200, 500))
print(rss_bytes() - before)
"""


def test_code_for_products_of_other_sizes_is_not_kept_for_ever() -> None:
    """Where processors multiply 16-bit numbers themselves; 300 more numbers of rows took 180 MB."""
    assert int(run_python("-c", PRODUCTS)) < 80e6
