"""A chat that opens from nothing: the packaged pair answers, streams, and writes the same with any tree."""

import json
import urllib.request
from pathlib import Path

import pytest
from refusals import assert_refused
from served import serving
from shell import shell

from offload.checkpoint.files import locked_anew
from offload.checkpoint.packaged import inflated_target
from offload.cli import demo
from offload.cli.console import Console
from offload.engine.load import open_decoder
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.options import CHAT_PAIR, OutputOptions
from offload.planning.load_options import LoadOptions

QUESTION = "Hello"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is made larger, but not by much."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_CHAT_BYTES", 40_000_000)


@pytest.mark.usefixtures("small")
def test_a_chat_opens_without_a_model() -> None:
    outcome = shell("chat", "--demo", "--greedy", stdin=f"{QUESTION}\n".encode())
    assert outcome.code == 0, outcome.err
    assert "I am a very small model" in outcome.out
    assert "from disk" in outcome.err, "it streams as a large model does"


@pytest.mark.usefixtures("small")
def test_a_server_opens_without_a_model() -> None:
    target, options = demo.packaged_chat(LoadOptions(parallel=2, threads=1), lambda *_: None)
    decoder = open_decoder(target, CHAT_PAIR / "draft", options)
    with serving(decoder) as server:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "offload": {"passes": True}}
        request = urllib.request.Request(
            f"{server.address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            said = json.load(response)
    (choice,) = said["choices"]
    assert "I am a very small model" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    assert decoder.plan.is_streamed


def test_what_was_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "inflated_target", lambda *_: Path("made"))
    named = LoadOptions(ram="700MB", tree="8x3", context=256, device="cpu")
    _, options = demo.packaged_chat(named, lambda *_: None)
    assert options == named
    _, chosen = demo.packaged_chat(LoadOptions(), lambda *_: None)
    assert (chosen.tree, chosen.device, chosen.context) == ("auto", "cpu", 1024)
    assert chosen.ram is not None and int(chosen.ram) >= demo._CHAT_BYTES // 4


def test_what_is_made_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gigabyte stays on a newcomer's disk: once, and not in silence."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []
    for _ in range(2):
        with Console(OutputOptions()) as console, console.making_target() as landed:
            inflated_target(40_000_000, landed)
        told.append(capsys.readouterr().err)
    assert f"which stay in {tmp_path}/offload" in told[0] and told[1] == ""


def test_two_commands_that_make_the_demo_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    being_made = tmp_path / "offload" / ".demo-40MB.inflating"
    with locked_anew(being_made), pytest.raises(UserError, match="making the packaged model just now: try again"):
        inflated_target(40_000_000, lambda *_: None)


def test_a_model_and_the_demo_exclude_each_other() -> None:
    for command in ("chat", "serve"):
        assert_refused(shell(command, "--demo", "-m", "big"), "--demo brings its own models", "leave out --model")
        assert_refused(shell(command), "--model says what is to run", "or --demo for the packaged one")


def test_the_template_keeps_what_was_said() -> None:
    """Each answer goes on where the one before has ended, token by token: only what is new is read."""
    tokenizer = load_tokenizer(CHAT_PAIR / "target")
    turns = [{"role": "user", "content": "Hello"}]
    first = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    turns += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Who are you?"}]
    second = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert first == "<|endoftext|>Q: Hello\nA:\n" and second == f"{first}Hi.<|endoftext|>Q: Who are you?\nA:\n"
