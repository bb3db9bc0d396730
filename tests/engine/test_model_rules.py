"""Settings of generation_config.json: the text of transformers, with every tree, or a line that says why not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import set_json
from tiny import FAMILIES, VOCAB_SIZE, Pair, finished, save_pair
from transformers import AutoModelForCausalLM

import offload
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.errors import UserError
from offload.sampling.model_rules import ModelRules
from offload.sampling_options import Sampling

PROMPT, NUM_NEW = [7, 11, 3, 42, 5, 11], 24
TREES = ["none", "8x3", "dynamic:16x6", "chain:4"]


def hf_text(folder: Path, **settings: Any) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids_1T = torch.tensor([PROMPT])
    options = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0, **settings}
    return list(model.generate(ids_1T, attention_mask=ids_1T > -1, **options)[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"), noise=0.003)
    plain = hf_text(pair[0], eos_token_id=None)
    # a token that is new in the middle of the text ends it
    end = next(token for index, token in enumerate(plain) if index > 7 and token not in plain[:index])
    set_json(pair[0] / "generation_config.json", eos_token_id=end, suppress_tokens=[plain[3]])
    return pair


@pytest.fixture(scope="module")
def decoder(models: Pair) -> Iterator[Decoder]:
    options: Any = {"context": 160, "dtype": "float32", "threads": 1, "profile": "none", "lookup": False}
    with offload.load(*models, "1GiB", "16x6", **options) as decoder:
        yield decoder


def written(decoder: Decoder, settings: dict[str, Any], tree: str) -> list[int]:
    decoder._rules = ModelRules(settings, decoder.end_ids, VOCAB_SIZE)
    return list(finished(decoder.start(Request(PROMPT, Sampling(), NUM_NEW, tree=tree))).token_ids)


def test_the_file_is_heeded(models: Pair, decoder: Decoder) -> None:
    wanted = hf_text(models[0])
    assert decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids == wanted
    assert wanted != hf_text(models[0], suppress_tokens=None)


def settings_of(plain: list[int]) -> dict[str, dict[str, Any]]:
    """What changes this text, by the tokens that it has."""
    return {
        "suppress_tokens": {"suppress_tokens": [plain[2], plain[5]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [plain[0]]},
        "bad_words_ids": {"bad_words_ids": [[plain[2], plain[3]], [plain[5]], [plain[-1]]]},
        "sequence_bias": {"sequence_bias": [[[plain[1]], -4.0], [[plain[3], plain[4]], -6.0], [[9], 1.5]]},
        "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
        "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2, "suppress_tokens": [plain[4]]},
        "min_new_tokens": {"min_new_tokens": len(plain) + 4},
        "min_length": {"min_length": len(PROMPT) + len(plain) + 3},
        "forced_bos_token_id": {"forced_bos_token_id": 9},
        "forced_eos_token_id": {"forced_eos_token_id": 9, "min_new_tokens": NUM_NEW},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.8)},
        "all": {
            "suppress_tokens": [plain[2]], "begin_suppress_tokens": [plain[0]], "no_repeat_ngram_size": 3,
            "min_new_tokens": 12, "sequence_bias": [[[9], 1.5]], "bad_words_ids": [[plain[5], plain[6]]],
        },
    }  # fmt: skip


NAMES = [*settings_of([0] * 8)]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_that_of_transformers_with_every_tree(name: str, models: Pair, decoder: Decoder) -> None:
    plain = hf_text(models[0], suppress_tokens=None)
    settings = settings_of(plain)[name]
    wanted = hf_text(models[0], **{"suppress_tokens": None, **settings})
    assert wanted != plain or name == "forced_bos_token_id", "the setting changes nothing here"
    for tree in TREES:
        assert written(decoder, settings, tree) == wanted, tree


UNHEEDED = {"num_beams": 4, "guidance_scale": 1.5, "penalty_alpha": 0.6, "watermarking_config": {"bias": 2.0}}
UNHEEDED |= {"stop_strings": ["x"], "encoder_repetition_penalty": 1.2}


def test_what_is_not_heeded_is_told() -> None:
    for key, value in UNHEEDED.items():
        assert key in ModelRules({key: value}, frozenset(), 8).note
    assert "typical_p" in ModelRules({"typical_p": 0.5, "do_sample": True}, frozenset(), 8).note
    for usual in ({}, {"typical_p": 0.5}, {"num_beams": 1, "guidance_scale": 1, "encoder_no_repeat_ngram_size": 0}):
        assert not ModelRules(usual, frozenset(), 8).note


BAD: dict[str, Any] = {"bad_words_ids": [[-1]], "sequence_bias": [[[99], 1.0]], "suppress_tokens": "x"}
BAD |= {"min_new_tokens": "x", "exponential_decay_length_penalty": [1], "no_repeat_ngram_size": "x"}


@pytest.mark.parametrize("key", BAD)
def test_what_makes_no_sense_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=r"generation_config\.json"):
        ModelRules({key: BAD[key]}, frozenset([1]), 8)
