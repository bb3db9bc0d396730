"""Standard streams that are full, closed or ASCII; Ctrl-C before there is anything to interrupt; what libraries say."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from reciting import PROMPT, SAID, settings
from shell import ROOT, Outcome, process


def redirected(redirection: str, *arguments: object, **environment: str) -> Outcome:
    """`offload ARGUMENTS` in a shell that redirects its streams."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "offload", *map(str, arguments)]
    told = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=told, timeout=300)
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(("command", "unbuffered"), [("generate", ""), ("plan", "1"), ("help", "")])
def test_a_full_output_is_one_line(command: str, unbuffered: str, ender: Path) -> None:
    arguments = {
        "generate": ["generate", *settings(ender), "-p", PROMPT, "--quiet"],
        "plan": ["plan", "-m", ender, "--ram", "1GiB", "--device", "cpu"],
        "help": ["--help"],
    }[command]
    outcome = redirected("> /dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    assert outcome == Outcome(1, "", "offload: cannot write to standard output (No space left on device)\n")


@pytest.mark.parametrize("redirection", ["2>&-", "<&- >&-"])
def test_closed_streams_are_done_without(redirection: str, ender: Path) -> None:
    outcome = redirected(redirection, "generate", *settings(ender), "-p", PROMPT)
    assert outcome.code == 0
    assert outcome.out == (SAID + "\n" if redirection == "2>&-" else "")
    assert ("tokens/s" in outcome.err) is ("2>&-" not in redirection) and "Traceback" not in outcome.err


def test_closed_input_is_an_empty_prompt(ender: Path) -> None:
    outcome = redirected("<&-", "generate", "-m", ender)
    assert outcome.code == 2 and "the prompt is empty, standard input holds nothing" in outcome.err


def test_ascii_output_has_question_marks(ender: Path) -> None:
    outcome = redirected("", "generate", *settings(ender), "-p", PROMPT, PYTHONIOENCODING="ascii")
    assert outcome.code == 0 and outcome.out == SAID.encode("ascii", "replace").decode() + "\n"


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
    outcome = process(*arguments, python=("-c", INTERRUPTS.format(name=name)))
    assert outcome.code == 130 and outcome.err in ("", "offload: interrupted\n")


INTERRUPTS_DESTRUCTOR = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from offload import __main__
from offload.cli import write_commands
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
write_commands.read_prompt = lambda *_, **__: (Dying(), "Say:")[1]
__main__.main()
"""


def test_interrupt_in_a_destructor_is_not_swallowed(ender: Path) -> None:
    outcome = process("generate", *settings(ender), "--quiet", python=("-c", INTERRUPTS_DESTRUCTOR))
    assert outcome.code == 130 and outcome.err == "offload: interrupted\n"


def test_warnings_of_libraries_are_lines(broken: Path) -> None:
    """Each once, marked by where it comes from."""
    config = json.loads((broken / "config.json").read_text())
    config["rope_parameters"]["colour"] = "green"
    (broken / "config.json").write_text(json.dumps(config))
    environment = {"TRANSFORMERS_VERBOSITY": "warning"}
    arguments = ("generate", "-m", broken, "-p", "Count:", "-n", 4, "--context", 64, "--threads", 1)
    outcome = redirected("", *arguments, **environment)
    told = [line for line in outcome.err.splitlines() if "colour" in line]
    assert outcome.code == 0 and len(told) == 1 and told[0].startswith("transformers: ")
    assert redirected("", *arguments, "--quiet", **environment).err == ""


LISTS_UNUSED = """
import sys
from offload.__main__ import main
unused = {"torch._dynamo.eval_frame", "torch.distributed.tensor", "scipy", "triton", "offload.tuning.trace_acceptance"}
try:
    main()
finally:
    print(*unused & sys.modules.keys(), file=sys.stderr)
"""


def test_what_a_decoder_does_not_need_is_not_imported(ender: Path) -> None:
    environment = "TRITON_INTERPRET"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(environment, raising=False)
        outcome = process("generate", *settings(ender), "-p", PROMPT, "--quiet", python=("-c", LISTS_UNUSED))
    assert outcome == Outcome(0, SAID + "\n", "\n")


def test_interrupt_that_was_ignored_stays_ignored() -> None:
    """As in the background of a shell."""
    told = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from offload.__main__ import main; "
    told += "sys.argv = ['offload', '--help']\ntry: main()\nfinally: print(signal.getsignal(2), file=sys.stderr)"
    outcome = process(python=("-c", told))
    assert outcome.code == 0 and str(signal.SIG_IGN) in outcome.err
