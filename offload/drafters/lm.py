"""A resident draft model grows a token tree of fixed shape, one forward pass per level.

The rule of verification says how children are chosen (`draws`) and whether the laws they come from are kept. Only
nodes that have children are ever run; their keys and values stay until the walk has chosen a path.
Invariant: between steps the cache holds committed tokens only, in their order.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.drafters.draws import draw_children
from offload.kv_cache import KVCache
from offload.model import BorrowedModel
from offload.proposals import Proposals
from offload.sampling import Sampler
from offload.topology import Topology
from offload.tree import TokenTree, ancestors

_CHUNK = 512  # rows of one pass when a long prompt is taken in
_SCORED_CHUNK = 64  # ... when every row is scored


class _Level:
    """What one draft step runs and where its guesses go."""

    def __init__(self, topology: Topology, depth: int, expanded: Tensor) -> None:
        lo, hi = topology.levels[depth].start, topology.levels[depth].stop
        self.node_W = expanded[(expanded >= lo) & (expanded < hi)]  # nodes to run: those with children
        uncommitted_U = expanded[(expanded > 0) & (expanded < hi)]  # rows in the cache by then; the root is committed
        self.ancestor_WU = ancestors(topology)[self.node_W][:, uncommitted_U]
        self.depth_U = torch.from_numpy(topology.depth_N.copy())[uncommitted_U]
        parent_N = torch.from_numpy(topology.parent_N.copy())
        self.child_C = torch.isin(parent_N, self.node_W).nonzero()[:, 0]
        self.parent_row_C = torch.searchsorted(self.node_W, parent_N[self.child_C])
        self.rank_C = torch.from_numpy(topology.rank_N.copy())[self.child_C]


class _Schedule(NamedTuple):
    """The draft steps of one topology."""

    levels: list[_Level]
    row_of_node: dict[int, int]  # cache row, counted from the committed length, of every node that is run


@lru_cache(maxsize=8)
def _schedule(topology: Topology) -> _Schedule:
    expanded = torch.from_numpy(topology.num_children_N > 0).nonzero()[:, 0]
    levels = [_Level(topology, depth, expanded) for depth in range(topology.depth)]
    return _Schedule(levels, {int(node): row for row, node in enumerate(expanded[expanded > 0])})


class ModelDrafter:
    """Grows trees with a resident model.

    Args:
        model: its weights are bound for good.
        vocab_size: V of the target; a draft may pad its vocabulary further, what lies beyond is never proposed.
        num_slots: capacity of its cache, committed positions plus nodes of the largest tree.
    """

    def __init__(self, model: BorrowedModel, vocab_size: int, num_slots: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._cache = KVCache(model.num_layers, num_slots)
        self._row_of_node: dict[int, int] = {}

    def reset(self) -> None:
        """Forget the sequence."""
        self._cache.clear()

    def grow(self, topology: Topology, tokens: Sequence[int], sampler: Sampler) -> TokenTree:
        """A tree of this shape below `tokens[-1]`: each node's children are its candidates in the order of their draws.

        A node with more children than there are tokens repeats the last one.
        """
        root, schedule, proposals = len(tokens) - 1, _schedule(topology), None
        token_N = torch.full((topology.num_nodes,), tokens[-1], dtype=torch.long)
        for depth, level in enumerate(schedule.levels):
            logits_WV = self._run(level, token_N, root) if depth else self._catch_up(tokens)
            logits_WV, num_children = self._as_wide_as_target(logits_WV), int(level.rank_C.max()) + 1
            token_WK, draw, law_WV = draw_children(logits_WV, num_children, sampler, root + depth + 1)
            token_N[level.child_C] = token_WK[level.parent_row_C, level.rank_C.clamp(max=token_WK.shape[1] - 1)]
            if law_WV is not None:
                proposals = proposals or Proposals.blank(topology, self._vocab_size, draw, law_WV.device)
                proposals.write(level.node_W.numpy(), law_WV)
        self._row_of_node = schedule.row_of_node
        return TokenTree(topology, token_N, proposals)

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the rows of the accepted path as far as it was run; the rest is run again as committed tokens."""
        self._cache.commit([self._row_of_node[node] for node in nodes[1:] if node in self._row_of_node])

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Tensor]:
        """Logits (1, V) for `tokens[start]` and every later one, each given all before it; many positions per pass."""
        self.reset()
        for chunk in torch.tensor(tokens[:-1]).split(_SCORED_CHUNK):
            lo = self._cache.length
            for row, logits_V in enumerate(self._run_committed(chunk, num_logits=len(chunk))):
                if lo + row + 1 >= start:
                    yield logits_V[None, : self._vocab_size]

    def _catch_up(self, tokens: Sequence[int]) -> Tensor:
        """Run the committed tokens that the cache lacks, the root last, and score the root."""
        missing = torch.tensor(tokens[self._cache.length :])
        logits = torch.empty(0)
        for chunk in missing.split(_CHUNK):
            logits = self._run_committed(chunk, num_logits=1)
        return logits

    def _run_committed(self, token_T: Tensor, num_logits: int) -> Tensor:
        position_T = torch.arange(len(token_T)) + self._cache.length
        causal_TT = torch.ones(len(token_T), len(token_T), dtype=torch.bool).tril()
        logits = self._model.forward(self._known(token_T), position_T, causal_TT, self._cache, num_logits=num_logits)
        self._cache.commit(range(len(token_T)))
        return logits

    def _run(self, level: _Level, token_N: Tensor, root: int) -> Tensor:
        position_U = level.depth_U + root
        return self._model.forward(self._known(token_N[level.node_W]), position_U, level.ancestor_WU, self._cache)

    def _as_wide_as_target(self, logits_WV: Tensor) -> Tensor:
        """Padding beyond the target's vocabulary goes; a token that only the target has gets no chance."""
        missing = self._vocab_size - logits_WV.shape[1]
        return pad(logits_WV, (0, missing), value=-torch.inf) if missing else logits_WV

    def _known(self, token_T: Tensor) -> Tensor:
        """Ids that the draft has: the target may emit others, and then the draft's guess is poor but still a law."""
        return token_T.clamp(max=self._model.vocab_size - 1)
