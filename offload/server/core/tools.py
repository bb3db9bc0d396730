"""Functions that a model may call, in the form of chat templates, and the grammar of calls.

Invariant: a call that is forced keeps the schema of its function, by a grammar.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from offload.sampling.grammar import Grammar, find_grammar
from offload.server.core.refusals import Refusal
from offload.words.parts import Offered, schemas_of

# most calls of an answer under a grammar: a model that finds no end is stopped there
_MOST_CALLS = 16


class Function(BaseModel):
    """A function that a model may call."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """Return the function as chat templates take tools."""
        return {"type": "function", "function": self.model_dump(exclude_none=True)}


@dataclass(frozen=True)
class Toolbox:
    """The tools of one request.

    Attributes:
        described: tools for the chat template.
        names: functions of these that it may call.
        is_forced: it must call one.
        is_parallel: it may call several in one answer.
    """

    described: Sequence[Mapping[str, Any]] = ()
    names: Set[str] = frozenset()
    is_forced: bool = False
    is_parallel: bool = True

    @property
    def offered(self) -> Offered:
        schemas = schemas_of(self.described)
        return {name: schemas[name] for name in schemas if name in self.names}

    def grammar(self) -> Grammar | None:
        """Return the grammar that a forced call must keep, or None. Raises `Refusal`."""
        if not self.is_forced:
            return None
        return find_grammar(json_schema=_schema_of_calls(self.offered, self.is_parallel))


NO_TOOLS = Toolbox()


def choose_tools(
    functions: Sequence[Function],
    *,
    allowed: Sequence[str] | None = None,
    is_forced: bool = False,
    is_parallel: bool = True,
) -> Toolbox:
    """Return the tools of a request; the template gets the allowed ones, None for all.

    Raises `Refusal` for unknown names, and for a forced call without any tool.
    """
    names = [function.name for function in functions]
    for name in allowed or ():
        if name not in names:
            requirement = f"it allows {name:.80}, which is no function of 'tools'"
            raise Refusal.of_value("tool_choice", requirement)
    wished = frozenset(names if allowed is None else allowed)
    if not wished and (is_forced or allowed is not None):
        raise no_choice(functions)
    described = [function.as_tool() for function in functions if function.name in wished]
    return Toolbox(described, wished, is_forced, is_parallel)


def force_tool(functions: Sequence[Function], name: str) -> Toolbox:
    """Return the tools of a request that must call this one. Raises `Refusal`."""
    if name not in [function.name for function in functions]:
        raise no_choice(functions)
    described = [function.as_tool() for function in functions]
    return Toolbox(described, frozenset([name]), is_forced=True, is_parallel=False)


def no_choice(functions: Sequence[Function]) -> Refusal:
    """Return the refusal of an impossible choice."""
    requirement = "it must be 'auto', 'none', 'required', 'allowed_tools' or a function of 'tools'"
    requirement += "" if functions else ", and there are no 'tools'"
    return Refusal.of_value("tool_choice", requirement)


def _schema_of_calls(functions: Offered, is_parallel: bool) -> dict[str, Any]:
    """Return the schema of JSON that calls these; what `$ref`s mean is at its root.

    Raises `Refusal` where two functions mean different things by one name.
    """
    shared = dict[str, Any]()
    calls = []
    for function, schema in functions.items():
        parameters = dict(schema or {"type": "object"})
        for place in ("$defs", "definitions"):
            named = parameters.pop(place, None) or {}
            if not isinstance(named, dict):
                requirement = f"'{place}' of the function {function:.80} must be an object"
                raise Refusal.of_value("tools", requirement)
            for name, definition in named.items():
                if shared.setdefault(place, {}).setdefault(name, definition) != definition:
                    requirement = f"'{place}' of two functions differ in {name:.80}"
                    raise Refusal.of_value("tools", requirement, "rename one")
        fields = {"name": {"const": function}, "arguments": parameters}
        call = {"type": "object", "properties": fields, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    if not is_parallel:
        return {"anyOf": calls, **shared}
    bounds = {"minItems": 1, "maxItems": _MOST_CALLS}
    return {"type": "array", "items": {"anyOf": calls}, **bounds, **shared}
