"""An option is declared in one place, found from there at every door; bounds, records and signatures made of it."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import popen

import offload

PACKAGE = Path(offload.__file__).parent
MADE_UP = """\
    made_up: float = option(
        "--made-up", default=0.5, metavar="X", within="[0, 1]", remedy="0.5 is usual", help="nothing at all",
        commands=_WRITE, doors=(*_ALL, "page"), page=("0", "1"),
    )
"""
LOOK = """
import json, runpy, sys
for name in [one for one in sys.modules if one.partition(".")[0] == "offload"]:
    del sys.modules[name]  # of the process that this one was forked from
from unittest.mock import patch
import typer
from offload.cli import batch_file, main, slash_commands
from offload.sampling_options import Sampling
from offload.engine.request import request_of
from offload.distributed.orders import Reset, decode, encode
from offload.server.openai.bodies import ChatBody
from offload.server.page import read_page

def refusal(*arguments):
    with patch.object(sys, "argv", ["offload", "generate", "-m", "nowhere/at-all", "-p", "x", *arguments]):
        with patch.object(main, "_fail", side_effect=lambda line, *_: sys.exit(line)):
            try:
                main.main()
            except SystemExit as leaving:
                return str(leaving.code)

command = main.every_command()["generate"]
context = command.make_context("generate", [], resilient_parsing=True)
option_docs = runpy.run_path(".ci/option_docs.py")
context.meta["--help-all"] = True
found = {
    "help": command.get_help(context),
    "flag": refusal("--made-up", "2"),
    "HTTP": sorted(ChatBody.model_fields),
    "a file of prompts": batch_file._FIELDS,
    "/set": slash_commands._HELP,
    "page": read_page().body.decode(),
    "Python": request_of("x", {"made_up": 0.25}).sampling.made_up,
    "ranks": decode(encode(Reset(0, Sampling(made_up=0.25)))).sampling.made_up,
    "docs": option_docs["with_table"](""),
    "arguments": option_docs["text_arguments"](),
}
import os
os.environ["OFFLOAD_MADE_UP"] = "3"
found["a variable"] = refusal()
del os.environ["OFFLOAD_MADE_UP"]
with open(main.defaults.config_file(), "w") as file:
    file.write("made-up = 4")
found["config.toml"] = refusal()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a copy of the program shows of an option that was added to it in one place."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, folder / "offload", ignore=shutil.ignore_patterns("demo_pair", "__pycache__"))
    for name in ("bench", "kernels", "pyproject.toml", ".ci"):
        (folder / name).symlink_to(PACKAGE.parent / name)
    source = folder / "offload" / "sampling_options.py"
    before, mark, after = source.read_text().partition("    seed: int = option(")
    assert mark, "there is a place for it"
    source.write_text(before + MADE_UP + mark + after)
    (folder / "offload-settings" / "offload").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CONFIG_HOME": str(folder / "offload-settings")}
    command = [sys.executable, "-c", LOOK]
    looking = popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, err = looking.communicate()
    assert looking.returncode == 0, err
    return json.loads(output)


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("help", ("--made-up X", "nothing at all")),
        ("flag", ("--made-up must lie in [0, 1], got 2.0: 0.5 is usual",)),
        ("a variable", ("got 3.0", "(--made-up is set by OFFLOAD_MADE_UP)")),
        ("config.toml", ("got 4.0", "(--made-up is set by ", "config.toml)")),
        *((door, ("made_up",)) for door in ("HTTP", "a file of prompts")),
        ("/set", ("made-up",)),
        ("page", ('<label>Made-up<input id="made_up" type="number" min="0" max="1" step="any"',)),
        ("docs", ("| `--made-up` `X` | generate, chat | `0.5` |", "nothing at all")),
        ("arguments", ("    made_up: float",)),
    ],
)
def test_an_option_is_found_at_every_door(door: str, words: tuple[str, ...], doors: dict[str, str]) -> None:
    for word in words:
        assert word in doors[door], doors[door]
    assert doors["Python"] == doors["ranks"] == 0.25, "its value reaches a text"


def test_documents_are_current() -> None:
    """`python .ci/option_docs.py` writes both."""
    made = runpy.run_path(str(PACKAGE.parent / ".ci" / "option_docs.py"))
    flags = made["FLAGS"].read_text("utf-8")
    assert flags == made["with_table"](flags) and made["ARGUMENTS"].read_text("utf-8") == made["text_arguments"]()


def test_no_other_file_names_an_option_of_drawing() -> None:
    """Beside its declaration `min_p` stands where it is computed."""
    sources = (path for path in PACKAGE.rglob("*.py") if "min_p" in path.read_text("utf-8"))
    generated = "engine/text_arguments.py"
    allowed = {"sampling_options.py", "sampling/sampler.py", generated}
    assert {path.relative_to(PACKAGE).as_posix() for path in sources} == allowed
