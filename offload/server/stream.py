"""Pieces of several texts as they come, for a coroutine: from the engine's thread into the server's
loop.

Invariant: a client that is gone cancels what it has asked for. One that hangs up, a task that is
cancelled and an error all leave by the same door, which cancels every ticket; for those that have
ended that is nothing.

Server-sent events: chunks of an answer as they come, comments at once and while there are none, and
the end.

Errors that come too late for a status are an event of their own, and then the stream has no
`[DONE]`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offload.engine.job import TextPiece, Ticket
from offload.server.answer import Answer
from offload.server.protocol import refusal_of


class ClientGone(Exception):  # noqa: N818
    """The client does not wait for the answer any more."""


class Arrival(NamedTuple):
    """One more piece of a text, or where there is none its end."""

    choice: int
    piece: TextPiece | None


class Arrivals:
    """Use it as an asynchronous context manager, and iterate over `pieces` once.

    Args:
        receive: tells when the client has gone, once the body was read.
    """

    def __init__(self, tickets: Sequence[Ticket], receive: Receive) -> None:
        self.tickets = tickets
        self._receive = receive
        self._came = asyncio.Event()
        self._is_gone = False

    async def __aenter__(self) -> "Arrivals":
        self._loop = asyncio.get_running_loop()
        self._watch = asyncio.create_task(self._until_gone())
        for ticket in self.tickets:
            ticket.listen(self._tell)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        for ticket in self.tickets:
            ticket.cancel()
            ticket.listen(None)

    async def pieces(self, every_s: float | None = None) -> AsyncIterator[Arrival | None]:
        """Until all texts have ended; None whenever nothing has come for so long. Raises
        `ClientGone`.
        """
        left = dict(enumerate(self.tickets))
        while left:
            self._came.clear()
            for index, ticket in list(left.items()):
                # before its pieces are taken, so that none comes behind the end
                is_done = ticket.is_done
                for piece in ticket.take():
                    yield Arrival(index, piece)
                if is_done:
                    del left[index]
                    yield Arrival(index, None)
            if left and not await self._has_come(every_s):
                yield None
            if self._is_gone:
                raise ClientGone

    async def _has_come(self, every_s: float | None) -> bool:
        try:
            async with asyncio.timeout(every_s):
                await self._came.wait()
        except TimeoutError:
            return False
        return True

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._came.set()

    def _tell(self) -> None:
        """In the engine's thread, which may outlive the loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._came.set)


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
        self,
        answer: Answer,
        tickets: Sequence[Ticket],
        headers: Mapping[str, str],
        *,
        keep_alive_s: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._answer = answer
        self._tickets = tickets
        self._keep_alive_s = keep_alive_s
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, unless the client goes first."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async with Arrivals(self._tickets, receive) as arrivals:
                async for event in self._events(arrivals):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, arrivals: Arrivals) -> AsyncIterator[bytes]:
        # at once: a pass takes seconds, and who waits for a place wants to know that it does
        yield ALIVE
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
    return (
        b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )
