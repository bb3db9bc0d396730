"""What a person sees while waiting: a line that moves, never disturbs the text, and is plain where it must be."""

import io
import os
import random
import re
import sys
import termios
import threading
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from reciting import PROMPT, SAID, at_call, interrupt, settings
from screen import Recording, Screen, record
from shell import process

from offload.bench import suite
from offload.cli import launch
from offload.cli.console import Console
from offload.cli.progress import Phase, TextProgress
from offload.cli.terminal import column_after, fitted
from offload.options import CHAT_PAIR, OutputOptions
from offload.stats import Stats
from offload.units import duration, plural

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


def test_a_wide_name_leaves_nothing_behind() -> None:
    """Half of its letters fill the row, and none of them steers the terminal."""
    with Terminal(20) as terminal:
        line, screen = Console(OutputOptions()), Screen(NUM_ROWS, 20)
        line.show(Phase("reading \x1b[2J日本語の言語モデル" * 2))
        screen.feed(terminal.read())
        assert len(screen.lines) == 1 and screen.lines[0].startswith("reading ?[2J日本語")
        line.close()
        screen.feed(terminal.read())
        assert trimmed(screen.lines) == [""]


def trimmed(lines: list[str]) -> list[str]:
    return "\n".join(lines).rstrip("\n").split("\n")


def test_the_line_moves_while_nobody_tells_of_progress() -> None:
    with Terminal(80) as terminal:
        line = Console(OutputOptions())
        line.show(Phase("importing"))
        seen = ""
        while len({*re.findall(r"importing \[00:(\d+)\]", seen)}) < 2:
            seen += terminal.read()
            time.sleep(0.02)
        line.close()


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


@pytest.mark.full
def test_text_in_a_file_is_text_alone(ender: Path, tmp_path: Path) -> None:
    """Beside a terminal that is narrow."""
    with (tmp_path / "text").open("wb") as file:
        flags = (*settings(ender), "--link-limit", "2MB", "-p", PROMPT)
        seen = record("generate", *flags, num_columns=30, stdout=file.fileno())
    assert (tmp_path / "text").read_text() == SAID + "\n" and SAID.rstrip("\n") not in seen.text
    assert_phases_are_told(seen, 30)


@pytest.mark.full
def test_a_dumb_terminal_gets_plain_lines(ender: Path) -> None:
    seen = record("generate", *settings(ender), "-p", PROMPT, environment={"TERM": "dumb"})
    assert "\x1b" not in seen.text and seen.text.count("\r") == seen.text.count("\r\n")
    assert SAID.rstrip("\n") in seen.text.split("\r\n") and "importing" not in seen.text


# What it says


def test_a_text_tells_tokens_layers_and_tokens_a_pass() -> None:
    stats = Stats(tree_depth=3)
    progress = TextProgress(stats, layers_per_sweep=8, num_prompt_sweeps=2, max_new_tokens=100)
    progress.num_layers = 4
    assert progress.now() == ("prompt", 4, 16, " layers", "")
    stats.num_first_tokens, stats.accepted_per_sweep, stats.num_sweeps = 4, [6, 2], 2
    progress.num_layers = 8 * 4 + 3
    assert progress.now() == ("writing", 12, 100, " tokens", "layer 3 of 8, 4.0 tokens a pass")
    progress.num_layers, progress.max_new_tokens = 8 * 4, None
    assert progress.now() == ("writing", 12, 0, " tokens", "drafting, 4.0 tokens a pass")


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
        told = terminal.read() if name == "dumb" else sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert told.strip() == "a line"


def test_numbers_and_durations_are_those_of_people() -> None:
    assert [plural(count, "token") for count in (0, 1, 2, 1234)] == ["0 tokens", "1 token", "2 tokens", "1,234 tokens"]
    told = [duration(seconds) for seconds in (0.2, 59.4, 59.6, 65, 3599.7, 7500)]
    assert told == ["1 s", "59 s", "1:00", "1:05", "1 h 00 min", "2 h 05 min"]


class Wide(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_break_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of commands stays a list on a narrow one: what is said of a name goes on below itself."""
    monkeypatch.setenv("COLUMNS", "40")
    text = "the first one is longer than forty columns, is it not?\n\n   a table    with gaps\n" + "x" * 50
    broken = text.replace("forty columns", "forty\n  columns")
    assert fitted(text, Wide()) == broken and fitted(text, io.StringIO()) == text
    first, *others = fitted("/save FILE       keep the conversation and its cache for later", Wide()).split("\n")
    assert first == "/save FILE       keep the conversation" and others == [f"{'':17}and its cache for later"]


@pytest.mark.parametrize(
    ("text", "column", "width", "wanted"),
    [
        ("ab\tc", 0, 80, 9), ("日本", 1, 80, 5), ("e\u0301", 0, 80, 1), ("x" * 20, 0, 20, 20),  # the next one wraps
        ("日", 19, 20, 2), ("a\nbc", 7, 80, 2),
    ],
)  # fmt: skip
def test_columns_are_counted_as_terminals_count(text: str, column: int, width: int, wanted: int) -> None:
    assert column_after(text, column, width) == wanted


HOSTS_MEET = "this is host 1 of 2, from 0 on; hosts meet at alpha:29500, for 120 s at most"


@pytest.mark.parametrize(
    ("hosts", "flags", "during", "after"),
    [
        (["alpha"], [], "starting 2 ranks [00:00]", ""),
        (["alpha", "beta"], [], "starting 2 ranks [00:00]", HOSTS_MEET),
        (["alpha", "beta"], ["--quiet"], "", ""),
        ([], [], "importing what bench decode needs", ""),
    ],
)
def test_a_launch_and_a_bench_tell_what_they_wait_for(
    hosts: list[str], flags: list[str], during: str, after: str
) -> None:
    def announced() -> AbstractContextManager[None]:
        plan = launch.Launch(2, hosts, len(hosts) - 1, 29500, ["generate", *flags])
        return launch._announced(plan) if hosts else suite._announced("decode")

    screen = Screen(NUM_ROWS, 100)
    with Terminal(100) as terminal:
        with announced():
            screen.feed(terminal.read())
            assert screen.lines == [during]
        screen.feed(terminal.read())
    assert screen.lines == [after]
    if not hosts:
        with Terminal(100, "dumb") as terminal, announced():
            assert terminal.read() == "", "what cannot be taken back is not written"


def test_whoever_wants_no_bars_of_tqdm_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with Terminal(80) as terminal, Console(OutputOptions()) as line:
        line.wait("importing")
        line.text("text\n")
        assert terminal.read() == "text\r\n"
