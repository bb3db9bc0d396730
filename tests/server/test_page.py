"""The chat page in a headless Chromium, under the headers that it is served with, against a server with a script."""

import json
from typing import Any

from acts import ask, notice, press, problem, send
from matrix import matrix
from stub_server import Stub

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


def test_reset_empties_every_field(page: Any, stub: Stub) -> None:
    press(page, "Settings")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("System prompt").fill("Be short.")
    press(page, "Reset")
    press(page, "Save")
    ask(page, "say yes")
    assert "temperature" not in stub.asked[-1] and len(stub.asked[-1]["messages"]) == 1


def test_an_example_is_a_question(page: Any, stub: Stub) -> None:
    examples = page.locator("#examples button")
    told = examples.all_inner_texts()
    examples.nth(1).click()
    page.locator(".figures, #notice-text").first.wait_for()
    assert len(told) == 4 and stub.asked[0]["messages"] == [{"role": "user", "content": told[1]}]
    assert page.locator("#examples").count() == 0


def test_regenerate_asks_the_same_with_another_seed(page: Any, stub: Stub) -> None:
    ask(page, "say one")
    press(page, "Regenerate")
    page.locator(".figures").wait_for()
    first, second = stub.asked
    assert first.pop("seed") != second.pop("seed") and first == second
    assert page.locator(".answer").count() == 1


def test_an_answer_comes_back_where_another_cannot_be_had(page: Any, stub: Stub) -> None:
    ask(page, "say kept")
    stub.key = "changed meanwhile"
    press(page, "Regenerate")
    assert "key" in notice(page) and page.locator(".answer .body").inner_text() == "kept"


def test_a_question_is_edited_and_sent_anew(page: Any, stub: Stub) -> None:
    ask(page, "say one")
    ask(page, "say two")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Question in other words").fill("say three")
    press(page, "Send anew")
    page.locator(".answer .body", has_text="three").wait_for()
    assert [message["content"] for message in stub.asked[-1]["messages"]] == ["say three"]
    assert page.locator(".question .body").all_inner_texts() == ["say three"]


def test_enter_sends_and_shift_enter_does_not(page: Any, stub: Stub) -> None:
    page.fill("#question", "say a")
    page.press("#question", "Shift+Enter")
    page.keyboard.type("b")
    page.dispatch_event("#question", "keydown", {"key": "Enter", "isComposing": True})  # ends a word, not the question
    assert stub.asked == []
    page.press("#question", "Enter")
    page.locator(".figures").wait_for()
    assert stub.asked[0]["messages"][-1]["content"] == "say a\nb" and page.input_value("#question") == ""


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


def test_two_conversations_are_answered_at_once(page: Any, stub: Stub) -> None:
    send(page, "hold slow words come one by one")
    page.locator("#send", has_text="Stop").wait_for()
    press(page, "New conversation")
    assert ask(page, "say quick") == "quick"
    assert page.locator("#chats .writing").count() == 1
    stub.gate.release(20)
    page.locator("#chats .open", has_text="hold").click()
    page.locator(".figures").wait_for()
    assert page.locator(".answer .body").inner_text() == "slow words come one by one"


def test_a_full_store_is_told_and_nothing_stops(page: Any) -> None:
    page.evaluate("""() => {
        Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); };
    }""")
    assert ask(page, "say on") == "on"
    assert "keeps no more" in notice(page) and "export" in notice(page)


def test_what_is_no_conversation_is_left_alone(page: Any) -> None:
    strange = {"offload.chat.a": "{", "offload.chat.b": '{"id": "b", "messages": 3}', "else": "1"}
    page.evaluate("strange => Object.assign(localStorage, strange)", strange)
    page.reload()
    assert ask(page, "say fine") == "fine"
    assert page.evaluate("({...localStorage})").items() >= strange.items()


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


def test_a_server_that_is_gone_and_comes_back(page: Any, stub: Stub) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    assert "does not answer: see whether `offload serve` still runs" in problem(page, "say back")
    page.unroute("**/v1/**")
    press(page, "Try again")
    page.locator(".figures").wait_for()
    assert page.locator(".answer .body").inner_text() == "back" and not page.locator("#notice").is_visible()
