"""How fast bytes arrive: a plain reader with other numbers of threads and block sizes, and the layer stream beside it.

The ceiling is the plain reader as the other benches use it. All ways take turns, round after round, so that a disk that
drifts slows all of them. The gate: a layer that came through the stream is, byte for byte, what lies in the file. On a
device page-locked memory is copied to it too, a layer at a time, from the start of a page and from behind it.
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from offload.bench.gpu.rates import copy_rates, memory_bytes_per_s
from offload.bench.harness.command import MODELS, PLACE, Bench, Tell, command, say_link, say_table
from offload.bench.harness.plain_reader import Reading, plain_rate
from offload.bench.harness.record import Guard, Row
from offload.bench.harness.setting import Setting
from offload.bench.harness.steps import BareStream
from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape

_MIB = 1 << 20


class Effort(NamedTuple):
    """How much is measured."""

    num_bytes: int  # of one reading
    rounds: int
    threads: tuple[int, ...]
    blocks: tuple[int, ...]  # MiB


FULL = Effort(1_000_000_000, 5, (1, 2, 4, 8), (1, 2, 4, 8, 16))
QUICK = Effort(250_000_000, 3, (1, 4, 8), (1, 4, 16))
Way = Callable[[], float]  # bytes per second, now


def measure(setting: Setting, effort: Effort, tell: Tell) -> tuple[list[Row], list[float]]:
    """One row per way; and the rates of the ceiling, round by round."""
    ways, stream = _ways(setting, effort), BareStream(open_checkpoint(setting.target))
    try:
        stream.prove()
        ways |= {f"layer stream, {stream.num_slots} slots": lambda: stream.rate(effort.num_bytes)}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        ceilings = []
        for index in range(effort.rounds):
            ceilings.append(plain_rate(setting.shards, effort.num_bytes))
            for done, (name, way) in enumerate(ways.items()):
                rates[name].append(way())
                tell(index * len(ways) + done + 1, effort.rounds * len(ways), "reading")
    finally:
        stream.close()
    return [_row(name, found, ceilings) for name, found in rates.items()], ceilings


def _row(name: str, rates: list[float], ceilings: list[float]) -> Row:
    shares = [rate / ceiling for rate, ceiling in zip(rates, ceilings, strict=True)]
    return {"name": name, "bytes_per_s": median(rates), "share_of_ceiling": median(shares), "shares": shares}


def _ways(setting: Setting, effort: Effort) -> dict[str, Way]:
    def reader(how: Reading) -> Way:
        return lambda: plain_rate(setting.shards, effort.num_bytes, how)

    grid = [(threads, mib) for threads in effort.threads for mib in effort.blocks]
    ways = {f"O_DIRECT, {threads} x {mib} MiB": reader(Reading(threads, mib * _MIB)) for threads, mib in grid}
    cached = Reading(is_direct=False)
    return {**ways, cached.label.removeprefix("plain reader, "): reader(cached),
            "memory to memory": lambda: memory_bytes_per_s(None)}  # fmt: skip


def device_rows(setting: Setting) -> list[Row]:
    """Copies of a layer to the device, and of its own memory."""
    found = copy_rates(setting, model_shape(open_checkpoint(setting.target)).layer_bytes[0])
    rates = {found.how: found.bytes_per_s, f"{found.how}, from behind a page": found.odd_bytes_per_s,
             "memory of the device": memory_bytes_per_s(setting.opened)}  # fmt: skip
    return [_row(name, [rate], [found.bytes_per_s]) for name, rate in rates.items()]


@command("link", MODELS, PLACE, "quick compare", examples=["offload bench link --quick"])
def main(bench: Bench) -> None:
    """How fast do bytes arrive, and which way of reading is fastest?"""
    setting, effort = bench.setting(is_run=False), QUICK if bench.quick else FULL
    bench.check_same(setting)
    torch.set_num_threads(1)
    rows, ceilings = ([], []) if setting.opened is None else ([*map(bench.row, device_rows(setting))], [])
    if setting.is_synthetic:  # no disk is behind it
        ceilings = [rows[0]["bytes_per_s"]] if rows else [memory_bytes_per_s(None)]
    else:
        say_link(setting)
        with bench.screen as screen:
            read, ceilings = measure(setting, effort, screen.count)
        rows += map(bench.row, read)
    cells = ([row["name"], f"{row['bytes_per_s'] / 1e9:.3f}", f"{row['share_of_ceiling']:.3f}"] for row in rows)
    say_table(["way", "GB/s", "of the ceiling"], cells)
    streams = [row for row in rows if row["name"].startswith("layer stream")]
    if streams:
        print("gate: a layer that came through the stream is byte for byte what the file holds")
    bench.finish(
        rows,
        settings={**setting.as_dict(), **effort._asdict()},
        ceiling={"bytes_per_s": median(ceilings), "samples": ceilings},
        guards={f"{row['name'].partition(',')[0]} / plain reader": Guard(row["shares"], "higher") for row in streams},
    )
