"""What the machine refuses at any place: one line, exit 1, and the text that there is."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from reciting import at_sweep, generate, only_object, recited

from offload.cli.failures import machine_failure


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
