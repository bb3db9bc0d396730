"""A conversation with a decoder: every turn is one run that keeps the keys and values of what was said before.

The chat template is applied to all messages, and kept are as many positions as its tokens share with what the caches
hold, so a turn's tokens are those of a fresh decoder on the whole conversation. Invariant: messages are what was said;
a question that got no token in reply is forgotten.
"""

from collections.abc import Generator
from dataclasses import replace

from offload.config import Sampling, require
from offload.engine.decoder import Decoder
from offload.engine.generation import Run
from offload.engine.request import Request
from offload.errors import UserError

_GREETING = {"role": "user", "content": "Hello"}  # what is wrong with it is wrong with every question
_INCOMPLETE = "\ufffd"  # a character that an answer was cut short in


class Chat:
    """One conversation. Ask it; iterate over what it gives for pieces of the answer.

    Args:
        decoder: of a model with a chat template. Other runs of it in between cost time, nothing else.
        sampling: the turn with number t, from 0 on, draws with its seed plus t.
        system: what the model is told before the first question, where its template knows such a thing.
        max_new_tokens: of one answer; None is as many as there is room for.

    Raises `UserError` for a model without a chat template, and for settings out of range.

    Attributes:
        messages: what was said so far, the system prompt included.
        turn: the one under way, or the last one; `turn.result()` has its figures.
    """

    def __init__(
        self, decoder: Decoder, sampling: Sampling | None = None, *,
        system: str | None = None, max_new_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self._sampling = decoder, Sampling() if sampling is None else sampling
        require(system is None or isinstance(system, str), "`system` must be text", f"{system!r:.80}", "leave it out")
        Request(sampling=self._sampling, max_new_tokens=0 if max_new_tokens is None else max_new_tokens).check()
        self._max_new_tokens = decoder.plan.context if max_new_tokens is None else max_new_tokens
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages, self._num_turns = list(self._opening), 0
        self.turn: Run | None = None
        decoder.encode([*self.messages, _GREETING])

    def __repr__(self) -> str:
        num_asked = sum(message["role"] == "user" for message in self.messages)
        system = f", told {self._opening[0]['content'][:40]!r}" if self._opening else ""
        return f"Chat(questions asked: {num_asked}{system}, {self._sampling})"

    def clear(self) -> None:
        """Begin anew, with the system prompt alone."""
        self.messages = list(self._opening)

    def ask(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer as they are accepted; where iterating ends early, what there is counts as the answer.

        Raises `UserError` where the conversation fills the context.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        self.turn = self._begin(asked)
        return self._answer(self.turn, asked)

    def _begin(self, messages: list[dict[str, str]]) -> Run:
        ids, context = self._decoder.encode(messages), self._decoder.plan.context
        if len(ids) >= context:
            raise UserError(
                f"the conversation has {len(ids)} tokens, the context {context}: "
                f"begin anew with /clear{'' if self._decoder.plan.has_longest_context else ', or raise `context`'}"
            )
        sampling = replace(self._sampling, seed=self._sampling.seed + self._num_turns)
        num_new = min(self._max_new_tokens, context - len(ids))
        run = self._decoder.run(ids, sampling, max_new_tokens=num_new, continues=True)
        self._num_turns += 1
        return run

    def _answer(self, run: Run, asked: list[dict[str, str]]) -> Generator[str, None, None]:
        try:
            yield from run
        finally:
            result = run.result()
            if result.token_ids:
                self.messages = [*asked, {"role": "assistant", "content": result.text.rstrip(_INCOMPLETE)}]
