"""Bodies of requests in OpenAI's protocol, and what they ask of an engine.

A body is checked field by field. A field that is not known is refused by name, as OpenAI does. What
is known and without meaning here, or without harm if it is left out, is accepted, and its name is
given back in a header.
"""

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from offload.declaration import options_at
from offload.engine.conversation import check_variables
from offload.engine.request import Request
from offload.errors import did_you_mean, plain_rule
from offload.sampling.grammar import Grammar, find_grammar
from offload.sampling_options import Sampling
from offload.server.refusals import MEND, Refusal

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# of a message, to a template
_SAID = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
_RENAMED = {"functions": "tools", "function_call": "tool_choice"}
_CARRYING = {"audio", "function_call", "images"}  # fields of words that are not read
_LARGEST_SEED = 2**63 - 1
_LEGACY_TOKENS = 16  # of /v1/completions, where a body does not say
# in the path of an error within a union
_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "json-or-python"}

Role = Literal["system", "developer", "user", "assistant", "tool"]
Count = Annotated[int, Field(ge=0, le=1 << 31)]
Ignored = Annotated[Any, Field(exclude=True)]  # it has no meaning here
Stop = Annotated[str, Field(max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=16)]  # each is looked for in every pass


def _respelt(other: Mapping[Any, Any], value: Any) -> Any:
    """Return what other servers mean by a number."""
    is_number = type(value) in (int, float)
    return other.get(value, value) if is_number else value


def _as_list(stop: Any) -> Any:
    """Return one stop string as a list of it: an error of either form says what is wrong with it."""
    return ([stop] if stop else None) if isinstance(stop, str) else stop


AnyStops = Annotated[
    Stops | None, BeforeValidator(_as_list, json_schema_input_type=Stop | Stops | None)
]


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


# what other servers take for "off", or for the least there is
_SPELT_OTHERWISE: dict[str, dict[float, float]] = {"top_k": {-1: 0}, "top_p": {0: 1e-12}}


def _fields() -> dict[str, Any]:
    """Return the options of drawing that a request may have, each a field that may be left out."""
    found: dict[str, Any] = {}
    for name, one in options_at("http", Sampling).items():
        low, high = one.http_within or (None, None)
        kind: Any = Annotated[one.kind if one.is_number else float, Field(ge=low, le=high)]
        value: Any = kind | None if one.is_number else dict[str, kind] | None
        if name in _SPELT_OTHERWISE:
            value = Annotated[value, BeforeValidator(partial(_respelt, _SPELT_OTHERWISE[name]))]
        names = AliasChoices(name, *one.synonyms) if one.synonyms else None
        found[name] = (value, Field(default=None, validation_alias=names))
    return found


Drawing = create_model("Drawing", __config__=_STRICT, **_fields())


