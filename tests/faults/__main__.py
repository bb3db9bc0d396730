"""Faults in every command, at calls of every kind: each breach as it comes, and a table in the end."""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from faults.calls import CALLS, FAULTS, STOP
from faults.forge import Forge, restore
from faults.scenes import prepare, prepare_more, scenes
from faults.trial import Damage, Trial
from faults.verdict import Verdict

# At every stop a file is damaged: whose, and how.
DAMAGES = tuple(
    Damage(how, file)
    for how in ("cut", "replace", "delete", "overwrite")
    for file in (
        "target/model-00003-of-00005.safetensors",
        "draft/model-00001-of-00005.safetensors",
        "target/config.json",
    )
)
LIMITS_OF_FILES = range(5, 45, 4)  # descriptors that a command is allowed
# Where a share of all runs is asked for: what occurs hundreds of times is tried less often.
_WEIGHTS = {"stat": 0.3, "any": 0.2, "damage": 0.1}
MOMENTS, NEVER_S = 3, 300.0  # of each signal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FILE_BYTES = (1000, 4096, 50_000)

Table = defaultdict[str, defaultdict[str, Counter[str]]]


class Struck(NamedTuple):
    """One run: the row of the table, what repeats it, and how it ended."""

    row: str
    again: str
    verdict: Verdict


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
    forge, pristine, begun_s = Forge(folder), folder / "pristine", time.monotonic()
    prepare(forge.root)
    prepare_more(forge)
    restore(pristine, forge.root)
    for scene in scenes(forge.root):
        if given.scene and scene.name not in given.scene:
            continue
        for row, again, verdict in _struck(Trial(forge, scene, pristine), given):
            table[row][scene.name][verdict.end] += 1
            if verdict.breaches:
                print(f"--scene {scene.name!r} {again}", *verdict.breaches, sep="\n    ", flush=True)
        print(f"{scene.name}: {_told(table, scene.name)}, {time.monotonic() - begun_s:.0f} s", file=sys.stderr)
    forge.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--scene", action="append", help="this command alone; may be given several times")
    parser.add_argument(
        "--call", action="append", choices=[*CALLS, "any", "damage", "limit", "moment"], help="this kind alone"
    )
    parser.add_argument("--fault", action="append", help="this fault alone, such as EIO")
    parser.add_argument("--at", type=int, help="the so-many-th call alone")
    parser.add_argument(
        "--every", action="store_true", help="every call, not only the first, middle and last from each place"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of all of these a random share, such as 0.1")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _share(given: argparse.Namespace, kind: str) -> float:
    return given.share * _WEIGHTS.get(kind, 1.0) if given.share < 1 else 1.0


def _struck(trial: Trial, given: argparse.Namespace) -> Iterator[Struck]:
    chance = random.Random(f"{given.seed}/{trial.scene.name}")
    for fault in FAULTS:
        call = (*CALLS, "any")[fault.call]
        if (given.call and call not in given.call) or (given.fault and fault.name not in given.fault):
            continue
        for at in [given.at] if given.at else trial.numbers(fault, every=given.every):
            if given.at or chance.random() < _share(given, call):
                verdict, _ = trial.strike(fault, at)
                yield Struck(f"{call} {fault.name}", f"--call {call} --fault {fault.name} --at {at}", verdict)
    yield from _damaged(trial, given, chance)
    yield from _limited(trial, given)
    yield from _interrupted(trial, given, chance)


def _damaged(trial: Trial, given: argparse.Namespace, chance: random.Random) -> Iterator[Struck]:
    for damage in DAMAGES if "damage" in (given.call or ["damage"]) else ():
        if given.fault and damage.how not in given.fault:
            continue
        for at in [given.at] if given.at else trial.numbers(STOP):
            if given.at or chance.random() < _share(given, "damage"):
                verdict, _ = trial.damage(damage, at)
                yield Struck(f"{damage.how} {damage.file}", f"--call damage --fault {damage.how} --at {at}", verdict)


def _interrupted(trial: Trial, given: argparse.Namespace, chance: random.Random) -> Iterator[Struck]:
    if trial.scene.visits or "moment" not in (given.call or ["moment"]):
        return
    duration_s = trial.interrupt(signal.SIGINT, NEVER_S)[1].seconds
    for number in SIGNALS:
        for _ in range(MOMENTS):
            after_s = round(chance.uniform(0, duration_s), 2)
            verdict, _ = trial.interrupt(number, after_s)
            yield Struck(f"{number.name} at a moment", f"--call moment # {number.name} after {after_s} s", verdict)


def _limited(trial: Trial, given: argparse.Namespace) -> Iterator[Struck]:
    if "limit" not in (given.call or ["limit"]):
        return
    for files in LIMITS_OF_FILES:
        yield Struck("at most n files", f"--call limit # {files} files", trial.limit(files=files)[0])
    for file_bytes in FILE_BYTES:
        yield Struck("files of at most n bytes", f"--call limit # {file_bytes}", trial.limit(file_bytes=file_bytes)[0])


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
