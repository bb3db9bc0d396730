"""OpenAI's own client, curl and Prometheus against a real server: what is asked for is what comes, to the letter."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reciting import NUM_SAID, SAID, TEMPLATE
from served import GREEDY, HELLO, MODEL_ID, Served, _afresh, serving  # noqa: F401
from waiting import PATIENCE_S

from offload.engine import request
from offload.engine.request import Request
from offload.sampling_options import Sampling


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[Served]:
    with serving(talker) as server:
        yield server


@pytest.fixture(scope="module")
def endless(looper: Path) -> Iterator[Served]:
    with serving(looper) as server:
        yield server


def test_chat(served: Served) -> None:
    (model,) = served.client().models.list()
    assert model.id == served.client().models.retrieve(MODEL_ID).id == MODEL_ID
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("gpt-4")
    done = served.client().chat.completions.create(model=MODEL_ID, messages=HELLO, **GREEDY)
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert done.usage is not None
    num_prompt = len(served.decoder.encode(HELLO))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (num_prompt, NUM_SAID + 1)
    assert done.usage.total_tokens == num_prompt + NUM_SAID + 1


@pytest.mark.parametrize("has_usage", [False, True])
def test_stream(served: Served, has_usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if has_usage else {}
    chunks = [
        *served.client().chat.completions.create(model=MODEL_ID, messages=HELLO, stream=True, **GREEDY, **options)
    ]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == SAID
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert [usage.completion_tokens for usage in usages] == ([NUM_SAID + 1] if has_usage else [])
    assert len(chunks[-1].choices) == (0 if has_usage else 1)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"max_tokens": 3}, "length"),
        ({"max_completion_tokens": 3}, "length"),
        ({"stop": "ö"}, "stop"),
        ({"stop": ["never said", "ö"]}, "stop"),
    ],
)
def test_where_it_ends(served: Served, asked: Any, reason: str) -> None:
    asked = {"model": MODEL_ID, "messages": HELLO, **asked, **GREEDY}
    (choice,) = served.client().chat.completions.create(**asked).choices
    assert (choice.message.content, choice.finish_reason) == (" Hello w", reason)
    chunks = served.client().chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " Hello w"


def test_completions(endless: Served) -> None:
    asked: Any = {"model": MODEL_ID, "max_tokens": 12, **GREEDY}
    done = endless.client().completions.create(prompt=["Say:", "Now say:"], n=2, **asked)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in done.choices} == {SAID + ":"}
    ids = endless.decoder.encode("Say:", raw=True)
    assert endless.client().completions.create(prompt=ids, **asked).choices[0].text == SAID + ":"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len("Say:") + len("Now say:"), 48)
    pieces = endless.client().completions.create(prompt="Say:", stream=True, **asked)
    assert "".join(choice.text for chunk in pieces for choice in chunk.choices) == SAID + ":"
    done = endless.client().completions.create(model=MODEL_ID, prompt="Say:", **GREEDY)
    assert done.usage is not None and done.usage.completion_tokens == 16, "they are short unless told"


def test_a_chat_without_a_limit_may_fill_the_context(endless: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless.decoder.tokenizer, "chat_template", TEMPLATE)
    done = endless.client().chat.completions.create(model=MODEL_ID, messages=HELLO, **GREEDY)
    assert done.choices[0].finish_reason == "length" and done.usage is not None
    assert done.usage.total_tokens == endless.decoder.plan.context


def test_a_prompt_is_read_once(endless: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of its choices, from the body to the pass."""
    read = list[object]()

    def encode(tokenizer: Any, prompt: Any, *rest: Any, **options: Any) -> list[int]:
        read.append(prompt)
        return once(tokenizer, prompt, *rest, **options)

    once = request.encode
    monkeypatch.setattr(request, "encode", encode)
    client = endless.client()
    client.completions.create(model=MODEL_ID, prompt=["Say:", "Now say:"], n=2, max_tokens=2)
    assert read == ["Say:", "Now say:"]


