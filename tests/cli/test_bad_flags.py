"""Prompts, models and budgets that cannot be: refused in one line, at once, before torch or a weight is read.

Bad values of flags are rows of `goldens/errors.json`.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import MODELS, write_gguf
from refusals import BOTH, ENOUGH, PLAN, assert_refused, drop, generate, set_json
from shell import run_python, shell

from offload.commands import every_command
from offload.errors import installing

HAS_CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("_instant_link")


@pytest.mark.skipif(HAS_CUDA, reason="says what happens without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "cuda:0,1"])
def test_cuda_without_cuda_is_refused(device: str, sound: Path) -> None:
    outcome = generate(sound, "-p", "Count:", "--device", device)
    assert_refused(outcome, f"--device {device.partition(',')[0]} needs a CUDA device", "use --device cpu")


@pytest.mark.parametrize("option", ["--nonesuch", "-Z"])
def test_every_command_refuses_an_option_that_it_has_not(option: str) -> None:
    from offload.bench.suite import COMMANDS

    root = every_command()
    groups = {"datastore": root["datastore"].commands, "bench": COMMANDS if option == "--nonesuch" else {}}
    paths = [(), *((name,) for name in root), *((group, command) for group in groups for command in groups[group])]
    assert len(paths) > 15
    for path in paths:
        refused = shell(*path, option)
        assert_refused(refused, f"No such option: {option} (see {' '.join(('offload', *path))} --help)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "someone/some-model"), ("someone/some-model", "hub", "check the network")),
        (("-m", "someone/a..b"), ("someone/a..b", "hub", "check the name")),
    ],
)
def test_words_of_libraries_are_lines_of_ours(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    for command in BOTH:
        assert_refused(shell(*command, *arguments), *words)


def test_a_name_that_is_nearly_right_is_told(tmp_path: Path) -> None:
    (tmp_path / "Llama-3.1-70B").mkdir()
    (tmp_path / "Llama-Q4_K_M.gguf").touch()
    for given, meant in (("Llama-3.1-70b", "Llama-3.1-70B"), ("LLama-Q4_K_M.gguf", "Llama-Q4_K_M.gguf")):
        for command in BOTH:
            assert_refused(shell(*command, "-m", tmp_path / given), f"at {tmp_path / given}. Did you mean {meant}?")
    assert_refused(shell(*PLAN, "-m", tmp_path / "other.gguf"), "no file at", "check the path")


def test_a_command_without_a_model_says_what_one_is() -> None:
    for command in BOTH:
        assert_refused(shell(*command), "--model says what is to run, got none", "a folder, a GGUF file or a hub id")


def test_a_model_of_no_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.gguf").touch()
    assert_refused(generate(tmp_path / "big.gguf", "-p", "Count:"), "big.gguf: its header needs 4 bytes", "again")


@pytest.mark.usefixtures("_no_weights")
def test_prompts_are_refused(sound: Path, tmp_path: Path) -> None:
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    empty.write_bytes(b"")
    assert_refused(generate(sound, "-f", latin), "must be UTF-8", "latin.txt", "byte 3", "convert it")
    assert_refused(generate(sound, "-f", empty), "the prompt is empty", "empty.txt", "give some text")
    assert_refused(generate(sound), "the prompt is empty", "standard input", "give some text")
    for flag in ("-p", "-f"):
        assert_refused(generate(sound, flag, "-", stdin=b"\xff"), "must be UTF-8", "standard input", "byte 0")
    assert_refused(generate(sound, "-p", "caf\udce9"), "must be UTF-8", "-p", "byte 3")


@pytest.mark.parametrize(("asked", "is_told"), [("100000", True), ("-1", False)])
def test_more_tokens_than_have_room_are_as_many_as_have(asked: str, is_told: bool, sound: Path) -> None:
    outcome = shell("generate", "-m", sound, *ENOUGH[:-2], "-p", "x" * 60, "-n", asked)
    assert outcome.code == 0 and outcome.out == " one two three:\n", outcome
    assert ("at most 4 new tokens and not 100000: the context of 64 has no more room" in outcome.err) == is_told
    assert "the text is cut off where the context of 64 ends: --context N makes it longer\n" in outcome.err


def test_chat_template_that_fails_is_refused(broken: Path) -> None:
    for template in ("{% for %}", "{{ raise_exception('only for system messages') }}"):
        (broken / "chat_template.jinja").write_text(template)
        assert_refused(generate(broken, "-p", "Count:"), "chat template", "--raw")
        assert generate(broken, "-p", "Count:", "--raw").code == 0


# Budgets


@pytest.mark.parametrize("options", ["--context 64", "--context 3000", "--context 512 --dtype bfloat16"])
def test_the_smallest_budget_that_is_named_works(options: str, sound: Path) -> None:
    command, settings = ("generate", "-m", sound, "-p", "Count:", "-n", "4", "--threads", "1"), options.split()
    in_mb = shell(*command, "--ram", "1MB", *settings)
    assert_refused(in_mb, "budget is 1 MB", "raise --ram to ")
    assert "MiB" not in in_mb.err, "sizes have the unit of the user"
    too_small = shell(*command, "--ram", "1MiB", *settings)
    assert_refused(too_small, "for two layer slots", "budget is 1 MiB")
    assert "--context" not in too_small.err, "no shorter one would do"
    named = re.search(r"raise --ram to (\d+)MiB", too_small.err)
    assert named is not None
    least_mib = int(named[1])
    refused = shell("plan", "-m", sound, "--ram", f"{least_mib - 1}MiB", *settings)
    assert_refused(refused, f"raise --ram to {least_mib}MiB")
    assert shell("plan", "-m", sound, "--ram", f"{least_mib}MiB", *settings).code == 0
    run = shell(*command, "--ram", f"{least_mib}MiB", *settings)
    assert run.code == 0 and run.out == " one two three:\n"


MOST_TIMES = 50  # as long as counting to a million takes there and then: a second on a quiet machine
RUN = """
import io, json, sys, time
from contextlib import redirect_stderr, redirect_stdout
from offload.cli import main

