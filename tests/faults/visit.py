"""A client of the server under test: it asks one thing after the other, and ends the server when it has its answers."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_ASK_S, _LOADING, _SILENCE_S = 0.2, b"HTTP/1.1 503", 20


def visit(port: int, requests: Sequence[str], process: int, path: Path) -> None:
    """Writes down each reply as it has come, for the server may be gone before the next."""
    replies: list[str] = []
    for request in requests:
        replies.append(_reply(port, request.encode()))
        path.write_text(json.dumps(replies))
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)


def _reply(port: int, request: bytes) -> str:
    """All that is answered once the model is loaded; a connection that breaks ends it."""
    while (received := _asked(port, request)) is None or received.startswith(_LOADING):
        time.sleep(_ASK_S)  # it loads on the same cores
    return received.decode(errors="replace")


def _asked(port: int, request: bytes) -> bytes | None:
    received = b""
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=_SILENCE_S)
    except OSError:  # not yet, or not any more
        return None
    with connection, suppress(OSError):
        connection.sendall(request)
        while part := connection.recv(65536):
            received += part
    return received


if __name__ == "__main__":
    visit(int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
