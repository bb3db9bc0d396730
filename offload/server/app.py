"""The routes of the server, its figures for Prometheus, and the chat page.

Routes answer in OpenAI's form, errors included; what they do is the engine's. The app is there
before its engine, so that `/health` can say that the model is loading: until `app.state.engine` is
set, all else is refused with 503.

Invariants: no route waits in the server's own thread for what takes time. The bytes of the page
that are sent are those that were hashed, and it has one style and one script, without an address.
"""

import base64
import hashlib
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anyio import to_thread
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from offload.declaration import Option, listed, options_at
from offload.engine.job import Ticket
from offload.engine.scheduler import EngineFigures
from offload.engine.service import Engine
from offload.errors import RunError
from offload.sampling_options import Sampling
from offload.server.answer import (
    Answer,
    ChatAnswer,
    ClientGone,
    CompletionAnswer,
    EventStream,
    TokenNames,
    arrivals,
)
from offload.server.network import Guard, refusal_response
from offload.server.protocol import (
    AnyBody,
    ChatBody,
    CompletionBody,
    Refusal,
    ServerSettings,
    no_such_model,
    order_chat,
    order_completion,
    parse,
    refusal_of,
    refuse_loading,
)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(figures: EngineFigures) -> str:
    """Return one family of lines for each figure, in Prometheus' text format.

    Rates are of the passes of the last minute, and 0 where there was none.
    """
    moved = figures.moved
    recent = figures.recent
    num_passes = max(1, len(recent))
    per_s = 1 / (sum(one.seconds for one in recent) or float("inf"))
    num_tokens = sum(one.num_tokens for one in recent)
    num_texts = sum(one.num_texts for one in recent)
    recent_bytes = sum(one.moved.num_bytes for one in recent)
    outcomes = {
        "done": figures.num_done,
        "cancelled": figures.num_cancelled,
        "failed": figures.num_failed,
        "queue_full": figures.num_refused,
    }
    lines = list[str]()

    def family(kind: str, name: str, what: str, value: float | Mapping[str, float]) -> None:
        samples = {"": value}
        if isinstance(value, Mapping):
            samples = {f'{{outcome="{outcome}"}}': count for outcome, count in value.items()}
        lines.append(f"# HELP offload_{name} {what}")
        lines.append(f"# TYPE offload_{name} {kind}")
        lines.extend(f"offload_{name}{labels} {one:.10g}" for labels, one in samples.items())

    gauge = partial(family, "gauge")
    counter = partial(family, "counter")
    gauge("requests_active", "texts that are written", figures.num_active)
    gauge("requests_waiting", "requests that wait for a place", figures.num_waiting)
    what = "tokens of prompts that were begun"
    counter("prompt_tokens_total", what, figures.num_prompt_tokens)
    counter("tokens_total", "new tokens", figures.num_tokens)
    counter("passes_total", "passes over the weights", figures.num_passes)
    counter("pass_seconds_total", "time in passes", figures.pass_s)
    counter("link_bytes_total", "bytes of weights that passes have moved", moved.num_bytes)
    counter("link_wait_seconds_total", "time that computing waited for the link", moved.stall_s)
    what = "time that requests waited before they were begun"
    counter("queue_wait_seconds_total", what, figures.waited_s)
    gauge("tokens_per_second", "new tokens per second of passes", num_tokens * per_s)
    gauge("tokens_per_pass", "new tokens of all texts per pass", num_tokens / num_passes)
    gauge("texts_per_pass", "texts that share a pass", num_texts / num_passes)
    gauge("link_bytes_per_second", "bytes moved per second of passes", recent_bytes * per_s)
    counter("requests_total", "requests by what became of them", outcomes)
    return "\n".join([*lines, ""])


_FILE = Path(__file__).with_name("page.html")
_PLACE = "      <!-- options of drawing -->"


class Page(NamedTuple):
    """What is answered at `/`."""

    body: bytes  # HTML in UTF-8
    headers: dict[str, str]


