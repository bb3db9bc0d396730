"""Files of a batch, a JSON object a line: many prompts, and results that a later run goes on with.

Prompts are checked as a whole before anything is loaded. Invariants: a task's digest changes with
whatever could change its text beside the model, and with nothing else. A file of results holds whole
lines except the last one, which a kill may have cut; the next run takes that half away. What a whole
line tells is never written again.
"""

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import MsgspecError, Struct, convert

from offload.checkpoint.files import read_text
from offload.checkpoint.identity import ModelIdentity
from offload.cli.prompt_input import with_system
from offload.declaration import listed, options_at, renamed, synonyms_at
from offload.engine.request import Prompt, Request, samples_of
from offload.errors import RunError, UserError, did_you_mean, os_errors_as_user_error, require
from offload.options import TextOptions
from offload.sampling.grammar import GRAMMARS, find_grammar
from offload.sampling_options import NARROWING, Sampling
from offload.units import plural

_DRAWING = options_at("batch", Sampling)
_TEXT = options_at("batch", TextOptions)
_FIELDS = ("id", "prompt", "messages", *_TEXT, *_DRAWING)
# except for what the first three hold
_NOT_OF_THE_TEXT = {
    *("prompt", "stop", "sampling"),
    *("session", "is_kept", "is_named", "is_clipped"),
}
_UNSET = [(setting.name, setting.default) for setting in fields(Sampling)]
_OTHERS = [
    (field.name, field.default) for field in fields(Request) if field.name not in _NOT_OF_THE_TEXT
]
_SYNONYMS = synonyms_at("batch", TextOptions, Sampling)
# what a file calls an option
KEYS = {setting.name: key for key, setting in {**_TEXT, **_DRAWING}.items()}
_DIGEST_CHARS = 16
_MAX_BYTES = 1 << 30  # millions of prompts
_BEGINNING = b'{"index": '
_MOST_LINE_BYTES = 64 << 20
_OTHER = "name another file, or take that line out to have it written anew"


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One text to be written: a prompt of a file, or one of several samples of it."""

    index: int  # of the prompt among those of the file
    sample: int
    name: str | int | None  # what the file calls it
    request: Request
    digest: str  # of all that its text depends on beside the model


def read_tasks(
    file: Path, common: Request, num_samples: int, written_by: str, system: str | None = None
) -> list[BatchTask]:
    """Return all tasks of a file; a line's settings replace those of `common`.

    Raises `UserError` with the number of the line.

    Args:
        written_by: type and rule, on which texts depend as well; the model is told of beside.
        system: what the model is told before a prompt; messages say that for themselves.
    """
    text = read_text(file, "prompts", _MAX_BYTES).removeprefix("\ufeff")
    tasks = list[BatchTask]()
    index = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            name, request = _request(line, common, system)
            for sample, variant in enumerate(varied(request, num_samples)):
                tasks.append(BatchTask(index, sample, name, variant, _digest(variant, written_by)))
        except UserError as error:
            # it names arguments, and here they are keys
            raise UserError(f"{file}, line {number}: {renamed(str(error), KEYS)}") from None
        index += 1
    remedy = 'give lines such as {"prompt": "Hello"}'
    require(bool(tasks), f"{file} must hold prompts", "none", remedy)
    return tasks


def varied(request: Request, num_samples: int) -> Iterator[Request]:
    """Return `samples_of` a request. Raises `UserError` where they would all be the same."""
    is_varied = num_samples == 1 or not request.sampling.is_greedy
    requirement = "`samples` of greedy text are all the same: there must be one"
    require(is_varied, requirement, num_samples, "give a `temperature`, or leave `samples` out")
    return samples_of(request, num_samples)


def _request(line: str, common: Request, system: str | None) -> tuple[str | int | None, Request]:
    """Return a line's id and its request. Raises `UserError` for wrong or unknown fields."""
    fields_given = _object(line)
    for key in fields_given:
        got = f"{key!r:.80}{did_you_mean(key, _FIELDS).rstrip('?')}"
        requirement = f"a field must be one of {', '.join(_FIELDS)}"
        require(key in _FIELDS, requirement, got, "mend or take it out")
        # a whole number, to Python
        is_truth = isinstance(fields_given[key], bool) and key != "json_schema"
        requirement = f"{key} must not be true or false"
        require(not is_truth, requirement, json.dumps(fields_given[key]), "mend or take it out")
    name = fields_given.get("id")
    is_name = isinstance(name, str | int | None)
    require(is_name, "id must be text or a whole number", f"{name!r:.80}", "mend it")
    stop = fields_given.get("stop", common.stop)
    is_text = stop is None or isinstance(stop, str | list | tuple)
    require(is_text, "stop must be text or a list of texts", f"{stop!r:.80}", "mend it")
    changes = {
        setting.name: fields_given[key] for key, setting in _TEXT.items() if key in fields_given
    }
    is_clipped = common.is_clipped and "max_new_tokens" not in changes
    kept = find_grammar(**{key: changes.pop(key) for key in GRAMMARS if key in changes})
    changes["prompt"] = _prompt(fields_given, system, raw=common.raw)
    changes["sampling"] = _sampling(fields_given, common.sampling)
    request = replace(common, grammar=kept or common.grammar, is_clipped=is_clipped, **changes)
    request.check()
    return name, request


