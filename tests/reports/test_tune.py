"""Tuning counts what trees yield, whatever interrupts it; traces and the proof say what the decoder does, by pass."""

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expected import expected_tokens, passes_of
from fake_device import FakeDevice
from known import selector
from plans import plan_memory
from quantised import save_quantised
from tiny import VOCAB_SIZE, Pair, random_ids, streaming_ram

import offload
from offload.bench.harness.gate import Written, draws_hold, prove
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.packaged import PAIR, PROMPT
from offload.engine.decoder import Decoder
from offload.engine.load import load
from offload.engine.request import Request
from offload.engine.setup import Setup
from offload.errors import UserError
from offload.memory import prompt_rows
from offload.memory.plan import MemoryBudget
from offload.memory.sizes import PROMPT_ROWS
from offload.model.headers import describe
from offload.planning.acceptance import bounds_to_count, measured_acceptance
from offload.planning.cost_model import NOTHING, Costs
from offload.planning.load_options import LoadOptions
from offload.planning.profile import ExpertUses, Identity, Machine, parse_profile, profiles_folder, tuning_text
from offload.reports import measured_profile, tune_question, windows
from offload.reports import tune as tuning
from offload.reports.estimate import estimate
from offload.reports.measured_profile import expert_uses
from offload.reports.proof import BF16_NOISE, draw_gaps, gaps_of
from offload.reports.tracing import ranks_of, tokens_again, write_in_turns
from offload.reports.tune import TuneResult, tune
from offload.reports.tune_question import TuneQuestion, for_windows
from offload.reports.windows import TracedWindow, cut_windows, trace_window, trace_windows
from offload.sampling_options import Sampling
from offload.streaming.device import HOST
from offload.trees.spec import TreeSpec, parse_tree
from offload.trees.topology import DynamicShape

NUM_PROMPT, NUM_NEW = 24, 64  # of a window here, where every token is as good as any other

MACHINE = Machine(cpu="", num_cores=1, torch="", dtype="", device="")
IDENTITY = Identity(target="a", draft="b", rule="match", temperature=0.0, top_p=1.0, top_k=0, machine=MACHINE)
SETTINGS = {"ram": "1GiB", "threads": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune_question, "NUM_PROMPT", NUM_PROMPT)
    monkeypatch.setattr(tune_question, "NUM_NEW", NUM_NEW)
    monkeypatch.setattr(tuning, "bounds_to_count", lambda most_nodes: ((16, 8),))  # growing takes longest


@pytest.fixture
def decoder(pair: Pair) -> Iterator[Decoder]:
    with offload.load(*pair, "1GiB", "32x12", context=256, threads=1, profile="none") as decoder:
        yield decoder


@pytest.mark.full
@pytest.mark.usefixtures("usual_rows")
def test_a_tune_counts_what_grown_trees_yield(pair: Pair, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "bounds_to_count", bounds_to_count)
    tuned = run(pair, text, num_tokens=2 * NUM_NEW)
    counted = tuned.profile.dynamic_yields
    assert [(known.num_nodes, known.depth) for known in counted] == [(16, 8), (16, 15), (64, 8), (64, 24)]
    assert all(known.num_sweeps > 12 and known.tokens_per_sweep > 1 for known in counted)
    assert all(
        isinstance(candidate.shape, DynamicShape) or candidate.shape.num_nodes == 1
        for candidate in tuned.choice.candidates
    )
    slow = {"link_limit": 2_000_000, "threads": 1}  # and no layer stays: a tree pays whatever else this machine does
    with offload.load(*pair, streaming_ram(*pair, num_nodes=1), context=256, **slow) as decoder:  # type: ignore[arg-type]
        choice = decoder.run([5], Sampling(), max_new_tokens=1).tree_choice
        assert choice.is_dynamic and choice.shape == choice.candidates[0].shape
        assert f"its dynamic trees in {sum(known.num_sweeps for known in counted)} passes" in choice.why
    fixed = run(pair, text, rule="sequoia")
    assert fixed.profile.dynamic_yields == () and not any(
        isinstance(candidate.shape, DynamicShape) for candidate in fixed.choice.candidates
    )


