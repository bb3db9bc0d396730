"""Many requests through one decoder: who shares a prompt joins at once, and one that fails leaves the others alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.request import Request
from offload.engine.scheduler import Scheduler, write_all
from offload.engine.sequence import Sequence as Text
from offload.engine.text import TextStream
from offload.errors import UserError
from offload.sampling_options import Sampling

LONG, SHORT, NUM_NEW = list(range(20, 60)), [7, 3, 90], 6


def opened(pair: Sequence[Path], **more: Any) -> Decoder:
    how = {"ram": "512MiB", "dtype": "float32", "context": 128, "profile": "none", "threads": 1, "tree": "none"}
    return offload.load(*pair, **{**how, "invariant": False, **more})


def of_seeds(prompt: list[int], num: int) -> list[Request]:
    return [Request(prompt, Sampling(temperature=0.8, seed=seed), NUM_NEW) for seed in range(num)]


@pytest.mark.parametrize(("prompt", "num_lone"), [(LONG, 1), (SHORT, 0)], ids=["long", "short"])
def test_all_samples_join_once_the_prompt_is_there(pair: tuple[Path, Path], prompt: list[int], num_lone: int) -> None:
    """The second pass has all of them; a prompt that nobody would copy is not waited for."""
    widths = list[int]()
    with opened(pair, parallel=4) as decoder:
        found = list(write_all(decoder, of_seeds(prompt, 4), lambda runs: widths.append(len(runs))))
    assert widths[:num_lone] == [1] * num_lone and widths[num_lone] == 4
    assert all(isinstance(one.outcome, Generation) for one in found)


@pytest.mark.parametrize("parallel", [1, 3])
def test_one_that_fails_under_way_fails_alone(
    pair: tuple[Path, Path], parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a grammar may that comes to where no token of the model is left."""
    requests, right = of_seeds(LONG, 4), Text.accept
    with opened(pair, parallel=parallel) as decoder:
        wanted = [decoder.generate(LONG, temperature=0.8, seed=seed, max_new_tokens=NUM_NEW) for seed in range(4)]

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


def test_a_place_is_free_again_where_a_text_cannot_begin(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while somebody holds the error, and with it all that was under way then."""
    with opened(pair, parallel=2) as decoder:
        with monkeypatch.context() as patch:
            patch.setattr(TextStream, "__init__", lambda *_: _fail())
            errors = list[Exception]()
            for _ in range(2):
                try:
                    decoder.start(Request(LONG, Sampling(), 2))
                except ZeroDivisionError as error:
                    errors.append(error)
        runs = [decoder.start(Request(LONG, Sampling(), 2)) for _ in range(2)]
        assert len(errors) == 2 and len(runs) == 2


def test_waiting_for_nobody_is_caught(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_is_coming", lambda *_: False)
    widths = list[int]()
    with opened(pair, parallel=4) as decoder:
        list(write_all(decoder, of_seeds(LONG, 4), lambda runs: widths.append(len(runs))))
    assert widths[0] == 4


def _fail() -> None:
    raise ZeroDivisionError
