"""What only a GPU can show: tokens, notes, events, copies. Run it with `pytest -m gpu`; speed is for the bench."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from marks import needs_cuda
from shell import shell
from test_cuda_graphs import passes
from test_device_path import NUM_NEW, TIERS, pair_of, place_layers
from test_tiny import prompts

import offload
from offload.bench.gpu import experts
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import PAIR, PROMPT
from offload.engine import build
from offload.kernels.registry import KERNELS
from offload.model.cuda_graphs import CudaRecorder, use_graphs
from offload.model.kv_cache import KVCache
from offload.reports.tracing import ranks_of
from offload.sampling_options import Sampling
from offload.streaming import cuda as driver
from offload.streaming.cuda import CudaDevice
from offload.streaming.pinned import (
    PinnedAllocator,
    RefusedError,
    RegisteredPinning,
    forget_cuda_error,
    open_pinned_allocator,
)

pytestmark = [pytest.mark.gpu, needs_cuda]

PLACE = torch.device("cuda", 0)
HOW: dict[str, Any] = {"device": "cuda", "gpu_memory": "2GiB", "ram": "4GiB", "context": 128, "profile": "none"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    return pair_of("llama", tmp_path_factory.mktemp("pairs"))


def test_a_tree_is_chosen_by_what_the_card_takes(pair: tuple[Path, Path, list[int]]) -> None:
    """The probe records on a cache of its own, the run on another."""
    target, draft, wanted = pair
    with offload.load(target, draft, tree="auto", **HOW) as decoder:
        assert decoder.generate(prompts()[1], max_new_tokens=NUM_NEW).token_ids == wanted


def test_memory_that_is_not_locked_will_do(pair: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, wanted = pair
    place_layers(monkeypatch, *TIERS["all three"])
    monkeypatch.setattr(CudaDevice, "open_allocator", lambda self: PinnedAllocator([], ["told not to"]))
    with offload.load(target, draft, tree="8x3", **HOW) as decoder:
        assert any("could not be page-locked" in note and "told not to" in note for note in decoder.notes)
        assert decoder.generate(prompts()[1], max_new_tokens=NUM_NEW).token_ids == wanted


def test_experts_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench's own model in small, with NaN in every slot before an expert comes into it."""

    def poisoned(*args: Any, **options: Any) -> offload.Decoder:
        decoder = offload.load(*args, **options)
        assert decoder.target.experts is not None
        decoder.target.experts.poison_released = True
        return decoder

    monkeypatch.setattr(experts, "LARGE", experts.TINY)
    monkeypatch.setattr(experts, "load", poisoned)
    rows = {row["row"]: row for row in experts.measure(CudaDevice(0))}
    assert sum(row["is_met"] is True for row in rows.values()) == 3
    waits = [row["value"] for name, row in rows.items() if "waits of the host" in name]
    assert len(waits) == 3 and max(waits) <= experts.TINY.num_layers + 12, "once a layer, and around sweeps"


def test_a_refused_lock_is_not_blamed_on_the_next_kernel() -> None:
    way = RegisteredPinning(torch.cuda.cudart(), forget_cuda_error)
    array = way.allocate(1 << 20)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(array.ctypes.data, len(array), 0))
    assert code, "locking pages twice was not refused"
    forget_cuda_error()
    assert float(torch.ones(1000, device=PLACE).sum()) == 1000
    way.free(array)
    with pytest.raises(RefusedError, match="cudaHostRegister returned"):
        RegisteredPinning(Refusing(), forget_cuda_error).allocate(1 << 20)
    assert float(torch.ones(1000, device=PLACE).sum()) == 1000


class Refusing:
    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(0, size, flags))


@pytest.mark.parametrize("rule", ["match", "topk", "sequoia", "specinfer", "spectr"])
def test_every_rule_draws_on_the_card(rule: str, pair: tuple[Path, Path, list[int]]) -> None:
    target, draft, wanted = pair
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 4, "max_new_tokens": 30}
    with offload.load(target, draft, tree="8x3", rule=rule, **HOW) as decoder:
        assert decoder.generate(prompts()[1], max_new_tokens=20).token_ids == wanted[:20]
        ours = decoder.generate(prompts()[1], **sampling).token_ids
        if rule == "match":
            grown = decoder.generate(prompts()[1], tree="grown:8x3", **sampling).token_ids
            assert grown == ours == decoder.generate(prompts()[1], tree="none", **sampling).token_ids
        assert len(ours) == 30
        assert len(ranks_of(decoder, prompts()[1][:30], prompts()[1][30:40], Sampling(temperature=0.8))) == 10


