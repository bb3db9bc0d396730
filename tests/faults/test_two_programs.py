"""Two programs at once that write to one place, and a file system that is full: real processes, as users have them.

Why: what `make faults` starts never meets another of its kind, nor room that is really used up. Invariant: each ends
with its result or one line, and what lies there afterwards is whole, or not there at all.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reciting import NUM_SAID, PIECES, SAID
from refusals import contents
from shell import ROOT, Outcome, shell, start
from tiny import FAMILIES, build, save, save_reciter, save_tokenizer

TWICE = 2
SMALL = ("--ram", "1GiB", "--context", 64, "--threads", 1, "-n", NUM_SAID, "-q")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "model"
    save_reciter(folder, PIECES, ends=True)
    save_tokenizer(save(build(FAMILIES["llama"]()).bfloat16(), folder.with_name("plain")))
    return folder


def together(*arguments: object) -> list[Outcome]:
    """Twice at once; each has ended well or said in one line why not, and one of them has ended well."""
    running = [start(*arguments) for _ in range(TWICE)]
    ends = [(process.communicate(timeout=200), process.returncode) for process in running]
    outcomes = [Outcome(code, out.decode(), err.decode()) for (out, err), code in ends]
    assert all(is_told(outcome) for outcome in outcomes) and 0 in {outcome.code for outcome in outcomes}, outcomes
    return outcomes


def is_told(outcome: Outcome) -> bool:
    lines = outcome.err.splitlines()
    return not lines if outcome.code == 0 else [line.split()[0] for line in lines] == ["offload:"]


@pytest.mark.full
def test_two_demos_inflate_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo = ("demo", "--size", "40MB", "-n", 2, "-q")
    texts = {outcome.out for outcome in together(*demo) if outcome.code == 0}
    folder = tmp_path / "offload"
    assert [path.name for path in folder.iterdir()] == ["demo-40MB"], "nothing that was begun is left"
    before = contents(folder)
    assert texts == {shell(*demo).out} and contents(folder) == before


@pytest.mark.full
def test_two_packers_of_one_folder(model: Path, tmp_path: Path) -> None:
    together("pack", "-m", model.with_name("plain"), "--out", tmp_path / "packed", "-q")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    assert shell("pack", "-m", tmp_path / "packed", "--verify", "-q").code == 0


def test_two_texts_in_one_session(model: Path, tmp_path: Path) -> None:
    text = ("generate", "-m", model, *SMALL, "--greedy", "--session", tmp_path / "text", "-p")
    outcomes = together(*text, "Say:")
    assert {outcome.out for outcome in outcomes if outcome.code == 0} == {SAID + "\n"}
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert shell(*text, ":").out == SAID + "\n", "the file can be gone on from"


@pytest.mark.full
@pytest.mark.parametrize("task", ["pack", "generate"])
def test_a_full_file_system(task: str, model: Path, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=8k full {tmp_path}"
    tool = shutil.which("unshare")
    if tool is None or subprocess.run([tool, "-rm", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no file system of one's own can be mounted here")
    commands: dict[str, tuple[object, ...]] = {
        "pack": ("pack", "-m", model.with_name("plain"), "--out", tmp_path / "made", "-q"),
        "generate": ("generate", "-m", model, *SMALL, "-p", "Say:", "--session", tmp_path / "made"),
    }
    command = [sys.executable, "-m", "offload", *map(str, commands[task])]
    script = f'{mount} && "$@"; code=$?; ls -A {tmp_path} | tr "\\n" " "; exit $code'
    ended = subprocess.run([tool, "-rm", "sh", "-c", script, "sh", *command], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode in (1, 2) and is_told(Outcome(ended.returncode, "", ended.stderr)), ended
    assert "made" not in ended.stdout.split() and re.search("space left|free", ended.stderr), ended
