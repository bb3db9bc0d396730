"""What a bench keeps: one result as JSON, and its rows, each on disk before the next is measured;
and whether a later one is slower.

Two results are compared as ratios; those of another model, budget, temperature or text are not
compared at all. Where both runs measured the same things (the same prompts), each is compared with
itself, so that what differs between prompts cancels; else means of logarithms are, with the scatter
of both runs. A flag needs a change for the worse beyond the 99 % range of Student's t and beyond
`FLOOR`, because machines breathe. Invariant: what is stored is what was printed, a file that lacks
any of its names is refused, and at whatever point a process is killed, all rows before are read
again.
"""

import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from offload.bench.harness.tables import Guard, Row
from offload.checkpoint.files import write_whole
from offload.errors import UserError, os_errors_as_user_error, reason
from offload.machine import available_ram_bytes, cpu_name

SCHEMA = 1
STDOUT = Path("-")

FLOOR = 0.03
DECISIVE = (
    "target target_bytes draft ram_bytes device gpu_memory temperature prompts num_prompt_tokens"
    " num_new_tokens"
)
_MACHINE = ("cpu", "num_cores", "memory_bytes", "system", "python", "torch", "transformers")
# Student's t, exceeded once in a hundred times, by the least degrees of freedom for it
_T_99 = {1: 63.7, 2: 9.92, 3: 5.84, 4: 4.60, 5: 4.03, 6: 3.71, 7: 3.50, 8: 3.36, 9: 3.25, 10: 3.17}
_T_99 |= {15: 2.95, 30: 2.75}


def this_machine() -> Row:
    return {
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_ram_bytes(),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def checkout_commit() -> str | None:
    """Return this checkout's commit, with a `+` where files differ; None outside of one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None
    ask = f"git -C {folder} describe --always --abbrev=12 --exclude=* --dirty=+".split()
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    bench: str
    settings: Row
    ceiling: Row
    rows: list[Row]
    guards: dict[str, Guard]
    machine: Row = field(default_factory=this_machine)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    # the commit of the checkout that it ran from
    commit: str | None = field(default_factory=checkout_commit)

    def as_dict(self) -> Row:
        values = asdict(self)
        for guard in values["guards"].values():
            guard["value"] = median(guard["samples"])
        return {"schema": SCHEMA, **values}


class ProcessorClock:
    """Which share of this machine's processor time others take, from now on."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._others_s = self._taken_s()

    def others_share(self) -> float:
        """Return the processor time of processes that are neither this one nor its ended children."""
        passed_s = max(1e-3, time.monotonic() - self._started_s)
        share = (self._taken_s() - self._others_s) / passed_s / (os.cpu_count() or 1)
        return min(1.0, max(0.0, share))

    @staticmethod
    def _taken_s() -> float:
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, columns)
        all_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return all_s - sum(os.times()[:4])


def store(result: Row, path: Path) -> None:
    """Write what JSON can hold, whole or not at all. Raises `UserError` where that cannot be."""
    text = json.dumps(result, indent=1) + "\n"
    path = path.resolve()  # a link stays one, and what it points to is replaced
    with os_errors_as_user_error(f"cannot write {path}", "name another file"):
        # a pipe or a device takes what is written, and is not to be replaced
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_whole(path, text)


def writable(path: Path | None) -> Path | None:
    """Return the path, where a file can be written there. Raises `UserError`."""
    if path is None:
        return path
    folder = next(parent for parent in (path.parent, *path.absolute().parents) if parent.exists())
    reasons = {
        "--json alone may be printed": path == STDOUT,
        "it is a folder": path.is_dir(),
        f"{folder} is no folder": not folder.is_dir(),
        f"{folder} is not yours": not os.access(folder, os.W_OK),
        "it is not yours to write": path.exists() and not os.access(path, os.W_OK),
    }
    if why := next((complaint for complaint, holds in reasons.items() if holds), ""):
        raise UserError(f"cannot write {path} ({why}): name another file")
    return path


