"""README and docs as a reader meets them: short, with links that lead somewhere and commands that exist.

Invariant: for each rule there is a planted breach below that it must report.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Outcome, shell
from test_device_planner import CONFIGS

from offload.commands import every_command

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MOST_WORDS = 1200
MOST_PICTURE_BYTES = 200_000
PAGES = sorted([README, *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md"), ROOT / "tests" / "README.md"])


def headings(text: str) -> set[str]:
    """Return the anchors that a page's headings have on a forge."""
    bare = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?)\s*$", bare, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield the links of a page that lead to no file, or to no heading of one."""
    for target in re.findall(r"(?<!`)\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or ROOT not in file.parents:
            yield f"{target}: no such file"
        elif anchor and anchor not in headings(text if file == page else file.read_text()):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_commands_are_those_of_the_program(page: Path) -> None:
    """No page holds what a merge that was not finished leaves."""
    text = page.read_text()
    assert list(broken_links(page, text)) == [] and unmerged_lines(text) == [] and unknown(text) == []
    assert list(missing_tests(text)) == []


def test_a_breach_is_found() -> None:
    for planted in ("[a](docs/none.md)", "[a](docs/flags.md#none)", "![a](none.png)", "[a](../x.md)"):
        assert list(broken_links(README, planted)), planted
    assert unmerged_lines("a\n<<<<<<< HEAD\nb\n")
    assert list(missing_tests("`test_tiny.py::test_none`, `test_none.py`, `server/test_page.py`")) == [
        "test_tiny.py::test_none",
        "test_none.py",
    ]
    assert unknown("```sh\noffload dance\noffload plan --rma 3GB  # x\n```") == ["dance", "plan --rma"]


def missing_tests(text: str) -> Iterator[str]:
    """Yield the tests that a page names and that are not there; `::name` is in the file named before."""
    path, source = "", ""
    for named, name in re.findall(r"`([\w/]*\btest_\w+\.py|(?=::))(?:::(test_\w+))?`", text):
        if named:
            path = named.removeprefix("tests/")
            results = [file for file in (ROOT / "tests").rglob(Path(path).name) if file.as_posix().endswith(f"/{path}")]
            source = results[0].read_text() if results else ""
        if not source or (name and f"def {name}(" not in source):
            yield f"{path}::{name}" if name else path


def unmerged_lines(text: str) -> list[str]:
    """Return lines that a merge that was not finished leaves in a page."""
    return re.findall(r"^(?:<{7}|>{7}) .*$", text, re.MULTILINE)


def test_readme_takes_a_minute() -> None:
    text = README.read_text()
    assert len(text.split()) <= MOST_WORDS
    commands = [line.split("#")[0].strip() for line in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0].splitlines()]
    assert commands == ["make demo", "make test"]
    assert all(f"\n{command.removeprefix('make ')}:" in (ROOT / "Makefile").read_text() for command in commands)
    promise = text.index("The big model checks every guess; a wrong guess costs time, never text.")
    formula = re.search(r"argmax|\blog p\b", text)
    assert formula is None or promise < formula.start()
    assert len(re.findall(r"tokens per second \|", text)) == 1, "one table of speeds, under one condition"


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of `offload` in the blocks of a page, each with its long flags."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["offload"] and len(words) > 1 and words[1] != "launch":
                yield words[1], [word for word in words[2:] if word.startswith("--")]


def unknown(text: str) -> list[str]:
    """Return the commands and flags of a page that the program does not have."""
    known = every_command()
    results = []
    for name, flags in commands_of(text):
        if name not in known:
            results.append(name)
        elif not hasattr(known[name], "commands"):
            seen = {flag for param in known[name].params for flag in [*param.opts, *param.secondary_opts]}
            results += [f"{name} {flag}" for flag in flags if flag not in seen]
    return results


def test_the_plan_that_a_page_shows_is_what_the_program_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    command, shown = re.findall(r"```\n\$ offload (.*)\n([^`]*)```", page)[0]
    monkeypatch.chdir(tmp_path)
    for name in ("Llama-2-70b", "Llama-2-7b"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({**CONFIGS[name[:-1] + "B"], "torch_dtype": "float16"}))
    assert shell(*command.split()) == Outcome(0, shown, "")


def test_pictures_are_there_and_small() -> None:
    shown = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README.read_text())
    assert len(shown) == 2 and all(len(caption) > 20 for caption, _ in shown)
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert pictures and all(path.stat().st_size <= MOST_PICTURE_BYTES for path in pictures)
