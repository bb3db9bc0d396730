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


def test_reset_empties_every_field_and_an_example_is_a_question(page: Any, stub: Stub) -> None:
    press(page, "Settings")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("System prompt").fill("Be short.")
    press(page, "Reset")
    press(page, "Save")
    examples = page.locator("#examples button")
    told = examples.all_inner_texts()
    examples.nth(1).click()
    page.locator(".figures, #notice-text").first.wait_for()
    assert len(told) == 4 and stub.asked[0]["messages"] == [{"role": "user", "content": told[1]}]
    assert "temperature" not in stub.asked[0] and page.locator("#examples").count() == 0


def test_regenerate_asks_the_same_with_another_seed(page: Any, stub: Stub) -> None:
    """Where another answer cannot be had the one before comes back."""
    ask(page, "say one")
    press(page, "Regenerate")
    page.locator(".figures").wait_for()
    first, second = stub.asked
    assert first.pop("seed") != second.pop("seed") and first == second
    assert page.locator(".answer").count() == 1
    stub.key = "changed meanwhile"
    press(page, "Regenerate")
    assert "key" in notice(page) and page.locator(".answer .body").inner_text() == "one"


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


def test_a_store_may_be_strange_or_full(page: Any) -> None:
    """What is no conversation is left alone; a full one is told of, and nothing stops."""
    strange = {"offload.chat.a": "{", "offload.chat.b": '{"id": "b", "messages": 3}', "else": "1"}
    page.evaluate("strange => Object.assign(localStorage, strange)", strange)
    page.reload()
    assert ask(page, "say fine") == "fine"
    assert page.evaluate("({...localStorage})").items() >= strange.items()
    page.evaluate("""() => {
        Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); };
    }""")
    assert ask(page, "say on") == "on"
    assert "keeps no more" in notice(page) and "export" in notice(page)


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


CODE = {
    "python": '@decorated\ndef f(x):  # why\n    return \'it\\\'s\' + """a\nb""" + str(0x1f)\n',
    "js": "const f = (x) => `a ${x}` + 'b'; // why\n/* more\nlines */ return null;\n",
    "rust": "fn main() { let c: char = 'a'; let s: &'static str = \"b\"; } // why\n",
    "sh": 'for f in *.py; do echo "$f" $#; done # why\n',
    "sql": "SELECT a FROM t WHERE b = 'x' -- why\n",
    "json": '{"a": [1, true, null]}',
    "brainf": "++ 'a' # [-]",
    "": "def f(): pass",
}


def test_code_is_coloured_and_stays_what_it_is(page: Any) -> None:
    for language, code in CODE.items():
        parts = page.evaluate("args => colouredOf(...args)", [code, language])
        assert "".join(text for _, text in parts) == code
        kinds = {kind for kind, _ in parts}
        assert kinds == {""} if language in ("brainf", "") else kinds >= {"string", "word"} or language == "json"
        assert language in ("json", "brainf", "") or any(k == "comment" and "why" in text for k, text in parts)
    python = page.evaluate("args => colouredOf(...args)", [CODE["python"], "python"])
    assert ["word", "def"] in python and ["call", "f"] in python and ["number", "0x1f"] in python
    assert ["string", '"""a\nb"""'] in python and ["string", "'it\\'s'"] in python
    ask(page, f"say ```python\n{CODE['python']}```")
    assert page.locator(".block .word").first.inner_text() == "def"
    assert page.locator(".block").get_by_role("button", name="Copy").count() == 1


def test_markdown_while_it_comes_keeps_what_is_whole(page: Any) -> None:
    """Every prefix parses, and a block that is followed by another keeps its nodes."""
    assert page.evaluate("""text => {
        const view = viewOf({ role: "assistant", content: "" });
        let first = null;
        for (let n = 0; n <= text.length; n++) {
            view.message.content = text.slice(0, n);
            showAnswer(view);
            if (n === 30) first = view.body.firstChild;
        }
        const alone = viewOf({ role: "assistant", content: text });
        showAnswer(alone);
        return view.body.firstChild === first && view.body.isEqualNode(alone.body);
    }""", MARKDOWN)  # fmt: skip


