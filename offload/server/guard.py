"""Access checks before any route, and headers of every answer.

`Guard` is plain ASGI, so that a body is counted as it comes, with or without a Content-Length.
Invariant: the routes get no request without the key, nor more bytes than allowed; keys are compared
in constant time and never taken from an address.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.server.core.refusals import Refusal
from offload.server.error_forms import error_body
from offload.server.settings import ServerSettings

_OPEN_PATHS = ("/", "/health")  # a page that asks for the key, and what a watchdog asks for
_MOST_DROPPED = 16  # times what is allowed
_WITH_BODY = ("POST", "PUT", "PATCH")
_LOOKING = ("GET", "HEAD", "OPTIONS")
# Of every answer: what quotes a client or a model is never taken for a page, nor shown inside of
# another's.
_MARKS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}

# what the official clients tell of themselves in a browser
_STAINLESS = (
    "arch",
    "lang",
    "os",
    "package-version",
    "retry-count",
    "runtime",
    "runtime-version",
    "timeout",
)
# what a page of an allowed origin may send; its browser asks before
_MAY_SEND = (
    "Authorization",
    "Content-Type",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    *(f"x-stainless-{name}" for name in _STAINLESS),
)
_MAY = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": ", ".join(_MAY_SEND),
    "Access-Control-Max-Age": "600",
}


class Guard:
    """Passes allowed requests to `app`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._digests = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        is_allowed_origin = origin in self._settings.origins
        send = _with_headers(send, origin if is_allowed_origin else None)
        try:
            self._check_host(headers)
            if is_allowed_origin and scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=_MAY)(scope, receive, send)
                return
            if not is_allowed_origin:
                self._check_site(headers, scope["method"])
            self._check_key(headers, scope["path"])
            if scope["method"] in _WITH_BODY:
                receive = _replayed(await self._body(receive), receive)
        except Refusal as refusal:
            # what it still sends belongs to no request
            refusal.headers.setdefault("Connection", "close")
            content = error_body(scope["path"], refusal)
            response = JSONResponse(content, refusal.status, refusal.headers)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        allowed = self._settings.allowed_hosts
        host = headers.get("host", "").lower()
        name = host.partition(":")[0]
        if host.startswith("[") and "]" in host:
            name = host[: host.index("]") + 1]
        if allowed is not None and name not in allowed:
            requirement = (
                f"this server is not {host:.80}" if host else "a request must name this server"
            )
            raise Refusal(403, f"{requirement}: ask for localhost", code="wrong_host")

    def _check_site(self, headers: Mapping[str, str], method: str) -> None:
        """Refuse foreign pages: they need a preflight request for JSON, and state their origin."""
        site = headers.get("sec-fetch-site", "none")
        if method not in _LOOKING and site not in ("same-origin", "none"):
            message = "this server takes no requests from pages of others: ask from its own"
            raise Refusal(403, message, code="wrong_site")

    def _check_key(self, headers: Mapping[str, str], path: str) -> None:
        """Raise `Refusal` for a request without one of the server's keys."""
        if not self._digests or path in _OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest_given = _digest(given.strip())
        # all of them, always
        is_known = sum([hmac.compare_digest(digest_given, digest) for digest in self._digests])
        if not is_known:
            message = "You need the API key of this server: send it as `Authorization: Bearer KEY`"
            message += " or as `x-api-key: KEY`"
            asked = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, message, code="invalid_api_key", headers=asked)

    async def _body(self, receive: Receive) -> bytes:
        """Return the body; of one too large the start is read, as clients send before they listen."""
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
            requirement = f"the body is larger than {limit} bytes"
            remedy = "shorten it, or start the server with a larger --max-body"
            raise Refusal(413, f"{requirement}: {remedy}", code="body_too_large")
        return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a read body once more, then the client's further messages."""
    left = [body]

    async def receiving() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return receiving


def _with_headers(send: Send, allowed_origin: str | None) -> Send:
    """Return a `send` that adds all answers' headers; pages of `allowed_origin` may read them."""
    allowed = {}
    if allowed_origin is not None:
        allowed = {"access-control-allow-origin": allowed_origin, "vary": "Origin"}
    marks = {**_MARKS, **allowed}

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(marks)
        await send(message)

    return sending


def _digest(key: str) -> bytes:
    """Return a digest of the key; its fixed length hides the key's in comparisons."""
    return hashlib.sha256(key.encode()).digest()
