"""Changes of scores by a model's generation_config.json, as in transformers' `generate`.

transformers' own processors say which tokens may not follow a text, or are made likelier: that is
added to scores. They see the whole text of a row, so a row of a tree has what is right for its own
path. Settings that are no such rule are named in a line (`unheeded`).

Invariant: what is added to a row depends on its past alone.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from offload.errors import UserError, reason
from offload.sampling.adjustments import Adjustment, Send, unchanged

# settings of which none changes what is written here, with the value that does nothing
_UNHEEDED: dict[str, Any] = {
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "force_words_ids": None,
    "guidance_scale": 1,
    "num_beams": 1,
    "penalty_alpha": 0,
    "stop_strings": None,
    "watermarking_config": None,
}
# and of those that choose among tokens that are drawn
_UNHEEDED_DRAWING: dict[str, Any] = {
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "typical_p": 1.0,
}

MakeProcessor = Callable[["TextSize"], LogitsProcessor]


class TextSize(NamedTuple):
    """The sizes of a text that rules depend on: prompt tokens, and the most that may follow."""

    num_prompt: int
    max_new_tokens: int


class ModelRules:
    """The rules of one model's generation_config.json. Raises `UserError` for what makes no sense.

    Args:
        settings: what the file says.
        end_ids: tokens that end a text.
    """

    def __init__(
        self, settings: Mapping[str, Any], end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._settings = {key: value for key, value in settings.items() if value is not None}
        self._ends = sorted(end_ids)
        self._vocab_size = vocab_size
        self._try_out()

    def adjustments(
        self, num_prompt: int, max_new_tokens: int
    ) -> tuple[list[Adjustment], list[Adjustment]]:
        """Return the rules for one text's scores, before and after penalties."""
        size = TextSize(num_prompt, max_new_tokens)
        return self._added("sequence_bias", size), self._later(size)

    def _later(self, size: TextSize) -> list[Adjustment]:
        """Return the adjustments that follow penalties, in transformers' order."""
        adjustments = list[Adjustment]()
        if num := self._settings.get("no_repeat_ngram_size"):
            adjustments.append(NoRepeatedNgrams(int(num)))
        for key in ("bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id"):
            adjustments += self._added(key, size)
        adjustments += self._added("forced_eos_token_id", size)
        decay = self._settings.get("exponential_decay_length_penalty")
        if decay is not None and self._ends:
            adjustments.append(DecayingLength(decay[0], decay[1], self._ends))
        for key in ("suppress_tokens", "begin_suppress_tokens"):
            adjustments += self._added(key, size)
        return adjustments

    @property
    def unheeded(self) -> list[str]:
        """Names of settings that change transformers' texts, but none here."""
        passed_over = dict(_UNHEEDED)
        if self._settings.get("do_sample") is True:
            passed_over |= _UNHEEDED_DRAWING
        given = self._settings
        return [
            key for key, usual in passed_over.items() if given.get(key, usual) not in (usual, 1)
        ]

    @property
    def note(self) -> str:
        """A line for the user on ignored settings; empty if there are none."""
        if not self.unheeded:
            return ""
        names = ", ".join(self.unheeded)
        return f"generation_config.json sets {names}, which changes nothing here"

    def _added(self, key: str, size: TextSize) -> list[Adjustment]:
        """Return the adjustment of a setting in a list, empty where it changes nothing."""
        needs_end = key in ("min_length", "min_new_tokens")
        if self._settings.get(key) in (None, 0, []) and key != "forced_bos_token_id":
            return []
        if key not in self._settings or (needs_end and not self._ends):
            return []
        value = self._settings[key]
        num_seen = None
        if key == "sequence_bias":
            num_seen = _most_seen([tokens for tokens, _ in _sequences(value)])
        if key == "bad_words_ids":
            num_seen = _most_seen(value)
        if key == "suppress_tokens":
            num_seen = 0
        return [AddedScores(self._processor(key)(size), self._vocab_size, num_seen)]

    def _processor(self, key: str) -> MakeProcessor:
        """Return a function of a text's sizes that makes the library's processor of a setting."""
        value = self._settings[key]
        ends: Any = self._ends
        makers: dict[str, MakeProcessor] = {
            "sequence_bias": lambda _: SequenceBiasLogitsProcessor(_sequences(value)),
            "bad_words_ids": lambda _: NoBadWordsLogitsProcessor(value, ends or None),
            "min_length": lambda _: MinLengthLogitsProcessor(value, ends),
            "min_new_tokens": lambda size: MinNewTokensLengthLogitsProcessor(
                size.num_prompt, value, ends
            ),
            "forced_bos_token_id": lambda _: ForcedBOSTokenLogitsProcessor(value),
            "forced_eos_token_id": lambda size: ForcedEOSTokenLogitsProcessor(
                min(size.num_prompt + size.max_new_tokens, sys.maxsize), value
            ),
            "suppress_tokens": lambda _: SuppressTokensLogitsProcessor(value),
            "begin_suppress_tokens": lambda size: SuppressTokensAtBeginLogitsProcessor(
                value, size.num_prompt + self._forced_begin(size)
            ),
        }
        return makers[key]

    def _forced_begin(self, size: TextSize) -> int:
        return int(size.num_prompt == 1 and "forced_bos_token_id" in self._settings)

    def _try_out(self) -> None:
        """Raise `UserError` for values that the processors refuse."""
        try:
            earlier, later = self.adjustments(2, 4)
            for adjustment in (*earlier, *later):
                adjustment.begin([0, 0])
                adjustment.adjust(torch.zeros(1, self._vocab_size), [()], unchanged)
        # the library raises errors of any kind
        except Exception as error:
            raise UserError(
                f"generation_config.json cannot be heeded ({reason(error)}): mend it, or take "
                "the setting out"
            ) from None


