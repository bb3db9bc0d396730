"""Results of many prompts as lines of JSON: on stdout, or in a file that a later run goes on with.

Invariant: a file holds whole lines but for the last one, which a kill may have cut; the next run
takes that half away. What a whole line tells is never written again.
"""

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from offload.cli.batch_file import BatchTask
from offload.cli.live_line import plural
from offload.errors import RunError, UserError, ensure

if TYPE_CHECKING:
    from offload.checkpoint.identity import ModelIdentity

_BEGINNING = b'{"index": '
_MOST_LINE_BYTES = 64 << 20
_OTHER = "name another file, or take that line out to have it written anew"


class ResultsFile:
    """Where results go.

    Attributes:
        name: for the user; empty for stdout.
        done: (index, sample) of what was there already.
        models: which models the lines that were there are of, by the first line of each.
        model: that of lines to come.
        num_failed: of all that is there.
    """

    def __init__(self, name: str, write: Callable[[str], None]) -> None:
        self.name = name
        self._write = write
        self.done = set[tuple[int, int]]()
        self.num_failed = 0
        self.models: dict[int, ModelIdentity] = {}
        self.model: dict[str, Any] = {}

    def add(self, task: BatchTask, result: dict[str, Any]) -> None:
        """Write one line, whole. Raises `RunError` where it cannot be written."""
        self.num_failed += "error" in result
        line = {"index": task.index, "sample": task.sample, "id": task.name, **result}
        line |= {"request": task.digest, "model": self.model}
        self._write(json.dumps(line) + "\n")

    def find(self, lines: Sequence[bytes], tasks: Sequence[BatchTask]) -> None:
        """Note what is done already. Raises `UserError` where a line is of other tasks."""
        from offload.checkpoint.identity import ModelIdentity  # only a run needs it

        digests = {(task.index, task.sample): task.digest for task in tasks}
        seen = set[str]()
        for number, line in enumerate(lines, start=1):
            key, digest, model, has_failed = self._told(line, number)
            if (name := json.dumps(model, sort_keys=True)) not in seen:
                seen.add(name)
                if (found := ModelIdentity.parse(model)) is None:
                    what = "does not tell of which model it is, an earlier version wrote it"
                    raise UserError(f"{self.name}, line {number} {what}: name another file")
                self.models[number] = found
            index, sample = key
            what = ""
            if key in self.done:
                what = f"tells of index {index} once more"
            elif key not in digests:
                have = f"{plural(len({one for one, _ in digests}), 'prompt')}"
                num_samples = max(one for _, one in digests) + 1
                have += f" with {num_samples} samples each" if num_samples > 1 else ""
                what = f"has the result of index {index}, sample {sample}; there are {have}, counted from 0"
            elif digests[key] != digest:
                what = f"is of another prompt or settings than index {index} has now"
            if what:
                raise UserError(f"{self.name}, line {number} {what}: {_OTHER}")
            self.done.add(key)
            self.num_failed += has_failed

    def require(self, difference: "Callable[[ModelIdentity], str]") -> None:
        """Raise `UserError` where a line is of another model.

        `difference` tells in words what differs from it.
        """
        for number, model in self.models.items():
            if what := difference(model):
                which = f"{self.name}, line {number} is not of this model ({what})"
                raise UserError(f"{which}: {_OTHER}")

    def _told(self, line: bytes, number: int) -> tuple[tuple[int, int], str, Any, bool]:
        try:
            told = json.loads(line)
            ensure(isinstance(told, dict), "an object is wanted")
            key = (told.get("index"), told.get("sample"))
            digest = told.get("request")
            is_whole = all(isinstance(one, int) for one in key) and isinstance(digest, str)
            ensure(is_whole, "fields are missing")
        except (ValueError, RecursionError):
            what = f"{self.name}, line {number} is no result of offload"
            raise UserError(f"{what}: name another file") from None
        return key, digest, told.get("model"), "error" in told


@contextmanager
def open_results(
    path: Path | None, tasks: Sequence[BatchTask], prompts: Path, to_stdout: Callable[[str], None]
) -> Iterator[ResultsFile]:
    """Open a file of results to go on with, or stdout for no path and `-`.

    Raises `UserError` for a file that is of other tasks, is written to by another process, or
    cannot be written.
    """
    if path is None or str(path) == "-":
        yield ResultsFile("", to_stdout)
        return
    if path.exists() and path.samefile(prompts):
        rule = f"`out` must be another file than that of the prompts, got {path}"
        raise UserError(f"{rule}: name another one")
    with _opened(path) as file:
        results = ResultsFile(str(path), lambda line: _append(file, line, path))
        whole = _whole_lines(file, path)
        results.find(whole, tasks)
        file.truncate(sum(map(len, whole)))
        yield results


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read and append, by one process at a time. Raises `UserError`."""
    try:
        opened = path.open("a+b", buffering=0)
    except OSError as error:
        what = f"cannot write results to {path} ({error.strerror})"
        raise UserError(f"{what}: name another file") from None
    with opened as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            rule = f"results must be kept in a file, {path} is none"
            raise UserError(f"{rule}: leave `out` out for standard output")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another process writes to {path}"
            raise UserError(f"{what}: wait for it, or name another file") from None
        yield file


def _whole_lines(file: BinaryIO, path: Path) -> list[bytes]:
    """Return all lines but a last one that was cut short.

    Raises `UserError` where that one is nothing of ours.
    """
    file.seek(0)
    with open(file.fileno(), "rb", closefd=False) as reader:
        lines = list[bytes]()
        while line := reader.readline(_MOST_LINE_BYTES):
            lines.append(line)
            if not line.endswith(b"\n"):  # cut short, or longer than any of ours
                break
    if not lines or lines[-1].endswith(b"\n"):
        return lines
    cut = lines.pop()
    size = min(len(cut), len(_BEGINNING))
    if cut[:size] != _BEGINNING[:size] or len(cut) == _MOST_LINE_BYTES:
        raise UserError(f"{path}, line {len(lines) + 1} is no result of offload: name another file")
    return lines


def _append(file: BinaryIO, line: str, path: Path) -> None:
    left = memoryview(line.encode())
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        what = f"cannot write to {path} ({error.strerror or os.strerror(error.errno or 0)})"
        remedy = "what is in it is whole, make room and the same command goes on"
        raise RunError(f"{what}: {remedy}") from None
