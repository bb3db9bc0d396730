"""A program that speaks OpenAI's protocol and is not OpenAI's: curl."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from reciting import SAID
from served import HELLO, MODEL_ID, PATIENCE_S, Served, _afresh, serving  # noqa: F401

KEY = "sesame"
has_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[Served]:
    with serving(talker, api_keys=(KEY,)) as found:
        yield found


def run(*command: str, **environment: str) -> str:
    told = {**os.environ, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, env=told, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@has_curl
@pytest.mark.parametrize("is_streamed", [False, True])
def test_curl(served: Served, is_streamed: bool) -> None:
    body = json.dumps({"messages": HELLO, "temperature": 0, "stream": is_streamed})
    headers = ["-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"]
    out = run("curl", "-sSN", f"{served.address}/v1/chat/completions", *headers, "-d", body)
    if not is_streamed:
        assert json.loads(out)["choices"][0]["message"]["content"] == SAID
        return
    *events, last = [event.removeprefix("data: ") for event in out.split("\n\n") if event.startswith("data: ")]
    assert last == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events) == SAID
