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


def opened(folder: Path, **more: Any) -> Decoder:
    how: dict[str, Any] = {"ram": "512MiB", "context": 256, "threads": 1, "profile": "none", "dtype": "float32"}
    return offload.load(folder, folder, tree="8x3", **how | more)


@pytest.fixture(scope="module", params=[1, 3])
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(opened(folder, parallel=request.param)) as found:
        yield found


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[Any]]:
    """The Python API's scores, token by token: of each beginning how likely its last token is."""
    with opened(folder) as decoder:
        ids = [decoder.encode(text, raw=True) for text in TEXTS]
        scores = iter(decoder.score_texts([(one[: end + 1], end) for one in ids for end in range(1, len(one))]))
        return [[None] + [next(scores).logprob for _ in one[1:]] for one in ids]


def complete(served: Served, prompt: Any, **more: Any) -> Any:
    asked = {"model": MODEL_ID, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, **GREEDY, **more}
    return served.client().completions.create(**asked)


def are_close(told: Any, wanted: list[Any]) -> bool:
    return bool(told[0] is None and told[1:] == pytest.approx(wanted[1:], abs=TOLERANCE))


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_prompts_are_as_likely_as_the_python_api_says(served: Served, wanted: list[list[Any]], kind: str) -> None:
    ids = [served.decoder.encode(text, raw=True) for text in TEXTS]
    done = complete(served, TEXTS if kind == "text" else ids)
    assert [choice.text for choice in done.choices] == TEXTS
    assert done.usage.prompt_tokens == sum(map(len, ids)) and done.usage.completion_tokens == 0
    for choice, tokens, numbers in zip(done.choices, ids, wanted, strict=True):
        told = choice.logprobs
        assert are_close(told.token_logprobs, numbers) and choice.finish_reason == "length"
        assert told.tokens == [served.decoder.tokenizer.decode([token]) for token in tokens]
        ends = [offset + len(token) for offset, token in zip(told.text_offset, told.tokens, strict=True)]
        assert told.text_offset == [0, *ends[:-1]] and ends[-1] == len(choice.text)
        assert told.top_logprobs[0] is None and all(len(top) == 1 for top in told.top_logprobs[1:])
        pairs = zip(told.top_logprobs[1:], told.token_logprobs[1:], strict=True)
        assert all(max(top.values()) >= own for top, own in pairs)
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
    for choice, text, own in zip(done.choices, TEXTS, plain.choices, strict=True):
        assert choice.text == text + own.text and choice.logprobs.tokens[-1:] == own.logprobs.tokens
        assert choice.logprobs.token_logprobs[-1] == pytest.approx(own.logprobs.token_logprobs[0], abs=TOLERANCE)
        assert choice.logprobs.top_logprobs[-1].keys() == own.logprobs.top_logprobs[0].keys()
        assert len(choice.logprobs.tokens) == 1 + len(served.decoder.encode(text, raw=True))


@pytest.mark.parametrize(
    "more", [{}, {"stream": True}, {"n": 2, "temperature": 5.0, "seed": 3}, {"stream": True, "logprobs": None}]
)
def test_a_text_behind_its_prompt_is_the_text_without_it(served: Served, more: dict[str, Any]) -> None:
    asked = {"prompt": TEXTS[:2], "max_tokens": 9, "logprobs": 3, **GREEDY, **more, "model": MODEL_ID}
    plain = gathered(served.client().completions.create(**asked))
    assert len(plain) == 2 * more.get("n", 1)
    for index, (text, told) in gathered(complete(served, **asked)).items():
        prompt = TEXTS[index // more.get("n", 1)]
        assert text == prompt + plain[index][0]
        num_prompt = len(prompt) if told else 0  # a byte is a token
        assert told[num_prompt:] == plain[index][1]
        assert "".join(token for token, _ in told[:num_prompt]) == prompt[:num_prompt]


def gathered(answer: Any) -> dict[int, tuple[str, list[tuple[str, float]]]]:
    """By choice, its text, and its tokens with how likely they are, of a stream as well."""
    found: dict[int, tuple[str, list[tuple[str, float]]]] = {}
    for chunk in [answer] if hasattr(answer, "choices") else answer:
        for choice in chunk.choices:
            text, told = found.get(choice.index, ("", []))
            if choice.logprobs is not None:
                numbers = [number and round(number, 3) for number in choice.logprobs.token_logprobs]
                told = [*told, *zip(choice.logprobs.tokens, numbers, strict=True)]
            found[choice.index] = text + choice.text, told
    return found


def test_the_token_that_ends_a_text_counts(tmp_path: Path) -> None:
    """lm-eval leaves the last one out, whatever it is."""
    with serving(save_reciter(tmp_path, (":", "!"), ends=True)) as served:
        (choice,) = complete(served, "Say!", max_tokens=1).choices
        (plain,) = complete(served, "Say!", max_tokens=1, echo=False).choices
    assert (choice.text, choice.finish_reason, choice.logprobs.tokens[-1]) == ("Say!", "stop", "</s>")
    assert len(choice.logprobs.token_logprobs) == len("Say!") + 1 and plain.logprobs.tokens == []


def test_what_has_no_room_is_refused_and_what_fails_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(prompt: Any, **more: Any) -> tuple[int, str]:
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, **more}
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
        found = [score.result(PATIENCE_S).choices[0] for score in scores]
        assert written.result(PATIENCE_S).choices[0].text == alone
    assert served.engine.decoder.num_score_passes - before <= 2
    for choice, numbers in zip(found, wanted, strict=True):
        assert are_close(choice.logprobs.token_logprobs, numbers)
    until(served.is_idle)
