"""Bodies of chat and plain completions in OpenAI's protocol, and the requests made of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from offload.engine.conversation import check_variables
from offload.engine.request import Request
from offload.sampling.grammar import Grammar, find_grammar
from offload.sampling_options import Sampling
from offload.server.core.body import STRICT, AnyStops, Body, Count, Ignored, Messages
from offload.server.core.refusals import Refusal
from offload.server.core.tools import (
    NO_TOOLS,
    Function,
    Toolbox,
    choose_tools,
    force_tool,
    no_choice,
)

# fields of a message that templates read
_SAID = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
# fields of words that are not read
_CARRYING = {"audio", "audios", "function_call", "image", "image_url", "images", "video", "videos"}
_LEGACY_TOKENS = 16  # of /v1/completions, where a body does not say

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Extension(BaseModel):
    """Extensions of OpenAI's protocol."""

    model_config = STRICT
    passes: bool = False  # what every pass did, with each chunk
    tree: str | None = None
    rule: str | None = None


class OpenAIBody(Body):
    """Fields of all requests in OpenAI's protocol."""

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
    def tells_passes(self) -> bool:
        return self.offload is not None and self.offload.passes

    def _request(self, usual: Sampling, num_new: int | None, **fields: Any) -> Request:
        extension = self.offload or Extension()
        trees = {"tree": extension.tree, "rule": extension.rule}
        return super()._request(usual, num_new, **trees, **fields)


class StreamOptions(BaseModel):
    """Contents of a stream besides its text."""

    model_config = STRICT
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # against who counts bytes on the wire; there is none


class ChoicesBody(OpenAIBody):
    """Fields of requests for chat and for text."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: AnyStops = None

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def _request(self, usual: Sampling, num_new: int | None, **fields: Any) -> Request:
        return super()._request(usual, num_new, stop=self.stop or None, **fields)


class ToolBody(BaseModel):
    """A tool: functions are the only kind."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["function"]
    function: Function


class ChatBody(ChoicesBody):
    """A request to /v1/chat/completions."""

    prompt_field = "messages"
    renamed: ClassVar[Mapping[str, str]] = {"functions": "tools", "function_call": "tool_choice"}

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Any = None
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
        conversation = [_message(index, message)[0] for index, message in enumerate(self.messages)]
        variables = dict(self.chat_template_kwargs or {})
        check_variables(variables, "chat_template_kwargs")
        # under the name that clients know; templates have others
        think = variables.pop("enable_thinking", None)
        stated = {name: value for name, (_, value) in self.template_variables().items()}
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is not None and self.add_generation_prompt == continues:
            message = "'add_generation_prompt' must be false with 'continue_final_message', or true"
            raise Refusal(400, f"{message}: leave it out", param="add_generation_prompt")
        if continues and conversation[-1]["role"] != "assistant":
            requirement = "the last of 'messages' must be the assistant's to go on with"
            raise Refusal.of_value("continue_final_message", requirement, "leave it out")
        toolbox = self.toolbox()
        return [
            self._request(
                usual,
                num_new,
                prompt=conversation,
                tools=toolbox.described,
                template_variables={**stated, **variables},
                continues_message=continues,
                think=think,
                grammar=toolbox.grammar() or grammar_of(self.response_format, "response_format"),
                num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )
        ]

    def template_variables(self) -> dict[str, tuple[str, Any]]:
        """Return the template's variables, see `Body`; a template passes over unknown ones."""
        if not isinstance(self.reasoning_effort, str):
            return {}
        return {"reasoning_effort": ("reasoning_effort", self.reasoning_effort)}

    def toolbox(self) -> Toolbox:
        """Return the functions that the model may call. Raises `Refusal`."""
        functions = [tool.function for tool in self.tools or []]
        return toolbox_of(functions, self.tool_choice, self.parallel_tool_calls)

    @property
    def ignored(self) -> list[str]:
        """The fields that change nothing, including those of messages."""
        ignored = (_message(index, message)[1] for index, message in enumerate(self.messages))
        return sorted({*super().ignored, *(name for names in ignored for name in names)})

    @property
    def schema_field(self) -> str:
        """Return where schemas of an answer come from: of a tool that is forced, before others."""
        return "tools" if self.toolbox().is_forced else "response_format"


def toolbox_of(
    functions: Sequence[Function], choice: Any, parallel_tool_calls: bool | None
) -> Toolbox:
    """Return the tools of a request whose `tool_choice` is in OpenAI's form, its newer or older one.

    Raises `Refusal`.
    """
    is_parallel = parallel_tool_calls is not False
    match choice:
        case None | "auto":
            return choose_tools(functions, is_parallel=is_parallel)
        case "none":
            return NO_TOOLS
        case "required":
            return choose_tools(functions, is_forced=True, is_parallel=is_parallel)
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            return force_tool(functions, name)
        case {"type": "allowed_tools", **others}:
            allowed = others.get("allowed_tools", others)
            return _allowed(functions, allowed if isinstance(allowed, dict) else {}, is_parallel)
    raise no_choice(functions)


