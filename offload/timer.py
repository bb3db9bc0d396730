"""How long work takes on the host: the one stopwatch of everything that is chosen by trial.

Work on a device has to end with a number on the host, which is the sign that it is done.
"""

import time
from collections.abc import Callable
from statistics import median


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_s(measure: Callable[[], float], budget_s: float, *, least_rounds: int = 1, most_rounds: int = 1000) -> float:
    """Of the seconds that `measure` tells, again and again for as long as `budget_s` lasts."""
    seconds = list[float]()
    stop = time.perf_counter() + budget_s
    while len(seconds) < least_rounds or (len(seconds) < most_rounds and time.perf_counter() < stop):
        seconds.append(measure())
    return median(seconds)
