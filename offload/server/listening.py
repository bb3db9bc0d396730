"""A socket and the thread that serves it: uvicorn, without its signals and its lines.

The socket is bound by itself and first, so that a port that is taken is refused before a model is loaded. Invariant:
nobody holds a connection for nothing: who sends no request, or does not read an answer, is cut off after a while.
"""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from offload.config import require
from offload.errors import UserError, one_line

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

    def __init__(self, app: ASGIApp, bound: socket.socket, say: Callable[[str], None] = lambda _: None) -> None:
        self.bound, self.address = bound, _address(bound)
        config = uvicorn.Config(
            app, http=_Connection, ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_FAREWELL_S,
        )  # fmt: skip
        _hear(say)
        self._server = uvicorn.Server(config)
        self._ended = threading.Event()  # `join` that a signal interrupts takes a thread for ended that is not
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
        """Until a signal ends this thread's waiting, or the server fails. Raises what it failed with."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._server.run([self.bound])
        except BaseException as error:  # for whoever waits
            self._error = error
        finally:
            self._ended.set()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there, on a free port for 0. Raises `UserError` where it cannot."""
    require(0 <= port < 1 << 16, "`port` must lie in [0, 65536)", port, "8080 is usual, 0 takes a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot listen on `host` {host!r:.80} ({error}): name an address of this machine") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what the last server left does not count
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        is_ours = error.errno != errno.EADDRNOTAVAIL
        remedy = "give another `port`, or 0 for a free one" if is_ours else "name an address of this machine as `host`"
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}): {remedy}") from None
    return bound


class _Connection(H11Protocol):
    """One client's, with an end to its patience for silence in either direction."""

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:  # each is an open file, of which weights and others need some
            transport.abort()
            return
        own = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # what was written, and is not fetched, ends with the connection too
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_READ_S * 1e3))
        self._limit(_REQUEST_S)

    def handle_events(self) -> None:
        """A request that has begun must come to the end of its head; one that is answered has uvicorn's own clock."""
        super().handle_events()
        is_begun = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not is_begun and not self.flow.write_paused:
            self._limit(None)
        elif self._clock is None:
            self._limit(_REQUEST_S)

    def pause_writing(self) -> None:
        """The client reads slower than it is written to."""
        self.flow.pause_writing()
        self._limit(_READ_S)

    def resume_writing(self) -> None:
        """It reads again."""
        self._limit(None)
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        super().connection_lost(exc)

    def _limit(self, seconds: float | None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def _hear(say: Callable[[str], None]) -> None:
    """Its errors as lines of ours, without tracebacks; of bad requests their clients are told."""
    handler, logger = logging.Handler(logging.ERROR), logging.getLogger("uvicorn.error")
    handler.emit = lambda record: say(f"server: {_first_line(record)}")  # type: ignore[method-assign]
    logger.handlers[:], logger.propagate = [handler], False


def _first_line(record: logging.LogRecord) -> str:
    """As our own errors are: short, and without what would steer a terminal."""
    return one_line(record.getMessage().partition("\n")[0])


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
