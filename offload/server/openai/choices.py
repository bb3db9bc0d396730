"""Answers of chat and of plain completions: choices that grow by chunks.

Invariant: the chunks of a stream, put together, are the choices of the answer that is sent whole.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from offload import __version__
from offload.engine.generation import Generation, OutputDelta
from offload.engine.job import Job
from offload.engine.sequence import StepMetrics, TokenLogprob
from offload.server.core.answer import Answer, Event, TokenNames
from offload.server.core.refusals import Refusal
from offload.server.error_forms import openai_error
from offload.server.openai.bodies import ChatBody, ChoicesBody, CompletionBody
from offload.words.parts import Call, Part, Text, Thought

_LOGPROB_FIELDS = (
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
)  # of plain completions
_LEAST = -9999.0  # in place of minus infinity, which JSON has no word for


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return `TokenLogprob`s as chat completions and responses have them."""
    tokens = []
    for drawn in logprobs:
        if drawn.token not in names.end_ids:
            top = [_named(names, *pair) for pair in drawn.top]
            tokens.append({**_named(names, drawn.token, drawn.logprob), "top_logprobs": top})
    return tokens


def completion_logprobs(
    names: TokenNames, logprobs: Sequence[TokenLogprob], num_chars: int, *, has_ends: bool = False
) -> dict[str, Any]:
    """Return `TokenLogprob`s as plain completions have them, behind `num_chars` characters.

    `has_ends` includes tokens that end a text.
    """
    columns = _no_columns()
    for drawn in logprobs:
        if has_ends or drawn.token not in names.end_ids:
            num_chars = _add_token(columns, names, drawn.token, num_chars)
            columns["token_logprobs"].append(_finite(drawn.logprob))
            columns["top_logprobs"].append(_likeliest(names, drawn))
    return columns


def prompt_logprobs(
    names: TokenNames, first: int, logprobs: Sequence[TokenLogprob]
) -> tuple[dict[str, Any], int]:
    """Return the tokens of a prompt in the same form, and their number of characters.

    The first has no log-probability: nothing comes before it.
    """
    columns = _no_columns()
    num_chars = _add_token(columns, names, first, 0)
    columns["token_logprobs"].append(None)
    columns["top_logprobs"].append(None)
    for name, values in completion_logprobs(names, logprobs, num_chars, has_ends=True).items():
        columns[name] += values
    return columns, sum(map(len, columns["tokens"]))


def _no_columns() -> dict[str, list[Any]]:
    return {field: [] for field in _LOGPROB_FIELDS}


def _add_token(columns: dict[str, list[Any]], names: TokenNames, token: int, num_chars: int) -> int:
    """Add a token that begins there; return where it ends."""
    text = names.text(token)
    columns["tokens"].append(text)
    columns["text_offset"].append(num_chars)
    return num_chars + len(text)


