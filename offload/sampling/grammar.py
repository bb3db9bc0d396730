"""Grammars that a text must match: JSON, a JSON schema, a regular expression or Lark rules.

A description is checked as far as it can be without a vocabulary: llguidance compiles it in a
process of its own, with limits, since callers are not trusted. Nothing here needs torch, so that
what cannot be compiled is refused before torch is imported. `grammar_mask` compiles it for one
vocabulary, and keeps texts within it. Invariant: no grammar is compiled in this process that has
not been compiled in another.
"""

import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from offload.errors import UserError, installing, reason, refusing, require
from offload.guarded_process import (
    MOST_CHARS,
    GuardedProcess,
    NotStarted,
    ProgramExceeded,
    ProgramFailed,
)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

KINDS = ("json_schema", "json_object", "regex", "lark")
# the argument that gives a grammar of each kind
_ARGUMENT_OF = {"json_schema": "json_schema", "regex": "regex", "lark": "grammar"}
_MOST_BYTES = 1 << 20

REMEDY = "mend it, or ask for less"
# Seconds of a processor that a compilation may take; most take milliseconds. Wall time would refuse
# a good grammar where the machine is busy.
_CPU_S = 10
_WAIT_S = 120.0  # wall time in seconds: the process may be stopped from outside
# most processes at a time, each of up to half a gigabyte; a server has many threads
_MOST_AT_ONCE = 2
_TIMES_QUOTED = 8  # messages about faults repeat the source, more than once
# Between two parts of JSON: at most one space. Otherwise a model with little to say would write
# blanks up to its last token, and each costs its share of a pass.
_BLANKS = "[ ]"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text may be. Raises `UserError` for an impossible description."""

    kind: str  # one of `KINDS`
    text: str = ""  # the schema, the expression or the rules; empty for any JSON object

    def __post_init__(self) -> None:
        requirement = "a grammar must be of a known kind"
        require(self.kind in KINDS, requirement, repr(self.kind), f"one of {', '.join(KINDS)}")
        text: Any = self.text
        require(isinstance(text, str), f"{self} must be text", f"{text!r:.80}", "give a str")
        if self.kind == "json_object":
            require(not text, f"{self} takes no text", f"{text!r:.80}", "leave it out")
            return
        requirement = f"{self} must not be empty"
        require(bool(text.strip()), requirement, repr(text[:80]), "leave it out for free text")
        try:
            num_bytes = self.num_bytes
        except UnicodeEncodeError as error:
            raise UserError(
                f"{self} must be Unicode, got half a character at {error.start}: decode it anew"
            ) from None
        requirement = f"{self} must be at most 1 MiB"
        require(num_bytes <= _MOST_BYTES, requirement, f"{num_bytes} bytes", "ask for less")
        if self.kind == "json_schema":
            with refusing(f"`json_schema` must be JSON, got {text!r:.80}", "mend it"):
                schema = json.loads(text)
            requirement = "`json_schema` must be an object"
            is_schema = isinstance(schema, dict | bool)
            require(is_schema, requirement, f"{text!r:.80}", 'such as {"type": "object"}')

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    def __str__(self) -> str:
        name = _ARGUMENT_OF.get(self.kind)
        return f"`{name}`" if name else f"a grammar of kind {self.kind}"


GRAMMARS = ("json_schema", "regex", "grammar")  # the arguments of `find_grammar`


def find_grammar(
    json_schema: Mapping[str, Any] | bool | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> Grammar | None:
    """Return the given grammar; a schema may be text or an object. Raises `UserError` for several."""
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    names = [f"`{name}`" for name, value in given.items() if value is not None]
    requirement = "a text keeps one grammar at most"
    require(len(names) <= 1, requirement, " and ".join(names), "leave the others out")
    if json_schema is not None:
        text: Any = json_schema
        if not isinstance(text, str):
            with refusing(f"`json_schema` must be JSON, got {text!r:.80}", "mend it"):
                text = json.dumps(text, allow_nan=False)
        return Grammar("json_schema", text)
    if regex is not None:
        return Grammar("regex", regex)
    return None if grammar is None else Grammar("lark", grammar)


_compiling = threading.Semaphore(_MOST_AT_ONCE)


@lru_cache(maxsize=16)
def tried_source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form, once another process compiled it. Raises `UserError`."""
    require_compiler()
    with refusing(f"{grammar} cannot be compiled, got {grammar.text!r:.80}", REMEDY):
        source = _source(grammar)
    with _compiling:
        _try_out(source, grammar)
    return source