def _allowed(
    functions: Sequence[Function], allowed: Mapping[str, Any], is_parallel: bool
) -> Toolbox:
    """Return the tools of a choice that names some of them. Raises `Refusal`."""
    mode = allowed.get("mode")
    tools = allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise no_choice(functions)
    names = [_name_of(tool) for tool in tools]
    is_forced = mode == "required"
    return choose_tools(functions, allowed=names, is_forced=is_forced, is_parallel=is_parallel)


def _name_of(tool: Any) -> str:
    """Return the function that an entry of `allowed_tools` names. Raises `Refusal`."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            return name
    raise Refusal.of_value("tool_choice", "each tool that it allows must be a function with a name")


def grammar_of(wished: Mapping[str, Any] | None, field: str) -> Grammar | None:
    """Return the grammar that an answer must keep, by a field that has OpenAI's form of a format.

    Raises `Refusal` for no format, `UserError` for no schema.
    """
    match wished or {"type": "text"}:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar("json_object")
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {
            "type": "json_schema",
            "schema": schema,
        }:
            return find_grammar(json_schema=schema)
    requirement = "it must be text, json_object, or json_schema with a 'schema'"
    raise Refusal.of_value(field, requirement)


class CompletionBody(ChoicesBody):
    """A request to /v1/completions."""

    prompt_field = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[Any]:
        """Return the prompts, each text or token ids."""
        is_single = isinstance(self.prompt, str) or not self.prompt
        return [self.prompt] if is_single or isinstance(self.prompt[0], int) else [*self.prompt]

    def requests(self, usual: Sampling) -> list[Request]:
        """Return a request for each prompt. Raises `Refusal` and `UserError`."""
        if self.suffix is not None and self.echo:
            requirement = "what is written fills the gap before it, and 'echo' gives the prompt"
            raise Refusal.of_value("suffix", requirement, "leave one of them out")
        if self.best_of not in (None, self.num_choices):
            message = "'best_of' must be equal to 'n' on this server: leave it out"
            raise Refusal(400, message, param="best_of")
        if self.prompt == []:
            raise Refusal.of_value("prompt", "it is empty", "give some text")
        num_new = _LEGACY_TOKENS if self.max_tokens is None else self.max_tokens
        scored = self.logprobs if self.echo else None
        logprobs: Any = {"num_logprobs": self.logprobs, "num_prompt_logprobs": scored}
        common = self._request(usual, num_new, raw=True, suffix=self.suffix or None, **logprobs)
        return [replace(common, prompt=prompt) for prompt in self.prompts]


def _message(index: int, message: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a message as chat templates take it, and the names of what was passed over.

    Clients send back what other servers gave them, so fields that are not known are no mistakes.
    Raises `Refusal`.
    """
    where = f"messages[{index}]"
    known = Role.__args__  # type: ignore[attr-defined]
    if message.get("role") not in known:
        requirement = f"it must be one of {', '.join(known)}"
        raise Refusal.of_value(where, requirement, "mend it", f"{where}.role")
    content = dict(message)
    if content.get("reasoning_content") is None and isinstance(content.get("reasoning"), str):
        content["reasoning_content"] = content.pop("reasoning")
    if isinstance(parts := content.get("content"), list):
        thoughts = [part for part in parts if _is_thought(part)]
        content["content"] = [part for part in parts if part not in thoughts]
        texts = [text["text"] for part in thoughts for text in part["thinking"]]
        content["reasoning_content"] = content.get("reasoning_content") or "".join(texts) or None
    others = {name for name in content.keys() - _SAID if content[name] not in (None, "", [], {})}
    for name in sorted(others & _CARRYING):
        raise Refusal.unknown_field(f"{where}.{name:.80}")
    said = {name: value for name, value in content.items() if name in _SAID and value is not None}
    if said["role"] == "developer":
        said["role"] = "system"
    if not said.get("tool_calls"):
        said.pop("tool_calls", None)
    if isinstance(calls := said.get("tool_calls"), list):
        said["tool_calls"] = [_earlier_call(call, f"{where}.tool_calls") for call in calls]
    return said, sorted(f"{where}.{name:.80}" for name in others if name.isidentifier())


def _is_thought(part: Any) -> bool:
    """Return True for a part of thoughts, as Mistral's API has them among those of an answer."""
    match part:
        case {"type": "thinking", "thinking": [*texts]}:
            return all(
                isinstance(text, dict) and isinstance(text.get("text"), str) for text in texts
            )
    return False


def _earlier_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call of an earlier answer. Raises `Refusal`.

    Arguments stay as they came; the model's template says in which form it takes them.
    """
    match call:
        case {"function": {"name": str(), **others}} if isinstance(
            others.get("arguments"), str | dict | None
        ):
            return dict(call)
    requirement = (
        "each must have a function with a name, and arguments as JSON text or as an object"
    )
    raise Refusal.of_value(where, requirement, "mend it")
