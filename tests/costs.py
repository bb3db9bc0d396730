"""What tests cost, as measured, and which of their cases a quick run can afford.

`costs.tsv` has the processor seconds, those of children included, of every test function whose cases take a fifth of a
second or more together; `make test-costs` measures them again. On average over commits a quick run has some seconds for
each of them, more where its file guards a promise (`planted/mistakes.txt`): as many cases as fit, drawn by the commit's
seed, and for some commits one more: a case of two seconds runs for every seventh commit, or twentieth. The others are
marked `full`, and so is what takes longer than that by itself. Of those `make test-slice` runs the commit's share: all
tests are dealt out to shares that take as long as each other, and the seed chooses one.
"""

import math
import resource
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from matrix import TEST_SEED, random_of_the_seed
from planted.mistakes import read_mistakes

_TABLE = Path(__file__).with_suffix(".tsv")
_LISTED_S = 0.2
# of all cases of one function in a quick run, on average over commits: those that guard a promise, and others
_PROMISED_S = 0.3
_QUICK_S = 0.05
# of one case at most
_SINGLE_S = 2.0
# of the share of one commit
_SLICE_S = 150.0


class Cost(NamedTuple):
    """What all cases of one function take."""

    seconds: float
    num_cases: int

    def num_quick(self, luck: float, afforded_s: float) -> int:
        """Return the number of cases that fit into these seconds, on average, with this luck in [0, 1)."""
        each_s = self.seconds / self.num_cases
        return int(afforded_s / each_s + luck) if each_s <= _SINGLE_S else 0


def mark_costly(items: Iterable[pytest.Item]) -> None:
    """Mark what a quick run cannot afford `full`; what is marked by hand is left as it is.

    Cases that notice a planted mistake are marked `always`, and counted among those of their function.
    """
    costs, mistakes = read_costs(), read_mistakes()
    guards = {file for mistake in mistakes for file in mistake.tests}
    noticing = {case for mistake in mistakes for case in mistake.cases}
    cases, num_always = defaultdict(list), Counter[str]()
    for item in items:
        function = function_of(item.nodeid)
        if item.nodeid in noticing:
            item.add_marker("always")
            num_always[function] += 1
        elif not item.get_closest_marker("full") and not item.get_closest_marker("always"):
            cases[function].append(item)
    for function in cases.keys() & costs.keys():
        function_cases = cases[function]
        chance = random_of_the_seed(function)
        afforded_s = _PROMISED_S if function.partition("::")[0] in guards else _QUICK_S
        num_afforded = costs[function].num_quick(chance.random(), afforded_s) - num_always[function]
        drawn = chance.sample(range(len(function_cases)), min(len(function_cases), max(0, num_afforded)))
        for index in set(range(len(function_cases))).difference(drawn):
            function_cases[index].add_marker("full")


def slice_of_the_seed(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the seed's share; which share a test is in does not change with the seed."""
    costs = read_costs()
    total_s, until_s = 0.0, list[float]()
    dealt = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
    for item in dealt:
        cost = costs.get(function_of(item.nodeid))
        total_s += cost.seconds / cost.num_cases if cost else 0.0
        until_s.append(total_s)
    num_shares = max(1, math.ceil(total_s / _SLICE_S))
    chosen = number_of(TEST_SEED) % num_shares
    whose = (min(int(end_s / _SLICE_S), num_shares - 1) for end_s in until_s)
    return [item for item, share in zip(dealt, whose, strict=True) if share == chosen]


def number_of(seed: str) -> int:
    """Return the number that a seed is; of a word any number."""
    return int(seed) if seed.isdecimal() else zlib.crc32(seed.encode())


def function_of(nodeid: str) -> str:
    """Return the name of a test function without its case."""
    return nodeid.partition("[")[0]


def read_costs() -> dict[str, Cost]:
    """Return the costs that were measured, by function."""
    rows = (line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines())
    return {function: Cost(float(seconds), int(num_cases)) for seconds, num_cases, function in rows}


class Meter:
    """A plugin that measures every test and appends to a file: processor seconds and the test.

    With its fixtures, but before they end: what a module's have cost is not the last test's.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begun_s = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Begin to count."""
        self._begun_s = _processor_s()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Write a line at once, whichever worker runs the test."""
        with self._file.open("a", encoding="utf-8") as rows:
            rows.write(f"{_processor_s() - self._begun_s:.3f}\t{item.nodeid}\n")


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    forked = sys.modules.get("forked")
    return sum(usage.ru_utime + usage.ru_stime for usage in used) + (sum(forked.SPENT_S) if forked else 0.0)


def write_costs(measured: Path) -> None:
    """Write the table from what `Meter` has measured."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for line in measured.read_text(encoding="utf-8").splitlines():
        took_s, _, nodeid = line.partition("\t")
        seconds[function_of(nodeid)].append(float(took_s))
    rows = sorted((function, all_s) for function, all_s in seconds.items() if sum(all_s) >= _LISTED_S)
    lines = [f"{sum(all_s):.1f}\t{len(all_s)}\t{function}\n" for function, all_s in rows]
    _TABLE.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_costs(Path(sys.argv[1]))
