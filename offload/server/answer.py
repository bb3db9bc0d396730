"""An answer in the making: what the texts of a request have gained, in OpenAI's words.

`Answer` has what chat and plain completions share, with a subclass for each. `ToolCalls` finds
calls of tools in what a model writes, in the forms that common models were taught: Hermes and Qwen
write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 an answer that is one such
object (with `parameters`), Mistral a list of them. `TokenNames` tells of single tokens: a token's
text alone may be half a character, its bytes are exact.

`arrivals` brings pieces of texts from the engine's thread into the server's loop. A stream is
server-sent events: chunks of an answer, comments while there are none, and the end. An error that
comes too late for a status is an event of its own, and then the stream has no `[DONE]`.

Invariants: the chunks of a stream, put together, are the choices of the answer that is sent whole.
Text that turns out to be no call is handed out as text. A client that is gone cancels what it has
asked for: hanging up, a cancelled task and an error leave by one door, which cancels every ticket.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import aclosing
from functools import lru_cache
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offload import __version__
from offload.engine.generation import Generation
from offload.engine.job import TextPiece, Ticket
from offload.engine.sequence import PassFigures, TokenLogprob
from offload.engine.text import Tokenizer, TokenPieces
from offload.server.protocol import Body, ChatBody, refusal_of, refuse_closing

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class ToolCalls:
    """Finds calls of tools in one answer, piece by piece; without tools all is text."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._held = ""
        self._is_begun = False
        self._calls: list[dict[str, Any]] = []

    def push(self, piece: str) -> str:
        """Return text that is no part of a call, as far as that is certain."""
        if not self._is_wanted:
            return piece
        self._held += piece
        if not self._is_begun and self._held.lstrip()[:1] in ("{", "[", ""):
            return ""  # it may be a call as a whole; at the end that is known
        self._is_begun = True
        said = ""
        while _OPEN in self._held:
            before, _, rest = self._held.partition(_OPEN)
            inner, close, after = rest.partition(_CLOSE)
            said += before
            self._held = _OPEN + rest
            if not close:
                return said
            said += self._call_or_text(inner, _OPEN + inner + _CLOSE)
            self._held = after
        # a tag may begin with the last of them
        begun = (size for size in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:size]))
        certain = len(self._held) - next(begun, 0)
        said = said + self._held[:certain]
        self._held = self._held[certain:]
        return said.rstrip() if self._calls and not said.strip() else said

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return what is left of the text, and all calls."""
        held = self._held
        self._held = ""
        if not self._is_wanted or not held:
            return held, self._calls
        inner = held.removeprefix(_OPEN)  # some leave the closing tag out
        return self._call_or_text(inner, held), self._calls

    def _call_or_text(self, inner: str, whole: str) -> str:
        found = _read(inner)
        self._calls += found
        return "" if found else whole


def _read(text: str) -> list[dict[str, Any]]:
    """Return the calls in a text that is one, or a list of them; none where it is anything else."""
    try:
        value = json.loads(text)
        calls = []
        for one in value if isinstance(value, list) else [value]:
            name = one["name"]
            arguments = one["arguments"] if "arguments" in one else one["parameters"]
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return []
            told = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            key = f"call_{secrets.token_hex(12)}"
            calls.append({"id": key, "type": "function", "function": told})
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return calls


_LEAST = -9999.0  # in place of minus infinity, which JSON has no word for


class TokenNames:
    """What the tokens of one vocabulary are called, but for those that end a text."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Set[int]) -> None:
        self._pieces = TokenPieces(tokenizer)
        self._end_ids = end_ids
        # a tree has hundreds of tokens, and passes have trees
        self.text = lru_cache(maxsize=1 << 14)(self._pieces.text)

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

    def told(self, passed: PassFigures) -> dict[str, Any]:
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
    """An answer to a request, a choice for each ticket; asking for an end raises what ended it."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(
        self, body: Body, tickets: Sequence[Ticket], names: TokenNames, model_id: str
    ) -> None:
        self._body = body
        self._tickets = tickets
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
        passed = piece.last_pass if self._body.extension.passes else None
        choice = self._next(index, piece, may_be_silent=passed is None)
        if choice is None:
            return []
        chunk = self._chunk([choice])
        if passed is not None:
            chunk["offload"] = self._names.told(passed)
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        """Return the chunks behind the end of all texts."""
        if not self._body.has_usage_chunk:
            return []
        return [self._chunk([]) | {"usage": self._usage()}]

    def whole(self) -> dict[str, Any]:
        """Return everything at once, when all texts have ended."""
        choices = [self._choice(index, self._result(index)) for index in range(len(self._tickets))]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.has_usage_chunk else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def _result(self, index: int) -> Generation:
        result = self._tickets[index].result()
        if result.finish_reason == "interrupted":  # and not by the client, who is here
            raise refuse_closing()
        return result

    def _usage(self) -> dict[str, Any]:
        results = [self._result(index) for index in range(len(self._tickets))]
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
        self, body: ChatBody, tickets: Sequence[Ticket], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, tickets, names, model_id)
        self._calls = [ToolCalls(is_wanted=bool(body.tools_told)) for _ in tickets]
        self._has_logprobs = bool(body.logprobs)

    def opening(self) -> list[dict[str, Any]]:
        """Return who speaks, in every choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._delta(index, delta)]) for index in range(len(self._tickets))]

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _next(self, index: int, piece: TextPiece, *, may_be_silent: bool) -> dict[str, Any] | None:
        text = self._calls[index].push(piece.text)
        told = self._told(piece.logprobs)
        if may_be_silent and not text and not told:
            return None
        return self._delta(index, {"content": text}, logprobs=told)

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
    """An answer of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, body: Body, tickets: Sequence[Ticket], names: TokenNames, model_id: str
    ) -> None:
        super().__init__(body, tickets, names, model_id)
        self._num_chars = [0] * len(tickets)

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


class ClientGone(Exception):  # noqa: N818
    """The client does not wait for the answer any more."""


async def arrivals(
    tickets: Sequence[Ticket], receive: Receive, every_s: float | None = None
) -> AsyncGenerator[tuple[int, TextPiece | None] | None]:
    """Yield the number of a ticket with its next piece, or with None at its end, until all ended.

    None alone comes at once, and whenever nothing has come for so long. Closing this cancels every
    ticket. Raises `ClientGone`, of which `receive` tells once the body was read.
    """
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    watch = asyncio.create_task(_until_gone(receive))
    watch.add_done_callback(lambda _: came.set())

    def tell() -> None:
        # in the engine's thread, which may outlive the loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(came.set)

    try:
        for ticket in tickets:
            ticket.listen(tell)
        # from here on closing cancels them, also where no piece is ever taken
        yield None
        left = dict(enumerate(tickets))
        while left:
            came.clear()
            for index, ticket in list(left.items()):
                # before its pieces are taken, so that none comes behind the end
                is_done = ticket.is_done
                for piece in ticket.take():
                    yield index, piece
                if is_done:
                    del left[index]
                    yield index, None
            if left and not watch.done():
                try:
                    async with asyncio.timeout(every_s):
                        await came.wait()
                except TimeoutError:
                    yield None
            if watch.done():
                raise ClientGone
    finally:
        watch.cancel()
        for ticket in tickets:
            ticket.cancel()
            ticket.listen(None)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ALIVE = b": waiting\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """An answer, chunk by chunk.

    Args:
        keep_alive_s: without a chunk, after which a comment is sent.
        on_error: hears of errors that the client is told.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        tickets: Sequence[Ticket],
        headers: Mapping[str, str],
        *,
        keep_alive_s: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._answer = answer
        self._tickets = tickets
        self._keep_alive_s = keep_alive_s
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, unless the client goes first."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        try:
            pieces = arrivals(self._tickets, receive, self._keep_alive_s)
            async with aclosing(pieces), aclosing(self._events(pieces)) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(
        self, pieces: AsyncIterator[tuple[int, TextPiece | None] | None]
    ) -> AsyncGenerator[bytes]:
        opening = self._answer.opening()
        try:
            async for arrival in pieces:
                if arrival is None:
                    # also at once: a pass takes seconds, and a client that waits for a place wants
                    # to know that it does
                    yield ALIVE
                for chunk in opening if arrival is None else self._answer.chunks(*arrival):
                    yield _event(chunk)
                opening = []
        except ClientGone:
            raise
        except Exception as error:
            self._on_error(error)
            yield _event(refusal_of(error).as_dict())
            return
        for chunk in self._answer.closing():
            yield _event(chunk)
        yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    told = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    return f"data: {told}\n\n".encode()
