"""OpenAI's responses: their bodies, and answers as lists of items.

No conversation is kept, so what names one is refused, and clients send it whole.
Source: requests and events of the clients `openai` 3.57, `@ai-sdk/openai` 3.0 and openai-agents 0.24.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from offload.engine.generation import Generation
from offload.engine.job import Job
from offload.engine.request import Request
from offload.sampling_options import Sampling
from offload.server.core.answer import BlockAnswer, Event, TokenNames
from offload.server.core.body import Count, Ignored
from offload.server.core.refusals import Refusal
from offload.server.core.tools import Function, Toolbox
from offload.server.openai.bodies import OpenAIBody, grammar_of, toolbox_of
from offload.words.parts import Call, Part, Text, Thought

_KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt")  # each stands for text
_OPEN = ConfigDict(extra="ignore", strict=True)


class ItemText(BaseModel):
    """Words of an item."""

    model_config = _OPEN
    type: Literal["input_text", "output_text", "summary_text", "reasoning_text", "text"]
    text: str


def _as_parts(content: Any) -> Any:
    """Return text as a list of one part, so that an error concerns the form that was sent."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[
    list[ItemText], BeforeValidator(_as_parts, json_schema_input_type=str | list[ItemText])
]


class MessageItem(BaseModel):
    """One message of a conversation."""

    model_config = _OPEN
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class CallItem(BaseModel):
    """A call of an earlier answer."""

    model_config = _OPEN
    call_id: str
    name: str
    arguments: str


class ResultItem(BaseModel):
    """What a call has brought."""

    model_config = _OPEN
    call_id: str
    output: Texts


class ReasoningItem(BaseModel):
    """The model's reasoning; encrypted content of another server is ignored."""

    model_config = _OPEN
    content: list[ItemText] | None = None
    summary: list[ItemText] | None = None


def _kind_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of),
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(Function):
    """A tool: functions are the only kind."""

    type: Literal["function"]
    strict: Ignored = None

    def as_function(self) -> Function:
        """Return the function in the form of chat templates."""
        return Function(name=self.name, description=self.description, parameters=self.parameters)


