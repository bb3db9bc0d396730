"""The chat page in a headless Chromium, under its own headers, against a server with a script; and what it draws."""

import json
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from acts import ask, notice, press, problem, send
from matrix import matrix
from stub_server import Stub, a_pass

pytest_plugins = ["browsing"]

HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script> [a](javascript:window.hit=1) &amp;"


def test_an_answer_comes_piece_by_piece_and_stops(page: Any, stub: Stub) -> None:
    send(page, "hold one two three four five six seven eight nine ten eleven twelve thirteen")
    body = page.locator(".answer .body")
    stub.gate.release()
    body.get_by_text("one").wait_for()
    begun = body.inner_text()
    stub.gate.release()
    page.locator("#num-passes", has_text="2").wait_for()
    assert body.inner_text().startswith(begun) and len(body.inner_text()) > len(begun)
    assert page.locator("#log").get_attribute("aria-busy") == "true" and "thirteen" not in body.inner_text()
    page.keyboard.press("Escape")
    page.locator(".figures", has_text="stopped").wait_for()
    assert page.locator("#status").inner_text() == "Stopped" and body.inner_text().startswith(begun)
    for _ in range(50):  # the server notices at its next pieces
        stub.gate.release()
        page.wait_for_timeout(20)
        if stub.num_gone:
            break
    assert stub.num_gone == 1


def test_what_a_model_writes_is_never_markup(page: Any) -> None:
    assert ask(page, f"say {HOSTILE}") == HOSTILE
    assert ask(page, f"say ```{HOSTILE}\n{HOSTILE}\n```").endswith(HOSTILE)
    assert page.locator("#log").locator("img, script, a, iframe").count() == 0 and page.evaluate("window.hit") is None


def test_the_browser_runs_nothing_but_the_script(page: Any, heard: list[str]) -> None:
    """The planted mistakes: what a page that makes markup of text would do is refused by the headers."""
    page.evaluate("""() => document.addEventListener("securitypolicyviolation",
        event => (window.refused ??= []).push(event.effectiveDirective))""")
    page.evaluate("""async () => {
        const dare = act => { try { act(); } catch { /* refused */ } };
        dare(() => { document.body.innerHTML = "<b>x</b>"; });
        dare(() => document.body.append(make("script", {}, "window.hit = 1")));
        dare(() => document.body.setAttribute("onclick", "window.hit = 1"));
        await fetch("https://example.org/").catch(() => null);
        document.body.append(make("img", { src: "/x.png" }), make("p", { data: { style: "color: red" } }, "x"));
        document.body.click();
        await new Promise(resolve => setTimeout(resolve, 100));
    }""")
    kinds = {"require-trusted-types-for", "connect-src", "img-src", "style-src-attr"}
    assert kinds <= set(page.evaluate("window.refused")) and page.evaluate("window.hit") is None
    assert page.locator("b").count() == 0 and len(heard) >= len(kinds)
    heard.clear()


def test_settings_are_sent_only_where_given(page: Any, stub: Stub) -> None:
    ask(page, "say yes")
    (plain,) = stub.asked
    seed = plain.pop("seed")
    assert isinstance(seed, int) and plain == {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "say yes"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "offload": {"passes": True},
    }
    press(page, "Settings")
    page.get_by_label("System prompt").fill("Be short.")
    for name, value in {"Temperature": "0.7", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05", "Seed": "11"}.items():
        page.get_by_label(name).fill(value)
    page.get_by_label("Max tokens").fill("0")
    press(page, "Save")
    assert page.locator("#settings").is_visible()  # 0 is refused, and the field says so
    page.get_by_label("Max tokens").fill("64")
    press(page, "Save")
    page.reload()
    ask(page, "say more")
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11, "max_tokens": 64}
    assert stub.asked[-1].items() >= given.items()
    assert stub.asked[-1]["messages"][0] == {"role": "system", "content": "Be short."}


def test_conversations_are_kept_renamed_exported_and_deleted(page: Any) -> None:
    ask(page, "say one")
    press(page, "New conversation")
    ask(page, f"say {HOSTILE}")
    page.reload()
    assert page.locator("#chats .open").all_inner_texts() == [f"say {HOSTILE}"[:60].strip(), "say one"]
    page.locator("#chats .open", has_text="say one").click()
    assert page.locator(".answer .body").inner_text() == "one"
    page.locator("#chats li.current").hover()
    page.get_by_role("button", name="Rename: say one").click()
    page.keyboard.type("First")
    page.keyboard.press("Enter")
    assert page.locator("#title").inner_text() == "First"
    with page.expect_download() as download:
        press(page, "Export all as JSON")
    exported = json.loads(download.value.path().read_text())
    assert [chat["title"] for chat in exported][-1] == "First" and len(exported) == 2
    assert [message["content"] for message in exported[-1]["messages"]] == ["say one", "one"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#chats li.current").hover()
    page.get_by_role("button", name="Delete: First").click()
    page.reload()
    assert page.locator("#chats .open").count() == 1 and page.locator("#log").get_by_text("window.hit").count() == 2


def test_a_key_is_asked_for_and_sent(page: Any, stub: Stub) -> None:
    stub.key = "a-key"
    page.reload()
    assert notice(page) == "This server wants an API key"
    page.locator("#key").fill("wrong")
    press(page, "Use key")
    page.locator("#notice-text", has_text="not the server's").wait_for()
    problem(page, "say opened")
    page.locator("#key").fill("a-key")
    press(page, "Use key")
    page.locator(".figures").wait_for()
    assert page.locator(".answer .body").inner_text() == "opened" and not page.locator("#key-form").is_visible()
    assert "a-key" not in json.dumps(page.evaluate("({...localStorage})"))


@matrix(
    "order, line",
    [
        ("busy", "64 requests wait already: try later (try again in 7 s)"),
        ("refuse", "`temperature` must be 0 or more, got -1: 0 is greedy"),
        ("page", "The server answers 502 Bad Gateway"),
        ("fail at last", "the disk failed: see whether it is there"),
        ("break off here", "The server ended before the answer did: try again"),
    ],
    daily=2,
)
def test_errors_are_one_line(page: Any, order: str, line: str) -> None:
    assert problem(page, order) == line
    assert page.locator(".answer .body").all_inner_texts() == [text for text in [order.partition(" ")[2]] if text]
    assert page.locator("#again").is_visible() and page.locator("#send").inner_text() == "Send"


MARKDOWN = """# Why

Of **two *kinds***, `a_b` and 2*3*4:

1. first
   ```python
   def f():
       return 1
   ```
2. second
   - deep

| pass | tokens |
|---|---|
| 1 | 5 |

> said

```
open"""


def test_markdown_becomes_nodes(page: Any) -> None:
    ask(page, f"say {MARKDOWN}")
    body = page.locator(".answer .body")
    assert body.locator("h3").inner_text() == "Why"
    assert body.locator("strong").inner_text() == "two kinds" and body.locator("strong em").inner_text() == "kinds"
    assert body.locator("p code").inner_text() == "a_b" and "2*3*4" in body.inner_text()
    assert (
        body.locator("ol > li").count() == 2 and body.locator("ol > li:nth-child(2) > ul > li").inner_text() == "deep"
    )
    assert body.locator("ol pre").inner_text() == "def f():\n    return 1"
    assert body.locator("td").all_inner_texts() == ["1", "5"] and body.locator("blockquote").inner_text() == "said"
    assert body.locator("pre").last.inner_text() == "open"  # a fence without an end is one that is being written


def test_events_are_the_same_however_they_are_cut(page: Any) -> None:
    stream = (
        ': alive\r\n\r\ndata: {"a":\r\ndata: "é"}\r\n\r\nevent: x\ndata:one\ndata: two\n\ndata: three\r\rdata: half'
    )
    draw = random.Random(0)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(stream)), 12))
        pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        events = page.evaluate("pieces => { const read = eventReader(); return pieces.flatMap(read); }", pieces)
        assert events == ['{"a":\n"é"}', "one\ntwo", "three"]


def test_the_figures_of_passes_are_shown(page: Any) -> None:
    ask(page, "say " + "word " * 40)
    num_passes, per_pass = int(page.inner_text("#num-passes")), float(page.inner_text("#tokens-per-pass"))
    assert num_passes > 5 and round(num_passes * per_pass) in (40, 41)  # the last blank may be a token
    # a speed where the last token came measurably later than the first
    assert re.search(r"4[01] tokens in \d+ passes · (.* tokens/s · )?seed \d+", page.inner_text(".figures"))
    assert page.inner_text("#read") == "1.62 GB at 2.25 GB/s" and page.inner_text("#stall-s") == "400 ms"
    assert page.inner_text("#compute-s") == "320 ms" and page.inner_text("#draft-s") == "110 ms"
    parts = page.evaluate("[...$('spent').children].map(part => part.offsetWidth / $('spent').offsetWidth)")
    assert parts == pytest.approx([0.11 / 0.83, 0.32 / 0.83, 0.4 / 0.83], abs=0.01)
    bars = page.locator("#bars")
    bars.focus()
    page.keyboard.press("Home")
    assert bars.get_attribute("aria-valuenow") == "1" and page.inner_text("#tree-note").startswith("47 guesses: ")
    page.keyboard.press("End")
    assert bars.get_attribute("aria-valuenow") == str(num_passes)


def is_tidy(parents: list[int], depth: list[int], place: list[float]) -> bool:
    """Whether children are one deeper than their parent, and lie in its own part of the picture alone."""
    spans = [[y, y] for y in place]
    for child in range(len(parents) - 1, 0, -1):
        mother = spans[parents[child]]
        mother[:] = [min(mother[0], spans[child][0]), max(mother[1], spans[child][1])]
    siblings: dict[int, list[list[float]]] = {}
    for child, mother in enumerate(parents[1:], 1):
        siblings.setdefault(mother, []).append(spans[child])
    apart = all(a[1] + 0.99 < b[0] for group in siblings.values() for a, b in pairwise(group))
    return apart and all(depth[child] == depth[mother] + 1 for child, mother in enumerate(parents) if child)


def test_trees_are_laid_out_without_crossings(page: Any) -> None:
    for num_nodes, seed in ((1, 0), (2, 1), (64, 2), (500, 3)):
        parents = a_pass(num_nodes, min(num_nodes, 6), [" x"] * 6, seed)["parents"]
        result = page.evaluate("parents => Object.values(layOut(parents)).slice(0, 2).map(each => [...each])", parents)
        assert is_tidy(parents, *result)
        assert num_nodes == 1 or not is_tidy(parents, [0] * num_nodes, result[1])
        assert num_nodes < 3 or not is_tidy(parents, result[0], [0.0] * num_nodes)
