"""The chat page as a file, without a browser, and as the real server sends it, with a tiny model behind."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
from acts import opened, press, send
from reciting import PIECES, SAID
from served import serving

import offload.server.app
from offload.server.app import create_app
from offload.server.http_server import HttpServer
from offload.server.listening import bind
from offload.server.page import read_page
from offload.server.settings import ServerSettings

FILE = Path(offload.server.app.__file__).with_name("page.html")
MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|srcdoc"


class Elements(HTMLParser):
    """All start tags, each with its attributes and the labels around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None], bool]] = []
        self._open_labels = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open_labels += tag == "label"
        self.tags.append((tag, dict(attrs), self._open_labels > 0))

    def handle_endtag(self, tag: str) -> None:
        self._open_labels -= tag == "label"


def breaches(text: str) -> list[str]:
    """What a page of one file that people can use with a keyboard and a screen reader may not have."""
    elements = Elements(text).tags
    ids = [attributes["id"] for _, attributes, _ in elements if "id" in attributes]
    targets = {attributes.get("for") for tag, attributes, _ in elements if tag == "label"}
    breaches_seen = [f"id {name} twice" for name in {*ids} if ids.count(name) > 1]
    for tag, attributes, is_labelled in elements:
        if tag in ("input", "textarea", "select") and not (is_labelled or attributes.get("id") in targets):
            breaches_seen.append(f"{tag} without a label")
        address = attributes.get("src") or attributes.get("href") or ""
        if address and not address.startswith("data:"):
            breaches_seen.append(f"{tag} from {address}")
        breaches_seen += [f"{name} in {tag}" for name in attributes if name == "style" or name.startswith("on")]
        if tag == "canvas" and not attributes.get("role"):
            breaches_seen.append("canvas without a role")
    breaches_seen += [
        f"address {address}" for address in re.findall(r"https?://[^\s'\"]+", text) if "w3.org/2000/svg" not in address
    ]
    return breaches_seen + re.findall(MARKUP, text)


def test_the_page_keeps_the_rules() -> None:
    text = read_page().body.decode()
    assert breaches(text) == []
    script = text[text.index("<script>") :]
    ids = set(re.findall(r' id="([\w-]+)"', text))
    assert set(re.findall(r"\$\(\"([\w-]+)\"\)", script)) <= ids


def test_hashes_are_those_of_what_is_sent(tmp_path: Path) -> None:
    page = read_page()
    text = page.body.decode()
    for tag, source in (("script", "script-src"), ("style", "style-src")):
        inside = text[text.index(f"<{tag}>") + len(tag) + 2 : text.index(f"</{tag}>")]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in page.headers["Content-Security-Policy"]
    copy = tmp_path / "page.html"
    copy.write_bytes(FILE.read_bytes().replace(b"\n", b"\r\n"))
    assert read_page(copy) == page, "a browser hashes what it has read, and it reads one kind of ends"


pytest_plugins = ["browsing"]


def test_an_answer_with_its_passes(chromium: Any, talker: Path) -> None:
    with serving(talker) as served, opened(chromium, served.address) as page:
        page.locator("#model", has_text="reciter").wait_for()
        press(page, "Settings")
        page.get_by_label("Temperature").fill("0")  # else the end of a text may be drawn at any place
        press(page, "Save")
        for number in range(2):
            send(page, "Say it.")
            page.locator(".figures").nth(number).wait_for()
        assert page.locator(".answer .body").all_inner_texts() == [SAID.strip()] * 2
        passes = page.evaluate("passesNow()")
        assert int(page.inner_text("#num-passes")) == len(passes) < len(PIECES)
        said = [piece if isinstance(piece, str) else piece.decode(errors="replace") for piece in PIECES]
        path = [step["tokens"][node] for step in passes for node in step["accepted"]]
        assert path[0] == said[0] and set(path) <= {*said, "</s>"} and len(path) == len(PIECES)
        assert all(step["sweep_s"] > 0 and step["num_bytes"] > 0 and step["num_texts"] == 1 for step in passes)
        figures = page.locator(".figures").last.inner_text()
        assert f"{len(PIECES)} tokens in {len(passes)} passes" in figures  # the end is one of them


def test_headers_of_the_page(talker: Path) -> None:
    with HttpServer(create_app(None, ServerSettings(model_id="reciter")), bind("127.0.0.1", 0)) as server:
        answer = httpx.get(server.address)
        head = httpx.head(server.address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["content-type"] == "text/html; charset=utf-8" and answer.text.startswith("<!doctype html>")
    assert head.headers["content-length"] == str(len(answer.content)) and head.content == b""
