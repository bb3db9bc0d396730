"""The draft model over the cache of one text, or of several: all ways of growing a tree run it.

Committed tokens are taken in when they are needed, with the root of the next tree, whose scores
come from the same pass. Behind them lie the rows of the tree being grown, in the order in which
they were run.

Invariant: between steps the cache holds committed tokens only, in their order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.memory.sizes import PROMPT_ROWS
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart, causal
from offload.model.tree_model import TreeModel

SCORED_CHUNK = 64  # rows of a pass of which each is scored
# the next rows of a tree, as `Draft.run` takes them
TreeRows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Draft:
    """A resident model and one text's cache; only tokens that the target has are proposed."""

    _model: TreeModel
    vocab_size: int  # of the target
    _cache: KVCache

    @property
    def prompt_rows(self) -> int:
        """Return the most rows of a pass over committed tokens."""
        return PROMPT_ROWS

    def catch_up(self, tokens: Sequence[int]) -> Tensor:
        """Run the committed tokens that the cache lacks; return the last one's scores (1, V)."""
        for chunk in self._missing(tokens).split(self.prompt_rows):
            logits = self._run_committed(chunk, num_logits=1)
        return self._as_wide_as_target(logits)

    def catch_up_beside(self, tokens: Sequence[int], rows: TreeRows) -> Tensor:
        """Do what `catch_up` does, and run the first W rows of the tree in its last pass.

        Returns the scores (1 + W, V) of the root and of these.
        """
        token_W, position_W, ancestor_WW = rows
        *before, last = self._missing(tokens).split(self.prompt_rows - len(token_W))
        for chunk in before:
            self._run_committed(chunk, num_logits=1)
        num_committed = len(last)
        num_rows = num_committed + len(token_W)
        self._cache.expect_rows(num_committed)
        sees_RR = causal(num_rows)
        sees_RR[num_committed:, num_committed:] = ancestor_WW
        position_R = torch.cat((torch.arange(num_committed) + self._cache.length, position_W))
        token_R = self._known(torch.cat((last, token_W)))
        num_logits = 1 + len(token_W)
        logits = self._model.forward(
            token_R, position_R, sees_RR, self._cache, num_logits=num_logits
        )
        self._cache.commit(range(num_committed), range(num_committed, num_rows))
        return self._as_wide_as_target(logits)

    def _missing(self, tokens: Sequence[int]) -> Tensor:
        self._model.encode_prompt(tokens, self._cache)
        missing = torch.tensor(tokens[self._cache.length :])
        assert len(missing), "the root is cached already, and its scores are gone"
        return missing

    def run(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> Tensor:
        """Return scores (W, V) after the next W rows of a tree.

        Args:
            position_U: of all U rows behind the committed tokens, of which these are the last.
            ancestor_WU: bool; whether row j lies on the path to row i, i included. The root is
                committed.
        """
        return self._as_wide_as_target(
            self._model.forward(self._known(token_W), position_U, ancestor_WU, self._cache)
        )

    def part(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> BatchPart:
        """Return these rows as a part, to be run with those of other texts."""
        return BatchPart(self._known(token_W), position_U, ancestor_WU, self._cache)

    def score_parts(self, parts: Sequence[BatchPart], num_logits: int = 0) -> Tensor:
        """Return scores (W, V) of several texts' rows, or of the last `num_logits` where given."""
        return self._as_wide_as_target(self._model.forward_parts(parts, num_logits=num_logits))

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Tensor]:
        """Yield logits (1, V) for `tokens[start]` and every later one, each given all before it."""
        self._cache.clear()
        self._model.encode_prompt(tokens, self._cache)
        for chunk in torch.tensor(tokens[self._cache.length : -1]).split(SCORED_CHUNK):
            lo = self._cache.length
            for row, logits_V in enumerate(self._run_committed(chunk, num_logits=len(chunk))):
                if lo + row + 1 >= start:
                    yield logits_V[None, : self.vocab_size]

    def _run_committed(self, token_T: Tensor, num_logits: int) -> Tensor:
        self._cache.expect_rows(len(token_T))
        logits = self._model.forward_chain(self._known(token_T), self._cache, num_logits=num_logits)
        self._cache.commit(range(len(token_T)))
        return logits

    def _as_wide_as_target(self, logits_WV: Tensor) -> Tensor:
        """Cut padding beyond the target's vocabulary; tokens that the draft lacks get -inf."""
        missing = self.vocab_size - logits_WV.shape[1]
        logits_WV = pad(logits_WV, (0, missing), value=-torch.inf) if missing else logits_WV
        if self._model.foreign_ids:
            token_C = torch.tensor(
                [index for index in self._model.foreign_ids if index < self.vocab_size]
            )
            logits_WV = logits_WV.index_fill(1, self._model.send(token_C), -torch.inf)
        return logits_WV

    def _known(self, token_T: Tensor) -> Tensor:
        """Clamp ids to those that the draft has; others only make its guess a poor one."""
        return token_T.clamp(max=self._model.vocab_size - 1)


def catch_up(drafts: Sequence[Draft], texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the roots' scores (B, V) of several texts; what exceeds one pass is run before it."""
    if len(drafts) == 1:
        return drafts[0].catch_up(texts[0])
    # rows beside the roots
    before = list[BatchPart]()
    roots = list[BatchPart]()
    most_rows = drafts[0].prompt_rows
    room = most_rows - len(drafts)
    for draft, tokens in zip(drafts, texts, strict=True):
        *long, last = draft._missing(tokens).split(most_rows)
        if len(last) - 1 > room:
            long = [*long, last[:-1]]
            last = last[-1:]
        room -= len(last) - 1
        for chunk in long:
            draft._run_committed(chunk, num_logits=1)
        num_rows = len(last)
        draft._cache.expect_rows(num_rows)
        position_U = torch.arange(num_rows) + draft._cache.length
        sees_UU = causal(num_rows)
        before += (
            [draft.part(last[:-1], position_U[:-1], sees_UU[:-1, :-1])] if num_rows > 1 else []
        )
        roots.append(draft.part(last[-1:], position_U, sees_UU[-1:]))
    logits_BV = drafts[0].score_parts([*before, *roots], num_logits=len(roots))
    for draft, root in zip(drafts, roots, strict=True):
        draft._cache.commit(range(len(root.position_U)))
    return logits_BV


def run_together(added: Sequence[tuple[Draft, TreeRows]]) -> Tensor:
    """Return scores (W, V) after the next rows of each text, as `Draft.run` takes them."""
    draft, rows = added[0]
    if len(added) == 1:
        return draft.run(*rows)
    return draft.score_parts([rows.part(*its) for rows, its in added])
