"""The socket of a server: the thread that serves it, and who is let in before any route.

uvicorn serves, without its signals and its lines. `Guard` is plain ASGI, so that a body is counted
as it comes, with or without a Content-Length.

Invariants: a client that sends no request, or does not read an answer, is cut off after a while.
Nothing behind the guard sees a request without the key, or more bytes than are allowed; keys are
compared in constant time and never in an address.
"""

import asyncio
import hashlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from offload.errors import one_line
from offload.server.listening import address_of
from offload.server.protocol import Refusal, ServerSettings

_MOST_CONNECTIONS = 512
_REQUEST_S = 20.0  # within which a new connection must have sent the head of its request
_READ_S = 30.0  # within which a client must go on reading what it was sent
_FAREWELL_S = 5  # for answers that are on their way when the server ends
_POLL_S = 0.005


class Listening:
    """A server in a thread of its own, from `with` to its end.

    Args:
        app: what answers.
        bound: a socket of `bind`, which belongs to this from now on.
        say: hears of what uvicorn has to say, a line at a time.
    """

    def __init__(
        self, app: ASGIApp, bound: socket.socket, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.bound = bound
        self.address = address_of(bound)
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_FAREWELL_S,
        )
        _hear(say)
        self._server = uvicorn.Server(config)
        # `join` that a signal interrupts takes a thread for ended that is not
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-server", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> "Listening":
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(_POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._ended.wait()
        self.bound.close()

    def wait(self) -> None:
        """Wait until a signal comes, or the server fails. Raises what it failed with."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._server.run([self.bound])
        except BaseException as error:  # for the thread that waits
            self._error = error
        finally:
            self._ended.set()


class _Connection(H11Protocol):
    """The connection of one client, which ends after too long a silence in either direction."""

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # each is an open file, of which weights and others need some
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
            return
        own = transport.get_extra_info("socket")
        # what was written, and is not fetched, ends with the connection too
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_READ_S * 1e3))
        self._limit(_REQUEST_S)

    def handle_events(self) -> None:
        """Limit the time until a request's head has come; uvicorn does so between requests."""
        super().handle_events()
        is_begun = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not is_begun and not self.flow.write_paused:
            self._limit(None)
        elif self._clock is None:
            self._limit(_REQUEST_S)

    def pause_writing(self) -> None:
        """Limit the time of a client that reads slower than it is written to."""
        self.flow.pause_writing()
        self._limit(_READ_S)

    def resume_writing(self) -> None:
        """Lift the limit: the client reads again."""
        self._limit(None)
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        super().connection_lost(exc)

    def _limit(self, seconds: float | None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None
        if seconds is not None:
            self._clock = self.loop.call_later(seconds, self.transport.abort)


def _hear(say: Callable[[str], None]) -> None:
    """Say errors of uvicorn as lines of ours; of bad requests their clients are told."""
    handler = logging.Handler(logging.ERROR)
    logger = logging.getLogger("uvicorn.error")

    def tell(record: logging.LogRecord) -> None:
        # as our own errors are: short, and without what would steer a terminal
        say(f"server: {one_line(record.getMessage().partition(chr(10))[0])}")

    handler.emit = tell  # type: ignore[method-assign]
    logger.handlers[:] = [handler]
    logger.propagate = False


_OPEN_PATHS = ("/", "/health")  # a page that asks for the key, and what a watchdog asks for
_MOST_DROPPED = 16  # times what is allowed
_WITH_BODY = ("POST", "PUT", "PATCH")
_LOOKING = ("GET", "HEAD", "OPTIONS")
# Of every answer: what quotes a client or a model is never taken for a page, nor shown inside of
# another's.
_MARKS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}

# what a page of an allowed origin may send; its browser asks before
_MAY = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type",
    "Access-Control-Max-Age": "600",
}


class Guard:
    """Lets through what may pass, to `app`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._digests = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what may not pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        is_guest = origin in self._settings.origins
        send = _marked(send, origin if is_guest else None)
        try:
            self._check_host(headers)
            if is_guest and scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=_MAY)(scope, receive, send)
                return
            if not is_guest:
                self._check_site(headers, scope["method"])
            self._check_key(headers, scope["path"])
            if scope["method"] in _WITH_BODY:
                receive = _replayed(await self._body(receive), receive)
        except Refusal as refusal:
            # what it still sends belongs to no request
            refusal.headers.setdefault("Connection", "close")
            await refusal_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        allowed = self._settings.allowed_hosts
        host = headers.get("host", "").lower()
        name = host.partition(":")[0]
        if host.startswith("[") and "]" in host:
            name = host[: host.index("]") + 1]
        if allowed is not None and name not in allowed:
            rule = f"this server is not {host:.80}" if host else "a request must name this server"
            raise Refusal(403, f"{rule}: ask for localhost", code="wrong_host")

    def _check_site(self, headers: Mapping[str, str], method: str) -> None:
        """Refuse pages of others: none sends JSON without asking, and browsers say whose they are."""
        site = headers.get("sec-fetch-site", "none")
        if method not in _LOOKING and site not in ("same-origin", "none"):
            message = "this server takes no requests from pages of others: ask from its own"
            raise Refusal(403, message, code="wrong_site")

    def _check_key(self, headers: Mapping[str, str], path: str) -> None:
        if not self._digests or path in _OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = _digest(given.strip() if scheme.lower() == "bearer" else "")
        # all of them, always
        is_known = sum([hmac.compare_digest(found, digest) for digest in self._digests])
        if not is_known:
            message = "You need the API key of this server: send it as `Authorization: Bearer KEY`"
            asked = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, message, code="invalid_api_key", headers=asked)

    async def _body(self, receive: Receive) -> bytes:
        """Return the body; what is too large is read in part: clients listen when they have sent all."""
        limit = self._settings.max_body_bytes
        num_read = 0
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_s):
                while num_read <= _MOST_DROPPED * limit:
                    message = await receive()
                    if message["type"] != "http.request":
                        break
                    num_read += len(message["body"])
                    body += message["body"][: max(0, limit + 1 - len(body))]
                    if not message["more_body"]:
                        break
        except TimeoutError:
            late = f"the body has not come within {self._settings.body_s:g} s"
            raise Refusal(408, late) from None
        if len(body) > limit:
            rule = f"the body is larger than {limit} bytes"
            remedy = "shorten it, or start the server with a larger --max-body"
            raise Refusal(413, f"{rule}: {remedy}", code="body_too_large")
        return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read once more; then what else the client does."""
    left = [body]

    async def receiving() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return receiving


def _marked(send: Send, guest: str | None) -> Send:
    """Return what sends answers with the marks of all; pages of the origin `guest` may read them."""
    allowed = {} if guest is None else {"access-control-allow-origin": guest, "vary": "Origin"}
    marks = {**_MARKS, **allowed}

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(marks)
        await send(message)

    return sending


def refusal_response(refusal: Refusal) -> JSONResponse:
    """Return a refusal as it goes over the wire."""
    return JSONResponse(refusal.as_dict(), refusal.status, refusal.headers)


def _digest(key: str) -> bytes:
    """Return a digest of the key; its length is fixed, so comparing tells nothing of the key's."""
    return hashlib.sha256(key.encode()).digest()