def test_choices_and_seeds(endless: Served) -> None:
    """Each choice is what its own seed draws, alone and beside others, whole and in pieces."""
    asked: Any = {"model": MODEL_ID, "prompt": "Say:", "max_tokens": 12, "temperature": 9.0, "seed": 5}
    wanted = [endless.client().completions.create(**asked | {"seed": seed}).choices[0].text for seed in (5, 6, 7)]
    assert len(set(wanted)) == 3
    without = {**asked, "seed": None}
    drawn = {endless.client().completions.create(**without).choices[0].text for _ in range(3)}
    assert len(drawn) == 3, "without a seed any is taken"
    assert [choice.text for choice in endless.client().completions.create(**asked, n=3).choices] == wanted
    pieces = ["", "", ""]
    for chunk in endless.client().completions.create(**asked, n=3, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == wanted


def test_what_a_request_leaves_out_is_the_servers(looper: Path) -> None:
    with serving(looper, sampling=Sampling(temperature=9.0, top_k=1)) as served:
        asked: Any = {"model": MODEL_ID, "prompt": "Say:", "max_tokens": 12}
        assert served.client().completions.create(**asked).choices[0].text == SAID + ":", (
            "of one token there is no choice"
        )
        assert served.client().completions.create(**asked, extra_body={"top_k": 0}).choices[0].text != SAID + ":"


def test_biases_and_penalties(endless: Served) -> None:
    """Ids are those of a run of its own with the same settings, and other than without."""
    asked: Any = {"model": MODEL_ID, "prompt": "Say:", "max_tokens": 20, **GREEDY}
    (hel,) = {token for token in range(199) if endless.decoder.tokenizer.decode([token]) == " Hel"}
    for given in (
        {"logit_bias": {str(hel): -100}}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
        {"extra_body": {"repeat_penalty": 9.0}}, {"extra_body": {"min_p": 0.9}},
    ):  # fmt: skip
        extra: Any = given
        text = endless.client().completions.create(**asked, **extra).choices[0].text
        changes: Any = {"logit_bias": {hel: -100.0}} if "logit_bias" in given else given.get("extra_body", given)
        wanted = endless.engine.submit(Request("Say:", Sampling(**changes), 20, raw=True)).result().text
        assert text == wanted
        if "logit_bias" in given:
            assert not text.startswith(" Hel")


def test_logprobs(served: Served) -> None:
    """All tokens but the end's have them, with bytes that put together are the text; streamed they are the same."""
    asked: Any = {"model": MODEL_ID, "messages": HELLO, "logprobs": True, "top_logprobs": 2, **GREEDY}
    logprobs = served.client().chat.completions.create(**asked).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or ()).decode() == SAID
    assert len(logprobs.content) == NUM_SAID
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
    chunks = served.client().chat.completions.create(**asked, stream=True)
    results = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry for each in results for entry in each.content or ()] == logprobs.content


def test_logprobs_of_completions(endless: Served) -> None:
    asked: Any = {"model": MODEL_ID, "prompt": "Say:", "max_tokens": 4, "logprobs": 3, **GREEDY}
    choice = endless.client().completions.create(**asked).choices[0]
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text == " Hello wör"
    assert choice.logprobs.text_offset == [0, 4, 6, 8]
    assert [len(top) for top in choice.logprobs.top_logprobs or ()] == [3] * 4
    assert all(isinstance(number, float) for number in choice.logprobs.token_logprobs or ())


def test_a_stream_may_tell_of_passes(endless: Served) -> None:
    asked: Any = {"model": MODEL_ID, "prompt": "Say:", "max_tokens": 12, "stream": True, **GREEDY}
    figures = [getattr(chunk, "offload", None) for chunk in endless.client().completions.create(**asked)]
    assert not any(figures)
    extra: Any = {"offload": {"passes": True, "tree": "chain:2"}}
    figures = [
        getattr(part, "offload", None) for part in endless.client().completions.create(**asked, extra_body=extra)
    ]
    passes = [item for item in figures if item]
    assert len(passes) > 2
    assert passes[-1]["parents"] == [-1, 0, 1]
    assert all(len(step["tokens"]) == len(step["parents"]) for step in passes)
    assert all(step["num_bytes"] > 0 for step in passes)


def run(*command: str, **environment: str) -> str:
    variables = {**os.environ, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")


def samples(text: str) -> dict[str, float]:
    samples_seen = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge")
        for sample in family.samples:
            samples_seen[sample.name + "".join(f"/{value}" for value in sample.labels.values())] = sample.value
    return samples_seen


def test_figures_are_the_engines(looper: Path) -> None:
    with serving(looper) as served:
        served.client().completions.create(model=MODEL_ID, prompt="Say:", max_tokens=12, **GREEDY)
        response = httpx.get(f"{served.address}/metrics")
        figures = served.engine.figures()
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    got = samples(response.text)
    assert got["offload_tokens_total"] == figures.num_tokens == 12
    assert got["offload_prompt_tokens_total"] == len("Say:")
    assert got["offload_passes_total"] == figures.num_passes > 0
    assert got["offload_link_bytes_total"] == figures.moved.num_bytes > 0
    assert got["offload_tokens_per_pass"] == pytest.approx(12 / figures.num_passes)
    assert got["offload_link_bytes_per_second"] == pytest.approx(figures.moved.num_bytes / figures.pass_s)
    assert got["offload_requests_total/done"] == 1
    assert got["offload_requests_total/queue_full"] == 0 and "offload_requests_total/refused" not in got
    assert got["offload_requests_active"] == got["offload_requests_waiting"] == 0
