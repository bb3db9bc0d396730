"""Is it slower than it was? Ratios of two results, flagged only where they lie outside their noise.

Results of another model, budget, temperature or text are not compared at all; another machine is
named beside them.

Where both runs measured the same things (the same prompts), each is compared with itself, so that
what differs between prompts cancels; else means of logarithms are, with the scatter of both runs. A
flag needs a change for the worse that is larger than the 99 % range of Student's t and than
`FLOOR`, because machines breathe.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, NamedTuple

import typer

from offload.bench.harness.record import Guard, Result, read
from offload.errors import UserError

FLOOR = 0.03
DECISIVE = (
    "target target_bytes draft ram_bytes device gpu_memory temperature prompts num_prompt_tokens"
    " num_new_tokens"
)
_MACHINE = ("cpu", "num_cores", "memory_bytes", "system", "python", "torch", "transformers")
# Student's t, exceeded once in a hundred times, by the least degrees of freedom for it
_T_99 = {1: 63.7, 2: 9.92, 3: 5.84, 4: 4.60, 5: 4.03, 6: 3.71, 7: 3.50, 8: 3.36, 9: 3.25, 10: 3.17}
_T_99 |= {15: 2.95, 30: 2.75}


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
        told = f"{self.before:>10.4g} -> {self.after:>10.4g}  x{self.ratio:.3f} ± {noise}"
        return f"{self.name:<44} {told}  {verdict}"


def require_same(old: Result, bench: str, settings: Mapping[str, object]) -> None:
    """Refuse a result of another bench, model, budget or amount of text. Raises `UserError`."""
    if old.bench != bench:
        told = f"--compare needs a result of {bench}, got one of {old.bench}"
        raise UserError(f"{told}: name another file")
    for name in DECISIVE.split():
        then = old.settings.get(name)
        now = settings.get(name)
        if name in old.settings and name in settings and then != now:
            told = f"{name} differ" if isinstance(now, list) else f"{name} was {then} and is {now}"
            raise UserError(f"--compare: {told}: measure with the same options")


def changes(old: Result, new: Result) -> list[Change]:
    """Return all figures that both results guard.

    Raises `UserError` for results that measure different things.
    """
    require_same(old, new.bench, new.settings)
    pairs = {
        name: (old.guards[name], new.guards[name]) for name in new.guards if name in old.guards
    }
    if not pairs:
        raise UserError("--compare: the two results share no figure: measure with the same options")
    # what a sweep yields depends on the text above all
    if any(one.labels and two.labels and one.labels != two.labels for one, two in pairs.values()):
        told = "--compare: the two results come from other prompts"
        raise UserError(f"{told}: give the same --prompts and --num-prompts")
    return [change(name, *pair) for name, pair in pairs.items()]


def tell(old: Result, new: Result, found: Sequence[Change]) -> None:
    """Print the verdicts, and first what else may explain a change: other machine, other code."""
    pairs = [(name, old.machine.get(name), new.machine.get(name)) for name in _MACHINE]
    for name, then, now in (*pairs, ("commit", old.commit, new.commit)):
        if then != now:
            print(f"note: {name} was {then}, is {now}")
    for one in found:
        print(one.line)


def change(name: str, old: Guard, new: Guard) -> Change:
    """Compare one figure; zero samples, as of a text that ended at once, are left out."""
    sign = 1 if new.better == "higher" else -1
    is_paired = bool(old.labels) and old.labels == new.labels
    before = old.samples
    after = new.samples
    if is_paired:
        both = [pair for pair in zip(before, after, strict=True) if min(pair) > 0]
        before, after = [one for one, _ in both], [one for _, one in both]
    before = [math.log(one) for one in before if one > 0]
    after = [math.log(one) for one in after if one > 0]
    if not before or not after:
        return Change(name, math.nan, math.nan, 1.0, math.inf, False)
    gain = mean(after) - mean(before)
    scatters = [before, after]
    if is_paired:
        scatters = [[b - a for a, b in zip(before, after, strict=True)]]
    freedom = min(len(before), len(after)) - 1
    noise = math.inf
    if freedom:
        error = math.hypot(*(stdev(one) / math.sqrt(len(one)) for one in scatters))
        noise = error * next(t for least, t in reversed(_T_99.items()) if least <= freedom)
    is_worse = -sign * gain > max(noise, -math.log1p(-FLOOR))
    spread = math.inf if math.isinf(noise) else math.expm1(min(noise, 50.0))
    ends = math.exp(mean(before)), math.exp(mean(after))
    return Change(name, *ends, math.exp(sign * gain), spread, is_worse)


def main(
    old: Annotated[Path, typer.Argument(help="stored with --json")],
    new: Annotated[Path, typer.Argument(help="the same bench, later")],
) -> None:
    """What has become slower beyond noise; exits with 1 if anything has."""
    before = read(old)
    after = read(new)
    found = changes(before, after)
    tell(before, after, found)
    if any(one.is_worse for one in found):
        raise typer.Exit(1)
