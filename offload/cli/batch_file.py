"""A file of many prompts, one JSON object a line: checked as a whole before anything is loaded.

Invariant: a task's digest changes with whatever could change its text beside the model, and with
nothing else.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from offload.checkpoint.files import read_given
from offload.cli.prompt_input import decode, with_system
from offload.declaration import listed, options_at, synonyms_at
from offload.engine.request import Prompt, Request, samples_of
from offload.errors import UserError, did_you_mean, require
from offload.options import TextOptions
from offload.sampling.grammar import GRAMMARS, find_grammar
from offload.sampling_options import MOST_SAMPLES, NARROWING, Sampling

_DRAWING = options_at("batch", Sampling)
_TEXT = options_at("batch", TextOptions)
_FIELDS = ("id", "prompt", "messages", *_TEXT, *_DRAWING)
# but for what the first three hold
_NOT_OF_THE_TEXT = {
    *("prompt", "stop", "sampling"),
    *("session", "is_kept", "is_named", "is_clipped"),
}
_UNSET = [(one.name, one.default) for one in fields(Sampling)]
_OTHERS = [
    (field.name, field.default) for field in fields(Request) if field.name not in _NOT_OF_THE_TEXT
]
_SYNONYMS = synonyms_at("batch", TextOptions, Sampling)
_KEYS = {one.name: key for key, one in {**_TEXT, **_DRAWING}.items()}
_DIGEST_CHARS = 16
_MAX_BYTES = 1 << 30  # millions of prompts


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
    """Return all tasks of a file; a line's own settings stand in for those of `common`.

    Raises `UserError` with the number of the line.

    Args:
        written_by: type and rule, on which texts depend as well; the model is told of beside.
        system: what the model is told before a prompt; messages say that for themselves.
    """
    try:
        text = decode(read_given(file, _MAX_BYTES), str(file)).removeprefix("\ufeff")
    except OSError as error:
        what = f"cannot read prompts from {file} ({error.strerror})"
        raise UserError(f"{what}: check the path") from None
    tasks = list[BatchTask]()
    index = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            name, request = _request(line, common, system)
            for sample, one in enumerate(varied(request, num_samples)):
                tasks.append(BatchTask(index, sample, name, one, _digest(one, written_by)))
        except UserError as error:
            # it names arguments, and here they are keys
            rule = re.sub(r"`(\w+)`", lambda match: _KEYS.get(match[1], match[1]), str(error))
            raise UserError(f"{file}, line {number}: {rule}") from None
        index += 1
    remedy = 'give lines such as {"prompt": "Hello"}'
    require(bool(tasks), f"{file} must hold prompts", "none", remedy)
    return tasks


def varied(request: Request, num_samples: int) -> Iterator[Request]:
    """Return `samples_of` a request. Raises `UserError` where they would all be the same."""
    is_varied = num_samples == 1 or not request.sampling.is_greedy
    rule = "`samples` of greedy text are all the same: there must be one"
    require(is_varied, rule, num_samples, "give a `temperature`, or leave `samples` out")
    rule = f"`samples` must be at most {MOST_SAMPLES}"
    require(num_samples <= MOST_SAMPLES, rule, num_samples, "ask for fewer")
    return samples_of(request, num_samples)


def _request(line: str, common: Request, system: str | None) -> tuple[str | int | None, Request]:
    told = _object(line)
    for key in told:
        got = f"{key!r:.80}{did_you_mean(key, _FIELDS).rstrip('?')}"
        rule = f"a field must be one of {', '.join(_FIELDS)}"
        require(key in _FIELDS, rule, got, "mend or take it out")
    name = told.get("id")
    is_name = name is None or (isinstance(name, str | int) and not isinstance(name, bool))
    require(is_name, "id must be text or a whole number", f"{name!r:.80}", "mend it")
    stop = told.get("stop", common.stop)
    is_text = stop is None or isinstance(stop, str | list | tuple)
    require(is_text, "stop must be text or a list of texts", f"{stop!r:.80}", "mend it")
    own = {one.name: told[key] for key, one in _TEXT.items() if key in told}
    is_clipped = common.is_clipped and "max_new_tokens" not in own
    kept = find_grammar(**{key: own.pop(key) for key in GRAMMARS if key in own})
    own["prompt"] = _prompt(told, system, raw=common.raw)
    own["sampling"] = _sampling(told, common.sampling)
    request = replace(common, grammar=kept or common.grammar, is_clipped=is_clipped, **own)
    request.check()
    return name, request


def _object(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"a line must be JSON, this one is not ({error!s:.80}): mend it") from None
    remedy = 'such as {"prompt": "Hello"}'
    require(isinstance(told, dict), "a line must be a JSON object", f"{line:.80}", remedy)
    return {_SYNONYMS.get(key, key): value for key, value in told.items() if value is not None}


def _prompt(told: Mapping[str, Any], system: str | None, *, raw: bool) -> Prompt | None:
    given = [key for key in ("prompt", "messages") if key in told]
    got = " and ".join(given) or "neither"
    require(len(given) == 1, "a line must have one of prompt and messages", got, "mend it")
    value: Any = told[given[0]]
    if given == ["prompt"]:
        is_text = isinstance(value, str) and value != ""
        require(is_text, "prompt must be text, and not empty", f"{value!r:.80}", "give some")
        return with_system(value, system, raw=raw)
    are_messages = isinstance(value, list) and {*map(type, value)} == {dict}
    remedy = 'such as [{"role": "user", "content": "Hello"}]'
    require(are_messages, "messages must be a list of objects", f"{value!r:.80}", remedy)
    require(not raw, "messages need the chat template", "raw", "leave raw out, or give prompt")
    return value


def _sampling(told: Mapping[str, Any], common: Sampling) -> Sampling:
    """Return the line's settings; where it says nothing, the command's."""
    own = {one.name: told[key] for key, one in _DRAWING.items() if key in told}
    if not own:  # of a million lines most, and what was checked needs no check
        return common
    if isinstance(biases := own.get("logit_bias"), dict):  # JSON's keys are text
        pairs = biases.items()
        own["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in pairs}
    sampling = replace(common, **own)
    useless = [name for name in NARROWING if name in own]
    rule = f"{listed(NARROWING)} choose among tokens that are drawn: there must be a temperature"
    require(not (sampling.is_greedy and useless), rule, ", ".join(useless), "give one as well")
    return sampling


def _digest(request: Request, written_by: str) -> str:
    """Return the digest of what is set otherwise than usual.

    So settings of later versions change none that does without them.
    """
    told = {"prompt": request.prompt, "stop": request.stops}
    for record, usual in ((request.sampling, _UNSET), (request, _OTHERS)):
        for name, unset in usual:
            if (value := getattr(record, name)) != unset:
                told[name] = value
    whole = json.dumps([written_by, told], sort_keys=True, default=asdict)
    return hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_CHARS]