def read_page(path: Path = _FILE) -> Page:
    """Return the page with the headers under which a browser runs its one script.

    Hashes need no state between answers, and a page changed by accident does not run in part.
    Raises `ValueError` for a page of several scripts or styles.
    """
    text = path.read_text(encoding="utf-8")  # lines end in \n then, which is what a browser hashes
    fields = map(_field, options_at("page", Sampling).values())
    text = text.replace(_PLACE, "\n".join(fields))
    script, style = (f"'sha256-{_hash_of(text, tag)}'" for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(text.encode(), headers)


def _field(one: Option) -> str:
    """Return a field of the settings for an option of drawing."""
    low, high = one.page
    step = "1" if one.kind is int else "any"
    absent = "as the model suggests" if one.is_suggested else "a new one each time"
    label = one.at("chat").capitalize()
    bounds = f'min="{low}" max="{high}" step="{step}"'
    return f'      <label>{label}<input id="{one.at("http")}" type="number" {bounds} placeholder="{absent}"></label>'


def _hash_of(text: str, tag: str) -> str:
    """Return the SHA-256 in base64 of the only element of that name, without attributes."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    num = text.count(f"<{tag}")
    if len(bodies) != 1 or num != 1:
        raise ValueError(f"the page must have one <{tag}> without attributes, found {num}")
    return base64.b64encode(hashlib.sha256(bodies[0].encode()).digest()).decode()


_CLIENT_GONE = 499  # nginx's; it is never read


def create_app(engine: Engine | None, settings: ServerSettings) -> FastAPI:
    """Return an ASGI server; without an engine the model loads until `app.state.engine` is set."""
    # Pages of documentation would load scripts from elsewhere; redirects would name the host that a
    # client names.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.engine = engine
    app.state.settings = settings
    app.state.began_s = int(time.time())
    app.add_middleware(Guard, settings=settings)
    app.add_exception_handler(HTTPException, _no_route)
    for path, method, route in _ROUTES:
        app.add_api_route(path, _answering(route), methods=[method], response_model=None)
    # while a model loads, too
    page = read_page()

    async def send_page(request: HttpRequest) -> Response:
        return Response(page.body, headers=page.headers)

    app.add_api_route("/", send_page, methods=["GET", "HEAD"], response_model=None)
    return app


def _answering(route: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    async def answered(request: HttpRequest) -> Response:
        try:
            found: Response = await route(request)
            return found
        except ClientGone:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            engine = request.app.state.engine
            _log(error)
            return refusal_response(refusal_of(error, engine and engine.figures()))

    return answered


async def _health(request: HttpRequest) -> Response:
    engine = request.app.state.engine
    if engine is None:
        return JSONResponse({"status": "loading"}, 503, {"Retry-After": "2"})
    if not engine.is_open:
        return JSONResponse({"status": "closing"}, 503, {"Retry-After": "10"})
    return JSONResponse({"status": "ok"})


async def _metrics(request: HttpRequest) -> Response:
    return PlainTextResponse(metrics_text(_engine(request).figures()), media_type=MEDIA_TYPE)


async def _models(request: HttpRequest) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(request)]})


async def _model(request: HttpRequest) -> Response:
    _check_model(request.path_params["model"], request.app.state.settings)
    return JSONResponse(_model_card(request))


async def _chat(request: HttpRequest) -> Response:
    return await _answer(request, await _read(request, ChatBody), order_chat, ChatAnswer)


async def _completions(request: HttpRequest) -> Response:
    body = await _read(request, CompletionBody)
    return await _answer(request, body, order_completion, CompletionAnswer)


_ROUTES: list[tuple[str, str, Callable[[HttpRequest], Any]]] = [
    ("/health", "GET", _health),
    ("/metrics", "GET", _metrics),
    ("/v1/models", "GET", _models),
    ("/v1/models/{model:path}", "GET", _model),
    ("/v1/chat/completions", "POST", _chat),
    ("/v1/completions", "POST", _completions),
]


async def _answer(
    request: HttpRequest,
    body: AnyBody,
    order: Callable[[Engine, ServerSettings, AnyBody], list[Ticket]],
    kind: Callable[[AnyBody, list[Ticket], TokenNames, str], Answer],
) -> Response:
    state = request.app.state
    engine = _engine(request)
    tickets = await to_thread.run_sync(order, engine, state.settings, body)
    if not hasattr(state, "names"):
        state.names = TokenNames(engine.decoder.tokenizer, engine.decoder.end_ids)
    made = kind(body, tickets, state.names, state.settings.model_id)
    headers = {"X-Ignored-Fields": ", ".join(body.ignored)} if body.ignored else {}
    if body.stream:
        keep_alive_s = state.settings.keep_alive_s
        return EventStream(made, tickets, headers, keep_alive_s=keep_alive_s, on_error=_log)
    async with aclosing(arrivals(tickets, request.receive)) as pieces:
        async for _ in pieces:
            pass
        return JSONResponse(made.whole(), headers=headers)


async def _read(request: HttpRequest, kind: type[AnyBody]) -> AnyBody:
    _engine(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # a stranger's page can send any other kind without asking first
    if media_type != "application/json":
        rule = "the body must be JSON, sent with `Content-Type: application/json`"
        why = "a stranger's page can send any other kind from your browser"
        raise Refusal(415, f"{rule}: {why} (curl: -H 'Content-Type: application/json')")
    body = parse(kind, await request.body())
    _check_model(body.model, request.app.state.settings)
    return body


def _engine(request: HttpRequest) -> Engine:
    engine: Engine | None = request.app.state.engine
    if engine is None:
        raise refuse_loading()
    return engine


def _check_model(model: str | None, settings: ServerSettings) -> None:
    is_known = {"*", model} & {*settings.aliases} or model == settings.model_id
    if model and not is_known:
        raise no_such_model(model, settings.model_id)


def _model_card(request: HttpRequest) -> dict[str, Any]:
    state = request.app.state
    card = {"id": state.settings.model_id, "object": "model", "created": state.began_s}
    card["owned_by"] = "offload"
    if state.engine is not None:
        card["context_length"] = state.engine.decoder.plan.context
    return card


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    path: str = request.scope["path"]  # `request.url` reads the query, which need not be text
    what = f"{request.method} {path:.80}"
    headers = dict(error.headers or {})
    # without names in paths
    known = sorted((path for path, *_ in _ROUTES if "{" not in path), reverse=True)
    told = {
        404: f"Unknown request URL: {what}: this server has {listed(known)}",
        405: f"Not allowed to {what}: {headers.get('Allow', 'another method')} is",
    }.get(error.status_code, error.detail)
    return refusal_response(Refusal(error.status_code, told, headers=headers))


def _log(error: BaseException) -> None:
    """Print where a fault of ours lies, but no words of an error, which may quote a client."""
    what = str(error)
    if not isinstance(error, RunError):
        if refusal_of(error).code != "internal_error":
            return
        frames = reversed(traceback.extract_tb(error.__traceback__)[-3:])
        places = (f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        what = f"{type(error).__name__} at {' < '.join(places)}"
    print(f"offload: a request failed: {what}", file=sys.stderr, flush=True)
