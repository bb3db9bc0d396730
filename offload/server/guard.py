"""What stands before every route: whom a request is for, whose it is, and how much it may send.

Plain ASGI, so that a body is counted as it comes, with or without a Content-Length. Invariant: nothing behind this sees
a request without the key, or more bytes than are allowed; keys are compared in constant time and never in an address.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.server.refusal import Refusal
from offload.server.settings import Settings

_OPEN_PATHS = ("/", "/health")  # a page that asks for the key, and what a watchdog asks for
_MOST_DROPPED = 16  # times what is allowed
_WITH_BODY = ("POST", "PUT", "PATCH")
_LOOKING = ("GET", "HEAD", "OPTIONS")
# Of every answer: what quotes a client or a model is never taken for a page, nor shown inside of another's.
_MARKS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}


class Guard:
    """Lets through what may pass, to `app`."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._digests = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what may not pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, send = Headers(scope=scope), _marked(send)
        try:
            self._check_host(headers)
            self._check_site(headers, scope["method"])
            self._check_key(headers, scope["path"])
            if scope["method"] in _WITH_BODY:
                receive = _Replayed(await self._body(receive), receive)
        except Refusal as refusal:
            refusal.headers.setdefault("Connection", "close")  # what it still sends is nobody's
            await answer(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        allowed, host = self._settings.allowed_hosts, headers.get("host", "").lower()
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        if allowed is not None and name not in allowed:
            rule = f"this server is not {host:.80}" if host else "a request must name this server"
            raise Refusal(403, f"{rule}: ask for localhost", code="wrong_host")

    def _check_site(self, headers: Mapping[str, str], method: str) -> None:
        """A page of another's cannot send JSON without asking first; browsers say besides whose page sends."""
        if method not in _LOOKING and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise Refusal(
                403, "this server takes no requests from pages of others: ask from its own", code="wrong_site"
            )

    def _check_key(self, headers: Mapping[str, str], path: str) -> None:
        if not self._digests or path in _OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = _digest(given.strip() if scheme.lower() == "bearer" else "")
        is_known = sum([hmac.compare_digest(found, digest) for digest in self._digests])  # all of them, always
        if not is_known:
            message = "You need the API key of this server: send it as `Authorization: Bearer KEY`"
            headers_back = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, message, code="invalid_api_key", headers=headers_back)

    async def _body(self, receive: Receive) -> bytes:
        """All of it. Of one that is too large a part is read and dropped: clients listen when they have sent all."""
        limit, num_read, body = self._settings.max_body_bytes, 0, bytearray()
        try:
            async with asyncio.timeout(self._settings.body_s):
                while (message := await receive())["type"] == "http.request" and num_read <= _MOST_DROPPED * limit:
                    num_read += len(message["body"])
                    body += message["body"][: max(0, limit + 1 - len(body))]
                    if not message["more_body"]:
                        break
        except TimeoutError:
            late = f"the body has not come within {self._settings.body_s:g} s"
            raise Refusal(408, late) from None
        if len(body) > limit:
            raise _too_large(limit)
        return bytes(body)


class _Replayed:
    """A body that was read, once more; then what else the client does."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _marked(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_MARKS)
        await send(message)

    return sending


def answer(refusal: Refusal) -> JSONResponse:
    """A refusal as it goes over the wire."""
    return JSONResponse(refusal.as_dict(), refusal.status, refusal.headers)


def _too_large(limit: int) -> Refusal:
    message = f"the body is larger than {limit} bytes: shorten it, or start the server with a larger --max-body"
    return Refusal(413, message, code="body_too_large")


def _digest(key: str) -> bytes:
    """Of one length whatever the key's, so that comparing tells nothing of that either."""
    return hashlib.sha256(key.encode()).digest()
