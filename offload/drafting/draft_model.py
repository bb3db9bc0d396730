"""The draft model over the cache of one text: what every way of growing a tree runs.

Committed tokens are taken in when they are needed, with the root of the next tree, whose scores come from the same
pass. Behind them lie the rows of the tree being grown, in the order in which they were run. Invariant: between steps
the cache holds committed tokens only, in their order.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.model.kv_cache import KVCache
from offload.model.weights import StreamedModel

_CHUNK = 512  # rows of one pass when a long prompt is taken in
_SCORED_CHUNK = 64  # ... when every row is scored


class Draft:
    """A resident model and the cache of one text. What a draft has beyond the target's vocabulary is never proposed."""

    def __init__(self, model: StreamedModel, vocab_size: int, cache: KVCache) -> None:
        self._model, self._vocab_size, self._cache = model, vocab_size, cache

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def catch_up(self, tokens: Sequence[int]) -> Tensor:
        """Run the committed tokens that the cache lacks, the root last; returns the root's scores (1, V)."""
        self._model.take_in(tokens, self._cache)
        missing = torch.tensor(tokens[self._cache.length :])
        assert len(missing), "the root is cached already, and its scores are gone"
        logits = torch.empty(0)
        for chunk in missing.split(_CHUNK):
            logits = self._run_committed(chunk, num_logits=1)
        return self._as_wide_as_target(logits)

    def run(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> Tensor:
        """Scores (W, V) after the next W rows of a tree.

        Args:
            position_U: of all U rows behind the committed tokens, of which these are the last.
            ancestor_WU: bool; whether row j lies on the path to row i, i included. The root is committed.
        """
        return self._as_wide_as_target(self._model.forward(self._known(token_W), position_U, ancestor_WU, self._cache))

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Tensor]:
        """Logits (1, V) for `tokens[start]` and every later one, each given all before it; many positions per pass."""
        self._cache.clear()
        self._model.take_in(tokens, self._cache)
        for chunk in torch.tensor(tokens[self._cache.length : -1]).split(_SCORED_CHUNK):
            lo = self._cache.length
            for row, logits_V in enumerate(self._run_committed(chunk, num_logits=len(chunk))):
                if lo + row + 1 >= start:
                    yield logits_V[None, : self._vocab_size]

    def _run_committed(self, token_T: Tensor, num_logits: int) -> Tensor:
        position_T = torch.arange(len(token_T)) + self._cache.length
        causal_TT = torch.ones(len(token_T), len(token_T), dtype=torch.bool).tril()
        logits = self._model.forward(self._known(token_T), position_T, causal_TT, self._cache, num_logits=num_logits)
        self._cache.commit(range(len(token_T)))
        return logits

    def _as_wide_as_target(self, logits_WV: Tensor) -> Tensor:
        """Padding beyond the target's vocabulary goes; a token that only the target has gets no chance."""
        missing = self._vocab_size - logits_WV.shape[1]
        return pad(logits_WV, (0, missing), value=-torch.inf) if missing else logits_WV

    def _known(self, token_T: Tensor) -> Tensor:
        """Ids that the draft has: the target may emit others, which only makes the draft's guess a poor one."""
        return token_T.clamp(max=self._model.vocab_size - 1)
