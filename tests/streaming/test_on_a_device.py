"""What only a GPU can show, end to end: tokens, notes, events. Run it with `pytest -m gpu`; speed is for the bench."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import shell
from test_cuda_graphs import passes
from test_device_path import NUM_NEW, TIERS, TREES, pair_of, place_layers
from test_tiny import prompts

import offload
from offload.bench import device as bench
from offload.bench.device_gate import all_streamed, gates
from offload.bench.timeline import record_steps
from offload.checkpoint.safetensors import open_checkpoint
from offload.cli.demo import PAIR, PROMPT
from offload.config import Sampling
from offload.engine import build
from offload.engine import load as loading
from offload.model.cuda_graphs import use_graphs
from offload.model.kv_cache import KVCache
from offload.streaming.pinned import PinnedAllocator, RefusedError, RegisterWay, forget_cuda_error
from offload.tuning.trace_acceptance import given_trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLACE = torch.device("cuda", 0)
HOW: dict[str, Any] = {"device": "cuda", "gpu_memory": "2GiB", "ram": "4GiB", "context": 128, "profile": "none"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    return pair_of("llama", tmp_path_factory.mktemp("pairs"))


@contextmanager
def open_decoder(target: Path, draft: Path, **options: Any) -> Iterator[offload.Decoder]:
    with offload.load(target, draft, **{**HOW, "context": 512, **options}) as decoder:
        yield decoder


def test_both_types_pass_the_gate_of_the_bench() -> None:
    rows = [*gates(open_decoder, PAIR, PROMPT, PLACE, 60)]
    assert len(rows) == 3 and all(row["is_met"] for row in rows)


def test_a_tree_is_chosen_by_what_the_card_takes(pair: tuple[Path, Path, list[int]]) -> None:
    """The probe records on a cache of its own, the run on another."""
    target, draft, wanted = pair
    with offload.load(target, draft, tree="auto", **HOW) as decoder:
        assert decoder.generate(prompts()[1], max_new_tokens=NUM_NEW).token_ids == wanted


def test_memory_that_is_not_locked_will_do(pair: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, wanted = pair
    place_layers(monkeypatch, *TIERS["all three"])
    monkeypatch.setattr(loading, "open_pinned_allocator", lambda place: PinnedAllocator([], ["told not to"]))
    with offload.load(target, draft, tree="8x3", **HOW) as decoder:
        assert any("could not be page-locked" in note and "told not to" in note for note in decoder.notes)
        assert decoder.generate(prompts()[1], max_new_tokens=NUM_NEW).token_ids == wanted


def test_a_refused_lock_is_not_blamed_on_the_next_kernel() -> None:
    """The same pages twice: the driver refuses the second time."""
    way = RegisterWay(torch.cuda.cudart(), forget_cuda_error)
    array = way.allocate(1 << 20)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(array.ctypes.data, len(array), 0))
    assert code, "locking pages twice was not refused"
    forget_cuda_error()
    assert float(torch.ones(1000, device=PLACE).sum()) == 1000
    way.free(array)
    with pytest.raises(RefusedError, match="cudaHostRegister returned"):
        RegisterWay(Refusing(), forget_cuda_error).allocate(1 << 20)
    assert float(torch.ones(1000, device=PLACE).sum()) == 1000


class Refusing:
    """The driver, asked for what it cannot do."""

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
        assert len(given_trace(decoder, prompts()[1], 30, Sampling(temperature=0.8))) == 10


def test_noise_is_that_of_the_cpu(pair: tuple[Path, Path, list[int]]) -> None:
    target, draft, _ = pair
    sampling = {"temperature": 0.8, "seed": 4, "max_new_tokens": 30}
    written = []
    for how in (HOW, {"device": "cpu", "ram": "1GiB", "context": 128, "profile": "none", "threads": 1}):
        with offload.load(target, draft, tree="8x3", **how) as decoder:
            written.append(decoder.generate(prompts()[1], **sampling).token_ids)
    assert written[0] == written[1]


def test_the_cards_clock_tells_what_happened(
    pair: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, wanted = pair
    place_layers(monkeypatch, *TIERS["host"])
    with offload.load(target, draft, tree="8x3", **HOW) as decoder:
        timeline, new_ids = record_steps(decoder, prompts()[1], "8x3", 3)
    assert new_ids == wanted[: len(new_ids)]
    events = timeline.events()
    kinds = [event.kind for event in events]
    assert kinds.count("compute") == kinds.count("wait") == 12 and kinds.count("copy") >= 10
    assert all(event.start_s <= event.end_s for event in events)
    begin = min(event.start_s for event in events if event.kind == "draft")
    end = max(event.end_s for event in events if event.kind == "verify")
    used = [event for event in events if event.kind == "compute"]
    assert begin < min(event.start_s for event in used) and max(event.end_s for event in used) < end


def test_recordings_on_one_cache_after_another(pair: tuple[Path, Path, list[int]]) -> None:
    """Those of the first are dropped, and their pool of memory with them."""
    checkpoint = open_checkpoint(pair[0])
    plain, replayed = (build.resident_model(checkpoint, "float32", PLACE) for _ in range(2))
    assert use_graphs(replayed) is None
    before = torch.cuda.current_stream(PLACE)
    for _ in range(3):
        both = [passes(model, KVCache(model.num_layers, 29 + 24 + 12)) for model in (plain, replayed)]
        for theirs, ours in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert torch.cuda.current_stream(PLACE) == before


def test_the_command_line_writes_on_the_card(pair: tuple[Path, Path, list[int]]) -> None:
    target, draft, _ = pair
    options = ("--device", "cuda", "--gpu-mem", "2GiB", "--ram", "4GiB", "--context", "128", "--profile", "none")
    outcome = shell("generate", "-m", PAIR / "target", "-d", PAIR / "draft", *options, "-p", PROMPT, "-n", 20, "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["text"] and result["stats"]["peak_device_bytes"] <= 2 << 30
    outcome = shell("generate", "-m", target, "-d", draft, *options[:2], "--gpu-mem", "1MiB", "-p", PROMPT)
    assert outcome.code == 2 and "raise --gpu-mem to" in outcome.err and outcome.err.count("\n") == 1


def test_the_bench_runs_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever line of it breaks on a GPU breaks here, in seconds."""
    for name, value in {
        "LARGE": bench.TINY, "LARGE_DRAFT": bench.TINY_DRAFT, "SIZES": (1, 8, 64), "TREES": TREES, "CONTEXT": 512,
    }.items():  # fmt: skip
        monkeypatch.setattr(bench, name, value)
    with all_streamed():
        outcome = shell("bench", "device", "--quick", "--gpu-mem", "4GiB")
    result = json.loads(outcome.out.splitlines()[-1])
    assert not [row for row in result["rows"] if "error" in row]
    assert {one["promise"] for one in result["promises"] if one["is_met"]} >= {"exact", "soak", "memory"}
