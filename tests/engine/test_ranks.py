"""One target on several ranks, as shards and as stages: the same ids as one process gives, whatever comes when."""

import functools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_memory import Delay
from matrix import matrix
from processes import Ranks
from quantised import save_quantised
from rank_threads import rank_threads
from tiny import FAMILIES, VOCAB_SIZE, Pair, displaced, finished, save_pair, streaming_ram

import offload
from offload.distributed import shards, stage
from offload.engine.decoder import Decoder
from offload.engine.hooks import Hooks
from offload.engine.scheduler import in_order
from offload.errors import RankError, ReadError, RunError, UserError
from offload.model.kv_cache import KVCache
from offload.rank_roles import RankInfo

PROMPT = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NUM_NEW = 24
TREE = "dynamic:16x6"
Pairs = Callable[[str], Pair]
Wanted = Callable[[str], list[list[int]]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    @functools.cache
    def pair(family: str) -> Pair:
        target, draft = save_pair(FAMILIES[family](), tmp_path_factory.mktemp(family))
        return displaced(target, 0), draft  # as it is read straight into place, so that plans know each byte

    return pair


@pytest.fixture(scope="module")
def wanted(pairs: Pairs) -> Wanted:
    """What one process writes without a tree."""

    @functools.cache
    def texts(family: str) -> list[list[int]]:
        extra: dict[str, Any] = {"dtype": "float32", "context": 128, "threads": 1, "invariant": False}
        with offload.load(pairs(family)[0], None, "4GiB", "none", **extra) as alone:
            return _texts(alone)

    return texts


def _texts(decoder: Decoder) -> list[list[int]]:
    runs = [decoder.generate(PROMPT, max_new_tokens=NUM_NEW, temperature=heat, seed=3) for heat in (0.0, 0.8)]
    return [run.token_ids for run in runs]


def _options(ranks: str, ram: int | str, **options: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"context": 128, "threads": 1, "profile": "none", "dtype": "float32"}
    return {"ram": ram, "ranks": ranks, **usual, **options}


def _streaming(pair: Pair) -> int:
    return streaming_ram(*pair, context=128, num_nodes=17)


FAMILIES_BY_RANKS = [("llama", 2), ("llama", 3), ("qwen2", 2), ("qwen3-sliding", 2), ("gemma3", 2), ("phi3", 3),
                     ("mistral-sliding", 2)]  # fmt: skip


@matrix("family, num_ranks", FAMILIES_BY_RANKS, daily=2)
def test_shards_write_what_one_process_writes(pairs: Pairs, wanted: Wanted, family: str, num_ranks: int) -> None:
    ram = _streaming(pairs(family))
    with rank_threads(num_ranks, *pairs(family), lambda _: _options("shards", ram, tree=TREE)) as decoder:
        assert _texts(decoder) == wanted(family)
        assert _texts(decoder) == wanted(family)  # nothing of the first is left


@matrix("extra", [{"tree": TREE}, {"tree": "none"}, {"tree": "8x3", "lookup": True}], daily=1)
def test_shards_write_several_texts_at_a_time(pairs: Pairs, extra: dict[str, Any]) -> None:
    """Some begin alike, one is long, one is dropped: each is what it is by itself."""
    prompts = [PROMPT, PROMPT[:30], [*PROMPT, 7], PROMPT[::-1], [*PROMPT, 7, 8]]
    usual = {**_options("shards", "4GiB"), "context": 512}
    with rank_threads(1, *pairs("llama"), lambda _: {**usual, "tree": "none"}) as alone:
        wanted = [alone.generate(prompt, max_new_tokens=NUM_NEW).token_ids for prompt in prompts]
        long = alone.generate(PROMPT * 12, max_new_tokens=9).token_ids
    with rank_threads(2, *pairs("llama"), lambda _: {**usual, **extra, "parallel": 3}) as decoder:
        dropped = decoder.start(offload.Request(PROMPT[5:], max_new_tokens=NUM_NEW))
        next(iter(dropped))
        beside = decoder.start(offload.Request(PROMPT * 12, max_new_tokens=9))
        assert decoder.generate(prompts[0], max_new_tokens=NUM_NEW).token_ids == wanted[0]
        assert finished(beside).token_ids == long
        del dropped
        decoder.release(beside)
        result = in_order(
            decoder, [offload.Request(prompt, max_new_tokens=NUM_NEW) for prompt in [*prompts, PROMPT * 12]]
        )
        assert [text.token_ids for text in result[:-1]] == wanted and result[-1].token_ids[:9] == long
        assert max(text.stats.num_kept_tokens for text in result) >= 40, "what texts have in common is copied"


@matrix("extra", [{"tree": "none"}, {"tree": "16x5"}, {"tree": "chain:4"}, {"lookup": True}], daily=1)
def test_shards_with_other_trees_and_uneven_shares(pairs: Pairs, wanted: Wanted, extra: dict[str, Any]) -> None:
    ram = _streaming(pairs("llama"))
    with rank_threads(2, *pairs("llama"), lambda rank: _options("shards", ram + rank * 100_000, **extra)) as decoder:
        assert _texts(decoder) == wanted("llama")


@matrix("family, num_ranks, is_streamed", [("llama", 3, True), ("phi3", 2, False)], daily=1)
def test_each_rank_reads_and_sends_what_is_planned(
    pairs: Pairs, family: str, num_ranks: int,
    is_streamed: bool,
) -> None:  # fmt: skip
    pair = pairs(family)
    ram = _streaming(pair)
    with rank_threads(num_ranks, *pair, lambda rank: _options("shards", ram - rank, tree=TREE)) as decoder:
        before = decoder.target.figures()
        stats = decoder.generate(PROMPT, max_new_tokens=NUM_NEW).stats
        after = decoder.target.figures()
    assert [plan.ram_bytes for plan in after] == [ram - rank for rank in range(num_ranks)]
    assert (after[0].pass_bytes > 0) is is_streamed
    for begun, end in zip(before, after, strict=True):
        num_passes, num_rows = end.num_passes - begun.num_passes, end.num_rows - begun.num_rows
        assert num_passes == stats.num_sweeps + 1 and num_rows > num_passes + len(PROMPT)
        assert end.bytes_streamed - begun.bytes_streamed == end.pass_bytes * num_passes
        sent = [sum(figures.bytes_sent.get(way, 0) for way in ("gather", "broadcast")) for figures in (begun, end)]
        assert sent[1] - sent[0] == end.row_bytes * num_rows > 0


def _random_delays(seed: int) -> Delay:
    draw = random.Random(seed)
    return lambda *_: draw.choice([0.0, 0.0, 0.002, 0.02])


@matrix("family, ranks, num_ranks", [
    ("llama", "stages:0-1,draft:2", 3), ("qwen2", "stages:0-1", 2), ("qwen3-sliding", "stages:0-2", 3),
    ("gemma3", "stages:0-1,draft:2", 3), ("phi3", "stages:0-1", 2),
], daily=2)  # fmt: skip
def test_stages_write_what_one_process_writes(
    pairs: Pairs, wanted: Wanted,
    family: str, ranks: str, num_ranks: int,
) -> None:  # fmt: skip
    ram = _streaming(pairs(family)) + (3 << 20)
    with rank_threads(num_ranks, *pairs(family), lambda _: _options(ranks, ram), _random_delays(num_ranks)) as decoder:
        assert _texts(decoder) == wanted(family)
        assert _texts(decoder) == wanted(family)


@matrix("pipeline", ["plain", "sync,rows=12", "async,rows=3,runs=4", "async,cut=0.3/0.4/0.01",
                                      "async,no-cancel", "async,no-continuous"], daily=2)  # fmt: skip
def test_every_pipeline_writes_the_same(pairs: Pairs, wanted: Wanted, pipeline: str) -> None:
    options: dict[str, Any] = {"ranks": "stages:0-1,draft:2", "ram": "4GiB", "pipeline": pipeline}
    with rank_threads(3, *pairs("llama"), lambda _: _options(**options), _random_delays(1)) as decoder:
        assert _texts(decoder) == wanted("llama")


@matrix("ranks", ["shards", "stages:0-1,draft:2"], daily=1)
def test_a_text_that_is_broken_off_leaves_the_next_one_right(pairs: Pairs, wanted: Wanted, ranks: str) -> None:
    """As Ctrl-C does in a chat: at any moment at which the decoder says that stopping is safe."""
    left = [0]  # moments

    def break_off() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise TimeoutError

    hooks = Hooks(on_layer=break_off)
    with rank_threads(3, *pairs("llama"), lambda _: _options(ranks, "4GiB"), hooks=hooks) as decoder:
        for left[0] in (1, 11, 16):
            with pytest.raises(TimeoutError):
                decoder.generate(PROMPT[:30], max_new_tokens=80)
            assert _texts(decoder) == wanted("llama")


@matrix("ranks", ["shards", "stages:0-1,draft:2"], daily=1)
def test_texts_of_a_list_are_those_of_one_process(pairs: Pairs, ranks: str) -> None:
    """With a number that no message between ranks could hold, and means all tokens."""
    prompts: Any = [PROMPT, PROMPT[:9], PROMPT[:30]]
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "temperature": 0.8, "top_k": 10**30, "seed": 3}
    extra: dict[str, Any] = {"dtype": "float32", "context": 128, "threads": 1, "invariant": False}
    with offload.load(pairs("llama")[0], None, "4GiB", "none", **extra) as alone:
        wanted = [run.token_ids for run in alone.generate(prompts, **options)]
    with rank_threads(3, *pairs("llama"), lambda _: _options(ranks, "4GiB")) as decoder:
        assert [run.token_ids for run in decoder.generate(prompts, **options)] == wanted
        next(decoder.stream(PROMPT, max_new_tokens=NUM_NEW), None)  # is left where it is
        assert decoder.generate(PROMPT[:9], **options).token_ids == wanted[1]
        if ranks != "shards":
            with pytest.raises(UserError, match="scores need logits: use `ranks` shards"):
                decoder.score_texts([(PROMPT, 3)])


