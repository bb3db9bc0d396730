"""A conversation with a decoder: every turn is one run that keeps the keys and values of earlier
turns.

The chat template is applied to all messages, and the positions of all tokens shared with the caches
are kept. So a turn's tokens are those that a fresh decoder would write after the whole
conversation. Invariant: messages are what was said; a question that got no token in reply is
dropped.
"""

import os
from collections.abc import Generator, Sequence

from offload.engine.conversation import words_of
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.engine.text_stream import special_tokens
from offload.errors import UserError, require
from offload.interrupts import held_back
from offload.sampling_options import Sampling
from offload.words.parts import FramedText, Text, Thought
from offload.words.reader import PartReader

# a sample question: what makes it fail makes every question fail
_GREETING = {"role": "user", "content": "Hello"}
_END_TOKENS = 16  # tokens at a prompt's end that tell whether it begins a thought
_INCOMPLETE = "\ufffd"  # end of an answer that was cut short within a character


class Chat:
    """One conversation. Ask it, and iterate over the pieces of the answer.

    Args:
        decoder: its model has a chat template. Other runs in between cost time, nothing else.
        sampling: turn t, counted from 0, draws with its seed plus t.
        system: system prompt, if the chat template has one.
        max_new_tokens: of one answer; None for as many as there is room for.
        stop: strings that end an answer; they are not part of it.
        think: whether the model is to think before it answers; None leaves it to its template.

    Raises `UserError` for a model without a chat template, and for settings out of range.

    Attributes:
        messages: what was said so far, the system prompt included.
        turn: the current run, or the last one; `turn.result()` has its figures.
        sampling, max_new_tokens, stop, think: of later turns; they may be set.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        think: bool | None = None,
    ) -> None:
        self._decoder = decoder
        self.sampling = Sampling() if sampling is None else sampling
        requirement = "`system` must be text"
        require(
            system is None or isinstance(system, str),
            requirement,
            f"{system!r:.80}",
            "leave it out",
        )
        num_new = 0 if max_new_tokens is None else max_new_tokens
        Request(sampling=self.sampling, max_new_tokens=num_new, stop=stop, think=think).check()
        self.max_new_tokens = max_new_tokens
        self.stop = stop
        self.think = think
        self.messages = _opening(system)
        self._num_turns = 0
        self.turn: Run | None = None
        decoder.encode([*self.messages, _GREETING], think=think)

    def __repr__(self) -> str:
        num_asked = sum(message["role"] == "user" for message in self.messages)
        system = f", told {self.system[:40]!r}" if self.system else ""
        return f"Chat(questions asked: {num_asked}{system}, {self.sampling})"

    @property
    def system(self) -> str | None:
        """Return the system prompt; setting it keeps the rest."""
        is_there = bool(self.messages) and self.messages[0]["role"] == "system"
        return self.messages[0]["content"] if is_there else None

    @system.setter
    def system(self, text: str | None) -> None:
        self.messages = [*_opening(text), *self.messages[self.system is not None :]]

    def clear(self) -> None:
        """Begin again, keeping only the system prompt."""
        self.messages = _opening(self.system)

    def undo(self) -> str:
        """Remove the last question with its answer; return it. Raises `UserError` if there is none."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise UserError("nothing was asked yet: ask something first")
        question = self.messages[asked[-1]]["content"]
        self.messages = self.messages[: asked[-1]]
        return question

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield pieces of the answer as they are accepted.

        If iterating ends early, the text so far counts as the answer. Raises `UserError` if the
        conversation fills the context.
        """
        return self._begin([*self.messages, {"role": "user", "content": question}])

    def retry(self) -> Generator[str, None, None]:
        """Ask the last question once more, as `ask` does; its answer stays until the next."""
        before = self.messages
        question = self.undo()
        asked = [*self.messages, {"role": "user", "content": question}]
        self.messages = before
        return self._begin(asked)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the conversation, with keys and values, to a file. Raises `UserError`."""
        self._decoder.save_session(path, self.messages, self._num_turns)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue a conversation from a file, system prompt included, without reading it again.

        Raises `UserError` for files that `Decoder.load_session` refuses, and for those of a text.
        """
        session = self._decoder.load_session(path)
        if session.messages is None:
            raise UserError(
                f"{path} holds a text and no conversation: go on with it by offload generate "
                f"--session"
            )
        self._decoder.encode([*session.messages, _GREETING])
        self.messages = session.messages
        self._num_turns = session.num_turns

    def _begin(self, asked: list[dict[str, str]]) -> Generator[str, None, None]:
        """Begin the answer to a conversation. Raises `UserError` if it outgrows the context."""
        ids = self._decoder.encode(asked, think=self.think)
        context = self._decoder.plan.context
        if len(ids) >= context:
            remedy = "" if self._decoder.plan.has_longest_context else ", or raise `context`"
            raise UserError(
                f"the conversation has {len(ids)} tokens, the context {context}: "
                f"begin anew with /clear{remedy}"
            )
        sampling = self.sampling.later(self._num_turns)
        num_new = context if self.max_new_tokens is None else self.max_new_tokens
        request = Request(ids, sampling, num_new, stop=self.stop, is_clipped=True, is_answer=True)
        self.turn = self._decoder.start(request, continues=True)
        self._num_turns += 1
        return self._answer(self.turn, asked)

    def _answer(self, run: Run, asked: list[dict[str, str]]) -> Generator[str, None, None]:
        """Yield the answer's pieces, and add it to the messages however it ends."""
        try:
            if (reader := self._reader(run)) is None:
                yield from run
            else:
                framed = FramedText()
                for piece in run.pieces():
                    yield framed.push(reader.push(piece.segments))
                yield framed.push(reader.finish())
        finally:
            # Ctrl-C at this moment would else lose both
            with held_back():
                result = run.result()
                if result.token_ids:
                    self.messages = [*asked, self._answer_message(run, result)]

    def _reader(self, run: Run) -> PartReader | None:
        """Return a reader that separates thoughts and channels that special tokens mark.

        Other marks are part of the text, and stay there.
        """
        tokenizer = self._decoder.tokenizer
        words = words_of(tokenizer)
        specials = {*special_tokens(tokenizer).values()}
        is_marked = words.thoughts is not None and words.thoughts.opening in specials
        if tokenizer is None or not (is_marked or words.is_harmony):
            return None
        prompt = run.sequence.tokens[: run.sequence.num_prompt_tokens]
        return words.reader({}, tokenizer.decode(prompt[-_END_TOKENS:]), specials)

    def _answer_message(self, run: Run, result: Generation) -> dict[str, str]:
        """Return the message of an answer."""
        if (reader := self._reader(run)) is None:
            return {"role": "assistant", "content": result.text.rstrip(_INCOMPLETE)}
        parts = [*reader.push(result.segments), *reader.finish()]
        content = "".join(part.text for part in parts if isinstance(part, Text))
        thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
        reasoning = {"reasoning_content": thoughts} if thoughts else {}
        return {"role": "assistant", "content": content.rstrip(_INCOMPLETE), **reasoning}


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []
