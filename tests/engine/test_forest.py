"""Many texts in one pass: each has the tokens that it has alone, whichever joins, leaves or fails; and their memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Pair, advance, streaming_ram

import offload
from offload.drafting import draft_model, dynamic
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.engine.scheduler import write_all
from offload.engine.sequence import Caches, TokenSequence
from offload.engine.step import SpeculationStep
from offload.engine.text_stream import TextStream
from offload.errors import UserError
from offload.model.tree_model import TreeModel
from offload.sampling_options import Sampling

GREEDY, WARM = Sampling(), Sampling(temperature=0.8, seed=5)
PROMPTS = [[7, 3, 90, 14], list(range(20, 60)), [5], [7, 3, 90, 14, 88], list(range(9, 150)), [101, 2]]
NUM_NEW = [24, 9, 40, 30, 16, 33]


def opened(pair: Sequence[Path | None], tree: str = "none", **options: Any) -> Decoder:
    usual = {"ram": "512MiB", "dtype": "float32", "context": 256, "profile": "none", "threads": 1, "invariant": False}
    return offload.load(*pair, tree=tree, **{**usual, **options})


def requests(sampling: Sampling) -> list[Request]:
    return [Request(ids, sampling, num) for ids, num in zip(PROMPTS, NUM_NEW, strict=True)]


def alone(pair: Sequence[Path | None], sampling: Sampling, **options: Any) -> list[list[int]]:
    with opened(pair, **options) as decoder:
        settings = {"temperature": sampling.temperature, "seed": sampling.seed}
        pairs = zip(PROMPTS, NUM_NEW, strict=True)
        return [decoder.generate(ids, max_new_tokens=num, **settings).token_ids for ids, num in pairs]


def together(decoder: Decoder, asked: Sequence[Request]) -> list[list[int]]:
    """A text that waits begins as soon as another one ends."""
    waiting, active, written = list(enumerate(asked)), dict[int, Run](), dict[int, list[int]]()
    while waiting or active:
        while waiting and len(active) < decoder.num_parallel:
            index, request = waiting.pop(0)
            active[index] = decoder.start(request)
        advance(decoder, [*active.values()])
        for index in [index for index, run in active.items() if run.is_finished]:
            run = active.pop(index)
            written[index] = run.result().token_ids
            decoder.release(run)
    return [written[index] for index in range(len(asked))]


TREES = ["none", "dynamic:12x5", "8x3", "chain:4"]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_each_text_has_the_tokens_that_it_has_alone(pair: Pair, tree: str, sampling: Sampling) -> None:
    wanted = alone(pair, sampling, tree="none")
    with opened(pair, tree=tree, parallel=3) as decoder:
        assert together(decoder, requests(sampling)) == wanted
        assert decoder.plan.parallel == 3 and decoder.plan.num_nodes >= 3
    if (tree, sampling) == ("dynamic:12x5", GREEDY):  # guesses grow in the same forest
        for files in (pair, (pair[0], None)):
            with opened(files, tree=tree, lookup=True, parallel=3) as decoder:
                assert together(decoder, requests(GREEDY)) == wanted


def test_a_session_is_of_one_text(pair: Pair, tmp_path: Path) -> None:
    with opened(pair, tree="none", parallel=2) as decoder:
        decoder.generate([5, 6, 7], max_new_tokens=2)
        for act in (decoder.save_session, decoder.load_session):
            with pytest.raises(UserError, match="the one text that is written, `parallel` must be 1, got 2"):
                act(tmp_path / "kept")


@pytest.mark.parametrize("rule", ["sequoia", "topk"])
def test_rules_draw_for_each_text_by_itself(pair: Pair, rule: str) -> None:
    """A ratio rule's draws depend on the tree, so these are static, and the same beside others."""
    wanted = alone(pair, WARM, tree="8x3", rule=rule)
    with opened(pair, tree="8x3", rule=rule, parallel=3) as decoder:
        assert together(decoder, requests(WARM)) == wanted


def test_bits_do_not_depend_on_who_is_there(pair: Pair) -> None:
    """Layers are streamed and computed in bfloat16, where texts part as soon as a sum is rounded otherwise."""
    options = {"dtype": "bfloat16", "invariant": True, "ram": streaming_ram(*pair, num_nodes=48) + (8 << 20)}
    with opened(pair, tree="none", **options) as decoder:
        assert decoder.invariance.holds, decoder.invariance.reason
    wanted = alone(pair, WARM, tree="none", **options)
    with opened(pair, tree="dynamic:12x5", parallel=3, **options) as decoder:
        assert together(decoder, requests(WARM)) == wanted