class ResponsesBody(OpenAIBody):
    """A request to /v1/responses."""

    prompt_field = "input"
    tags = frozenset({"message", "function_call", "function_call_output", "reasoning"})

    input: Annotated[
        list[Item],
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
        Field(min_length=1),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    context_management: Ignored = None
    include: Ignored = None
    max_tool_calls: Ignored = None
    stream_options: Ignored = None
    truncation: Ignored = None

    def requests(self, usual: Sampling) -> list[Request]:
        """Return the one request. Raises `Refusal` and `UserError`."""
        for name in _KEPT_ELSEWHERE:
            if getattr(self, name) is not None:
                raise Refusal.of_unsupported(name, "send the whole conversation as 'input'")
        if self.background:
            raise Refusal.of_unsupported("background")
        conversation = (
            [{"role": "system", "content": self.instructions}] if self.instructions else []
        )
        conversation += self._messages()
        if not conversation:
            raise Refusal.of_value("input", "it has no message", "give one")
        toolbox = self.toolbox()
        wished = (self.text or {}).get("format")
        if wished is not None and not isinstance(wished, dict):
            raise Refusal.of_value("text", "it must be an object", field="text.format")
        return [
            self._request(
                usual,
                self.max_output_tokens,
                prompt=conversation,
                tools=toolbox.described,
                template_variables={
                    name: value for name, (_, value) in self.template_variables().items()
                },
                grammar=toolbox.grammar() or grammar_of(wished, "text"),
            )
        ]

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the items as chat templates take them: thoughts, words and calls of one answer are
        one message.
        """
        turn: dict[str, Any] | None = None
        for item in self.input:
            is_answers = isinstance(item, CallItem | ReasoningItem) or (
                isinstance(item, MessageItem) and item.role == "assistant"
            )
            is_next = not is_answers or (not isinstance(item, CallItem) and _has_spoken(turn))
            if turn is not None and is_next:
                yield turn
                turn = None
            match item:
                case ResultItem():
                    content = _joined(item.output)
                    yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
                case MessageItem() if item.role != "assistant":
                    role = "system" if item.role == "developer" else item.role
                    yield {"role": role, "content": _joined(item.content)}
                case _:
                    turn = turn or {"role": "assistant", "content": ""}
                    _add(turn, item)
        if turn is not None:
            yield turn

    def template_variables(self) -> dict[str, tuple[str, Any]]:
        """Return the template's variables of thoughts, see `Body`."""
        effort = (self.reasoning or {}).get("effort")
        if not isinstance(effort, str):
            return {}
        return {"reasoning_effort": ("reasoning.effort", effort)}

    def toolbox(self) -> Toolbox:
        """Return the functions that the model may call. Raises `Refusal`."""
        functions = [tool.as_function() for tool in self.tools or []]
        return toolbox_of(functions, self.tool_choice, self.parallel_tool_calls)

    @property
    def ignored(self) -> list[str]:
        """Fields that change nothing, those within others included."""
        names = {*super().ignored}
        names |= {f"reasoning.{name:.80}" for name in {*(self.reasoning or {})} - {"effort"}}
        names |= {f"text.{name:.80}" for name in {*(self.text or {})} - {"format"}}
        return sorted(name for name in names if name.replace(".", "").isidentifier())

    @property
    def schema_field(self) -> str:
        """Return where schemas of an answer come from, see `Body`."""
        return "tools" if self.toolbox().is_forced else "text"


def _has_spoken(turn: dict[str, Any] | None) -> bool:
    return turn is not None and bool(turn["content"] or turn.get("tool_calls"))


def _add(turn: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    """Add an item to the model's message of its turn."""
    match item:
        case ReasoningItem():
            thoughts = _joined(item.content or item.summary or [])
            if thoughts:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
        case MessageItem():
            turn["content"] += _joined(item.content)
        case CallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)


def _joined(parts: Sequence[ItemText]) -> str:
    return "".join(part.text for part in parts)


class ResponseAnswer(BlockAnswer):
    """An answer of /v1/responses."""

    def __init__(
        self, body: ResponsesBody, jobs: Sequence[Job], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, jobs, names, model_id)
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_id,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": jobs[0].request.sampling.temperature,
            "top_p": jobs[0].request.sampling.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or []],
            "text": body.text or {"format": {"type": "text"}},
        }
        self._output = list[dict[str, Any]]()
        self._num_events = 0

    def opening(self) -> list[Event]:
        """Return the events that begin a response."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def failed(self, refusal: Refusal) -> list[Event]:
        """Return the event of a failed response, with its items so far."""
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        return [self._event("response.failed", response=self._response("failed", error=error))]

    def _open(self, part: Part) -> list[Event]:
        """Begin an output item for a part; return its first events, for a call all but the last."""
        item: dict[str, Any]
        match part:
            case Text():
                item = {"id": _key("msg"), "type": "message", "role": "assistant", "content": []}
            case Thought():
                item = {"id": _key("rs"), "type": "reasoning", "summary": [], "content": []}
            case Call():
                item = {"id": _key("fc"), "type": "function_call", "call_id": part.key}
                item |= {"name": part.name, "arguments": ""}
        self._output.append({**item, "status": "in_progress"})
        place = {"output_index": len(self._output) - 1}
        events = [self._event("response.output_item.added", **place, item={**self._output[-1]})]
        if isinstance(part, Call):
            self._output[-1]["arguments"] = part.arguments
            place["item_id"] = item["id"]
            kind = "response.function_call_arguments"
            events.append(self._event(f"{kind}.delta", **place, delta=part.arguments))
            whole = {"arguments": part.arguments, "name": part.name}
            events.append(self._event(f"{kind}.done", **place, **whole))
            return events
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if isinstance(part, Text):
            content = {"type": "output_text", "text": "", "annotations": []}
        self._output[-1]["content"] = [content]
        added = self._event("response.content_part.added", **self._place(), part={**content})
        return [*events, added]

    def _grow(self, part: Text | Thought) -> list[Event]:
        content = self._output[-1]["content"][0]
        content["text"] += part.text
        kind = f"response.{content['type']}.delta"
        return [self._event(kind, **self._place(), delta=part.text, **_logprobs(part))]

    def _close(self) -> list[Event]:
        """Return the events that end the open item."""
        item = self._output[-1]
        item["status"] = "completed"
        events = list[Event]()
        if item["type"] != "function_call":
            content = item["content"][0]
            part = Text("") if item["type"] == "message" else Thought("")
            whole = {"text": content["text"], **_logprobs(part)}
            events.append(self._event(f"response.{content['type']}.done", **self._place(), **whole))
            done = self._event("response.content_part.done", **self._place(), part={**content})
            events.append(done)
        place = {"output_index": len(self._output) - 1}
        return [*events, self._event("response.output_item.done", **place, item={**item})]

    def _end(self, result: Generation) -> list[Event]:
        response = self._final_body(result)
        return [self._event(f"response.{response['status']}", response=response)]

    def _final_body(self, result: Generation) -> dict[str, Any]:
        is_cut = result.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        usage = _usage(result)
        return self._response(status, incomplete_details=details, usage=usage)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        usual = {"error": None, "incomplete_details": None, "usage": None}
        output = [{**item} for item in self._output]
        return {**self._head, "status": status, "output": output, **usual, **fields}

    def _place(self) -> dict[str, Any]:
        item = self._output[-1]
        return {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return Event(kind, {"type": kind, "sequence_number": number, **fields})


def _key(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _logprobs(part: Text | Thought) -> dict[str, Any]:
    """Return the field that events of text have, and events of thoughts lack."""
    return {"logprobs": []} if isinstance(part, Text) else {}


def _usage(result: Generation) -> dict[str, Any]:
    stats = result.stats
    num_new = len(result.token_ids)
    return {
        "input_tokens": stats.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.num_kept_tokens},
        "output_tokens": num_new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.num_prompt_tokens + num_new,
    }
