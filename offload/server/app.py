"""The routes of the server, and what is the same for all of them.

The protocol decides what a path reads and writes, including errors; the engine does the work. The
app exists before its engine, so that `/health` can say that the model is loading: until
`app.state.engine` is set, all other requests are refused with 503.

Invariant: no route blocks the server's own thread.
"""

import time
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from offload.declaration import listed
from offload.engine.service import Engine
from offload.server.core.answer import Answer, TokenNames
from offload.server.core.body import AnyBody, parse
from offload.server.core.failures import log_failure, refusal_of
from offload.server.core.refusals import Refusal, no_such_model, refuse_loading
from offload.server.core.routes import Route, RouteContext
from offload.server.core.stream import ClientGone, EventStream, arrivals
from offload.server.error_forms import error_body
from offload.server.guard import Guard
from offload.server.metrics import MEDIA_TYPE, metrics_text
from offload.server.page import read_page
from offload.server.protocols import PROTOCOL_ROUTES
from offload.server.settings import ServerSettings

_MOST_HEADER = 4000  # characters
_CLIENT_GONE = 499  # nginx's; it is never read


def create_app(engine: Engine | None, settings: ServerSettings) -> FastAPI:
    """Return an ASGI server; without an engine the model loads until `app.state.engine` is set."""
    # Documentation pages would load scripts from elsewhere; redirects would repeat a host name
    # chosen by the client.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.engine = engine
    app.state.settings = settings
    app.state.began_s = int(time.time())
    app.add_middleware(Guard, settings=settings)
    app.add_exception_handler(HTTPException, _no_route)
    posted = [(path, "POST", _serving(route)) for path, route in PROTOCOL_ROUTES.items()]
    for path, method, serve in (*_ROUTES, *posted):
        app.add_api_route(path, _answering(serve), methods=_methods(method), response_model=None)
    # while a model loads, too
    page = read_page()

    async def send_page(request: HttpRequest) -> Response:
        return Response(page.body, headers=page.headers)

    app.add_api_route("/", send_page, methods=_methods("GET"), response_model=None)
    return app


def _methods(method: str) -> list[str]:
    """Return the methods of a route: whatever answers GET also answers HEAD, without a body."""
    return ["GET", "HEAD"] if method == "GET" else [method]


def _answering(serve: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Wrap a handler: its errors become answers in the protocol's form."""

    async def answered(request: HttpRequest) -> Response:
        try:
            response: Response = await serve(request)
            return response
        except ClientGone:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            engine = request.app.state.engine
            log_failure(error)
            return _refused(request, refusal_of(error, engine and engine.figures()))

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
    card = _model_card(request)
    pages = {"has_more": False, "first_id": card["id"], "last_id": card["id"]}
    return JSONResponse({"object": "list", "data": [card], **pages})


async def _model(request: HttpRequest) -> Response:
    _check_model(request.path_params["model"], request.app.state.settings)
    return JSONResponse(_model_card(request))


_ROUTES: list[tuple[str, str, Callable[[HttpRequest], Any]]] = [
    ("/health", "GET", _health),
    ("/metrics", "GET", _metrics),
    ("/v1/models", "GET", _models),
    ("/v1/models/{model:path}", "GET", _model),
]


def _serving(route: Route) -> Callable[[HttpRequest], Any]:
    """Return the handler of a protocol's route."""

    async def served(request: HttpRequest) -> Response:
        state = request.app.state
        body = await _read(request, route.body)
        context = RouteContext(
            _engine(request), state.settings, await to_thread.run_sync(_names, state)
        )
        reply = await to_thread.run_sync(route.reply, context, body)
        ignored = context.ignored(body)
        headers = {"X-Ignored-Fields": ", ".join(ignored)[:_MOST_HEADER]} if ignored else {}
        if not isinstance(reply, Answer):
            return JSONResponse(reply, headers=headers)
        if body.stream:
            keep_alive_s = state.settings.keep_alive_s
            return EventStream(reply, headers, keep_alive_s=keep_alive_s, on_error=log_failure)
        async with aclosing(arrivals(reply.jobs, request.receive)) as pieces:
            async for _ in pieces:
                pass
            return JSONResponse(reply.whole(), headers=headers)

    return served


def _names(state: Any) -> TokenNames:
    """Return the names of tokens, made once."""
    if not hasattr(state, "names"):
        decoder = state.engine.decoder
        state.names = TokenNames(decoder.tokenizer, decoder.end_ids)
    names: TokenNames = state.names
    return names


async def _read(request: HttpRequest, kind: type[AnyBody]) -> AnyBody:
    _engine(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # a foreign page can send any other kind without a preflight request
    if media_type != "application/json":
        requirement = "the body must be JSON, sent with `Content-Type: application/json`"
        why = "a stranger's page can send any other kind from your browser"
        raise Refusal(415, f"{requirement}: {why} (curl: -H 'Content-Type: application/json')")
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
    """Return the model for OpenAI's and Anthropic's clients, which read the fields that they know."""
    state = request.app.state
    name = state.settings.model_id
    card = {"id": name, "object": "model", "created": state.began_s, "owned_by": "offload"}
    began = datetime.fromtimestamp(state.began_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    card |= {"type": "model", "display_name": name, "created_at": began}
    if state.engine is not None:
        context = state.engine.decoder.plan.context
        # by the names that programs look for
        card |= dict.fromkeys(("context_length", "max_model_len", "max_input_tokens"), context)
    return card


def _refused(request: HttpRequest, refusal: Refusal) -> Response:
    """Return a refusal in the form of the path's protocol."""
    content = error_body(request.scope["path"], refusal)
    return JSONResponse(content, refusal.status, refusal.headers)


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    """Return the answer for an unknown path or method."""
    assert isinstance(error, HTTPException), "registered for these"
    path: str = request.scope["path"]  # `request.url` reads the query, which need not be text
    asked = f"{request.method} {path:.80}"
    headers = dict(error.headers or {})
    # without names in paths
    known = [path for path, *_ in _ROUTES if "{" not in path]
    known = sorted([*known, *PROTOCOL_ROUTES], reverse=True)
    message = {
        404: f"Unknown request URL: {asked}: this server has {listed(known)}",
        405: f"Not allowed to {asked}: {headers.get('Allow', 'another method')} is",
    }.get(error.status_code, error.detail)
    return _refused(request, Refusal(error.status_code, message, headers=headers))