class Body(Drawing):  # type: ignore[misc, valid-type]
    """What requests for chat and for text have in common."""

    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: AnyStops = None
    offload: Extension | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def tells_passes(self) -> bool:
        return self.offload is not None and self.offload.passes

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def schema_field(self) -> str:
        """Return the field whose schema an answer must keep."""
        return "response_format"

    @property
    def ignored(self) -> list[str]:
        """Fields that were given and change nothing."""
        known = type(self).model_fields
        given = (name for name in self.model_fields_set if known[name].exclude)
        return sorted(name for name in given if getattr(self, name) is not None)

    @property
    def is_call_forced(self) -> bool:
        """Return whether the answer must be a call, which a grammar keeps."""
        return False

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Functions as chat templates take them."""
        return []

    def requests(self, usual: Sampling) -> list[Request]:
        """Return what is asked for, a request for each prompt; `usual` holds where nothing is said.

        Raises `Refusal` and `UserError`.
        """
        raise NotImplementedError

    def _request(self, usual: Sampling, num_new: int | None, **own: Any) -> Request:
        """Return a request with what all bodies say; without a limit a text has all the room."""
        extension = self.offload or Extension()
        return Request(
            sampling=self._sampling(usual),
            max_new_tokens=sys.maxsize if num_new is None else num_new,
            is_clipped=num_new is None,
            stop=self.stop or None,
            tree=extension.tree,
            rule=extension.rule,
            **own,
        )

    def _sampling(self, usual: Sampling) -> Sampling:
        given: dict[str, Any] = {}
        for name, one in options_at("http", Sampling).items():
            value = getattr(self, name)
            if value not in (None, {}):
                given[one.name] = value
        if biases := given.get("logit_bias"):
            try:
                given["logit_bias"] = [(int(token), number) for token, number in biases.items()]
            except ValueError:
                rule = "its keys must be ids of tokens"
                raise Refusal.of_value("logit_bias", rule, "give numbers") from None
        seed = secrets.randbelow(_LARGEST_SEED) if self.seed is None else self.seed & _LARGEST_SEED
        return replace(usual, **{**given, "seed": seed})


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
    """A request to /v1/chat/completions."""

    prompt_field = "messages"

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    parallel_tool_calls: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None

    def requests(self, usual: Sampling) -> list[Request]:
        """Return the one request. Raises `Refusal` and `UserError`."""
        num_new = self.max_tokens
        if self.max_completion_tokens is not None:
            num_new = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            message = "'top_logprobs' goes with 'logprobs': set that to true"
            raise Refusal(400, message, param="top_logprobs")
        conversation = [_message(index, one)[0] for index, one in enumerate(self.messages)]
        variables = dict(self.chat_template_kwargs or {})
        check_variables(variables, "chat_template_kwargs")
        # under the name that clients know; templates have others
        think = variables.pop("enable_thinking", None)
        if isinstance(self.reasoning_effort, str):
            # a template that does not know it passes over it
            variables = {"reasoning_effort": self.reasoning_effort, **variables}
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is not None and self.add_generation_prompt == continues:
            message = "'add_generation_prompt' must be false with 'continue_final_message', or true"
            raise Refusal(400, f"{message}: leave it out", param="add_generation_prompt")
        if continues and conversation[-1]["role"] != "assistant":
            rule = "the last of 'messages' must be the assistant's to go on with"
            raise Refusal.of_value("continue_final_message", rule, "leave it out")
        return [
            self._request(
                usual,
                num_new,
                prompt=conversation,
                tools=self.offered_tools,
                template_variables=variables,
                think=think,
                continues_message=continues,
                grammar=self._read_grammar(),
                num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )
        ]

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Functions as chat templates take them; none where the model is to call none."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self._allowed_tools]

    @property
    def _allowed_tools(self) -> list[ToolBody]:
        """Return the tools, or those that `tool_choice` narrows them to. Raises `Refusal`."""
        tools = self.tools or []
        match self.tool_choice:
            case {"type": "allowed_tools", "allowed_tools": {"tools": [*named]}}:
                names = [_name_of(one) for one in named]
                known = {tool.function.name for tool in tools}
                if unknown := next((name for name in names if name not in known), None):
                    rule = f"it allows {unknown!s:.80}, which is no function of 'tools'"
                    raise Refusal.of_value("tool_choice", rule)
                return [tool for tool in tools if tool.function.name in names]
        return tools

    @property
    def ignored(self) -> list[str]:
        """Fields that change nothing, those of messages included."""
        told = (_message(index, one)[1] for index, one in enumerate(self.messages))
        return sorted({*super().ignored, *(name for names in told for name in names)})

    @property
    def is_call_forced(self) -> bool:
        """Return whether the answer must be a call, see `Body`."""
        return bool(self._find_forced_tools())

    @property
    def schema_field(self) -> str:
        """Return where schemas of an answer come from: of a tool that is forced, before others."""
        return "tools" if self._find_forced_tools() else "response_format"

    def _read_grammar(self) -> Grammar | None:
        """Return what the answer must keep.

        Raises `Refusal` for no format, `UserError` for no schema.
        """
        if forced := self._find_forced_tools():
            return find_grammar(json_schema=_schema_of_calls(forced))
        wished = self.response_format or {"type": "text"}
        if wished.get("type") == "text":
            return None
        if wished == {"type": "json_object"}:
            return Grammar("json_object")
        match wished:
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                return find_grammar(json_schema=schema)
        rule = "it must be text, json_object, or json_schema with a 'schema'"
        raise Refusal.of_value("response_format", rule)

    def _find_forced_tools(self) -> list[Function]:
        """Return functions of which the answer must call one; none where it need not.

        Raises `Refusal`.
        """
        tools = [tool.function for tool in self._allowed_tools]
        match self.tool_choice:
            case None | "auto" | "none":
                return []
            case {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}:
                return []
            case "required" | {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}:
                forced = tools
            case {"type": "function", "function": {"name": str(name)}}:
                forced = [one for one in tools if one.name == name]
            case _:
                forced = []
        if not forced:
            rule = "it must be 'auto', 'none', 'required', 'allowed_tools' or a function of 'tools'"
            rule += "" if tools else ", and there are no 'tools'"
            raise Refusal.of_value("tool_choice", rule)
        return forced


def _name_of(tool: Any) -> Any:
    """Return the function that an entry of `allowed_tools` names."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise Refusal.of_value("tool_choice", "each tool that it allows must be a function with a name")


