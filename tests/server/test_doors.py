"""Who stands before the server: pages of others, clients without number, names that lead elsewhere, ears at the log."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from served import GREEDY, HELLO, MODEL_ID, Served, _afresh, serving  # noqa: F401
from waiting import until

from offload.server import http_server
from offload.server.guard import Guard
from offload.server.settings import ServerSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {"messages": HELLO, "max_tokens": 2}
KEY = "sesame-open-yourself"


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[Served]:
    with serving(talker) as server:
        yield server


def send(served: Served, raw: bytes) -> bytes:
    """What comes back for these bytes until the server hangs up or is silent."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as caller:
        caller.sendall(raw)
        answer = b""
        try:
            while b"\r\n\r\n" not in answer and (part := caller.recv(4096)):
                answer += part
        except ConnectionError:
            pass
        return answer


@pytest.mark.parametrize(
    ("site", "status"),
    [
        pytest.param("cross-site", 403, marks=pytest.mark.always),
        ("same-site", 403),
        ("nonsense", 403),
        ("same-origin", 200),
        ("none", 200),
        (None, 200),
    ],
)
def test_pages_of_others_may_not_ask(served: Served, site: str | None, status: int) -> None:
    """Not even where a browser would let their JSON through; of its own page, and of no browser, it is told apart."""
    headers = {} if site is None else {"sec-fetch-site": site}
    response = httpx.post(served.address + CHAT, json=ASKED, headers=headers, timeout=60)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["code"] == "wrong_site"
    assert httpx.get(served.address + "/", headers=headers).status_code == 200, "a link leads here"


GUEST = "http://localhost:3000"


@pytest.mark.parametrize("origin", ["http://localhost:3001", "https://localhost:3000", "null", GUEST.upper()])
def test_pages_of_one_origin_may_ask_where_it_is_named(talker: Path, origin: str) -> None:
    """The browser asks first, and lets their scripts read the answer; of any other origin all is as without it."""
    before = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with serving(talker, origins=(GUEST,)) as served:
        url, page = served.address + CHAT, {"origin": GUEST, "sec-fetch-site": "same-site"}
        may = httpx.options(url, headers={**page, **before})
        assert may.status_code == 204 and "Content-Type" in may.headers["access-control-allow-headers"]
        response = httpx.post(url, json=ASKED, headers=page, timeout=60)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == GUEST
        page["origin"] = origin
        for refused in (httpx.options(url, headers={**page, **before}), httpx.post(url, json=ASKED, headers=page)):
            assert refused.status_code in (403, 405) and "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_pages_may_send_unasked_is_no_request(served: Served, kind: str) -> None:
    """Forms, and what scripts send without a preflight: these three types alone."""
    response = httpx.post(served.address + CHAT, content=json.dumps(ASKED), headers={"content-type": kind})
    assert response.status_code == 415


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/", "/nowhere/<script>", "/v1/models/<b>x"])
def test_no_answer_is_taken_for_a_page(served: Served, path: str) -> None:
    response = httpx.get(served.address + path)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert response.headers["content-type"].startswith("text/html") == (path == "/")


WAYS_OUT = [
    "/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/page.html",
    "/v1/models/../../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "/.git/config", "/app.py",
    "/openapi.json", "/docs", "/redoc", "/static/app.py", "/%00", "/etc/passwd%00.html",
]  # fmt: skip


@pytest.mark.parametrize("path", WAYS_OUT)
def test_no_path_leads_to_a_file(served: Served, path: str) -> None:
    """Sent as it stands: clients would tidy it."""
    text = send(served, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert text.startswith(b"HTTP/1.1 404") and b"root:" not in text


HEADS = {
    "one long header": b"X-Long: " + b"x" * 200_000 + b"\r\n",
    "many headers": b"".join(b"X-%d: y\r\n" % number for number in range(20_000)),
    "a long path": b"",
    "two hosts": b"Host: evil.example\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n",
    "a folded line": b"X-A: b\r\n c\x00d\r\n",
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_limited_and_strict(served: Served, name: str) -> None:
    path = b"/" + b"a" * 200_000 if name == "a long path" else b"/health"
    text = send(served, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + HEADS[name] + b"\r\n")
    assert not text or text.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert httpx.get(served.address + "/health").status_code == 200


def is_cut(connection: socket.socket) -> bool:
    """Whether the other end has closed it, or cut it off."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_connections_are_limited(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that never ask: they would take the open files that weights are read by."""
    monkeypatch.setattr(http_server, "_MOST_CONNECTIONS", 8)
    with serving(talker) as served:
        idle = [socket.create_connection(("127.0.0.1", served.port), timeout=20) for _ in range(30)]
        try:
            until(lambda: is_cut(idle[-1]))  # they are seen to in their order
            assert sum(map(is_cut, idle)) == 22
        finally:
            for connection in idle:
                connection.close()

        def is_served() -> bool:
            try:
                return httpx.get(served.address + "/health").status_code == 200
            except httpx.TransportError:
                return False

        until(is_served)


def test_keys_are_compared_whole_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, whichever fits: time tells neither how much of a key was right nor which one it was."""
    import hmac

    compared = list[tuple[int, int]]()
    compare = hmac.compare_digest
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    guard = Guard(None, ServerSettings(model_id="m", api_keys=("a", KEY, "c")))  # type: ignore[arg-type]
    for given in ("a", KEY, "", "x" * 5000):
        compared.clear()
        with nullcontext() if given in ("a", KEY) else pytest.raises(Exception) as refused:
            guard._check_key({"authorization": f"Bearer {given}"}, "/v1/models")
        assert refused is None or KEY not in str(refused.value)
        assert compared == [(32, 32)] * 3


def test_a_key_is_never_told(talker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(talker, api_keys=(KEY,)) as served:
        right, wrong = ({"authorization": f"Bearer {key}"} for key in (KEY, KEY[:-1]))
        answers = [httpx.get(served.address + path, headers=headers) for headers in (right, wrong)
                   for path in ("/", "/health", "/v1/models", "/metrics", "/nowhere", "/v1/models/x")]  # fmt: skip
        answers.append(httpx.post(served.address + CHAT, json={"messages": 1}, headers=right))
    assert not any(KEY[:-1] in response.text or KEY[:-1] in str(response.headers) for response in answers)
    assert KEY[:-1] not in "".join(capsys.readouterr())


def test_the_log_takes_no_lines_of_others(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither lines nor what steers a terminal, by whatever a client may write."""
    said = list[str]()
    logger = logging.getLogger("uvicorn.error")
    before = logger.handlers[:]
    try:
        http_server._hear(said.append)
        logger.error("bad \x1b[2J\x07request %s", "x\roffload: all is well")
        logger.error("one\ntwo")
    finally:
        logger.handlers[:] = before
    assert said == ["server: bad \\x1b[2J\\x07request x\\roffload: all is well", "server: one"]
    bad = ["GET /%0a%1b[2J HTTP/1.1\r\nHost: localhost", "G\x1bET / HTTP/1.1\r\nHost: localhost",
           "GET / HTTP/1.1\r\nHost: \x1b[2J"]  # fmt: skip
    for head in bad:
        send(served, f"{head}\r\nConnection: close\r\n\r\n".encode())
    httpx.post(served.address + CHAT, json=ASKED | {"model": "\x1b[2J\noffload: all is well"})
    assert capsys.readouterr().err == ""
