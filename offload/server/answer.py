"""An answer in the making: what the texts of a request have gained, in OpenAI's words.

`Answer` has what chat and plain completions share, with a subclass for each. `TokenNames` tells of
single tokens: a token's text alone may be half a character, its bytes are exact.

Invariant: the chunks of a stream, put together, are the choices of the answer that is sent whole.
"""

import secrets
import time
from collections.abc import Sequence, Set
from functools import lru_cache
from typing import Any, ClassVar

from offload import __version__
from offload.engine.conversation import turn_end_ids, words_of
from offload.engine.generation import Generation, TextPiece
from offload.engine.job import Job
from offload.engine.request import Request
from offload.engine.sequence import PassFigures, TokenLogprob
from offload.engine.text_stream import TokenPieces, special_tokens
from offload.engine.tokenizer import Tokenizer
from offload.server.bodies import Body, ChatBody
from offload.server.refusals import refuse_closing
from offload.words.calls import JsonCalls
from offload.words.parts import Call, Part, Text, Thought, schemas_of
from offload.words.reader import PartReader, TaggedReader

_END_TOKENS = 16  # of a prompt, which tell whether it begins a thought
_LEAST = -9999.0  # in place of minus infinity, which JSON has no word for


class TokenNames:
    """What the tokens of one vocabulary are called, but for those that end a text."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)
        self._end_ids = end_ids | turn_end_ids(tokenizer)
        self._specials = {*special_tokens(tokenizer).values()}
        # a tree has hundreds of tokens, and passes have trees
        self.text = lru_cache(maxsize=1 << 14)(self._pieces.text)

    def reader(self, body: ChatBody, request: Request) -> PartReader:
        """Return what reads an answer to a request, which was prepared, in the model's own form."""
        offered = schemas_of(body.offered_tools)
        if body.is_call_forced:
            # a grammar keeps its form
            return TaggedReader(None, JsonCalls("", ""), offered)
        ids: Any = request.prompt
        prompt_end = self._tokenizer.decode(ids[-_END_TOKENS:]) if self._tokenizer else ""
        return words_of(self._tokenizer).reader(offered, prompt_end, self._specials)

    def of_chat(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return `TokenLogprob`s as chat completions have them."""
        told = []
        for one in logprobs:
            if one.token not in self._end_ids:
                top = [self._named(*pair) for pair in one.top]
                told.append({**self._named(one.token, one.logprob), "top_logprobs": top})
        return told

    def of_completion(self, logprobs: Sequence[TokenLogprob], num_chars: int) -> dict[str, Any]:
        """Return `TokenLogprob`s as plain completions have them, behind so many characters."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        told: dict[str, list[Any]] = {name: [] for name in names}
        for one in logprobs:
            if one.token not in self._end_ids:
                text = self.text(one.token)
                told["tokens"].append(text)
                told["token_logprobs"].append(_finite(one.logprob))
                top = {self.text(token): _finite(number) for token, number in one.top}
                told["top_logprobs"].append(top)
                told["text_offset"].append(num_chars)
                num_chars += len(text)
        return told

    def of_pass(self, passed: PassFigures) -> dict[str, Any]:
        """Return what a pass did, for the page: its tree with texts, and what it took."""
        return {
            "parents": passed.parents,
            "tokens": [self.text(token) for token in passed.tokens],
            "accepted": passed.accepted,
            "num_texts": passed.num_texts,
            "draft_s": passed.draft_s,
            "sweep_s": passed.sweep_s,
            "stall_s": passed.moved.stall_s,
            "num_bytes": passed.moved.num_bytes,
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        added = list(self._pieces.bytes_of(token))
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": added}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


_FINGERPRINT = f"offload-{__version__}"


class Answer:
    """An answer to a request, a choice for each of its jobs; asking for an end raises what ended
    it.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, body: Body, jobs: Sequence[Job], names: TokenNames, model_id: str) -> None:
        self._body = body
        self.jobs = jobs
        self._names = names
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_id,
            "system_fingerprint": _FINGERPRINT,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before anything was written."""
        return []

    def chunks(self, index: int, piece: TextPiece | None) -> list[dict[str, Any]]:
        """Return the chunks for what a text has gained, or for its end."""
        if piece is None:
            return [self._chunk([one]) for one in self._last(index, self._result(index))]
        passed = piece.last_pass if self._body.tells_passes else None
        choice = self._next(index, piece, may_be_silent=passed is None)
        if choice is None:
            return []
        chunk = self._chunk([choice])
        if passed is not None:
            chunk["offload"] = self._names.of_pass(passed)
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        """Return the chunks behind the end of all texts."""
        if not self._body.has_usage_chunk:
            return []
        return [self._chunk([]) | {"usage": self._usage()}]

    def whole(self) -> dict[str, Any]:
        """Return everything at once, when all texts have ended."""
        choices = [self._choice(index, self._result(index)) for index in range(len(self.jobs))]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.has_usage_chunk else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def _result(self, index: int) -> Generation:
        result = self.jobs[index].result()
        if result.finish_reason == "interrupted":  # and not by the client, who is here
            raise refuse_closing()
        return result

    def _usage(self) -> dict[str, Any]:
        results = [self._result(index) for index in range(len(self.jobs))]
        # of each prompt; its other choices have read the same
        firsts = results[:: self._body.num_choices]
        num_prompt = sum(one.stats.num_prompt_tokens for one in firsts)
        num_new = sum(len(one.token_ids) for one in results)
        num_cached = sum(one.stats.num_kept_tokens for one in firsts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _next(self, index: int, piece: TextPiece, *, may_be_silent: bool) -> dict[str, Any] | None:
        """Return the choice of a piece; None where nothing is to be said, and that may be."""
        raise NotImplementedError

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, body: ChatBody, jobs: Sequence[Job], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, jobs, names, model_id)
        self._readers = [names.reader(body, job.request) for job in jobs]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in jobs]
        self._has_logprobs = bool(body.logprobs)

    def opening(self) -> list[dict[str, Any]]:
        """Return who speaks, in every choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._delta(index, delta)]) for index in range(len(self.jobs))]

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _next(self, index: int, piece: TextPiece, *, may_be_silent: bool) -> dict[str, Any] | None:
        thoughts, text = self._words(index, self._readers[index].push(piece.segments))
        logprobs = self._logprobs(piece.logprobs)
        if may_be_silent and not text and not thoughts and not logprobs:
            return None
        delta = {"content": text} if text or not thoughts else {}
        delta |= {"reasoning_content": thoughts} if thoughts else {}
        return self._delta(index, delta, logprobs=logprobs)

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        thoughts, text = self._words(index, self._readers[index].finish())
        choices = [self._delta(index, {"reasoning_content": thoughts})] if thoughts else []
        choices += [self._delta(index, {"content": text})] if text else []
        calls = self._calls[index]
        for position, call in enumerate(calls):
            choices.append(self._delta(index, {"tool_calls": [{"index": position, **call}]}))
        return [*choices, self._delta(index, {}, "tool_calls" if calls else result.finish_reason)]

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        reader = self._readers[index]
        parts = [*reader.push(result.segments), *reader.finish()]
        thoughts, content = self._words(index, parts)
        calls = self._calls[index]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if thoughts:
            message["reasoning_content"] = thoughts
        reason = "tool_calls" if calls else result.finish_reason
        logprobs = self._logprobs(result.logprobs or ())
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _words(self, index: int, parts: Sequence[Part]) -> tuple[str, str]:
        """Return thoughts and text of some parts; calls are kept for the end."""
        for part in parts:
            if isinstance(part, Call):
                function = {"name": part.name, "arguments": part.arguments}
                call = {"id": part.key, "type": "function", "function": function}
                self._calls[index].append(call)
        thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
        return thoughts, "".join(part.text for part in parts if isinstance(part, Text))

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        content = self._names.of_chat(logprobs) if self._has_logprobs else []
        return {"content": content, "refusal": None} if content else None


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: Body, jobs: Sequence[Job], names: TokenNames, model_id: str) -> None:
        super().__init__(body, jobs, names, model_id)
        self._num_chars = [0] * len(jobs)

    def _text(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        told = self._names.of_completion(logprobs, self._num_chars[index]) if logprobs else None
        self._num_chars[index] += sum(map(len, told["tokens"])) if told else 0
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}

    def _next(self, index: int, piece: TextPiece, *, may_be_silent: bool) -> dict[str, Any] | None:
        if may_be_silent and not piece.text and not piece.logprobs:
            return None
        return self._text(index, piece.text, logprobs=piece.logprobs)

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        return [self._text(index, "", result.finish_reason)]

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        return self._text(index, result.text, result.finish_reason, result.logprobs or ())
