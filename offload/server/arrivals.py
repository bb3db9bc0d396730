"""Pieces of several texts as they come, for a coroutine: from the engine's thread into the server's loop.

Invariant: whoever is gone cancels what was asked for. A client that hangs up, a task that is cancelled and an error
all leave by the same door, which cancels every ticket; for those that have ended that is nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from starlette.types import Receive

from offload.engine.ticket import Piece, Ticket


class ClientGone(Exception):  # noqa: N818
    """Nobody waits for the answer any more."""


class Arrival(NamedTuple):
    """One more piece of a text, or where there is none its end."""

    choice: int
    piece: Piece | None


class Arrivals:
    """Use it as an asynchronous context manager, and iterate over `pieces` once.

    Args:
        receive: tells when the client has gone, once the body was read.
    """

    def __init__(self, tickets: Sequence[Ticket], receive: Receive) -> None:
        self.tickets, self._receive = tickets, receive
        self._came, self._is_gone = asyncio.Event(), False

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
        """Until all texts have ended; None whenever nothing has come for so long. Raises `ClientGone`."""
        left = dict(enumerate(self.tickets))
        while left:
            self._came.clear()
            for index, ticket in list(left.items()):
                is_done = ticket.is_done  # before its pieces are taken, so that none comes behind the end
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
