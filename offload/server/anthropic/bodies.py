"""Bodies of Anthropic's messages, and the engine's requests made of them.

Source: the requests of the clients `anthropic` 2.14 (Python), `@anthropic-ai/sdk` 1.14 and
`@ai-sdk/anthropic` 3.0.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from offload.engine.request import Request
from offload.sampling.grammar import find_grammar
from offload.sampling_options import Sampling
from offload.server.core.body import AnyStops, Body, Count, Ignored
from offload.server.core.refusals import Refusal
from offload.server.core.tools import (
    NO_TOOLS,
    Function,
    Toolbox,
    choose_tools,
    force_tool,
    no_choice,
)

_THINKS = {"enabled": True, "disabled": False}
_THREAD = "thread_unsupported_request"


class _Open(BaseModel):
    """Part of a message; another server may have written it, so unknown fields are no errors."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def strangers(self, where: str) -> Iterator[str]:
        """Yield the names of ignored fields."""
        for name, value in (self.model_extra or {}).items():
            if value not in (None, "", [], {}) and name.isidentifier():
                yield f"{where}.{name:.80}"


class TextBlock(_Open):
    """Text."""

    type: Literal["text"]
    text: str


def _as_blocks(content: Any) -> Any:
    """Return text as a list of one block, so that an error concerns the form that was sent."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[
    list[TextBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ThinkingBlock(_Open):
    """Thoughts of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class RedactedBlock(_Open):
    """Thoughts that another server has encrypted."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Open):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Open):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(_Open):
    """A message of one side."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]

    def as_messages(self, where: str) -> Iterator[dict[str, Any]]:
        """Yield the message in the form of chat templates: results of calls are separate messages.

        Raises `Refusal`.
        """
        if self.role == "assistant":
            yield self._answer(where)
            return
        words = list[str]()
        for index, block in enumerate(self.content):
            if isinstance(block, TextBlock):
                words.append(block.text)
            elif isinstance(block, ToolResultBlock) and self.role == "user":
                if words:
                    yield {"role": self.role, "content": "".join(words)}
                words = []
                content = _joined(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            else:
                raise _misplaced(f"{where}.content[{index}]", block.type, self.role)
        if words or not self.content:
            yield {"role": self.role, "content": "".join(words)}

    def _answer(self, where: str) -> dict[str, Any]:
        """Return an earlier answer as a message for chat templates. Raises `Refusal`."""
        words = list[str]()
        thoughts = list[str]()
        calls = list[dict[str, Any]]()
        for index, block in enumerate(self.content):
            match block:
                case TextBlock():
                    words.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": block.input}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ToolResultBlock():
                    raise _misplaced(f"{where}.content[{index}]", block.type, self.role)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(words) or None}
        if calls:
            message["tool_calls"] = calls
        else:
            message["content"] = "".join(words)
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        return message


def _joined(texts: Sequence[TextBlock] | None) -> str:
    return "".join(block.text for block in texts or ())


def _misplaced(where: str, kind: str, role: str) -> Refusal:
    return Refusal.of_value("messages", f"no {kind} stands in what the {role} says", field=where)


class Tool(_Open):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def as_function(self) -> Function:
        """Return the function in the form of chat templates."""
        return Function(name=self.name, description=self.description, parameters=self.input_schema)


class CountBody(Body):
    """A request to /v1/messages/count_tokens, and the most of one to /v1/messages."""

    prompt_field = "messages"
    tags = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})

    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thread: Any = None
    cache_control: Ignored = None
    container: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None

    def requests(self, usual: Sampling) -> list[Request]:
        """Return a request that writes nothing, see `Body`."""
        return [self._request(usual, 0)]

    def _request(self, usual: Sampling, num_new: int | None, **fields: Any) -> Request:
        """Return the request for this conversation. Raises `Refusal` and `UserError`."""
        if self.thread is not None:
            # clients react to this code by sending whole conversations, unlike to other 400s
            details = {"error_code": _THREAD, "unsupported": ["thread"]}
            message = "'thread' is not supported by this server: send the whole conversation"
            raise Refusal(400, message, param="thread", details=details)
        conversation = list[dict[str, Any]]()
        if self.system:
            conversation.append({"role": "system", "content": _joined(self.system)})
        for index, said in enumerate(self.messages):
            conversation += said.as_messages(f"messages[{index}]")
        last = conversation[-1]
        toolbox = self.toolbox()
        grammar = toolbox.grammar()
        if grammar is None and (schema := self._schema()) is not None:
            grammar = find_grammar(json_schema=schema)
        return super()._request(
            usual,
            num_new,
            prompt=conversation,
            tools=toolbox.described,
            grammar=grammar,
            template_variables={
                name: value for name, (_, value) in self.template_variables().items()
            },
            # the answer that the client has begun is continued
            continues_message=last["role"] == "assistant" and not last.get("tool_calls"),
            **fields,
        )

    def _schema(self) -> Any:
        """Return the schema of the answer. Raises `Refusal` for a format that is none."""
        match (self.output_config or {}).get("format"):
            case None:
                return None
            case {"type": "json_schema", "schema": schema}:
                return schema
        requirement = "it must be of type json_schema, with a 'schema'"
        raise Refusal.of_value("output_config", requirement, field="output_config.format")

    @property
    def wants_thoughts(self) -> bool | None:
        """Return True if the model is to think, see `Body`."""
        return _THINKS.get(str((self.thinking or {}).get("type")))

    def template_variables(self) -> dict[str, tuple[str, Any]]:
        """Return the template's variables, see `Body`."""
        effort = (self.output_config or {}).get("effort")
        if not isinstance(effort, str):
            return {}
        return {"reasoning_effort": ("output_config.effort", effort)}

    def toolbox(self) -> Toolbox:
        """Return the functions that the model may call. Raises `Refusal`."""
        functions = [tool.as_function() for tool in self.tools or []]
        choice = self.tool_choice or {"type": "auto"}
        is_parallel = choice.get("disable_parallel_tool_use") is not True
        match choice:
            case {"type": "auto"}:
                return choose_tools(functions, is_parallel=is_parallel)
            case {"type": "any"}:
                return choose_tools(functions, is_forced=True, is_parallel=is_parallel)
            case {"type": "tool", "name": str(name)}:
                return force_tool(functions, name)
            case {"type": "none"}:
                return NO_TOOLS
        raise no_choice(functions)

    @property
    def schema_field(self) -> str:
        """Return where schemas of an answer come from, see `Body`."""
        return "tools" if self.toolbox().is_forced else "output_config"

    @property
    def ignored(self) -> list[str]:
        """The fields that change nothing, including those of messages and tools."""
        names = {*super().ignored}
        if "budget_tokens" in (self.thinking or {}):
            names.add("thinking.budget_tokens")
        for index, tool in enumerate(self.tools or []):
            names |= {*tool.strangers(f"tools[{index}]")}
        for index, message in enumerate(self.messages):
            names |= {*message.strangers(f"messages[{index}]")}
            for number, block in enumerate(message.content):
                names |= {*block.strangers(f"messages[{index}].content[{number}]")}
        return sorted(names)


class MessagesBody(CountBody):
    """A request to /v1/messages."""

    max_tokens: Count
    stop_sequences: AnyStops = None

    def requests(self, usual: Sampling) -> list[Request]:
        """Return the one request. Raises `Refusal` and `UserError`.

        Clients must name a limit, and many name more than any context has room for.
        """
        stop = self.stop_sequences or None
        return [self._request(usual, self.max_tokens, stop=stop, is_clipped=True)]
