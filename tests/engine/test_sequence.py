"""Sequences: all that is known of a text is theirs, models are lent it, and a step that is cut short is no step."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reciting import at_call, interrupt
from tiny import FAMILIES, save_pair

import offload
from offload.drafting.draft_model import Draft
from offload.drafting.model_drafter import ModelDrafter
from offload.engine.cache_pool import CachePool
from offload.engine.decoder import Decoder
from offload.engine.sequence import Caches, StopCriteria, TokenSequence
from offload.engine.step import count_step, learning
from offload.engine.text_stream import TextStream
from offload.model.target import Target
from offload.sampling.adjustments import Penalties
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.streaming.layers import LayerStream
from offload.trees.topology import DynamicShape, Shape, chain, k_ary
from offload.trees.verification import find_rule

PROMPT, OTHER = [7, 11, 3, 42, 5], [9, 2, 77]
WARM = Sampling(temperature=0.8, seed=3)
SHAPES = (k_ary(2, 15), DynamicShape(16, 4))
NUM_STEPS = 5


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    models = save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"), noise=0.005)
    with offload.load(*models, "1GiB", "16x4", context=160, dtype="float32", threads=1, profile="none") as decoder:
        yield decoder


def written(decoder: Decoder, prompt: list[int], sampling: Sampling, shape: Shape) -> TokenSequence:
    sequence = decoder.begin(prompt, sampling, shape=shape)
    for _ in range(NUM_STEPS):
        decoder.step(sequence)
    return sequence


def text_of(tokens: list[int], limits: StopCriteria | None = None) -> TokenSequence:
    return TokenSequence(tokens, Sampler(Sampling(), 10), find_rule("match"), chain(0), limits or StopCriteria())


def test_two_sequences_in_turn_know_nothing_of_each_other(decoder: Decoder) -> None:
    alone = [decoder.generate(prompt, max_new_tokens=60, temperature=0.8, seed=3) for prompt in (PROMPT, OTHER)]
    both = [written(decoder, prompt, WARM, SHAPES[0]) for prompt in (PROMPT, OTHER)]
    for sequence, wanted in zip(both, alone, strict=True):
        assert len(sequence.new_ids) > NUM_STEPS, "no guess was right"
        assert sequence.new_ids == wanted.token_ids[: len(sequence.new_ids)]
        assert sequence.stats.num_sweeps == NUM_STEPS


def test_a_text_follows_what_passes_have_taught(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees may change under way; the text may not, and figures name the last one."""
    wanted = decoder.generate(PROMPT, max_new_tokens=24).token_ids
    taught = list[int]()
    selector = decoder.trees
    usual = type(selector).for_run

    def for_run(self: Any, *args: Any, num_texts: int = 1, **options: Any) -> Any:
        return usual(self, *args, **options)._replace(shape=DynamicShape(16 if len(taught) < 2 else 6, 4))

    monkeypatch.setattr(type(selector), "for_run", for_run)
    learn = learning(decoder.threads, lambda observed: taught.append(observed.most_rows))
    monkeypatch.setattr(decoder._speculation, "_listeners", [count_step, learn])
    result = decoder.generate(PROMPT, max_new_tokens=24)
    assert result.token_ids == wanted
    assert taught[:2] == [16, 16] and set(taught[2:]) == {6}
    assert result.stats.tree_num_nodes == 6


@pytest.mark.parametrize("shape", SHAPES, ids=["static", "dynamic"])
def test_caches_hold_all_but_the_root(decoder: Decoder, shape: Shape) -> None:
    sequence = decoder.begin(PROMPT, Sampling(), shape=shape)
    for _ in range(NUM_STEPS):
        before = len(sequence.tokens)
        accepted = decoder.step(sequence)
        assert sequence.tokens[before:] == accepted != []
        assert sequence.caches.target.length == len(sequence.tokens) - 1
        assert before <= sequence.caches.draft.length < len(sequence.tokens)


def test_an_overtaken_sequence_refuses_and_loses_nothing_else(decoder: Decoder) -> None:
    overtaken = written(decoder, PROMPT, Sampling(), SHAPES[0])
    caches, tokens = overtaken.caches, list(overtaken.tokens)
    last = decoder.begin(OTHER, Sampling())
    assert last.caches is caches, "recordings lie on the buffers of these very caches"
    with pytest.raises(offload.UserError, match="has begun another generation or was closed: finish one before"):
        decoder.step(overtaken)
    assert overtaken.tokens == tokens and caches.target.length == 0
    decoder.step(last)


