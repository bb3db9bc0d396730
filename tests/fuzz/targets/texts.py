"""What users write themselves: prompts, many of them a line each, results gone on with, grammars, kept sessions."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from case import Target
from damage import BYTES, JSON, data, header, json_line, json_value, other, special, text
from model_files import ENOUGH, as_wanted, keep_wanted, save_files
from reciting import TEMPLATE
from shell import Outcome, shell

_LINES = (
    {"id": "a", "prompt": "Count: a", "max_tokens": 2, "temperature": 0.5, "seed": 3, "stop": ["x"]},
    {"id": 5, "messages": [{"role": "user", "content": "Count"}], "max_tokens": 2, "logprobs": 2},
    {"prompt": "b", "max_tokens": 3, "top_k": 5, "temperature": 1.0, "logit_bias": {"20": -5}, "repeat_penalty": 1.2},
    {"prompt": "b", "max_tokens": 3, "regex": "[ab]+"},
)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 4},
    "c": {"enum": ["x", None, 1]}, "d": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "c"], "additionalProperties": False}  # fmt: skip
_RULES = 'start: "a" word ("," word)*\nword: /[a-z]{1,5}/\n%ignore " "\n'
_HOSTILE_SCHEMAS = (
    '{"$ref": "#"}', '{"$ref": "file:///etc/passwd"}', '{"$ref": "http://localhost/x"}', '{"anyOf": []}', "true",
    '{"type": "string", "pattern": "(a+)+$"}', '{"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}',
    '{"type": "array", "minItems": 1000000000}', '{"type": "string", "minLength": 1000000000}', '{"enum": []}',
    '{"type": "integer", "minimum": 1e308, "maximum": -1e308}', '{"multipleOf": 0}', '{"allOf": [{"$ref": "#"}]}',
    '{"a": ' * 5000, json.dumps({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(3000)}}),
    json.dumps({"enum": ["x" * 1000] * 1000}), '{"const": "\\ud800"}', '{"pattern": 5}', '{"type": "nothing"}',
)  # fmt: skip
_HOSTILE_RULES = (
    "start: start", "start: start start | ", 'start: "a"~1000000000', "start: /(a+)+$/", "start: x", "", "start:",
    "%import common.NUMBER\nstart: NUMBER", "%import .secret (X)\nstart: X", 'start: "' + "a" * 10**6 + '"',
    "start: /a{1,100000}{1,100000}/", "start: " + "(" * 5000, "\n".join(f"r{n}: r{n + 1}" for n in range(3000)),
    "start: %json {\"$ref\": \"#\"}", "start: /\\p{L}{1,9999999}/",
    "start[max_tokens=99999999999]: /.*/", "start: /(?=a)/",
    "%llguidance {\"no_forcing\": 5}\nstart: /a/", 'start: "\\ud800"', "start: <[0-99999999999]>", "start: @x",
)  # fmt: skip

_MOST_BYTES = 1 << 20  # of what is looked at of a damaged file


def _save(folder: Path) -> None:
    save_files(folder / "model", template=TEMPLATE)
    (folder / "prompt.txt").write_text("Count: a, bé")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _LINES))
    (folder / "schema.json").write_text(json.dumps(_SCHEMA))
    (folder / "rules.lark").write_text(_RULES)


def _save_results(folder: Path) -> None:
    _save(folder)
    done = _write_lines(folder)
    assert done.code == 0, done.err
    path = folder / "results.jsonl"
    shutil.copy(path, folder / "wanted")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def _save_session(folder: Path) -> None:
    """Its text is gone on with; where the file is not there, the same command starts over."""
    _save(folder)
    begun, path = _go_on(folder), folder / "kept.session"
    kept = path.read_bytes()
    keep_wanted(folder, _go_on(folder))
    path.write_bytes(kept)
    (folder / "begun").write_text(begun.out)


def _generate(folder: Path, *arguments: str, **files: str) -> Outcome:
    """Four tokens; flags that name files are given by name."""
    named = [word for flag, name in files.items() for word in (f"-{flag}", folder / name)]
    return shell("generate", "-m", folder / "model", "-n", 4, *arguments, *named, *ENOUGH)


def _by(*arguments: str, **files: str) -> Callable[[Path], Outcome]:
    return lambda folder: _generate(folder, *arguments, **files)


def _write_lines(folder: Path) -> Outcome:
    return _generate(folder, f="prompts.jsonl", **{"-out": "results.jsonl"})


def _write_the_rest(folder: Path) -> Outcome:
    """What was in the file stays, and what is added to it is right."""
    path = folder / "results.jsonl"
    is_readable = path.is_file() and os.access(path, os.R_OK)
    before = path.open("rb").read(_MOST_BYTES).split(b"\n") if is_readable else []
    outcome = _write_lines(folder)
    if outcome.code == 0:
        lines, wanted = (file.read_bytes().split(b"\n") for file in (path, folder / "wanted"))
        assert len(lines) == len(wanted) and {*lines} <= {*before, *wanted}, f"another result: {lines}"
    return outcome


def _go_on(folder: Path) -> Outcome:
    return _generate(folder, "-p", "Count: a", "--raw", **{"-session": "kept.session"})


def _go_on_alike(folder: Path) -> Outcome:
    is_there = (folder / "kept.session").exists()
    outcome = _go_on(folder)
    return as_wanted(folder, outcome) if is_there or outcome.out != (folder / "begun").read_text() else outcome


_SCHEMED = _by("-p", "Count", **{"-json-schema": "schema.json"})
_RULED = _by("-p", "Count", **{"-grammar": "rules.lark"})
_TEXT = (text, special, *BYTES)
TARGETS = [
    Target("texts/prompt", _save, {"prompt.txt": _TEXT}, _by(f="prompt.txt")),
    Target("texts/lines", _save, {"prompts.jsonl": (json_line, json_line, *_TEXT)}, _by(f="prompts.jsonl")),
    Target("texts/results", _save_results, {"results.jsonl": (json_line, json_line, *_TEXT)}, _write_the_rest,
        writes=("results.jsonl", "not-there")),
    Target("texts/schema", _save, {"schema.json": (json_value, other(*_HOSTILE_SCHEMAS), *JSON)}, _SCHEMED),
    Target("texts/rules", _save, {"rules.lark": (other(*_HOSTILE_RULES), *_TEXT)}, _RULED),
    Target("texts/session", _save_session, {"kept.session": (header, header, data, special, *BYTES)}, _go_on_alike,
        writes=("kept.session",)),
]  # fmt: skip
