"""Many texts in one pass: each has the tokens that it has alone, whoever joins, leaves or fails meanwhile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import Pair, advance, streaming_ram

import offload
from offload.drafting import dynamic
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.engine.scheduler import write_all
from offload.engine.sequence import Sequence as Text
from offload.engine.step import share_out
from offload.engine.text import TextStream
from offload.errors import UserError
from offload.sampling_options import Sampling

GREEDY, WARM = Sampling(), Sampling(temperature=0.8, seed=5)
PROMPTS = [[7, 3, 90, 14], list(range(20, 60)), [5], [7, 3, 90, 14, 88], list(range(9, 150)), [101, 2]]
NUM_NEW = [24, 9, 40, 30, 16, 33]


def opened(pair: Sequence[Path | None], **more: Any) -> Decoder:
    how = {"ram": "512MiB", "dtype": "float32", "context": 256, "profile": "none", "threads": 1, "invariant": False}
    return offload.load(*pair, **{**how, **more})


def requests(sampling: Sampling) -> list[Request]:
    return [Request(ids, sampling, num) for ids, num in zip(PROMPTS, NUM_NEW, strict=True)]


def alone(pair: Sequence[Path | None], sampling: Sampling, **more: Any) -> list[list[int]]:
    with opened(pair, **more) as decoder:
        how = {"temperature": sampling.temperature, "seed": sampling.seed}
        pairs = zip(PROMPTS, NUM_NEW, strict=True)
        return [decoder.generate(ids, max_new_tokens=num, **how).token_ids for ids, num in pairs]


def together(decoder: Decoder, asked: Sequence[Request]) -> list[list[int]]:
    """Whoever waits begins as soon as another one ends."""
    waiting, active, found = list(enumerate(asked)), dict[int, Run](), dict[int, list[int]]()
    while waiting or active:
        while waiting and len(active) < decoder.num_parallel:
            index, request = waiting.pop(0)
            active[index] = decoder.start(request)
        advance(decoder, [*active.values()])
        for index in [index for index, run in active.items() if run.is_finished]:
            run = active.pop(index)
            found[index] = run.result().token_ids
            decoder.release(run)
    return [found[index] for index in range(len(asked))]


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


@pytest.mark.parametrize("rule", ["sequoia", "topk"])
def test_rules_draw_for_each_text_by_itself(pair: Pair, rule: str) -> None:
    """A ratio rule's draws depend on the tree, so these are static, and the same beside others."""
    wanted = alone(pair, WARM, tree="8x3", rule=rule)
    with opened(pair, tree="8x3", rule=rule, parallel=3) as decoder:
        assert together(decoder, requests(WARM)) == wanted


def test_bits_do_not_depend_on_who_is_there(pair: Pair) -> None:
    """Layers are streamed and computed in bfloat16, where texts part as soon as a sum is rounded otherwise."""
    how = {"dtype": "bfloat16", "invariant": True, "ram": streaming_ram(*pair, num_nodes=48) + (8 << 20)}
    with opened(pair, tree="none", **how) as decoder:
        assert decoder.invariance.holds, decoder.invariance.reason
    wanted = alone(pair, WARM, tree="none", **how)
    with opened(pair, tree="dynamic:12x5", parallel=3, **how) as decoder:
        assert together(decoder, requests(WARM)) == wanted


def test_a_pass_is_made_once_for_all(pair: Pair) -> None:
    with opened(pair, tree="none", parallel=6) as decoder:
        runs, num_passes = [decoder.start(Request([index + 1], GREEDY, 8)) for index in range(6)], 0
        while not all(run.is_finished for run in runs):
            advance(decoder, runs)
            num_passes += 1
        assert num_passes == 9, "eight tokens of each, and one call that finds them all ended"
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
    forests = [one for one in seen if len({*one["text"].tolist()}) == 4]
    sizes = [[int((one["text"] == text).sum()) for text in range(4)] for one in forests]
    assert any(max(own) >= 2 * min(own) for own in sizes) and all(sum(own) <= 60 for own in sizes)


@pytest.mark.parametrize(
    ("missing", "num_rows", "wanted"),
    [
        ([0, 0], 5, [(0, True), (0, True)]),
        ([9, 0], 5, [(5, False), (0, True)]),
        ([3, 4, 0], 5, [(3, True), (2, False), (0, True)]),
        ([5, 1, 0], 5, [(5, True), (0, True)]),
    ],
)
def test_prompts_share_out_the_rows(missing: list[int], num_rows: int, wanted: list[tuple[int, bool]]) -> None:
    class Text:
        def __init__(self, num_missing: int) -> None:
            self.tokens = list(range(num_missing + 1))
            self.caches = type("Caches", (), {"target": type("Cache", (), {"length": 0})})

    texts: Any = [Text(num) for num in missing]
    assert [(entry.num_pending, entry.is_whole) for _, entry in share_out(texts, num_rows)] == wanted


LONG, SHORT = list(range(20, 60)), [7, 3, 90]
NUM_DRAWN = 6


def of_seeds(prompt: list[int], num: int) -> list[Request]:
    return [Request(prompt, Sampling(temperature=0.8, seed=seed), NUM_DRAWN) for seed in range(num)]


@pytest.mark.parametrize(("prompt", "num_lone"), [(LONG, 1), (SHORT, 0)], ids=["long", "short"])
def test_all_samples_join_once_the_prompt_is_there(pair: Pair, prompt: list[int], num_lone: int) -> None:
    """The second pass has all of them; a prompt that nobody would copy is not waited for."""
    widths = list[int]()
    with opened(pair, tree="none", parallel=4) as decoder:
        found = list(write_all(decoder, of_seeds(prompt, 4), lambda runs: widths.append(len(runs))))
    assert widths[:num_lone] == [1] * num_lone and widths[num_lone] == 4
    assert all(isinstance(one.outcome, Generation) for one in found)


@pytest.mark.parametrize("parallel", [1, 3])
def test_one_that_fails_under_way_fails_alone(pair: Pair, parallel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a grammar may that comes to where no token of the model is left."""
    requests, right = of_seeds(LONG, 4), Text.accept
    with opened(pair, tree="none", parallel=parallel) as decoder:
        wanted = [decoder.generate(LONG, temperature=0.8, seed=seed, max_new_tokens=NUM_DRAWN) for seed in range(4)]

        def accept(text: Text, *arguments: Any) -> list[int]:
            if text.sampler.sampling.seed == 1 and len(text.new_ids) == 2:
                raise UserError("nothing may follow")
            return right(text, *arguments)

        monkeypatch.setattr(Text, "accept", accept)
        outcomes = {one.number: one.outcome for one in write_all(decoder, requests)}
    assert sorted(outcomes) == [0, 1, 2, 3] and isinstance(outcomes[1], UserError)
    for number in (0, 2, 3):
        outcome = outcomes[number]
        assert isinstance(outcome, Generation) and outcome.token_ids == wanted[number].token_ids


def test_a_place_is_free_again_where_a_text_cannot_begin(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while somebody holds the error, and with it all that was under way then."""
    with opened(pair, tree="none", parallel=2) as decoder:
        with monkeypatch.context() as patch:
            patch.setattr(TextStream, "__init__", lambda *_: 1 / 0)
            errors = list[Exception]()
            for _ in range(2):
                try:
                    decoder.start(Request(LONG, Sampling(), 2))
                except ZeroDivisionError as error:
                    errors.append(error)
        runs = [decoder.start(Request(LONG, Sampling(), 2)) for _ in range(2)]
        assert len(errors) == 2 and len(runs) == 2
