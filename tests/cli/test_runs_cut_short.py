"""Runs that end before their text does: interrupted, with streams that are full or closed, on a failing machine.

Invariant: what was accepted is printed, as text or as valid JSON, and nothing goes on in the background.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest
import torch
from forked import ROOT, popen
from reciting import (
    PIECES,
    PROMPT,
    SAID,
    at_sweep,
    failing_reads,
    generate,
    interrupt,
    num_readers,
    only_object,
    recited,
    settings,
)
from shell import Outcome, process, start
from tiny import save_reciter

from offload.cli.failures import machine_failure


def test_interrupt_prints_what_was_accepted(looper: Path) -> None:
    with at_sweep(4, interrupt):
        outcome = generate(looper, tree="chain:1")
    assert outcome.code == 130 and outcome.out == " Hello wörld \ufffd\n", "a character cut short is shown as such"
    assert outcome.err.splitlines()[-1] == "offload: interrupted" and "6 tokens" in outcome.err
    with patch("offload.engine.build.load_tokenizer", lambda _: interrupt()):
        assert generate(looper) == Outcome(130, "", "offload: interrupted\n"), "while it loads"


@pytest.mark.parametrize(("sweep", "num_tokens"), [(4, 6), (1, 0)])
def test_interrupt_leaves_valid_json(sweep: int, num_tokens: int, looper: Path) -> None:
    with at_sweep(sweep, interrupt):
        outcome = generate(looper, "--json", tree="chain:1")
    result = only_object(outcome.out)
    assert outcome.code == 130 and outcome.err == "offload: interrupted\n"
    assert result["finish_reason"] == "interrupted"
    assert len(result["token_ids"]) == result["num_new_tokens"] == num_tokens
    if num_tokens:
        assert result["text"].startswith(" Hello wörld ") and result["stats"]["num_sweeps"] == 2


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


def test_the_disk_or_the_card_fails_while_loading(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_reads(12):
        outcome = generate(looper)
    assert_ended_by_disk(outcome, "failed: Input/output error")
    assert outcome.out == "" and outcome.err.count("\n") == 1
    monkeypatch.setattr("offload.streaming.cuda.open_device", lambda *_, **__: failing(FULL)())
    outcome = generate(looper)
    assert outcome.code == 1 and outcome.out == "" and outcome.err.count("\n") == 1
    assert outcome.err.startswith("offload: device memory ran out") and "lower --context" in outcome.err


def test_file_cut_short_in_mid_run_keeps_the_text(tmp_path: Path) -> None:
    model = save_reciter(tmp_path, PIECES)

    def cut() -> None:
        for shard in model.glob("*.safetensors"):
            os.truncate(shard, 5000)

    with at_sweep(3, cut):
        outcome = generate(model, tree="chain:1")
    assert_ended_by_disk(outcome, "model-", "cut short while in use")
    assert outcome.out.startswith(" Hello w")


def failing(error: BaseException) -> Callable[[], NoReturn]:
    def refuse() -> NoReturn:
        raise error

    return refuse


def torch_has_no_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
FILE_REFUSED = failing(OSError(errno.EIO, "Input/output error", "/some/file"))
REFUSALS: list[tuple[Callable[[], object], str]] = [
    (FILE_REFUSED, "the system refused (/some/file): Input/output error; look at the disk"),
    (
        failing(OSError(errno.EMFILE, "Too many open files")),
        "Too many open files; raise the limit of open files (ulimit -n)",
    ),
    (failing(MemoryError()), "memory ran out, more was needed than there is: lower --ram"),
    (torch_has_no_memory, "memory ran out, more was needed than there is: lower --ram"),
    (failing(FULL), "device memory ran out, more was needed than planned: lower --context"),
    (
        failing(RuntimeError("can't start new thread")),
        "the system starts no more threads: raise the limit of processes (ulimit -u)",
    ),
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
    with at_sweep(4, failing(SystemExit(143))):
        outcome = generate(looper, "--json", tree="chain:1")
    assert outcome.code == 143 and len(only_object(outcome.out)["token_ids"]) == 6


def test_where_it_was_is_told_to_who_asks(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRACEBACK", "1")
    with at_sweep(4, FILE_REFUSED):
        outcome = generate(looper, "--json", tree="chain:1")
    assert outcome.code == 1 and "in refuse" in outcome.err and "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("offload: the system refused (/some/file)")
    monkeypatch.setattr("offload.engine.tokenizer._check_names", lambda *_: failing(KeyError("a fault of ours"))())
    outcome = generate(looper)
    assert outcome.code == 2 and "KeyError: 'a fault of ours'" in outcome.err, "what stands behind a refusal"
    assert outcome.err.splitlines()[-1].startswith("offload: cannot read the tokenizer in")
    for error in (RuntimeError("shapes cannot be multiplied"), KeyError("x")):
        assert machine_failure(error) is None, "other errors are no refusals"


# What a shell does before a program starts.
REDIRECTS = {
    "> /dev/full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "<&-": "os.close(0); sys.stdin = None",
    "<&- >&-": "os.close(0); os.close(1); sys.stdin = sys.stdout = None",
}


def redirected(redirection: str, *arguments: object, **environment: str) -> Outcome:
    """Run `offload ARGUMENTS` with its streams redirected, in a warm process or, where that says so, in a shell."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    pipe, words = subprocess.PIPE, [*map(str, arguments)]
    if redirection in REDIRECTS:
        code = f"import os, sys; {REDIRECTS[redirection]}; from offload.__main__ import main; main()"
        running = popen(
            [sys.executable, "-c", code, *words], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=variables
        )
    else:
        command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "offload", *words]
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=variables)
    out, err = running.communicate(timeout=300)
    return Outcome(running.returncode, out.decode(), err.decode())


