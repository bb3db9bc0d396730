"""A process looked at from outside, time after time, and whether anything of it drifts.

Invariant: it is looked at when nothing is under way in it, so that all that is there is kept, and
not in use.
"""

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from offload.bench.harness.record import Row
from offload.machine import rss_bytes

# share of a soak in which caches fill, and libraries are imported when they are first needed
_WARM_UP = 1 / 6


class Sample(NamedTuple):
    time_s: float
    rss_bytes: int
    num_descriptors: int
    num_threads: int
    # files in the folder for temporary ones
    num_files: int
    # processor time that it has used so far
    cpu_s: float
    # tokens that it has written so far
    num_tokens: int


def look(process: int, temporary: Path, time_s: float, num_tokens: int) -> Sample:
    """Return what a process holds now. Raises `OSError` where it has ended."""
    folder = Path(f"/proc/{process}")
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Sample(
        time_s,
        rss_bytes(process),
        len(os.listdir(folder / "fd")),
        len(os.listdir(folder / "task")),
        sum(1 for _ in temporary.rglob("*")),
        (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
        num_tokens,
    )


def row_of(process: str, samples: Sequence[Sample]) -> Row:
    passed_s = samples[-1].time_s - samples[0].time_s
    written = samples[-1].num_tokens - samples[0].num_tokens
    return {
        "process": process,
        "num_looks": len(samples),
        "rss_bytes": samples[-1].rss_bytes,
        "drift": drift(samples),
        **{f"more_{name.removeprefix('num_')}": more for name, more in growth(samples).items()},
        "tokens_per_s": written / max(1e-9, passed_s),
        "speed_kept": speed_kept(samples),
    }


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    start_s = samples[0].time_s + _WARM_UP * (samples[-1].time_s - samples[0].time_s)
    return [one for one in samples if one.time_s >= start_s]


def drift(samples: Sequence[Sample]) -> float:
    """Return the growth of resident memory behind the warm-up, as a share.

    It is taken along the median slope, so that no single look moves it.
    """
    kept = settled(samples)
    slopes = [
        (later.rss_bytes - one.rss_bytes) / (later.time_s - one.time_s)
        for one, later in combinations(kept, 2)
        if later.time_s > one.time_s
    ]
    middle = median(one.rss_bytes for one in kept)
    return median(slopes) * (kept[-1].time_s - kept[0].time_s) / middle if slopes else 0.0


def growth(samples: Sequence[Sample]) -> dict[str, int]:
    """Return by how much counts that should be constant have grown behind the warm-up.

    From its first half to its second.
    """
    kept = settled(samples)
    half = max(1, len(kept) // 2)

    def most(own: Sequence[Sample], name: str) -> int:
        return max((getattr(one, name) for one in own), default=0)

    names = ("num_descriptors", "num_threads", "num_files")
    return {name: most(kept[half:], name) - most(kept[:half], name) for name in names}


def speed_kept(samples: Sequence[Sample]) -> float:
    """Return tokens per CPU second in the second half over those in the first.

    Neighbours that take turns with a process change the time on the clock far more than they change
    this.
    """
    kept = settled(samples)
    half = len(kept) // 2

    def speed(first: Sample, last: Sample) -> float:
        return max(1, last.num_tokens - first.num_tokens) / max(1e-9, last.cpu_s - first.cpu_s)

    return speed(kept[half], kept[-1]) / speed(kept[0], kept[half])
