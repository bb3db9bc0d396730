"""The routes. Whatever they answer is in OpenAI's form, errors included; what they do is the engine's.

The app is there before its engine, so that `/health` can say that the model is loading: until `app.state.engine` is
set, all else is refused with 503. Invariant: no route waits in the server's own thread for what takes time.
"""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from offload.engine.service import Engine
from offload.engine.ticket import Ticket
from offload.errors import RunError
from offload.server.answer import Answer, ChatAnswer, CompletionAnswer
from offload.server.arrivals import Arrivals, ClientGone
from offload.server.events import EventStream
from offload.server.guard import Guard, answer
from offload.server.logprobs import TokenNames
from offload.server.metrics import MEDIA_TYPE, metrics_text
from offload.server.orders import order_chat, order_completion
from offload.server.page import page_route
from offload.server.protocol import AnyBody, Body, ChatBody, CompletionBody, parse
from offload.server.refusal import Refusal, loading, no_such_model, refusal_of
from offload.server.settings import Settings

_CLIENT_GONE = 499  # nginx's; nobody reads it


def create_app(engine: Engine | None, settings: Settings) -> FastAPI:
    """A server of one engine, for any ASGI server. With None the model is loading until `app.state.engine` is set."""
    # Pages of documentation would load scripts from elsewhere; redirects would name the host that a client names.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.engine, app.state.settings, app.state.began_s = engine, settings, int(time.time())
    app.add_middleware(Guard, settings=settings)
    app.add_exception_handler(HTTPException, _no_route)
    for path, method, route in _ROUTES:
        app.add_api_route(path, _answering(route), methods=[method], response_model=None)
    app.add_api_route("/", page_route(), methods=["GET", "HEAD"], response_model=None)  # while a model loads, too
    return app


def _answering(route: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """The same route, with every error as an answer."""

    async def answered(request: HttpRequest) -> Response:
        try:
            found: Response = await route(request)
            return found
        except ClientGone:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            engine = request.app.state.engine
            _log(error)
            return answer(refusal_of(error, engine and engine.figures()))

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
    body = await _read(request, ChatBody)
    tickets = await to_thread.run_sync(order_chat, _engine(request), request.app.state.settings, body)
    return await _answer(request, body, tickets, ChatAnswer(body, tickets, *_named(request)))


async def _completions(request: HttpRequest) -> Response:
    body = await _read(request, CompletionBody)
    tickets = await to_thread.run_sync(order_completion, _engine(request), request.app.state.settings, body)
    return await _answer(request, body, tickets, CompletionAnswer(body, tickets, *_named(request)))


_ROUTES: list[tuple[str, str, Callable[[HttpRequest], Any]]] = [
    ("/health", "GET", _health),
    ("/metrics", "GET", _metrics),
    ("/v1/models", "GET", _models),
    ("/v1/models/{model:path}", "GET", _model),
    ("/v1/chat/completions", "POST", _chat),
    ("/v1/completions", "POST", _completions),
]


async def _answer(request: HttpRequest, body: Body, tickets: Sequence[Ticket], made: Answer) -> Response:
    headers = {"X-Ignored-Fields": ", ".join(body.ignored)} if body.ignored else {}
    if body.is_streamed:
        keep_alive_s = request.app.state.settings.keep_alive_s
        return EventStream(made, tickets, headers, keep_alive_s=keep_alive_s, on_error=_log)
    async with Arrivals(tickets, request.receive) as arrivals:
        async for _ in arrivals.pieces():
            pass
        return JSONResponse(made.whole(), headers=headers)


async def _read(request: HttpRequest, kind: type[AnyBody]) -> AnyBody:
    """The body, checked. Raises `Refusal`."""
    _engine(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # a page of a stranger's can send any other kind without asking first
        raise Refusal(415, "the body must be JSON: send it with `Content-Type: application/json`")
    body = parse(kind, await request.body())
    if isinstance(body, Body):
        _check_model(body.model, request.app.state.settings)
    return body


def _engine(request: HttpRequest) -> Engine:
    engine: Engine | None = request.app.state.engine
    if engine is None:
        raise loading()
    return engine


def _named(request: HttpRequest) -> tuple[TokenNames, str]:
    state = request.app.state
    if not hasattr(state, "names"):
        decoder = _engine(request).decoder
        state.names = TokenNames(decoder.tokenizer, decoder.end_ids)
    return state.names, state.settings.model_id


def _check_model(model: str | None, settings: Settings) -> None:
    if model and model != settings.model_id:
        raise no_such_model(model, settings.model_id)


def _model_card(request: HttpRequest) -> dict[str, Any]:
    state = request.app.state
    card = {"id": state.settings.model_id, "object": "model", "created": state.began_s, "owned_by": "offload"}
    return card if state.engine is None else {**card, "context_length": state.engine.decoder.plan.context}


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    """For paths and methods that there are none of."""
    assert isinstance(error, HTTPException), "registered for these"
    path: str = request.scope["path"]  # `request.url` reads the query, which need not be text
    what = f"{request.method} {path:.80}"
    told = {404: f"Unknown request URL: {what}", 405: f"Not allowed to {what}"}.get(error.status_code, error.detail)
    return answer(Refusal(error.status_code, told, headers=dict(error.headers or {})))


def _log(error: BaseException) -> None:
    """Where a fault of ours lies; never what a client has sent, which an error's own words may quote."""
    if isinstance(error, RunError):
        print(f"offload: a request failed: {error}", file=sys.stderr, flush=True)
    elif refusal_of(error).code == "internal_error":
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
        print(f"offload: a request failed: {type(error).__name__} at {where}", file=sys.stderr, flush=True)
