"""Grammars compiled for one vocabulary by llguidance, and the masks that keep a text within one.

llguidance knows the bytes of every token. A row's mask is what the grammar allows after the row's
own path, so a draft only guesses tokens that the target may emit; all other tokens get no chance.
Rows that the target's walk never looks at, or whose token is dropped, stay as they are: those
behind a token that the grammar forbids, and those behind the end of the text. Where a draft knows
no token that is allowed, all allowed ones are equally likely: any distribution is exact that is
settled before the draw.

Invariants: a mask depends on the tokens of a path behind the prompt alone, whatever tree it stands
in and however many of them are committed. The package is imported, and the vocabulary read, when
the first grammar is asked for. A grammar is compiled in a process of its own first, so that it can
neither end this one nor keep it for ever.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import UserError, refusing, require
from offload.sampling.adjustments import Send, unchanged
from offload.sampling.grammar import REMEDY, Grammar, require_compiler, require_sound, tried_source

# Bytes of text whose compiled grammars are kept, which usually take some 200 times as much; and what
# the shortest count, of which some take a megabyte. Beside these all stay compiled that texts keep,
# and those that `compiled` was asked for, as long as its answer is held.
_MOST_KEPT_BYTES = 2 << 20
_LEAST_BYTES = 32 << 10
_END_NAME = "<|the end of the text, for grammars|>"  # end token of a vocabulary without one
TokenPath = tuple[int, ...]
Bits = NDArray[np.uint8]  # one for each token, the first in the lowest
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class GrammarMask:
    """One text's position in a grammar.

    The matcher stands behind the committed tokens, walks down a path and rolls back as far as the
    next path differs. Masks of a step are kept, since the target asks for those of the accepted
    path once more: as bits, 24 MiB for 768 rows of 262,144 tokens, and less for a tree of those.
    """

    _compiled: "_Compiled"
    # bits (V / 8,), what may follow where a matcher stands, ends of the text included
    _allowed: Callable[[Any], Bits]
    _end_ids: Set[int]  # tokens that end the text
    _name: str  # the grammar's, for messages to the user

    def __post_init__(self) -> None:
        self.begin(())

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start again; the prompt is not part of the grammar."""
        self._committed = list[int]()
        self._has_ended = False
        self._masks: dict[TokenPath, Bits | None] = {}
        # the matcher's words for each path at which it gives up
        self._broken: dict[TokenPath, str] = {}
        self._restart()

    def accept(self, tokens: Sequence[int]) -> None:
        """Move past these tokens. Raises `UserError` if no token of the model may follow."""
        for token in tokens:
            self._has_ended = self._has_ended or token in self._end_ids
            if not self._has_ended:
                if () in self._broken or not self._go_to((token,)):
                    why = self._broken.get((), "no token of the model is left")
                    raise UserError(
                        f"{self._name} cannot be followed any further ({why}): {REMEDY}"
                    )
                self._committed.append(token)
                del self._walked[0]
            self._masks = _shift_paths(token, self._masks)
            self._broken = _shift_paths(token, self._broken)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow, and the model has no token to say so."""
        if self._has_ended or self._end_ids or self._broken.get(()):
            return False
        bits = self._mask(())
        return bits is not None and not bits.any()

    def adjust(
        self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = unchanged
    ) -> Tensor:
        """Mask what the grammar forbids, except for rows that sampling reports, as not finite."""
        scores_TV = logits_TV.to(torch.float32, copy=True)
        allowed_TV = np.ones(scores_TV.shape, dtype=bool)
        # neighbours share most
        for path, row in sorted((tuple(path), row) for row, path in enumerate(paths)):
            bits = self._mask(path)
            if bits is not None and bits.any():
                allowed_TV[row] = _unpacked(bits, scores_TV.shape[1])
        mask_TV = send(torch.from_numpy(allowed_TV))
        is_sound_T1 = scores_TV.amax(1, keepdim=True).isfinite()
        scores_TV.masked_fill_(is_sound_T1 & ~mask_TV, -torch.inf)
        knows_none_T1 = is_sound_T1 & (scores_TV.amax(1, keepdim=True) == -torch.inf)
        return scores_TV.masked_fill_(knows_none_T1 & mask_TV, 0.0)

    def _mask(self, path: TokenPath) -> Bits | None:
        """Return the tokens that may follow a path; None if all may, or if the matcher gave up."""
        if path not in self._masks:
            self._masks[path] = self._allowed_shift_paths(path)
        return self._masks[path]

    def _allowed_shift_paths(self, path: TokenPath) -> Bits | None:
        if self._has_ended or not self._end_ids.isdisjoint(path):
            return None
        with refusing(f"{self._name} cannot be followed any further", REMEDY):
            bits = self._allowed(self._matcher) if self._go_to(path) else None
            if self._matcher.is_error():
                self._broken[path] = " ".join(self._matcher.get_error().split())[:80]
                self._restart()
                return None
            return bits

    def _go_to(self, path: TokenPath) -> bool:
        """Move the matcher to the end of a path; if the path leaves the grammar, somewhere on it."""
        num_shared = 0
        while (
            num_shared < min(len(path), len(self._walked))
            and path[num_shared] == self._walked[num_shared]
        ):
            num_shared += 1
        self._matcher.rollback(len(self._walked) - num_shared)
        del self._walked[num_shared:]
        num_taken = self._matcher.try_consume_tokens(list(path[num_shared:]))
        self._walked += path[num_shared : num_shared + num_taken]
        return len(self._walked) == len(path)

    def _restart(self) -> None:
        """Use a new matcher after the committed tokens: one that met an error keeps it."""
        self._matcher = self._compiled.matcher.deep_copy()
        self._matcher.consume_tokens(self._committed)
        # tokens that the matcher has consumed beyond the committed ones
        self._walked = list[int]()


def _shift_paths(token: int, known: Mapping[TokenPath, T]) -> dict[TokenPath, T]:
    """Return the known paths that begin with `token`, keyed as once that is committed."""
    return {path[1:]: state for path, state in known.items() if path[:1] == (token,)}


@dataclass(eq=False)
class _Compiled:
    matcher: Any  # an `LLMatcher` at its start


class Grammars:
    """All grammars that one decoder is asked for; without a tokenizer every one is refused."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        # an `LLTokenizer`
        self._vocabulary: Any = None
        # the most recently used is last
        self._kept: dict[Grammar, _Compiled] = {}
        # compiled grammars that are kept, or in use elsewhere
        self._known = weakref.WeakValueDictionary[Grammar, _Compiled]()
        # requests are checked while texts are being written
        self._lock = threading.Lock()

    def mask(self, grammar: Grammar) -> GrammarMask:
        """Return a mask that keeps a text to a grammar. Raises `UserError` if it allows nothing."""
        return GrammarMask(self.compiled(grammar), self._allowed, self._end_ids, str(grammar))

    def compiled(self, grammar: Grammar) -> _Compiled:
        """Return a handle that keeps a grammar compiled while it is held. Raises as `mask` does."""
        with self._lock:
            compiled = self._known.get(grammar)
        if compiled is None:
            # outside the lock: no other text should wait for this
            compiled = self._compile(grammar)
        with self._lock:
            self._kept.pop(grammar, None)
            self._kept[grammar] = self._known[grammar] = compiled
            excess = sum(map(_counted_bytes, self._kept)) - _MOST_KEPT_BYTES
            for oldest in [*self._kept][:-1]:
                if excess > 0:
                    del self._kept[oldest]
                    excess -= _counted_bytes(oldest)
        return compiled

    def _compile(self, grammar: Grammar) -> _Compiled:
        """Return a compiled grammar. Raises `UserError` if it is faulty or allows nothing."""
        vocabulary = self._read_vocabulary()
        from llguidance import LLMatcher

        source = tried_source(grammar)
        with refusing(f"{grammar} cannot be compiled, got {grammar.text!r:.80}", REMEDY):
            matcher = LLMatcher(vocabulary, source, log_level=0)
            error = matcher.get_error()
            # a copy, because a matcher that has met an error stays in it
            first = matcher.deep_copy()
            is_any = (
                not error
                and bool(self._allowed(first).any() or first.is_accepting())
                and not first.is_error()
            )
        require_sound(error, grammar)
        requirement = f"{grammar} must allow something in this vocabulary"
        require(is_any, requirement, f"{grammar.text!r:.80}", REMEDY)
        return _Compiled(matcher)

    def _read_vocabulary(self) -> Any:
        """Return the vocabulary as the grammar compiler needs it, read once. Raises `UserError`."""
        if self._vocabulary is not None:
            return self._vocabulary
        require_compiler()
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            lacking = "no tokenizer" if self._tokenizer is None else "one of another kind"
            raise UserError(
                f"a grammar is kept by the bytes of tokens, which a tokenizer.json tells, got {lacking}: put it beside"
            )
        from llguidance import LLTokenizer

        remedy = "leave the grammar out, or take a model with another kind of tokenizer"
        with refusing("the model's tokenizer cannot be read for a grammar", remedy):
            raw, end_ids = _with_an_end(backend, self._end_ids)
            num_tokens = max(self._vocab_size, raw.get_vocab_size(), *(end + 1 for end in end_ids))
            self._vocabulary = LLTokenizer(raw.to_str(), n_vocab=num_tokens, eos_token=end_ids)
        return self._vocabulary

    def _allowed(self, matcher: Any) -> Bits:
        """Return the tokens that may follow, ends of the text exactly where it may end."""
        mask_bytes = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = _unpacked(mask_bytes, len(mask_bytes) * 8)
        allowed_V[self._vocabulary.eos_tokens] = False
        allowed_V = allowed_V[: self._vocab_size]
        allowed_V[[end for end in self._end_ids if end < self._vocab_size]] = matcher.is_accepting()
        return np.packbits(allowed_V, bitorder="little")


def _unpacked(bits: Bits, vocab_size: int) -> NDArray[np.bool_]:
    return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)


def _counted_bytes(grammar: Grammar) -> int:
    return max(_LEAST_BYTES, grammar.num_bytes)


def _with_an_end(backend: Any, end_ids: Set[int]) -> tuple[Any, list[int]]:
    """Return a tokenizer that neither pads nor cuts, and its end tokens, one added if needed."""
    raw = copy.copy(backend)
    known = [end for end in sorted(end_ids) if backend.id_to_token(end) is not None]
    raw.no_padding()
    raw.no_truncation()
    if known:
        return raw, known
    raw = type(raw).from_str(raw.to_str())
    raw.add_special_tokens([_END_NAME])
    end = raw.token_to_id(_END_NAME)
    requirement = "a vocabulary must have no holes"
    require(backend.id_to_token(end) is None, requirement, end, "take the model's own tokenizer")
    return raw, [end]
