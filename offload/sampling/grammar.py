"""What a text must keep, as callers describe it: JSON, a JSON schema, a regular expression or Lark.

A description is checked as far as it can be without a vocabulary. `grammar_source` has it compiled
in a process of its own; `grammar_mask` compiles it for one vocabulary, and keeps texts within it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import UserError, reason, require

KINDS = ("json_schema", "json_object", "regex", "lark")
# the argument that gives a grammar of each kind
_ARGUMENT_OF = {"json_schema": "json_schema", "regex": "regex", "lark": "grammar"}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text may be. Raises `UserError` for a description that is none."""

    # one of `KINDS`
    kind: str
    # the schema, the expression or the rules; empty for any JSON object
    text: str = ""

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS,
            "a grammar must be of a known kind",
            repr(self.kind),
            f"one of {', '.join(KINDS)}",
        )
        text: Any = self.text
        require(isinstance(text, str), f"{self} must be text", f"{text!r:.80}", "give a str")
        if self.kind == "json_object":
            require(not text, f"{self} takes no text", f"{text!r:.80}", "leave it out")
            return
        require(
            bool(text.strip()),
            f"{self} must not be empty",
            repr(text[:80]),
            "leave it out for free text",
        )
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise UserError(
                f"{self} must be Unicode, got half a character at {error.start}: decode it anew"
            ) from None
        require(
            num_bytes <= _MOST_BYTES,
            f"{self} must be at most 1 MiB",
            f"{num_bytes} bytes",
            "ask for less",
        )
        if self.kind == "json_schema":
            _check_schema(text)

    def __str__(self) -> str:
        name = _ARGUMENT_OF.get(self.kind)
        return f"`{name}`" if name else f"a grammar of kind {self.kind}"


GRAMMARS = ("json_schema", "regex", "grammar")  # the arguments of `find_grammar`


def find_grammar(
    json_schema: Mapping[str, Any] | bool | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> Grammar | None:
    """Return the grammar that is given, if any. Raises `UserError` for several, or a bad one.

    A schema may be given as text or as it is.
    """
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    names = [f"`{name}`" for name, value in given.items() if value is not None]
    require(
        len(names) <= 1,
        "a text keeps one grammar at most",
        " and ".join(names),
        "leave the others out",
    )
    if json_schema is not None:
        return Grammar(
            "json_schema", json_schema if isinstance(json_schema, str) else _as_json(json_schema)
        )
    if regex is not None:
        return Grammar("regex", regex)
    return None if grammar is None else Grammar("lark", grammar)


def _as_json(schema: object) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"`json_schema` must be JSON, got {schema!r:.80} ({reason(error)}): mend it"
        ) from None


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"`json_schema` must be JSON, got {text!r:.80} ({reason(error)}): mend it"
        ) from None
    is_schema = isinstance(schema, dict | bool)
    require(
        is_schema, "`json_schema` must be an object", f"{text!r:.80}", 'such as {"type": "object"}'
    )