def _schema_of_calls(functions: Sequence[Function]) -> dict[str, Any]:
    """Return the schema of a JSON object that calls one of these; what `$ref`s mean is at its root.

    Raises `Refusal` where two functions mean different things by one name.
    """
    shared = dict[str, Any]()
    calls = []
    for one in functions:
        parameters = dict(one.parameters or {"type": "object"})
        for place in ("$defs", "definitions"):
            named = parameters.pop(place, None) or {}
            if not isinstance(named, dict):
                rule = f"'{place}' of the function {one.name:.80} must be an object"
                raise Refusal.of_value("tools", rule)
            for name, schema in named.items():
                if shared.setdefault(place, {}).setdefault(name, schema) != schema:
                    rule = f"'{place}' of two functions differ in {name:.80}"
                    raise Refusal.of_value("tools", rule, "rename one")
        fields = {"name": {"const": one.name}, "arguments": parameters}
        call = {"type": "object", "properties": fields, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    return {"anyOf": calls, **shared}


class CompletionBody(Body):
    """A request to /v1/completions."""

    prompt_field = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def num_prompts(self) -> int:
        return 1 if self._is_one else len(self.prompt)

    @property
    def _is_one(self) -> bool:
        return isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)

    def requests(self, usual: Sampling) -> list[Request]:
        """Return a request for each prompt. Raises `Refusal` and `UserError`."""
        for name in ("echo", "suffix"):
            if getattr(self, name):
                message = f"'{name}' is not supported by this server: leave it out"
                raise Refusal(400, message, param=name)
        if self.best_of not in (None, self.num_choices):
            message = "'best_of' must be equal to 'n' on this server: leave it out"
            raise Refusal(400, message, param="best_of")
        if self.prompt == []:
            raise Refusal.of_value("prompt", "it is empty", "give some text")
        num_new = _LEGACY_TOKENS if self.max_tokens is None else self.max_tokens
        common = self._request(usual, num_new, raw=True, num_logprobs=self.logprobs)
        prompts: Sequence[Any] = [self.prompt] if self._is_one else self.prompt
        return [replace(common, prompt=prompt) for prompt in prompts]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Return a body that came over the wire. Raises `Refusal` for bad JSON and wrong fields."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        first = min(found, key=lambda one: one["type"] != "extra_forbidden")
        raise _refusal(first, kind) from None


def _refusal(error: Mapping[str, Any], kind: type[Body]) -> Refusal:
    known = kind.model_fields
    path = ""
    is_stranger = error["type"] == "extra_forbidden"
    for step in error["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif is_stranger or (step not in _TYPE_NAMES and "[" not in step):
            path += f".{step}"
    param = path[1:][:80] or None
    what = error["msg"]
    match error["type"]:
        case "json_invalid":
            what = what.removeprefix("Invalid JSON: ")
            return Refusal(400, f"The body must be JSON in UTF-8 ({what}): mend it")
        case "extra_forbidden":
            meant = did_you_mean(str(param), known) if len(error["loc"]) == 1 else ""
            if param in _RENAMED:
                meant = f": give '{_RENAMED[param]}' instead"
            return Refusal.of_stranger(str(param), meant)
        case "missing":
            message = f"Missing required parameter: '{param}': give it"
            return Refusal(400, message, param=param, code="missing_required_parameter")
    what = f"it {plain_rule(what)}" if plain_rule(what) else what
    value = error["input"]
    got = "" if isinstance(value, list | dict) else f", got {json.dumps(value):.80}"
    field = known.get(error["loc"][0]) if path else None
    is_needed = not path or (field is not None and field.is_required())
    remedy = "mend it" if is_needed else MEND
    message = f"Invalid value for {(param and repr(param)) or 'the body'}: {what}{got}: {remedy}"
    return Refusal(400, message, param=param, code="invalid_value")


def _message(index: int, message: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a message as chat templates take it, and the names of what was passed over.

    Clients send back what other servers gave them, so fields that are not known are no mistakes.
    Raises `Refusal`.
    """
    where = f"messages[{index}]"
    known = Role.__args__  # type: ignore[attr-defined]
    if message.get("role") not in known:
        rule = f"it must be one of {', '.join(known)}"
        raise Refusal.of_value(where, rule, "mend it", f"{where}.role")
    told = dict(message)
    if told.get("reasoning_content") is None and isinstance(told.get("reasoning"), str):
        told["reasoning_content"] = told.pop("reasoning")
    others = {name for name in told.keys() - _SAID if told[name] not in (None, "", [], {})}
    for name in sorted(others & _CARRYING):
        raise Refusal.of_stranger(f"{where}.{name:.80}")
    said = {name: value for name, value in told.items() if name in _SAID and value is not None}
    if said["role"] == "developer":
        said["role"] = "system"
    if not said.get("tool_calls"):
        said.pop("tool_calls", None)
    if isinstance(calls := said.get("tool_calls"), list):
        said["tool_calls"] = [_earlier_call(call, f"{where}.tool_calls") for call in calls]
    return said, sorted(f"{where}.{name:.80}" for name in others if name.isidentifier())


def _earlier_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call of an earlier answer. Raises `Refusal`.

    Arguments stay as they came; the model's template says in which form it takes them.
    """
    match call:
        case {"function": {"name": str(), **more}} if isinstance(
            more.get("arguments"), str | dict | None
        ):
            return dict(call)
    rule = "each must have a function with a name, and arguments as JSON text or as an object"
    raise Refusal.of_value(where, rule, "mend it")
