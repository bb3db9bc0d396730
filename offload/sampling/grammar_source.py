"""What llguidance makes of a grammar, before there is a vocabulary: compiled in a process with limits.

A grammar comes from callers that are not trusted. Nothing here needs torch, so that a grammar that
cannot be compiled is refused before torch is imported. Invariant: no grammar is compiled in this
process that has not been compiled in another.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UserError, installing, reason, refusing
from offload.sampling.grammar import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

REMEDY = "mend it, or ask for less"
# Seconds of a processor that a compilation may take; most take milliseconds. Wall time would refuse
# a good grammar where the machine is busy.
_CPU_S = 10
# Wall time: the process may be stopped from outside.
_WAIT_S = 120.0
# Between two parts of JSON: one space at most. A model that has little to say would else write blanks
# until its last token, and every one of them costs its share of a pass.
_BLANKS = "[ ]"


@lru_cache(maxsize=16)
def tried_source(grammar: Grammar) -> str:
    """Return a grammar as llguidance takes it, once it was compiled elsewhere. Raises `UserError`."""
    require_compiler()
    with refusing(f"{grammar} cannot be compiled, got {grammar.text!r:.80}", REMEDY):
        source = _source(grammar)
    _try_out(source, grammar)
    return source


def require_compiler() -> None:
    """Raise `UserError` where the package that keeps grammars is missing."""
    if find_spec("llguidance") is None:
        raise UserError(
            "grammars are kept by the package llguidance, which is missing: "
            f"{installing('offload[grammar]')}"
        )


def _source(grammar: Grammar) -> str:
    """Return the grammar as llguidance takes it."""
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
    own = read.get("x-guidance") if isinstance(read, dict) else None
    says_so = isinstance(own, dict) and any(name.startswith("whitespace_") for name in own)
    defaults: JsonCompileOptions | None = None
    if not says_so and read is not False:
        defaults = {"whitespace_pattern": _BLANKS}
    source: str = LLMatcher.grammar_from_json_schema(text, defaults=defaults)
    return source


def _try_out(source: str, grammar: Grammar) -> None:
    """Compile in a process of its own.

    Raises `UserError` for what cannot be compiled, takes too long, or ends that process.
    """
    script = Path(__file__).with_name("grammar_trial.py")
    got = f"got {grammar.text!r:.80}"
    try:
        told = subprocess.run(
            [sys.executable, "-P", script, str(_CPU_S)],
            input=source.encode(),
            capture_output=True,
            timeout=_WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{grammar} must be compiled within {_WAIT_S:g} s, {got}, by a process that was not given "
            "enough time: try again where the machine is less busy"
        ) from None
    if sys.platform != "win32" and told.returncode == -signal.SIGXCPU:
        raise UserError(
            f"{grammar} must be compiled within {_CPU_S} s of a processor, {got}: {REMEDY}"
        )
    if told.returncode:
        lines = told.stderr.decode(errors="replace").strip().splitlines() or [
            f"status {told.returncode}"
        ]
        raise UserError(
            f"{grammar} is more than its compiler can take, {got} ({lines[-1]:.80}): {REMEDY}"
        )
    answer = json.loads(told.stdout)
    if isinstance(answer, dict):
        raise UserError(
            f"grammars are compiled with the package llguidance by {sys.executable}, which lacks it "
            f"({answer['failure']:.80}): {installing('offload[grammar]')}"
        )
    require_sound(answer, grammar)


def require_sound(error: str | None, grammar: Grammar) -> None:
    """Raise `UserError` with what the compiler says, if it says anything."""
    if error:
        why = reason(ValueError(_gist(error)))
        raise UserError(f"{grammar} cannot be compiled, got {grammar.text!r:.80} ({why}): {REMEDY}")


def _gist(error: str) -> str:
    """Return what is wrong, of a message that also draws where."""
    if found := re.search(r"^error: (.+)", error, re.MULTILINE):
        return found[1]
    first = error.partition("\n")[0]
    return re.sub(r'^at \S+ invalid regex ".*" \(in regex\): ', "", first)
