"""Penalties, biases and log-probabilities under speculation: those of no tree, and of transformers."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, VOCAB_SIZE, Pair, finished, save_pair
from transformers import AutoModelForCausalLM

import offload
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.request import Request
from offload.sampling.logits import AdjustedRows, Rows
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling

PROMPT, NUM_NEW = [7, 11, 3, 42, 5, 11], 32
TREES = ["8x3", "dynamic:16x6", "chain:4"]
SETTINGS: dict[str, dict[str, Any]] = {
    "repeat": {"repeat_penalty": 1.3},
    "bias": {"logit_bias": {11: 3.0, 42: -5.0, 100: 2.5}},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "every": {"repeat_penalty": 1.2, "logit_bias": {11: 2.0}, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}
DRAWN = {"greedy": {}, "warm": {"temperature": 0.8, "seed": 3}, "min-p": {"temperature": 1.0, "min_p": 0.2, "seed": 5}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"), noise=0.003)


@pytest.fixture(scope="module")
def decoder(models: Pair) -> Iterator[Decoder]:
    with offload.load(
        *models, "1GiB", "16x6", context=160, dtype="float32", threads=1, profile="none", rule="sequoia", lookup=False
    ) as decoder:
        yield decoder


def written(
    decoder: Decoder,
    options: dict[str, Any],
    tree: str = "none",
    rule: str = "match",
    *,
    num_logprobs: int | None = None,
) -> Generation:
    request = Request(PROMPT, Sampling(**options), NUM_NEW, num_logprobs=num_logprobs, tree=tree, rule=rule)
    return finished(decoder.start(request))


@pytest.mark.parametrize(
    ("setting", "drawn"), [*((name, "greedy") for name in SETTINGS), ("repeat", "warm"), ("every", "min-p")]
)
def test_one_seed_gives_one_text_with_every_tree(decoder: Decoder, setting: str, drawn: str) -> None:
    options = SETTINGS[setting] | DRAWN[drawn]
    alone, plain = written(decoder, options), written(decoder, DRAWN[drawn])
    assert alone.token_ids != plain.token_ids, "nothing was adjusted"
    for rule in ("match", "topk"):
        for tree in TREES:
            result = written(decoder, options, tree, rule)
            assert result.token_ids == alone.token_ids, (rule, tree)
            assert result.stats.num_sweeps < NUM_NEW, "no guess was right"


@pytest.mark.parametrize("has_draft", [True, False])
def test_guesses_of_the_text_itself_change_nothing(decoder: Decoder, models: Pair, has_draft: bool) -> None:
    """They are point masses, from whatever they were copied; one that is penalised is only a poor guess."""
    options, pair = SETTINGS["presence"] | DRAWN["warm"], models if has_draft else models[:1]
    with offload.load(
        *pair, ram="1GiB", tree="16x6", context=160, dtype="float32", threads=1, profile="none", lookup=True
    ) as other:
        for tree in ("8x3", "dynamic:16x6"):
            assert written(other, options, tree).token_ids == written(decoder, options).token_ids


@pytest.mark.parametrize("setting", ["repeat", "every"])
def test_greedy_text_is_that_of_ratio_rules_too(decoder: Decoder, setting: str) -> None:
    alone = written(decoder, SETTINGS[setting])
    for rule in ("sequoia", "specinfer", "spectr"):
        assert written(decoder, SETTINGS[setting], "8x3", rule).token_ids == alone.token_ids


def by_transformers(target: Path, options: dict[str, Any]) -> list[int]:
    names = {"repeat_penalty": "repetition_penalty"}
    settings = {names.get(name, name): value for name, value in options.items() if name != "logit_bias"}
    if bias := options.get("logit_bias"):
        settings["sequence_bias"] = [[[token], number] for token, number in bias.items()]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids_1T = torch.tensor([PROMPT])
    out_1T = model.generate(ids_1T, do_sample=False, max_new_tokens=NUM_NEW, attention_mask=ids_1T > 0, **settings)
    return out_1T[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    "options",
    [SETTINGS["repeat"], SETTINGS["bias"], SETTINGS["repeat"] | SETTINGS["bias"]],
    ids=["repeat", "bias", "both"],
)
def test_greedy_text_is_that_of_transformers(decoder: Decoder, models: Pair, options: dict[str, Any]) -> None:
    wanted = by_transformers(models[0], options)
    for tree in ("none", *TREES):
        assert written(decoder, options, tree).token_ids == wanted


def test_counts_of_openai(decoder: Decoder, models: Pair) -> None:
    """Presence and frequency by their formula on logits of a pass over the whole text, token after token."""
    options = SETTINGS["presence"] | SETTINGS["frequency"]
    ids = list(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    for _ in range(16):
        with torch.no_grad():
            logits_V = model(torch.tensor([ids])).logits[0, -1]
        for token in {*ids[len(PROMPT) :]}:
            logits_V[token] -= (
                ids[len(PROMPT) :].count(token) * options["frequency_penalty"] + options["presence_penalty"]
            )
        ids.append(int(logits_V.argmax()))
    assert written(decoder, options, "8x3").token_ids[:16] == ids[len(PROMPT) :]


def adjust_the_target_alone(patch: pytest.MonkeyPatch) -> None:
    adjusted = Sampler.adjusted

    def adjusted_rows(self: Sampler, path: Callable[[int], Sequence[int]], logits: Rows) -> Rows:
        return AdjustedRows(logits, lambda node, row_V: adjusted(self, row_V[None], [path(node)])[0])

    patch.setattr(Sampler, "adjusted_rows", adjusted_rows)
    patch.setattr(Sampler, "adjusted", lambda self, logits_TV, paths: logits_TV)


@pytest.mark.parametrize("tree", TREES)
def test_guesses_stay_good(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    """A draft that knows nothing of a strong penalty guesses what was said before, and that never comes."""
    options = {"repeat_penalty": 1.6}
    good = written(decoder, options, tree)
    adjust_the_target_alone(monkeypatch)
    poor = written(decoder, options, tree)
    assert poor.token_ids == good.token_ids, "what a draft guesses must not matter"
    assert good.stats.tokens_per_sweep > 1.3 * poor.stats.tokens_per_sweep


HOWS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.8, "repeat_penalty": 1.4, "seed": 3}]


@pytest.mark.parametrize("options", HOWS, ids=["greedy", "adjusted"])
@pytest.mark.parametrize(
    ("tree", "rule"), [("none", "match"), ("8x3", "match"), ("dynamic:16x6", "topk"), ("8x3", "sequoia")]
)
def test_they_are_those_of_transformers(
    decoder: Decoder, models: Pair, options: dict[str, Any], tree: str, rule: str
) -> None:
    """They follow from the model's own logits, whatever is done to these before a token is drawn."""
    result = written(decoder, options, tree, rule, num_logprobs=3)
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    logprob_TV = logits_TV.log_softmax(1)
    assert result.logprobs is not None and len(result.logprobs) == NUM_NEW
    for entry, token, logprob_V in zip(result.logprobs, result.token_ids, logprob_TV, strict=True):
        best = logprob_V.topk(3)
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(logprob_V[token]), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [number for _, number in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("options", HOWS, ids=["greedy", "adjusted"])
def test_asking_changes_nothing(decoder: Decoder, options: dict[str, Any]) -> None:
    asked, plain = (written(decoder, options, "8x3", num_logprobs=num_top) for num_top in (0, None))
    assert asked.token_ids == plain.token_ids
    assert asked.logprobs is not None and all(logprob.top == () for logprob in asked.logprobs)
    assert plain.logprobs is None and "logprobs" not in plain.as_dict()


def test_they_are_part_of_the_object_and_as_many_as_there_are(decoder: Decoder) -> None:
    result = written(decoder, {}, "8x3", num_logprobs=2)
    entries = json.loads(json.dumps(result.as_dict()["logprobs"]))
    assert [entry["token"] for entry in entries] == result.token_ids
    assert all(row["top"][0] == [row["token"], row["logprob"]] for row in entries), "greedy text is the likeliest"
    most = decoder.generate(PROMPT, max_new_tokens=2, num_logprobs=10**6).logprobs
    assert most is not None and all(len(entry.top) == VOCAB_SIZE for entry in most)
    run = decoder.start(Request(PROMPT, max_new_tokens=NUM_NEW, num_logprobs=0, tree="8x3"))
    finished(run)
    run.sequence.cut(4)
    cut = run.result()
    assert [entry.token for entry in cut.logprobs or ()] == run.sequence.new_ids == cut.token_ids
    assert len(cut.token_ids) == 4
