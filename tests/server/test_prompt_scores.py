"""How likely prompts are, over a socket: `echo` with `logprobs`, as lm-eval's `local-completions` asks for it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from served import GREEDY, MODEL_ID, Served, _afresh, held_passes, serving  # noqa: F401
from tiny import FAMILIES, build, save, save_reciter, save_tokenizer
from waiting import PATIENCE_S, until

import offload
from offload.engine.decoder import Decoder
from offload.engine.scoring import Scorer
from offload.errors import ReadError
from offload.server.core import routes

TOLERANCE = 1e-4  # of log-probabilities in float32
LONG = "What begins alike shares the rows of its beginning. " * 3
TEXTS = [LONG + "Yes.", LONG + "No, it does not.", "ab", "a", LONG[:60] + "!", LONG + "No, it does."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    save_tokenizer(folder, ["ab", "Yes", " it"])
    return save(build(FAMILIES["llama"]()), folder)


def opened(folder: Path, **options: Any) -> Decoder:
    settings: dict[str, Any] = {"ram": "512MiB", "context": 256, "threads": 1, "profile": "none", "dtype": "float32"}
    return offload.load(folder, folder, tree="8x3", **settings | options)


@pytest.fixture(scope="module", params=[1, 3])
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(opened(folder, parallel=request.param)) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[Any]]:
    """The Python API's scores, token by token: of each beginning how likely its last token is."""
    with opened(folder) as decoder:
        ids = [decoder.encode(text, raw=True) for text in TEXTS]
        scores = iter(
            decoder.score_texts([(tokens[: end + 1], end) for tokens in ids for end in range(1, len(tokens))])
        )
        return [[None] + [next(scores).logprob for _ in tokens[1:]] for tokens in ids]


def complete(served: Served, prompt: Any, **options: Any) -> Any:
    asked = {"model": MODEL_ID, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, **GREEDY, **options}
    return served.client().completions.create(**asked)


def are_close(scores: Any, wanted: list[Any]) -> bool:
    return bool(scores[0] is None and scores[1:] == pytest.approx(wanted[1:], abs=TOLERANCE))


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_prompts_are_as_likely_as_the_python_api_says(served: Served, wanted: list[list[Any]], kind: str) -> None:
    ids = [served.decoder.encode(text, raw=True) for text in TEXTS]
    done = complete(served, TEXTS if kind == "text" else ids)
    assert [choice.text for choice in done.choices] == TEXTS
    assert done.usage.prompt_tokens == sum(map(len, ids)) and done.usage.completion_tokens == 0
    for choice, tokens, numbers in zip(done.choices, ids, wanted, strict=True):
        entry = choice.logprobs
        assert are_close(entry.token_logprobs, numbers) and choice.finish_reason == "length"
        assert entry.tokens == [served.decoder.tokenizer.decode([token]) for token in tokens]
        ends = [offset + len(token) for offset, token in zip(entry.text_offset, entry.tokens, strict=True)]
        assert entry.text_offset == [0, *ends[:-1]] and ends[-1] == len(choice.text)
        assert entry.top_logprobs[0] is None and all(len(top) == 1 for top in entry.top_logprobs[1:])
        pairs = zip(entry.top_logprobs[1:], entry.token_logprobs[1:], strict=True)
        assert all(max(top.values()) >= number for top, number in pairs)
    single = complete(served, TEXTS[0] if kind == "text" else ids[0], logprobs=0)
    assert are_close(single.choices[0].logprobs.token_logprobs, wanted[0])
    assert set(map(str, single.choices[0].logprobs.top_logprobs)) == {"None", "{}"}
    assert served.is_idle()


def test_prompts_share_passes_and_one_token_more_takes_none(served: Served) -> None:
    """It is what greedy decoding would write, by however many passes that takes."""
    plain = served.client().completions.create(model=MODEL_ID, prompt=TEXTS, max_tokens=1, logprobs=2, **GREEDY)
    before = served.engine.figures().num_passes
    done = complete(served, TEXTS, max_tokens=1, logprobs=2)
    assert served.engine.figures().num_passes - before <= 2
    for choice, text, choice_alone in zip(done.choices, TEXTS, plain.choices, strict=True):
        assert choice.text == text + choice_alone.text and choice.logprobs.tokens[-1:] == choice_alone.logprobs.tokens
        assert choice.logprobs.token_logprobs[-1] == pytest.approx(
            choice_alone.logprobs.token_logprobs[0], abs=TOLERANCE
        )
        assert choice.logprobs.top_logprobs[-1].keys() == choice_alone.logprobs.top_logprobs[0].keys()
        assert len(choice.logprobs.tokens) == 1 + len(served.decoder.encode(text, raw=True))


