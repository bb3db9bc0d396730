"""The socket of a server, and the thread that serves it.

uvicorn serves, without its signals and its lines. Invariant: a client that sends no request, or
does not read an answer, is cut off after a while.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from offload.errors import one_line
from offload.server.listening import address_of

_MOST_CONNECTIONS = 512
_REQUEST_S = 20.0  # seconds in which a new connection must send the head of its request
_READ_S = 30.0  # seconds in which a client must continue to read
# Clients forget a resting connection after 5 s (httpx) to 60 s; they must be the first to do so.
_KEEP_ALIVE_S = 75
_FAREWELL_S = 5  # for answers that are on their way when the server ends
_POLL_S = 0.005


class HttpServer:
    """A server in a thread of its own, from `with` to its end.

    Args:
        app: what answers.
        bound: a socket of `bind`, which belongs to this from now on.
        say: called with uvicorn's messages, line by line.
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
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FAREWELL_S,
        )
        _hear(say)
        self._server = uvicorn.Server(config)
        # `join` that a signal interrupts takes a thread for ended that is not
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-server", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> "HttpServer":
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(_POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._ended.wait()
        self.bound.close()

    def wait(self) -> None:
        """Wait for a signal, or until the server fails. Raises its error."""
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
    """A client's connection, which ends after too long a silence in either direction."""

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # each is an open file, of which weights and others need some
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
            return
        connection = transport.get_extra_info("socket")
        # what was written, and is not fetched, ends with the connection too
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_READ_S * 1e3))
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
    """Print uvicorn's errors as lines of ours; bad requests are answered, not logged."""
    handler = logging.Handler(logging.ERROR)
    logger = logging.getLogger("uvicorn.error")

    def tell(record: logging.LogRecord) -> None:
        # as our own errors are: short, and without what would steer a terminal
        say(f"server: {one_line(record.getMessage().partition(chr(10))[0])}")

    handler.emit = tell  # type: ignore[method-assign]
    logger.handlers[:] = [handler]
    logger.propagate = False
