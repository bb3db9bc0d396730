"""Is expanding as fast as memory? GB/s written by kind of words: torch, numba, 1 and 2 threads.

All take turns with a copy of as many bytes, which nothing that writes them can beat by much.

Invariant: what is timed has given the bits of the reference before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from offload.bench.harness.command import Bench, Findings, command
from offload.bench.harness.expansions import Sample, samples
from offload.bench.harness.record import Row
from offload.bench.harness.tables import Column
from offload.errors import UserError
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, REFERENCE
from offload.timer import timed

THREADS = (1, 2)
DTYPE = torch.bfloat16
COPY = "copy"


class Effort(NamedTuple):
    size: int  # rows and columns
    rounds: int


FULL = Effort(4096, 9)
QUICK = Effort(2048, 3)


def measure(effort: Effort, thread_counts: Sequence[int] = THREADS) -> list[Row]:
    """Return the fastest of some rounds, taken in turns. Raises `UserError` where bits differ."""
    size = effort.size
    fastest = dict[tuple[str, str, int], float]()
    source, out = (torch.zeros(size, size, dtype=DTYPE) for _ in range(2))
    works: dict[tuple[str, str], Callable[[], object]] = {(COPY, COPY): partial(out.copy_, source)}
    for sample in samples(size, size):
        check(sample)
        own = out.view(sample.out_shape)
        works[sample.name, "torch"] = partial(sample.expand, REFERENCE, own)
        if HAS_NUMBA:
            works[sample.name, "numba"] = partial(sample.expand, COMPILED, own)
    for count in [*thread_counts] * effort.rounds:
        with threads(count):
            for key, work in works.items():
                before_s = fastest.get((*key, count), float("inf"))
                fastest[*key, count] = min(before_s, timed(work))
    return [
        {
            "row": f"{name} {how} {count}",
            "name": name,
            "how": how,
            "threads": count,
            "bytes_per_s": out.nbytes / taken_s,
        }
        for (name, how, count), taken_s in fastest.items()
    ]


def check(sample: Sample) -> None:
    """Require both forms to be bitwise equal. Raises `UserError` where they differ."""
    wanted, got = (torch.empty(sample.out_shape, dtype=DTYPE) for _ in range(2))
    sample.expand(REFERENCE, wanted)
    if HAS_NUMBA:
        sample.expand(COMPILED, got)
        if not torch.equal(got.view(torch.int16), wanted.view(torch.int16)):
            told = f"{sample.name}: numba and torch give different bits"
            raise UserError(f"{told}: no speed is printed")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the threads of torch, which compiled functions use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@command("expansion", "quick")
def main(bench: Bench) -> Findings:
    """GB/s of expanded weights by kind of words, beside a copy of as many bytes."""
    rows = measure(bench.effort(FULL, QUICK))
    lines = dict[str, Row]()
    for row in rows:
        line = lines.setdefault(row["name"], {"name": row["name"]})
        line[f"{row['how']} {row['threads']}"] = row["bytes_per_s"] / 1e9
    copies = {count: lines[COPY][f"{COPY} {count}"] for count in THREADS}
    del lines[COPY]
    told = [f"{rate:.2f} GB/s with {count} threads" for count, rate in copies.items()]
    ways = [f"{how} {count}" for count in THREADS for how in ("torch", "numba")]
    columns = [
        Column("bf16 written, GB/s", "name"),
        *(Column(f"{way} threads", way, ".2f") for way in ways),
        Column("numba / torch, 1", lambda line: line.get("numba 1", 0.0) / line["torch 1"], ".1f"),
    ]
    return Findings(
        rows=rows,
        tables=[(columns, [*lines.values()])],
        notes=[f"a copy: {', '.join(told)}"],
        settings={"dtype": str(DTYPE)},
        ceiling={"bytes_per_s": copies[1] * 1e9},
    )
