"""The command line as a person meets it: what it prints, where, and with which exit code.

`shell` runs it inside the test's own process; `process` where a process matters.
"""

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from forked import ROOT, popen

from offload import commands as cli


class Outcome(NamedTuple):
    """One finished command."""

    code: int
    out: str
    err: str


def shell(*arguments: object, stdin: bytes = b"") -> Outcome:
    """Run `offload ARGUMENTS`, with `stdin` piped into it."""
    out, err, piped = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(stdin))
    argv = ["offload", *map(str, arguments)]
    with patch.object(sys, "argv", argv), patch.object(sys, "stdin", piped), redirect_stdout(out), redirect_stderr(err):
        code = _exit_code()
    return Outcome(code, out.getvalue(), err.getvalue())


def start(
    *arguments: object, python: tuple[str, ...] = ("-m", "offload"), is_cold: bool = False
) -> "subprocess.Popen[bytes]":
    """Return the same as a process under way, with pipes; `python` may be other options of the interpreter.

    It is forked from a warm one, see `forked.py`. What asks which modules are imported, or when, wants a cold one.
    """
    command = [sys.executable, *python, *map(str, arguments)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in ("TRANSFORMERS_VERBOSITY", "PYTHONUNBUFFERED"):  # as it is for a user
        environment.pop(name, None)
    run = subprocess.Popen if is_cold else popen
    return run(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, bufsize=0)


def process(
    *arguments: object, stdin: bytes = b"", python: tuple[str, ...] = ("-m", "offload"), is_cold: bool = False
) -> Outcome:
    """Run the same as a process of its own, to its end."""
    running = start(*arguments, python=python, is_cold=is_cold)
    out, err = running.communicate(stdin, timeout=300)
    return Outcome(running.returncode, out.decode(), err.decode())


def run_python(*arguments: object, environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> str:
    """Run a new interpreter with these, to its end; return what it prints."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _exit_code() -> int:
    try:
        cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    raise AssertionError("main() always leaves by sys.exit")
