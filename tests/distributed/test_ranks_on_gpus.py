"""Ranks that compute on a GPU beside ranks that do not: all exchange in one way, and write what one process writes."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice
from in_memory import InMemory
from rank_threads import rank_threads
from strict_place import OnCard, StrictDevice, place

import offload
from offload.distributed import join
from offload.distributed.exchange import Exchange
from offload.engine import load
from offload.streaming.device import HOST, Device

PROMPT, NUM_NEW = list(range(5, 25)), 10


class Card(FakeDevice):
    """A device of which there may be some beside the host."""

    torch_device = property(lambda self: place())  # type: ignore[assignment]


def on_cards(patch: pytest.MonkeyPatch, ranks: set[int]) -> None:
    """These ranks have a GPU of their own, the others compute on their host."""
    open_decoder = load.open_decoder

    def opened(*args: Any, transport: InMemory, **options: Any) -> Any:
        device: Device = Card(seed=transport.rank) if transport.rank in ranks else HOST
        if device is HOST or transport.rank == 0:  # the head's mode is that of the test
            return open_decoder(*args, transport=transport, device=device, **options)
        with StrictDevice():
            return open_decoder(*args, transport=transport, device=device, **options)

    patch.setattr("rank_threads.open_decoder", opened)


def options_of(ranks: set[int], rank: int) -> dict[str, Any]:
    budgets = {"device": "cuda", "gpu_memory": "1100MiB"} if rank in ranks else {"device": "cpu"}
    usual = {"ranks": "shards", "tree": "8x3", "ram": "2GiB", "context": 64, "threads": 1, "profile": "none"}
    return {**usual, **budgets}


@pytest.mark.parametrize("ranks", [{0, 1}, {0}, {1}], ids=["both", "the head", "the other"])
def test_ranks_on_gpus_write_what_one_process_writes(
    ranks: set[int], pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with offload.load(*pair, ram="1GiB", context=64, tree="8x3", threads=1, profile="none") as decoder:
        wanted = decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids
    on_cards(monkeypatch, ranks)
    with StrictDevice(), rank_threads(2, *pair, lambda rank: options_of(ranks, rank)) as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids == wanted
        assert any("by way of host memory" in note for note in decoder.notes)


class Recorded:
    """Who was asked for what, by the kind of place that the rows lie in, as torch.distributed chooses a backend."""

    rank, num_ranks = 0, 2

    def __init__(self) -> None:
        self.kinds = list[str]()

    def broadcast(self, rows: torch.Tensor) -> torch.Tensor:
        self.kinds.append(rows.device.type)
        return rows

    def gather(self, part_TR: torch.Tensor, widths: list[int]) -> torch.Tensor:
        self.kinds.append(part_TR.device.type)
        return part_TR.repeat(1, 2)


@pytest.mark.parametrize("where", [place, lambda: torch.device("cpu")], ids=["card", "host"])
def test_rows_are_exchanged_on_the_host_and_come_back(where: Any) -> None:
    transport = Recorded()
    exchange = Exchange(transport)  # type: ignore[arg-type]
    with StrictDevice(), exchange.opened():
        exchange.send = lambda rows: rows.to(where())
        rows = torch.arange(6.0).view(2, 3).to(where())
        for got in (exchange.share(rows), exchange.gather(rows[None], [3, 3])):
            assert got.device == where() and isinstance(got, OnCard) == (where().type != "cpu")
    assert transport.kinds == ["cpu", "cpu"]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Backends of the process groups that are made on a host with two GPUs and NCCL."""
    made = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    monkeypatch.setattr(dist, "new_group", lambda *, backend, **_: made.append(backend))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(join, "chosen_interface", lambda *_: nullcontext())
    monkeypatch.setattr(join, "Transport", lambda *_: None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=object()))
    yield made