def test_noise_is_that_of_the_cpu(pair: tuple[Path, Path, list[int]]) -> None:
    target, draft, _ = pair
    sampling = {"temperature": 0.8, "seed": 4, "max_new_tokens": 30}
    written = []
    for options in (HOW, {"device": "cpu", "ram": "1GiB", "context": 128, "profile": "none", "threads": 1}):
        with offload.load(target, draft, tree="8x3", **options) as decoder:
            written.append(decoder.generate(prompts()[1], **sampling).token_ids)
    assert written[0] == written[1]


def test_recordings_on_one_cache_after_another(pair: tuple[Path, Path, list[int]]) -> None:
    """Those of the first are dropped, and their pool of memory with them."""
    checkpoint = open_checkpoint(pair[0])
    plain, replayed = (build.resident_model(checkpoint, "float32", PLACE) for _ in range(2))
    replayed.set_attention_kernel(KERNELS.path_attention)
    assert use_graphs(replayed) is None
    before = torch.cuda.current_stream(PLACE)
    for _ in range(3):
        both = [passes(model, KVCache(model.num_layers, 29 + 24 + 12)) for model in (plain, replayed)]
        for theirs, ours in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert torch.cuda.current_stream(PLACE) == before


def test_the_command_line_writes_on_the_card() -> None:
    models_of = ("-m", PAIR / "target", "-d", PAIR / "draft")
    options = ("--device", "cuda", "--gpu-mem", "2GiB", "--ram", "4GiB", "--context", "128", "--profile", "none")
    outcome = shell("generate", *models_of, *options, "-p", PROMPT, "-n", 20, "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["text"] and result["stats"]["peak_device_bytes"] <= 2 << 30
    outcome = shell("generate", *models_of, *options[:2], "--gpu-mem", "1MiB", "-p", PROMPT)
    assert outcome.code == 2 and "raise --gpu-mem to" in outcome.err and outcome.err.count("\n") == 1


class Place(NamedTuple):
    card: CudaDevice
    arena: PinnedAllocator


@pytest.fixture
def place() -> Iterator[Place]:
    card = CudaDevice(0)
    arena = open_pinned_allocator(card.torch_device)
    yield Place(card, arena)
    torch.cuda.synchronize()
    arena.close()


def is_right(device: CudaDevice) -> bool:
    """Whether uploads of any type and size bring what was sent, one behind the other."""
    sources = [torch.arange(size, dtype=dtype) % 2 for size in (1, 77, 9001) for dtype in (torch.int64, torch.float32)]
    sources += [torch.arange(1001) % 3 == 0, torch.tensor(5)]
    sent = [device.upload(source) for source in sources]
    return all(torch.equal(there.cpu(), source) for there, source in zip(sent, sources, strict=True))


def test_uploads_are_what_was_sent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a ring so small that it starts over many times."""
    monkeypatch.setattr(driver, "STAGING_BYTES", 1 << 17)
    with ExitStack() as resources:
        assert place.card.open_uploads(resources) is None
        assert all(is_right(place.card) for _ in range(20))
    assert is_right(place.card), "afterwards they are copies"


def test_layers_are_what_was_sent(place: Place) -> None:
    card, layer = place.card, place.arena.allocate((100 << 20) + 7).array
    source, slot = torch.from_numpy(layer), card.allocate(len(layer))
    source.random_(0, 255)
    card.wait(card.copies, card.mark(card.compute))
    card.copy(slot, source, card.copies)
    card.wait(card.compute, card.mark(card.copies))
    assert torch.equal(slot.cpu(), source)


def test_a_recording_does_not_wait_for_layers(place: Place) -> None:
    card, layer = place.card, torch.from_numpy(place.arena.allocate(1 << 30).array)
    slot, number = card.allocate(len(layer)), torch.zeros(8, device=card.torch_device)
    record = CudaRecorder(torch.cuda.Stream(card.torch_device))
    first = record(lambda: number.add_(1))  # allocates, and holds the memory of all
    card.synchronize(card.mark(card.compute))
    for _ in range(4):
        card.copy(slot, layer, card.copies)
    copied = card.mark(card.copies)
    replay = record(lambda: number.add_(1))
    assert not copied.query(), "the recording has waited for copies, or these take no time"
    replay()
    first()
    assert number.tolist() == [6.0] * 8, "two runs to warm up, and four replays"
