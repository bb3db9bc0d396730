"""An answer in the making: what the texts of a request have gained, in the words of OpenAI's protocol.

One class for what chat and plain completions share, a subclass for each. Invariant: the chunks of a stream, put
together, are the choices of the answer that is sent whole.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from offload import __version__
from offload.engine.generation import Generation
from offload.engine.logprobs import TokenLogprob
from offload.engine.ticket import Piece, Ticket
from offload.server.logprobs import TokenNames
from offload.server.protocol import Body, ChatBody
from offload.server.refusal import closing
from offload.server.tool_calls import ToolCalls

_FINGERPRINT = f"offload-{__version__}"


class Answer:
    """To one request, with a choice for each ticket. Raises what has ended a text wherever its end is asked for."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, body: Body, tickets: Sequence[Ticket], names: TokenNames, model_id: str) -> None:
        self._body, self._tickets, self._names = body, tickets, names
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_id,
            "system_fingerprint": _FINGERPRINT,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before anything was written."""
        return []

    def chunks(self, index: int, piece: Piece | None) -> list[dict[str, Any]]:
        """Chunks for what a text has gained, or for its end."""
        if piece is None:
            choices, passed = self._last(index, self._result(index)), None
        else:
            choices = [choice for choice in [self._next(index, piece)] if choice is not None]
            passed = piece.last_pass if self._body.extension.passes else None
            if passed is not None and not choices:
                choices = [self._silent(index)]
        chunks = [self._chunk([choice]) for choice in choices]
        if passed is not None:
            chunks[0]["offload"] = self._names.told(passed)
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """Chunks behind the end of all texts."""
        if not self._body.has_usage_chunk:
            return []
        return [self._chunk([]) | {"usage": self._usage()}]

    def whole(self) -> dict[str, Any]:
        """Everything at once, when all texts have ended."""
        choices = [self._choice(index, self._result(index)) for index in range(len(self._tickets))]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.has_usage_chunk else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def _result(self, index: int) -> Generation:
        result = self._tickets[index].result()
        if result.finish_reason == "interrupted":  # and not by the client, who is here
            raise closing()
        return result

    def _usage(self) -> dict[str, Any]:
        results = [self._result(index) for index in range(len(self._tickets))]
        firsts = results[:: self._body.num_choices]  # of each prompt; its other choices have read the same
        num_prompt = sum(one.stats.num_prompt_tokens for one in firsts)
        num_new = sum(len(one.token_ids) for one in results)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(one.stats.num_kept_tokens for one in firsts)},
        }

    def _next(self, index: int, piece: Piece) -> dict[str, Any] | None:
        raise NotImplementedError

    def _silent(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, body: ChatBody, tickets: Sequence[Ticket], names: TokenNames, model_id: str) -> None:
        super().__init__(body, tickets, names, model_id)
        self._calls = [ToolCalls(is_wanted=bool(body.tools_told)) for _ in tickets]
        self._has_logprobs = bool(body.logprobs)

    def opening(self) -> list[dict[str, Any]]:
        """Who speaks, in every choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._delta(index, delta)]) for index in range(len(self._tickets))]

    def _delta(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _next(self, index: int, piece: Piece) -> dict[str, Any] | None:
        text, told = self._calls[index].push(piece.text), self._told(piece.logprobs)
        return self._delta(index, {"content": text}, logprobs=told) if text or told else None

    def _silent(self, index: int) -> dict[str, Any]:
        return self._delta(index, {"content": ""})

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        rest, calls = self._calls[index].finish()
        choices = [self._delta(index, {"content": rest})] if rest else []
        for position, call in enumerate(calls):
            choices.append(self._delta(index, {"tool_calls": [{"index": position, **call}]}))
        return [*choices, self._delta(index, {}, "tool_calls" if calls else result.finish_reason)]

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        content = self._calls[index].push(result.text)
        rest, calls = self._calls[index].finish()
        message: dict[str, Any] = {"role": "assistant", "content": content + rest, "refusal": None}
        if calls:
            message |= {"content": (content + rest) or None, "tool_calls": calls}
        reason = "tool_calls" if calls else result.finish_reason
        told = self._told(result.logprobs or ())
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    def _told(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        content = self._names.of_chat(logprobs) if self._has_logprobs else []
        return {"content": content, "refusal": None} if content else None


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: Body, tickets: Sequence[Ticket], names: TokenNames, model_id: str) -> None:
        super().__init__(body, tickets, names, model_id)
        self._num_chars = [0] * len(tickets)

    def _text(
        self, index: int, text: str, reason: str | None = None, logprobs: Sequence[TokenLogprob] = ()
    ) -> dict[str, Any]:  # fmt: skip
        told = self._names.of_completion(logprobs, self._num_chars[index]) if logprobs else None
        self._num_chars[index] += sum(map(len, told["tokens"])) if told else 0
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}

    def _next(self, index: int, piece: Piece) -> dict[str, Any] | None:
        return self._text(index, piece.text, logprobs=piece.logprobs) if piece.text or piece.logprobs else None

    def _silent(self, index: int) -> dict[str, Any]:
        return self._text(index, "")

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        return [self._text(index, "", result.finish_reason)]

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        return self._text(index, result.text, result.finish_reason, result.logprobs or ())