def read(path: Path) -> Result:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        complaint = f"cannot read {path} ({reason(error)})"
        raise UserError(f"{complaint}: give a file written by offload bench --json") from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise UserError(f"{path} is no result of offload bench: give a file written with --json")
    try:
        # these three have defaults, for a result that is made here
        if missing := {"machine", "created", "commit"} - stored.keys():
            raise msgspec.ValidationError(missing)
        return msgspec.convert(stored, Result)
    except msgspec.ValidationError as error:
        complaint = f"{path} is no whole result of offload bench ({error})"
        raise UserError(f"{complaint}: measure again") from None


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row, and return when the disk has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        # the last writer was killed within a line
        is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * is_torn + json.dumps(row, default=str) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_rows(path: Path) -> list[Row]:
    """Return all whole rows; what a killed process left of its last line is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    rows = []
    for line in text.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


class Change(NamedTuple):
    name: str
    before: float
    after: float
    ratio: float  # after / before, above 1 is better
    noise: float  # the ratio may lie so far from 1 by chance; infinite where too few samples tell
    # whether it is worse by more than noise
    is_worse: bool

    @property
    def line(self) -> str:
        verdict = "same"
        if math.isinf(self.noise):
            verdict = "too few samples"
        elif self.is_worse:
            verdict = "WORSE"
        elif self.ratio - 1 > max(self.noise, FLOOR):
            verdict = "better"
        noise = "?" if math.isinf(self.noise) else f"{self.noise:.3f}"
        figures = f"{self.before:>10.4g} -> {self.after:>10.4g}  x{self.ratio:.3f} ± {noise}"
        return f"{self.name:<44} {figures}  {verdict}"


def require_same(old: Result, bench: str, settings: Mapping[str, object]) -> None:
    """Refuse a result of another bench, model, budget or amount of text. Raises `UserError`."""
    if old.bench != bench:
        complaint = f"--compare needs a result of {bench}, got one of {old.bench}"
        raise UserError(f"{complaint}: name another file")
    for name in DECISIVE.split():
        then = old.settings.get(name)
        now = settings.get(name)
        if name in old.settings and name in settings and then != now:
            complaint = (
                f"{name} differ" if isinstance(now, list) else f"{name} was {then} and is {now}"
            )
            raise UserError(f"--compare: {complaint}: measure with the same options")


def changes(old: Result, new: Result) -> list[Change]:
    """Return all figures that both results guard. Raises `UserError` where they measure others."""
    require_same(old, new.bench, new.settings)
    pairs = {
        name: (old.guards[name], new.guards[name]) for name in new.guards if name in old.guards
    }
    if not pairs:
        raise UserError("--compare: the two results share no figure: measure with the same options")
    # what a sweep yields depends on the text above all
    if any(
        before.labels and two.labels and before.labels != two.labels
        for before, two in pairs.values()
    ):
        complaint = "--compare: the two results come from other prompts"
        raise UserError(f"{complaint}: give the same --prompts and --num-prompts")
    return [change(name, *pair) for name, pair in pairs.items()]


def change(name: str, old: Guard, new: Guard) -> Change:
    """Compare one figure; zero samples, as of a text that ended at once, are left out."""
    sign = 1 if new.better == "higher" else -1
    is_paired = bool(old.labels) and old.labels == new.labels
    before = old.samples
    after = new.samples
    if is_paired:
        both = [pair for pair in zip(before, after, strict=True) if min(pair) > 0]
        before, after = [sample for sample, _ in both], [sample for _, sample in both]
    before = [math.log(sample) for sample in before if sample > 0]
    after = [math.log(sample) for sample in after if sample > 0]
    if not before or not after:
        return Change(name, math.nan, math.nan, 1.0, math.inf, False)
    gain = mean(after) - mean(before)
    scatters = [before, after]
    if is_paired:
        scatters = [[b - a for a, b in zip(before, after, strict=True)]]
    freedom = min(len(before), len(after)) - 1
    noise = math.inf
    if freedom:
        error = math.hypot(*(stdev(samples) / math.sqrt(len(samples)) for samples in scatters))
        noise = error * next(t for least, t in reversed(_T_99.items()) if least <= freedom)
    is_worse = -sign * gain > max(noise, -math.log1p(-FLOOR))
    spread = math.inf if math.isinf(noise) else math.expm1(min(noise, 50.0))
    ends = math.exp(mean(before)), math.exp(mean(after))
    return Change(name, *ends, math.exp(sign * gain), spread, is_worse)


def is_worse(old: Result, new: Result) -> bool:
    """Print all verdicts; return whether anything is slower beyond noise. Raises `UserError`."""
    seen = changes(old, new)
    # first what else may explain a change: other machine, other code
    pairs = [(name, old.machine.get(name), new.machine.get(name)) for name in _MACHINE]
    for name, then, now in (*pairs, ("commit", old.commit, new.commit)):
        if then != now:
            print(f"note: {name} was {then}, is {now}")
    print(*(change_of.line for change_of in seen), sep="\n")
    return any(change_of.is_worse for change_of in seen)


def main(
    old: Annotated[Path, typer.Argument(help="stored with --json")],
    new: Annotated[Path, typer.Argument(help="the same bench, later")],
) -> None:
    """What has become slower beyond noise; exits with 1 if anything has."""
    if is_worse(read(old), read(new)):
        raise typer.Exit(1)
