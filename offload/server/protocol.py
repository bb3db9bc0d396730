"""OpenAI's protocol: bodies of requests, what they ask of the engine, and refusals.

A body is checked field by field. A field that is not known is refused by name, as OpenAI does. What
is known and without meaning here, or without harm if it is left out, is accepted, and its name is
given back in a header.

Invariant: 500 is a fault of this program or its disk alone, and never carries a traceback; what a
client can mend has 400, with the rule, the value and the remedy.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, create_model

from offload.declaration import options_at
from offload.engine.job import Ticket
from offload.engine.request import Request, samples_of
from offload.engine.scheduler import EngineFigures
from offload.engine.service import ASK_LATER, Closing, Engine, QueueFull
from offload.errors import RunError, UserError, did_you_mean
from offload.sampling.grammar import Grammar, find_grammar
from offload.sampling_options import Sampling
from offload.server.listening import LOADING, is_loopback

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_MOST_WAIT_S = 60


class Refusal(Exception):  # noqa: N818
    """A request that is not served, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # what it quotes need not be text that can be sent
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    @classmethod
    def of_value(cls, param: str, rule: str, field: str = "") -> "Refusal":
        """Return the refusal of a body's field; a `field` within it is named instead."""
        return cls(400, f"Invalid value for '{field or param}': {rule}", param=param)

    def as_dict(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def refusal_of(error: BaseException, figures: EngineFigures | None = None) -> Refusal:
    """Return what a client is told of an error: nothing of one that none of ours foresaw."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        wait_s = 1.0
        if figures is not None:  # about as long as those before had to wait
            num_begun = max(1, figures.num_done + figures.num_cancelled + figures.num_active)
            wait_s = min(max(1.0, figures.waited_s / num_begun), _MOST_WAIT_S)
        again = {"Retry-After": str(round(wait_s))}
        return Refusal(429, str(error), code="queue_full", headers=again)
    if isinstance(error, Closing):
        return refuse_closing()
    if isinstance(error, UserError):
        message = str(error).replace("`max_new_tokens`", "`max_tokens`")
        # the record of an option begins its line with the field
        named = re.match(r"`(\w+)` ", message)
        return Refusal(400, message, param=named and named[1])
    if isinstance(error, RunError):  # whose words name files of this machine
        return Refusal(500, "the run failed, and the server's log says why", code="run_failed")
    return Refusal(500, "the server failed, and its log says where", code="internal_error")


def refuse_closing() -> Refusal:
    """Return the refusal of a server that ends."""
    again = {"Retry-After": "10"}
    return Refusal(503, ASK_LATER, code="closing", headers=again)


def refuse_loading() -> Refusal:
    """Return the refusal while the model is read."""
    return Refusal(503, LOADING, code="loading", headers={"Retry-After": "2"})


def no_such_model(model: str, model_id: str) -> Refusal:
    """Return the refusal for another model than the one that is served."""
    message = (
        f"The model `{model:.80}` does not exist: this server has `{model_id}`, "
        "start it with --alias to give it other names"
    )
    return Refusal(404, message, code="model_not_found", param="model")


_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# of a message, to a template
_SAID = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
_UNSAID = {"refusal", "annotations", "audio", "function_call"}  # that clients send back empty
# in the path of an error within a union
_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "json-or-python"}

Role = Literal["system", "developer", "user", "assistant", "tool"]
Count = Annotated[int, Field(ge=0, le=1 << 31)]
Stop = Annotated[str, Field(max_length=1024)]
Ignored = Annotated[Any, Field(exclude=True)]  # it has no meaning here
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
    """Return the options of drawing that a request may have, each a field that may be left out."""
    found: dict[str, Any] = {}
    for name, one in options_at("http", Sampling).items():
        low, high = one.http_within or (None, None)
        kind: Any = Annotated[one.kind if one.is_number else float, Field(ge=low, le=high)]
        value: Any = kind | None if one.is_number else dict[str, kind] | None
        names = AliasChoices(name, *one.synonyms) if one.synonyms else None
        found[name] = (value, Field(default=None, validation_alias=names))
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
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

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
        return self.num_choices

    @property
    def ignored(self) -> list[str]:
        """Fields that were given and change nothing."""
        known = type(self).model_fields
        given = (name for name in self.model_fields_set if known[name].exclude)
        return sorted(name for name in given if getattr(self, name) is not None)


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

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None

    @property
    def told(self) -> list[dict[str, Any]]:
        """Messages as chat templates take them. Raises `Refusal`."""
        return [_told(index, message) for index, message in enumerate(self.messages)]

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must keep. Raises `Refusal` for no format, `UserError` for no schema."""
        if forced := self.forced_tools:
            return find_grammar(json_schema=_schema_of_calls(forced))
        wished = self.response_format or {"type": "text"}
        if wished == {"type": "text"}:
            return None
        if wished == {"type": "json_object"}:
            return Grammar("json_object")
        match wished:
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                return find_grammar(json_schema=schema)
        rule = "it must be text, json_object, or json_schema with a 'schema'"
        raise Refusal.of_value("response_format", rule)

    @property
    def tools_told(self) -> list[dict[str, Any]]:
        """Functions as chat templates take them; none where the model is to call none."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    @property
    def forced_tools(self) -> list[Function]:
        """Functions of which the answer must call one; none where it need not. Raises `Refusal`."""
        tools = [tool.function for tool in self.tools or []]
        match self.tool_choice:
            case None | "auto" | "none":
                return []
            case "required":
                forced = tools
            case {"type": "function", "function": {"name": str(name)}}:
                forced = [one for one in tools if one.name == name]
            case _:
                forced = []
        if not forced:
            rule = "it must be 'auto', 'none', 'required' or a function of 'tools'"
            rule += "" if tools else ", and there are no 'tools'"
            raise Refusal.of_value("tool_choice", rule)
        return forced


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
                    rule = f"'{place}' of two functions differ in {name:.80}: rename one"
                    raise Refusal.of_value("tools", rule)
        fields = {"name": {"const": one.name}, "arguments": parameters}
        call = {"type": "object", "properties": fields, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    return {"anyOf": calls, **shared}


class CompletionBody(Body):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def num_texts(self) -> int:
        return self.num_choices * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each to be gone on with. Raises `Refusal` for what is known and not to be had."""
        for name in ("echo", "suffix"):
            if getattr(self, name):
                message = f"'{name}' is not supported by this server: leave it out"
                raise Refusal(400, message, param=name)
        if self.best_of not in (None, self.num_choices):
            message = "'best_of' must be equal to 'n' on this server: leave it out"
            raise Refusal(400, message, param="best_of")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refusal.of_value("prompt", "it is empty")
        are_ids = isinstance(self.prompt[0], int)
        return [self.prompt] if are_ids else list(self.prompt)  # type: ignore[list-item, arg-type]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Return a body that came over the wire. Raises `Refusal` for bad JSON and wrong fields."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = min(found, key=lambda one: one["type"] != "extra_forbidden")
        raise _refusal(first, kind.model_fields) from None


def _refusal(error: Mapping[str, Any], known: Iterable[str]) -> Refusal:
    path = ""
    for step in error["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _TYPE_NAMES and "[" not in step:
            path += f".{step}"
    param = path[1:][:80] or None
    what = error["msg"]
    match error["type"]:
        case "json_invalid":
            what = what.removeprefix("Invalid JSON: ")
            return Refusal(400, f"The body must be JSON in UTF-8: {what}")
        case "extra_forbidden":
            meant = did_you_mean(str(param), known)
            message = f"Unrecognized request argument supplied: {param}{meant}"
            return Refusal(400, message, param=param)
        case "missing":
            message = f"Missing required parameter: '{param}'"
            return Refusal(400, message, param=param, code="missing_required_parameter")
    message = f"Invalid value for {(param and repr(param)) or 'the body'}: {what}"
    return Refusal(400, message, param=param, code="invalid_value")


def _told(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    known = Role.__args__  # type: ignore[attr-defined]
    if message.get("role") not in known:
        raise Refusal.of_value(where, f"it must be one of {', '.join(known)}", f"{where}.role")
    for name in sorted(message.keys() - _SAID):
        if name not in _UNSAID or message[name]:
            argument = f"{where}.{name:.80}"
            what = f"Unrecognized request argument supplied: {argument}"
            raise Refusal(400, what, param=argument)
    told = {name: value for name, value in message.items() if name in _SAID and value is not None}
    if told["role"] == "developer":
        told["role"] = "system"
    if "tool_calls" in told:
        told["tool_calls"] = _calls_told(told["tool_calls"], f"{where}.tool_calls")
    return told


def _calls_told(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls of an earlier answer as templates take them: arguments are no JSON there."""
    told = []
    try:
        for call in calls:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            told.append({**call, "function": {**function, "arguments": arguments}})
    except (TypeError, KeyError, ValueError, RecursionError):
        rule = "each must have a function with arguments in JSON"
        raise Refusal.of_value(where, rule) from None
    return told


_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of one server."""

    model_id: str  # what clients call the model
    # where a request says nothing
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    aliases: tuple[str, ...] = ()  # other names that clients may ask for; `*` is any
    host: str = "127.0.0.1"
    origins: tuple[str, ...] = ()  # whose pages may ask beside this server's own
    api_keys: tuple[str, ...] = ()  # any of them lets in; none asks for none
    max_body_bytes: int = 4 << 20
    body_s: float = 30.0  # within which a body must have come
    keep_alive_s: float = 3.0  # without a token, after which a stream says that it is alive

    @property
    def allowed_hosts(self) -> tuple[str, ...] | None:
        """Names, without a port, that a request may ask for; None allows any.

        Only on loopback: a stranger's page that gives its own name the address 127.0.0.1 (DNS
        rebinding) would be as good as a page of ours. Elsewhere it lacks the key.
        """
        own = f"[{self.host}]" if ":" in self.host else self.host
        return (*_LOOPBACK_NAMES, own.lower()) if is_loopback(self.host) else None


_LARGEST_SEED = 2**63 - 1
_LEGACY_TOKENS = 16  # of /v1/completions, where a body does not say


def order_chat(engine: Engine, settings: ServerSettings, body: ChatBody) -> list[Ticket]:
    """Submit a request, a ticket for each choice, or none. Raises `Refusal` and `UserError`."""
    _require_few(engine, body)
    grammar = body.grammar
    ids = engine.decoder.encode(body.told, tools=body.tools_told)
    num_new = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        message = "'top_logprobs' goes with 'logprobs': set that to true"
        raise Refusal(400, message, param="top_logprobs")
    common = Request(
        sampling=_sampling(settings, body),
        stop=body.stop or None,
        num_logprobs=num_logprobs,
        grammar=grammar,
    )
    return _order(engine, body, [ids], common, num_new, param="messages")


def order_completion(
    engine: Engine, settings: ServerSettings, body: CompletionBody
) -> list[Ticket]:
    """Submit a request, a ticket for each choice of each prompt. Raises as `order_chat`."""
    _require_few(engine, body, "n" if body.num_choices > 1 else "prompt")
    prompts = [engine.decoder.encode(prompt, raw=True) for prompt in body.prompts]
    num_new = _LEGACY_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = _sampling(settings, body)
    common = Request(sampling=sampling, stop=body.stop or None, num_logprobs=body.logprobs)
    return _order(engine, body, prompts, common, num_new, param="prompt")


def _require_few(engine: Engine, body: Body, param: str = "n") -> None:
    """Raise `Refusal`, before anything is read, for more texts than could ever be served."""
    if body.num_texts > engine.most_requests:
        rule = f"this server takes {engine.most_requests} texts at a time, got {body.num_texts}"
        raise Refusal.of_value(param, rule)


def _order(
    engine: Engine,
    body: Body,
    prompts: Sequence[list[int]],
    common: Request,
    num_new: int | None,
    *,
    param: str,
) -> list[Ticket]:
    """Submit each choice of each prompt; return their tickets.

    Args:
        num_new: new tokens of each; None is as many as there is room for.
        param: the field that has the prompts.
    """
    common = replace(common, tree=body.extension.tree, rule=body.extension.rule)
    tickets = list[Ticket]()
    try:
        for ids in prompts:
            room = engine.decoder.room(ids)
            if room < max(1, num_new or 0):
                context = engine.decoder.plan.context
                wanted = "" if num_new is None else f" and {num_new} in the completion"
                message = (
                    f"This model's maximum context length is {context} tokens, but you asked for "
                    f"{len(ids)} tokens in the {param}{wanted}: shorten the {param} or lower `max_tokens`"
                )
                raise Refusal(400, message, code="context_length_exceeded", param=param)
            own = replace(common, prompt=ids, max_new_tokens=room if num_new is None else num_new)
            for request in samples_of(own, body.num_choices):
                tickets.append(engine.submit(request))
    except Exception:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets


def _sampling(settings: ServerSettings, body: Body) -> Sampling:
    given: dict[str, Any] = {}
    for name, one in options_at("http", Sampling).items():
        value = getattr(body, name)
        if value not in (None, {}):
            given[one.name] = value
    if biases := given.get("logit_bias"):
        try:
            given["logit_bias"] = {int(token): number for token, number in biases.items()}
        except ValueError:
            raise Refusal.of_value("logit_bias", "its keys must be ids of tokens") from None
    seed = secrets.randbelow(_LARGEST_SEED) if body.seed is None else body.seed & _LARGEST_SEED
    return replace(settings.sampling, **{**given, "seed": seed})
