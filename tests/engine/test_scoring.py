"""How likely texts are: many in one pass, each as it is alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, build, save

import offload
from offload.engine import scoring
from offload.engine.decoder import Decoder
from offload.errors import UserError

BEGINNING = list(range(20, 60))
TEXTS = [
    ([*BEGINNING, 3, 4], 40), ([*BEGINNING, 5], 40), ([*BEGINNING[:20], 9, 8, 7], 21), ([7, 8], 1), ([7, 8, 9, 10], 2),
    (list(range(1, 150)), 1), ([*BEGINNING, 3, 4], 41), ([7, 8], 2),
]  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "mistral-sliding", "gemma2"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    model = build(FAMILIES[request.param]())
    return request.param, save(model, tmp_path_factory.mktemp("target"))


def opened(target: Path, **options: object) -> Decoder:
    settings = {"ram": "512MiB", "dtype": "float32", "context": 200, "profile": "none", "threads": 1, "tree": "none"}
    return offload.load(target, **{**settings, **options})  # type: ignore[arg-type]


def wanted_of(family: str) -> list[tuple[float, bool]]:
    model, scored = build(FAMILIES[family]()).eval(), []
    for tokens, first in TEXTS:
        with torch.no_grad():
            logits_TV = model(torch.tensor([tokens])).logits[0].float()
        rows = [(logits_TV[at - 1].log_softmax(0), tokens[at]) for at in range(first, len(tokens))]
        best = all(int(row_V.argmax()) == token for row_V, token in rows)
        scored.append((sum(float(row_V[token]) for row_V, token in rows), best))
    return scored


def scored(decoder: Decoder, texts: Any, max_rows: int) -> tuple[scoring.Scorer, list[scoring.TextScore]]:
    scorer = scoring.Scorer(decoder.target, None, max_rows, [scoring.ScoreRequest(*text) for text in texts])
    decoder._pool.acquire_empty(scorer)
    while scorer.step():
        pass
    decoder.release(scorer)
    return scorer, scorer.scores()


def test_texts_are_as_likely_as_each_by_itself(target: tuple[str, Path]) -> None:
    family, directory = target
    with opened(directory, parallel=2) as decoder:
        scores, num_passes = decoder.score_texts(TEXTS), decoder.num_score_passes
        again = decoder.score_texts(TEXTS[::-1])[::-1]
        generated = decoder.generate([7, 8], max_new_tokens=3)
        greedy = decoder.score_texts([([7, 8, *generated.token_ids], 2)])[0]
    for score, other, (logprob, is_greedy) in zip(scores, again, wanted_of(family), strict=True):
        assert score == other and score.is_greedy == is_greedy
        assert score.logprob == pytest.approx(logprob, abs=1e-4)
    assert num_passes == 1 and [score.num_tokens for score in scores] == [2, 1, 2, 1, 2, 148, 1, 0]
    assert greedy.is_greedy and greedy.num_tokens == 3


def test_passes_are_no_larger_than_planned(target: tuple[str, Path]) -> None:
    with opened(target[1]) as decoder:
        scores = decoder.score_texts(TEXTS)
        scorer, small = scored(decoder, TEXTS, 30)
    assert scorer.num_passes == 8, "148 rows by 30, 40 of three texts that end apart, and what is short together"
    for entry, other in zip(scores, small, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4) and entry[1:] == other[1:]


def test_tokens_are_told_as_if_each_text_were_alone(target: tuple[str, Path]) -> None:
    """Also those of texts that are longer than a pass, and share what they begin with."""
    beginning = [1 + number % 90 for number in range(100)]
    texts = [(beginning + end, 1, 2) for end in ([3, 4], [5], [], [3, 4, 7], [6] * 60)] + [([7, 8], 1, 2), ([9], 1, 2)]
    texts.append((beginning[:60] + [8] * 50, 1, 2))

    def told_of(decoder: Decoder, texts: Any, max_rows: int) -> tuple[int, list[scoring.PromptScore]]:
        scorer, scores = scored(decoder, texts, max_rows)
        assert [score.num_tokens for score in scores] == [len(text[0]) for text in texts], "and what is next"
        return scorer.num_passes, scorer.prompt_scores()

    with opened(target[1]) as decoder:
        num_alone = 0
        num_passes, result = told_of(decoder, texts, 40)
        for text, got in zip(texts, result, strict=True):
            num_own, (alone,) = told_of(decoder, [text], 40)
            num_alone += num_own
            assert [token.token for token in got.tokens] == text[0][1:]
            for token, other in zip([*got.tokens, got.likeliest], [*alone.tokens, alone.likeliest], strict=True):
                assert token.token == other.token and token.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [like for like, _ in token.top] == [like for like, _ in other.top]
            assert got.likeliest.token == decoder.generate(list(text[0]), max_new_tokens=1).token_ids[0]
    assert num_passes <= 8 and num_alone == 21, (
        "two beginnings, four ends of a beginning, a long end, and what is short"
    )


def test_many_ends_of_a_long_beginning_have_room(target: tuple[str, Path]) -> None:
    """Together they are longer than the context, which is all that a place has beside others."""
    beginning = [1 + number % 90 for number in range(190)]
    texts = [([*beginning, number, number, 5], 190) for number in range(1, 90)]
    with opened(target[1], parallel=2) as decoder:
        scorer, scores = scored(decoder, texts, 150)
        alone = decoder.score_texts(texts[40:41])
    assert (
        2 < scorer.num_passes < 25
        and scores[40].logprob == pytest.approx(alone[0].logprob, abs=1e-4)
        and len({*scores}) > 80
    )


@pytest.mark.parametrize(("text", "said"), [
    (([7, 8], 0), "behind its first"), (([7] * 202, 1), "into the context of 200"), (([7, 999], 1), "must lie in"),
])  # fmt: skip
def test_texts_that_cannot_be_scored(text: tuple[list[int], int], said: str, target: tuple[str, Path]) -> None:
    with opened(target[1]) as decoder, pytest.raises(offload.UserError, match=said):
        decoder.score_texts([text])


@pytest.mark.parametrize("wrong", [None, 5, "ab", [5], [[]], [([1, 2], "x")], [([1, 2], 1.5)], [([1, 2], 1, 1)]])
def test_what_are_no_texts_is_refused(wrong: object) -> None:
    with pytest.raises(UserError, match="texts must be pairs of token ids and a number"):
        scoring.wanted_of(wrong)
