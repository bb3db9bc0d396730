"""Clients that are no library's: half-closed, slow, cut off, oversized; and what is left of them, which is nothing."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from operator import le
from pathlib import Path
from typing import Any

import pytest
from reciting import before_steps
from served import Served, _afresh, held_passes, serving  # noqa: F401
from waiting import PATIENCE_S, until

from offload.server import http_server
from offload.server.listening import EarlyAnswers, bind
from offload.streaming.disk import NUM_READERS

MANY, TEXT = 200, "/v1/completions"
ASKED = {"prompt": "Say:", "max_tokens": MANY, "temperature": 0, "stream": True, "offload": {"tree": "none"}}


@pytest.fixture(scope="module")
def served(looper: Path) -> Iterator[Served]:
    with serving(looper, body_s=0.5, keep_alive_s=0.1) as server:
        yield server


def request_bytes(body: Any, *headers: str, path: str = TEXT) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    lines += [] if headers else [f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)


def read_until(client: socket.socket, wanted: bytes) -> bytes:
    """What comes up to there; less where the server closes first."""
    got = b""
    with suppress(ConnectionResetError):
        while wanted not in got and (part := client.recv(4096)):
            got += part
    return got


def read_all(client: socket.socket) -> bytes:
    return read_until(client, b"nothing ends so")


def test_a_client_that_sends_byte_by_byte_keeps_no_model_from_loading() -> None:
    bound = bind("127.0.0.1", 0)
    with EarlyAnswers(bound) as early, socket.create_connection(bound.getsockname(), PATIENCE_S) as client:
        is_over = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not is_over.wait(0.05):
                    client.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        time.sleep(0.2)
        began_s = time.monotonic()
        early.hand_over().close()
        assert time.monotonic() - began_s < 3
        is_over.set()
        dripping.join()


def test_the_first_event_comes_at_once(looper: Path) -> None:
    """A pass that takes long; behind it one that waits for its place; long before comments keep a stream alive."""
    with (
        serving(looper, keep_alive_s=60) as served,
        held_passes() as begun,
        connect(served) as first,
        connect(served) as second,
    ):
        for client in (first, second):
            client.sendall(request_bytes(ASKED))
            assert b"200 OK" in read_until(client, b": waiting\n\n"), "no pass ends before both have been told"
        until(begun.is_set)


@pytest.mark.parametrize("direction", [socket.SHUT_WR, socket.SHUT_RDWR, None], ids=["half closed", "closed", "reset"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up_is_dropped(served: Served, direction: int | None, is_streamed: bool) -> None:
    before = served.engine.figures()
    with before_steps(lambda: time.sleep(0.02)), connect(served) as client:
        client.sendall(request_bytes(ASKED | {"stream": is_streamed}))
        until(lambda: served.engine.figures().num_passes > before.num_passes + 1)
        if direction is None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
        else:
            client.shutdown(direction)
        until(served.rests)
    after = served.engine.figures()
    assert after.num_cancelled == before.num_cancelled + 1
    assert after.num_tokens - before.num_tokens < MANY


def test_a_client_that_hangs_up_while_waiting_is_dropped(served: Served) -> None:
    before = served.engine.figures()
    with held_passes() as begun, connect(served) as first:
        first.sendall(request_bytes(ASKED))
        until(begun.is_set)
        with connect(served) as second:
            second.sendall(request_bytes(ASKED))
            until(lambda: served.engine.figures().num_waiting == 1)
        until(lambda: served.engine.figures().num_waiting == 0)
        assert served.engine.figures().num_active == 1, "the other one goes on"
    until(served.rests)
    after = served.engine.figures()
    assert (after.num_cancelled - before.num_cancelled, after.num_failed) == (2, before.num_failed)


def test_a_body_that_never_ends_and_one_that_never_comes(served: Served) -> None:
    for sent in (
        request_bytes(b"{", "Content-Length: 100"),
        request_bytes(b"5\r\n{    \r\n", "Transfer-Encoding: chunked"),
    ):
        with connect(served) as client:
            client.sendall(sent)
            assert b"408" in read_all(client).split(b"\r\n")[0]


def test_a_body_cut_off_asks_for_nothing(served: Served) -> None:
    before = served.engine.figures()
    with connect(served) as client:
        client.sendall(request_bytes(ASKED)[:-10])
    time.sleep(0.1)
    after = served.engine.figures()
    assert (after.num_passes, after.num_failed) == (before.num_passes, before.num_failed)


def test_what_is_no_http(served: Served) -> None:
    for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / SPDY\r\n\r\n"):
        with connect(served) as client:
            client.sendall(sent)
            assert b"400" in read_all(client).split(b"\r\n")[0]
    with connect(served) as client, suppress(ConnectionError):  # it may end before all was sent
        client.sendall(b"x" * 100_000)
        read_all(client)


def test_a_client_that_does_not_read_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is written meanwhile, and nothing of it is kept for ever."""
    monkeypatch.setattr(http_server, "_READ_S", 0.3)
    before = served.engine.figures()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        body = ASKED | {"offload": {"passes": True}, "n": 8, "seed": 1, "temperature": 9.0}  # megabytes of chunks
        client.sendall(request_bytes(body))
        until(lambda: served.engine.figures().num_cancelled > before.num_cancelled)
    until(served.rests)


def test_a_client_that_sends_no_request_is_cut_off(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(looper) as served:
        with connect(served) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_until(client, b"ok").startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(http_server, "_REQUEST_S", 0.3)
            client.sendall(b"GET /health HT")  # on a connection that was used before
            read_all(client)
        for sent in (b"", b"POST /v1/models HTTP/1.1\r\nHost:"):
            with connect(served) as client:
                client.sendall(sent)
                assert read_all(client) == b""


def test_nothing_is_left_of_clients_that_come_and_go(served: Served) -> None:
    """Pools of threads may fill up to what they hold at most; files and threads of all other kinds are not more."""
    num_clients = 6

    def go() -> None:
        for number in range(num_clients):
            with connect(served) as client:
                client.sendall(request_bytes(ASKED | {"max_tokens": 5}))
                if number % 2:
                    assert b"[DONE]" in read_until(client, b"[DONE]")

    def left() -> tuple[int, int, int, int]:
        names = [thread.name for thread in threading.enumerate()]
        pools = [sum(name.startswith(pool) for name in names) for pool in ("AnyIO worker", "offload-read")]
        return len(os.listdir("/proc/self/fd")), len(names) - sum(pools), *pools

    go()
    until(served.rests)
    num_files, num_others, _, _ = left()
    most = num_files, num_others, num_clients, NUM_READERS
    for _ in range(3):
        go()
    try:
        until(lambda: served.rests() and all(map(le, left(), most)))
    except AssertionError:
        threads = sorted(thread.name for thread in threading.enumerate())
        raise AssertionError(f"{left()} files and threads, {most} allowed; now {threads}") from None
