"""`offload serve` from outside: what it refuses before a weight is read, when it answers, and how it ends."""

import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from reciting import recited, settings
from shell import shell, start

from offload.checkpoint.generation_config import served_sampling
from offload.cli.serve_command import read_keys
from offload.cli.serving import serving_lines
from offload.errors import UserError
from offload.sampling_options import Sampling
from offload.server.core.refusals import refuse_loading
from offload.server.error_forms import error_body
from offload.server.listening import EarlyAnswers, bind

PATIENCE_S = 120


@contextmanager
def served(model: Path, *flags: object) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that answers, and its address; it is ended if the test has not."""
    running = start("serve", *settings(model), "--parallel", 1, "--port", 0, *flags)
    try:
        assert running.stderr is not None
        lines = list[str]()
        while not (match := re.search(r"API +(http://\S+)/v1", "".join(lines))):
            lines.append(running.stderr.readline().decode())
            assert lines[-1], f"it ended: {lines}"
        yield running, match[1]
    finally:
        running.kill()
        running.communicate()


def asked(address: str, **body: Any) -> Any:
    """A request for the text behind `Say:`, or other fields."""
    fields = {"prompt": "Say:", "temperature": 0, **body}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("keys", "host", "line"),
    [
        ("sesame\n", "no.such.host.invalid", "cannot listen on --host 'no.such.host.invalid'"),
        ("sesame\n", "192.0.2.1", "name an address of this machine as --host"),
        (None, "127.0.0.1", "/KEYS (No such file or directory): check the path"),
        ("\n \n", "127.0.0.1", "must hold a key of printable ASCII a line"),
        ("#mine\nsesame", "127.0.0.1", "without spaces and comments"),
        ("open sesame", "127.0.0.1", "without spaces and comments"),
        ("sesame\n", "taken", "(Address already in use): give another --port"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(
    looper: Path, tmp_path: Path, keys: str | None, host: str, line: str
) -> None:
    if keys is not None:
        (tmp_path / "KEYS").write_text(keys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if host == "taken" else 0
        host = host.replace("taken", "127.0.0.1")
        flags = ("--port", port, "--host", host, "--api-key-file", tmp_path / "KEYS")
        outcome = shell("serve", "-m", looper, *flags)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert line in outcome.err


def test_keys_are_lines_and_both_addresses_are_told(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    assert read_keys(tmp_path / "keys", "127.0.0.1") == ("one", "two")
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert read_keys(None, host) == ()
    for host in ("0.0.0.0", "::", "192.168.1.2", "localhost.example"):
        with pytest.raises(UserError, match="api-key-file"):
            read_keys(None, host)
    assert serving_lines("big", "http://127.0.0.1:8080").splitlines() == [
        "serving big, Ctrl-C ends it",
        "  chat page  http://127.0.0.1:8080/",
        "  API        http://127.0.0.1:8080/v1",
    ]


def test_sampling_is_the_models_or_openais(tmp_path: Path) -> None:
    assert served_sampling(str(tmp_path)) == Sampling(temperature=1.0)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    assert served_sampling(str(tmp_path)) == Sampling(temperature=0.6, top_k=20)


def test_it_answers_from_its_first_second(looper: Path) -> None:
    """Before torch is imported; and from then on no connection is refused, early or late."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = start("serve", *settings(looper), "--parallel", 1, "--port", port, is_cold=True)
    try:
        began_s, answers = time.monotonic(), list[tuple[float, str, int]]()
        while not answers or answers[-1][2] == 503:
            path = "/" if len(answers) % 2 else "/health"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as response:
                    status = response.status
            except urllib.error.HTTPError as error:
                status = error.code
                output = error.read()
                assert path == "/" or json.loads(output) == {"status": "loading"}
            except urllib.error.URLError:
                assert not answers, "once it has answered, it is not refused"
                assert running.poll() is None
                time.sleep(0.02)
                continue
            answers.append((time.monotonic() - began_s, path, status))
            time.sleep(0.02)
        first_s, last_s = answers[0][0], answers[-1][0]
        assert answers[0][2] == 503 and first_s < last_s / 2, answers
    finally:
        running.kill()
        _, output = running.communicate()
    assert f"http://127.0.0.1:{port} answers 503 until the model is loaded\n" in output.decode()


def test_early_answers_are_those_of_the_server_that_loads() -> None:
    """Body and code are those; a client that says nothing, or goes away, holds up no other for long."""
    refusal = refuse_loading()
    with EarlyAnswers(bind("127.0.0.1", 0)) as early:
        host, port = early.address.removeprefix("http://").split(":")
        silent = socket.create_connection((host, int(port)))
        socket.create_connection((host, int(port))).close()
        with pytest.raises(urllib.error.HTTPError) as error:
            asked(early.address, prompt="x" * 20_000)
        assert error.value.code == refusal.status and json.load(error.value) == error_body("/v1/completions", refusal)
        silent.close()
        bound = early.hand_over()
    assert bound.fileno() >= 0, "who has it now closes it"
    bound.close()


@pytest.mark.full
def test_sigterm_lets_texts_end(looper: Path) -> None:
    """One is under way, one waits: the first is written to its end, the other is told, and so is who comes later."""
    with served(looper, "--grace", 60, "--link-limit", "40MB") as (running, address):
        answers = dict[str, Any]()

        def ask(name: str) -> None:
            try:
                with asked(address, max_tokens=60) as response:
                    answers[name] = json.load(response)
            except urllib.error.HTTPError as error:
                answers[name] = (error.code, json.load(error))

        threads = [threading.Thread(target=ask, args=[name]) for name in ("first", "second")]
        threads[0].start()
        until_metric(address, "offload_requests_active", 1)
        threads[1].start()
        until_metric(address, "offload_requests_waiting", 1)
        running.send_signal(signal.SIGTERM)
        threads[1].join()
        assert answers["second"][0] == 503
        assert answers["second"][1]["error"]["code"] == "closing"
        threads[0].join()
        assert answers["first"]["choices"][0]["text"] == recited(200)[: len(answers["first"]["choices"][0]["text"])]
        assert answers["first"]["usage"]["completion_tokens"] == 60
        assert running.wait(PATIENCE_S) == 0


@pytest.mark.full
def test_without_grace_a_pass_ends_at_its_next_layer(looper: Path) -> None:
    with served(looper, "--grace", 0, "--link-limit", "1MB") as (running, address):
        with asked(address, max_tokens=200, stream=True) as response:
            until_metric(address, "offload_requests_active", 1)
            begun = time.monotonic()
            running.send_signal(signal.SIGINT)
            assert b'"code":"closing"' in response.read()
        assert running.wait(PATIENCE_S) == 0
        assert time.monotonic() - begun < 30, "and not when 200 tokens are written"


@pytest.mark.full
def test_two_signals_at_once_end_it(looper: Path) -> None:
    """As a supervisor sends them that signals a group and its leader."""
    with served(looper) as (running, _):
        for _ in range(2):
            running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE_S) in (0, 128 + signal.SIGTERM)


def until_metric(address: str, name: str, value: float) -> None:
    begun = time.monotonic()
    while True:
        with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S) as response:
            if f"\n{name} {value}\n" in response.read().decode():
                return
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.01)
