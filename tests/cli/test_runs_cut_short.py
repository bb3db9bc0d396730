"""Runs that end before their text does: interrupted, without a reader, or on a machine that fails at any place.

Invariant: what was accepted is printed, as text or as valid JSON, and nothing goes on in the background.
"""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest
import torch
from reciting import PIECES, PROMPT, at_sweep, failing_reads, generate, interrupt, num_readers, only_object, recited
from shell import Outcome, process, start
from tiny import save_reciter

from offload.cli.failures import machine_failure


def test_interrupt_prints_what_was_accepted(looper: Path) -> None:
    with at_sweep(4, interrupt):
        outcome = generate(looper, tree="chain:1")
    assert outcome.code == 130 and outcome.out == " Hello wörld \ufffd\n", "a character cut short is shown as such"
    assert outcome.err.splitlines()[-1] == "offload: interrupted" and "6 tokens" in outcome.err


def test_interrupt_leaves_valid_json(looper: Path) -> None:
    with at_sweep(4, interrupt):
        outcome = generate(looper, "--json", tree="chain:1")
    result = only_object(outcome.out)
    assert outcome.code == 130 and outcome.err == "offload: interrupted\n"
    assert result["finish_reason"] == "interrupted" and result["text"].startswith(" Hello wörld ")
    assert len(result["token_ids"]) == result["num_new_tokens"] == 6 and result["stats"]["num_sweeps"] == 2


def test_interrupt_before_the_first_token(looper: Path) -> None:
    with at_sweep(1, interrupt):
        outcome = generate(looper, "--json")
    assert outcome.code == 130 and outcome.err == "offload: interrupted\n"
    assert only_object(outcome.out)["token_ids"] == []


def test_interrupt_while_loading(looper: Path) -> None:
    with patch("offload.engine.build.load_tokenizer", lambda _: interrupt()):
        assert generate(looper) == Outcome(130, "", "offload: interrupted\n")


def endless(model: Path) -> list[object]:
    """A run that outlasts any test."""
    sizes = ("--ram", "1GiB", "--context", 60_000, "-n", 59_000, "--threads", 1)
    return ["generate", "-m", model, "-d", model, "--tree", "8x3", *sizes, "-p", PROMPT]


def test_interrupted_process_leaves_in_order(looper: Path) -> None:
    with start(*endless(looper)) as running:
        assert running.stdout is not None
        head = running.stdout.read(4)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=300)
    text = (head + out).decode()
    assert running.returncode == 130 and text.endswith("\n")
    text = text[:-1].rstrip("\ufffd")
    assert text == recited(len(text))
    assert err.decode().splitlines()[-1] == "offload: interrupted" and b"Traceback" not in err


def test_a_process_that_is_ended_keeps_its_session(looper: Path, tmp_path: Path) -> None:
    with start(*endless(looper), "--session", tmp_path / "text") as running:
        assert running.stdout is not None
        running.stdout.read(4)
        running.send_signal(signal.SIGHUP)
        _, err = running.communicate(timeout=300)
    assert running.returncode == 128 + signal.SIGHUP and b"Traceback" not in err
    assert (tmp_path / "text").exists()


ENDS_ITSELF = """
import os
from offload import __main__, commands
def run():
    try:
        os.kill(os.getpid(), {number})
    finally:
        print("kept", flush=True)
commands.main = run
__main__.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_either_end_comes_as_an_exception(number: int) -> None:
    assert process(python=("-c", ENDS_ITSELF.format(number=int(number)))) == Outcome(128 + number, "kept\n", "")


def test_closed_pipe_is_not_an_error(looper: Path) -> None:
    with start(*endless(looper)) as running:
        assert running.stdout is not None and running.stderr is not None
        head = running.stdout.read(5)
        running.stdout.close()
        err = running.stderr.read()
    assert running.returncode == 0 and head == b" Hell"
    assert b"Traceback" not in err and b"Exception" not in err


@pytest.mark.full
def test_pipe_closed_from_the_start_is_not_an_error(looper: Path) -> None:
    """What is printed in one go breaks when it is flushed, which may be as late as the interpreter's end."""
    for command in (("plan", "-m", looper, "--ram", "1GiB", "--json"), ("plan", "-m", looper), ("--help",)):
        with start(*command) as running:
            assert running.stdout is not None and running.stderr is not None
            running.stdout.close()
            assert running.stderr.read() == b""
        assert running.returncode == 0


