"""What a person sees while waiting: a line that moves, never disturbs the text, and is plain where it must be."""

import io
import os
import random
import sys
import termios
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from reciting import PROMPT, SAID, at_call, interrupt, settings
from screen import Recording, Screen, record
from shell import process

from offload.cli.console import Console, Phase
from offload.options import CHAT_PAIR, OutputOptions

NUM_ROWS = 6  # so that text scrolls
PIECES = ("a", "of ", "the\n", "\n", "  return", "日本", "wörld", "", "é", "\n\n", "x" * 19)


class Terminal:
    """Both streams of this process on one terminal, as long as it is entered."""

    def __init__(self, num_columns: int, name: str = "xterm") -> None:
        self._size, self._name, self._resources = (NUM_ROWS, num_columns), name, ExitStack()

    def __enter__(self) -> "Terminal":
        self._ours, theirs = os.openpty()
        termios.tcsetwinsize(self._ours, self._size)
        for stream in ("stdout", "stderr"):
            file = self._resources.enter_context(os.fdopen(os.dup(theirs), "w", encoding="utf-8"))
            self._resources.enter_context(patch.object(sys, stream, file))
        self._resources.enter_context(patch.dict(os.environ, {"TERM": self._name}))
        self._theirs = theirs
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()
        os.close(self._ours)
        os.close(self._theirs)

    def read(self) -> str:
        """What came since the last time, up to a bell that is rung now."""
        os.write(self._theirs, b"\x07")
        seen = b""
        while b"\x07" not in seen:
            seen += os.read(self._ours, 1 << 16)
        return seen.decode().replace("\x07", "")


def text_alone(text: str, num_columns: int) -> list[str]:
    screen = Screen(NUM_ROWS, num_columns)
    screen.feed(text.replace("\n", "\r\n"))
    return screen.lines


@pytest.mark.parametrize("num_columns", [20, 21, 60])
@pytest.mark.parametrize("seed", range(4))
def test_text_is_what_it_is_without_the_line(num_columns: int, seed: int) -> None:
    pieces = random.Random(seed).choices(PIECES, k=60)
    with Terminal(num_columns) as terminal:
        line, screen = Console(OutputOptions()), Screen(NUM_ROWS, num_columns)
        line.show(Phase("<waiting>"))
        for number, piece in enumerate(pieces):
            line.text(piece)
            screen.feed(terminal.read())
            written = "".join(pieces[: number + 1])
            assert screen.lines[-1].startswith("<waiting> [") or not written
            assert trimmed(screen.lines[:-1]) == trimmed(text_alone(written, num_columns))
        line.close()
        screen.feed(terminal.read())
        assert trimmed(screen.lines) == trimmed(text_alone("".join(pieces), num_columns))


def trimmed(lines: list[str]) -> list[str]:
    return "\n".join(lines).rstrip("\n").split("\n")


def test_an_interrupt_as_the_line_begins_leaves_a_line_that_ends() -> None:
    with Terminal(80) as terminal:
        line = Console(OutputOptions())
        with at_call(threading.Thread, "start", 1, interrupt), pytest.raises(KeyboardInterrupt):
            line.show(Phase("loading"))
        line.close()
        assert not any(thread.name == "offload-line" for thread in threading.enumerate())
        terminal.read()
        line = Console(OutputOptions(quiet=True))
        line.show(Phase("importing"))
        line.text("text\n")
        line.close()
        assert terminal.read() == "text\r\n", "nothing is shown when it is off"


def test_it_is_shown_before_anything_heavy_is_imported(ender: Path) -> None:
    """Which is what makes the first line come at once."""
    code = """
import sys
from offload.cli import console, main
def spy(self, progress, **_):
    sys.exit(f"{progress.label} {sys.modules.keys() & {'torch', 'transformers'}}")
console.Console.show = spy
main.main()
"""
    pair = settings(ender)[:6]
    commands = (
        ("generate", *pair, "-p", PROMPT),
        ("chat", "-m", CHAT_PAIR / "target"),
        ("tune", *pair, "--text", __file__),
    )
    for command in commands:
        outcome = process(*command, python=("-c", code), is_cold=True)
        assert outcome.err == "importing torch and transformers set()\n"


def assert_phases_are_told(seen: Recording, num_columns: int) -> None:
    assert seen.code == 0
    for phase in ("importing torch", "reading headers", "building the models", "reading draft", "prompt: "):
        assert phase in seen.text
    lines = seen.screen(num_columns).lines
    said = " ".join(line.strip() for line in lines)
    for words in ("4 layers in RAM", "a pass from disk", "12 tokens, the first after", "(--ram) +"):
        assert words in said, "words are whole, wherever lines end"
    assert not any("reading" in line or "importing" in line for line in lines), "the line has gone"


def test_a_run_in_a_terminal_tells_its_phases_and_leaves_the_text(ender: Path) -> None:
    seen = record("generate", *settings(ender), "--link-limit", "2MB", "-p", PROMPT)
    assert_phases_are_told(seen, 80)
    assert "/128 [" in seen.text and SAID.rstrip("\n") in seen.screen().lines


# What it says


@pytest.mark.parametrize(("is_decimal", "wanted"), [(False, "1.00G/4.00G"), (True, "1.07G/4.29G")])
@pytest.mark.parametrize("num_columns", [60, 120])
def test_bytes_are_told_in_the_unit_of_the_user(is_decimal: bool, wanted: str, num_columns: int) -> None:
    screen = Screen(NUM_ROWS, num_columns)
    with Terminal(num_columns) as terminal, Console(OutputOptions(), "4GB" if is_decimal else "4GiB") as line:
        line.bytes_landed(2**30, 2**32, "reading layers")
        line.say("above")
        screen.feed(terminal.read())
    assert screen.lines[0] == "above" and screen.lines[1].startswith("reading layers:  25%|")
    assert wanted in screen.lines[1] and len(screen.lines[1]) <= num_columns
    assert "<?" in screen.lines[1], "what was there at first has no speed"


@pytest.mark.parametrize("name", ["dumb", "xterm"])
def test_nothing_is_drawn_where_it_cannot_be_drawn_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(80, name) as terminal:
        if name == "xterm":
            monkeypatch.setattr(sys, "stderr", io.StringIO())
        with Console(OutputOptions()) as line:
            line.wait("importing")
            line.count(1, 4, "reading")
            line.say("a line")
        text = terminal.read() if name == "dumb" else sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert text.strip() == "a line"
