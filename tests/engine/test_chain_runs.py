"""`chain:auto` and `lenience` of whole decoders: the same text, room for the longest chain, figures that add up."""

from collections.abc import Iterator
from typing import Any

import pytest
from tiny import FAMILIES, Pair, save_pair, streaming_ram

import offload
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.errors import UserError
from offload.planning.cost_model import StepTime
from offload.sampling_options import Sampling

PROMPT, NUM_NEW = [7, 11, 3, 42, 5], 60
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 3}
HOW: dict[str, Any] = {"context": 160, "dtype": "float32", "threads": 1, "profile": "none"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"), noise=0.03)


@pytest.fixture(autouse=True)
def paper_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny draft costs as much as its target, and no chain would pay; here a step is a tenth of a sweep."""
    monkeypatch.setattr(
        "offload.planning.choice.step_time", lambda _, __, shape, ___: StepTime(shape.depth / 10, 1, 0, 0)
    )
    monkeypatch.setattr("offload.engine.run_trees._SELDOM", 0)


@pytest.fixture(scope="module")
def decoder(models: Pair) -> Iterator[Decoder]:
    with offload.load(*models, "1GiB", "chain:auto", "specinfer", **HOW) as decoder:
        yield decoder


@pytest.mark.parametrize("sampling", [{}, WARM], ids=["greedy", "warm"])
def test_lengths_follow_what_came_true_and_the_text_does_not_change(decoder: Decoder, sampling: dict[str, Any]) -> None:
    """With `match`, where one seed gives one text."""
    plain = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, rule="match", tree="none", **sampling)
    run = decoder.run(PROMPT, Sampling(**sampling), max_new_tokens=NUM_NEW, rule="match")
    lengths = [run.sequence.shape.depth for _ in run]
    assert run.result().token_ids == plain.token_ids
    assert len(set(lengths)) > 1, "one miss and the belief falls"
    stats = run.result().stats
    assert all(new <= 1 + max(lengths) for new in stats.accepted_per_sweep)
    assert stats.first_guess.mean is not None and 0 < stats.first_guess.mean < 1


def test_only_what_was_guessed_within_the_text_is_counted(models: Pair, decoder: Decoder) -> None:
    with offload.load(models[0], models[0], "1GiB", "chain:6", **HOW) as itself:
        stats = itself.generate(PROMPT, max_new_tokens=3).stats
    assert stats.first_guess.total == stats.first_guess.count == 3, "a model agrees with itself"
    message = decoder.generate(PROMPT, max_new_tokens=5, tree="none").as_dict()["stats"]
    assert isinstance(message, dict) and message["alpha"] is None and message["first_guess"]["mean"] is None


def test_lenience_says_that_it_is_not_exact(models: Pair) -> None:
    ram = streaming_ram(*models, context=160, num_nodes=9)
    texts = {}
    for lenience in (1.0, 0.01):
        with offload.load(*models, ram, "chain:6", lenience=lenience, invariant=True, **HOW) as decoder:
            generation = decoder.generate(PROMPT, max_new_tokens=NUM_NEW)
            texts[lenience] = generation.token_ids
            as_dict = generation.as_dict()
            is_told = any("NOT EXACT" in note and "0.01" in note for note in decoder.notes)
            assert generation.is_exact == as_dict["is_exact"] == (not is_told) == (lenience == 1)
            assert as_dict.get("lenience", 1.0) == lenience and ("NOT exact" in repr(generation)) == is_told
            assert generation.is_invariant == (lenience == 1 and decoder.invariance.holds)
            plain = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, tree="none").token_ids
            assert (plain == generation.token_ids) == (lenience == 1)
    assert texts[1.0] != texts[0.01]


def test_lenience_without_a_use_is_refused_early_and_at_every_run(models: Pair, request: pytest.FixtureRequest) -> None:
    with offload.load(*models, "1GiB", "chain:3", "sequoia", lenience=0.5, **HOW) as decoder:
        assert not decoder.generate(PROMPT, max_new_tokens=9, **WARM).is_exact
        assert not decoder.generate(PROMPT, max_new_tokens=9, rule="match").is_exact
        with pytest.raises(UserError, match="`rule` match does not take"):
            decoder.generate(PROMPT, max_new_tokens=9, rule="match", **WARM)
    request.getfixturevalue("_no_weights")
    for rule in ("match", "topk"):
        words = f"`lenience` 0.5 scales a ratio that `rule` {rule} does not take.*`rule` sequoia"
        with pytest.raises(UserError, match=words):
            asked = Request(PROMPT, Sampling(**WARM))
            offload.load(*models, "1GiB", "chain:3", rule, lenience=0.5, request=asked, **HOW)
