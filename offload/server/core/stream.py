"""A stream of server-sent events: an answer's, and comments in between to keep it alive.

`arrivals` brings pieces of texts from the engine's thread into the server's loop. The answer sends
an error that comes too late for a status as an event of its protocol.

Invariant: a client's jobs are cancelled when it is gone: hanging up, a cancelled task and an error
all leave through one `finally`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offload.engine.generation import OutputDelta
from offload.engine.job import Job
from offload.server.core.answer import Answer
from offload.server.core.failures import refusal_of


class ClientGone(Exception):  # noqa: N818
    """The client no longer waits for the answer."""


async def arrivals(
    jobs: Sequence[Job], receive: Receive, every_s: float | None = None
) -> AsyncGenerator[tuple[int, OutputDelta | None] | None]:
    """Yield the number of a job with its next piece, or with None at its end, until all have ended.

    None alone comes at once, and whenever nothing has come for `every_s`. Closing this cancels
    every job. Raises `ClientGone`, of which `receive` tells once the body was read.
    """
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    watch = asyncio.create_task(_until_gone(receive))
    watch.add_done_callback(lambda _: came.set())

    def tell() -> None:
        # in the engine's thread, which may outlive the loop
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(came.set)

    try:
        for job in jobs:
            job.listen(tell)
        # from here on closing cancels them, even if no piece is ever taken
        yield None
        left = dict(enumerate(jobs))
        while left:
            came.clear()
            for index, job in list(left.items()):
                # before its pieces are taken, so that none follows the end
                is_done = job.is_done
                for piece in job.take():
                    yield index, piece
                if is_done:
                    del left[index]
                    yield index, None
            if left and not watch.done():
                try:
                    async with asyncio.timeout(every_s):
                        await came.wait()
                except TimeoutError:
                    yield None
            if watch.done():
                raise ClientGone
    finally:
        watch.cancel()
        for job in jobs:
            job.cancel()
            job.listen(None)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ALIVE = b": waiting\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """An answer, event by event.

    Args:
        keep_alive_s: without an event, after which a comment is sent.
        on_error: called with errors that the client is told.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        headers: Mapping[str, str],
        *,
        keep_alive_s: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._answer = answer
        self._keep_alive_s = keep_alive_s
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, unless the client goes first."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        try:
            pieces = arrivals(self._answer.jobs, receive, self._keep_alive_s)
            async with aclosing(pieces), aclosing(self._events(pieces)) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(
        self, pieces: AsyncIterator[tuple[int, OutputDelta | None] | None]
    ) -> AsyncGenerator[bytes]:
        """Yield encoded events of an answer; an error becomes the last one."""
        opening = self._answer.opening()
        try:
            async for arrival in pieces:
                if arrival is None:
                    # also at once: a pass takes seconds, and a client that waits for a place wants
                    # to know that it does
                    yield ALIVE
                for event in opening if arrival is None else self._answer.events(*arrival):
                    yield event.encoded()
                opening = []
            closing = self._answer.closing()
        except ClientGone:
            raise
        except Exception as error:
            self._on_error(error)
            closing = self._answer.failed(refusal_of(error))
        for event in closing:
            yield event.encoded()