def assert_ended_by_disk(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 1 and "Traceback" not in outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith("offload: ") and all(word in last for word in words)
    assert num_readers() == 0, "nothing goes on in the background"


def test_read_error_in_mid_run_keeps_the_text(looper: Path) -> None:
    for arguments in ((), ("--json",)):
        with failing_reads(70):
            outcome = generate(looper, *arguments, tree="chain:1")
        assert_ended_by_disk(outcome, "reading model-", "failed: Input/output error")
        text = only_object(outcome.out)["text"] if arguments else outcome.out[:-1]
        assert text.startswith(" Hel") and text.rstrip("\ufffd") == recited(len(text.rstrip("\ufffd")))
        assert not arguments or (
            outcome.err.count("\n") == 1 and only_object(outcome.out)["finish_reason"] == "interrupted"
        )


def test_read_error_while_loading(looper: Path) -> None:
    with failing_reads(12):
        outcome = generate(looper)
    assert_ended_by_disk(outcome, "failed: Input/output error")
    assert outcome.out == "" and outcome.err.count("\n") == 1


def test_file_cut_short_in_mid_run_keeps_the_text(tmp_path: Path) -> None:
    model = save_reciter(tmp_path, PIECES)

    def cut() -> None:
        for shard in model.glob("*.safetensors"):
            os.truncate(shard, 5000)

    with at_sweep(3, cut):
        outcome = generate(model, tree="chain:1")
    assert_ended_by_disk(outcome, "model-", "cut short while in use")
    assert outcome.out.startswith(" Hello w")


def file_refused() -> NoReturn:
    raise OSError(errno.EIO, "Input/output error", "/some/file")


def files_used_up() -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


def memory_used_up() -> NoReturn:
    raise MemoryError


def torch_has_no_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def device_full() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


def threads_used_up() -> NoReturn:
    raise RuntimeError("can't start new thread")


def ended_from_outside() -> NoReturn:
    raise SystemExit(143)


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (file_refused, "the system refused (/some/file): Input/output error; look at the disk"),
    (files_used_up, "Too many open files; raise the limit of open files (ulimit -n)"),
    (memory_used_up, "memory ran out, more was needed than there is: lower --ram"),
    (torch_has_no_memory, "memory ran out, more was needed than there is: lower --ram"),
    (device_full, "device memory ran out, more was needed than planned: lower --context"),
    (threads_used_up, "the system starts no more threads: raise the limit of processes (ulimit -u)"),
]


@pytest.mark.parametrize(("refuse", "words"), REFUSALS)
def test_a_refusal_in_mid_run_keeps_the_text(refuse: Callable[[], object], words: str, looper: Path) -> None:
    with at_sweep(4, refuse):
        outcome = generate(looper, "--json", tree="chain:1")
    assert outcome.code == 1 and outcome.err.count("\n") == 1 and words in outcome.err and len(outcome.err) < 500
    result = only_object(outcome.out)
    assert result["finish_reason"] == "interrupted" and len(result["token_ids"]) == 6
    assert result["text"].rstrip("\ufffd") == recited(len(result["text"].rstrip("\ufffd")))


@pytest.mark.parametrize("flag", ["--session", "--profile", "--datastore"])
def test_a_path_that_is_too_long_is_its_givers(flag: str, looper: Path) -> None:
    outcome = generate(looper, flag, "x" * 100_000)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "xxx" in outcome.err and len(outcome.err) < 700
    assert "File name too long" in outcome.err


def test_an_end_from_outside_keeps_the_text(looper: Path) -> None:
    with at_sweep(4, ended_from_outside):
        outcome = generate(looper, "--json", tree="chain:1")
    assert outcome.code == 143 and len(only_object(outcome.out)["token_ids"]) == 6


def test_where_it_was_is_told_to_who_asks(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRACEBACK", "1")
    with at_sweep(4, file_refused):
        outcome = generate(looper, "--json", tree="chain:1")
    assert outcome.code == 1 and "in file_refused" in outcome.err and "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("offload: the system refused (/some/file)")


def test_what_stands_behind_a_refusal_is_told_to_who_asks(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> NoReturn:
        raise KeyError("a fault of ours")

    monkeypatch.setenv("OFFLOAD_TRACEBACK", "1")
    monkeypatch.setattr("offload.engine.text._check_names", fault)
    outcome = generate(looper)
    assert outcome.code == 2 and "KeyError: 'a fault of ours'" in outcome.err and "in fault" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("offload: cannot read the tokenizer in")


def test_other_errors_are_no_refusals() -> None:
    assert machine_failure(RuntimeError("shapes cannot be multiplied")) is None
    assert machine_failure(KeyError("x")) is None
