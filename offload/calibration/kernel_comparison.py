"""One kernel against what runs without it, on the device at hand: first whether both agree, then which one is faster.

Invariant: no time is told for what is wrong, and a kernel that was wrong or refused once is not used.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

Timer = Callable[[Callable[[], Any]], float]  # seconds that a piece of work takes
_LEAST_RATIO = 1.1  # timings waver by some percent, and which kernel a run takes should not


class Comparison(NamedTuple):
    """One kernel at one shape."""

    kernel: str
    shape: str
    challenger: Callable[[], Any]
    rival: Callable[[], Any]
    agrees: Callable[[], bool]  # run before anything is timed


class Outcome(NamedTuple):
    """How a comparison has ended."""

    kernel: str
    shape: str
    kernel_s: float | None  # None where the results differ or the kernel does not run
    rival_s: float | None
    reason: str = ""  # why nothing was timed

    @property
    def ratio(self) -> float:
        """Rival / kernel time; 0 where the kernel is no choice."""
        return self.rival_s / self.kernel_s if self.kernel_s and self.rival_s else 0.0


class Verdict(NamedTuple):
    """What all comparisons of a kernel say."""

    mean_ratio: float  # geometric; 0 where one of them went wrong
    worst_ratio: float
    beats_rival: bool


def fight(comparison: Comparison, timer: Timer, settle: Callable[[], object] = lambda: None) -> Outcome:
    """Both sides in turn, if they agree; `settle` waits for the device after a failure.

    Raises:
        RuntimeError: the kernel has left the device unusable, and every error from here on would be blamed on others.
    """
    try:
        if not comparison.agrees():
            return Outcome(comparison.kernel, comparison.shape, None, None, "its results differ")
        return Outcome(comparison.kernel, comparison.shape, timer(comparison.challenger), timer(comparison.rival))
    except Exception as error:  # compilers and drivers refuse with exceptions of every kind
        first_line = (str(error).splitlines() or [""])[0]
        said = f"{type(error).__name__}: {first_line[:120]}"
    try:
        settle()
    except Exception as lost:
        raise RuntimeError(f"{comparison.kernel} at {comparison.shape} has left the device unusable ({said})") from lost
    return Outcome(comparison.kernel, comparison.shape, None, None, said)


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Each with what its kernel's verdict is, by the names that `--json` and benches use."""
    found = verdicts(outcomes)
    return [{**one._asdict(), "ratio": one.ratio, "is_used": found[one.kernel].beats_rival} for one in outcomes]


def verdicts(outcomes: Iterable[Outcome]) -> dict[str, Verdict]:
    """By kernel; it must win clearly on the whole and be wrong nowhere."""
    ratios: dict[str, list[float]] = {}
    for outcome in outcomes:
        ratios.setdefault(outcome.kernel, []).append(outcome.ratio)
    means = {kernel: geometric_mean(of_kernel) if min(of_kernel) else 0.0 for kernel, of_kernel in ratios.items()}
    return {kernel: Verdict(mean, min(ratios[kernel]), mean >= _LEAST_RATIO) for kernel, mean in means.items()}
