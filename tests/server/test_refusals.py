"""What is not served, and how a client is told: OpenAI's form, the status that fits, and nothing left behind."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reciting import before_steps, failing_reads
from served import GREEDY, HELLO, MODEL_ID, Served, _afresh, serving  # noqa: F401
from waiting import until

from offload.engine.text_stream import TextStream
from offload.errors import HostFault, UserError
from offload.sampling_options import Sampling
from offload.server.app import create_app
from offload.server.core.body import parse
from offload.server.core.refusals import Refusal
from offload.server.http_server import HttpServer
from offload.server.listening import bind
from offload.server.openai.bodies import ChatBody
from offload.server.settings import ServerSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = "sesame"


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[Served]:
    with serving(talker) as server:
        yield server


@pytest.fixture(scope="module")
def locked(talker: Path) -> Iterator[Served]:
    with serving(talker, api_keys=("another", KEY), max_body_bytes=1000) as server:
        yield server


def ask(served: Served, path: str, body: Any, method: str = "POST", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, served.address + path, content=content, headers=sent, timeout=60)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in an answer, proved to have OpenAI's form."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


CHAT_BODY = {"messages": HELLO, "max_tokens": 2}
LONG: Any = {CHAT: {"messages": [{"role": "user", "content": "x" * 9999}]}, TEXT: {"prompt": "x" * 9999}}
USUAL: Any = {CHAT: CHAT_BODY, TEXT: {"prompt": "x", "max_tokens": 2}}
BAD: dict[str, tuple[str, Any, str]] = {
    "a bias beyond the vocabulary": (CHAT, {"logit_bias": {"1000000": 1}}, "logit_bias"),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, "content of text"),
    "an image": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images and sound are not read",
    ),
    "a tree": (CHAT, {"offload": {"tree": "oak"}}, "tree"),
    "a rule": (CHAT, {"offload": {"rule": "golden"}}, "rule"),
    "half a character": (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "JSON"),
    "long messages": (CHAT, LONG[CHAT], "shorten the messages or lower `max_tokens`"),
    "a long prompt": (TEXT, LONG[TEXT], "shorten the prompt or lower `max_tokens`"),
    "a gap in no model of it": (TEXT, {"suffix": "x"}, "no tokens that stand around a gap: leave `suffix` out"),
    "a gap in ids": (TEXT, {"suffix": "x", "prompt": [5]}, "`suffix` goes with a prompt of text alone"),
    "a gap and its prompt": (TEXT, {"suffix": "x", "echo": True}, "Invalid value for 'suffix'"),
    "best_of": (TEXT, {"best_of": 3}, "'best_of' must be equal to 'n'"),
    "a stranger's field": (CHAT, {"\x1b[31m": 1}, "Unrecognized request argument supplied: \x1b[31m"),
    "too many stops": (CHAT, {"stop": ["a"] * 17}, "Invalid value for 'stop': it must have at most 16 items"),
    "a stop that is none": (CHAT, {"stop": ["a", 5]}, "Invalid value for 'stop[1]': it must be a valid string, got 5"),
    "a bias said twice": (CHAT, {"logit_bias": {"5": 1, "05": 2}}, "a token of `logit_bias` must have one number"),
    "no prompt": (TEXT, {"prompt": None}, "prompt"),
    "an empty prompt": (TEXT, {"prompt": ""}, "the prompt is empty"),
    "empty prompts": (TEXT, {"prompt": []}, "it is empty"),
    "an id too large": (TEXT, {"prompt": [1, 1 << 40]}, "prompt ids must lie in [0, 199)"),
    "mixed prompts": (TEXT, {"prompt": [1, "x"]}, "prompt"),
}  # fmt: skip
BAD_BODIES = {
    "no JSON": (b"{", "must be JSON in UTF-8"),
    "bad UTF-8": (b'{"messages": "\xff\xfe"}', "must be JSON in UTF-8"),
    "a list": (b"[]", "the body: it must be an object"),
    "nothing": (b"", "must be JSON"),
    "too deep": (b"[" * 100_000, "must be JSON"),
    "no number": (b'{"temperature": NaN}', "temperature"),
    "a long number": (b'{"seed": ' + b"9" * 5000 + b"}", ""),
}
BAD |= {f"{name} to {path}": (path, *value) for name, value in BAD_BODIES.items() for path in (CHAT, TEXT)}


@pytest.mark.parametrize(("path", "change", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(served: Served, path: str, change: Any, message: str) -> None:
    """Most bad values are rows of `goldens/errors.json`."""
    error = error_of(ask(served, path, change if isinstance(change, bytes) else USUAL[path] | change), 400)
    assert message in error["message"] and error["type"] == "invalid_request_error" and served.is_idle()
    if change in LONG.values():
        assert (error["param"], error["code"]) == (next(iter(change)), "context_length_exceeded")


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def _choice(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _read(**change: Any) -> ChatBody:
    return parse(ChatBody, json.dumps(CHAT_BODY | change).encode())


def test_numbers_that_other_servers_take_for_off() -> None:
    for change, value in (({"top_k": -1}, 0), ({"top_k": 3}, 3), ({"top_p": 0}, 1e-12), ({"top_p": 0.0}, 1e-12)):
        (request,) = _read(temperature=1.0, **change).requests(Sampling())
        assert getattr(request.sampling, next(iter(change))) == value
    for change in ({"top_k": -2}, {"top_p": -0.1}):
        with pytest.raises((UserError, Refusal), match="top_"):
            _read(temperature=1.0, **change).requests(Sampling())


def test_allowed_tools_narrow_what_is_offered() -> None:
    tools = [_tool("add"), _tool("now")]
    for mode in ("auto", "required"):
        body = _read(tools=tools, tool_choice=_choice(mode, "now"))
        toolbox = body.toolbox()
        assert [tool["function"]["name"] for tool in toolbox.described] == [*toolbox.offered] == ["now"]
        assert toolbox.is_forced == (mode == "required")
    for choice in (_choice("auto", "other"), _choice("always", "now"), {"type": "allowed_tools"}):
        with pytest.raises(Refusal, match="tool_choice"):
            _read(tools=tools, tool_choice=choice).toolbox()
    with pytest.raises(Refusal, match="supplied: functions: give 'tools' instead"):
        _read(functions=[{"name": "add"}])


def test_what_changes_nothing_is_named_in_a_header(served: Served) -> None:
    response = ask(served, CHAT, CHAT_BODY | {"user": "me", "store": False, "service_tier": None})
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "store, user")
    assert "x-ignored-fields" not in ask(served, CHAT, CHAT_BODY).headers


def test_other_models_and_routes(served: Served) -> None:
    assert error_of(ask(served, CHAT, CHAT_BODY | {"model": "gpt-4"}), 404)["code"] == "model_not_found"
    assert ask(served, CHAT, CHAT_BODY | {"model": ""}).status_code == 200
    line = error_of(ask(served, "/v1/images", {}), 404)["message"]
    assert "Unknown request URL: POST /v1/images: this server has /v1/" in line
    assert CHAT in line and "/health" in line
    refused = ask(served, CHAT, b"", "GET")
    assert error_of(refused, 405)["message"].endswith(": POST is")
    assert refused.headers["allow"] == "POST"
    error_of(ask(served, CHAT + "/", CHAT_BODY), 404)
    line = error_of(ask(served, CHAT, CHAT_BODY, content_type="text/plain"), 415)["message"]
    assert "-H 'Content-Type: application/json'" in line and "from your browser" in line, "what to do, and why"


@pytest.mark.parametrize(
    ("aliases", "status"), [((), 404), (("gpt-3.5", "gpt-4"), 200), (("*",), 200), (("gpt-4-mini",), 404)]
)
def test_a_model_may_have_other_names(aliases: tuple[str, ...], status: int) -> None:
    """Without an engine a request that is let in is told that the model loads."""
    app = create_app(None, ServerSettings(model_id=MODEL_ID, aliases=aliases))
    with HttpServer(app, bind("127.0.0.1", 0)) as loading:
        for name, wanted in (("gpt-4", status), (MODEL_ID, 200)):
            assert httpx.get(f"{loading.address}/v1/models/{name}").status_code == wanted


HOSTS = {
    **dict.fromkeys(("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[::2]"), 403),
    **dict.fromkeys(("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8080"), 200),
}


@pytest.mark.parametrize("host", HOSTS)
def test_another_name_for_this_machine_is_a_strangers(served: Served, host: str) -> None:
    answer = httpx.get(f"{served.address}/health", headers={"host": host})
    if HOSTS[host] == 200:
        assert answer.json() == {"status": "ok"}
    else:
        assert error_of(answer, 403)
        assert error_of(ask(served, CHAT, CHAT_BODY, host=host), 403)["code"] == "wrong_host"


def test_no_page_of_anothers_may_read(served: Served) -> None:
    answered = ask(served, CHAT, CHAT_BODY, origin="https://evil.example")
    asked = ask(served, CHAT, b"", "OPTIONS", origin="https://evil.example", access_control_request_method="POST")
    assert asked.status_code == 405
    assert not [name for got in (answered, asked) for name in got.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "given", [{}, {"authorization": "Bearer sesam"}, {"authorization": "Bearer"}, {"authorization": KEY},
              {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer \xe4"}],
)  # fmt: skip
def test_a_wrong_key(locked: Served, given: dict[str, str]) -> None:
    sent = {name: value.encode("latin-1") for name, value in given.items()}
    for path in ("/v1/models", "/metrics", f"/v1/models?api_key={KEY}", "/nowhere"):
        refused = httpx.get(locked.address + path, headers=sent)
        assert error_of(refused, 401)["type"] == "authentication_error"
        assert refused.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{locked.address}/health").status_code == 200
    for key in ("another", KEY):
        assert locked.client(key).models.list().data, "the right ones"
    with pytest.raises(openai.AuthenticationError):
        locked.client("open").models.list()


def test_a_body_beyond_the_limit(locked: Served) -> None:
    messages: Any = [{"role": "user", "content": "x" * 1000}]
    with pytest.raises(openai.APIStatusError, match="larger than 1000 bytes") as caught:
        locked.client(KEY).chat.completions.create(model=MODEL_ID, messages=messages)
    assert caught.value.status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    error_of(httpx.post(locked.address + CHAT, content=chunks(), headers=headers), 413)


def test_a_full_queue(looper: Path) -> None:
    with serving(looper, max_waiting=1) as served, before_steps(lambda: time.sleep(0.02)):
        client = served.client()
        asked: Any = {"model": MODEL_ID, "prompt": "Say:", "max_tokens": 200, "stream": True, **GREEDY}
        streams = [client.completions.create(**asked), client.completions.create(**asked)]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**asked)
        assert caught.value.code == "queue_full"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        until(lambda: served.engine.figures().num_active == 1)
        with pytest.raises(openai.RateLimitError):  # one has room, two have not: neither is left behind
            client.completions.create(**asked | {"n": 2, "stream": False})
        assert served.engine.figures().num_waiting == 1
        for stream in streams:
            stream.close()
        until(served.is_idle)


def test_a_disk_that_fails(looper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told by its kind, and the log names the file: where models lie is not a client's business."""
    with serving(looper) as served:
        asked = {"prompt": "Say:", "max_tokens": 100, **GREEDY}
        with failing_reads(4):
            whole = ask(served, TEXT, asked)
        assert error_of(whole, 500)["code"] == "run_failed"
        with failing_reads(4):
            stream = ask(served, TEXT, asked | {"stream": True}).text
        lines = stream.split("\n\n")
        assert "run_failed" in lines[-2], "the stream says so and ends"
        assert not any("[DONE]" in line for line in lines)
        assert not any(word in whole.text + stream for word in (str(looper), "safetensors", "Errno"))
        assert ask(served, TEXT, asked).status_code == 200
    assert "offload: a request failed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (ZeroDivisionError("what the client has sent: a secret"), "ZeroDivisionError at"),
        (HostFault("the model's tokenizer failed (at a secret): download it again"), "failed: download it again"),
    ],
    ids=["a program's", "a model's"],
)
def test_a_fault_of_ours_tells_nothing_to_strangers(
    error: Exception, logged: str, talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    with serving(talker) as served:
        monkeypatch.setattr(TextStream, "push", fail)
        assert "secret" not in json.dumps(error_of(ask(served, CHAT, CHAT_BODY), 500))
    line = capsys.readouterr().err
    assert logged in line and "fail" in line
    assert "secret" not in line


def test_while_the_model_loads_and_while_the_server_closes(talker: Path) -> None:
    app = create_app(None, ServerSettings(model_id=MODEL_ID))
    with HttpServer(app, bind("127.0.0.1", 0)) as loading:
        response = httpx.get(f"{loading.address}/health")
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        sent = httpx.post(loading.address + CHAT, json=CHAT_BODY)
        assert error_of(sent, 503)["code"] == "loading"
        assert httpx.get(f"{loading.address}/v1/models").status_code == 200
    with serving(talker) as served:
        served.engine.close()
        assert httpx.get(f"{served.address}/health").json() == {"status": "closing"}
        assert error_of(ask(served, CHAT, CHAT_BODY), 503)["code"] == "closing"
