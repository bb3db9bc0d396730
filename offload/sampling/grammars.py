"""Grammars compiled for one vocabulary by llguidance, which knows the bytes of every token.

Invariant: the package is imported, and the vocabulary read, when the first grammar is asked for; and what is asked for
was compiled in a process of its own before, so that it can neither end this one nor keep it for ever.
"""

import copy
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.config import require
from offload.errors import UserError, reason, refusing
from offload.sampling.grammar import Grammar
from offload.sampling.grammar_mask import GrammarMask

_TRIAL_S = 10.0  # for a compilation, which takes milliseconds
_MOST_KEPT = 16  # compiled grammars
_END_NAME = "<|the end of the text, for grammars|>"  # of a vocabulary that has no such token
_REMEDY = "mend it, or ask for less"


class Grammars:
    """All that one decoder is asked for.

    Args:
        tokenizer: of the target; None where it has none, and then every grammar is refused.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Set[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, frozenset(end_ids)
        self._vocabulary: Any = None  # an `LLTokenizer`
        self._compiled: dict[Grammar, Any] = {}  # of `LLMatcher` at their start
        self._lock = threading.Lock()  # requests are checked while others are being written

    def mask(self, grammar: Grammar) -> GrammarMask:
        """What keeps one text within a grammar. Raises `UserError` for one that nothing can be written by."""
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)  # which takes time that no text should wait for
            with self._lock:
                while len(self._compiled) >= _MOST_KEPT:
                    del self._compiled[next(iter(self._compiled))]
                self._compiled[grammar] = matcher
        return GrammarMask(matcher.deep_copy, self._allowed, self._end_ids, str(grammar))

    def _compile(self, grammar: Grammar) -> Any:
        vocabulary = self._read_vocabulary()
        from llguidance import LLMatcher

        with refusing(f"{grammar} cannot be compiled, got {grammar.text!r:.80}", _REMEDY):
            source = _source(grammar)
        _try_out(source, grammar)
        with refusing(f"{grammar} cannot be compiled, got {grammar.text!r:.80}", _REMEDY):
            matcher = LLMatcher(vocabulary, source, log_level=0)
            error = matcher.get_error()
            first = matcher.deep_copy()  # one that has met an error stays in it
            is_any = not error and bool(self._allowed(first).any() or first.is_accepting()) and not first.is_error()
        _require_sound(error, grammar)
        require(is_any, f"{grammar} must allow something in this vocabulary", f"{grammar.text!r:.80}", _REMEDY)
        return matcher

    def _read_vocabulary(self) -> Any:
        if self._vocabulary is not None:
            return self._vocabulary
        if find_spec("llguidance") is None:
            raise UserError(
                "grammars are kept by the package llguidance, which is missing: pip install offload[grammar]"
            )
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            what = "no tokenizer" if self._tokenizer is None else "one of another kind"
            raise UserError(
                f"a grammar is kept by the bytes of tokens, which a tokenizer.json tells, got {what}: put it beside"
            )
        from llguidance import LLTokenizer

        with refusing("the model's tokenizer cannot be read for a grammar", "download its files again"):
            raw, end_ids = _with_an_end(backend, self._end_ids)
            num_tokens = max(self._vocab_size, raw.get_vocab_size(), *(end + 1 for end in end_ids))
            self._vocabulary = LLTokenizer(raw.to_str(), n_vocab=num_tokens, eos_token=end_ids)
        return self._vocabulary

    def _allowed(self, matcher: Any) -> Tensor:
        """Bool (V,): what a matcher lets follow; tokens that end the text exactly where it may end."""
        packed_B = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = np.unpackbits(packed_B, bitorder="little").astype(bool)
        allowed_V[self._vocabulary.eos_tokens] = False
        allowed_V = allowed_V[: self._vocab_size]
        allowed_V[[end for end in self._end_ids if end < self._vocab_size]] = matcher.is_accepting()
        return torch.from_numpy(allowed_V)


def _source(grammar: Grammar) -> str:
    """As llguidance takes it."""
    from llguidance import LLMatcher

    make: dict[str, Callable[[str], str]] = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "json_object": lambda _: LLMatcher.grammar_from_json_schema('{"type": "object"}'),
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }
    return make[grammar.kind](grammar.text)


def _try_out(source: str, grammar: Grammar) -> None:
    """Raises `UserError` for what cannot be compiled, takes too long, or ends the process that compiles it."""
    script = Path(__file__).with_name("grammar_trial.py")
    got = f"got {grammar.text!r:.80}"
    try:
        told = subprocess.run(
            [sys.executable, "-P", script], input=source.encode(), capture_output=True, timeout=_TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{grammar} must be compiled within {_TRIAL_S:g} s, {got}: {_REMEDY}") from None
    if told.returncode:
        lines = told.stderr.decode(errors="replace").strip().splitlines() or [f"status {told.returncode}"]
        raise UserError(f"{grammar} is more than its compiler can take, {got} ({lines[-1]:.80}): {_REMEDY}")
    answer = json.loads(told.stdout)
    if isinstance(answer, dict):
        raise UserError(
            f"grammars are compiled with the package llguidance by {sys.executable}, which lacks it "
            f"({answer['failure']:.80}): pip install offload[grammar] there"
        )
    _require_sound(answer, grammar)


def _require_sound(error: str | None, grammar: Grammar) -> None:
    """Raises `UserError` with what the compiler says, if it says anything."""
    if error:
        raise UserError(
            f"{grammar} cannot be compiled, got {grammar.text!r:.80} ({reason(ValueError(error))}): {_REMEDY}"
        )


def _with_an_end(backend: Any, end_ids: Set[int]) -> tuple[Any, list[int]]:
    """A tokenizer that neither pads nor cuts, and tokens of it that end a text: one more where it has none."""
    raw, known = copy.copy(backend), [end for end in sorted(end_ids) if backend.id_to_token(end) is not None]
    raw.no_padding()
    raw.no_truncation()
    if known:
        return raw, known
    raw = type(raw).from_str(raw.to_str())
    raw.add_special_tokens([_END_NAME])
    end = raw.token_to_id(_END_NAME)
    require(backend.id_to_token(end) is None, "a vocabulary must have no holes", end, "take the model's own tokenizer")
    return raw, [end]