def resumed(
    decoder: Decoder, shape: Shape, owner: type, method: str, number: int, sampling: Sampling = WARM
) -> list[int]:
    """What is written when the so-many-th call of a method is cut short and its step run again."""
    sequence = decoder.begin(PROMPT, sampling, shape=shape)
    with at_call(owner, method, number, interrupt), pytest.raises(KeyboardInterrupt):
        while True:
            decoder.step(sequence)
    caches, num_known = sequence.caches, len(sequence.tokens) - 1
    assert caches.target.length <= num_known, "caches are ahead of the text"
    while len(sequence.new_ids) < 40:
        decoder.step(sequence)
    return sequence.new_ids[:40]


MOMENTS = [
    (Target, "commit", 2), (ModelDrafter, "accepted", 1), (ModelDrafter, "accepted", 3), (TokenSequence, "extend", 2),
    (Draft, "run", 4), (Target, "score", 4), (LayerStream, "release", 4),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=["static", "dynamic"])
@pytest.mark.parametrize(("owner", "method", "number"), MOMENTS)
def test_a_step_that_was_cut_short_is_run_again(
    decoder: Decoder, shape: Shape, owner: type, method: str, number: int
) -> None:
    """A text knows its tokens before its caches do, so that a state never has to go back."""
    wanted = decoder.generate(PROMPT, max_new_tokens=40, temperature=0.8, seed=3).token_ids
    assert resumed(decoder, shape, owner, method, number) == wanted


@pytest.mark.parametrize("number", [2, 4, 9])
def test_a_burst_of_which_a_part_was_accepted_is_accepted_anew(decoder: Decoder, number: int) -> None:
    """Cut short between two of its tokens: penalties count what the text has, and nothing twice."""
    options = {"temperature": 0.8, "seed": 3, "frequency_penalty": 1.5, "repeat_penalty": 1.2}
    wanted = decoder.generate(PROMPT, max_new_tokens=40, **options).token_ids
    assert resumed(decoder, SHAPES[0], Penalties, "accept", number, Sampling(**options)) == wanted


@pytest.mark.always
def test_a_text_that_begins_like_the_one_before_keeps_what_was_computed(decoder: Decoder) -> None:
    first = written(decoder, PROMPT, Sampling(), SHAPES[0])
    known = first.tokens[:-1]
    fork = [*known[:9], 1 + known[9] % 100, 5]
    for tokens, keeps, wanted in ((fork, True, 9), (fork, False, 0)):
        written(decoder, PROMPT, Sampling(), SHAPES[0])
        sequence = decoder.begin(tokens, Sampling(), keeps=keeps)
        assert sequence.stats.num_kept_tokens == sequence.caches.target.length == wanted
    again = decoder.begin(known, Sampling(), shape=SHAPES[0], keeps=True)
    assert again.caches.target.length == 0, "the one before took nothing in"
    assert decoder.step(again)[0] == first.tokens[-1]


def test_a_text_keeps_its_last_token_to_begin_with() -> None:
    """The root of the first tree is computed with the tree, whatever the caches hold."""
    cache = SimpleNamespace(length=0, reusable_prefix=lambda num: num, can_follow=lambda num: num)
    cache.clear = lambda num_kept: setattr(cache, "length", min(num_kept, cache.length))
    caches: Any = Caches(cache, cache)  # type: ignore[arg-type]
    pool = CachePool([caches])
    pool.acquire(text_of([1, 2, 3, 4]), keeps=True)
    cache.length = 4
    pool.acquire(text_of([1, 2, 3]), keeps=True)
    assert cache.length == 2
    assert pool.release_all() == pool.release_all() == pool.tokens == [1, 2, 3]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_burst_that_did_not_become_text_becomes_it_later(looper: Path, number: int) -> None:
    """Cut short between a step and its text: the tokens are there, so the text must follow."""
    with offload.load(looper, looper, "1GiB", "8x3", context=256, threads=1) as decoder:
        wanted = decoder.generate("Say:", max_new_tokens=30)
        run = decoder.run("Say:", Sampling(), max_new_tokens=30)
        with at_call(TextStream, "push", number, interrupt), pytest.raises(KeyboardInterrupt):
            list(run)
        list(run)
        result = run.result()
    assert (result.token_ids, result.text, result.finish_reason) == (wanted.token_ids, wanted.text, "length")
    assert sum(result.stats.accepted_per_sweep) + result.stats.num_first_tokens == 30
