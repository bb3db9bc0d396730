"""Descriptions of grammars, and what becomes of bad ones: a line for the user, never the end of the process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import VOCAB_SIZE, save_tokenizer

from offload.errors import UserError
from offload.sampling import grammar as module
from offload.sampling.grammar import Grammar, Grammars, find_grammar

END = 2  # of the tokenizer of tiny models


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("llguidance")
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, {END})


def test_a_description_is_hashable_and_names_its_argument() -> None:
    schema = {"type": "object"}
    assert find_grammar(json_schema=schema) == Grammar("json_schema", '{"type": "object"}')
    assert len({find_grammar(json_schema=schema), find_grammar(json_schema=json.dumps(schema))}) == 1
    assert find_grammar() is None
    assert find_grammar(regex="a") == Grammar("regex", "a") and find_grammar(grammar="start: A") == Grammar(
        "lark", "start: A"
    )
    assert str(Grammar("lark", "x")) == "`grammar`"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"regex": "a", "grammar": "b"}, "at most, got `regex` and `grammar`"),
        ({"json_schema": "{"}, "`json_schema` must be JSON"),
        ({"json_schema": "[]"}, "must be an object"),
        ({"json_schema": "[" * 100_000}, "must be JSON"),
        ({"json_schema": {"const": object}}, "must be JSON"),
        ({"json_schema": {"const": float("nan")}}, "must be JSON"),
        ({"regex": ""}, "must not be empty"),
        ({"regex": 3}, "must be text"),
        ({"regex": "\udc80"}, "half a character at 0"),
        ({"regex": "a" * (1 << 20) + "b"}, "at most 1 MiB, got 1048577 bytes"),
    ],
)
def test_what_is_no_grammar_is_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        find_grammar(**given)


def test_kinds_are_known() -> None:
    with pytest.raises(UserError, match="one of json_schema, json_object, regex, lark"):
        Grammar("yaml", "x")
    with pytest.raises(UserError, match="takes no text"):
        Grammar("json_object", "x")


def chained(num_rules: int) -> str:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(num_rules))
    return f'start: r0\n{rules}\nr{num_rules}: "b"'


def chained_schema(num: int) -> str:
    definitions: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(num)}
    return json.dumps({"$defs": definitions | {f"a{num}": {"type": "string"}}, "$ref": "#/$defs/a0"})


BAD = {
    "unclosed": ("regex", "(", "unclosed group"),
    "look-ahead": ("regex", "(?=a)b", "look-around"),
    "nested": ("regex", "(" * 20_000 + "a" + ")" * 20_000, "cannot be compiled"),
    "matches nothing": ("regex", r"[^\s\S]", "must allow something"),
    "no start": ("lark", 'a: "x"', "no start rule"),
    "unknown rule": ("lark", "start: x", "unknown name"),
    "circular": ("lark", "start: start", "must allow something"),
    "no such token": ("lark", "start: <[99999]>", "too large"),
    "deep": ("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
    "chain that overflows a stack": ("lark", chained(20_000), "more than its compiler can take"),
    "schema that overflows a stack": ("json_schema", chained_schema(15_000), "more than its compiler can take"),
    "unknown keyword": ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "false": ("json_schema", "false", "Unsatisfiable"),
    "contradiction": ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}', "Unsatisfiable"),
    "itself": ("json_schema", '{"$ref": "#"}', "must allow something"),
    "elsewhere": ("json_schema", '{"$ref": "file:///etc/passwd"}', "not present in a registry"),
    "not there": ("json_schema", '{"$ref": "#/nope"}', "does not exist"),
    "half a character": ("json_schema", '{"const": "\\ud800"}', "cannot be compiled"),
    "too many": ("json_schema", json.dumps({"properties": {f"p{i}": True for i in range(15_000)}}), "`json_schema`"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_grammars_are_refused_in_a_line(grammars: Grammars, case: str) -> None:
    kind, text, line = BAD[case]
    grammar = Grammar(kind, text)
    with pytest.raises(UserError, match=line) as refusal:
        grammars.mask(grammar)
    assert str(refusal.value).startswith(str(grammar)) and "\n" not in str(refusal.value)


def test_what_takes_too_long_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRIAL_S", 0.001)
    with pytest.raises(UserError, match="must be compiled within"):
        grammars.mask(Grammar("regex", "slow"))


def test_a_compiler_that_panics_is_told_of(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as pyo3 has it
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("llguidance.LLMatcher", panic)
    monkeypatch.setattr(module, "_source", lambda grammar: "start: /a/")
    with pytest.raises(UserError, match="index out of bounds"):
        grammars.mask(Grammar("regex", "panics"))


def test_without_the_package_a_line_says_so(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install offload\[grammar\]"):
        Grammars(tokenizer, VOCAB_SIZE, {END}).mask(Grammar("regex", "a"))


def test_without_the_package_in_the_process_that_compiles_a_line_names_it(
    grammars: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wrong with the grammar."""
    (tmp_path / "llguidance.py").write_text("raise ModuleNotFoundError(\"No module named 'llguidance'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"package llguidance by .* lacks it \(No module named 'llg.*pip install"
    ) as told:
        grammars.mask(Grammar("regex", "[a-c]+ that compiles"))
    assert "`regex`" not in str(told.value) and "a-c" not in str(told.value)


def test_without_a_tokenizer_a_line_says_so() -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Grammars(None, VOCAB_SIZE, {END}).mask(Grammar("regex", "a"))


def test_it_is_imported_when_it_is_asked_for() -> None:
    """And the description needs nothing heavy at all."""
    code = "import sys, offload.sampling.grammar; print('torch' in sys.modules, 'llguidance' in sys.modules)"
    code += "; import offload.sampling.grammar; print('llguidance' in sys.modules)"
    root = Path(__file__).parents[2]
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert told.stdout.split() == ["False"] * 3
