"""Is expanding as fast as memory? GB/s written by kind of words: torch, numba, 1 and 2 threads.

All take turns with a copy of as many bytes, which nothing that writes them can beat by much.

Invariant: what is timed has given the bits of the reference before.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from offload.bench.harness.command import Bench, command, say_table
from offload.bench.harness.expansions import Sample, samples
from offload.bench.harness.record import Row
from offload.errors import UserError
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, REFERENCE

THREADS = (1, 2)
DTYPE = torch.bfloat16
COPY = "copy"


class Effort(NamedTuple):
    """How much is measured."""

    size: int  # rows and columns
    rounds: int


FULL = Effort(4096, 9)
QUICK = Effort(2048, 3)


def measure(effort: Effort, thread_counts: Sequence[int] = THREADS) -> list[Row]:
    """Return the fastest of some rounds, taken in turns. Raises `UserError` where bits differ."""
    size = effort.size
    fastest = dict[tuple[str, str, int], float]()
    source, out = (torch.zeros(size, size, dtype=DTYPE) for _ in range(2))
    works: list[tuple[str, str, Callable[[], object]]] = [(COPY, COPY, partial(out.copy_, source))]
    for sample in samples(size, size):
        check(sample)
        own = out.view(sample.out_shape)
        works.append((sample.name, "torch", partial(sample.expand, REFERENCE, own)))
        if HAS_NUMBA:
            works.append((sample.name, "numba", partial(sample.expand, COMPILED, own)))
    for _ in range(effort.rounds):
        for count in thread_counts:
            with threads(count):
                for name, how, work in works:
                    key = (name, how, count)
                    fastest[key] = min(fastest.get(key, float("inf")), seconds(work))
    return [
        {
            "row": f"{name} {how} {count}",
            "name": name,
            "how": how,
            "threads": count,
            "bytes_per_s": out.nbytes / taken,
        }
        for (name, how, count), taken in fastest.items()
    ]


def check(sample: Sample) -> None:
    """Require both forms to be bitwise equal. Raises `UserError` where they differ."""
    wanted, got = (torch.empty(sample.out_shape, dtype=DTYPE) for _ in range(2))
    sample.expand(REFERENCE, wanted)
    if HAS_NUMBA:
        sample.expand(COMPILED, got)
        if not torch.equal(got.view(torch.int16), wanted.view(torch.int16)):
            raise UserError(
                f"{sample.name}: numba and torch give different bits: no speed is printed"
            )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the threads of torch, which compiled functions use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@command("expansion", "quick")
def main(bench: Bench) -> None:
    """GB/s of expanded weights by kind of words, beside a copy of as many bytes."""
    rows = [bench.row(row) for row in measure(QUICK if bench.quick else FULL)]
    rate = {(row["name"], row["how"], row["threads"]): row["bytes_per_s"] for row in rows}
    names = dict.fromkeys(name for name, how, _ in rate if how != COPY)
    ways = [
        (how, count)
        for count in THREADS
        for how in ("torch", "numba")
        if (how != "numba" or HAS_NUMBA)
    ]
    head = [
        "bf16 written, GB/s",
        *(f"{how}, {count} threads" for how, count in ways),
        "numba / torch, 1",
    ]
    lines = [
        [name, *(f"{rate[name, how, count] / 1e9:.2f}" for how, count in ways)] for name in names
    ]
    for line in lines:
        ratio = rate.get((line[0], "numba", 1), 0.0) / rate[line[0], "torch", 1]
        line.append(f"{ratio:.1f}" if ratio else "")
    say_table(head, lines)
    copies = {count: rate[COPY, COPY, count] for count in THREADS}
    print(
        "a copy: "
        + ", ".join(f"{one / 1e9:.2f} GB/s with {count} threads" for count, one in copies.items())
    )
    bench.finish(rows, settings={"dtype": str(DTYPE)}, ceiling={"bytes_per_s": copies[1]})
