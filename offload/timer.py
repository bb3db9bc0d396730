"""The one stopwatch of the host, for everything that is chosen by trial.

Work on a device has to end with a number on the host, which is the sign that it is done.
"""

import time
from collections.abc import Callable
from statistics import median


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def fastest_s(measure: Callable[[], float], budget_s: float, *, least_rounds: int = 1) -> float:
    """Return the least of repeated measurements: what the machine can do undisturbed."""
    return min(_rounds(measure, budget_s, least_rounds, 1000))


def median_s(
    measure: Callable[[], float], budget_s: float, *, least_rounds: int = 1, most_rounds: int = 1000
) -> float:
    """Return the median of the seconds that `measure` returns, repeated for `budget_s`."""
    return median(_rounds(measure, budget_s, least_rounds, most_rounds))


def _rounds(measure: Callable[[], float], budget_s: float, least: int, most: int) -> list[float]:
    seconds = list[float]()
    stop = time.perf_counter() + budget_s
    while len(seconds) < least or (len(seconds) < most and time.perf_counter() < stop):
        seconds.append(measure())
    return seconds