def test_a_pass_is_made_once_for_all(pair: Pair) -> None:
    with opened(pair, tree="none", parallel=6) as decoder:
        runs, num_passes = [decoder.start(Request([index + 1], GREEDY, 8)) for index in range(6)], 0
        while not all(run.is_finished for run in runs):
            advance(decoder, runs)
            num_passes += 1
        assert num_passes == 8, "eight tokens of each"
        assert {run.sequence.last_pass.num_texts for run in runs if run.sequence.last_pass} == {6}


def test_a_long_prompt_leaves_room_for_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = alone(pair, GREEDY, tree="none")
    with opened(pair, tree="dynamic:12x5", parallel=3) as decoder:
        monkeypatch.setattr(decoder._speculation, "_max_prompt_rows", 16)
        short, long = decoder.start(requests(GREEDY)[0]), decoder.start(requests(GREEDY)[4])
        advance(decoder, [short])
        for _ in range(4):  # 140 tokens take nine passes
            assert advance(decoder, [long, short])[0] == "" and not long.sequence.new_ids
        assert len(short.sequence.new_ids) >= 5
        while not (long.is_finished and short.is_finished):
            advance(decoder, [long, short])
        assert [short.sequence.new_ids, long.sequence.new_ids] == [wanted[0], wanted[4]]


def test_places_are_given_back_and_what_is_alike_is_kept(pair: Pair) -> None:
    with opened(pair, tree="none", parallel=2) as decoder:
        first, second = (decoder.start(Request(PROMPTS[index], GREEDY, 4)) for index in (1, 4))
        with pytest.raises(offload.UserError, match="2 texts are being written"):
            decoder.start(Request([1], GREEDY, 4))
        for _ in range(5):
            advance(decoder, [first, second])
        decoder.release(first)
        decoder.release(first)
        again = decoder.start(Request([*PROMPTS[4], 3], GREEDY, 4), continues=True)
        assert again.sequence.stats.num_kept_tokens == len(PROMPTS[4]), "copied from the one that is being written"
        del again, first
        kept = decoder.start(Request([*PROMPTS[4], 3, 5], GREEDY, 4), continues=True)
        assert kept.sequence.stats.num_kept_tokens == len(PROMPTS[4]), "who was dropped has left it there"
        while not kept.is_finished:
            advance(decoder, [kept])
    with opened(pair, tree="none") as decoder:
        plain = decoder.generate([*PROMPTS[4], 3, 5], max_new_tokens=4).token_ids
    assert kept.sequence.new_ids == plain


