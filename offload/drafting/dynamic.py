"""Trees whose shape follows the draft's own scores: deep where it is sure, wide where it is not.

With a rule that repeats the target's draws any tree is exact, so its shape may look at the tokens proposed. A node's
children have the chances pi = softmax(beta u), u is what the target's draw would maximise if the draft were the target
(log q + G; log q when greedy), and a path has the product f of its chances. The tree is the N best of all candidates
that were scored: SpecExec's (2406.02532) for f without noise, OPT-Tree's (2406.17276) bound on draft steps. Every pass
runs the best candidates that could still have a child among the N best, as long as passes are worth their time; those
that are far less likely than its best wait, so that a draft that is sure is followed deep. Of the N best a sweep gets
those that are worth their rows.

Invariant: f never rises along a path and ties keep the order of finding, so the N best contain their parents.

Shape letters, in this file only: C candidates, O open ones, K children that a row lists, E rows that were run, of which
the root is row 0 and the W of a pass are the last.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.drafting.base import Drafted
from offload.drafting.children import point_mass_scores
from offload.drafting.draft_model import Draft
from offload.drafting.guesses import NO_GUESSES, Guesses, Place
from offload.drafting.trust import sureness
from offload.drafting.worth import Worth
from offload.sampling.sampler import Sampler
from offload.tree.pace import most_rows
from offload.tree.token_tree import TokenTree
from offload.tree.topology import DynamicShape, in_level_order, level_order

_NUM_CHILDREN = 32  # that a node may have
_AHEAD = 4  # one of so many rows may be a guess that is scored before all others
_LOG_FAR = math.log(16)  # a candidate that much less likely than the best of a pass waits: it may be ousted by then
_NOT_RUN = -1
_NO_COSTS = Worth()

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


class Mixture(NamedTuple):
    """What candidates are ranked by."""

    exponent: float  # beta, see `Sharpness`
    guesses: Guesses = NO_GUESSES


def grow_best(
    draft: Draft, bounds: DynamicShape, tokens: Sequence[int], sampler: Sampler, mixture: Mixture,
    worth: Worth = _NO_COSTS,
) -> Drafted:  # fmt: skip
    """The tree of the best paths below `tokens[-1]`, within `bounds`, as far as passes are worth it."""
    if bounds.depth == 0:
        return Drafted(TokenTree(in_level_order([-1]), torch.tensor([tokens[-1]])), {}, {})
    rows, best = _Rows(draft, sampler, len(tokens) - 1, most_rows(bounds.num_nodes)), _Best(bounds)
    rows.keep(np.zeros(1, dtype=_CANDIDATE), draft.catch_up(tokens), [mixture.guesses.root])
    rows.run_ahead(mixture.guesses, bounds)
    picked, expected = np.zeros(1, dtype=_CANDIDATE), 0.0
    while picked.size:
        best.add(_children(picked, rows, mixture))
        picked = best.scored()
        if not picked.size:
            gain, expected = best.expected - expected, best.expected
            if not worth.pays(gain, worth.num_rows(best.chances, rows.widths), rows.widths):
                break
            picked = best.pick(rows.num_run)
            if picked.size:
                rows.run(picked, [mixture.guesses.follow(rows.places[one["parent"]], one["token"]) for one in picked])
    best.cut(worth.num_rows(best.chances, rows.widths))
    return _as_tree(best.candidates, tokens[-1], rows.scores)


class _Best:
    """The N - 1 best candidates so far; the root is the one more."""

    def __init__(self, bounds: DynamicShape) -> None:
        self._bounds, self.candidates = bounds, np.zeros(0, dtype=_CANDIDATE)
        self._is_expanded_E = np.zeros(most_rows(bounds.num_nodes), dtype=bool)

    def add(self, more: Candidates) -> None:
        self.candidates = np.concatenate([self.candidates, more])
        self.cut(self._bounds.num_nodes)

    def cut(self, num_nodes: int) -> None:
        """Keep so many of the best, the root being one."""
        order = np.argsort(-self.candidates["log_f"], kind="stable")  # stable: a tie goes to the parent
        self.candidates = self.candidates[np.sort(order[: num_nodes - 1])]

    @property
    def chances(self) -> NDArray[np.float64]:
        """Of each to be accepted, falling."""
        return np.sort(np.exp(self.candidates["log_f"]))[::-1]

    @property
    def expected(self) -> float:
        """How many of them a sweep is expected to accept."""
        return float(np.exp(self.candidates["log_f"]).sum())

    def scored(self) -> Candidates:
        """Those that were run already and whose children are not among the candidates yet."""
        row_C = self.candidates["row"]
        return self._expanded(self.candidates[(row_C != _NOT_RUN) & ~self._is_expanded_E[row_C]])

    def pick(self, first_row: int) -> Candidates:
        """The best that are worth running in one pass; they are given the rows from `first_row` on."""
        log_f_C, is_full = self.candidates["log_f"], self.candidates.size == self._bounds.num_nodes - 1
        is_open_C = (self.candidates["row"] == _NOT_RUN) & (self.candidates["depth"] < self._bounds.depth)
        if is_full:
            is_open_C &= log_f_C > log_f_C.min()  # a child of the last one would be no better
        open_O = np.flatnonzero(is_open_C)
        count = min(self._bounds.pace.rows_per_pass(self._bounds.num_nodes), self._is_expanded_E.size - first_row)
        chosen = open_O[np.argsort(-log_f_C[open_O], kind="stable")[:count]]
        chosen = chosen[log_f_C[chosen] > log_f_C[chosen].max(initial=-np.inf) - _LOG_FAR]
        self.candidates["row"][chosen] = first_row + np.arange(chosen.size)
        return self._expanded(self.candidates[chosen])

    def _expanded(self, picked: Candidates) -> Candidates:
        self._is_expanded_E[picked["row"]] = True
        return picked[np.argsort(picked["row"])]


class _Rows:
    """What was run, in order, the root first."""

    def __init__(self, draft: Draft, sampler: Sampler, root: int, capacity: int) -> None:
        self._draft, self._sampler, self._root = draft, sampler, root
        self._position_E = torch.zeros(capacity, dtype=torch.long)
        self._sees_EE = torch.eye(capacity, dtype=torch.bool)
        self.scores, self.places = list[Tensor](), list[Place]()
        self._paths = list[tuple[int, ...]]()  # tokens from below the root down to each
        self.widths = list[int]()  # of every pass
        self.ahead: dict[tuple[int, int], int] = {}  # rows of guesses that were run before others, by parent and token

    @property
    def num_run(self) -> int:
        return len(self.scores)

    def keep(self, picked: Candidates, logits_WV: Tensor, places: Sequence[Place]) -> None:
        """Note what the children of these rows are ranked by, and where guesses for them are."""
        first = len(self._paths)
        for parent, token, depth in picked[["parent", "token", "depth"]].tolist():
            self._paths.append((*self._paths[parent], token) if depth else ())
        logits_WV = self._sampler.adjusted(logits_WV, self._paths[first:])
        score_WV = point_mass_scores(logits_WV, self._sampler, (self._root + 1 + picked["depth"]).tolist())
        self.widths.append(picked.size)
        self.scores += score_WV.float().unbind()
        self.places += places

    def run(self, picked: Candidates, places: Sequence[Place]) -> None:
        """Score candidates, the next rows; those that hang from each other come parents first."""
        lo, hi = self.num_run, self.num_run + picked.size
        self._position_E[lo:hi] = torch.from_numpy(self._root + picked["depth"])
        for row, parent in enumerate(picked["parent"].tolist(), lo):
            self._sees_EE[row] |= self._sees_EE[parent]
        token_W = torch.from_numpy(picked["token"].copy())
        self.keep(picked, self._draft.run(token_W, self._position_E[1:hi], self._sees_EE[lo:hi, 1:hi]), places)

    def run_ahead(self, guesses: Guesses, bounds: DynamicShape) -> None:
        """Score the likeliest guesses in one pass."""
        found = guesses.best(bounds.num_nodes // _AHEAD, bounds.depth - 1, least=1 / bounds.num_nodes)
        if not found:
            return
        picked = np.zeros(len(found), dtype=_CANDIDATE)
        for name in ("token", "depth"):
            picked[name] = [getattr(guess, name) for guess in found]
        picked["parent"] = [guess.parent + 1 for guess in found]  # the root is row 0, and they are the next
        self.run(picked, [guess.place for guess in found])
        self.ahead = {(guess.parent + 1, guess.token): row for row, guess in enumerate(found, 1)}


def _children(parents: Candidates, rows: _Rows, mixture: Mixture) -> Candidates:
    """The likeliest children of rows that were run, row after row; none without a chance."""
    score_WV = torch.stack([rows.scores[row] for row in parents["row"].tolist()])
    log_pi_WV = (mixture.exponent * score_WV).log_softmax(1)  # never above 0: f must not rise
    token_WK = score_WV.topk(min(_NUM_CHILDREN, score_WV.shape[1])).indices
    children_WK = np.zeros(token_WK.shape, dtype=_CANDIDATE)
    children_WK["log_f"] = log_pi_WV.gather(1, token_WK).cpu().numpy()
    children_WK["token"], children_WK["row"] = token_WK.cpu().numpy(), _NOT_RUN
    children_WK["parent"] = parents["row"][:, None]
    children = _mixed(children_WK, log_pi_WV, rows, mixture.guesses) if mixture.guesses else children_WK.reshape(-1)
    above = parents[np.searchsorted(parents["row"], children["parent"])]
    children["depth"] = above["depth"] + 1
    children["log_f"] += above["log_f"]
    return children[children["log_f"] > -np.inf]


def _mixed(children_WK: Candidates, log_pi_WV: Tensor, rows: _Rows, guesses: Guesses) -> Candidates:
    """The children of the draft, and those that are guessed, each with the chance that both together give it."""
    best_W = np.exp(children_WK["log_f"].max(1, initial=-np.inf)).tolist()
    parents = children_WK["parent"][:, 0].tolist()
    told = [guesses.children(rows.places[row], sureness(best)) for row, best in zip(parents, best_W, strict=True)]
    pairs = [(row, token, chance) for row, (chances, _) in enumerate(told) for token, chance in chances.items()]
    guessed = np.zeros(len(pairs), dtype=_CANDIDATE)
    if not pairs:
        return children_WK.reshape(-1)
    row_G, token_G, chance_G = (np.array(column) for column in zip(*pairs, strict=True))
    rest_W = np.array([rest for _, rest in told])
    log_pi_G = log_pi_WV[torch.from_numpy(row_G), torch.from_numpy(token_G)].cpu().numpy()
    guessed["log_f"] = np.log(chance_G + rest_W[row_G] * np.exp(log_pi_G))
    guessed["token"], guessed["parent"] = token_G, children_WK["parent"][row_G, 0]
    guessed["row"] = [
        rows.ahead.get(pair, _NOT_RUN) for pair in zip(guessed["parent"].tolist(), token_G.tolist(), strict=True)
    ]
    children_WK["log_f"] += np.log(rest_W)[:, None]
    is_other_WK = ~np.isin(_keys(children_WK), _keys(guessed))
    return np.concatenate([guessed, children_WK[is_other_WK]])


def _keys(candidates: Candidates) -> NDArray[np.int64]:
    """One number for a parent and a token."""
    return (candidates["parent"] << 32) + candidates["token"]


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
