"""A model's folder may hold programs and name others: none is imported, run or fetched, and no network is touched.

Commands run in a process that notes what Python's audit hooks tell: connections, look-ups of names, programs that are
started, and files that are opened. The traps are real: where the code of the folder ran, it would leave a mark.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reciting import PIECES
from refusals import set_json
from shell import ROOT
from tiny import FAMILIES, save_pair, save_reciter, save_tokenizer

from offload.checkpoint.open import open_checkpoint
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.model.meta import build_meta_model

TRAP = "import os, pathlib\npathlib.Path(os.environ['TRAPS'], __name__).touch()\n"
MODULES = ("configuration_evil", "modeling_evil", "tokenization_evil", "sitecustomize", "torch", "json", "__init__")
TEMPLATE = "{{ messages[0].content }}"

AUDITED = """
import os, sys
noted = open(os.environ["NOTES"], "w")
ours = (sys.prefix, sys.base_prefix, os.environ["ROOT"], os.environ["FOLDER"], "/proc", "/sys", "/dev", "/usr", "/etc",
        "/lib", os.environ["HOME"], os.path.realpath(sys.prefix + "/lib"))
def note(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.sendto") or (
            event == "socket.connect" and isinstance(args[1], tuple)):
        print("network", event, args[1:], file=noted, flush=True)
    elif event in ("os.system", "os.exec", "os.spawn", "os.posix_spawn", "pty.spawn"):
        print("program", args, file=noted, flush=True)
    elif event == "subprocess.Popen" and not str(args[1][2]).endswith("guarded_worker.py"):
        print("program", args[1], file=noted, flush=True)
    elif event in ("pickle.find_class", "marshal.loads") and event.startswith("pickle"):
        print("pickle", args, file=noted, flush=True)
    elif event == "open" and "/elsewhere/" in str(args[0]):
        print("outside", args[0], file=noted, flush=True)
sys.addaudithook(note)
from unittest.mock import patch
from offload.cli import main as cli
import io, json
for line in json.loads(os.environ["COMMANDS"]):
    with patch.object(sys, "argv", ["offload", *line]), patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi"))):
        try:
            cli.main()
        except SystemExit as leaving:
            print("ended", line[0], leaving.code or 0, file=noted, flush=True)