def test_candidates_of_all_texts_compete(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of one forest differ in size, and none loses a node that is likelier than one of another tree."""
    seen, right = [], dynamic._Best.cut
    monkeypatch.setattr(dynamic._Best, "cut", lambda best, num: (right(best, num), seen.append(best.candidates.copy())))
    with opened(pair, tree="dynamic:16x6", parallel=4) as decoder:
        runs = [decoder.start(Request(ids, GREEDY, 12)) for ids in PROMPTS[:4]]
        for _ in range(6):
            advance(decoder, runs)
    forests = [forest for forest in seen if len({*forest["text"].tolist()}) == 4]
    sizes = [[int((forest["text"] == text).sum()) for text in range(4)] for forest in forests]
    assert any(max(size) >= 2 * min(size) for size in sizes) and all(sum(size) <= 60 for size in sizes)


LONG, SHORT = list(range(20, 60)), [7, 3, 90]
NUM_DRAWN = 6


def of_seeds(prompt: list[int], num: int) -> list[Request]:
    return [Request(prompt, Sampling(temperature=0.8, seed=seed), NUM_DRAWN) for seed in range(num)]


@pytest.mark.parametrize(("prompt", "num_lone"), [(LONG, 1), (SHORT, 0)], ids=["long", "short"])
def test_all_samples_join_once_the_prompt_is_there(pair: Pair, prompt: list[int], num_lone: int) -> None:
    """The second pass has all of them; a prompt that no text would copy is not waited for."""
    widths = list[int]()
    with opened(pair, tree="none", parallel=4) as decoder:
        results = list(write_all(decoder, of_seeds(prompt, 4), lambda runs: widths.append(len(runs))))
    assert widths[:num_lone] == [1] * num_lone and widths[num_lone] == 4
    assert all(isinstance(job.outcome, Generation) for job in results)


@pytest.mark.parametrize("parallel", [1, 3])
def test_one_that_fails_under_way_fails_alone(pair: Pair, parallel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a grammar may that comes to where no token of the model is left."""
    requests, right = of_seeds(LONG, 4), TokenSequence.extend
    with opened(pair, tree="none", parallel=parallel) as decoder:
        wanted = [decoder.generate(LONG, temperature=0.8, seed=seed, max_new_tokens=NUM_DRAWN) for seed in range(4)]

        def extend(text: TokenSequence, *arguments: Any) -> list[int]:
            if text.sampler.sampling.seed == 1 and len(text.new_ids) == 2:
                raise UserError("nothing may follow")
            return right(text, *arguments)

        monkeypatch.setattr(TokenSequence, "extend", extend)
        step, steps, passes = SpeculationStep.step, list[int](), list[int]()
        monkeypatch.setattr(SpeculationStep, "step", lambda *of: steps.append(1) or step(*of))
        finished = write_all(decoder, requests, lambda runs: passes.append(1))
        outcomes = {job.number: job.outcome for job in finished}
    assert len(steps) == len(passes), "no pass was repeated to see whose error it was"
    assert sorted(outcomes) == [0, 1, 2, 3] and isinstance(outcomes[1], UserError)
    for number in (0, 2, 3):
        outcome = outcomes[number]
        assert isinstance(outcome, Generation) and outcome.token_ids == wanted[number].token_ids


LENGTHY, OTHER = PROMPTS[4], list(range(150, 90, -1))


@pytest.mark.parametrize("parallel", [1, 3])
def test_keys_and_values_of_all_texts_take_what_was_planned(pair: Pair, parallel: int) -> None:
    with opened(pair, "8x3", parallel=parallel) as decoder:
        decoder.generate([5, 9], max_new_tokens=2)
        buffers = decoder._pool.caches.target._buffers.of_layer
        assert sum(states.nbytes for held in buffers for states in held.values()) == decoder.plan.kv_bytes


def test_a_copy_that_was_cut_short_is_kept_by_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(pair, parallel=2) as decoder:
        wanted = decoder.generate(LENGTHY, max_new_tokens=12).token_ids
        first = decoder.start(Request(LENGTHY, GREEDY, 12))
        second = decoder.start(Request(OTHER, GREEDY, 12))
        advance(decoder, [first, second])
        decoder.release(second)
        with monkeypatch.context() as patch:
            patch.setattr(Caches, "copy_from", lambda *_: _interrupt())
            with pytest.raises(KeyboardInterrupt):
                decoder.start(Request(LENGTHY, GREEDY, 12), continues=True)
        first.sequence.caches.clear()  # so that nothing is to be copied
        decoder.release(first)
        runs = [decoder.start(Request(LENGTHY, GREEDY, 12), continues=True) for _ in range(2)]
        while not all(run.is_finished for run in runs):
            advance(decoder, runs)
        assert [run.sequence.new_ids for run in runs] == [wanted, wanted]


def test_what_fails_or_is_interrupted_takes_no_place_along(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may be held for long, and with it all that was under way, as a notebook does."""
    with opened(pair, parallel=2) as decoder:
        for where, name, fail in (
            (TextStream, "__init__", lambda *_: 1 / 0),
            (decoder, "_pass", lambda *_: _interrupt()),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, fail)
                errors = [_held(lambda: decoder.generate([5, 9], max_new_tokens=2)) for _ in range(4)]
            assert all(isinstance(error, ZeroDivisionError | KeyboardInterrupt) for error in errors)
            runs = [decoder.start(Request(LONG, Sampling(), 2)) for _ in range(2)]
            for run in runs:
                decoder.release(run)


def test_a_draft_takes_in_no_more_at_once_than_planned(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "PROMPT_ROWS", 20)
    prompts, widths, right = [LENGTHY[start : start + 18] for start in (0, 20, 40)], list[int](), TreeModel.run
    with opened(pair) as decoder:
        wanted = [decoder.generate(ids, max_new_tokens=10).token_ids for ids in prompts]
    with opened(pair, "dynamic:12x5", parallel=3) as decoder:
        model = decoder.drafter.model  # type: ignore[attr-defined]

        def run(draft_model: TreeModel, token_T: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            widths.extend([len(token_T)] if draft_model is model else [])
            return right(draft_model, token_T, *arguments, **options)

        monkeypatch.setattr(TreeModel, "run", run)
        assert [generation.token_ids for generation in decoder.generate(prompts, max_new_tokens=10)] == wanted
    assert 15 < max(widths) <= 20


def _held(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except BaseException as error:
        return error
    return None


def _interrupt() -> None:
    raise KeyboardInterrupt