@pytest.mark.parametrize(
    "extra", [{}, {"stream": True}, {"n": 2, "temperature": 5.0, "seed": 3}, {"stream": True, "logprobs": None}]
)
def test_a_text_behind_its_prompt_is_the_text_without_it(served: Served, extra: dict[str, Any]) -> None:
    asked = {"prompt": TEXTS[:2], "max_tokens": 9, "logprobs": 3, **GREEDY, **extra, "model": MODEL_ID}
    plain = gathered(served.client().completions.create(**asked))
    assert len(plain) == 2 * extra.get("n", 1)
    for index, (text, value) in gathered(complete(served, **asked)).items():
        prompt = TEXTS[index // extra.get("n", 1)]
        assert text == prompt + plain[index][0]
        num_prompt = len(prompt) if value else 0  # a byte is a token
        assert value[num_prompt:] == plain[index][1]
        assert "".join(token for token, _ in value[:num_prompt]) == prompt[:num_prompt]


def gathered(answer: Any) -> dict[int, tuple[str, list[tuple[str, float]]]]:
    """By choice, its text, and its tokens with how likely they are, of a stream as well."""
    results: dict[int, tuple[str, list[tuple[str, float]]]] = {}
    for chunk in [answer] if hasattr(answer, "choices") else answer:
        for choice in chunk.choices:
            text, response = results.get(choice.index, ("", []))
            if choice.logprobs is not None:
                numbers = [number and round(number, 3) for number in choice.logprobs.token_logprobs]
                response = [*response, *zip(choice.logprobs.tokens, numbers, strict=True)]
            results[choice.index] = text + choice.text, response
    return results


def test_the_token_that_ends_a_text_counts(tmp_path: Path) -> None:
    """lm-eval leaves the last one out, whatever it is."""
    with serving(save_reciter(tmp_path, (":", "!"), ends=True)) as served:
        (choice,) = complete(served, "Say!", max_tokens=1).choices
        (plain,) = complete(served, "Say!", max_tokens=1, echo=False).choices
    assert (choice.text, choice.finish_reason, choice.logprobs.tokens[-1]) == ("Say!", "stop", "</s>")
    assert len(choice.logprobs.token_logprobs) == len("Say!") + 1 and plain.logprobs.tokens == []


def test_what_has_no_room_is_refused_and_what_fails_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(prompt: Any, **options: Any) -> tuple[int, str]:
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, **options}
        posted = httpx.post(f"{served.address}/v1/completions", json=asked, timeout=PATIENCE_S)
        return posted.status_code, posted.json()["error"]["message"]

    assert refused([5] * 256)[0] == 400 and "maximum context length is 256" in refused([5] * 256)[1]
    monkeypatch.setattr(routes, "_MOST_SCORES", 50)
    code, message = refused([[5] * 20, [6] * 6], max_tokens=0)
    assert code == 400 and "at most 50 log-probabilities of prompts, got 52: ask for fewer 'logprobs'" in message
    monkeypatch.undo()
    with patch.object(Scorer, "step", side_effect=ReadError("the disk")):
        assert refused("ab") == (500, "the run failed, and the server's log says why")
    with patch.object(Scorer, "step", side_effect=ValueError):
        assert refused("ab") == (500, "the server failed, and its log says where")
    assert complete(served, "ab").choices[0].text == "ab" and served.is_idle()


def test_who_waits_is_scored_together_and_who_goes_is_left_out(served: Served, wanted: list[list[Any]]) -> None:
    """Texts that are written meanwhile, and requests that wait in between, are what they are alone."""
    plain = {"model": MODEL_ID, "max_tokens": 20, **GREEDY}
    alone = served.client().completions.create(prompt=TEXTS[4], **plain).choices[0].text
    with ThreadPoolExecutor(8) as pool:
        with held_passes() as begun:
            written = pool.submit(served.client().completions.create, prompt=TEXTS[4], **plain)
            begun.wait(PATIENCE_S)
            scores = [pool.submit(complete, served, text) for text in TEXTS]
            with pytest.raises(httpx.ReadTimeout):
                body = {"prompt": "gone", "echo": True, "logprobs": 1}
                httpx.post(f"{served.address}/v1/completions", json=body, timeout=0.3)
            until(lambda: served.engine.figures().num_waiting == len(TEXTS))
            before = served.engine.decoder.num_score_passes
        results = [score.result(PATIENCE_S).choices[0] for score in scores]
        assert written.result(PATIENCE_S).choices[0].text == alone
    assert served.engine.decoder.num_score_passes - before <= 2
    for choice, numbers in zip(results, wanted, strict=True):
        assert are_close(choice.logprobs.token_logprobs, numbers)
    until(served.is_idle)