def _object(line: str) -> dict[str, Any]:
    """Return a line's JSON object, with the usual keys and without nulls. Raises `UserError`."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"a line must be JSON, this one is not ({error!s:.80}): mend it") from None
    remedy = 'such as {"prompt": "Hello"}'
    require(isinstance(parsed, dict), "a line must be a JSON object", f"{line:.80}", remedy)
    parsed = {key: value for key, value in parsed.items() if value is not None}
    for other, key in _SYNONYMS.items():
        requirement = f"a line must have one of {key} and {other}"
        require(not {other, key} <= parsed.keys(), requirement, "both", "leave one out")
    return {_SYNONYMS.get(key, key): value for key, value in parsed.items()}


def _prompt(fields_given: Mapping[str, Any], system: str | None, *, raw: bool) -> Prompt | None:
    """Return a line's prompt or messages. Raises `UserError` unless it has exactly one of them."""
    given = [key for key in ("prompt", "messages") if key in fields_given]
    got = " and ".join(given) or "neither"
    require(len(given) == 1, "a line must have one of prompt and messages", got, "mend it")
    value: Any = fields_given[given[0]]
    if given == ["prompt"]:
        is_text = isinstance(value, str) and value != ""
        require(is_text, "prompt must be text, and not empty", f"{value!r:.80}", "give some")
        return with_system(value, system, raw=raw)
    are_messages = isinstance(value, list) and {*map(type, value)} == {dict}
    remedy = 'such as [{"role": "user", "content": "Hello"}]'
    require(are_messages, "messages must be a list of objects", f"{value!r:.80}", remedy)
    require(not raw, "messages need the chat template", "raw", "leave raw out, or give prompt")
    return value


def _sampling(fields_given: Mapping[str, Any], common: Sampling) -> Sampling:
    """Return the line's sampling settings, with the command's for those it does not name."""
    changes = {
        setting.name: fields_given[key] for key, setting in _DRAWING.items() if key in fields_given
    }
    if not changes:  # of a million lines most, and what was checked needs no check
        return common
    if isinstance(biases := changes.get("logit_bias"), dict):  # JSON's keys are text
        pairs = biases.items()
        changes["logit_bias"] = {
            int(key) if key.isdecimal() else key: value for key, value in pairs
        }
    sampling = replace(common, **changes)
    useless = [name for name in NARROWING if name in changes]
    requirement = (
        f"{listed(NARROWING)} choose among tokens that are drawn: there must be a temperature"
    )
    require(
        not (sampling.is_greedy and useless), requirement, ", ".join(useless), "give one as well"
    )
    return sampling


