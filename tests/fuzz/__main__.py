"""`python tests/fuzz --cases 10000 --seed 0`: damaged files against all that reads them; exit 1 with findings.

`make fuzz CASES=10000 SEED=0` is the same. What a case does depends on its seed, target and number alone.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from case import ENDS, Case, Target  # noqa: E402
from cell import Cell, Done, Limits  # noqa: E402

_MOST_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 with findings."""
    asked = _asked(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="offload-fuzz-"))
    _prepare_process(scratch)
    try:
        targets = _targets(asked.target)
        cell = Cell(scratch, asked.jobs, Limits(wall_s=asked.wall_s, resident_bytes=asked.resident_mib << 20))
        findings = [done for target in targets if (done := cell.prepare(target)).end.is_finding]
        begun_s, done_cases = time.monotonic(), list[Done]()
        for done in cell.run(_cases(targets, asked) if not findings else ()):
            done_cases.append(done)
            _show_progress(done_cases, asked.cases, begun_s)
            if done.end.is_finding:
                print(f"\n{done.end.kind}: {done.end.line[:300]}\n  {_again(done.case)}", file=sys.stderr, flush=True)
            if asked.index is not None:
                _show_one(done, scratch, asked.keep)
        findings += [done for done in done_cases if done.end.is_finding]
        if asked.json:
            print(json.dumps([(done.case.target.name, done.end.kind, done.damage) for done in done_cases]))
        else:
            _show(done_cases, findings, asked.seed, time.monotonic() - begun_s)
        cell.close()
        return 1 if findings else 0
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", help="file in targets/, or name; may be repeated")
    parser.add_argument("--index", type=int, help="this case of one target alone, with all that is known of it")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--keep", type=Path, help="with --index: copy the damaged folder here")
    parser.add_argument("--json", action="store_true", help="print target, end and damage of each case, no table")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--wall-s", type=float, default=Limits().wall_s, help="most that one case may take")
    parser.add_argument("--resident-mib", type=int, default=Limits().resident_bytes >> 20, help="the same of memory")
    return parser.parse_args(arguments)


def _prepare_process(scratch: Path) -> None:
    """Before anything of the program is imported: one thread, no network, no home."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=str(scratch / "hub"), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ.update(CUDA_VISIBLE_DEVICES="", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
    for name in [name for name in os.environ if name.startswith(("OFFLOAD_", "XDG_"))]:
        del os.environ[name]


def _targets(wanted: Sequence[str] | None) -> list[Target]:
    """Those wanted of the files in targets/, whose names begin like their files; by default all but the planted."""
    stems = sorted(file.stem for file in (HERE / "targets").glob("*.py"))
    result, wishes = list[Target](), wanted or [stem for stem in stems if stem != "planted"]
    for stem in stems:
        if any(wish.partition("/")[0] == stem for wish in wishes):
            result += importlib.import_module(f"targets.{stem}").TARGETS
    chosen = [target for target in result if any(f"{target.name}/".startswith(f"{wish}/") for wish in wishes)]
    if not chosen:
        sys.exit(f"no such target: {', '.join(stems)} are there, or /NAME behind one")
    return chosen


def _cases(targets: Sequence[Target], asked: argparse.Namespace) -> Iterator[Case]:
    """By turns, so that a run cut short has looked at each."""
    if asked.index is not None:
        return iter([Case(targets[0], asked.seed, asked.index)])
    numbers = range(asked.first, asked.first + asked.cases)
    return islice((Case(target, asked.seed, number) for number in numbers for target in targets), asked.cases)


def _show_progress(done_cases: Sequence[Done], num_cases: int, begun_s: float) -> None:
    if sys.stderr.isatty() or len(done_cases) % 500 == 0:
        seconds, num_found = time.monotonic() - begun_s, sum(done.end.is_finding for done in done_cases)
        rate = len(done_cases) / max(seconds, 1e-9)
        line = f"{len(done_cases)}/{num_cases} cases, {num_found} findings, {rate:.1f}/s"
        print(f"\r{line}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def _show_one(done: Done, scratch: Path, keep: Path | None) -> None:
    print(f"damage: {done.damage}\nend: {done.end.kind}\n{done.end.line}\n{done.end.detail}")
    if keep is not None:
        last = sorted(scratch.glob("slot*"))[-1]  # which a single case is run in
        subprocess.run(["cp", "-a", "--sparse=always", last / "case", keep], check=True)  # some are as large as disks


def _show(done_cases: Sequence[Done], findings: Sequence[Done], seed: int, seconds: float) -> None:
    kinds = [*ENDS, "findings"]
    counts = Counter(
        (done.case.target.name, "findings" if done.end.is_finding else done.end.kind) for done in done_cases
    )
    print(f"\n{'target':30}" + "".join(f"{kind:>10}" for kind in kinds))
    for name in dict.fromkeys(done.case.target.name for done in done_cases):
        print(f"{name:30}" + "".join(f"{counts[name, kind]:>10}" for kind in kinds))
    rate = len(done_cases) / max(seconds, 1e-9)
    print(f"seed {seed}: {len(done_cases)} cases in {seconds:.0f} s ({rate:.1f}/s), {len(findings)} findings")
    groups = dict[tuple[str, str, str], list[Done]]()
    for done in findings:
        place = next((line for line in reversed(done.end.detail.splitlines()) if "offload/" in line), "")
        groups.setdefault((done.end.kind, done.end.line[:60], place), []).append(done)
    for alike in list(groups.values())[:_MOST_SHOWN]:
        case, end = alike[0].case, alike[0].end
        print(f"\n{end.kind} ({len(alike)} alike) {case.name}: {alike[0].damage[:300]}\n  {end.line[:300]}")
        print("\n".join(f"    {line}" for line in end.detail.splitlines()[-8:]))
        print(f"  {_again(case)}")


def _again(case: Case) -> str:
    return f"python tests/fuzz --seed {case.seed} --target {case.target.name} --index {case.index}"


if __name__ == "__main__":
    sys.exit(main())