def test_windows_are_spread_over_all_texts() -> None:
    texts = [list(range(10_000)), list(range(10_000, 10_100)), [1, 2, 3]]
    windows = cut_windows(texts, 4 * NUM_NEW)
    assert [len(w) for w in windows] == [NUM_PROMPT] * 4
    assert windows[0][0] == 0 and windows[-1][0] > 6000
    every = cut_windows(texts, 10**6)
    assert len(every) == len(set(every)) == 115, "no more than there are, none of them twice"


@pytest.fixture
def usual_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget without room for a prompt's usual rows is refused: fewer would make room for all of a small model."""
    monkeypatch.setattr(prompt_rows, "_LEAST_ROWS", PROMPT_ROWS)


class Words:
    """A tokenizer in spirit: one id per character."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(character) % (VOCAB_SIZE - 3) for character in text]}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(97 + token % 26) for token in ids)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in ("engine.build", "reports.windows"):
        monkeypatch.setattr(f"offload.{module}.load_tokenizer", lambda directory: Words())
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + (index * index + index // 7) % 26) for index in range(1000)))
    return path


def run(pair: Pair, text: Path, sampling: Sampling | None = None, **options: object) -> TuneResult:
    settings = {"num_tokens": NUM_NEW}
    settings |= {name: options.pop(name) for name in settings.keys() & options.keys()}
    loading = LoadOptions(*pair, **{"tree": "64x16", **SETTINGS, **options})
    return tune(loading, [text], sampling or Sampling(), **settings)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Is filled by the first test that wants what a tune with usual settings finds."""
    return {"folder": tmp_path_factory.mktemp("kept") / "profiles"}


@pytest.fixture
def usual(pair: Pair, text: Path, kept: dict[str, Any]) -> TuneResult:
    """What such a tune finds, with its profile where `load` looks for it."""
    if "tuned" not in kept:
        kept["tuned"] = run(pair, text)
        shutil.copytree(profiles_folder(), kept["folder"])
    tuned: TuneResult = kept["tuned"]
    shutil.copytree(kept["folder"], profiles_folder(), dirs_exist_ok=True)
    return tuned._replace(path=profiles_folder() / tuned.path.name)


def test_profile_is_used_by_load_and_by_nobody_else(pair: Pair, usual: TuneResult) -> None:
    profile = usual.profile
    assert profile.num_tokens == NUM_NEW and profile.num_threads == 1
    assert sum(profile.acceptance) <= 1 and profile.acceptance[0] > 0.3
    assert profile.costs.compute_s.sizes[0] == 1 and len(profile.costs.compute_s.sizes) > 3
    assert not list(profiles_folder().glob("*.unfinished"))
    with offload.load(*pair, context=256, **SETTINGS) as decoder:
        choice = decoder.run([5], Sampling(), max_new_tokens=1).tree_choice
        assert f"{profile.num_tokens} traced tokens" in choice.why and choice.candidates
        assert choice.shape.num_nodes <= decoder.plan.num_nodes
        assert decoder.generate([5], max_new_tokens=40).as_dict()["tree_choice"] == choice.as_dict()
        other = decoder.run([5], Sampling(temperature=0.5), max_new_tokens=1).tree_choice
        assert "temperature 0.0, not 0.5" in other.why
    with offload.load(*pair, "1GiB", "24x6", context=256, threads=1) as decoder:
        named = decoder.run([5], Sampling(), max_new_tokens=1).tree_choice
        assert (
            named == selector("24x6", find=lambda *_: (profile, "")).for_run(Sampling(), "match")
            and "traced tokens" in named.why
        )


