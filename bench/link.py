"""How fast bytes arrive: a plain reader with other numbers of threads and block sizes, and the layer stream beside it.

The ceiling is the plain reader as the other benches use it. All ways take turns, round after round, so that a disk that
drifts slows all of them. The gate: a layer that came through the stream is, byte for byte, what lies in the file.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import typer

from offload.bench import setting as common
from offload.bench.plain_reader import Reading, plain_rate
from offload.bench.record import Guard, Row, new_result
from offload.bench.setting import Setting
from offload.bench.text_table import aligned
from offload.checkpoint.layout import SlabLayout
from offload.checkpoint.safetensors import open_checkpoint
from offload.cli.console import Console
from offload.errors import UserError
from offload.model.weights import StreamedModel
from offload.streaming.disk import DiskReader
from offload.streaming.host_carrier import HostCarrier
from offload.streaming.host_device import HostDevice
from offload.streaming.layers import Layers
from offload.streaming.source import ByteSource

_MIB = 1 << 20
_COPY_BYTES = 64 * _MIB


class Effort(NamedTuple):
    """How much is measured."""

    num_bytes: int  # of one reading
    rounds: int
    threads: tuple[int, ...]
    blocks: tuple[int, ...]  # MiB


FULL = Effort(1_000_000_000, 5, (1, 2, 4, 8), (1, 2, 4, 8, 16))
QUICK = Effort(250_000_000, 3, (1, 4, 8), (1, 4, 16))
Way = Callable[[], float]  # bytes per second, now


def measure(setting: Setting, effort: Effort, screen: Console) -> tuple[list[Row], list[float]]:
    """One row per way; and the rates of the ceiling, round by round."""
    ways, stream = _ways(setting, effort), _Stream(setting)
    try:
        stream.prove()
        ways |= {f"layer stream, {stream.num_slots} slots": lambda: stream.rate(effort.num_bytes)}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        ceilings = []
        for index in range(effort.rounds):
            ceilings.append(plain_rate(setting.shards, effort.num_bytes))
            for done, (name, way) in enumerate(ways.items()):
                rates[name].append(way())
                screen.count(index * len(ways) + done + 1, effort.rounds * len(ways), "reading")
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
    ways[cached.label.removeprefix("plain reader, ")] = reader(cached)
    ways["memory to memory"] = _copier(torch.empty(_COPY_BYTES, dtype=torch.uint8))
    if torch.cuda.is_available():
        ways["locked memory to device"] = _copier(torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda"))
    return ways


def _copier(destination: torch.Tensor) -> Way:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=destination.is_cuda)

    def copy_rate() -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            destination.copy_(source)  # returns when it is done, for it is not told otherwise
            times.append(time.perf_counter() - started)
        return _COPY_BYTES / median(times)

    return copy_rate


class _Stream:
    """The layers of the target through as few slots as a run has, and nobody computes."""

    num_slots = 3

    def __init__(self, setting: Setting) -> None:
        checkpoint = open_checkpoint(setting.target)
        self._store = DiskReader(checkpoint.shards)
        self._layouts = StreamedModel(checkpoint).layer_layouts
        self._stream = Layers(HostCarrier(self._store, self._layouts, (), HostDevice()), self.num_slots)
        self._stream.load_resident()

    def rate(self, num_bytes: int) -> float:
        """Bytes per second over as many layers as that takes, the first ones not counted: they were there."""
        self._stream.begin_sweep()
        self._pass(self.num_slots)
        started, before, layer = time.perf_counter(), 0, self.num_slots
        while before < num_bytes:
            before += self._layouts[layer % len(self._layouts)].slab_bytes
            self._pass_one(layer % len(self._layouts))
            layer += 1
        return before / (time.perf_counter() - started)

    def prove(self) -> None:
        """A layer in the middle is what the file says. Raises `UserError`."""
        layer = len(self._layouts) // 2
        self._stream.begin_sweep()
        self._pass(layer)
        slab = self._stream.acquire(layer)
        if not _is_the_file(self._store, self._layouts[layer], slab):
            raise UserError(f"layer {layer} came with other bytes than the file has: no speed is worth printing")
        self._stream.release(layer)

    def close(self) -> None:
        self._stream.close()
        self._store.close()

    def _pass(self, num_layers: int) -> None:
        for layer in range(num_layers):
            self._pass_one(layer)

    def _pass_one(self, layer: int) -> None:
        self._stream.acquire(layer)
        self._stream.release(layer)


def _is_the_file(source: ByteSource, layout: SlabLayout, weights: torch.Tensor) -> bool:
    for piece in layout.pieces:
        size = piece.hi - piece.lo
        wanted = np.fromfile(source.paths[piece.shard], np.uint8, size, offset=piece.lo)
        lo = piece.slab_lo - layout.lead_bytes
        if not np.array_equal(wanted, weights[lo : lo + size]):
            return False
    return True


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    epilog="Examples:\n\n    offload bench link --quick\n\n    offload bench link -m Llama-3.1-70B --json link.json"
)
def main(
    model: common.Model = None,
    size: common.Size = "2GB",
    quick: common.Quick = False,
    json_file: common.Json = None,
    compare: common.Compare = None,
) -> None:
    """How fast do bytes arrive, and which way of reading is fastest?"""
    effort, old = QUICK if quick else FULL, common.earlier("link", compare)
    with Console(is_quiet=False) as screen:
        setting = common.find_setting(model, None, size, None, screen, is_run=False)
        common.check_same(old, setting)
        common.say_link(setting.shards)
        rows, ceilings = measure(setting, effort, screen)
    table = [[row["name"], f"{row['bytes_per_s'] / 1e9:.3f}", f"{row['share_of_ceiling']:.3f}"] for row in rows]
    print(aligned([["way", "GB/s", "of the ceiling"], *table]))
    print("gate: a layer that came through the stream is byte for byte what the file holds")
    stream = next(row for row in rows if row["name"].startswith("layer stream"))
    result = new_result(
        "link",
        settings={**setting.as_dict(), **effort._asdict(), "quick": quick},
        ceiling={"bytes_per_s": median(ceilings), "samples": ceilings},
        rows=rows,
        guards={"layer stream / plain reader": Guard(stream["shares"], "higher")},
    )
    common.finish(result, json_file, old)


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("link")
