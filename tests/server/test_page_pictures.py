"""What the chat page draws and tells of passes, on screens of any width, in light and dark."""

import re
from itertools import pairwise
from typing import Any

import pytest
from acts import ask
from matrix import matrix
from stub_server import a_pass

pytest_plugins = ["browsing"]

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


def test_blanks_do_not_fill_the_labels(page: Any) -> None:
    labels = page.evaluate("texts => texts.map(labelOf)", [" self", "        ", "\n    ", "", "a  b", "x"])
    assert labels == ["self", "␣", "↵", "∅", "a␣b", "x"]


def is_tidy(parents: list[int], depth: list[int], place: list[float]) -> bool:
    """Whether children are one deeper than their parent, and lie in its part of the picture and in nobody else's."""
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
    pairs = [
        ("ink", "ground"),
        ("ink", "own"),
        ("soft", "ground"),
        ("soft", "sheet"),
        ("soft", "own"),
        ("soft", "code"),
        *((name, "code") for name in ("word", "string", "number", "call")),
    ]
    for text, ground in [*pairs, ("on-accent", "accent"), ("bad", "ground")]:
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
