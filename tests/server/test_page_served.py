"""The chat page as the real server sends it, with a tiny model behind: what is drawn is what its passes did."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from reciting import PIECES, SAID, open_decoder
from served import serving

from offload.engine.service import Engine
from offload.server.app import create_app
from offload.server.listening import bind
from offload.server.network import Listening
from offload.server.protocol import ServerSettings

pytest_plugins = ["browsing"]


@contextmanager
def opened(chromium: Any, address: str) -> Iterator[Any]:
    """The page in a profile of its own; errors of its script fail the test."""
    context, errors = chromium.new_context(viewport={"width": 1300, "height": 800}), list[str]()
    context.set_default_timeout(15_000)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield page
    context.close()
    assert errors == []


def send(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def be_greedy(page: Any) -> None:
    """Else the end of a text may be drawn at any place."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Save").click()


def test_an_answer_with_its_passes(chromium: Any, talker: Path) -> None:
    with serving(talker) as served, opened(chromium, served.address) as page:
        page.locator("#model", has_text="reciter").wait_for()
        be_greedy(page)
        for number in range(2):
            send(page, "Say it.")
            page.locator(".figures").nth(number).wait_for()
        assert page.locator(".answer .body").all_inner_texts() == [SAID.strip()] * 2
        passes = page.evaluate("passesNow()")
        assert int(page.inner_text("#num-passes")) == len(passes) < len(PIECES)
        said = [piece if isinstance(piece, str) else piece.decode(errors="replace") for piece in PIECES]
        path = [one["tokens"][node] for one in passes for node in one["accepted"]]
        assert path[0] == said[0] and set(path) <= {*said, "</s>"} and len(path) == len(PIECES)
        assert all(one["sweep_s"] > 0 and one["num_bytes"] > 0 and one["num_texts"] == 1 for one in passes)
        figures = page.locator(".figures").last.inner_text()
        assert f"{len(PIECES)} tokens in {len(passes)} passes" in figures  # the end is one of them


def test_the_page_is_there_while_a_model_loads(chromium: Any, talker: Path) -> None:
    app = create_app(None, ServerSettings(model_id="reciter"))
    with Listening(app, bind("127.0.0.1", 0)) as server, opened(chromium, server.address) as page:
        send(page, "Now?")
        page.locator("#notice-text", has_text="the model is loading").wait_for()
        with open_decoder(talker) as decoder, Engine(decoder) as engine:
            app.state.engine = engine
            page.get_by_role("button", name="Try again").click()
            page.locator(".figures").wait_for()
            engine.close()


def test_headers_of_the_page(talker: Path) -> None:
    with Listening(create_app(None, ServerSettings(model_id="reciter")), bind("127.0.0.1", 0)) as server:
        answer = httpx.get(server.address)
        head = httpx.head(server.address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["content-type"] == "text/html; charset=utf-8" and answer.text.startswith("<!doctype html>")
    assert head.headers["content-length"] == str(len(answer.content)) and head.content == b""