class AddedScores:
    """The scores that one of transformers' processors adds.

    Args:
        num_seen: the last tokens that it looks at, or None where it goes by their number.
    """

    is_over = False

    def __init__(self, processor: LogitsProcessor, vocab_size: int, num_seen: int | None) -> None:
        self._processor = processor
        self._vocab_size = vocab_size
        self._num_seen = num_seen
        self.begin(())

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text, see `Adjustment`."""
        self._num_tokens = 0
        self._last = tuple[int, ...]()
        self.accept(prompt_ids)

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on with the text, see `Adjustment`."""
        self._num_tokens += len(tokens)
        self._last = self._seen(tokens)

    def adjust(
        self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = unchanged
    ) -> Tensor:
        """Adjust each row's logits for its own text; rows with equal texts share the work."""
        rows_of = defaultdict[tuple[int, ...], list[int]](list)
        for row, path in enumerate(paths):
            by_number = (self._num_tokens + len(path),)
            rows_of[by_number if self._num_seen is None else self._seen(path)].append(row)
        scores_TV: Tensor | None = None
        for key, rows in rows_of.items():
            added_V = self._added(key)
            if added_V.any():
                if scores_TV is None:
                    scores_TV = logits_TV.to(torch.float32, copy=True)
                added_V = send(added_V[: logits_TV.shape[1]])
                if len(rows_of) == 1:
                    scores_TV += added_V
                else:
                    scores_TV[send(torch.tensor(rows))] += added_V
        return logits_TV if scores_TV is None else scores_TV

    def _seen(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the last tokens, of the text and a path, that the processor reads."""
        num = self._num_seen or 0
        return (*self._last, *path)[-num:] if num else ()

    def _added(self, key: tuple[int, ...]) -> Tensor:
        ids_1P = torch.tensor([key], dtype=torch.long)
        if self._num_seen is None:
            ids_1P = torch.zeros(1, 1, dtype=torch.long).expand(1, key[0])
        added_V: Tensor = self._processor(ids_1P, torch.zeros(1, self._vocab_size))[0]
        return added_V


class NoRepeatedNgrams:
    """No sequence of this many tokens comes twice, as `NoRepeatNGramLogitsProcessor` has it.

    That one reads the whole text for every row; here the accepted tokens are read once.
    """

    is_over = False

    def __init__(self, num_tokens: int) -> None:
        self._num = num_tokens
        self.begin(())

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text, see `Adjustment`."""
        self._tokens = list[int]()
        self._followers = defaultdict[tuple[int, ...], set[int]](set)
        self.accept(prompt_ids)

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on with the text, see `Adjustment`."""
        for token in tokens:
            self._tokens.append(token)
            if len(self._tokens) >= self._num:
                *before, last = self._tokens[-self._num :]
                self._followers[tuple(before)].add(last)

    def adjust(
        self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = unchanged
    ) -> Tensor:
        """Forbid in each row the tokens that would repeat a sequence of its own text."""
        forbidden = [
            (row, token) for row, path in enumerate(paths) for token in self._forbidden(path)
        ]
        if not forbidden:
            return logits_TV
        row_R, token_R = torch.tensor(forbidden, dtype=torch.long).unbind(1)
        scores_TV = logits_TV.to(torch.float32, copy=True)
        scores_TV[send(row_R), send(token_R)] = -torch.inf
        return scores_TV

    def _forbidden(self, path: Sequence[int]) -> set[int]:
        num = self._num
        if len(self._tokens) + len(path) + 1 < num:
            return set()
        near = [*self._tokens[-(num - 1) :], *path] if num > 1 else [*path]
        last = tuple(near[len(near) - num + 1 :]) if num > 1 else ()
        tokens = set(self._followers.get(last, ()))
        for first in range(len(near) - num + 1):
            if tuple(near[first : first + num - 1]) == last:
                tokens.add(near[first + num - 1])
        return tokens


class DecayingLength:
    """The end of a text becomes likelier token by token, as `ExponentialDecayLengthPenalty` has it."""

    is_over = False

    def __init__(self, num_before: int, factor: float, end_ids: Sequence[int]) -> None:
        self._num_before = num_before
        self._factor = factor
        self._end_E = torch.tensor([*end_ids], dtype=torch.long)
        self._num_new = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text, see `Adjustment`."""
        self._num_new = 0

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on with the text, see `Adjustment`."""
        self._num_new += len(tokens)

    def adjust(
        self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = unchanged
    ) -> Tensor:
        """Raise the scores of end tokens by the length of each row's own text."""
        excess = [self._num_new + len(path) - self._num_before for path in paths]
        if not any(num > 0 for num in excess):
            return logits_TV
        raised = [self._factor ** max(num, 0) - 1 for num in excess]
        raised_T1 = send(torch.tensor(raised))[:, None]
        scores_TV = logits_TV.to(torch.float32, copy=True)
        end_E = send(self._end_E)
        scores_TV[:, end_E] += scores_TV[:, end_E].abs() * raised_T1
        return scores_TV


def _sequences(value: Any) -> list[list[Any]]:
    """Return biases of sequences as the processor takes them: JSON has lists for its pairs."""
    return [[[*tokens], float(bias)] for tokens, bias in value]


def _most_seen(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that a look at these sequences needs: 0 for single tokens."""
    longest = max(map(len, sequences), default=0)
    return longest if longest > 1 else 0
