"""Clients of a server, and the texts that a soak asks for.

There are whole answers and streams, some left in the middle, some refused. Texts are a small table,
so that each is written again in many ways: any process, tree, memory or neighbours give the same.
Answers are kept as they came, and judged when nothing is measured any more.
"""

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from offload.bench.harness.prompts import prompts
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.sampling_options import Sampling

CONTEXT = 384
NUM_CLIENTS = 8
NUM_WISHES = 48
TEMPLATE = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}# assistant:"
_PROMPT_CHARS = (40, 300)
_SHARED_CHARS = 220  # of a beginning that many texts have, as agents' prompts do
_NUM_SHARED = 3
_LENGTHS = (1, 4, 16, 16, 48)
_TEMPERATURES = (0.0, 0.8)

_LEFT_SHARE = 0.25
_STREAMED_SHARE = 0.6
_REFUSED_SHARE = 0.08
_BUSY_S = 0.5
_TIMEOUT_S = 300.0
_HEADERS = {"Content-Type": "application/json"}
_BAD_BODIES = (
    b"{",
    b'{"prompt": "x", "nonsense": 1}',
    b'{"prompt": [999999]}',
    b'{"prompt": "x", "temperature": -1}',
)


class Wish(NamedTuple):
    text: str
    is_chat: bool
    sampling: Sampling
    num_new: int

    def ids(self, decoder: Decoder) -> list[int]:
        return decoder.encode(self._prompt, raw=not self.is_chat)

    def request(self, decoder: Decoder) -> Request:
        return Request(self.ids(decoder), self.sampling, self.num_new)

    @property
    def _prompt(self) -> Any:
        return [{"role": "user", "content": self.text}] if self.is_chat else self.text

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"temperature": self.sampling.temperature, "seed": self.sampling.seed}
        asked = {"messages" if self.is_chat else "prompt": self._prompt}
        return {**asked, **sampling, "max_tokens": self.num_new}


def wishes() -> list[Wish]:
    """Return the table of texts to ask for, the same on every call."""
    rng = Random("wishes")
    texts = [prompt.text for prompt in prompts(["code"], NUM_WISHES)]
    begins = [text[-_SHARED_CHARS:] for text in texts[:_NUM_SHARED]]
    return [
        Wish(
            rng.choice([*begins, ""]) + texts[number % len(texts)][: rng.randint(*_PROMPT_CHARS)],
            rng.random() < 0.3,
            Sampling(temperature=rng.choice(_TEMPERATURES), seed=rng.randrange(3)),
            rng.choice(_LENGTHS),
        )
        for number in range(NUM_WISHES)
    ]


def with_template(target: Path, folder: Path) -> Path:
    """Return a folder of links to the model, and a template, which the pair lacks."""
    folder.mkdir()
    for path in target.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


class Answer(NamedTuple):
    wish: int
    text: str
    is_whole: bool


class Clients:
    """Some clients, each in a thread while they ask, and with chances of its own."""

    def __init__(self, port: int, table: Sequence[Wish], seed: int) -> None:
        self._port = port
        self._table = table
        self._chances = [Random(f"{seed}/{n}") for n in range(NUM_CLIENTS)]
        self._end_s = 0.0
        self.answers = list[Answer]()
        self.errors = list[str]()
        self.num_refused = 0

    def ask_for(self, seconds: float) -> None:
        """Ask for so long; when this returns, no request is under way."""
        self._end_s = time.monotonic() + seconds
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            try:
                list(pool.map(self._ask, self._chances))
            finally:
                self._end_s = 0.0

    def _ask(self, rng: Random) -> None:
        while time.monotonic() < self._end_s:
            connection = HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
            try:
                self._ask_one(connection, rng)
            except (OSError, HTTPException, ValueError, LookupError) as error:
                self.errors.append(repr(error))
                time.sleep(_BUSY_S)
            finally:
                connection.close()

    def _ask_one(self, connection: HTTPConnection, rng: Random) -> None:
        if rng.random() < _REFUSED_SHARE:
            connection.request("POST", "/v1/completions", rng.choice(_BAD_BODIES), _HEADERS)
            if (status := connection.getresponse().status) not in (400, 429):
                self.errors.append(f"a bad body was answered with {status}")
            return
        name = rng.randrange(len(self._table))
        wish = self._table[name]
        is_streamed = rng.random() < _STREAMED_SHARE
        path = "/v1/chat/completions" if wish.is_chat else "/v1/completions"
        connection.request("POST", path, json.dumps({**wish.body, "stream": is_streamed}), _HEADERS)
        if rng.random() < _LEFT_SHARE and not is_streamed:
            time.sleep(rng.random())  # and it is gone before it is answered
            return
        response = connection.getresponse()
        if response.status == 429:
            response.read()
            self.num_refused += 1
            time.sleep(_BUSY_S)
        elif response.status != 200:
            self.errors.append(f"{response.status}: {response.read(200)!r}")
        elif is_streamed:
            self._follow(name, response, rng.randrange(6) if rng.random() < _LEFT_SHARE else None)
        else:
            said = _said(json.loads(response.read())["choices"][0])
            self.answers.append(Answer(name, said, True))

    def _follow(self, name: int, response: Iterable[bytes], most: int | None) -> None:
        """Follow a stream to its end, or to as many pieces."""
        pieces = list[str]()
        is_whole = False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                is_whole = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                self.errors.append(f"within a stream: {line!r:.200}")
                return
            pieces.append("".join(map(_said, event["choices"])))
            if len(pieces) == most:
                break
        self.answers.append(Answer(name, "".join(pieces), is_whole))
        if not is_whole and most is None:
            self.errors.append("a stream ended before its end")


def _said(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or choice
    return message.get("text") or message.get("content") or ""
