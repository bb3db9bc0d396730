"""Bodies of requests as OpenAI's protocol has them, checked field by field.

A field that is not known is refused by name, as OpenAI does. What is known and without meaning here, or without harm
if it is left out, is accepted, and its name is given back in a header.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from offload.config import Sampling
from offload.declaration import options_at
from offload.sampling.grammar import Grammar, find_grammar
from offload.server.refusal import Refusal

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_SAID = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}  # of a message, to a template
_UNSAID = {"refusal", "annotations", "audio", "function_call"}  # that clients send back empty
_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "json-or-python"}  # in the path of an error within a union

Role = Literal["system", "developer", "user", "assistant", "tool"]
Count = Annotated[int, Field(ge=0, le=1 << 31)]
Stop = Annotated[str, Field(max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=16)]  # each is looked for in every pass


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = _STRICT
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # against who counts bytes on the wire; there is none


class Extension(BaseModel):
    """What OpenAI's protocol has no word for."""

    model_config = _STRICT
    passes: bool = False  # what every pass did, with each chunk
    tree: str | None = None
    rule: str | None = None


def _fields() -> dict[str, Any]:
    """Options of drawing that a request may have, each a field that is left out where it is not given."""
    found: dict[str, Any] = {}
    for name, one in options_at("http", Sampling).items():
        low, high = one.http_within or (None, None)
        kind: Any = Annotated[one.kind if one.is_number else float, Field(ge=low, le=high)]
        found[name] = (kind | None if one.is_number else dict[str, kind] | None, None)
    return found


Drawing = create_model("Drawing", __config__=_STRICT, **_fields())


class Body(Drawing):  # type: ignore[misc, valid-type]
    """What requests for chat and for text have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Stops | None = None
    offload: Extension | None = None
    # Without meaning here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def extension(self) -> Extension:
        return self.offload or Extension()

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_texts(self) -> int:
        """Choices of all prompts."""
        return self.num_choices

    @property
    def ignored(self) -> list[str]:
        """Fields that were given and change nothing."""
        return sorted(name for name in self.model_fields_set & _WITHOUT_MEANING if getattr(self, name) is not None)


class Function(BaseModel):
    """A function that a model may call."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(BaseModel):
    """A tool: functions are the only kind."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"]
    function: Function


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    # Without meaning here.
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None

    @property
    def told(self) -> list[dict[str, Any]]:
        """Messages as chat templates take them. Raises `Refusal`."""
        return [_told(index, message) for index, message in enumerate(self.messages)]

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must keep. Raises `Refusal` for a format that is none, `UserError` for a schema that is."""
        wished = self.response_format or {"type": "text"}
        if wished == {"type": "text"}:
            return None
        if wished == {"type": "json_object"}:
            return Grammar("json_object")
        described = wished.get("json_schema")
        if wished.get("type") != "json_schema" or not isinstance(described, dict) or "schema" not in described:
            rule = "it must be text, json_object, or json_schema with a 'schema'"
            raise Refusal(400, f"Invalid value for 'response_format': {rule}", param="response_format")
        return find_grammar(json_schema=described["schema"])

    @property
    def tools_told(self) -> list[dict[str, Any]]:
        """Functions as chat templates take them; none where the model is to call none. Raises `Refusal`."""
        if self.tool_choice not in (None, "auto", "none"):
            message = "Invalid value for 'tool_choice': this server knows 'auto' and 'none' alone"
            raise Refusal(400, message, param="tool_choice")
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def num_texts(self) -> int:
        """Choices of all prompts."""
        return self.num_choices * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each to be gone on with. Raises `Refusal` for what is known and not to be had."""
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise Refusal(400, f"'{name}' is not supported by this server: leave it out", param=name)
        if self.best_of not in (None, self.num_choices):
            raise Refusal(400, "'best_of' must be equal to 'n' on this server: leave it out", param="best_of")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refusal(400, "Invalid value for 'prompt': it is empty", param="prompt")
        are_ids = isinstance(self.prompt[0], int)
        return [self.prompt] if are_ids else list(self.prompt)  # type: ignore[list-item, arg-type]


_WITHOUT_MEANING = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "reasoning_effort", "verbosity", "prediction",
}  # fmt: skip

AnyBody = TypeVar("AnyBody", bound=BaseModel)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """A body as it came over the wire. Raises `Refusal` for what is no JSON in UTF-8, and for fields that are wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise _refusal(min(found, key=lambda one: one["type"] != "extra_forbidden")) from None


def _refusal(error: Mapping[str, Any]) -> Refusal:
    steps = [step for step in error["loc"] if isinstance(step, int) or not _is_type(step)]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:][:80] or None
    if error["type"] == "json_invalid":
        return Refusal(400, f"The body must be JSON in UTF-8: {error['msg'].removeprefix('Invalid JSON: ')}")
    if error["type"] == "extra_forbidden":
        return Refusal(400, f"Unrecognized request argument supplied: {path}", param=path)
    if error["type"] == "missing":
        return Refusal(400, f"Missing required parameter: '{path}'", param=path, code="missing_required_parameter")
    return Refusal(
        400,
        f"Invalid value for {(path and repr(path)) or 'the body'}: {error['msg']}",
        param=path,
        code="invalid_value",
    )


def _is_type(step: str) -> bool:
    return step in _TYPE_NAMES or "[" in step


def _told(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    known = Role.__args__  # type: ignore[attr-defined]
    if message.get("role") not in known:
        raise Refusal(400, f"Invalid value for '{where}.role': it must be one of {', '.join(known)}", param=where)
    for name in sorted(message.keys() - _SAID):
        if name not in _UNSAID or message[name]:
            argument = f"{where}.{name:.80}"
            raise Refusal(400, f"Unrecognized request argument supplied: {argument}", param=argument)
    told = {name: value for name, value in message.items() if name in _SAID and value is not None}
    role = "system" if message["role"] == "developer" else message["role"]
    calls = {"tool_calls": _calls_told(told["tool_calls"], where)} if "tool_calls" in told else {}
    return {**told, "role": role, **calls}


def _calls_told(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer, with arguments as templates take them: an object and not its JSON."""
    from json import loads

    try:
        return [
            {**call, "function": {**call["function"], "arguments": loads(call["function"]["arguments"])}}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError, RecursionError):
        message = f"Invalid value for '{where}.tool_calls': each must have a function with arguments in JSON"
        raise Refusal(400, message, param=f"{where}.tool_calls") from None