def test_ctrl_c_does_not_come_between_a_commit_and_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else caches of ranks would differ, and later passes be wrong without a word."""
    monkeypatch.setattr(KVCache, "__init__", lambda *_: None)
    monkeypatch.setattr(KVCache, "commit", lambda *_: signal.raise_signal(signal.SIGINT))
    figures = list[Any]()
    with pytest.raises(KeyboardInterrupt):
        shards._HeadCache(figures.append, 0).commit([0])
    assert len(figures) == 1


def test_a_conversation_over_stages_reads_what_is_new(pairs: Pairs) -> None:
    """And a sequence without limits ends where the context does."""
    with rank_threads(3, *pairs("llama"), lambda _: _options("stages:0-1,draft:2", "4GiB")) as decoder:
        first = decoder.run(PROMPT[:30], offload.Sampling(), max_new_tokens=8)
        ids = finished(first).token_ids
        longer = [*PROMPT[:30], *ids, *PROMPT[30:]]
        result = finished(decoder.run(longer, offload.Sampling(), max_new_tokens=8, continues=True))
        assert result.stats.num_kept_tokens >= 30
        issued = [num for _, event, _, num in result.stats.runs if event == "issued"]
        assert issued[0] <= len(longer) - 30, "the prompt's run has no row that is there"
        assert result.token_ids == decoder.generate(longer, max_new_tokens=8).token_ids
        sequence = decoder.begin(PROMPT, offload.Sampling())
        while decoder.step(sequence):
            assert len(sequence.tokens) <= 128
        assert len(sequence.tokens) == 128


@pytest.mark.parametrize("ranks", ["shards", "stages:0-1"])
def test_a_rank_with_too_little_memory_is_named(pairs: Pairs, ranks: str) -> None:
    refused = pytest.raises(UserError, match=r"rank 1.* MiB.*raise")
    with refused, rank_threads(2, *pairs("llama"), lambda rank: _options(ranks, ["4GiB", "100MiB"][rank])):
        pass


def test_a_draft_with_other_words_is_refused_before_any_weight_is_read(
    pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reads in ("draft.resident_model", "stage.load_section"):
        monkeypatch.setattr(f"offload.distributed.{reads}", None)
    config = FAMILIES["llama"]()
    config.vocab_size += 8
    target, draft = pairs("llama")[0], save_pair(config, tmp_path)[1]
    refused = pytest.raises(UserError, match="rank 2: the draft must share")
    with refused, rank_threads(3, target, draft, lambda _: _options("stages:0-1,draft:2", "4GiB")):
        pass


@pytest.mark.parametrize("ranks", ["shards", "stages:0-1"])
def test_a_script_that_torchrun_starts_goes_on_at_rank_0_and_ends_at_the_others(
    pairs: Pairs, wanted: Wanted, ranks: str
) -> None:
    reports = Ranks(2, _script, *pairs("llama"), ranks).reports()
    assert reports == {0: [wanted("llama"), "went on"], 1: ["ended with 0"]}


def test_coded_ranks_meet_and_run_as_stages_only(pairs: Pairs, tmp_path: Path) -> None:
    """Headers that tell of codings are compared as well."""
    target = save_quantised(pairs("llama")[0], "ct-w4", tmp_path / "target").directory
    draft = pairs("llama")[1]
    extra: dict[str, Any] = {"dtype": "float32", "context": 128, "threads": 1, "invariant": False}
    with offload.load(target, None, "4GiB", "none", **extra) as alone:
        wanted = _texts(alone)
    assert Ranks(2, _script, target, draft, "stages:0-1").reports() == {0: [wanted, "went on"], 1: ["ended with 0"]}
    refused = Ranks(2, _script, target, draft, "shards").reports()[0]
    assert "layers cannot be shared, weights are stored as" in refused[0] and "\n" not in refused[0]


def _script(place: RankInfo, report: Callable[[Any], None], target: Path, draft: Path, ranks: str) -> None:
    names = {"RANK": place.rank, "WORLD_SIZE": place.num_ranks, "MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with offload.load(
            target, draft, "1GiB", ranks=ranks, dtype="float32", context=128, threads=1, profile="none"
        ) as decoder:
            report(_texts(decoder))
        report("went on")
    except SystemExit as ended:
        report(f"ended with {ended.code}")
    except UserError as refusal:
        report(str(refusal))


@matrix("ranks, rank", [("stages:0-1", 0), ("stages:0-1", 1), ("shards", 1)], daily=1, always=[("stages:0-1", 0)])
def test_a_disk_that_breaks_in_a_pass_ends_all_ranks_and_is_told(pairs: Pairs, ranks: str, rank: int) -> None:
    """Again where another text is asked for: it must not wait for a service that is gone."""
    reports = Ranks(2, _break_down, *pairs("llama"), ranks, rank).reports()
    line = "rank 0: the disk is broken" if rank == 0 else "rank 1 ended: the disk is broken"
    assert reports[0] == [line, line]
    assert reports[1] == (["the disk is broken"] if rank else ["rank 0 has ended"])


def _break_down(
    place: RankInfo, report: Callable[[Any], None], target: Path, draft: Path, ranks: str, rank: int
) -> None:
    num_passes = 0

    def fail(*_: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes > 2:
            raise ReadError("the disk is broken")

    names = {"RANK": place.rank, "WORLD_SIZE": place.num_ranks, "MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    os.environ.update({name: str(value) for name, value in names.items()})
    extra: dict[str, Any] = {"dtype": "float32", "context": 128, "threads": 1, "profile": "none"}
    run, commit = stage._StageService.run, KVCache.commit
    with pytest.MonkeyPatch.context() as patch:
        if place.rank == rank:  # of shards as it commits, of a stage before it computes
            patch.setattr(stage._StageService, "run", lambda *order: fail() or run(*order))
            if ranks == "shards":
                patch.setattr(KVCache, "commit", lambda *rows: fail() or commit(*rows))
        try:
            with offload.load(target, draft, "1GiB", ranks=ranks, **extra) as decoder:
                for _ in range(2):
                    with pytest.raises(RankError) as failure:
                        decoder.generate(PROMPT, max_new_tokens=NUM_NEW)
                    report(str(failure.value))
        except (RunError, SystemExit) as ended:
            report(str(ended))
