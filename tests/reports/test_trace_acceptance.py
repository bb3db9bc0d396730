"""Traces and the proof: both say what the decoder does, pass by pass, and a wrong token is noticed."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import random_ids

import offload
from offload.bench.harness.gate import Written, draws_hold, prove
from offload.checkpoint.packaged import PAIR, PROMPT
from offload.engine.decoder import Decoder
from offload.engine.load import load
from offload.errors import UserError
from offload.planning.acceptance import bursts
from offload.reports import trace_acceptance as tracer
from offload.reports.proof import BF16_NOISE, draw_gaps, gaps_of
from offload.reports.trace_acceptance import dynamic_again, given_trace, ranks_of, write
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.spec import parse_tree
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape

NUM_PROMPT, NUM_NEW = 24, 64  # of a window here, where every token is as good as any other
window = partial(random_ids, NUM_PROMPT)
TREES = ("32x12", "8x3", "chain:6", "sequences:4x4")


@pytest.fixture
def decoder(pair: tuple[Path, Path]) -> Iterator[Decoder]:
    with offload.load(*pair, "1GiB", "32x12", context=256, threads=1, profile="none") as decoder:
        yield decoder


def written_trace(decoder: Decoder, prompt: list[int], sampling: Sampling, num_new: int, tree: str) -> list[int]:
    return ranks_of(decoder, prompt, write(decoder, prompt, sampling, num_new, tree), sampling)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6, seed=3), Sampling(temperature=1.0, top_k=20)]
)
def test_traces_repeat_the_decoder_sweep_by_sweep(decoder: Decoder, sampling: Sampling) -> None:
    trace = written_trace(decoder, window(1), sampling, NUM_NEW, "8x3")
    assert len(trace) == NUM_NEW and len(set(trace)) > 2, "the draft must be right often and wrong often enough"
    for text in TREES:
        settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": sampling.seed}
        got = decoder.generate(window(1), max_new_tokens=NUM_NEW, tree=text, **settings)
        sweeps = [got.stats.num_first_tokens, *got.stats.accepted_per_sweep]
        assert bursts(parse_tree(text).build(), trace) == sweeps, text


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_traces_of_given_text_rank_what_the_target_would_write(decoder: Decoder, temperature: float) -> None:
    """On the target's own text both ways are one; the largest tree holds only half of it, so it takes two sweeps."""
    sampling = Sampling(temperature=temperature, seed=5)
    written = decoder.generate(window(2), max_new_tokens=NUM_NEW, temperature=temperature, seed=5).token_ids
    wanted = written_trace(decoder, window(2), sampling, NUM_NEW, "32x12")
    assert given_trace(decoder, [*window(2), *written], NUM_PROMPT, sampling) == wanted
    other = given_trace(decoder, random_ids(NUM_PROMPT + NUM_NEW, 2), NUM_PROMPT, sampling)
    assert len(other) == NUM_NEW and other.count(0) > 0.2 * NUM_NEW, (
        "random text, but the draft still guesses the target"
    )


@pytest.mark.parametrize(
    ("bounds", "temperature", "rule"),
    [
        (DynamicShape(64, 16), 0.0, "match"),
        (DynamicShape(64, 16), 0.8, "topk"),
        (DynamicShape(12, 3), 0.8, "match"),
        (DynamicShape(12, 3), 0.0, "topk"),
    ],
)
def test_growing_again_repeats_the_decoder_sweep_by_sweep(
    bounds: DynamicShape, temperature: float, rule: str, pair: tuple[Path, Path]
) -> None:
    """In a decoder of its own, because how far the scores are trusted is learned on the way."""
    tree, sampling = f"dynamic:{bounds.num_nodes}x{bounds.depth}", Sampling(temperature=temperature, seed=3)
    with offload.load(*pair, "1GiB", tree, rule, context=256, threads=1, profile="none") as decoder:
        got = decoder.generate(window(1), max_new_tokens=NUM_NEW, temperature=temperature, seed=3)
    sweeps = [got.stats.num_first_tokens, *got.stats.accepted_per_sweep]
    with offload.load(*pair, "1GiB", "64x16", rule, context=256, threads=1, profile="none") as decoder:
        again = dynamic_again(decoder, window(1), got.token_ids, sampling, bounds)
    assert again == sweeps[: len(again)] and len(set(again)) > 1
    assert NUM_NEW - bounds.depth <= sum(again) <= NUM_NEW, "all but those that the end may have cut"


