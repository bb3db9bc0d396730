"""Trees whose shape follows the draft's own scores: deep where it is sure, wide where it is not.

With a rule that repeats the target's draws any tree is exact, so its shape may look at the tokens
proposed. A node's children have the chances pi = softmax(beta u), where u is what the target's draw
would maximise if the draft were the target (log q + G; log q when greedy), and a path has the
product f of its chances. The tree is the N best of all candidates that were scored: SpecExec's
(2406.02532) for f without noise, with OPT-Tree's (2406.17276) bound on draft steps. Every pass runs
the best candidates that could still have a child among the N best, as long as passes are worth
their time (`DraftPassPolicy`); candidates far less likely than the best one wait, so that a sure
draft is followed deep. Of the N best, the target's pass gets those that are worth their rows.

Trees of several texts are grown together: all candidates compete for the N nodes, and each pass
runs the best of all texts. A node counts by its f over what its text is expected to gain at all, so
that the sum of log tokens is largest. Plain f would give a sure text all it can use and let an
unsure one wait; but every text has to get through its hard places too, and over all, fewer tokens
came from the same passes.

Invariant: f never rises along a path and ties keep the order of finding, so the N best contain
their parents.

Shape letters, in this file only: C candidates, O open ones, K children that a row lists, E rows
that were run, of which the roots, one for each of R texts, come first and the W of a pass are the
last.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.drafting.draft_model import Draft, TreeRows, catch_up, run_together
from offload.drafting.lookup import NO_GUESSES, Guesses, TrieCursor, confidence
from offload.drafting.static import point_mass_scores
from offload.drafting.tiers import ROWS_OF_PASS, Scout, Standing, guesses_behind
from offload.sampling.sampler import Sampler
from offload.trees.token_tree import TokenTree
from offload.trees.topology import SIZES, DynamicShape, most_rows, tier_rows

# seconds of a step, by rows of the target's pass and of each draft pass
StepSeconds = Callable[[int, Sequence[int]], float]

_MOST_STEPS = 32  # steps over which the mean is taken


class DraftPassPolicy:
    """Decides whether another draft pass pays, and how many nodes are worth their rows.

    A pass that ends while the link still fills the slots is free. Any other has to bring tokens at
    the rate of all steps so far, their tokens over their seconds: that is what the time would bring
    in the next step. The rate of this step alone would end drafting early, since a step of few
    passes is short. The gain of the last pass stands for that of the next one, since passes bring
    less and less. Where nothing was measured, every pass pays. The decision looks at proposed
    tokens, so it is only for trees that may. One policy serves one kind of sampling.
    """

    def __init__(self, step_s: StepSeconds = lambda *_: 1.0) -> None:
        self._step_s = step_s
        # rows of the target's pass, those of the draft's passes, and tokens
        self._steps = deque[tuple[int, Sequence[int], int]](maxlen=_MOST_STEPS)
        self._grown: tuple[int, Sequence[int]] = (1, ())
        # tokens a second
        self._rate = 0.0

    def pays(self, gain: float, num_rows: int, draft_widths: Sequence[int]) -> bool:
        """Return True if one more pass like the last one is worth its time.

        Args:
            gain: expected tokens that the last pass has added.
            num_rows: rows of the target's pass.
            draft_widths: rows of every draft pass so far, one pass at least.
        """
        so_far_s = self._step_s(num_rows, draft_widths)
        then_s = self._step_s(num_rows, [*draft_widths, draft_widths[-1]])
        return gain >= self._rate * (then_s - so_far_s)

    def pass_s(self, num_rows: int, draft_widths: Sequence[int], width: int) -> float:
        """Return the seconds that one more draft pass over `width` rows takes; 0 where not known."""
        widths = [*draft_widths, width]
        return self._step_s(num_rows, widths) - self._step_s(num_rows, draft_widths)

    def num_rows(
        self, chances: NDArray[np.float64], draft_widths: Sequence[int], num_roots: int = 1
    ) -> int:
        """Count the rows that bring the most tokens beyond what their time brings: roots and best nodes.

        Args:
            chances: of the nodes below the roots to be accepted, falling.
            draft_widths: rows of every draft pass.
        """
        most = len(chances) + num_roots
        sizes = [size for size in SIZES if num_roots <= size < most] + [most]
        seconds = np.array([self._step_s(size, draft_widths) for size in sizes])
        tokens = np.cumsum([float(num_roots), *chances])[np.array(sizes) - num_roots]
        # the first step is like all others
        worth = tokens - self._rate * seconds if self._rate else tokens / seconds
        # of equally good ones the largest size
        return sizes[len(sizes) - 1 - int(worth[::-1].argmax())]

    def together_with(self, others: Iterable["DraftPassPolicy"]) -> "DraftPassPolicy":
        """Return the policy of a step for several texts, which brings the sum of their tokens."""
        joint = DraftPassPolicy(self._step_s)
        joint._rate = self._rate + sum(other._rate for other in others)
        return joint

    def has_grown(self, num_rows: int, draft_widths: Sequence[int]) -> None:
        """Note the rows of a step's passes, of all its texts."""
        self._grown = (num_rows, tuple(draft_widths))

    def learn(self, num_tokens: int) -> None:
        """Note that the step has brought `num_tokens`; seconds of all steps are as known by now."""
        self._steps.append((*self._grown, num_tokens))
        seconds = sum(self._step_s(num_rows, widths) for num_rows, widths, _ in self._steps)
        self._rate = sum(num for *_, num in self._steps) / seconds


