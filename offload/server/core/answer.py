"""Answers while they grow: the gains of a request's texts, in a protocol's form.

`Answer` has what all protocols share, `BlockAnswer` what those do whose answers are lists of
blocks. `TokenNames` describes single tokens: a token's text may be half a character, but its bytes
are exact.

Invariant: the events of a stream, put together, are the answer that is sent whole.
"""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

from offload.engine.conversation import turn_end_ids, words_of
from offload.engine.generation import Generation, OutputDelta
from offload.engine.job import Job
from offload.engine.request import Request
from offload.engine.text_stream import TokenPieces, special_tokens
from offload.engine.tokenizer import Tokenizer
from offload.server.core.body import Body
from offload.server.core.failures import refuse_closing
from offload.server.core.refusals import Refusal
from offload.server.core.tools import Toolbox
from offload.words.calls import JsonCalls
from offload.words.parts import Call, Part, Text, Thought
from offload.words.reader import PartReader, TaggedReader


class Event(NamedTuple):
    """One server-sent event: its name, and an object or a text as data.

    An empty name is not sent: OpenAI's older streams have none.
    """

    name: str
    data: Mapping[str, Any] | str

    def encoded(self) -> bytes:
        """Return the event as server-sent events have it, in UTF-8."""
        data = self.data
        if not isinstance(data, str):
            data = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        name = f"event: {self.name}\n" if self.name else ""
        return f"{name}data: {data}\n\n".encode()


_END_TOKENS = 16  # of a prompt, which tell whether it begins a thought


class TokenNames:
    """The texts and bytes of one vocabulary's tokens."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)
        # end tokens, which are no part of the text
        self.end_ids = end_ids | turn_end_ids(tokenizer)
        self._specials = {*special_tokens(tokenizer).values()}
        # a tree has hundreds of tokens, and names are asked for in every pass
        self.text = lru_cache(maxsize=1 << 14)(self._pieces.text)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of several tokens, special ones included."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode([*ids], clean_up_tokenization_spaces=False))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._pieces.bytes_of(token)

    def reader(self, toolbox: Toolbox, request: Request) -> "AnswerReader":
        """Return a reader of answers to a prepared request, in the model's own form."""
        if toolbox.is_forced:
            # a grammar keeps its form
            reader: PartReader = TaggedReader(None, JsonCalls("", ""), toolbox.offered)
        else:
            ids: Any = request.prompt
            prompt_end = self._tokenizer.decode(ids[-_END_TOKENS:]) if self._tokenizer else ""
            words = words_of(self._tokenizer)
            reader = words.reader(toolbox.offered, prompt_end, self._specials)
        return AnswerReader(reader, toolbox.is_parallel)


class AnswerReader:
    """Reads the parts of one answer; where calls may not be parallel the first one is all."""

    def __init__(self, reader: PartReader, is_parallel: bool) -> None:
        self._reader = reader
        self._is_parallel = is_parallel
        self._has_called = False

    def push(self, segments: Iterable[str]) -> list[Part]:
        """Return the parts that have become certain."""
        return self._kept(self._reader.push(segments))

    def finish(self, result: Generation) -> list[Part]:
        """Return the parts that are left at an answer's end."""
        return self._kept(self._reader.finish(is_cut=result.finish_reason == "length"))

    def _kept(self, parts: Sequence[Part]) -> list[Part]:
        kept = list[Part]()
        for part in parts:
            if not (self._has_called and isinstance(part, Call)) or self._is_parallel:
                kept.append(part)
            self._has_called = self._has_called or isinstance(part, Call)
        return kept


class Answer:
    """An answer to a request, with a text for each of its jobs; asking for the end of a text raises
    what ended it.
    """

    def __init__(self, body: Body, jobs: Sequence[Job], names: TokenNames, model_id: str) -> None:
        self.jobs = jobs
        self._names = names

    def opening(self) -> list[Event]:
        """Return the events before the first text."""
        return []

    def events(self, index: int, piece: OutputDelta | None) -> list[Event]:
        """Return the events for a text's gain, or for its end."""
        raise NotImplementedError

    def closing(self) -> list[Event]:
        """Return the events after the end of all texts."""
        return []

    def failed(self, refusal: Refusal) -> list[Event]:
        """Return the events that end a stream after an error."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once all texts have ended."""
        raise NotImplementedError

    def _result(self, index: int) -> Generation:
        result = self.jobs[index].result()
        if result.finish_reason == "interrupted":  # and not by the client, who is here
            raise refuse_closing()
        return result

    def _num_prompt(self, index: int = 0) -> int:
        """Return the number of a prompt's tokens, which is known from the beginning."""
        ids: Any = self.jobs[index].request.prompt
        return len(ids)


class BlockAnswer(Answer):
    """An answer of one text, as a list of blocks: parts of a kind that follow each other are one.

    The whole answer is built from the events.
    """

    def __init__(self, body: Body, jobs: Sequence[Job], names: TokenNames, model_id: str) -> None:
        super().__init__(body, jobs, names, model_id)
        self._reader = names.reader(body.toolbox(), jobs[0].request)
        # the kind of the block that is not closed yet
        self._kind: type[Part] | None = None
        self._has_calls = False

    def events(self, index: int, piece: OutputDelta | None) -> list[Event]:
        """Return the events for a piece, or for the end."""
        if piece is not None:
            return self._part_events(self._reader.push(piece.segments))
        return self._ended(self._result(index))

    def whole(self) -> dict[str, Any]:
        """Return everything at once."""
        result = self._result(0)
        self._part_events(self._reader.push(result.segments))
        self._ended(result)
        return self._final_body(result)

    def _ended(self, result: Generation) -> list[Event]:
        events = self._part_events(self._reader.finish(result))
        return [*events, *self._closed(), *self._end(result)]

    def _part_events(self, parts: Sequence[Part]) -> list[Event]:
        """Return events for parts; a part of another kind closes the open block."""
        events = list[Event]()
        for part in parts:
            if isinstance(part, Call):
                self._has_calls = True
            if isinstance(part, Call) or not isinstance(part, self._kind or ()):
                events += self._closed()
                self._kind = type(part)
                events += self._open(part)
            if isinstance(part, Text | Thought):
                events += self._grow(part)
        return events

    def _closed(self) -> list[Event]:
        """Close the block that is open, if any is."""
        events = self._close() if self._kind is not None else []
        self._kind = None
        return events

    def _open(self, part: Part) -> list[Event]:
        """Begin a block; a call is whole with it."""
        raise NotImplementedError

    def _grow(self, part: Text | Thought) -> list[Event]:
        """Add to the block that is open."""
        raise NotImplementedError

    def _close(self) -> list[Event]:
        """End the block that is open."""
        raise NotImplementedError

    def _end(self, result: Generation) -> list[Event]:
        """Return the reason and the end of the answer."""
        raise NotImplementedError

    def _final_body(self, result: Generation) -> dict[str, Any]:
        """Return the answer as the events have told it."""
        raise NotImplementedError
