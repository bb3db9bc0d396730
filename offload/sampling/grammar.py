"""A grammar that a text must keep: a JSON schema, any JSON object, a regular expression, or rules
in Lark's notation.

Only the description is here, checked as far as it can be without a vocabulary. Invariant: one that
exists is small and whole text, and of a schema it is JSON.

The adjustment that keeps one text within a grammar: tokens that would leave it lose every chance.

A row's mask is what the grammar allows behind the row's own path, so a draft guesses what the
target may say. The matcher stands behind the committed tokens, walks down a path and rolls back as
far as the next one differs; masks of a step are kept, since the target asks for those of the
accepted path once more.

Rows that the target's walk never looks at, or whose token is dropped, stay as they are: those
behind a token that the grammar forbids, and those behind the end of the text. Where a draft knows
no token that is allowed, all of these are
equally likely: any distribution is exact that is settled before the draw.

Invariant: a row's logits depend on the tokens behind the prompt alone, however many of them are
committed.

Grammars compiled for one vocabulary by llguidance, which knows the bytes of every token.

Invariant: the package is imported, and the vocabulary read, when the first grammar is asked for;
and what is asked for was compiled in a process of its own before, so that it can neither end this
one nor keep it for ever.
"""

import copy
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from offload.errors import UserError, reason, refusing, require
from offload.sampling.adjustments import Send, stay

KINDS = ("json_schema", "json_object", "regex", "lark")
# that it is given by
_ARGUMENT_OF = {"json_schema": "json_schema", "regex": "regex", "lark": "grammar"}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text may be. Raises `UserError` for a description that is none."""

    kind: str  # one of `KINDS`
    text: str = ""  # the schema, the expression or the rules; none of any JSON object

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS,
            "a grammar must be of a known kind",
            repr(self.kind),
            f"one of {', '.join(KINDS)}",
        )
        text: Any = self.text
        require(isinstance(text, str), f"{self} must be text", f"{text!r:.80}", "give a str")
        if self.kind == "json_object":
            require(not text, f"{self} takes no text", f"{text!r:.80}", "leave it out")
            return
        require(
            bool(text.strip()),
            f"{self} must not be empty",
            repr(text[:80]),
            "leave it out for free text",
        )
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise UserError(
                f"{self} must be Unicode, got half a character at {error.start}: decode it anew"
            ) from None
        require(
            num_bytes <= _MOST_BYTES,
            f"{self} must be at most 1 MiB",
            f"{num_bytes} bytes",
            "ask for less",
        )
        if self.kind == "json_schema":
            _check_schema(text)

    def __str__(self) -> str:
        name = _ARGUMENT_OF.get(self.kind)
        return f"`{name}`" if name else f"a grammar of kind {self.kind}"


GRAMMARS = ("json_schema", "regex", "grammar")  # the arguments of `find_grammar`


def find_grammar(
    json_schema: Mapping[str, Any] | bool | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> Grammar | None:
    """The one that is given, if any, a schema as text or as it is. Raises `UserError` for several,
    or a bad one.
    """
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    names = [f"`{name}`" for name, value in given.items() if value is not None]
    require(
        len(names) <= 1,
        "a text keeps one grammar at most",
        " and ".join(names),
        "leave the others out",
    )
    if json_schema is not None:
        return Grammar(
            "json_schema", json_schema if isinstance(json_schema, str) else _as_json(json_schema)
        )
    if regex is not None:
        return Grammar("regex", regex)
    return None if grammar is None else Grammar("lark", grammar)


def _as_json(schema: object) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"`json_schema` must be JSON, got {schema!r:.80} ({reason(error)}): mend it"
        ) from None


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"`json_schema` must be JSON, got {text!r:.80} ({reason(error)}): mend it"
        ) from None
    is_schema = isinstance(schema, dict | bool)
    require(
        is_schema, "`json_schema` must be an object", f"{text!r:.80}", 'such as {"type": "object"}'
    )


_REMEDY_GRAMMAR_MASK = "mend it, or ask for less"
TokenPath = tuple[int, ...]
T = TypeVar("T")


class GrammarMask:
    """One text's place in a grammar.

    Args:
        new_matcher: gives an `LLMatcher` at its start.
        allowed: bool (V,), what may follow where a matcher stands, ends of the text included.
        end_ids: tokens that end the text.
        name: of the grammar, for whoever has given it.
    """

    def __init__(
        self,
        new_matcher: Callable[[], Any],
        allowed: Callable[[Any], Tensor],
        end_ids: Set[int],
        name: str,
    ) -> None:
        self._new_matcher = new_matcher
        self._allowed = allowed
        self._end_ids = end_ids
        self._name = name
        self.begin(())

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """The prompt is no part of what the grammar speaks of."""
        self._committed = list[int]()
        self._has_ended = False
        self._masks: dict[TokenPath, Tensor | None] = {}
        self._broken: dict[TokenPath, str] = {}  # what the matcher says where it gives up
        self._restart()

    def accept(self, tokens: Sequence[int]) -> None:
        """Raises `UserError` where nothing may follow that the model can say, or the matcher has
        given up.
        """
        for token in tokens:
            self._has_ended = self._has_ended or token in self._end_ids
            if not self._has_ended:
                if () in self._broken or not self._go_to((token,)):
                    why = self._broken.get((), "no token of the model is left")
                    raise UserError(
                        f"{self._name} cannot be followed any further ({why}): {_REMEDY_GRAMMAR_MASK}"
                    )
                self._committed.append(token)
                del self._walked[0]
            self._masks, self._broken = _behind(token, self._masks), _behind(token, self._broken)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow, and the model has no token to say so."""
        if self._has_ended or self._end_ids or self._broken.get(()):
            return False
        mask_V = self._mask(())
        return mask_V is not None and not mask_V.any()

    def adjust(
        self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = stay
    ) -> Tensor:
        """See `Adjustment`; a row whose largest is no finite number stays, so that it is told of."""
        rows = list[int]()
        masks = list[Tensor]()
        # neighbours share most
        for path, row in sorted((tuple(path), row) for row, path in enumerate(paths)):
            mask_V = self._mask(path)
            if mask_V is not None and mask_V.any():
                rows.append(row)
                masks.append(mask_V)
        scores_TV = logits_TV.to(torch.float32, copy=True)
        if rows:
            row_R = send(torch.tensor(rows))
            scores_TV[row_R] = _masked(scores_TV[row_R], send(torch.stack(masks)))
        return scores_TV

    def _mask(self, path: TokenPath) -> Tensor | None:
        """What may follow behind a path; None where nobody asks, or where the matcher has given up."""
        if path not in self._masks:
            self._masks[path] = self._allowed_behind(path)
        return self._masks[path]

    def _allowed_behind(self, path: TokenPath) -> Tensor | None:
        if self._has_ended or not self._end_ids.isdisjoint(path):
            return None
        with refusing(f"{self._name} cannot be followed any further", _REMEDY_GRAMMAR_MASK):
            mask_V = self._allowed(self._matcher) if self._go_to(path) else None
            if self._matcher.is_error():
                self._broken[path] = " ".join(self._matcher.get_error().split())[:80]
                self._restart()
                return None
            return mask_V

    def _go_to(self, path: TokenPath) -> bool:
        """Let the matcher stand behind a path; if the path leaves the grammar, somewhere on it."""
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
        """A new matcher behind the committed tokens: one that has met an error stays in it."""
        self._matcher = self._new_matcher()
        self._matcher.consume_tokens(self._committed)
        self._walked = list[int]()  # that it has consumed beyond those


