"""A server that speaks just enough of the protocol for the chat page, from a script: what is asked decides what comes.

Why: the page is tested against whatever a server may say, broken streams and refusals included, without a model. A test
holds the stream where it wants to look (`gate`) and reads what was asked (`asked`).
"""

import json
import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from offload.server.page import read_page

WORDS = [" the", " a", " of", "\n", " sweep", " tree", "s", ",", " and", " weights", " is", " to", " node", " path"]


class Stub(ThreadingHTTPServer):
    """Bound to a free port of this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []  # bodies, in order
        self.key: str | None = None  # that is demanded
        self.gate = threading.Semaphore(0)  # one for each pass behind `hold`
        self.num_gone = 0  # clients that left in the middle
        self.page = read_page()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


@contextmanager
def running_stub() -> Iterator[Stub]:
    """A stub that serves from a thread of its own."""
    stub = Stub()
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        stub.gate.release(10_000)
        stub.shutdown()
        stub.server_close()
        thread.join()


def a_pass(num_nodes: int, gain: int, path: list[str], seed: int = 0) -> dict[str, Any]:
    """Figures of a pass: a tree in level order with a path of `gain` nodes, whose texts are `path`."""
    draw = random.Random(seed)
    depths = sorted([*range(gain), *(draw.randint(1, gain + 2) for _ in range(num_nodes - gain))])
    levels: dict[int, list[int]] = {}
    parents, tokens, accepted = [-1], [path[0]], [0]
    levels[0] = [0]
    for depth in depths[1:]:
        depth = min(depth, len(levels))
        on_path = depth < gain and depth not in levels
        parents.append(accepted[-1] if on_path else draw.choice(levels[depth - 1]))
        tokens.append(path[depth] if on_path else draw.choice(WORDS))
        levels.setdefault(depth, []).append(len(parents) - 1)
        accepted += [len(parents) - 1] if on_path else []
    times = {"num_texts": 1 + seed % 3, "draft_s": 0.11, "sweep_s": 0.72, "stall_s": 0.4, "num_bytes": 1_620_000_000}
    return {"parents": parents, "tokens": tokens, "accepted": accepted, **times}


def passes_of(text: str, num_nodes: int = 48) -> Iterator[tuple[str, dict[str, Any]]]:
    """A text in pieces of some tokens, each with its pass."""
    tokens = re.findall(r"\s*\w+|\s*[^\w\s]+|\s+$", text)
    draw, at, seed = random.Random(1), 0, 0
    while at < len(tokens):
        gain = min(draw.choice([1, 2, 3, 4, 4, 5, 6, 8]), len(tokens) - at)
        path = [tokens[at - 1] if at else "\n", *tokens[at : at + gain - 1]]
        yield "".join(tokens[at : at + gain]), a_pass(num_nodes, gain, path, seed)
        at, seed = at + gain, seed + 1


class _Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(200, self.server.page.body, self.server.page.headers)
        elif self._is_allowed():
            self._json(200, {"data": [{"id": "tiny-llama", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        self.server.asked.append(body)
        order, _, rest = body["messages"][-1]["content"].partition(" ")
        if order == "busy":
            self._json(429, _error("64 requests wait already: try later"), {"Retry-After": "7"})
        elif order == "refuse":
            self._json(400, _error("`temperature` must be 0 or more, got -1:\n0 is greedy"))
        elif order == "page":
            self._answer(502, b"<h1>Bad gateway</h1>", {"Content-Type": "text/html"})
        else:
            self._stream(order, rest)

    def _stream(self, order: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self._write(b": the connection lives\n\n")
            self._chunk({"role": "assistant"})
            num_tokens = self._pieces(order, text)
            if order == "fail":
                self._event(_error("the disk failed: see whether it is there"))
            elif order != "break":
                self._chunk({}, finish_reason="stop")
                self._event({"choices": [], "usage": {"completion_tokens": num_tokens}})
                self._write(b"data: [DONE]\n\n")
        except OSError:
            self.server.num_gone += 1

    def _pieces(self, order: str, text: str) -> int:
        num_tokens = 0
        for piece, figures in passes_of(text, 500 if order == "large" else 48):
            if order == "hold" and not self.server.gate.acquire(timeout=20):
                break
            self._chunk({"content": piece}, offload=figures)
            num_tokens += len(figures["accepted"])
        return num_tokens

    def _chunk(self, delta: dict[str, str], *, finish_reason: str | None = None, offload: object = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        self._event(
            {"object": "chat.completion.chunk", "choices": [choice]} | ({"offload": offload} if offload else {})
        )

    def _event(self, value: object) -> None:
        self._write(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        """In halves: what comes over a network is cut anywhere, inside a character too."""
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.wfile.write(half)
            self.wfile.flush()

    def _is_allowed(self) -> bool:
        is_allowed = self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}"
        if not is_allowed:
            self._json(401, _error("Incorrect API key provided"))
        return is_allowed

    def _json(self, status: int, value: object, headers: Mapping[str, str] = {}) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _error(message: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