@pytest.mark.parametrize("rule", ["topk", "sequoia", "specinfer", "spectr"])
def test_traces_of_every_rule_predict_what_decoding_yields(pair: tuple[Path, Path], rule: str) -> None:
    """Ratio rules toss fresh coins, so only means can agree; with `topk` the sweeps themselves do."""
    settings = {"temperature": 0.6, "max_new_tokens": NUM_NEW}
    with offload.load(*pair, "1GiB", "24x6", rule, context=256, threads=1, profile="none") as decoder:
        traces, sweeps = [], []
        for seed in range(1 if rule == "topk" else 4):
            sampling = Sampling(temperature=0.6, seed=seed)
            traces.append(written_trace(decoder, window(seed), sampling, NUM_NEW, "24x6"))
            stats = decoder.generate(window(seed), seed=seed, **settings).stats
            sweeps.append([stats.num_first_tokens, *stats.accepted_per_sweep])
    simulated = [bursts(parse_tree("24x6").build(), trace) for trace in traces]
    assert all(sum(burst) == NUM_NEW for burst in simulated)
    if rule == "topk":
        assert simulated == sweeps
    assert sum(map(len, simulated)) == pytest.approx(sum(map(len, sweeps)), rel=0.15)


def test_a_rank_is_that_of_the_token_that_was_written() -> None:
    """Those outcomes alone of a ratio rule's count that emit it, by a child or in place of all of them."""
    logits_2V = 2 * torch.randn(2, 40, generator=torch.Generator().manual_seed(4))
    sampler, stars = Sampler(Sampling(temperature=1.0, seed=2), 40, ChildSampling.WITH_REPLACEMENT), list[TokenTree]()

    def draw() -> TokenTree:
        stars.append(tracer._draw_star(logits_2V[:1], sampler, 3, 40))
        return stars[-1]

    for token in logits_2V[1].topk(3).indices.tolist() * 5:
        rank = tracer._accepted_rank(draw, logits_2V[1], sampler, token)
        assert rank == -1 or stars[-1].tokens[1 + rank] == token
    assert len(stars) > 15, "no outcome emitted another token"


@pytest.mark.parametrize("rule", ["sequoia", "specinfer"])
def test_one_child_of_a_given_text_is_accepted_as_often_as_the_distributions_overlap(
    pair: tuple[Path, Path], rule: str
) -> None:
    """Rank 0 comes true with chance sum(min(p, q)), the optimal transport (Leviathan et al., section 3.3)."""
    sampling, tokens = Sampling(temperature=1.0, seed=1), random_ids(200, 5)
    with offload.load(*pair, "1GiB", "64x16", rule, context=256, threads=1, profile="none") as decoder:
        found = [given_trace(decoder, tokens, 20, replace(sampling, seed=seed)).count(0) / 180 for seed in range(8)]
        text = decoder.begin(tokens, sampling)
        scores = decoder.drafter.score(tokens, 20, text.caches.draft)
        drafted = [text.sampler.distribution(logits_1V)[0] for logits_1V in scores]
        targeted = [
            text.sampler.distribution(logits_V[None])[0] for logits_V in tracer._target_logits(decoder, text, 20)
        ]
    overlap = sum(float(torch.minimum(p, q).sum()) for p, q in zip(targeted, drafted, strict=True)) / 180
    assert sum(found) / 8 == pytest.approx(overlap, abs=4 * 0.5 / (8 * 180) ** 0.5)


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
    with pytest.raises(UserError, match="new token 1 is wrong"):
        draws_hold([0.0, 2 * BF16_NOISE], Sampling())
    draws_hold([0.0, 2 * BF16_NOISE], Sampling(temperature=0.4))
    with pytest.raises(UserError, match="new token 1 is wrong"):
        draws_hold([0.0, 2 * BF16_NOISE], Sampling(temperature=0.6))


@pytest.mark.parametrize("rule", ["match", "sequoia"])
def test_a_reference_that_has_no_numbers_proves_nothing(rule: str) -> None:
    """Every comparison with NaN is false, also the one that would refuse."""
    logits_TV = torch.zeros(3, 5)
    logits_TV[1, 2] = torch.nan
    assert gaps_of(logits_TV, 7, [0, 0, 0], Sampling()) == [0.0, math.inf, 0.0]
    run = Written([1], [0, 0, 0], Sampling(temperature=1.0), rule)
    with pytest.raises(UserError, match="no speed is worth printing"):
        prove([run], lambda prompt_ids, new_ids: logits_TV)