def require_compiler() -> None:
    """Raise `UserError` if the package for grammars is not installed."""
    if find_spec("llguidance") is None:
        raise UserError(
            "grammars are kept by the package llguidance, which is missing: "
            f"{installing('offload[grammar]')}"
        )


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    make: dict[str, Callable[[str], str]] = {
        "json_schema": _json_source,
        "json_object": lambda _: _json_source('{"type": "object"}'),
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }
    return make[grammar.kind](grammar.text)


def _json_source(schema: str) -> str:
    """Return a JSON schema as llguidance takes it; blanks are bounded unless it speaks of them."""
    from llguidance import LLMatcher

    read = json.loads(schema)
    # Settings lie upon an object: of the two other schemas `true` is an empty one, `false` is none.
    text = "{}" if read is True else schema
    settings = read.get("x-guidance") if isinstance(read, dict) else None
    says_so = isinstance(settings, dict) and any(
        name.startswith("whitespace_") for name in settings
    )
    defaults: JsonCompileOptions | None = None
    if not says_so and read is not False:
        defaults = {"whitespace_pattern": _BLANKS}
    source: str = LLMatcher.grammar_from_json_schema(text, defaults=defaults)
    return source


def _try_out(source: str, grammar: Grammar) -> None:
    """Compile in another process. Raises `UserError` if that fails or takes too long."""
    got = f"got {grammar.text!r:.80}"
    process = GuardedProcess("compile", cpu_s=_CPU_S, wait_s=_WAIT_S)
    try:
        error = process.ask({"source": source}, MOST_CHARS + _TIMES_QUOTED * len(source))
    except NotStarted as failure:
        raise UserError(
            f"grammars are compiled with the package llguidance by {sys.executable}, which lacks it "
            f"({str(failure).partition(': ')[2]:.80}): {installing('offload[grammar]')}"
        ) from None
    except ProgramExceeded as exceeded:
        reasons = {
            "processor": f"must be compiled within {_CPU_S} s of a processor, {got}: {REMEDY}",
            "time": f"must be compiled within {_WAIT_S:g} s, {got}, by a process that was not given "
            "enough time: try again where the machine is less busy",
        }
        usual = f"is more than its compiler can take, {got} ({exceeded!s:.80}): {REMEDY}"
        raise UserError(f"{grammar} {reasons.get(exceeded.limit, usual)}") from None
    except ProgramFailed as failure:
        error = str(failure)
    finally:
        process.end()
    require_sound(error, grammar)


def require_sound(error: str | None, grammar: Grammar) -> None:
    """Raise `UserError` with the compiler's message, if there is one."""
    if error:
        why = reason(ValueError(_gist(error)))
        raise UserError(f"{grammar} cannot be compiled, got {grammar.text!r:.80} ({why}): {REMEDY}")


def _gist(error: str) -> str:
    """Return the fault, from a message that also draws its place."""
    if match := re.search(r"^error: (.+)", error, re.MULTILINE):
        return match[1]
    if "coerce_one_of" in error:
        return "oneOf is kept where constants tell its alternatives apart, take anyOf elsewhere"
    first = error.partition("\n")[0]
    return re.sub(r'^at \S+ invalid regex ".*" \(in regex\): ', "", first)
