"""Plant mistakes in a copy of the tree, one at a time, and see which test notices: `make planted`.

A mistake is noticed where a test fails with it that passes without it. Asked are the tests that the table names, those
of a quick run first, and only where these pass the others, up to the first that fails. So what is measured is whether
these tests notice, not how long a whole run takes to. Each is a process forked from this one, which has imported the
libraries and nothing of the program.
"""

import argparse
import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from planted.mistakes import ROOT, Mistake, read_mistakes

_ALIKE = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
_LIBRARIES = ("pytest", "torch", "scipy.stats", "transformers.models.llama.modeling_llama", "transformers.generation")
_IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
_PYTEST = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-rfE", "--tb=no", "-W", _IMPORTED)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py::.*?)(?: - .*)?$", re.MULTILINE)
_MOST_S = 1800
_ENDLESS = "a test that does not end"
_ENDED_EARLY = 70
_OWN_PATHS = ("", ".", str(ROOT), str(ROOT / "tests"), "tests")
# so that no two versions of a file look alike to what caches code by a file's time
_TICK = itertools.count(1)


class Copy:
    """The tree in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @contextmanager
    def with_mistake(self, mistake: Mistake) -> Iterator[None]:
        """Have the mistake meanwhile."""
        path = self._folder / mistake.file
        own_time = path.stat().st_mtime
        source = path.read_text(encoding="utf-8")
        path.write_text(mistake.plant(source), encoding="utf-8")
        os.utime(path, (own_time + 10 * next(_TICK),) * 2)
        try:
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, (own_time, own_time))

    def failures(self, *arguments: str) -> list[str]:
        """Return the tests that fail. Raises `RuntimeError` where pytest has not come to its end."""
        output = self._folder / "told"
        process = os.fork()
        if process == 0:
            self._become(output, arguments)
        deadline_s = time.monotonic() + _MOST_S
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            time.sleep(0.02)
            if time.monotonic() > deadline_s:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return [_ENDLESS]
        text = output.read_text(encoding="utf-8", errors="replace")
        code = os.waitstatus_to_exitcode(ended[1])
        failed = _FAILED.findall(text)
        if code == 1 and "Timeout (" in text:  # which has ended the run
            failed = failed or [_ENDLESS]
        if code and not (code == 1 and failed):
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with {code}:\n{text[-2000:]}")
        return failed if code else []

    def _become(self, output: Path, arguments: Sequence[str]) -> NoReturn:
        """Be a run of pytest in the copy."""
        code = _ENDED_EARLY
        try:
            os.setsid()
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(file, number)
            os.chdir(self._folder)
            os.environ["PYTHONPATH"] = str(self._folder)
            sys.path[:] = [str(self._folder), *(path for path in sys.path if path not in _OWN_PATHS)]
            code = int(importlib.import_module("pytest").main([*_PYTEST, *arguments]))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def first_failure(copy: Copy, mistake: Mistake) -> tuple[str, str]:
    """Return which run notices the mistake, and by which test."""
    with copy.with_mistake(mistake):
        for name, options in (("quick", ()), ("full", ("--full",))):
            if failures := copy.failures(*options, *mistake.tests):
                return name, failures[0]
    return "none", f"{' '.join(mistake.tests)} pass"


def main(arguments: Sequence[str]) -> int:
    """Return 0 where all mistakes were noticed."""
    parser = argparse.ArgumentParser(prog="make planted", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="mistakes against promises, or in files, with one of these in them"
    )
    options = parser.parse_args(arguments)
    mistakes = [row for row in read_mistakes() if any(word in f"{row.promise} {row.file}" for word in options.only)]
    os.environ.update(_ALIKE)
    for name in _LIBRARIES:
        importlib.import_module(name)
    counts = dict.fromkeys(("quick", "full", "none"), 0)
    named = set[str]()
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        copy = Copy(Path(folder))
        for mistake in mistakes:
            begun_s = time.monotonic()
            try:
                which, settings = first_failure(copy, mistake)
            except (RuntimeError, ValueError) as error:
                which, settings = "none", str(error)
            counts[which] += 1
            named |= {settings} if "::" in settings and which != "none" else set()
            seconds = time.monotonic() - begun_s
            print(f"{which:5}  {seconds:4.0f} s  {mistake.promise}  <-  {settings.removeprefix('tests/')}", flush=True)
        wrong = copy.failures("--maxfail=1000", *sorted(named)) if named else []
    print(*(f"{test} fails without a mistake, too" for test in wrong), sep="\n", end="\n" * bool(wrong))
    print(f"{len(mistakes)} mistakes:", *(f"{number} by {which}" for which, number in counts.items()))
    return 1 if counts["none"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
