"""An option is declared in one place, found from there at every door; bounds, records and signatures made of it."""

import copy
import inspect
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import popen

import offload
from offload.declaration import build, called_with, check_values, given_of, interval, option, options_of
from offload.errors import UserError
from offload.planning.load_options import LoadOptions
from offload.sampling_options import Sampling
from offload.units import ByteSize, Rate, is_decimal, parse_rate, parse_size

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
from offload.declaration import options_at

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
    "lm-eval": [*options_at("harness", Sampling)],
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
    told, err = looking.communicate()
    assert looking.returncode == 0, err
    return json.loads(told)


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("help", ("--made-up X", "nothing at all")),
        ("flag", ("--made-up must lie in [0, 1], got 2.0: 0.5 is usual",)),
        ("a variable", ("got 3.0", "(--made-up is set by OFFLOAD_MADE_UP)")),
        ("config.toml", ("got 4.0", "(--made-up is set by ", "config.toml)")),
        *((door, ("made_up",)) for door in ("HTTP", "a file of prompts", "lm-eval")),
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


def test_other_names_of_an_option_are_taken_at_the_doors_of_programs() -> None:
    """`repetition_penalty`, as Hugging Face and vLLM have it."""
    from offload.cli import batch_file, slash_commands
    from offload.server.core.body import parse
    from offload.server.openai.bodies import ChatBody

    body = {"messages": [{"role": "user", "content": "x"}]}
    for name in ("repeat_penalty", "repetition_penalty"):
        assert parse(ChatBody, json.dumps({**body, name: 1.5}).encode()).repeat_penalty == 1.5
        assert batch_file._object(json.dumps({name: 1.5})) == {"repeat_penalty": 1.5}
    assert slash_commands._SHORT["repetition-penalty"] == "repeat-penalty"
    assert "--repetition-penalty" in options_of(Sampling)["repeat_penalty"].flags


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


@dataclass(frozen=True)
class Inner:
    """Two numbers."""

    weight: float = option("--weight", default=1.0, within="(0, 1]", remedy="1 is all", help="how much")
    count: int = option("--count", "-c", default=3, help="how many", keeps_default=True)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class Outer:
    """A name, and what was given of the numbers."""

    name: str = option("--name", is_required=True, default="", help="what it is called")
    given: Mapping[str, Any] = given_of(Inner)
    _: KW_ONLY
    loud: bool = option("--loud/--quiet", default=False, help="whether it is heard")


@pytest.mark.parametrize(
    ("text", "words", "inside", "outside"),
    [
        ("0 or more", "be 0 or more", (0, 1e300), (-1, math.inf, math.nan)),
        ("-2 to 2", "lie between -2 and 2", (-2, 0, 2), (-2.1, 3, math.nan)),
        ("(0, 1]", "lie in (0, 1]", (0.1, 1), (0, 1.1, math.nan)),
        ("[0, 1)", "lie in [0, 1)", (0, 0.9), (1, -0.1)),
        ("[0, 2^63)", "lie in [0, 2^63)", (0, 2**63 - 1), (2**63, -1)),
    ],
)
def test_bounds_are_said_and_held(text: str, words: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    told, holds = interval(text)
    assert told == words
    assert all(map(holds, inside)) and not any(map(holds, outside))


def test_numbers_of_a_record_are_proved() -> None:
    assert Inner(weight=1).weight == 1.0 and isinstance(Inner(weight=1).weight, float)
    with pytest.raises(UserError, match=r"`weight` must lie in \(0, 1\], got 0.0: 1 is all"):
        Inner(weight=0)
    with pytest.raises(UserError, match="`weight` must be a number, got 'a'"):
        Inner(weight="a")  # type: ignore[arg-type]


def test_what_is_not_given_is_left_open() -> None:
    found = options_of(Outer)
    assert list(found) == ["name", "weight", "count", "loud"]
    assert found["weight"].default is None and found["count"].default == 3
    assert found["loud"].flag == "--loud"
    made = build(Outer, {"name": "x", "weight": None, "count": 3, "loud": True, "other": 5})
    assert made == Outer("x", {"count": 3}, loud=True)


def test_a_record_is_a_signature() -> None:
    @called_with(Outer)
    def tell(outer: Outer) -> str:
        """Tell.

        Args:
            {arguments}
        """
        return f"{outer.name}{'!' if outer.loud else ''}"

    assert tell("a") == "a" and tell(name="a", loud=True) == "a!"
    parameters = inspect.signature(tell).parameters
    assert parameters["name"].default is inspect.Parameter.empty
    assert parameters["loud"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "        loud: whether it is heard\n" in (tell.__doc__ or "")
    for arguments in ({}, {"name": "a", "noise": 1}):
        with pytest.raises(TypeError, match=r"argument:? '(name|noise)'"):
            tell(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"), [("8GiB", "8 GiB"), ("8GB", "8 GB"), ("1.5g", "1.5 GB"), (1 << 20, "1 MiB")]
)
def test_sizes_print_themselves(given: str | int, words: str) -> None:
    size = ByteSize.parse(given, "`ram`")
    assert str(size) == words and is_decimal(size) == words.endswith(" GB")
    assert ByteSize.parse(size, "`ram`") is size and copy.deepcopy(size) is size
    assert json.dumps(size) == str(int(size)) and type(size + 1) is int
    assert type(parse_size(size, "`ram`")) is int, "what computes, or names files, has a plain number"


def test_rates_print_themselves_and_options_hold_what_is_parsed() -> None:
    rate = Rate.parse("400MB/s", "`link_limit`")
    assert rate == parse_rate("400MB", "`link_limit`") == 400 * 10**6 and str(rate) == "400 MB/s"
    assert Rate.parse(rate, "`link_limit`") is rate and parse_rate(None, "`link_limit`") is None
    options = LoadOptions(ram="8GB", gpu_memory="24GiB", link_limit="1GB/s")
    assert [*map(str, (options.ram, options.gpu_memory, options.link_limit))] == ["8 GB", "24 GiB", "1 GB/s"]
    assert LoadOptions.from_options(options) == options
    counts = LoadOptions(threads=True, context=np.int64(64), parallel=np.int32(2))
    assert [*map(repr, (counts.threads, counts.context, counts.parallel))] == ["1", "64", "2"], "torch takes no other"