@pytest.mark.parametrize(("command", "unbuffered"), [("generate", ""), ("plan", "1"), ("help", "")])
def test_a_full_output_is_one_line(command: str, unbuffered: str, ender: Path) -> None:
    arguments = {
        "generate": ["generate", *settings(ender), "-p", PROMPT, "--quiet"],
        "plan": ["plan", "-m", ender, "--ram", "1GiB", "--device", "cpu"],
        "help": ["--help"],
    }[command]
    outcome = redirected("> /dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    assert outcome == Outcome(1, "", "offload: cannot write to standard output (No space left on device)\n")


@pytest.mark.parametrize("redirection", ["2>&-", "<&- 2>&-"])
def test_closed_streams_are_done_without(redirection: str, ender: Path) -> None:
    """And to what is ASCII alone a question mark stands for any other character."""
    outcome = redirected(redirection, "generate", *settings(ender), "-p", PROMPT, PYTHONIOENCODING="ascii")
    assert outcome == Outcome(0, SAID.encode("ascii", "replace").decode() + "\n", "")


def test_closed_input_is_an_empty_prompt(ender: Path) -> None:
    outcome = redirected("<&-", "generate", "-m", ender)
    assert outcome.code == 2 and "the prompt is empty, standard input holds nothing" in outcome.err


INTERRUPTS = """
import os, signal, sys
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, AtImport())
from offload.__main__ import main
main()
"""
AT_IMPORTS = (
    "typer",  # before anything was understood
    "torch._C",
    "transformers.models.llama.modeling_llama",  # when the model is built
)


@pytest.mark.parametrize("name", AT_IMPORTS)
def test_interrupt_during_an_import(name: str, ender: Path) -> None:
    arguments = ("generate", *settings(ender), "-p", PROMPT, "--quiet")
    outcome = process(*arguments, python=("-c", INTERRUPTS.format(name=name)), is_cold=True)
    assert outcome.code == 130 and outcome.err in ("", "offload: interrupted\n")


@pytest.fixture
def warned_of(ender: Path, tmp_path: Path) -> Path:
    """A model of which transformers says that it does not know all of its config."""
    model = Path(shutil.copytree(ender, tmp_path / "warned_of"))
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["colour"] = "green"
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_warnings_of_libraries_are_lines(warned_of: Path) -> None:
    """Each once, marked by where it comes from."""
    outcome = process("generate", *settings(warned_of), "-p", PROMPT, is_cold=True)
    lines = [line for line in outcome.err.splitlines() if "colour" in line]
    assert outcome.code == 0 and len(lines) == 1 and lines[0].startswith("transformers: ")


LISTS_UNUSED = """
import os, sys
os.environ["TRANSFORMERS_VERBOSITY"] = "warning"  # --quiet comes first
from offload.__main__ import main
unused = {"torch._dynamo.eval_frame", "scipy", "triton", "fastapi", "uvicorn", "starlette"}
unused |= {"offload.reports.tracing", "offload.server.app"}
try:
    main()
finally:
    print(*unused & sys.modules.keys(), file=sys.stderr)
"""


def test_a_quiet_process_prints_text_and_imports_no_more_than_it_needs(
    warned_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is printed, whatever libraries have to say."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    outcome = process(
        "generate", *settings(warned_of), "-p", PROMPT, "--quiet", python=("-c", LISTS_UNUSED), is_cold=True
    )
    assert outcome == Outcome(0, SAID + "\n", "\n"), "an empty list"
