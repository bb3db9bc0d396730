"""What is made of a model's text: nodes of a few kinds, while it comes and however it is cut, in linear time."""

import random
from typing import Any

from acts import ask

pytest_plugins = ["browsing"]

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


def test_colouring_takes_no_square_of_its_length(page: Any) -> None:
    units = ("'", '"', '"""', "/*", "`", "a", "a ", "1.", "\\", "'\\", "#", "--", "a(", "/", " ")
    draw = "args => { const begun = performance.now(); colouredOf(...args); return performance.now() - begun; }"
    for unit in units:
        for language in ("python", "js", "rust", "sh", "sql", "json"):
            assert page.evaluate(draw, [unit * (39_999 // len(unit)), language]) < 500, (unit, language)


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


def test_markdown_takes_no_square_of_its_length(page: Any) -> None:
    units = ("**a ", "`a ``b ", "> ", "- ", "*a", "|", "```\n", "1. a\n\n  ", "a|b\n--|--\n", "<think>\n")
    texts = [unit * (40_000 // len(unit)) for unit in units]
    texts += [
        f"{start}{' ' * 40_000}{end}" for start in ("```", "# a", "|-", "- a", "-", ">", "`", "**a") for end in "`x|"
    ]
    texts += ["- a" + "\n" * 40_000, "- a" + "\n" * 40_000 + "b"]
    draw = (
        "text => { const begun = performance.now(); blocksOf(text).map(blockNode); return performance.now() - begun; }"
    )
    for text in texts:
        assert page.evaluate(draw, text) < 1500, text[:8]  # a square would take ten times that


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