def test_trees_are_filled_whatever_a_row_costs(pair: Pair, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that was: yields of 256 nodes were counted of trees that had ended at five, for more did not pay."""
    seconds = list[float]()

    def stop(decoder: Decoder, *_: object) -> None:
        assert decoder.trees.observed_costs().compute_s.at(256) > decoder.trees.observed_costs().compute_s.at(1)
        seconds.extend(decoder.trees.step_s(num_rows, [1, 8]) for num_rows in (2, 64))
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "trace_windows", stop)
    with pytest.raises(KeyboardInterrupt):
        run(pair, text)
    assert seconds == [1.0, 1.0]


class Counting:
    """Stands in for a pool of experts."""

    uses_LE, num_rows = np.array([[3, 0], [1, 2]]), 3


def with_pool(pool: Counting | None) -> Any:
    return SimpleNamespace(target=SimpleNamespace(experts=pool))


def test_uses_of_experts_come_into_the_profile(pair: Pair, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Counting()
    monkeypatch.setattr(measured_profile, "expert_uses", lambda _: expert_uses(with_pool(pool)))
    tuned = run(pair, text)
    assert tuned.profile.expert_uses == ExpertUses(((3, 0), (1, 2)), 3)
    assert parse_profile(tuned.path).expert_uses == tuned.profile.expert_uses
    pool.num_rows = 0
    assert expert_uses(with_pool(pool)) is None and expert_uses(with_pool(None)) is None


def test_named_profile_must_hold(pair: Pair, usual: TuneResult) -> None:
    path = str(usual.path)
    with offload.load(*pair, profile=path, context=256, **SETTINGS) as decoder:
        assert "traced tokens" in decoder.run([5], Sampling(), max_new_tokens=1).tree_choice.why
    for request in (Request([5], Sampling(temperature=0.7)), Request(sampling=Sampling(temperature=0.7))):
        with pytest.raises(UserError, match=r"temperature 0\.0, not 0\.7"):
            offload.load(*pair, profile=path, context=256, request=request, **SETTINGS)
    values = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**values, "schema": 0}))
    with pytest.raises(UserError, match="schema 0"):
        offload.load(*pair, profile=path, context=256, **SETTINGS)
    with offload.load(*pair, context=256, **SETTINGS) as decoder:
        assert "schema 0" in decoder.run([5], Sampling(), max_new_tokens=1).tree_choice.why


@pytest.mark.usefixtures("usual")
def test_other_thread_count_measures_times_again(pair: Pair) -> None:
    with offload.load(*pair, "1GiB", context=256, threads=2) as decoder:
        assert decoder.num_threads == 2
        assert "traced tokens" in decoder.run([5], Sampling(), max_new_tokens=1).tree_choice.why


def test_tree_is_chosen_without_a_profile(pair: Pair) -> None:
    started = time.process_time()  # what else runs on this machine is not counted
    with offload.load(*pair, context=256, **SETTINGS) as decoder:
        assert time.process_time() - started < 5
        result = decoder.generate(random_ids(NUM_PROMPT, 3), max_new_tokens=40)
    assert "default acceptance" in result.tree_choice.why and len(result.tree_choice.candidates) > 1
    assert result.stats.tree_num_nodes <= result.plan.num_nodes


def test_interrupted_tune_goes_on_behind_its_last_window(
    pair: Pair, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(decoder: Decoder, question: TuneQuestion, index: int) -> TracedWindow:
        calls.append(index)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return trace_window(decoder, question, index)

    monkeypatch.setattr(windows, "trace_window", counted)
    monkeypatch.setattr(tune_question, "NUM_NEW", 16)
    with pytest.raises(KeyboardInterrupt):
        run(pair, text, num_tokens=4 * 16)
    (state,) = profiles_folder().glob("*.unfinished")
    assert len(json.loads(state.read_text())["windows"]) == 2
    run(pair, text, num_tokens=4 * 16)
    assert calls == [0, 1, 2, 2, 3], "finished windows are not measured again"


def test_finished_windows_of_the_same_question_are_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def traced(_: Any, question: Any, index: int) -> TracedWindow:
        asked.append(index)
        return TracedWindow([index], [])

    monkeypatch.setattr(windows, "trace_window", traced)

    def traces(seed: int) -> list[TracedWindow]:
        asked.clear()
        decoder: Any = None
        return trace_windows(decoder, question(seed), lambda *_: None)

    def question(seed: int) -> TuneQuestion:
        windows = (tuple(random_ids(NUM_PROMPT, 0)), tuple(random_ids(NUM_PROMPT, 1)))
        return TuneQuestion(identity=IDENTITY, sampling=Sampling(seed=seed), windows=windows)

    wanted = [TracedWindow([0], []), TracedWindow([1], [])]
    assert traces(0) == wanted and asked == [0, 1]
    assert traces(0) == wanted and asked == [1], "but for the last, whose passes tell of times"
    assert traces(1) == wanted and asked == [0, 1]
    question(0).state_path.write_text('{"windows": [[[0], []]]}')
    assert traces(0) == wanted and asked == [1]
    for unsound in ("[[], []]", "[[0, 99], []]", "[[0.0], []]", "[[0], [[1]]]", "[[0]]", "7"):
        question(0).state_path.write_text(f'{{"windows": [{unsound}]}}')
        assert traces(0) == wanted and asked == [0, 1], "what is not sound counts for nothing"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"short", f"{NUM_PROMPT} tokens for one window, the longest has 5"),
        (b"caf\xe9 " * 100, "must be UTF-8, .* at byte 3"),
        (None, "cannot read the text"),
    ],
)
def test_bad_texts_are_refused(content: bytes | None, reason: str, pair: Pair, text: Path) -> None:
    text.unlink() if content is None else text.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        run(pair, text)


def test_line_ends_of_texts_are_those_that_models_write(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one\r\ntwo\n")
    assert tuning_text(tmp_path / "text") == "one\ntwo\n"


def test_a_tune_is_of_the_device_and_the_config_that_are_named(
    pair: Pair, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tuned_by(**options: Any) -> None:
        tune(LoadOptions(*pair, **options, **SETTINGS), [text], Sampling())

    with monkeypatch.context() as patch, pytest.raises(UserError, match="`gpu_memory` limits a CUDA device"):
        patch.setattr(tuning, "open_setup", None)
        tuned_by(device="cpu", gpu_memory="4GiB")
    named = list[object]()
    monkeypatch.setattr("offload.engine.resolve.open_headers", lambda _, config: named.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tuned_by(config=pair[0])
    assert named == [pair[0]]


@pytest.mark.usefixtures("usual_rows")
def test_the_largest_tree_is_one_that_the_cards_budget_has_room_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.planning.budget.available_gpu_bytes", None)
    files = ModelFiles(*map(describe, pair))
    options: dict[str, Any] = {"rule": "match", "ram": 4 << 30, "dtype": "auto"}
    roomy = plan_memory(files, num_nodes=64, context=512, gpu=4 << 30, **options)
    least_bytes = roomy.fixed_bytes + 2 * max(roomy.layer_bytes)
    for gpu_bytes, wanted in ((least_bytes, 64), (least_bytes - 1, 32), (4 << 30, 256)):
        budget = MemoryBudget(ram_bytes=options["ram"], gpu_bytes=gpu_bytes, context=None)
        setup = Setup(files=files, options=LoadOptions(), tree=TreeSpec("auto"), device=HOST, budget=budget)
        settled = for_windows(setup, setup.tree)
        assert (settled.tree.num_nodes, settled.budget.context, settled.is_timed) == (wanted, 512, True)
        assert settled.options.tree == settled.tree.label


def test_a_resident_run_has_the_rate_of_its_devices_own_link(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    """The mistake that was: where no pass waited for copies it was the disk's."""
    monkeypatch.setattr(measured_profile, "link_bytes_per_s", lambda *_, **__: 1.0)
    monkeypatch.setattr(measured_profile, "locked_bytes_per_s", lambda _: 3.0)
    known = Costs(compute_s=NOTHING, draft_step_s=NOTHING, verify_s=0.0, link_bytes_per_s=math.inf)
    files = ModelFiles(*map(describe, pair))
    for device, observed, wanted in ((HOST, math.inf, 1.0), (FakeDevice(), math.inf, 3.0), (FakeDevice(), 40.0, 40.0)):
        costs = replace(known, link_bytes_per_s=observed)
        decoder: Any = SimpleNamespace(trees=SimpleNamespace(observed_costs=lambda costs=costs: costs))
        setup: Any = SimpleNamespace(files=files, device=device, options=LoadOptions())
        assert measured_profile.observed_costs(decoder, setup).link_bytes_per_s == wanted


def test_what_computes_in_another_type_than_it_says_is_found_again(pair: Pair, text: Path, tmp_path: Path) -> None:
    """Coded weights in float16 are computed with in bfloat16 on a CPU: by tune, by plan and by a run alike."""
    target = save_quantised(pair[0], "awq", tmp_path / "coded").directory
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    tuned = run((target, pair[1]), text)
    assert tuned.profile.identity.machine.dtype == "bfloat16"
    estimated = estimate(LoadOptions(target, pair[1], ram="1GiB"))
    assert estimated.basis.startswith("profile ") and any("computing in bfloat16" in note for note in estimated.notes)
    with offload.load(target, pair[1], context=256, **SETTINGS) as decoder:
        assert decoder.run([5], Sampling(), max_new_tokens=1).tree_choice.why.count("profile of ")


window = partial(random_ids, NUM_PROMPT)
TREES = ("32x12", "8x3", "chain:6", "sequences:4x4")


def written_ranks(decoder: Decoder, prompt: list[int], sampling: Sampling, num_new: int) -> list[int]:
    shape = decoder.tree_choice(sampling, "8x3").shape
    return ranks_of(decoder, prompt, write_in_turns(decoder, prompt, sampling, num_new, [shape]), sampling)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6, seed=3), Sampling(temperature=1.0, top_k=20)]
)
def test_ranks_repeat_the_decoder_pass_by_pass(decoder: Decoder, sampling: Sampling) -> None:
    ranks = written_ranks(decoder, window(1), sampling, NUM_NEW)
    assert len(ranks) == NUM_NEW and len(set(ranks)) > 2, "the draft must be right often and wrong often enough"
    for text in TREES:
        settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": sampling.seed}
        got = decoder.generate(window(1), max_new_tokens=NUM_NEW, tree=text, **settings)
        passes = [got.stats.num_first_tokens, *got.stats.accepted_per_sweep]
        assert passes_of(parse_tree(text).build(), ranks) == passes, text