def _digest(request: Request, written_by: str) -> str:
    """Return the digest of what is set otherwise than usual: later settings change no earlier one."""
    digested = {"prompt": request.prompt, "stop": request.stops}
    for record, usual in ((request.sampling, _UNSET), (request, _OTHERS)):
        for name, unset in usual:
            if (value := getattr(record, name)) != unset:
                digested[name] = value
    whole = json.dumps([written_by, digested], sort_keys=True, default=asdict)
    return hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_CHARS]


class _KeptLine(Struct):
    """A finished line, as far as a later run needs it."""

    index: int
    sample: int
    request: str  # the task's digest
    model: Any = None
    error: str | None = None


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
        digests = {(task.index, task.sample): task.digest for task in tasks}
        seen = set[str]()
        for number, line in enumerate(lines, start=1):
            result = self._parsed_line(line, number)
            if (name := json.dumps(result.model, sort_keys=True)) not in seen:
                seen.add(name)
                if (identity := ModelIdentity.parse(result.model)) is None:
                    problem = "does not tell of which model it is, an earlier version wrote it"
                    raise UserError(f"{self.name}, line {number} {problem}: name another file")
                self.models[number] = identity
            key = (result.index, result.sample)
            problem = ""
            if key in self.done:
                problem = f"tells of index {result.index} once more"
            elif key not in digests:
                have = f"{plural(len({index for index, _ in digests}), 'prompt')}"
                num_samples = max(sample for _, sample in digests) + 1
                have += f" with {num_samples} samples each" if num_samples > 1 else ""
                place = f"index {result.index}, sample {result.sample}"
                problem = f"has the result of {place}; there are {have}, counted from 0"
            elif digests[key] != result.request:
                problem = f"is of another prompt or settings than index {result.index} has now"
            if problem:
                raise UserError(f"{self.name}, line {number} {problem}: {_OTHER}")
            self.done.add(key)
            self.num_failed += result.error is not None

    def require(self, difference: Callable[[ModelIdentity], str]) -> None:
        """Raise `UserError` if a line is of another model; `difference` says how it differs."""
        for number, model in self.models.items():
            if mismatch := difference(model):
                which = f"{self.name}, line {number} is not of this model ({mismatch})"
                raise UserError(f"{which}: {_OTHER}")

    def _parsed_line(self, line: bytes, number: int) -> _KeptLine:
        try:
            return convert(json.loads(line), _KeptLine)
        except (ValueError, RecursionError, MsgspecError):
            problem = f"{self.name}, line {number} is no result of offload"
            raise UserError(f"{problem}: name another file") from None


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
        requirement = f"`out` must be another file than that of the prompts, got {path}"
        raise UserError(f"{requirement}: name another one")
    with _opened(path) as file:
        results = ResultsFile(str(path), lambda line: _append(file, line, path))
        whole = _whole_lines(file, path)
        results.find(whole, tasks)
        file.truncate(sum(map(len, whole)))
        yield results


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read and append, by one process at a time. Raises `UserError`."""
    with os_errors_as_user_error(f"cannot write results to {path}", "name another file"):
        opened = path.open("a+b", buffering=0)
    with opened as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            requirement = f"results must be kept in a file, {path} is none"
            raise UserError(f"{requirement}: leave `out` out for standard output")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another process writes to {path}"
            raise UserError(f"{problem}: wait for it, or name another file") from None
        yield file


def _whole_lines(file: BinaryIO, path: Path) -> list[bytes]:
    """Return all lines but one cut short at the end. Raises `UserError` where that is not ours."""
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
        failure = f"cannot write to {path} ({error.strerror or os.strerror(error.errno or 0)})"
        remedy = "what is in it is whole, make room and the same command goes on"
        raise RunError(f"{failure}: {remedy}") from None
