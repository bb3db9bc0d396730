"""Standard streams that are full, closed or ASCII; Ctrl-C before there is anything to interrupt; what libraries say."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import ROOT, popen
from reciting import PROMPT, SAID, settings
from shell import Outcome, process

# What a shell does before a program starts.
REDIRECTS = {
    "> /dev/full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "<&-": "os.close(0); sys.stdin = None",
    "<&- >&-": "os.close(0); os.close(1); sys.stdin = sys.stdout = None",
}


def redirected(redirection: str, *arguments: object, **environment: str) -> Outcome:
    """Run `offload ARGUMENTS` with its streams redirected, in a warm process or, where that says so, in a shell."""
    told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    pipe, words = subprocess.PIPE, [*map(str, arguments)]
    if redirection in REDIRECTS:
        code = f"import os, sys; {REDIRECTS[redirection]}; from offload.__main__ import main; main()"
        running = popen(
            [sys.executable, "-c", code, *words], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=told
        )
    else:
        command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "offload", *words]
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=told)
    out, err = running.communicate(timeout=300)
    return Outcome(running.returncode, out.decode(), err.decode())


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
    """And to what is ASCII alone a question mark stands for any other character."""
    outcome = redirected(redirection, "generate", *settings(ender), "-p", PROMPT, PYTHONIOENCODING="ascii")
    assert outcome.code == 0
    assert outcome.out == (SAID.encode("ascii", "replace").decode() + "\n" if redirection == "2>&-" else "")
    assert ("tokens/s" in outcome.err) is ("2>&-" not in redirection) and "Traceback" not in outcome.err


def test_closed_input_is_an_empty_prompt(ender: Path) -> None:
    outcome = redirected("<&-", "generate", "-m", ender)
    assert outcome.code == 2 and "the prompt is empty, standard input holds nothing" in outcome.err


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
    outcome = process(*arguments, python=("-c", INTERRUPTS.format(name=name)), is_cold=True)
    assert outcome.code == 130 and outcome.err in ("", "offload: interrupted\n")


INTERRUPTS_DESTRUCTOR = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from offload import __main__
from offload.cli import generate_command
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
generate_command.asked_prompt = lambda *_, **__: (Dying(), "Say:")[1]
__main__.main()
"""


def test_interrupt_in_a_destructor_is_not_swallowed(ender: Path) -> None:
    outcome = process("generate", *settings(ender), "--quiet", python=("-c", INTERRUPTS_DESTRUCTOR))
    assert outcome.code == 130 and outcome.err == "offload: interrupted\n"


@pytest.fixture
def warned_of(ender: Path, tmp_path: Path) -> Path:
    """A model of which transformers says that it does not know all of its config."""
    model = Path(shutil.copytree(ender, tmp_path / "warned_of"))
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["colour"] = "green"
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_warnings_of_libraries_are_lines(warned_of: Path) -> None:
    """Each once, marked by where it comes from."""
    outcome = process("generate", *settings(warned_of), "-p", PROMPT, is_cold=True)
    told = [line for line in outcome.err.splitlines() if "colour" in line]
    assert outcome.code == 0 and len(told) == 1 and told[0].startswith("transformers: ")


def test_ranks_meet_without_the_compiler() -> None:
    """It is found by torch.distributed, and takes seconds and 150 MiB where it is imported."""
    code = """
import sys
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.options import OutputOptions
with libraries(Console(OutputOptions(quiet=True))):
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
print("torch._dynamo.eval_frame" in sys.modules)
"""
    assert process(python=("-c", code), is_cold=True).out == "False\n"


LISTS_UNUSED = """
import os, sys
os.environ["TRANSFORMERS_VERBOSITY"] = "warning"  # --quiet comes first
from offload.__main__ import main
unused = {"torch._dynamo.eval_frame", "torch.distributed.tensor", "scipy", "triton", "fastapi", "uvicorn", "starlette"}
unused |= {"offload.reports.trace_acceptance", "offload.server.app"}
try:
    main()
finally:
    print(*unused & sys.modules.keys(), file=sys.stderr)
"""


def test_a_quiet_process_prints_text_and_imports_no_more_than_it_needs(
    warned_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is printed, whatever libraries have to say."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    outcome = process(
        "generate", *settings(warned_of), "-p", PROMPT, "--quiet", python=("-c", LISTS_UNUSED), is_cold=True
    )
    assert outcome == Outcome(0, SAID + "\n", "\n"), "an empty list"


def test_interrupt_that_was_ignored_stays_ignored() -> None:
    """As in the background of a shell."""
    told = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from offload.__main__ import main; "
    told += "sys.argv = ['offload', '--help']\ntry: main()\nfinally: print(signal.getsignal(2), file=sys.stderr)"
    outcome = process(python=("-c", told))
    assert outcome.code == 0 and str(signal.SIG_IGN) in outcome.err