def test_trees_take_turns(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [decoder.tree_choice(Sampling(), tree).shape for tree in ("none", "dynamic:16x8", "chain:2")]
    rows = list[int]()
    propose = decoder.drafter.propose

    def noted(texts: Any) -> Any:
        rows.append(texts[0].shape.num_nodes)
        return propose(texts)

    monkeypatch.setattr(decoder.drafter, "propose", noted)
    for first in (0, 1):
        rows.clear()
        written = write_in_turns(decoder, window(2), Sampling(), NUM_NEW, trees, first)
        turns = [trees[(first + number) % 3].num_nodes for number in range(len(rows))]
        assert rows == turns and len(rows) > 6
        assert written == decoder.generate(window(2), max_new_tokens=NUM_NEW).token_ids


@pytest.mark.parametrize(
    ("bounds", "temperature", "rule"),
    [
        (DynamicShape(64, 16), 0.0, "match"),
        (DynamicShape(64, 16), 0.8, "topk"),
        (DynamicShape(12, 3), 0.8, "match"),
        (DynamicShape(12, 3), 0.0, "topk"),
    ],
)
def test_growing_again_repeats_the_decoder_pass_by_pass(
    bounds: DynamicShape, temperature: float, rule: str, pair: Pair
) -> None:
    """In a decoder of its own, because how far the scores are trusted is learned on the way."""
    tree, sampling = f"dynamic:{bounds.num_nodes}x{bounds.depth}", Sampling(temperature=temperature, seed=3)
    with offload.load(*pair, "1GiB", tree, rule, context=256, threads=1, profile="none") as decoder:
        got = decoder.generate(window(1), max_new_tokens=NUM_NEW, temperature=temperature, seed=3)
    passes = [got.stats.num_first_tokens, *got.stats.accepted_per_sweep]
    with offload.load(*pair, "1GiB", "64x16", rule, context=256, threads=1, profile="none") as decoder:
        again = tokens_again(decoder, window(1), got.token_ids, sampling, bounds)
    assert again == passes[: len(again)] and len(set(again)) > 1
    assert NUM_NEW - bounds.depth <= sum(again) <= NUM_NEW, "all but those that the end may have cut"


@pytest.mark.parametrize("rule", ["topk", "sequoia", "specinfer", "spectr"])
def test_ranks_of_every_rule_predict_what_decoding_yields(pair: Pair, rule: str) -> None:
    """Ratio rules toss fresh coins, so means alone can agree: the product form of one, the passes of the other."""
    settings = {"temperature": 0.6, "max_new_tokens": NUM_NEW}
    with offload.load(*pair, "1GiB", "24x6", rule, context=256, threads=1, profile="none") as decoder:
        ranks_W, tokens = [], list[int]()
        for seed in range(4):
            ranks_W.append(written_ranks(decoder, window(seed), Sampling(temperature=0.6, seed=seed), NUM_NEW))
            tokens += decoder.generate(window(seed), seed=seed, tree="24x6", **settings).stats.accepted_per_sweep
    p_K = measured_acceptance(ranks_W)[0]
    assert expected_tokens(parse_tree("24x6").build(), p_K) == pytest.approx(np.mean(tokens), rel=0.2)


def test_gaps_are_zero_for_drawn_tokens_and_large_for_others() -> None:
    sampling = Sampling(temperature=0.7, seed=4)
    with load(PAIR / "target", dtype="float32", threads=1) as decoder:
        prompt_ids = decoder.encode(PROMPT)
        new_ids = decoder.generate(PROMPT, max_new_tokens=20, temperature=0.7, seed=4).token_ids
    assert max(draw_gaps(PAIR / "target", prompt_ids, new_ids, sampling)) == 0
    wrong_ids = [*new_ids[:10], (new_ids[10] + 1) % 4096]
    assert draw_gaps(PAIR / "target", prompt_ids, wrong_ids, sampling)[10] > BF16_NOISE


def test_a_greedy_gap_is_one_of_logits_and_not_stretched_by_a_temperature() -> None:
    draws_hold([0.0, BF16_NOISE], Sampling())
    draws_hold([0.0, 2 * BF16_NOISE], Sampling(temperature=0.4))
    for sampling in (Sampling(), Sampling(temperature=0.6)):
        with pytest.raises(UserError, match="new token 1 is wrong"):
            draws_hold([0.0, 2 * BF16_NOISE], sampling)


@pytest.mark.parametrize("rule", ["match", "sequoia"])
def test_a_reference_that_has_no_numbers_proves_nothing(rule: str) -> None:
    """Every comparison with NaN is false, also the one that would refuse."""
    logits_TV = torch.zeros(3, 5)
    logits_TV[1, 2] = torch.nan
    assert gaps_of(logits_TV, 7, [0, 0, 0], Sampling()) == [0.0, math.inf, 0.0]
    run = Written([1], [0, 0, 0], Sampling(temperature=1.0), rule)
    with pytest.raises(UserError, match="no speed is worth printing"):
        prove([run], lambda prompt_ids, new_ids: logits_TV)