def _likeliest(names: TokenNames, drawn: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens by their texts; of several with one text the likeliest."""
    top: dict[str, float] = {}
    for token, number in drawn.top:
        top.setdefault(names.text(token), _finite(number))
    return top


def _named(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    raw = list(names.bytes_of(token))
    return {"token": names.text(token), "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


_FINGERPRINT = f"offload-{__version__}"
_DONE = Event("", "[DONE]")


class ChoicesAnswer(Answer):
    """An answer with a choice for each of its jobs."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(
        self, body: ChoicesBody, jobs: Sequence[Job], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, jobs, names, model_id)
        self._body = body
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_id,
            "system_fingerprint": _FINGERPRINT,
        }

    def events(self, index: int, piece: OutputDelta | None) -> list[Event]:
        """Return the chunks for what a text has gained, or for its end."""
        if piece is None:
            last = self._last(index, self._result(index))
            return [self._chunk([choice]) for choice in last]
        passed = piece.last_pass if self._body.tells_passes else None
        choice = self._next(index, piece, may_be_silent=passed is None)
        if choice is None:
            return []
        extension = {} if passed is None else {"offload": _pass_dict(self._names, passed)}
        return [self._chunk([choice], extension)]

    def closing(self) -> list[Event]:
        """Return the chunks after the end of all texts."""
        if not self._body.has_usage_chunk:
            return [_DONE]
        return [self._chunk([], {"usage": self._usage()}), _DONE]

    def failed(self, refusal: Refusal) -> list[Event]:
        """Return the error as an event; such a stream has no `[DONE]`."""
        return [Event("", openai_error(refusal))]

    def whole(self) -> dict[str, Any]:
        """Return everything at once, when all texts have ended."""
        choices = [self._choice(index, self._result(index)) for index in range(len(self.jobs))]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _chunk(
        self, choices: list[dict[str, Any]], extension: Mapping[str, Any] | None = None
    ) -> Event:
        usage = {"usage": None} if self._body.has_usage_chunk else {}
        head = {**self._head, "object": self.chunk_kind}
        return Event("", {**head, "choices": choices, **usage, **(extension or {})})

    def _usage(self) -> dict[str, Any]:
        """Return the counts of tokens; a prompt counts once for all its choices."""
        results = [self._result(index) for index in range(len(self.jobs))]
        # the first choice of each prompt; the others share its prompt tokens
        firsts = results[:: self._body.num_choices]
        num_prompt = sum(first.stats.num_prompt_tokens for first in firsts)
        num_new = sum(len(result.token_ids) for result in results)
        num_cached = sum(first.stats.num_kept_tokens for first in firsts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _next(
        self, index: int, piece: OutputDelta, *, may_be_silent: bool
    ) -> dict[str, Any] | None:
        """Return the choice of a piece; None if there is nothing to send."""
        raise NotImplementedError

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(ChoicesAnswer):
    """An answer of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, body: ChatBody, jobs: Sequence[Job], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, jobs, names, model_id)
        toolbox = body.toolbox()
        self._readers = [names.reader(toolbox, job.request) for job in jobs]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in jobs]
        self._has_logprobs = bool(body.logprobs)

    def opening(self) -> list[Event]:
        """Return the role, in every choice."""
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

    def _next(
        self, index: int, piece: OutputDelta, *, may_be_silent: bool
    ) -> dict[str, Any] | None:
        thoughts, text = self._words(index, self._readers[index].push(piece.segments))
        logprobs = self._logprobs(piece.logprobs)
        if may_be_silent and not text and not thoughts and not logprobs:
            return None
        delta = {"content": text} if text or not thoughts else {}
        delta |= {"reasoning_content": thoughts} if thoughts else {}
        return self._delta(index, delta, logprobs=logprobs)

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        thoughts, text = self._words(index, self._readers[index].finish(result))
        choices = [self._delta(index, {"reasoning_content": thoughts})] if thoughts else []
        choices += [self._delta(index, {"content": text})] if text else []
        calls = self._calls[index]
        for position, call in enumerate(calls):
            choices.append(self._delta(index, {"tool_calls": [{"index": position, **call}]}))
        return [*choices, self._delta(index, {}, "tool_calls" if calls else result.finish_reason)]

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        """Return one whole choice of a chat completion."""
        reader = self._readers[index]
        parts = [*reader.push(result.segments), *reader.finish(result)]
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
        """Return thoughts and text of some parts; calls are kept until the end."""
        for part in parts:
            if isinstance(part, Call):
                function = {"name": part.name, "arguments": part.arguments}
                call = {"id": part.key, "type": "function", "function": function}
                self._calls[index].append(call)
        thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
        return thoughts, "".join(part.text for part in parts if isinstance(part, Text))

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        content = chat_logprobs(self._names, logprobs) if self._has_logprobs else []
        return {"content": content, "refusal": None} if content else None


class CompletionAnswer(ChoicesAnswer):
    """An answer of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, body: CompletionBody, jobs: Sequence[Job], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, jobs, names, model_id)
        self._num_chars = [0] * len(jobs)
        self._has_echo = bool(body.echo)
        # texts whose prompt is still to be told before them
        self._unsaid = {*range(len(jobs))} if self._has_echo else set[int]()
        self._prompts = [prompt for prompt in body.prompts for _ in range(body.num_choices)]

    def _text(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        """Return a piece of one choice's text, the first one with the prompt if it is echoed."""
        scored = None
        if index in self._unsaid:
            self._unsaid.remove(index)
            text = self._prompt_text(index) + text
            scored = self._scored_prompt(index)
        first = self._num_chars[index]
        listed = None
        if logprobs:
            listed = completion_logprobs(self._names, logprobs, first, has_ends=self._has_echo)
            self._num_chars[index] += sum(map(len, listed["tokens"]))
        parts = [part for part in (scored, listed) if part]
        whole = {
            name: [value for part in parts for value in part[name]] for name in _LOGPROB_FIELDS
        }
        return {
            "index": index,
            "text": text,
            "logprobs": whole if parts else None,
            "finish_reason": reason,
        }

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index]
        return prompt if isinstance(prompt, str) else self._names.text_of(prompt)

    def _scored_prompt(self, index: int) -> dict[str, Any] | None:
        """Return the tokens of a prompt where it was scored, which are before those of the text."""
        score = self.jobs[index].prompt_score
        if score is None:
            return None
        prompt: Any = self.jobs[index].request.prompt
        columns, self._num_chars[index] = prompt_logprobs(self._names, prompt[0], score.tokens)
        return columns

    def _next(
        self, index: int, piece: OutputDelta, *, may_be_silent: bool
    ) -> dict[str, Any] | None:
        if may_be_silent and not piece.text and not piece.logprobs:
            return None
        return self._text(index, piece.text, logprobs=piece.logprobs)

    def _last(self, index: int, result: Generation) -> list[dict[str, Any]]:
        return [self._text(index, "", result.finish_reason)]

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        return self._text(index, result.text, result.finish_reason, result.logprobs or ())


def _pass_dict(names: TokenNames, passed: StepMetrics) -> dict[str, Any]:
    """Return a pass for the page: its tree with texts, and its times."""
    return {
        "parents": passed.parents,
        "tokens": [names.text(token) for token in passed.tokens],
        "accepted": passed.accepted,
        "num_texts": passed.num_texts,
        "draft_s": passed.draft_s,
        "sweep_s": passed.sweep_s,
        "stall_s": passed.moved.stall_s,
        "num_bytes": passed.moved.num_bytes,
    }
