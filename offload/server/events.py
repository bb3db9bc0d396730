"""Server-sent events: chunks of an answer as they come, comments at once and while there are none, and the end.

Errors that come too late for a status are an event of their own, and then the stream has no `[DONE]`.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offload.engine.ticket import Ticket
from offload.server.answer import Answer
from offload.server.arrivals import Arrivals, ClientGone
from offload.server.refusal import refusal_of

ALIVE = b": waiting\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """An answer, chunk by chunk.

    Args:
        keep_alive_s: without a chunk, after which a comment is sent.
        on_error: hears of errors that the client is told.
    """

    media_type = "text/event-stream"

    def __init__(
        self, answer: Answer, tickets: Sequence[Ticket], headers: Mapping[str, str], *,
        keep_alive_s: float, on_error: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._answer, self._tickets, self._keep_alive_s, self._on_error = answer, tickets, keep_alive_s, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, unless the client goes first."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with Arrivals(self._tickets, receive) as arrivals:
                async for event in self._events(arrivals):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, arrivals: Arrivals) -> AsyncIterator[bytes]:
        yield ALIVE  # at once: a pass takes seconds, and who waits for a place wants to know that it does
        for chunk in self._answer.opening():
            yield _event(chunk)
        try:
            async for arrival in arrivals.pieces(self._keep_alive_s):
                for chunk in () if arrival is None else self._answer.chunks(*arrival):
                    yield _event(chunk)
                if arrival is None:
                    yield ALIVE
        except ClientGone:
            raise
        except Exception as error:
            self._on_error(error)
            yield _event(refusal_of(error).as_dict())
            return
        for chunk in self._answer.closing():
            yield _event(chunk)
        yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
