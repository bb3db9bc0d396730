"""Bodies of requests, field by field, and the engine's requests made of them.

An unknown field is refused by name. A known field that has no meaning here, or can be left out
without harm, is accepted, and its name is returned in a header.
"""

import json
import secrets
import sys
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from offload.declaration import options_at
from offload.engine.request import Request
from offload.errors import did_you_mean, plain_requirement
from offload.sampling_options import Sampling
from offload.server.core.refusals import DEFAULT_REMEDY, Refusal
from offload.server.core.tools import NO_TOOLS, Toolbox

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_LARGEST_SEED = 2**63 - 1
# in the path of an error within a union
_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "json-or-python"}

Count = Annotated[int, Field(ge=0, le=1 << 31)]
Ignored = Annotated[Any, Field(exclude=True)]  # it has no meaning here
Stop = Annotated[str, Field(max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=16)]  # each is looked for in every pass
Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]


def _as_list(stop: Any) -> Any:
    """Return one stop string as a list, so that an error concerns the form that was sent."""
    return ([stop] if stop else None) if isinstance(stop, str) else stop


AnyStops = Annotated[
    Stops | None, BeforeValidator(_as_list, json_schema_input_type=Stop | Stops | None)
]


def _respelt(other: Mapping[Any, Any], value: Any) -> Any:
    """Return the value that other servers mean by a number."""
    is_number = type(value) in (int, float)
    return other.get(value, value) if is_number else value


# what other servers take for "off", or for the least there is
_SPELT_OTHERWISE: dict[str, dict[float, float]] = {"top_k": {-1: 0}, "top_p": {0: 1e-12}}


def _fields() -> dict[str, Any]:
    """Return the sampling options of a request, each a field that may be left out."""
    fields: dict[str, Any] = {}
    for name, option in options_at("http", Sampling).items():
        low, high = option.http_within or (None, None)
        kind: Any = Annotated[option.kind if option.is_number else float, Field(ge=low, le=high)]
        value: Any = kind | None if option.is_number else dict[str, kind] | None
        if name in _SPELT_OTHERWISE:
            value = Annotated[value, BeforeValidator(partial(_respelt, _SPELT_OTHERWISE[name]))]
        names = AliasChoices(name, *option.synonyms) if option.synonyms else None
        fields[name] = (value, Field(default=None, validation_alias=names))
    return fields


Drawing = create_model("Drawing", __config__=STRICT, **_fields())


class Body(Drawing):  # type: ignore[misc, valid-type]
    """Fields of a request in any protocol, and the interface for the core."""

    prompt_field: ClassVar[str]  # what has no room names it
    tags: ClassVar[Set[str]] = frozenset()  # kinds of parts, which are no fields in a path
    renamed: ClassVar[Mapping[str, str]] = {}  # fields of older clients, with today's names

    model: str | None = None
    stream: bool | None = None

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def schema_field(self) -> str:
        """Return the field whose schema an answer must keep."""
        return "tools"

    @property
    def ignored(self) -> list[str]:
        """Names of given fields that change nothing."""
        known = type(self).model_fields
        given = (name for name in self.model_fields_set if known[name].exclude)
        return sorted(name for name in given if getattr(self, name) is not None)

    def template_variables(self) -> dict[str, tuple[str, Any]]:
        """Return variables that fields set in a template, each with its field and its value."""
        return {}

    def ignored_by(self, source: str) -> list[str]:
        """Return the ignored fields, including those that a template of this source does not use."""
        stated = self.template_variables().items()
        return sorted(
            {*self.ignored, *(field for name, (field, _) in stated if name not in source)}
        )

    @property
    def wants_thoughts(self) -> bool | None:
        """Return True if the model is to think, if its template has a switch; None leaves it."""
        return None

    def toolbox(self) -> Toolbox:
        """Return the functions that the model may call. Raises `Refusal`."""
        return NO_TOOLS

    def requests(self, usual: Sampling) -> list[Request]:
        """Return the requests, one for each prompt; `usual` holds the defaults.

        Raises `Refusal` and `UserError`.
        """
        raise NotImplementedError

    def _request(self, usual: Sampling, num_new: int | None, **fields: Any) -> Request:
        """Return a request with the fields of all bodies; without a limit a text has all the room."""
        return Request(
            sampling=self._sampling(usual),
            max_new_tokens=sys.maxsize if num_new is None else num_new,
            **{"is_clipped": num_new is None, **fields},
        )

    def _sampling(self, usual: Sampling) -> Sampling:
        """Return the usual sampling with the body's own settings. Raises `Refusal`."""
        given: dict[str, Any] = {}
        for name, option in options_at("http", Sampling).items():
            value = getattr(self, name)
            if value not in (None, {}):
                given[option.name] = value
        if biases := given.get("logit_bias"):
            try:
                given["logit_bias"] = [(int(token), number) for token, number in biases.items()]
            except ValueError:
                requirement = "its keys must be ids of tokens"
                raise Refusal.of_value("logit_bias", requirement, "give numbers") from None
        seed = secrets.randbelow(_LARGEST_SEED) if self.seed is None else self.seed & _LARGEST_SEED
        return replace(usual, **{**given, "seed": seed})


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Return a body that came over the wire. Raises `Refusal` for bad JSON and wrong fields."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise _refusal(min(errors, key=_rank), kind) from None


