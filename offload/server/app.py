"""The routes of the server.

Routes answer in OpenAI's form, errors included; what they do is the engine's. The app is there
before its engine, so that `/health` can say that the model is loading: until `app.state.engine` is
set, all else is refused with 503.

Invariant: no route waits in the server's own thread for what takes time.
"""

import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from offload.declaration import listed
from offload.engine.conversation import template_source, words_of
from offload.engine.job import Job
from offload.engine.request import NoRoom, samples_of
from offload.engine.service import Engine
from offload.errors import HostFault, RunError, UserError
from offload.server.answer import Answer, ChatAnswer, CompletionAnswer, TokenNames
from offload.server.bodies import AnyBody, Body, ChatBody, CompletionBody, parse
from offload.server.guard import Guard
from offload.server.metrics import MEDIA_TYPE, metrics_text
from offload.server.page import read_page
from offload.server.refusals import Refusal, no_such_model, refusal_of, refuse_loading
from offload.server.settings import ServerSettings
from offload.server.stream import ClientGone, EventStream, arrivals

_EFFORT = "reasoning_effort"  # which some templates know
_MOST_HEADER = 4000  # characters
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
        app.add_api_route(path, _answering(route), methods=_methods(method), response_model=None)
    # while a model loads, too
    page = read_page()

    async def send_page(request: HttpRequest) -> Response:
        return Response(page.body, headers=page.headers)

    app.add_api_route("/", send_page, methods=_methods("GET"), response_model=None)
    return app


def _methods(method: str) -> list[str]:
    """Return the methods of a route: by HTTP, what answers GET answers HEAD, without a body."""
    return ["GET", "HEAD"] if method == "GET" else [method]


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
            return refusal_of(error, engine and engine.figures()).response()

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
    return await _answer(request, await _read(request, ChatBody), ChatAnswer)


async def _completions(request: HttpRequest) -> Response:
    return await _answer(request, await _read(request, CompletionBody), CompletionAnswer)


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
    kind: Callable[[AnyBody, list[Job], TokenNames, str], Answer],
) -> Response:
    state = request.app.state
    engine = _engine(request)
    jobs = await to_thread.run_sync(submit, engine, state.settings, body)
    if not hasattr(state, "names"):
        state.names = TokenNames(engine.decoder.tokenizer, engine.decoder.end_ids)
    made = kind(body, jobs, state.names, state.settings.model_id)
    source = template_source(engine.decoder.tokenizer)
    ignored = [name for name in body.ignored if name != _EFFORT or _EFFORT not in source]
    headers = {"X-Ignored-Fields": ", ".join(ignored)[:_MOST_HEADER]} if ignored else {}
    if body.stream:
        keep_alive_s = state.settings.keep_alive_s
        return EventStream(made, headers, keep_alive_s=keep_alive_s, on_error=_log)
    async with aclosing(arrivals(jobs, request.receive)) as pieces:
        async for _ in pieces:
            pass
        return JSONResponse(made.whole(), headers=headers)


def submit(engine: Engine, settings: ServerSettings, body: Body) -> list[Job]:
    """Submit each choice of each prompt, or none of them; return their jobs.

    Raises `Refusal` and `UserError`.
    """
    num_texts = body.num_choices * body.num_prompts
    # before anything is made of them, for more texts than could ever be served
    if num_texts > engine.most_requests:
        rule = f"this server takes {engine.most_requests} texts in one request, got {num_texts}"
        param = "n" if body.num_choices > 1 else body.prompt_field
        raise Refusal.of_value(param, rule, "ask for fewer")
    try:
        requests = body.requests(settings.sampling)
        checked = [engine.prepare(request) for request in requests]
        if body.offered_tools and not body.is_call_forced:
            _require_tools(engine)
    except NoRoom as error:
        field = body.prompt_field
        wanted = "" if error.num_new is None else f" and {error.num_new} in the completion"
        message = (
            f"This model's maximum context length is {error.context} tokens, but you asked for "
            f"{error.num_prompt} tokens in the {field}{wanted}: "
            f"shorten the {field} or lower `max_tokens`"
        )
        code = "context_length_exceeded"
        raise Refusal(400, message, code=code, param=field) from None
    except UserError as error:
        # by the name that the client knows
        if (schema := "`json_schema`") not in str(error):
            raise
        told = str(error).replace(schema, f"`{body.schema_field}`")
        raise Refusal(400, told, param=body.schema_field) from None
    jobs = list[Job]()
    try:
        for request in checked:
            for sample in samples_of(request, body.num_choices):
                jobs.append(engine.submit(sample))
    except Exception:
        for job in jobs:
            job.cancel()
        raise
    return jobs


def _require_tools(engine: Engine) -> None:
    """Raise `Refusal` where the model is told of no tools, or its calls could not be read."""
    words = words_of(engine.decoder.tokenizer)
    if not words.knows_tools:
        rule = "the model's chat template does not tell the model of tools"
    elif words.calls is None and not words.is_harmony:
        rule = "the model's chat template writes calls in no form that is known here"
    else:
        return
    remedy = "leave it out, or force a call by 'tool_choice', which a grammar keeps"
    raise Refusal(400, f"'tools' cannot be used: {rule}: {remedy}", param="tools")


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
    return Refusal(error.status_code, told, headers=headers).response()


def _log(error: BaseException) -> None:
    """Print where a fault of ours lies, but no words of an error, which may quote a client."""
    # what a library says stands in parentheses
    what = re.sub(r" \(.*\)", "", str(error)) if isinstance(error, HostFault) else str(error)
    if not isinstance(error, HostFault | RunError):
        if refusal_of(error).code != "internal_error":
            return
        frames = reversed(traceback.extract_tb(error.__traceback__)[-3:])
        places = (f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        what = f"{type(error).__name__} at {' < '.join(places)}"
    print(f"offload: a request failed: {what}", file=sys.stderr, flush=True)