def run(argv):
    sys.argv, said, began = ["offload", *argv], io.StringIO(), time.process_time()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        try:
            main.main()
        except SystemExit as leaving:
            took_s, began = time.process_time() - began, time.process_time()
            sum(range(1_000_000))
            return [leaving.code, said.getvalue(), "torch" in sys.modules, took_s / (time.process_time() - began)]

print(json.dumps([run(argv) for argv in json.loads(sys.argv[1])]))
"""
CASES: dict[str, tuple[str, ...]] = {  # command line: words of its refusal
    "generate -m sound -p x --ram 1MB": ("budget is 1 MB: raise --ram to",),
    "generate -m sound -f prompts.jsonl --ram 1MB": ("budget is 1 MB: raise --ram to",),
    "chat -m sound --ram 1MB": ("budget is 1 MB: raise --ram to",),
    "serve -m sound --ram 1MB": ("budget is 1 MB: raise --ram to",),
    "tune -m sound -d sound --text prompts.jsonl --ram 1MB": ("budget is 1 MB: raise --ram to",),
    "tune -m sound -d sound --text nosuch.txt": ("cannot read the text from nosuch.txt",),
    "generate -m sound -p x --device gpu": (
        "--device must be auto, cpu, cuda, cuda:N or, of several cards, cuda:N,M, got 'gpu'",
    ),
    "generate -m gpt2 -p x": ("gpt2: model type gpt2 is not supported",),
    "plan -m bloom": ("bloom: model type bloom is not supported",),
    "generate -m mute -p x": ("mute has no tokenizer: put its tokenizer.json beside it",),
    "chat -m mute": ("mute has no tokenizer",),
    "chat -m sound": ("no chat template", "offload generate -p without --system"),
    "generate -m sound --system Be. -p x": ("no chat template", "offload generate -p without --system"),
    "serve -m mute": ("mute has no tokenizer",),
    "generate -m mute.gguf -p x": ("mute.gguf has no tokenizer: give --config ORG/NAME",),
    "generate -m sound -p x --regex [a": ("(unclosed character class)",),
    "demo --rule luck": ("--rule must be one of",),
    "demo --tree 12": ("--tree must be auto, none",),
    "demo --ram lots": ("--ram must be a size",),
    "datastore build --tokenizer sound --out there prompts.jsonl": ("there exists: take another",),
    "datastore build --tokenizer mute --out new prompts.jsonl": ("mute has no tokenizer",),
    "pack -m sound --out new": ("packing is for bfloat16", "sound"),
    "generate -m sound -p x --ngram nosuch.txt": ("cannot read nosuch.txt (No such file or directory): check",),
    "pack -m halves --out prompts.jsonl": ("prompts.jsonl is a file, which nothing is written over",),
    "pack -m halves --out there": ("there holds files already, which nothing is written over: choose another folder",),
    "pack -m halves --verify": ("holds no packed model",),
    "unpack -m halves --out new": ("holds no packed model",),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, sound: Path) -> dict[str, Any]:
    """What a new process says of each, one after another."""
    from tiny import FAMILIES, build, save

    folder = tmp_path_factory.mktemp("refused")
    for name in ("sound", "gpt2", "bloom", "mute"):
        shutil.copytree(sound, folder / name)
    for name in ("gpt2", "bloom"):
        set_json(folder / name / "config.json", model_type=name)
    drop("tokenizer*")(folder / "mute")
    write_gguf(MODELS["llama"](), folder / "mute.gguf", "Q8_0")
    save(build(FAMILIES["llama"]()).bfloat16(), folder / "halves")
    (folder / "there").mkdir()
    (folder / "there" / "file").touch()
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    lines = json.dumps([case.split() for case in CASES])
    outcomes = json.loads(run_python("-c", RUN, lines, environment=environment, folder=folder))
    return dict(zip(CASES, outcomes, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_within_a_second(case: str, refused: dict[str, Any]) -> None:
    code, line, has_torch, num_times = refused[case]
    assert code == 2 and line.count("\n") == 1, line
    for words in CASES[case]:
        assert words in line, line
    assert not has_torch, "an import that takes seconds"
    assert num_times < MOST_TIMES


def test_what_is_missing_is_installed_beside_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's `pip` is often that of another environment, and would help nothing there."""
    monkeypatch.setattr(shutil, "which", lambda _: str(Path(sys.prefix, "bin", "pip")))
    assert installing("offload[serve]") == "pip install 'offload[serve]'"
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/pip")
    assert installing("gguf") == f"{sys.executable} -m pip install gguf"
