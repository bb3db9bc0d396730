"""What a file and environment variables set: which of them comes first, for which command, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from reciting import only_object
from refusals import assert_refused
from shell import process, shell

pytestmark = pytest.mark.usefixtures("_instant_link")
MIB = 2**20


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "offload").mkdir()
    return tmp_path / "offload" / "config.toml"


def plan(*arguments: object) -> dict[str, Any]:
    return only_object(shell("plan", "--device", "cpu", "--json", *arguments).out)


def test_flags_come_before_variables_before_the_file(
    sound: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(f'ram = "300MiB"\ncontext = 64\nmodel = "{sound}"\n')
    assert plan()["budgets"]["ram_bytes"] == 300 * MIB and plan()["context"] == 64
    config.write_text(f'ram = "300MiB"\nmodel = "{sound}"\n[plan]\nram = "400MiB"\n[chat]\nram = "1MiB"\n')
    assert plan()["budgets"]["ram_bytes"] == 400 * MIB
    monkeypatch.setenv("OFFLOAD_RAM", "500MiB")
    assert plan()["budgets"]["ram_bytes"] == 500 * MIB
    assert plan("--ram", "600MiB")["budgets"]["ram_bytes"] == 600 * MIB
    monkeypatch.setenv("OFFLOAD_MODEL", "")
    refused = shell("plan")
    assert_refused(refused, "--model", "see offload plan --help")
    assert "set by" not in refused.err


def test_switches_and_one_value_or_several(sound: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("generate", "-m", sound, "-p", "Count:", "--context", 64, "-n", 8, "--threads", 1)
    monkeypatch.setenv("OFFLOAD_QUIET", "1")
    for stop in ('[" two", "x"]', '" two"'):
        config.write_text(f"raw = true\nstop = {stop}\n")
        outcome = shell(*command)
        assert (outcome.code, outcome.out, outcome.err) == (0, " one\n", "")
    config.write_text('[tune]\ntext = "absent.txt"\n')
    monkeypatch.setenv("OFFLOAD_STOP", " two")
    assert shell(*command, "--raw").out == " one\n"
    assert_refused(shell("tune", "-m", sound, "-d", sound), "absent.txt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 3", "'colour', which is no flag: take it out, or name one of "),
        ("tre = 3", "'tre', which is no flag: take it out, or name one of tree, "),
        ("[plan]\nquiet = true", "'quiet', which is no flag: take it out"),
        ("[paint]\nram = 3", "'paint', which is no flag: take it out"),
        ("ram = ", "mend it or move it away"),
        ("ram = " + "[" * 50_000, "mend it or move it away"),
        ('prompt = "Hello"', "'prompt', which is no flag"),
    ],
)
def test_what_no_flag_has_is_refused(text: str, words: str, config: Path, sound: Path) -> None:
    config.write_text(text)
    assert_refused(shell("plan", "-m", sound), str(config), words)
    assert shell("plan", "--help").code == 0, "help is not to be spoilt"


def test_an_error_names_where_the_flag_was_set(sound: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever name it was given, and not where it is another command's."""
    command = ("generate", "-m", sound, "-p", "x", "--context", 64)
    config.write_text('threads = "many"\n')
    assert_refused(shell(*command), "--threads", f"(--threads is set by {config})")
    config.write_text("max-tokens = -5\n")
    assert_refused(shell(*command, "--threads", 1), "-n", f"(--max-tokens is set by {config})")
    config.write_text("[chat]\nmax-tokens = -5\n")
    monkeypatch.setenv("OFFLOAD_TEMP", "0.5")
    monkeypatch.setenv("OFFLOAD_RAM", "lots")
    assert_refused(shell(*command), "got 'lots'", "(--ram is set by OFFLOAD_RAM)")
    for given in (("--ram", "few"), ("-n", -5), ("-n-5",), ("--temperature", -1)):
        refused = shell(*command, "--threads", 1, *(() if given[0] == "--ram" else ("--ram", "1GiB")), *given)
        assert_refused(refused, "got 'few'" if given[0] == "--ram" else "")
        assert "set by" not in refused.err


def test_a_variable_that_is_nearly_a_flags_is_told(sound: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RAMM", "1GB")
    monkeypatch.setenv("OFFLOAD_OF_ANOTHER_PROGRAM", "1")
    monkeypatch.setenv("OFFLOAD_TRACEBACK", "1")
    outcome = shell("plan", "-m", sound)
    assert outcome.code == 0 and outcome.err == "offload: OFFLOAD_RAMM sets no flag. Did you mean OFFLOAD_RAM?\n"
    assert shell("plan", "-m", sound, "--json").err == "", "what is to be quiet is"


def test_completion_knows_commands_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_OFFLOAD_COMPLETE", "complete_bash")
    for words, wanted in (
        ("offload ge", "generate"),
        ("offload generate --ra", "--ram"),
        ("offload bench pee", "peers"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert wanted in process().out.split()
