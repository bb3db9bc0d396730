"""The adjustment that keeps one text within a grammar: tokens that would leave it lose every chance.

A row's mask is what the grammar allows behind the row's own path, so a draft guesses what the target may say. The
matcher stands behind the committed tokens, walks down a path and rolls back as far as the next one differs; masks of a
step are kept, since the target asks for those of the accepted path once more.

Rows that the target's walk never looks at, or whose token is dropped, stay as they are: those behind a token that the
grammar forbids, and those behind the end of the text. Where a draft knows no token that is allowed, all of these are
equally likely: any distribution is exact that is settled before the draw.

Invariant: a row's logits depend on the tokens behind the prompt alone, however many of them are committed.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload.errors import UserError, refusing
from offload.sampling.adjustments import Send, stay

_REMEDY = "mend it, or ask for less"
Path = tuple[int, ...]
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
        self, new_matcher: Callable[[], Any], allowed: Callable[[Any], Tensor], end_ids: Set[int], name: str
    ) -> None:
        self._new_matcher, self._allowed, self._end_ids, self._name = new_matcher, allowed, end_ids, name
        self.begin(())

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """The prompt is no part of what the grammar speaks of."""
        self._committed, self._has_ended = list[int](), False
        self._masks: dict[Path, Tensor | None] = {}
        self._broken: dict[Path, str] = {}  # what the matcher says where it gives up
        self._restart()

    def accept(self, tokens: Sequence[int]) -> None:
        """Raises `UserError` where nothing may follow that the model can say, or the matcher has given up."""
        for token in tokens:
            self._has_ended = self._has_ended or token in self._end_ids
            if not self._has_ended:
                if () in self._broken or not self._go_to((token,)):
                    why = self._broken.get((), "no token of the model is left")
                    raise UserError(f"{self._name} cannot be followed any further ({why}): {_REMEDY}")
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

    def adjust(self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = stay) -> Tensor:
        """See `Adjustment`; a row whose largest is no finite number stays, so that it is told of."""
        rows, masks = list[int](), list[Tensor]()
        for path, row in sorted((tuple(path), row) for row, path in enumerate(paths)):  # neighbours share most
            mask_V = self._mask(path)
            if mask_V is not None and mask_V.any():
                rows.append(row)
                masks.append(mask_V)
        scores_TV = logits_TV.to(torch.float32, copy=True)
        if rows:
            row_R = send(torch.tensor(rows))
            scores_TV[row_R] = _masked(scores_TV[row_R], send(torch.stack(masks)))
        return scores_TV

    def _mask(self, path: Path) -> Tensor | None:
        """What may follow behind a path; None where nobody asks, or where the matcher has given up."""
        if path not in self._masks:
            self._masks[path] = self._allowed_behind(path)
        return self._masks[path]

    def _allowed_behind(self, path: Path) -> Tensor | None:
        if self._has_ended or not self._end_ids.isdisjoint(path):
            return None
        with refusing(f"{self._name} cannot be followed any further", _REMEDY):
            mask_V = self._allowed(self._matcher) if self._go_to(path) else None
            if self._matcher.is_error():
                self._broken[path] = " ".join(self._matcher.get_error().split())[:80]
                self._restart()
                return None
            return mask_V

    def _go_to(self, path: Path) -> bool:
        """Let the matcher stand behind a path; if the path leaves the grammar, somewhere on it."""
        num_shared = 0
        while num_shared < min(len(path), len(self._walked)) and path[num_shared] == self._walked[num_shared]:
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


def _behind(token: int, known: Mapping[Path, T]) -> dict[Path, T]:
    """What is known of paths that begin with a token, as it is known once that is committed."""
    return {path[1:]: one for path, one in known.items() if path[:1] == (token,)}


def _masked(logits_RV: Tensor, mask_RV: Tensor) -> Tensor:
    scores_RV, is_sound_R1 = logits_RV.masked_fill(~mask_RV, -torch.inf), logits_RV.amax(1, keepdim=True).isfinite()
    knows_none_R1 = scores_RV.amax(1, keepdim=True) == -torch.inf
    scores_RV = scores_RV.masked_fill(knows_none_R1 & mask_RV, 0.0)
    return torch.where(is_sound_R1, scores_RV, logits_RV)