def test_neither_markdown_nor_colours_take_a_square_of_a_texts_length(page: Any) -> None:
    units = ("**a ", "`a ``b ", "> ", "- ", "*a", "|", "```\n", "1. a\n\n  ", "a|b\n--|--\n", "<think>\n")
    texts = [unit * (40_000 // len(unit)) for unit in units]
    around = ("```", "# a", "|-", "- a", "-", ">", "`", "**a")
    texts += [f"{start}{' ' * 40_000}{end}" for start in around for end in "`x|"]
    texts += ["- a" + "\n" * 40_000, "- a" + "\n" * 40_000 + "b"]
    timed = "args => {{ const begun = performance.now(); {}; return performance.now() - begun; }}"
    for text in texts:
        draw = timed.format("blocksOf(args).map(blockNode)")
        # a square would take ten times that; another program may take the processor once
        assert any(page.evaluate(draw, text) < 1500 for _ in range(3)), text[:8]
    for unit in ("'", '"', '"""', "/*", "`", "a", "a ", "1.", "\\", "'\\", "#", "--", "a(", "/", " "):
        for language in ("python", "js", "rust", "sh", "sql", "json"):
            code = [unit * (39_999 // len(unit)), language]
            colour = timed.format("colouredOf(...args)")
            assert any(page.evaluate(colour, code) < 500 for _ in range(3)), (unit, language)


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


LONG = f"# Why\n\n```python\n{'x = 1  ' * 40}\n```\n\n| pass | tokens |\n|---|---|\n| 1 | 5 |\n\n{'x' * 300}"


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


def test_a_nodes_text_is_told_under_the_pointer(page: Any) -> None:
    ask(page, "say one two three four")
    point = page.evaluate("$('tree').points.filter(point => point.isAccepted).at(-1)")
    page.locator("#tree").hover(position={"x": point["x"], "y": point["y"]})
    assert page.inner_text("#tip").startswith(point["text"].replace(" ", "␣").replace("\n", "↵"))
    page.mouse.move(5, 5)
    assert not page.locator("#tip").is_visible()
    labels = page.evaluate("texts => texts.map(labelOf)", [" self", "        ", "\n    ", "", "a  b", "x"])
    assert labels == ["self", "␣", "↵", "∅", "a␣b", "x"], "blanks do not fill them"


def test_the_models_own_token_is_told_apart(page: Any) -> None:
    """A pass that kept n guesses brought n + 1 tokens: the last is a ring, and the next pass begins with it."""
    ask(page, "say one two three four five six seven eight nine ten")
    page.locator("#bars").focus()
    page.keyboard.press("Home")
    first, second = page.evaluate("passesNow().slice(0, 2)")
    assert page.inner_text("#tree-note").endswith(f": {len(first['accepted']) - 1} kept, 1 added")
    added = page.evaluate("$('tree').points.at(-1)")
    assert added["text"] == second["tokens"][0] and added["depth"] == len(first["accepted"])
    page.locator("#tree").hover(position={"x": added["x"], "y": added["y"]})
    assert page.inner_text("#tip").endswith("added by the model itself")
    assert "kept guess" in page.inner_text("#tree-figure .legend")


def test_branches_bend_where_no_label_is(page: Any) -> None:
    """At every depth the zone of labels ends before the next depth begins, and a label fits into its zone."""
    ask(page, "large " + "word " * 30)
    width = page.evaluate("$('tree').clientWidth")
    for points in page.evaluate("passesNow().map((_, number) => { choose(number); return $('tree').points; })"):
        starts = {point["depth"]: point["x"] for point in points}
        for point in points:
            following = starts.get(point["depth"] + 1)
            assert following is None or point["x"] + point["zone"] < following
        assert all(0 <= point["x"] <= width for point in points)


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
        found = page.evaluate("parents => Object.values(layOut(parents)).slice(0, 2).map(each => [...each])", parents)
        assert is_tidy(parents, *found)
        assert num_nodes == 1 or not is_tidy(parents, [0] * num_nodes, found[1])
        assert num_nodes < 3 or not is_tidy(parents, found[0], [0.0] * num_nodes)


def test_a_pass_that_makes_no_sense_is_not_drawn(page: Any) -> None:
    good = {"parents": [-1, 0, 0, 1], "tokens": ["a", "b", "c", "d"], "accepted": [0, 1]}
    bad = [{"parents": [-1, 2, 0, 1]}, {"tokens": ["a"]}, {"accepted": [0, 4]}, {"accepted": []}, {"parents": "abcd"}]
    found = page.evaluate("passes => passes.map(isPass)", [good, *({**good, **each} for each in bad)])
    assert found == [True] + [False] * len(bad)


@matrix("width", [320, 390, 800, 1300], always=[320, 1300])
@matrix("scheme", ["light", "dark"], daily=1)
def test_nothing_sticks_out_at_any_width(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    page.emulate_media(color_scheme=scheme)
    ask(page, f"say {LONG}")
    if width < 1120:
        page.locator("#show-passes").click()
    assert page.locator("#tree").is_visible() and page.locator("#send").is_visible()
    assert page.inner_text("#model") == "tiny-llama" and page.locator("#model").is_visible()
    sticking = """() => [...document.querySelectorAll("main *, #passes *")].filter(node => node.checkVisibility()
        && !node.closest("pre, .wide, .unseen") && node.getBoundingClientRect().right > innerWidth + 1)
        .map(node => node.outerHTML.slice(0, 80))"""
    assert page.evaluate(sticking) == [] and page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("log", "passes"):
        assert page.evaluate("name => $(name).scrollWidth <= $(name).clientWidth", name)


@matrix("scheme", ["light", "dark"], daily=1)
def test_texts_stand_out_from_their_ground(page: Any, scheme: str) -> None:
    """Contrast as WCAG 2 has it: 4.5 for texts, 3 for what is drawn."""
    page.emulate_media(color_scheme=scheme)
    names = ["ground", "sheet", "ink", "soft", "own", "accent", "on-accent", "bad", "code"]
    names += ["word", "string", "number", "call"]
    named = dict(zip(names, page.evaluate("names => names.map(colourOf)", names), strict=True))
    grounds = {"ink": ("ground", "own"), "soft": ("ground", "sheet", "own", "code"), "bad": ("ground",)}
    grounds |= {"on-accent": ("accent",), **dict.fromkeys(("word", "string", "number", "call"), ("code",))}
    for text, ground in ((text, ground) for text, own in grounds.items() for ground in own):
        assert contrast(named[text], named[ground]) >= 4.5, (text, ground)
    assert contrast(named["accent"], named["sheet"]) >= 3


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as #rrggbb."""

    def light(colour: str) -> float:
        parts = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)
