"""What the target thought of its tokens: equal to transformers', whatever tree, and part of the result."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, VOCAB_SIZE, save_pair
from transformers import AutoModelForCausalLM

import offload
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.request import Request
from offload.sampling_options import Sampling

PROMPT, NUM_NEW = [7, 11, 3, 42, 5], 12
HOWS = [Sampling(), Sampling(temperature=0.9, top_p=0.8, repeat_penalty=1.4, seed=3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"), noise=0.003)


@pytest.fixture(scope="module")
def decoder(models: tuple[Path, Path]) -> Iterator[Decoder]:
    with offload.load(
        *models, "1GiB", "16x6", context=96, dtype="float32", threads=1, profile="none", rule="sequoia", lookup=False
    ) as decoder:
        yield decoder


def written(
    decoder: Decoder, how: Sampling, num_top: int | None, *, tree: str = "none", rule: str = "match"
) -> Generation:
    run = decoder.start(Request(PROMPT, how, NUM_NEW, num_logprobs=num_top), tree=tree, rule=rule)
    for _ in run:
        pass
    return run.result()


@pytest.mark.parametrize("how", HOWS, ids=["greedy", "adjusted"])
@pytest.mark.parametrize(
    ("tree", "rule"), [("none", "match"), ("8x3", "match"), ("dynamic:16x6", "topk"), ("8x3", "sequoia")]
)
def test_they_are_those_of_transformers(
    decoder: Decoder, models: tuple[Path, Path], how: Sampling, tree: str, rule: str
) -> None:
    """They follow from the model's own logits, whatever is done to these before a token is drawn."""
    result = written(decoder, how, 3, tree=tree, rule=rule)
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    logprob_TV = logits_TV.log_softmax(1)
    assert result.logprobs is not None and len(result.logprobs) == NUM_NEW
    for told, token, logprob_V in zip(result.logprobs, result.token_ids, logprob_TV, strict=True):
        best = logprob_V.topk(3)
        assert told.token == token
        assert told.logprob == pytest.approx(float(logprob_V[token]), abs=1e-4)
        assert [one for one, _ in told.top] == best.indices.tolist()
        assert [number for _, number in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("how", HOWS, ids=["greedy", "adjusted"])
def test_asking_changes_nothing(decoder: Decoder, how: Sampling) -> None:
    asked, plain = (written(decoder, how, num_top, tree="8x3") for num_top in (0, None))
    assert asked.token_ids == plain.token_ids
    assert asked.logprobs is not None and all(one.top == () for one in asked.logprobs)
    assert plain.logprobs is None and "logprobs" not in plain.as_dict()


def test_they_are_part_of_the_object(decoder: Decoder) -> None:
    result = written(decoder, Sampling(), 2, tree="8x3")
    told = json.loads(json.dumps(result.as_dict()["logprobs"]))
    assert [one["token"] for one in told] == result.token_ids
    assert all(one["top"][0] == [one["token"], one["logprob"]] for one in told), "greedy text is the likeliest"


def test_more_than_there_are_is_all_of_them(decoder: Decoder) -> None:
    result = decoder.generate(PROMPT, max_new_tokens=2, num_logprobs=10**6)
    assert result.logprobs is not None and all(len(one.top) == VOCAB_SIZE for one in result.logprobs)


def test_a_cut_text_has_those_of_its_tokens(decoder: Decoder) -> None:
    run = decoder.start(Request(PROMPT, max_new_tokens=NUM_NEW, num_logprobs=0), tree="8x3")
    for _ in run:
        pass
    run.sequence.cut(4)
    assert [one.token for one in run.result().logprobs or ()] == run.sequence.new_ids == run.result().token_ids
    assert len(run.sequence.new_ids) == 4


@pytest.mark.parametrize(("wrong", "words"), [(-1, "0 or more"), (0.5, "whole number")])
def test_what_makes_no_sense_is_refused(decoder: Decoder, wrong: int, words: str) -> None:
    with pytest.raises(offload.UserError, match=f"`num_logprobs` must be (a )?{words}"):
        decoder.generate(PROMPT, num_logprobs=wrong)


def test_a_bias_of_a_token_that_is_none_is_refused(decoder: Decoder) -> None:
    with pytest.raises(offload.UserError, match=rf"tokens of `logit_bias` must lie in \[0, {VOCAB_SIZE}\), got 199"):
        decoder.generate(PROMPT, logit_bias={VOCAB_SIZE: 1.0})
