"""An answer in Anthropic's form: blocks of text, thoughts and calls.

Clients do not notice a stream that ends early, so an error is sent as an event. They do not repair
cut arguments either, so a call's block begins only once the call is complete.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from offload.engine.generation import Generation
from offload.engine.job import Job
from offload.server.anthropic.bodies import MessagesBody
from offload.server.core.answer import BlockAnswer, Event, TokenNames
from offload.server.core.refusals import Refusal
from offload.server.error_forms import anthropic_error
from offload.words.parts import Call, Part, Text, Thought

# Some clients send thoughts back only with a signature; any signature is accepted.
_SIGNATURE = "offload"


class MessageAnswer(BlockAnswer):
    """An answer of /v1/messages."""

    def __init__(
        self, body: MessagesBody, jobs: Sequence[Job], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, jobs, names, model_id)
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        self._head["model"] = model_id
        self._content = list[dict[str, Any]]()
        self._most_tokens = body.max_tokens

    def opening(self) -> list[Event]:
        """Return the event that begins a message."""
        usage = {"input_tokens": self._num_prompt(), "output_tokens": 0}
        ends = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**self._head, "content": [], **ends, "usage": usage}
        return [_event("message_start", message=message)]

    def failed(self, refusal: Refusal) -> list[Event]:
        """Return the error as an event: clients take a stream that just ends for a complete one."""
        return [Event("error", anthropic_error(refusal))]

    def _open(self, part: Part) -> list[Event]:
        """Begin a content block for a part; return its first events, for a call all of them."""
        index = len(self._content)
        block: dict[str, Any]
        match part:
            case Text():
                block = {"type": "text", "text": ""}
            case Thought():
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case Call():
                block = {"type": "tool_use", "id": part.key, "name": part.name, "input": {}}
        self._content.append(dict(block))
        events = [_event("content_block_start", index=index, content_block=block)]
        if isinstance(part, Call):
            self._content[-1]["input"] = json.loads(part.arguments)
            events.append(self._delta("input_json_delta", partial_json=part.arguments))
        return events

    def _grow(self, part: Text | Thought) -> list[Event]:
        name = "text" if isinstance(part, Text) else "thinking"
        self._content[-1][name] += part.text
        return [self._delta(f"{name}_delta", **{name: part.text})]

    def _close(self) -> list[Event]:
        events = list[Event]()
        if self._kind is Thought:
            self._content[-1]["signature"] = _SIGNATURE
            events.append(self._delta("signature_delta", signature=_SIGNATURE))
        return [*events, _event("content_block_stop", index=len(self._content) - 1)]

    def _end(self, result: Generation) -> list[Event]:
        delta = _event("message_delta", delta=self._reason(result), usage=_usage(result))
        return [delta, _event("message_stop")]

    def _final_body(self, result: Generation) -> dict[str, Any]:
        ends = self._reason(result)
        return {**self._head, "content": self._content, **ends, "usage": _usage(result)}

    def _delta(self, kind: str, **fields: str) -> Event:
        index = len(self._content) - 1
        return _event("content_block_delta", index=index, delta={"type": kind, **fields})

    def _reason(self, result: Generation) -> dict[str, Any]:
        reason = "end_turn"
        if self._has_calls:
            reason = "tool_use"
        elif result.finish_reason == "length":
            is_full = len(result.token_ids) < self._most_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif result.stopped_by:
            reason = "stop_sequence"
        stop = result.stopped_by if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}


def _usage(result: Generation) -> dict[str, Any]:
    """Return the numbers of tokens read, read from the prompt cache, and written."""
    stats = result.stats
    return {
        "input_tokens": stats.num_prompt_tokens - stats.num_kept_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.num_kept_tokens,
        "output_tokens": len(result.token_ids),
    }


def _event(kind: str, **fields: Any) -> Event:
    return Event(kind, {"type": kind, **fields})
