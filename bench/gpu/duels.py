"""One kernel against what runs without it, by the clock, once both agree.

Invariant: no time is told for what is wrong.
"""

from collections.abc import Callable, Iterable
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from offload.calibration.trial import ComparisonOutcome, KernelComparison, compare
from offload.streaming.device import Device

Timer = Callable[[Callable[[], Any]], float]  # seconds that a piece of work takes
# written before each run: in a sweep a layer's weights have gone through the cache
_CACHE_BYTES = 64 << 20
_NUM_ROUNDS = 7


class Duel(NamedTuple):
    """How one duel has ended."""

    outcome: ComparisonOutcome
    kernel_s: float | None = None  # None where the kernel is wrong, or does not run
    rival_s: float | None = None

    @property
    def ratio(self) -> float:
        """Rival's time over the kernel's; 0 where the kernel is not used."""
        return self.rival_s / self.kernel_s if self.kernel_s and self.rival_s else 0.0

    def as_row(self) -> dict[str, object]:
        """Return the figures by the names that records use."""
        times = {"kernel_s": self.kernel_s, "rival_s": self.rival_s, "ratio": self.ratio}
        return {**self.outcome._asdict(), **times}


class Verdict(NamedTuple):
    """The outcome of all duels of a kernel."""

    mean_ratio: float  # geometric; 0 where one of them went wrong
    worst_ratio: float


def time_duel(comparison: KernelComparison, timer: Timer, device: Device | None = None) -> Duel:
    """Time both sides in turn, if they agree. Raises what `compare` raises."""
    outcome = compare(comparison, device)
    if outcome.reason:
        return Duel(outcome)
    return Duel(outcome, timer(comparison.challenger), timer(comparison.rival))


def verdicts(duels: Iterable[Duel]) -> dict[str, Verdict]:
    """Return the verdict of each kernel."""
    ratios: dict[str, list[float]] = {}
    for duel in duels:
        ratios.setdefault(duel.outcome.kernel, []).append(duel.ratio)
    return {
        kernel: Verdict(geometric_mean(own) if min(own) else 0.0, min(own))
        for kernel, own in ratios.items()
    }


def device_timer(device: Device) -> Timer:
    """Return medians of runs with a cold cache, by events of the compute stream.

    Launches are included.
    """
    scratch = device.allocate(_CACHE_BYTES)

    def once(work: Callable[[], Any]) -> float:
        device.fill(scratch, 0, device.compute)
        before = device.record(device.compute, is_timed=True)
        work()
        after = device.record(device.compute, is_timed=True)
        device.synchronize(after)
        seconds = device.elapsed_s(before, after)
        assert seconds is not None, "the host has waited for it"
        return seconds

    def seconds_of(work: Callable[[], Any]) -> float:
        work()  # the first run of any code is not like the others
        return median(once(work) for _ in range(_NUM_ROUNDS))

    return seconds_of