_NUM_CHILDREN = 32  # children that a node may have
_AHEAD = 4  # one row in four may be a guess that is scored before all others
# A candidate that much less likely than the best of a pass waits: by then it may be ousted.
_LOG_FAR = math.log(16)
# With a scout a node is run if it is twice as likely as the last of a full tree: hardly a child of
# any other would be better than that, and it would take a row from a guess.
_LOG_TWICE = math.log(2)
_NOT_RUN = -1
_LEAST_ROOM = 32  # rows that are allocated for a text at first
_NO_COSTS = DraftPassPolicy()

# In the order of finding: a parent before its children, siblings by rank.
_CANDIDATE = np.dtype(
    [
        ("log_f", np.float64),
        ("token", np.int64),
        ("depth", np.int64),
        # the row of its parent
        ("parent", np.int64),
        # its own row, where it was run
        ("row", np.int64),
        # the text whose tree it belongs to
        ("text", np.int64),
    ]
)
Candidates = NDArray[Any]  # of _CANDIDATE, (C,)


def candidates(count: int) -> Candidates:
    """Return this many candidates, all zeros."""
    return np.zeros(count, dtype=_CANDIDATE)


@dataclass(eq=False)
class GrowingTree:
    """The tree of one text while it grows: rows that were run, in the order of the text's cache."""

    draft: Draft
    depth: int  # of the tree, at most
    tokens: Sequence[int]  # committed ones; the last is the root, and the first row
    sampler: Sampler
    exponent: float  # beta, by which candidates are ranked, see `DraftCalibration`
    guesses: Guesses = NO_GUESSES  # that are mixed with the draft's own
    # each pass also scores what is guessed behind the nodes that it runs, see `tiers`
    is_in_tiers: bool = False
    scout: Scout | None = None  # a smaller model that guesses there

    def __post_init__(self) -> None:
        self.root = len(self.tokens) - 1
        self.num_run = 1
        # tokens from below the root down to each row
        self.paths: list[tuple[int, ...]] = [()]
        self._position_U = np.zeros(_LEAST_ROOM, dtype=np.int64)
        self._sees_UU = np.eye(_LEAST_ROOM, dtype=bool)

    def add(self, picked: Candidates, parents: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return its next rows below these parents, which come first, as `Draft.run` takes them."""
        lo = self.num_run
        hi = self.num_run + picked.size
        self._make_room(hi)
        self._position_U[lo:hi] = self.root + picked["depth"]
        for level, above in _levels(parents, lo):
            self._sees_UU[level] |= self._sees_UU[above]
        self.paths += [()] * picked.size
        for row, (parent, token) in enumerate(
            zip(parents, picked["token"].tolist(), strict=True), lo
        ):
            self.paths[row] = (*self.paths[parent], token)
        self.num_run = hi
        token_W = torch.from_numpy(picked["token"].copy())
        return (
            token_W,
            torch.from_numpy(self._position_U[1:hi]),
            torch.from_numpy(self._sees_UU[lo:hi, 1:hi]),
        )

    def _make_room(self, num_rows: int) -> None:
        """Grow the arrays when needed: a whole forest's room in every text is too much."""
        num_more = max(num_rows, 2 * len(self._position_U)) - len(self._position_U)
        if num_rows > len(self._position_U):
            self._position_U = np.pad(self._position_U, (0, num_more))
            self._sees_UU = np.pad(self._sees_UU, (0, num_more))
            np.fill_diagonal(self._sees_UU, True)


def _levels(
    parents: Sequence[int], first: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield rows from `first` on with their parents, in groups without edges inside."""
    parent_W = np.array(parents)
    row_W = first + np.arange(parent_W.size)
    while row_W.size:
        is_next_W = parent_W < row_W[0]
        yield row_W[is_next_W], parent_W[is_next_W]
        row_W = row_W[~is_next_W]
        parent_W = parent_W[~is_next_W]


def grow_forest(
    trees: Sequence[GrowingTree],
    bounds: DynamicShape,
    policy: DraftPassPolicy = _NO_COSTS,
    widths: list[int] | None = None,
) -> list[TokenTree]:
    """Grow trees of depth one or more, of `bounds.num_nodes` nodes together, to the end.

    Args:
        widths: of every pass, to which those of the trees are added.
    """
    rows = _Rows(trees)
    has_scout = len(trees) == 1 and trees[0].scout is not None
    best = _Best(bounds, [tree.depth for tree in trees], has_scout=has_scout)
    picked = rows.run_roots(bounds, policy)
    expected = 0.0
    while picked.size:
        best.add(
            np.concatenate(
                [_children(parents, rows, trees[text]) for text, parents in _by_text(picked)]
            )
        )
        picked = best.scored()
        if not picked.size:
            gain = best.expected - expected
            expected = best.expected
            if not policy.pays(
                gain, policy.num_rows(best.chances, rows.widths, len(trees)), rows.widths
            ):
                break
            picked = best.pick(rows.num_run)
            if picked.size:
                rows.run_picked(picked, bounds.num_nodes, policy)
    best.cut(policy.num_rows(best.chances, rows.widths, len(trees)))
    if widths is not None:
        widths += rows.widths
    chosen = [best.candidates[best.candidates["text"] == text] for text in range(len(trees))]
    return [
        _as_tree(nodes, text, trees[text].tokens[-1], rows) for text, nodes in enumerate(chosen)
    ]


def _by_text(candidates: Candidates) -> Iterator[tuple[int, Candidates]]:
    """Yield the candidates of each text, which lie together."""
    texts, first = np.unique(candidates["text"], return_index=True)
    return zip(texts.tolist(), np.split(candidates, first[1:]), strict=True)


class _Best:
    """The N - R best candidates so far; the R roots are not among them.

    No `grow_best_first`: children come a pass at a time, for hundreds of rows, which arrays sort in
    the time in which a heap takes a few.
    """

    def __init__(
        self, bounds: DynamicShape, depths: Sequence[int], *, has_scout: bool = False
    ) -> None:
        self._bounds = bounds
        self._depth_R = np.array(depths)
        self.candidates = np.zeros(0, dtype=_CANDIDATE)
        # guesses in vain take no room from the tree of a copy that has a scout
        self._num_open = most_rows(bounds.num_nodes)
        num_rows = tier_rows(bounds.num_nodes) if has_scout else self._num_open
        self._is_expanded_E = np.zeros(num_rows, dtype=bool)
        self._log_margin = _LOG_TWICE if has_scout else 0.0

    def add(self, added: Candidates) -> None:
        # most of what is new would be cut at once
        if self._depth_R.size == 1 and self._is_full:
            added = added[added["log_f"] > self.candidates["log_f"].min(initial=np.inf)]
        self.candidates = np.concatenate([self.candidates, added])
        self.cut(self._bounds.num_nodes)

    def cut(self, num_nodes: int) -> None:
        """Keep the best, so that `num_nodes` are left with the roots."""
        self.candidates = self.candidates[np.sort(self._order()[: num_nodes - self._depth_R.size])]

    def _order(self) -> NDArray[np.int64]:
        """Return the indices of candidates, the best first; a tie goes to the parent."""
        log_f_C = self.candidates["log_f"]
        if self._depth_R.size == 1:
            return np.argsort(-log_f_C, kind="stable")
        gain_C = np.zeros(log_f_C.size)
        for text in range(self._depth_R.size):
            place_T = np.flatnonzero(self.candidates["text"] == text)
            place_T = place_T[np.argsort(-log_f_C[place_T], kind="stable")]
            expected = np.cumsum([1.0, *np.exp(log_f_C[place_T])])
            gain_C[place_T] = np.log(expected[1:] / expected[:-1])
        return np.argsort(-gain_C, kind="stable")

    def _weights(self) -> NDArray[np.float64]:
        """Return log f of every candidate, less that of the tokens its text is expected to gain."""
        f_C = np.exp(self.candidates["log_f"])
        text_C = self.candidates["text"]
        if self._depth_R.size == 1:
            return self.candidates["log_f"]
        return (
            self.candidates["log_f"]
            - np.log1p(np.bincount(text_C, f_C, self._depth_R.size))[text_C]
        )

    @property
    def chances(self) -> NDArray[np.float64]:
        """Return each candidate's chance to be accepted, the best first."""
        return np.exp(self.candidates["log_f"][self._order()])

    @property
    def expected(self) -> float:
        """Return the number of them that the target's pass is expected to accept."""
        return float(np.exp(self.candidates["log_f"]).sum())

    @property
    def _is_full(self) -> bool:
        return self.candidates.size == self._bounds.num_nodes - self._depth_R.size

    def scored(self) -> Candidates:
        """Return candidates that were run and whose children are not candidates yet."""
        row_C = self.candidates["row"]
        waiting = self.candidates[(row_C != _NOT_RUN) & ~self._is_expanded_E[row_C]]
        return self._expanded(waiting[np.lexsort((waiting["row"], waiting["text"]))])

    def pick(self, first_row: int) -> Candidates:
        """Return the best candidates worth a pass, with rows from `first_row` on, text by text."""
        log_f_C = self._weights()
        is_open_C = self.candidates["row"] == _NOT_RUN
        is_open_C &= self.candidates["depth"] < self._depth_R[self.candidates["text"]]
        if self._is_full:
            # a child of the last one would be no better
            is_open_C &= log_f_C > log_f_C.min() + self._log_margin
        open_O = np.flatnonzero(is_open_C)
        count = min(
            self._bounds.pace.rows_per_pass(self._bounds.num_nodes),
            self._is_expanded_E.size - first_row,
            max(0, self._num_open),
        )
        chosen = open_O[np.argsort(-log_f_C[open_O], kind="stable")[:count]]
        chosen = chosen[log_f_C[chosen] > log_f_C[chosen].max(initial=-np.inf) - _LOG_FAR]
        chosen = chosen[np.argsort(self.candidates["text"][chosen], kind="stable")]
        self.candidates["row"][chosen] = first_row + np.arange(chosen.size)
        return self._expanded(self.candidates[chosen])

    def _expanded(self, picked: Candidates) -> Candidates:
        self._is_expanded_E[picked["row"]] = True
        self._num_open -= picked.size
        return picked


class _Rows:
    """What was run, in order, the roots first."""

    def __init__(self, trees: Sequence[GrowingTree]) -> None:
        self._trees = trees
        self.scores = list[Tensor]()
        self.cursors = list[TrieCursor]()
        # the text of every row, and which of that text's rows it is
        self._text_of = list[int]()
        self.local = list[int]()
        # rows of every pass
        self.widths = list[int]()
        # rows of guesses that were run before others, by parent and token
        self.ahead: dict[tuple[int, int], int] = {}

    @property
    def num_run(self) -> int:
        return len(self.scores)

    def run_roots(self, bounds: DynamicShape, policy: DraftPassPolicy) -> Candidates:
        """Score the roots, and the likeliest guesses behind them; return the roots."""
        roots = np.zeros(len(self._trees), dtype=_CANDIDATE)
        roots["row"] = roots["text"] = np.arange(roots.size)
        self._text_of = list(range(roots.size))
        self.local = [0] * roots.size
        cursors = [tree.guesses.root for tree in self._trees]
        tree = self._trees[0]
        guessed: Sequence[Standing] = []
        if tree.scout is not None and len(self._trees) == 1:
            root = Standing(1.0, 0, cursors[0], tree.tokens[-1])
            guessed = self._guessed_behind([root], bounds.num_nodes, policy)
        if not guessed:
            drafts = [each.draft for each in self._trees]
            self.keep(roots, catch_up(drafts, [each.tokens for each in self._trees]), cursors)
            self.run_ahead(bounds)
            return roots
        added = self._with_rows(guessed, 0, 1)
        logits = tree.draft.catch_up_beside(tree.tokens, self._laid(0, added))
        cursors += [node.cursor for node in guessed]
        self.keep(np.concatenate([roots, added]), logits, cursors)
        return roots

    def cursors_of(self, picked: Candidates) -> list[TrieCursor]:
        """Return where guesses stand for what follows each candidate."""
        if not any(tree.guesses for tree in self._trees):
            return [NO_GUESSES.root] * picked.size
        below = picked[["parent", "token"]].tolist()
        guesses = [self._trees[self._text_of[parent]].guesses for parent, _ in below]
        return [
            trie.follow(self.cursors[parent], token)
            for trie, (parent, token) in zip(guesses, below, strict=True)
        ]

    def keep(self, picked: Candidates, logits_WV: Tensor, cursors: Sequence[TrieCursor]) -> None:
        """Note the scores that rank these rows' children, and where guesses stand."""
        self.widths.append(picked.size)
        self.cursors += cursors
        lo = self.num_run
        for text, nodes in _by_text(picked):
            logits = logits_WV[: nodes.size]
            tree = self._trees[text]
            sampler = tree.sampler
            logits_WV = logits_WV[nodes.size :]
            if sampler.is_adjusted:
                logits = sampler.adjusted(
                    logits, [tree.paths[row] for row in self.local[lo : lo + nodes.size]]
                )
            positions = (tree.root + 1 + nodes["depth"]).tolist()
            self.scores += point_mass_scores(logits, sampler, positions).float().unbind()
            lo += nodes.size

    def run(self, picked: Candidates, cursors: Sequence[TrieCursor]) -> None:
        """Score candidates as the next rows, parents before their children."""
        added = [
            (self._trees[text].draft, self._laid(text, nodes)) for text, nodes in _by_text(picked)
        ]
        self.keep(picked, run_together(added), cursors)

    def _laid(self, text: int, nodes: Candidates) -> TreeRows:
        """Return candidates as the next rows of a text's tree."""
        tree = self._trees[text]
        self._text_of += [text] * nodes.size
        self.local += range(tree.num_run, tree.num_run + nodes.size)
        return tree.add(nodes, [self.local[row] for row in nodes["parent"].tolist()])

    def run_picked(self, picked: Candidates, num_nodes: int, policy: DraftPassPolicy) -> None:
        """Score candidates, and in tiers what is guessed behind them; a pass of several texts has enough rows."""
        cursors = self.cursors_of(picked)
        tree = self._trees[0]
        is_guessed = tree.scout is not None or (tree.is_in_tiers and tree.guesses)
        if len(self._trees) > 1 or not is_guessed:
            self.run(picked, cursors)
            return
        columns = (np.exp(picked["log_f"]), picked["depth"], cursors, picked["token"])
        above = [tree.paths[self.local[row]] for row in picked["parent"].tolist()]
        nodes = [
            Standing(*node, path=(*path, node[-1]))
            for node, path in zip(zip(*columns, strict=True), above, strict=True)
        ]
        guessed = self._guessed_behind(nodes, num_nodes, policy)
        added = self._with_rows(guessed, self.num_run, picked.size)
        cursors += [node.cursor for node in guessed]
        self.run(np.concatenate([picked, added]), cursors)

    def _guessed_behind(
        self, nodes: Sequence[Standing], num_nodes: int, policy: DraftPassPolicy
    ) -> list[Standing]:
        """Return guesses behind the nodes that a lone text's next pass runs anyway."""
        tree = self._trees[0]
        if tree.scout is None:
            # rows in vain must leave room for a tree of the draft's own
            room = min(ROWS_OF_PASS, num_nodes - self.num_run)
            return guesses_behind(tree.guesses, nodes, room, tree.depth)
        room = tier_rows(num_nodes) - max(1, self.num_run)
        pass_s = partial(policy.pass_s, num_nodes, self.widths)
        return tree.scout.behind(tree.guesses, nodes, room, tree.depth, pass_s)

    def _with_rows(self, guessed: Sequence[Standing], first: int, num_picked: int) -> Candidates:
        """Return guesses as candidates in the rows behind picked ones, which begin with `first`."""
        added = np.zeros(len(guessed), dtype=_CANDIDATE)
        for place, node in enumerate(guessed):
            parent = first + (node.parent or 0)
            row = first + num_picked + place
            added[place] = (0.0, node.token, node.depth, parent, row, 0)
            self.ahead[parent, node.token] = row
        return added

    def run_ahead(self, bounds: DynamicShape) -> None:
        """Score the likeliest guesses of all texts in one pass."""
        most = bounds.num_nodes // _AHEAD // len(self._trees)
        first = self.num_run
        ahead = list[tuple[int, int, int, int]]()
        cursors = list[TrieCursor]()
        for text, tree in enumerate(self._trees):
            guesses = tree.guesses.best(most, tree.depth - 1, least=1 / bounds.num_nodes)[1:]
            # the root, then they themselves
            rows = [text, *range(first + len(ahead), first + len(ahead) + len(guesses))]
            ahead += [(guess.item[1], guess.depth, rows[guess.parent], text) for guess in guesses]
            cursors += [tree.guesses.follow(*guess.item) for guess in guesses]
        if not ahead:
            return
        picked = np.zeros(len(ahead), dtype=_CANDIDATE)
        for name, column in zip(
            ("token", "depth", "parent", "text"), zip(*ahead, strict=True), strict=True
        ):
            picked[name] = column
        self.run(picked, cursors)
        self.ahead = {
            (parent, token): row for row, (token, _, parent, _) in enumerate(ahead, first)
        }


def ranked_children(score_WV: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """Return log pi (W, V) of every child of each row, and the likeliest children (W, K)."""
    # never above 0: f must not rise
    log_pi_WV = (exponent * score_WV).log_softmax(1)
    return log_pi_WV, score_WV.topk(min(_NUM_CHILDREN, score_WV.shape[1])).indices


def _children(parents: Candidates, rows: _Rows, tree: GrowingTree) -> Candidates:
    """Return the likeliest children, if they have a chance, of one text's rows that were run."""
    score_WV = torch.stack([rows.scores[row] for row in parents["row"].tolist()])
    log_pi_WV, token_WK = ranked_children(score_WV, tree.exponent)
    children_WK = np.zeros(token_WK.shape, dtype=_CANDIDATE)
    children_WK["log_f"] = log_pi_WV.gather(1, token_WK).cpu().numpy()
    children_WK["token"] = token_WK.cpu().numpy()
    children_WK["row"] = _NOT_RUN
    children_WK["parent"] = parents["row"][:, None]
    children = children_WK.reshape(-1)
    guesses = tree.guesses
    if guesses:
        children = _mixed(children_WK, log_pi_WV, rows, guesses, tree.sampler)
    if rows.ahead:
        pairs = zip(children["parent"].tolist(), children["token"].tolist(), strict=True)
        children["row"] = [rows.ahead.get(pair, _NOT_RUN) for pair in pairs]
    above = parents[np.searchsorted(parents["row"], children["parent"])]
    children["depth"] = above["depth"] + 1
    children["text"] = above["text"]
    children["log_f"] += above["log_f"]
    return children[children["log_f"] > -np.inf]


def _mixed(
    children_WK: Candidates, log_pi_WV: Tensor, rows: _Rows, guesses: Guesses, sampler: Sampler
) -> Candidates:
    """Return the draft's children and the guessed ones, each with its chance by both opinions."""
    best_W = np.exp(children_WK["log_f"].max(1, initial=-np.inf)).tolist()
    parents = children_WK["parent"][:, 0].tolist()
    followers = [
        guesses.children(rows.cursors[row], confidence(best))
        for row, best in zip(parents, best_W, strict=True)
    ]
    pairs = [
        (row, token, chance)
        for row, (chances, _) in enumerate(followers)
        for token, chance in chances.items()
    ]
    guessed = np.zeros(len(pairs), dtype=_CANDIDATE)
    if not pairs:
        return children_WK.reshape(-1)
    row_G, token_G, chance_G = (np.array(column) for column in zip(*pairs, strict=True))
    rest_W = np.array([rest for _, rest in followers])
    place_G = sampler.send(torch.from_numpy(row_G * log_pi_WV.shape[1] + token_G), log_pi_WV)
    log_pi_G = log_pi_WV.take(place_G).cpu().numpy()
    guessed["log_f"] = np.log(chance_G + rest_W[row_G] * np.exp(log_pi_G))
    guessed["token"] = token_G
    guessed["parent"] = children_WK["parent"][row_G, 0]
    guessed["row"] = _NOT_RUN
    children_WK["log_f"] += np.log(rest_W)[:, None]
    is_other_WK = ~np.isin(_keys(children_WK), _keys(guessed))
    return np.concatenate([guessed, children_WK[is_other_WK]])


def _keys(candidates: Candidates) -> NDArray[np.int64]:
    """Return one number for each pair of parent and token."""
    return (candidates["parent"] << 32) + candidates["token"]


def _as_tree(nodes: Candidates, root: int, root_token: int, rows: _Rows) -> TokenTree:
    row_of = {
        index: row for index, row in enumerate([root, *nodes["row"].tolist()]) if row != _NOT_RUN
    }
    index_of = {row: index for index, row in row_of.items()}
    return TokenTree.listed(
        [-1, *(index_of[row] for row in nodes["parent"].tolist())],
        [root_token, *nodes["token"].tolist()],
        row_of={index: rows.local[row] - 1 for index, row in row_of.items() if index},
        score_of={index: rows.scores[row] for index, row in row_of.items()},
    )