def _rank(error: Mapping[str, Any]) -> int:
    """Return the place of an error: of a thing of another kind, its kind is what is wrong."""
    if error["type"] == "literal_error" and error["loc"][-1:] == ("type",):
        return 0
    return 1 if error["type"] == "extra_forbidden" else 2


def _refusal(error: Mapping[str, Any], kind: type[Body]) -> Refusal:
    """Return the refusal for one of pydantic's errors, naming the field as clients write it."""
    known = kind.model_fields
    path = ""
    is_stranger = error["type"] == "extra_forbidden"
    before: Any = None
    for step in error["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not (isinstance(before, int) and step in kind.tags) and (
            is_stranger or (step not in _TYPE_NAMES and "[" not in step)
        ):
            path += f".{step}"
        before = step
    param = path[1:][:80] or None
    complaint = error["msg"]
    match error["type"]:
        case "json_invalid":
            complaint = complaint.removeprefix("Invalid JSON: ")
            return Refusal(400, f"The body must be JSON in UTF-8 ({complaint}): mend it")
        case "extra_forbidden":
            meant = did_you_mean(str(param), known) if len(error["loc"]) == 1 else ""
            if param in kind.renamed:
                meant = f": give '{kind.renamed[str(param)]}' instead"
            return Refusal.unknown_field(str(param), meant)
        case "missing":
            message = f"Missing required parameter: '{param}': give it"
            return Refusal(400, message, param=param, code="missing_required_parameter")
        case "union_tag_invalid" | "union_tag_not_found":
            # pydantic ends its words with the kinds that there are
            kinds = (
                complaint.rpartition("expected tags: ")[2] if "expected tags: " in complaint else ""
            )
            complaint = f"it must have a type that is read here{kinds and f', {kinds}'}"
    complaint = f"it {plain_requirement(complaint)}" if plain_requirement(complaint) else complaint
    value = error["input"]
    if isinstance(value, dict) and "union_tag" in error["type"]:
        value = value.get("type", value)
    got = "" if isinstance(value, list | dict) else f", got {json.dumps(value):.80}"
    field = known.get(error["loc"][0]) if path else None
    is_needed = not path or (field is not None and field.is_required())
    remedy = "mend it" if is_needed else DEFAULT_REMEDY
    message = (
        f"Invalid value for {(param and repr(param)) or 'the body'}: {complaint}{got}: {remedy}"
    )
    return Refusal(400, message, param=param, code="invalid_value")
