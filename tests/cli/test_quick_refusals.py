"""What needs no torch is refused before it is imported: a line that says no takes no seconds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import MODELS, write_gguf
from refusals import drop

from offload.errors import installing

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
    "tune -m sound -d sound --text nosuch.txt": ("cannot read the text nosuch.txt",),
    "generate -m sound -p x --ngram nosuch.txt": ("cannot read nosuch.txt (No such file or directory): check",),
    "generate -m gpt2 -p x": ("gpt2: model type gpt2 is not supported",),
    "plan -m bloom": ("bloom: model type bloom is not supported",),
    "generate -m mute -p x": ("mute has no tokenizer: put its tokenizer.json beside it",),
    "chat -m mute": ("mute has no tokenizer",),
    "serve -m mute": ("mute has no tokenizer",),
    "generate -m mute.gguf -p x": ("mute.gguf has no tokenizer: give --config ORG/NAME",),
    "generate -m sound -p x --regex [a": ("(unclosed character class)",),
    "demo --rule luck": ("--rule must be one of",),
    "demo --tree 12": ("--tree must be auto, none",),
    "demo --ram lots": ("--ram must be a size",),
    "datastore build --tokenizer sound --out there prompts.jsonl": ("there exists: take another",),
    "datastore build --tokenizer mute --out new prompts.jsonl": ("mute has no tokenizer",),
    "pack -m sound --out new": ("packing is for bfloat16", "sound"),
    "pack -m halves --out there": ("there holds files already, which nothing is written over: choose another folder",),
    "pack -m halves --out prompts.jsonl": ("prompts.jsonl is a file, which nothing is written over",),
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
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, "model_type": name}))
    drop("tokenizer*")(folder / "mute")
    write_gguf(MODELS["llama"](), folder / "mute.gguf", "Q8_0")
    save(build(FAMILIES["llama"]()).bfloat16(), folder / "halves")
    (folder / "there").mkdir()
    (folder / "there" / "file").touch()
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUN, json.dumps([case.split() for case in CASES])]
    told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return dict(zip(CASES, json.loads(told.stdout), strict=True))


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