"""


def write_traps(folder: Path) -> None:
    """Code in every place that any library runs code of checkpoints from."""
    (folder / "custom_generate").mkdir()
    for name in (*MODULES, "custom_generate/generate", "custom_generate/__init__"):
        (folder / f"{name}.py").write_text(TRAP)
    (folder / "custom_generate" / "requirements.txt").write_text("evil")


def claim_code(folder: Path) -> None:
    """Say in every file that can that code should run."""
    kinds = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    kernel: dict[str, Any] = dict.fromkeys(("attn_implementation", "_attn_implementation"), "evil/kernel")
    set_json(folder / "config.json", auto_map=kinds, trust_remote_code=True, use_kernels=True, **kernel)
    tokens = {"AutoTokenizer": ["tokenization_evil.T", "tokenization_evil.T"]}
    set_json(folder / "tokenizer_config.json", auto_map=tokens, trust_remote_code=True)
    set_json(folder / "generation_config.json", custom_generate="evil/generate", trust_remote_code=True)
    canary = folder.parent / "elsewhere" / "tokenizer.1.0.json"
    canary.parent.mkdir()
    canary.write_text((folder / "tokenizer.json").read_text())
    files = ("vocab_file", "tokenizer_file", "merges_file", "special_tokens_map_file", "chat_template_file")
    set_json(folder / "tokenizer_config.json", **dict.fromkeys(files, str(canary)))
    set_json(folder / "processor_config.json", auto_map={"AutoProcessor": "modeling_evil.P"})


def run(folder: Path, work: Path, commands: list[list[str]], *, home: Path) -> list[str]:
    """What was noted, and which traps have sprung."""
    traps, notes = work / "traps", work / "notes"
    traps.mkdir(exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))},
        "NOTES": str(notes), "ROOT": str(ROOT), "FOLDER": str(folder), "COMMANDS": json.dumps(commands),
        "TRAPS": str(traps), "HOME": str(home), "HF_HOME": str(home / "hub"),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-P", "-c", AUDITED], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    said = [] if "remote code" not in ended.stdout else ["asked"]
    sprung = [f"sprung {path.name}" for path in sorted(traps.iterdir())]
    return [*notes.read_text().splitlines(), *sprung, *said]


def commands_of(folder: Path) -> list[list[str]]:
    few = ["--ram", "1GiB", "--context", "64", "--threads", "1", "-m", str(folder)]
    return [
        ["generate", *few, "-n", "2", "-p", "Hello"],
        ["plan", "-m", str(folder), "--ram", "1GiB"],
        ["chat", *few],
        f"datastore build --tokenizer {folder} --out {folder.parent / 's'} {folder / 'notes.txt'}".split(),
    ]


def test_no_code_of_a_folder_runs_and_no_network_is_touched(tmp_path: Path) -> None:
    folder = save_reciter(tmp_path / "model", PIECES, ends=True, chat_template=TEMPLATE)
    (folder / "notes.txt").write_text("some words")
    write_traps(folder)
    claim_code(folder)
    noted = run(folder, tmp_path, commands_of(folder), home=tmp_path)
    assert noted == [f"ended {name} 0" for name in ("generate", "plan", "chat", "datastore")]


def test_what_is_unknown_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    """A family, and a tokenizer, that only code of the folder knows."""
    folder = save_reciter(tmp_path / "model", PIECES, ends=True, chat_template=TEMPLATE)
    write_traps(folder)
    claim_code(folder)
    set_json(folder / "config.json", model_type="evil")
    few = ["--ram", "1GiB", "--context", "64", "-m", str(folder)]
    assert run(folder, tmp_path, [["generate", *few, "-p", "x"]], home=tmp_path) == ["ended generate 2"]


@pytest.mark.parametrize("names", [["../elsewhere/tokenizer.1.0.json"], ["/etc/tokenizer.1.0.json"], [5], 5])
def test_a_tokenizer_of_another_folder_is_not_opened(names: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tokenizer(folder)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "elsewhere" / "tokenizer.1.0.json")
    set_json(folder / "tokenizer_config.json", fast_tokenizer_files=names)
    why = "is no file beside tokenizer_config.json" if isinstance(names, list) else ""
    with pytest.raises(UserError, match=rf"cannot read the tokenizer in {folder} \(.*{why}"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("kernel", ["evil/kernel", "flash_attention_2", {"": "evil/kernel"}])
def test_no_kernel_of_the_hub_is_fetched(
    name: str, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would, where the package `kernels` is installed, and what comes is run."""

    fetched = list[Any]()

    def fetch(*names: Any, **_: Any) -> None:
        fetched.append(names)
        raise OSError("no hub")

    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_: True)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    folder, _ = save_pair(FAMILIES["llama"](), tmp_path)
    set_json(folder / "config.json", **{name: kernel})
    model = build_meta_model(open_checkpoint(folder), torch.float32)
    assert not fetched and model.config._attn_implementation not in (kernel, "evil/kernel")
    if name == "attn_implementation" and isinstance(kernel, str):
        from transformers import AutoConfig, AutoModelForCausalLM

        with pytest.raises((OSError, ImportError)):
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        assert fetched, "the control"


@pytest.mark.parametrize("code", ["import modeling_evil", "import urllib.request as u; u.urlopen('http://127.0.0.1:9')",
                                  "import os; os.system('true')", "open('/elsewhere/x')"])  # fmt: skip
def test_the_watch_can_tell(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_traps(folder)
    start = AUDITED.index("from unittest.mock")
    planted = f"{AUDITED[:start]}sys.path.insert(0, os.environ['FOLDER'])\ntry:\n    {code}\nexcept OSError: pass\n"
    for name in ("torch", "json", "sitecustomize"):
        (folder / f"{name}.py").unlink()
    monkeypatch.setitem(globals(), "AUDITED", planted)
    assert run(folder, tmp_path, [], home=tmp_path)
