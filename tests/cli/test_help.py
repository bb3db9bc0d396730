"""What help shows: eight options that matter first, the others by name, all of them where that is asked for."""

import re
import subprocess
import sys

import pytest
from shell import shell

from offload.bench.suite import COMMANDS, MEASURES, STUDIES
from offload.commands import every_command
from offload.declaration import GROUPS, options_of
from offload.options import RECORDS

LONG = ("generate", "chat", "serve", "plan", "tune")
SHORT = ("demo", "verify", "pack", "datastore build")


def options(name: str) -> list[str]:
    """The names that a command's options are looked for by; without those for help, and hidden ones."""
    first, *words = name.split()
    command = every_command()[first]
    for word in words:
        command = command.commands[word]
    shown = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    names = [next((flag for flag in one.opts if flag.startswith("--")), one.opts[0]) for one in shown]
    return [flag for flag in names if flag != "--help-all"]


def explained(text: str) -> set[str]:
    """Options that begin a line: what is in the middle of one is only named."""
    return {flag for line in re.findall(r"^  (?=-)(.*)", text, re.MULTILINE) for flag in re.findall(r"--[\w-]+", line)}


@pytest.mark.parametrize("name", LONG)
def test_help_explains_what_matters_first_and_names_the_others(name: str) -> None:
    told, whole = shell(*name.split(), "--help").out, shell(*name.split(), "--help-all").out
    first, _, rest = told.partition(f"More, which offload {name} --help-all explains:")
    main = explained(first) & {*options(name)}
    assert 5 <= len(main) <= 8 and "--model" in main, main
    named = set(re.findall(r"--[\w-]+", rest.partition("Examples:")[0]))
    assert named == {*options(name)} - main, "each is somewhere"
    assert explained(whole) >= {*options(name)} and len(first.splitlines()) < 40
    assert not re.search(r"-$", rest.partition("Examples:")[0], re.MULTILINE), "no name is broken"


@pytest.mark.parametrize("name", LONG)
def test_all_options_stand_in_their_groups(name: str) -> None:
    whole = shell(name, "--help-all").out
    titles = re.findall(r"^(\w+):$", whole, re.MULTILINE)
    assert titles[0] == "Options" and titles[1:] == [group for group in GROUPS if group in titles]
    assert {"Model", "Memory", "Guessing", "Output"} <= {*titles}
    guessing = whole.partition("Guessing:")[2].partition("\n\n")[0]
    assert "--tree" in guessing and "--ram" not in guessing


@pytest.mark.parametrize("name", SHORT)
def test_a_command_with_few_options_shows_them_all(name: str) -> None:
    told = shell(*name.split(), "--help").out
    assert explained(told) >= {*options(name)} and "--help-all" not in told
    assert shell(*name.split(), "--help-all").code == 2


def examples(text: str) -> list[str]:
    """Return the lines of help's examples."""
    return [line for line in text.partition("Examples:")[2].splitlines() if line.strip()]


@pytest.mark.parametrize("name", [*LONG, *SHORT, "list", "unpack", "launch", "datastore append"])
def test_examples_can_be_copied_from_a_narrow_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = examples(shell(*name.split(), "--help").out)
    assert told and all(re.match("  (offload|cat|head) ", line) for line in told), "one is broken into lines"


@pytest.mark.parametrize("name", [*LONG, *SHORT, "list", "unpack", "launch", "datastore append"])
def test_no_line_ends_within_a_flag_and_arguments_are_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (60, 80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        told = shell(*name.split(), "--help").out
        told = told.partition("Examples:")[0]
        broken = [line for line in told.splitlines() if re.search(r"(^|[ /,])--?[\w-]*-$", line)]
        assert not broken and "\N{NON-BREAKING HYPHEN}" not in told
        assert not re.search(r"[{}]|<(str|list|path)|\.{4}", told, re.IGNORECASE)


def test_every_option_is_of_a_group() -> None:
    for record in RECORDS:
        for one in options_of(record).values():
            assert one.group in GROUPS and record.GROUP in GROUPS, one.name  # type: ignore[attr-defined]


def test_bench_lists_what_users_run_apart_from_studies() -> None:
    told = shell("bench", "--help").out
    first, studies = told.split("Studies, by which this program is developed:")
    for names, part in ((MEASURES, first), (STUDIES, studies)):
        assert re.findall(r"^  ([a-z][\w-]+) ", part.partition("Commands:")[2] or part, re.MULTILINE) == [*names]
    assert {"decode", "many", "peers", "compare"} <= {*MEASURES} and {"moe-pair", "kernels"} <= {*STUDIES}
    assert COMMANDS.keys() == MEASURES.keys() | STUDIES.keys()


def test_help_of_the_program_imports_no_command() -> None:
    code = "import sys; sys.argv = ['offload', '--help']; from offload.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: print(*(name for name in sys.modules if name.endswith('_commands')))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1] == "" and [*every_command()] == re.findall(r"^  (\w+)  +[A-Z]", told, re.MULTILINE)
