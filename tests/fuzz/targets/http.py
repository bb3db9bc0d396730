"""Requests of strangers, against the app in process: whatever is sent, the answer is one of the protocol's.

Bodies are damaged as JSON and as bytes, headers and paths as a socket would hand them on; that of a server's own
failure (500), an answer that is no JSON, and one that never comes are findings.
"""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from case import Target
from damage import BYTES, STRINGS, json_value, only, other, text
from model_files import save_files
from reciting import TEMPLATE

import offload
from offload.engine.service import Engine
from offload.errors import UserError
from offload.server.app import create_app
from offload.server.settings import ServerSettings

_CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Count"}]}], "max_tokens": 2, "temperature": 0.5,
    "top_p": 0.9, "n": 1, "stop": ["x"], "seed": 3, "stream": False, "logprobs": True, "top_logprobs": 2,
    "presence_penalty": 0.1, "logit_bias": {"20": -1}, "user": "me", "response_format": {"type": "text"},
    "offload": {"tree": "none"}}  # fmt: skip
_STREAM = {**_CHAT, "stream": True, "stream_options": {"include_usage": True}, "tools": [{"type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]}  # fmt: skip
_TEXT = {"model": "model", "prompt": ["Count", "a"], "max_tokens": 2, "echo": False, "logprobs": 1, "suffix": None,
    "best_of": 1, "stream": False, "temperature": 0.0, "frequency_penalty": 0.1}  # fmt: skip
_HEADERS = [["host", "localhost"], ["content-type", "application/json"], ["authorization", "Bearer key"],
    ["content-length", ""], ["accept", "*/*"], ["origin", "http://localhost"]]  # fmt: skip
_SCHEMAS = ({"type": "json_object"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": True}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}, {"type": "grammar", "x": 1},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 10**9}}})  # fmt: skip
_WAIT_S = 20.0


def _save(folder: Path, path: str, body: Any) -> None:
    save_files(folder / "model", template=TEMPLATE)
    (folder / "body.json").write_text(json.dumps(body))
    (folder / "head.json").write_text(json.dumps({"method": "POST", "path": path, "query": "", "headers": _HEADERS}))


def _ask(folder: Path) -> str:
    """The answer's status and beginning. Raises `UserError` for a refusal."""
    head, body = json.loads((folder / "head.json").read_text()), (folder / "body.json").read_bytes()
    with (
        offload.load(folder / "model", ram="512MiB", context=64, threads=1, tree="none", profile="none") as decoder,
        Engine(decoder, max_waiting=4) as engine,
    ):
        app = create_app(engine, ServerSettings(model_id="model", api_keys=("key",), body_s=2.0))
        status, kind, answer = asyncio.run(asyncio.wait_for(_answered(app, head, body), _WAIT_S))
        figures = engine.figures()
    assert (figures.num_active, figures.num_waiting) == (0, 0), "a request is left behind"
    assert status != 500, answer
    if status >= 400:
        raise UserError(f"{status} {json.loads(answer or b'{}')}"[:500])
    _ensure_whole(kind, answer, head)
    return f"{status} {answer[:80]!r}"


def _ensure_whole(kind: str, answer: bytes, head: dict[str, Any]) -> None:
    """JSON, events to their end, or the page and the figures that a GET alone is for."""
    if kind == "text/event-stream":
        events = [event for event in answer.decode().split("\n\n") if not event.startswith(":")]
        assert all(event.startswith("data: ") for event in events[:-1]) and events[-1] == "", answer
        chunks = [json.loads(event[6:]) for event in events[:-2]]
        assert chunks and all(chunk.get("choices") is not None for chunk in chunks), answer
        assert events[-2] == "data: [DONE]", answer
    elif kind == "application/json":
        assert isinstance(json.loads(answer), dict), answer
    else:
        assert str(head["method"]).upper() in ("GET", "HEAD"), f"{kind}: {answer!r}"


async def _answered(app: Any, head: dict[str, Any], body: bytes) -> tuple[int, str, bytes]:
    """Status, type and bytes of what an ASGI server would send for a request that it has parsed."""
    sent, parts = list[dict[str, Any]](), [body[: len(body) // 2], body[len(body) // 2 :]]
    headers = [(_raw(name).lower(), _raw(value or len(body))) for name, value in head["headers"]]
    path = str(head["path"])
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": str(head["method"]).upper(),
        "scheme": "http", "path": path, "raw_path": _raw(path), "query_string": _raw(head["query"]),
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80)}  # fmt: skip
    over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    kind = dict(sent[0]["headers"]).get(b"content-type", b"").decode().partition(";")[0]
    return sent[0]["status"], kind, b"".join(message.get("body", b"") for message in sent)


def _raw(value: Any) -> bytes:
    """As bytes of a header are: no line ends, which a server's parser takes for ends of it."""
    return str(value).encode("latin-1", "replace").replace(b"\n", b"").replace(b"\r", b"")


def _head(path: Path, rng: random.Random) -> str:
    """Method, path, query or a header; the file stays what a server could hand on."""
    head = json.loads(path.read_text())
    key = rng.choice(("method", "path", "query", "headers", "headers", "headers", "headers"))
    if key == "headers":
        at, deed = rng.randrange(len(head["headers"])), rng.choice(("value", "value", "drop", "double", "new", "long"))
        name, value = head["headers"][at]
        if deed == "drop":
            del head["headers"][at]
        elif deed == "new":
            head["headers"].append([rng.choice(("x-y", "cookie", "transfer-encoding", "expect", "range")), "1"])
        else:
            long = {"long": f"{value}{'x' * 70_000}", "double": value}.get(
                deed, rng.choice((*STRINGS, "Bearer", "[::1"))
            )
            head["headers"].append([name, long])
            head["headers"] = (
                head["headers"] if deed == "double" else [*head["headers"][:at], *head["headers"][at + 1 :]]
            )
        done = f"{name} {deed}"
    else:
        usual = {"method": ("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "X"), "query": ("a=b", "%ff", "x" * 9999),
            "path": ("/v1/models/%2e%2e", "/v1/models/../../x", "/health", "/metrics", "//", "/v1/chat/completions/",
            "*", "/\ud800", "/v1/models/" + "a" * 9999)}  # fmt: skip
        head[key] = rng.choice((*usual[key], *STRINGS))
        done = f"{head[key][:40]!r}"
    path.write_text(json.dumps(head))
    return f"{key}: {done}"


def _targets() -> list[Target]:
    results = []
    for name, path, body in (("chat", "/v1/chat/completions", _CHAT), ("stream", "/v1/chat/completions", _STREAM),
            ("text", "/v1/completions", _TEXT)):  # fmt: skip
        formats = other(*(json.dumps({**body, "response_format": schema}) for schema in _SCHEMAS))
        damages = (only(*body), only(*body), json_value, json_value, text, formats, *BYTES[:3])

        def make(folder: Path, path: str = path, body: Any = body) -> None:
            _save(folder, path, body)

        results.append(Target(f"http/{name}", make, {"body.json": damages, "head.json": (_head,)}, _ask))
    return results


TARGETS = _targets()
