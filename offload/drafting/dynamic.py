"""Trees whose shape follows the draft's own scores: deep where it is sure, wide where it is not.

With a rule that repeats the target's draws any tree is exact, so its shape may look at the tokens proposed. A node's
children have the chances pi = softmax(beta u), u is what the target's draw would maximise if the draft were the target
(log q + G; log q when greedy), and a path has the product f of its chances. The tree is the N best of all candidates
that were scored: SpecExec's (2406.02532) for f without noise, OPT-Tree's (2406.17276) bound on draft steps. Every pass
runs the best candidates that could still have a child among the N best.

Invariant: f never rises along a path and ties keep the order of finding, so the N best contain their parents.

Shape letters, in this file only: C candidates, O open ones, K children that a row lists, E rows that were run, of which
the root is row 0 and the W of a pass are the last.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.drafting.base import Drafted
from offload.drafting.children import point_mass_scores
from offload.drafting.draft_model import Draft
from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree
from offload.tree.topology import DynamicShape, in_level_order, level_order

_NUM_CHILDREN = 32  # that a node may have
_NOT_RUN = -1

# In the order of finding: a parent before its children, siblings by rank.
_CANDIDATE = np.dtype(
    [
        ("log_f", np.float64),
        ("token", np.int64),
        ("depth", np.int64),
        ("parent", np.int64),  # the row of its parent
        ("row", np.int64),  # its own, where it was run
    ]
)
Candidates = NDArray[Any]  # of _CANDIDATE, (C,)


def grow_best(draft: Draft, bounds: DynamicShape, tokens: Sequence[int], sampler: Sampler, exponent: float) -> Drafted:
    """The tree of the best paths below `tokens[-1]`, within `bounds`; `exponent` is beta, see `Sharpness`."""
    if bounds.depth == 0:
        return Drafted(TokenTree(in_level_order([-1]), torch.tensor([tokens[-1]])), {}, {})
    root, rows, best = len(tokens) - 1, _Rows(bounds.num_nodes), _Best(bounds)
    picked, logits_WV = np.zeros(1, dtype=_CANDIDATE), draft.catch_up(tokens)
    while picked.size:
        score_WV = point_mass_scores(logits_WV, sampler, (root + 1 + picked["depth"]).tolist()).float()
        rows.scores += score_WV.unbind()
        best.add(_children(picked, score_WV, exponent))
        picked = best.pick(rows.num_run, bounds.rows_per_pass)
        if picked.size:
            logits_WV = draft.run(torch.from_numpy(picked["token"].copy()), *rows.add(picked, root))
    return _as_tree(best.candidates, tokens[-1], rows.scores)


class _Best:
    """The N - 1 best candidates so far; the root is the one more."""

    def __init__(self, bounds: DynamicShape) -> None:
        self._bounds, self.candidates = bounds, np.zeros(0, dtype=_CANDIDATE)

    def add(self, more: Candidates) -> None:
        every = np.concatenate([self.candidates, more])
        order = np.argsort(-every["log_f"], kind="stable")  # stable: a tie goes to the parent
        self.candidates = every[np.sort(order[: self._bounds.num_nodes - 1])]

    def pick(self, first_row: int, count: int) -> Candidates:
        """The best that are worth running, at most `count`; they are given the rows from `first_row` on."""
        log_f_C, is_full = self.candidates["log_f"], self.candidates.size == self._bounds.num_nodes - 1
        is_open_C = (self.candidates["row"] == _NOT_RUN) & (self.candidates["depth"] < self._bounds.depth)
        if is_full:
            is_open_C &= log_f_C > log_f_C.min()  # a child of the last one would be no better
        open_O = np.flatnonzero(is_open_C)
        num_free = self._bounds.num_nodes - first_row
        chosen = open_O[np.argsort(-log_f_C[open_O], kind="stable")[: min(count, num_free)]]
        self.candidates["row"][chosen] = first_row + np.arange(chosen.size)
        return self.candidates[chosen]


class _Rows:
    """What was run, in order, the root first."""

    def __init__(self, capacity: int) -> None:
        self._position_E = torch.zeros(capacity, dtype=torch.long)
        self._sees_EE = torch.eye(capacity, dtype=torch.bool)
        self.num_run, self.scores = 1, list[Tensor]()

    def add(self, picked: Candidates, root: int) -> tuple[Tensor, Tensor]:
        """Positions and ancestors of the next rows, as `Draft.run` takes them."""
        lo, hi = self.num_run, self.num_run + picked.size
        self._position_E[lo:hi] = torch.from_numpy(root + picked["depth"])
        self._sees_EE[lo:hi] |= self._sees_EE[torch.from_numpy(picked["parent"].copy())]
        self.num_run = hi
        return self._position_E[1:hi], self._sees_EE[lo:hi, 1:hi]


def _children(parents: Candidates, score_WV: Tensor, exponent: float) -> Candidates:
    """The likeliest children of rows that have just been run; none without a chance."""
    token_WK = score_WV.topk(min(_NUM_CHILDREN, score_WV.shape[1])).indices
    log_pi_WK = (exponent * score_WV).log_softmax(1).gather(1, token_WK).cpu()  # never above 0: f must not rise
    children_WK = np.zeros(token_WK.shape, dtype=_CANDIDATE)
    children_WK["log_f"] = parents["log_f"][:, None] + log_pi_WK.numpy()
    children_WK["token"], children_WK["row"] = token_WK.cpu().numpy(), _NOT_RUN
    children_WK["depth"], children_WK["parent"] = parents["depth"][:, None] + 1, parents["row"][:, None]
    return children_WK[children_WK["log_f"] > -np.inf]


def _as_tree(found: Candidates, root_token: int, scores: Sequence[Tensor]) -> Drafted:
    was_run = np.flatnonzero(found["row"] != _NOT_RUN)
    found_of_row = {0: 0, **dict(zip(found["row"][was_run].tolist(), (was_run + 1).tolist(), strict=True))}
    parents = [-1, *(found_of_row[row] for row in found["parent"].tolist())]
    order = level_order(parents)
    token_N = torch.from_numpy(np.concatenate([[root_token], found["token"]])[order])
    node_of_found = {one: node for node, one in enumerate(order)}
    node_of_row = {row: node_of_found[one] for row, one in found_of_row.items()}
    return Drafted(
        TokenTree(in_level_order(parents), token_N),
        {node: row - 1 for row, node in node_of_row.items() if row},
        {node: scores[row] for row, node in node_of_row.items()},
    )