def _behind(token: int, known: Mapping[TokenPath, T]) -> dict[TokenPath, T]:
    """What is known of paths that begin with a token, as it is known once that is committed."""
    return {path[1:]: one for path, one in known.items() if path[:1] == (token,)}


def _masked(logits_RV: Tensor, mask_RV: Tensor) -> Tensor:
    scores_RV = logits_RV.masked_fill(~mask_RV, -torch.inf)
    is_sound_R1 = logits_RV.amax(1, keepdim=True).isfinite()
    knows_none_R1 = scores_RV.amax(1, keepdim=True) == -torch.inf
    scores_RV = scores_RV.masked_fill(knows_none_R1 & mask_RV, 0.0)
    return torch.where(is_sound_R1, scores_RV, logits_RV)


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
        """What keeps one text within a grammar. Raises `UserError` for one that nothing can be
        written by.
        """
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
            is_any = (
                not error
                and bool(self._allowed(first).any() or first.is_accepting())
                and not first.is_error()
            )
        _require_sound(error, grammar)
        require(
            is_any,
            f"{grammar} must allow something in this vocabulary",
            f"{grammar.text!r:.80}",
            _REMEDY,
        )
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

        with refusing(
            "the model's tokenizer cannot be read for a grammar", "download its files again"
        ):
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
    """Raises `UserError` for what cannot be compiled, takes too long, or ends the process that
    compiles it.
    """
    script = Path(__file__).with_name("grammar_trial.py")
    got = f"got {grammar.text!r:.80}"
    try:
        told = subprocess.run(
            [sys.executable, "-P", script],
            input=source.encode(),
            capture_output=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{grammar} must be compiled within {_TRIAL_S:g} s, {got}: {_REMEDY}"
        ) from None
    if told.returncode:
        lines = told.stderr.decode(errors="replace").strip().splitlines() or [
            f"status {told.returncode}"
        ]
        raise UserError(
            f"{grammar} is more than its compiler can take, {got} ({lines[-1]:.80}): {_REMEDY}"
        )
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
    """A tokenizer that neither pads nor cuts, and tokens of it that end a text: one more where it
    has none.
    """
    raw = copy.copy(backend)
    known = [end for end in sorted(end_ids) if backend.id_to_token(end) is not None]
    raw.no_padding()
    raw.no_truncation()
    if known:
        return raw, known
    raw = type(raw).from_str(raw.to_str())
    raw.add_special_tokens([_END_NAME])
    end = raw.token_to_id(_END_NAME)
    require(
        backend.id_to_token(end) is None,
        "a vocabulary must have no holes",
        end,
        "take the model's own tokenizer",
    )
    return raw, [end]
