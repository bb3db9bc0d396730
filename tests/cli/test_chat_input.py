"""What is typed, pasted and piped into a conversation, at a terminal of its own and without any model."""

import io
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from screen import Typist

READS = """
import os, sys, time
from offload.cli.chat_input import ChatInput, SilentTerminal
from offload.errors import UserError
with ChatInput("HINT") as entries:
    print("READY", flush=True)
    while True:
        try:
            entry = entries.read()
        except UserError as error:
            print("REFUSED", error, flush=True)
            continue
        if entry is None:
            break
        print("GOT", repr(entry.command), repr(entry.text), flush=True)
        if entry.text == "answer":
            try:
                with SilentTerminal():
                    print("ANSWERING", flush=True)
                    while not os.path.exists(os.environ["ANSWERED"]):
                        time.sleep(0.01)
                    if entry.command == "/fail":
                        raise UserError("failed")
            except UserError as error:
                print("REFUSED", error, flush=True)
            except KeyboardInterrupt:
                print("STOPPED", flush=True)
            print("DONE", flush=True)
print("END", flush=True)
"""


def typist_at(term: str, folder: Path, first: str = "") -> Typist:
    options = {"TERM": term, "XDG_CACHE_HOME": str(folder), "ANSWERED": f"{folder}/answered"}
    return Typist([sys.executable, "-c", first + READS], options)


@pytest.fixture(params=["xterm", "dumb"])
def typist(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Typist]:
    typist = typist_at(request.param, tmp_path)
    typist.sees("READY")
    asks_for_brackets = "\x1b[?2004h" in typist.sees("> ")
    assert asks_for_brackets == (request.param == "xterm"), "a dumb terminal would print that"
    yield typist
    typist.leaves()


def piped(text: str) -> str:
    out = io.StringIO()
    with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()))), redirect_stdout(out):
        exec(READS, {})
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Why?\n", "GOT '' 'Why?'"),
        ('"""\none\n\n two\n"""\nnext', "GOT '' 'one\\n\\n two'\nGOT '' 'next'"),
        ('"""one\ntwo"""\n', "GOT '' 'one\\ntwo'"),
        ('"""one"""', "GOT '' 'one'"),
        ('""""""', "GOT '' ''"),
        ('"""\n/bye\n"""', "GOT '' '/bye'"),
        ('"""\nnever closed', "GOT '' 'never closed'"),
        ('What is """ for?\n', "GOT '' 'What is \"\"\" for?'"),
        ('/system """\nBe brief.\nBe kind.\n"""', "GOT '/system' 'Be brief.\\nBe kind.'"),
        ("/set  temperature 0.5 \n", "GOT '/set' 'temperature 0.5'"),
        ("Why?\r\n/stats\r\n", "GOT '' 'Why?'\nGOT '/stats' ''"),
        (" /etc/passwd?\n", "GOT '' ' /etc/passwd?'"),
        ("", ""),
    ],
)
def test_blocks_and_commands(text: str, wanted: str) -> None:
    assert piped(text) == "\n".join(filter(None, ["READY", wanted, "END"])) + "\n"


def test_a_block_is_typed_line_by_line_and_an_interrupt_ends_it(typist: Typist) -> None:
    typist.types('"""\n', "... ")
    typist.types("one\n", "... ")
    typist.types('two"""\n', "GOT '' 'one\\ntwo'", "> ")
    typist.types('"""\n', "... ")
    typist.types("half\n", "... ")
    typist.sees("HINT", act=lambda: typist.running.send_signal(2))
    typist.sees("GOT '' ''")
    typist.sees("> ")
    typist.types("whole\n\x04", "GOT '' 'whole'")
    assert typist.sees("END").endswith("\r\n"), "the shell's prompt begins a line of its own"


def test_a_pasted_block_is_one_question(typist: Typist, request: pytest.FixtureRequest) -> None:
    is_bracketed = "xterm" in request.node.name
    typist.types("\x1b[200~one\r\rtwo\x1b[201~\r" if is_bracketed else "one\r\rtwo\r", "GOT '' 'one\\n\\ntwo'", "> ")
    typist.types("three\r", "GOT '' 'three'")


def test_lines_typed_ahead_come_one_by_one(typist: Typist, tmp_path: Path) -> None:
    typist.types("answer\n", "ANSWERING")
    time.sleep(0.2)
    typist.types("/stats\nsecond\nthird\n")
    (tmp_path / "answered").touch()
    for wanted in ("GOT '/stats' ''", "GOT '' 'second'", "GOT '' 'third'"):
        typist.sees(wanted)
    typist.sees("> ")
    typist.types("half\n", "GOT '' 'half'")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_lines_typed_ahead_outlive_the_answer_that_is_stopped(term: str, tmp_path: Path) -> None:
    """Its own terminal sends the signal, and by itself would throw away what was typed."""
    owns = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    typist = typist_at(term, tmp_path, owns)
    typist.sees("> ")
    typist.types("answer\n", "ANSWERING")
    typist.types("second\nthird\n\x03", "STOPPED", "GOT '' 'second'", "GOT '' 'third'")
    typist.leaves()


def test_the_terminal_is_as_it_was_after_a_failure(typist: Typist, tmp_path: Path) -> None:
    (tmp_path / "answered").touch()
    typist.types("/fail answer\n", "ANSWERING", "REFUSED failed", "> ")
    typist.types("\x04", "END")
    assert typist.running.wait(timeout=60) == 0 and typist.echoes()


def test_the_terminal_is_as_it_was_after_the_end_of_the_process(tmp_path: Path) -> None:
    ends = "import signal; from offload.__main__ import _end; signal.signal(signal.SIGTERM, _end)"
    typist = typist_at("dumb", tmp_path, ends)
    typist.sees("> ")
    typist.types("answer\n", "ANSWERING")
    typist.running.terminate()
    assert typist.running.wait(timeout=60) == 128 + signal.SIGTERM and typist.echoes()
    typist.leaves()
