"""Faults in every command, at calls of every kind: each breach as it comes, and a table in the end."""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from faults.calls import CALLS, FAULTS, STOP
from faults.forge import Ended, Forge, restore
from faults.scenes import prepare, prepare_more, scenes
from faults.trial import Damage, Trial
from faults.verdict import Verdict

DAMAGES = ("cut", "replace", "delete", "overwrite")  # at every stop, of every file that the command reads
LIMITS = {"files": range(5, 45, 4), "file_bytes": (1000, 4096, 50_000)}
# Where a share of all runs is asked for: what occurs hundreds of times is tried less often.
_WEIGHTS = {"stat": 0.3, "any": 0.2, "damage": 0.1, "limit": 5.0, "moment": 5.0}
NUM_MOMENTS = 4  # of each kind
MOMENTS = {
    **{number.name: ((0.0, number),) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)},
    "SIGINT twice": ((0.0, signal.SIGINT), (0.2, signal.SIGINT)),
    "pause": ((0.0, signal.SIGSTOP), (1.0, signal.SIGCONT)),
}

Table = defaultdict[str, defaultdict[str, Counter[str]]]


class Kind(NamedTuple):
    """Runs of one kind: the row of the table, what they could strike, and how."""

    call: str
    fault: str
    numbers: Callable[[], Iterable[int]]
    run: Callable[[int], tuple[Verdict, Ended]]


def main() -> int:
    """Exit code 1 where something should not have been; Ctrl-C ends it with the table so far."""
    given, table = _arguments(), Table(lambda: defaultdict(Counter))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells have jobs in the background ignore
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` has ignored
    with tempfile.TemporaryDirectory(prefix="faults") as name, suppress(KeyboardInterrupt):
        _fill(table, Path(name), given)
    _print_table(table)
    return int(any("BREACH" in ends for by_scene in table.values() for ends in by_scene.values()))


def _fill(table: Table, folder: Path, given: argparse.Namespace) -> None:
    pristine, begun_s = folder / "pristine", time.monotonic()
    with closing(Forge(folder)) as forge:
        prepare(forge.root)
        prepare_more(forge)
        restore(pristine, forge.root)
        for scene in scenes(forge.root):
            if not given.scene or scene.name in given.scene:
                _count(table, Trial(forge, scene, pristine), given)
                print(f"{scene.name}: {_told(table, scene.name)}, {time.monotonic() - begun_s:.0f} s", file=sys.stderr)


def _count(table: Table, trial: Trial, given: argparse.Namespace) -> None:
    for kind, at, verdict in _struck(trial, given):
        table[f"{kind.call} {kind.fault}"][trial.scene.name][verdict.end] += 1
        if verdict.breaches:
            again = f"--scene {trial.scene.name!r} --call {kind.call} --fault {kind.fault!r} --at {at}"
            print(again, *verdict.breaches, sep="\n    ", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--scene", action="append", help="this command alone; may be given several times")
    parser.add_argument(
        "--call", action="append", choices=[*CALLS, "any", "damage", "limit", "moment"], help="this kind alone"
    )
    parser.add_argument(
        "--fault", action="append", help="this one alone, such as EIO, 'cut target/config.json', files, SIGINT"
    )
    parser.add_argument(
        "--at", type=int, help="the number of the call alone; of descriptors or bytes; of ms after the start"
    )
    parser.add_argument(
        "--every", action="store_true", help="every call, not only the first, middle and last from each place"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of all of these a random share, such as 0.1")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _struck(trial: Trial, given: argparse.Namespace) -> Iterator[tuple[Kind, int, Verdict]]:
    for kind in _kinds(trial, given):
        if (given.call and kind.call not in given.call) or (given.fault and kind.fault not in given.fault):
            continue
        chance = random.Random(f"{given.seed}/{trial.scene.name}/{kind.call}/{kind.fault}")
        share = given.share * _WEIGHTS.get(kind.call, 1.0) if given.share < 1 else 1.0
        for at in [given.at] if given.at else kind.numbers():
            if given.at or chance.random() < share:
                yield kind, at, kind.run(at)[0]


def _kinds(trial: Trial, given: argparse.Namespace) -> Iterator[Kind]:
    for fault in FAULTS:
        numbers = partial(trial.numbers, fault, every=given.every)
        yield Kind((*CALLS, "any")[fault.call], fault.name, numbers, partial(trial.strike, fault))
    for options, file in product(DAMAGES, trial.scene.reads):
        yield Kind(
            "damage", f"{options} {file}", partial(trial.numbers, STOP), partial(trial.damage, Damage(options, file))
        )
    for value, most in LIMITS.items():
        yield Kind("limit", value, lambda most=most: most, lambda number, given=value: trial.limit(**{given: number}))
    chance = random.Random(f"{given.seed}/{trial.scene.name}")
    for name, signals in MOMENTS.items():
        yield Kind("moment", name, partial(trial.moments, chance, NUM_MOMENTS), partial(_interrupted, trial, signals))


def _interrupted(trial: Trial, signals: Sequence[tuple[float, int]], after_ms: int) -> tuple[Verdict, Ended]:
    (_, first), *others = signals
    return trial.interrupt([(after_ms / 1000, first), *others])


def _told(table: Table, scene: str) -> str:
    ends = sum((by_scene[scene] for by_scene in table.values() if scene in by_scene), Counter[str]())
    return ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))


def _print_table(table: Table) -> None:
    print("| call and fault | command | ends |\n|---|---|---|")
    for row, by_scene in table.items():
        for scene, ends in by_scene.items():
            print(f"| {row} | {scene} | {', '.join(f'{count} {end}' for end, count in sorted(ends.items()))} |")


if __name__ == "__main__":
    sys.exit(main())
