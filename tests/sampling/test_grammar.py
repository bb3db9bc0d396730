"""Grammars: the mask of a row is what is allowed behind its path; bad ones are a line for the user, never the end."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, save_tokenizer
from torch import Tensor

from offload.drafting.static import draw_children
from offload.errors import UserError
from offload.rules import ChildSampling
from offload.sampling import grammar as module
from offload.sampling.grammar import Grammar, find_grammar
from offload.sampling.grammar_mask import GrammarMask, Grammars
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling

END = 2  # of the tokenizer of tiny models


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("llguidance")
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["ab", "bc", '{"', '":'])


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, {END})


def test_a_description_is_hashable_and_names_its_argument() -> None:
    schema = {"type": "object"}
    assert find_grammar(json_schema=schema) == Grammar("json_schema", '{"type": "object"}')
    assert len({find_grammar(json_schema=schema), find_grammar(json_schema=json.dumps(schema))}) == 1
    assert find_grammar() is None and find_grammar(regex="a") == Grammar("regex", "a")
    assert find_grammar(grammar="start: A") == Grammar("lark", "start: A")
    assert str(Grammar("lark", "x")) == "`grammar`"


NONE: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (find_grammar, {"json_schema": "[" * 100_000}, "must be JSON"),
    (find_grammar, {"json_schema": {"const": object}}, "must be JSON"),
    (find_grammar, {"json_schema": {"const": float("nan")}}, "must be JSON"),
    (find_grammar, {"regex": "\udc80"}, "half a character at 0"),
    (find_grammar, {"regex": "a" * (1 << 20) + "b"}, "at most 1 MiB, got 1048577 bytes"),
    (Grammar, {"kind": "yaml", "text": "x"}, "one of json_schema, json_object, regex, lark"),
    (Grammar, {"kind": "json_object", "text": "x"}, "takes no text"),
]


@pytest.mark.parametrize(("make", "given", "line"), NONE)
def test_what_is_no_grammar_is_refused(make: Callable[..., object], given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        make(**given)


def chained(num_rules: int) -> str:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(num_rules))
    return f'start: r0\n{rules}\nr{num_rules}: "b"'


def chained_schema(num: int) -> str:
    definitions: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(num)}
    return json.dumps({"$defs": definitions | {f"a{num}": {"type": "string"}}, "$ref": "#/$defs/a0"})


BAD = {
    "unclosed": ("regex", "(", "unclosed group"),
    "unclosed at length": ("regex", "(" + "a" * 1_000_000, "unclosed group"),
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
    "alternatives": ("json_schema", '{"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}', "take anyOf"),
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


@pytest.mark.parametrize(
    ("blanks", "said", "is_allowed"),
    [
        (" ", None, True),
        ("", None, True),
        ("  ", None, False),
        ("\n", None, False),
        ("\n\n", {"whitespace_flexible": True}, True),
        (" ", {"whitespace_flexible": False}, False),
        ("\t", {"whitespace_pattern": "\\t"}, True),
    ],
)
def test_blanks_of_json_are_bounded_unless_the_schema_speaks_of_them(
    blanks: str, said: object, is_allowed: bool
) -> None:
    llguidance = pytest.importorskip("llguidance")
    schemas: list[object] = [{"type": "array", **({"x-guidance": said} if said else {})}]
    schemas += [] if said else [{}, True]
    text = list(f"[{blanks}1{blanks}]".encode())
    for schema in schemas:
        source = module._source(Grammar("json_schema", json.dumps(schema)))
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0)
        assert (matcher.try_consume_tokens(text) == len(text)) == is_allowed


VALIDATE = "validate_grammar_with_warnings"


@pytest.fixture
def compiler_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let the process that tries a grammar out meet a compiler that does something else first."""

    def does(line: str) -> None:
        code = f"import time\n\n\nclass LLMatcher:\n    @staticmethod\n    def {VALIDATE}(text):\n"
        (tmp_path / "llguidance.py").write_text(f"{code}        {line}\n        return False, []\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(module, "_CPU_S", 0)  # what the kernel makes of it is the next whole second

    return does


def test_what_computes_too_long_is_refused(grammars: Grammars, compiler_that: Callable[[str], None]) -> None:
    compiler_that("while True: pass")
    with pytest.raises(UserError, match=r"must be compiled within 0 s of a processor, got 'slow': mend"):
        grammars.mask(Grammar("regex", "slow"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system limits addresses")
def test_what_takes_too_much_memory_is_refused(grammars: Grammars, compiler_that: Callable[[str], None]) -> None:
    compiler_that("bytearray(600 << 20)")
    with pytest.raises(UserError, match=r"can take, got 'large' \(it takes more than 512 MiB of memory\): mend"):
        grammars.mask(Grammar("regex", "large"))


def test_a_compiler_that_panics_is_told_of(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as pyo3 has it
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("llguidance.LLMatcher", panic)
    monkeypatch.setattr(module, "_source", lambda grammar: "start: /a/")
    with pytest.raises(UserError, match="index out of bounds"):
        grammars.mask(Grammar("regex", "panics"))


def test_without_the_package_or_a_tokenizer_a_line_says_so(
    tokenizer: Any, grammars: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wrong with the grammar, where the process that compiles it lacks the package either."""
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Grammars(None, VOCAB_SIZE, {END}).mask(Grammar("regex", "a"))
    (tmp_path / "llguidance.py").write_text("raise ModuleNotFoundError(\"No module named 'llguidance'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = r"package llguidance by .* lacks it \(No module named 'llg.*pip install"
    with pytest.raises(UserError, match=line) as error:
        grammars.mask(Grammar("regex", "[a-c]+ that compiles"))
    assert "`regex`" not in str(error.value) and "a-c" not in str(error.value)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'offload\[grammar\]'"):
        Grammars(tokenizer, VOCAB_SIZE, {END}).mask(Grammar("regex", "a"))


def test_it_is_imported_when_it_is_asked_for() -> None:
    """And the description needs nothing heavy at all."""
    code = "import sys, offload.sampling.grammar; print('torch' in sys.modules, 'llguidance' in sys.modules)"
    code += "; import offload.sampling.grammar_mask; print('llguidance' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.split() == ["False"] * 3


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: [tokenizer.encode(char, add_special_tokens=False)[0] for char in text]


def allowed(mask: GrammarMask, paths: Sequence[Sequence[int]]) -> list[set[int]]:
    scores_TV = mask.adjust(torch.zeros(len(paths), VOCAB_SIZE), paths)
    return [{*row_V.isfinite().nonzero()[:, 0].tolist()} for row_V in scores_TV]


EVERY = {*range(VOCAB_SIZE)}


def test_ends_are_allowed_just_where_the_grammar_may_end(grammars: Grammars, tokenizer: Any, ids: Any) -> None:
    mask, (ab,) = grammars.mask(Grammar("regex", "a+b?")), tokenizer.convert_tokens_to_ids(["ab"])
    (a, b) = ids("ab")
    assert allowed(mask, [(), (a,), (a, a), (a, b), (ab,)]) == [{a, ab}, {a, b, ab, END}, {a, b, ab, END}, {END}, {END}]
    # Rows that are not looked at stay.
    mask, (a, b) = grammars.mask(Grammar("regex", "ab")), ids("ab")
    assert allowed(mask, [(b,), (a, b, END), (a, a, b), (VOCAB_SIZE + 10**6,), (END, END)]) == [EVERY] * 5
    assert allowed(mask, [(a,)]) == [{b}], "what is behind must not stay with the matcher"
    # A text starts over.
    mask, (a, b) = grammars.mask(Grammar("regex", "ab")), ids("ab")
    mask.accept([a])
    assert allowed(mask, [()]) == [{b}]
    mask.begin([b, b])
    assert allowed(mask, [()])[0] >= {a} and b not in allowed(mask, [()])[0]


def test_what_was_asked_before_does_not_matter(grammars: Grammars, ids: Any) -> None:
    """Random paths in random order, some of them out of the grammar, committed bit by bit, against fresh matchers."""
    text, chance = ids('{"a":[1,2],"b":"a"}'), random.Random(1)
    grammar = Grammar("json_object")
    mask, committed = grammars.mask(grammar), 0
    while committed < len(text):
        paths = list[tuple[int, ...]]()
        for _ in range(12):
            path = text[committed : committed + chance.randrange(6)]
            if path and chance.random() < 0.5:
                path[chance.randrange(len(path))] = chance.randrange(VOCAB_SIZE)
            paths.append(tuple(path))
        fresh = [grammars.mask(grammar) for _ in paths]
        for fresh_mask in fresh:
            fresh_mask.accept(text[:committed])
        wanted = [allowed(mask, [path])[0] for mask, path in zip(fresh, paths, strict=True)]
        assert allowed(mask, paths) == wanted
        assert len({len(allowed_ids) for allowed_ids in wanted}) > 1, "all are alike"
        num_new = chance.randrange(1, 4)
        mask.accept(text[committed : committed + num_new])
        committed += num_new


def test_logits_are_never_changed_in_place_and_bad_ones_are_told_of(grammars: Grammars, ids: Any) -> None:
    mask = grammars.mask(Grammar("regex", "ab"))
    logits_TV = torch.zeros(3, VOCAB_SIZE, dtype=torch.bfloat16)
    logits_TV[1, 7], logits_TV[2, 9] = torch.nan, torch.inf
    before_TV = logits_TV.clone()
    scores_TV = mask.adjust(logits_TV, [(), (), ()])
    assert torch.equal(logits_TV.nan_to_num(), before_TV.nan_to_num()) and scores_TV.dtype == torch.float32
    assert scores_TV[0].max() == 0 and scores_TV[1].isnan().any() and scores_TV[2].max() == torch.inf


def test_texts_end_where_nothing_may_follow(grammars: Grammars, ids: Any, tokenizer: Any) -> None:
    # A grammar that leads nowhere ends in a line.
    mask, (a, b) = grammars.mask(Grammar("lark", 'start: "a" x\nx: "b" x')), ids("ab")
    mask.accept([a, b] * 1)
    sound = grammars.mask(Grammar("lark", 'start: "a" | "b" x\nx: x'))
    assert allowed(sound, [(a,), (b,)]) == [{END}, EVERY], "a dead end beside does no harm"
    assert allowed(sound, [(a,), ()])[0] == {END}
    sound.accept([b])
    with pytest.raises(UserError, match="cannot be followed any further"):
        sound.accept([a])
    # What came before it in one burst counts.
    sampler = Sampler(Sampling(), VOCAB_SIZE, adjustments=[sound])
    sampler.begin([])
    assert sampler.accept([b, a]) == 1
    sampler.cut([b])
    with pytest.raises(UserError, match="cannot be followed any further"):
        sampler.accept([a])
    # Without an end token a text is over where nothing may follow.
    mask, (a, b) = Grammars(tokenizer, VOCAB_SIZE, set()).mask(Grammar("regex", "ab*|ba")), ids("ab")
    sampler = Sampler(Sampling(), VOCAB_SIZE, adjustments=[mask])
    sampler.begin([])
    assert not mask.is_over and sampler.accept([a, b]) == 2 and not sampler.is_over, "more may follow"
    sampler.cut([])
    assert sampler.accept([b, a, a, a]) == 2 and sampler.is_over


def knowing_none(mask: GrammarMask) -> Tensor:
    """What becomes of a draft's row all of whose tokens are forbidden."""
    logits_TV = torch.zeros(1, VOCAB_SIZE)
    logits_TV[:, 10:] = -torch.inf  # special tokens and a few more are all that it has
    return mask.adjust(logits_TV, [()])


def test_a_draft_that_knows_nothing_of_what_is_allowed_takes_any_of_it(grammars: Grammars, ids: Any) -> None:
    row_TV, wanted = knowing_none(grammars.mask(Grammar("regex", "[xyz]"))), {*ids("xyz")}
    for drafting in ChildSampling:
        for temperature in (0.0, 1.0):
            sampler = Sampler(Sampling(temperature=temperature), VOCAB_SIZE, drafting)
            token_WK, _, probs_WV = draw_children(row_TV, 3, sampler, 5)
            drawn = {*token_WK[0].tolist()}
            if drafting is ChildSampling.WITH_REPLACEMENT or temperature == 0:
                assert drawn & wanted
            else:
                assert drawn == wanted
            if probs_WV is not None:
                assert probs_WV.isfinite().all()
                assert probs_WV[0, sorted(wanted)].sum() == pytest.approx(1)
