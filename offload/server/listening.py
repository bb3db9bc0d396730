"""A socket that listens from the first second, and what answers on it while libraries are imported.

Importing takes seconds, and health checks take a server that refuses connections for dead. Nothing
here takes time to import. Invariant: from `bind` on no connection is refused until the server ends,
and a port that is taken is refused before a model is loaded.
"""

import errno
import json
import select
import socket
import threading
import time

from offload.errors import UserError, require
from offload.server.core.refusals import RETRY_LOADING_S, refuse_loading
from offload.server.error_forms import error_body

_TURN_S = 0.05
_PATIENCE_S = 0.5  # for a client, from its first byte to the end of the answer
_MOST_BYTES = 64 << 10  # of what it asks


class EarlyAnswers:
    """Answers clients that the model is loading, in a thread of its own, until `hand_over`.

    Args:
        bound: a socket of `bind`, which belongs to this until it is handed over.
    """

    def __init__(self, bound: socket.socket) -> None:
        self.address = address_of(bound)
        self._bound: socket.socket | None = bound
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[bound], name="offload-loading", daemon=True
        )

    def __enter__(self) -> "EarlyAnswers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._bound is not None:
            self._bound.close()

    def hand_over(self) -> socket.socket:
        """Stop answering, and return the socket; new connections wait in its queue."""
        bound = self._bound
        assert bound is not None, "it is handed over once"
        self._end()
        self._bound = None
        return bound

    def _end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self, bound: socket.socket) -> None:
        bound.setblocking(False)
        while not self._is_over.is_set():
            if not select.select([bound], [], [], _TURN_S)[0]:
                continue
            try:
                client, _ = bound.accept()
                with client:
                    _answer(client)
            except OSError:
                continue  # it went away


def _answer(client: socket.socket) -> None:
    """Read the head of a request, and say that the model is loading. Raises `OSError`."""
    due_s = time.monotonic() + _PATIENCE_S

    def received() -> bytes:
        client.settimeout(max(1e-3, due_s - time.monotonic()))
        return client.recv(8192)

    asked = b""
    while b"\r\n\r\n" not in asked and len(asked) < _MOST_BYTES:
        if time.monotonic() > due_s or not (piece := received()):
            return
        asked += piece
    method, _, rest = asked.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    error = error_body(path.decode("latin-1"), refuse_loading())
    body = json.dumps({"status": "loading"} if path == b"/health" else error).encode()
    # a browser that shows the page asks again by itself
    again = [f"refresh: {RETRY_LOADING_S}"] if path == b"/" else []
    head = [
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"retry-after: {RETRY_LOADING_S}",
        "x-content-type-options: nosniff",
        "cross-origin-resource-policy: same-origin",
        *again,
        "connection: close",
    ]
    content = b"" if method == b"HEAD" else body
    client.sendall("\r\n".join([*head, "", ""]).encode() + content)
    client.shutdown(socket.SHUT_WR)
    # what is not read of a body would reset the connection, and the answer with it
    num_read = len(asked)
    while num_read < _MOST_BYTES and time.monotonic() < due_s and (piece := received()):
        num_read += len(piece)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, on a free port for 0. Raises `UserError`."""
    requirement = "`port` must lie in [0, 65536)"
    require(0 <= port < 1 << 16, requirement, port, "8080 is usual, 0 takes a free one")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        complaint = f"cannot listen on `host` {host!r:.80} ({error})"
        raise UserError(f"{complaint}: name an address of this machine") from None
    try:
        # what the last server left does not count
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        remedy = "give another `port`, or 0 for a free one"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "name an address of this machine as `host`"
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}): {remedy}") from None
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the address of a socket as a browser is given it."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
