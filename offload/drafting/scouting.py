"""A small model as a scout below a copy: it guesses behind the rows that a pass of the copy runs.

Of each node that the copy runs, the root first, the scout scores the children, then those of its
likeliest guesses, and so on, as long as a pass of its own brings more than its time would bring in the
copy's. Of all guesses the pass takes as many as pay: the n that maximise the chances of its rows over
its seconds. How long both models' passes take is learned from the clock, how often the copy agrees from
what is emitted.

Invariant: a scout's guesses only choose rows of the copy; its own rows lie in a cache of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from offload.drafting.base import DraftText
from offload.drafting.draft_model import Draft, catch_up, run_together
from offload.drafting.dynamic import Candidates, GrowingTree, candidates, ranked_children
from offload.drafting.lookup import NO_GUESSES, Guesses, confidence
from offload.drafting.model_drafter import DraftSetup, ModelDrafter
from offload.drafting.static import point_mass_scores
from offload.drafting.tiers import Standing
from offload.model.kv_cache import KVCache
from offload.model.taps import Taps
from offload.sampling.sampler import Sampler
from offload.trees.token_tree import TokenTree
from offload.trees.topology import tier_rows
from offload.trees.verification import Acceptance

# of a pass of the copy: up to here each row is equally cheap, with more all of its words are expanded
_MOST_ROWS = 16
# What each further row of a copy's pass takes, in times of one row alone, where that was not
# measured: up to 12 rows of layers with 12 M weights, on a Zen 5 core.
_ROW_SHARE = 0.05
# nodes that a pass of the scout runs, and such passes for one of the copy
_ROWS_OF_SCOUT = 8
_MOST_PASSES = 8
_NUM_CHILDREN = 8
# a guess is looked at where its chance is at least that share of the likeliest node's
_LEAST_SHARE = 0.03
# a pass of the scout over one of the copy, before any was seen; how fast what was seen fades
_FIRST_RATIO = 1 / 16
_FADES = 0.1


class PassTimes:
    """Seconds of a pass of the copy over one row, and of a pass of the scout, as the last ones took."""

    def __init__(self) -> None:
        self._copy_s = 1.0
        self._scout_s = _FIRST_RATIO
        self._are_seen = False

    @property
    def ratio(self) -> float:
        """Return the time of a scout's pass in times of a copy's over one row."""
        return self._scout_s / self._copy_s

    def saw(self, copy_s: float, scout_s: float) -> None:
        """Note a pass of the copy, scaled to one row, and the mean of the scout's beside it."""
        fades = _FADES if self._are_seen else 1.0
        self._are_seen = True
        self._copy_s += fades * (copy_s - self._copy_s)
        self._scout_s += fades * (scout_s - self._scout_s)


def _row_share(pass_s: Callable[[int], float]) -> float:
    """Return the time of each further row of a copy's pass, in times of one row alone."""
    one_s = pass_s(1)
    if one_s <= 0:
        return _ROW_SHARE
    share = (pass_s(_MOST_ROWS) / one_s - 1) / (_MOST_ROWS - 1)
    # the link may hide most of one row's pass, but a further row takes no longer than a pass of its own
    return min(1.0, max(0.0, share))


class ScoutTree:
    """What the scout has run of one text in a step, by paths from below the root.

    Args:
        tree: of the scout, of which nothing was run yet.
        most_rows: of it.
    """

    def __init__(self, tree: GrowingTree, most_rows: int, times: PassTimes) -> None:
        self._tree = tree
        self._most_rows = most_rows
        self._times = times
        self.row_of = dict[tuple[int, ...], int]()
        self.score_of = dict[tuple[int, ...], Tensor]()
        self._children = dict[tuple[int, ...], dict[int, float]]()
        # of the last call: when it ended, the scout's mean pass, the relative size of the copy's
        self._last: tuple[float, float, float] | None = None

    def behind(
        self,
        guesses: Guesses,
        picked: Sequence[Standing],
        num_rows: int,
        depth: int,
        pass_s: Callable[[int], float],
    ) -> list[Standing]:
        """Return guesses worth their rows, see `Scout`."""
        began_s = time.perf_counter()
        self._note_pass(began_s)
        row_share = _row_share(pass_s)
        nodes = [*picked]
        room = min(num_rows, _MOST_ROWS) - len(picked)
        chosen, num_passes = self._chosen(guesses, nodes, room, depth, row_share)
        ended_s = time.perf_counter()
        size = 1 + row_share * (len(picked) + len(chosen) - 1)
        scout_s = (ended_s - began_s) / max(1, num_passes)
        # the root's pass may read a prompt as well
        self._last = (ended_s, scout_s, size) if picked[0].depth else None
        # guesses move up behind the picked nodes, and all of them have a parent
        row_of: dict[int | None, int] = {
            index: row for row, index in enumerate([*range(len(picked)), *chosen])
        }
        return [nodes[index]._replace(parent=row_of[nodes[index].parent]) for index in chosen]

    def _chosen(
        self, guesses: Guesses, nodes: list[Standing], room: int, depth: int, row_share: float
    ) -> tuple[Sequence[int], int]:
        """Add guesses to picked nodes, and return the places of those that pay, and the scout's passes."""
        num_picked = len(nodes)
        likeliest: Sequence[int] = range(num_picked)
        are_run = set[int]()
        chosen: Sequence[int] = []
        best = 0.0
        num_passes = 0
        while num_passes < _MOST_PASSES and room > 0:
            # a leaf need not be scored
            inner = (index for index in likeliest if nodes[index].depth + 1 < depth)
            to_run = [index for index in inner if index not in are_run][:_ROWS_OF_SCOUT]
            if not to_run or not self._run([nodes[index].path for index in to_run]):
                break
            num_passes += 1
            are_run |= {*to_run}
            for index in to_run:
                nodes += self._guesses_at(guesses, nodes[index], index, nodes[0].chance)
            likeliest = sorted(range(len(nodes)), key=lambda index: -nodes[index].chance)
            guessed = [index for index in likeliest if index >= num_picked][:room]
            tried, rate = self._worth(nodes, num_picked, guessed, num_passes, row_share)
            if rate <= best:
                break
            chosen = tried
            best = rate
        return chosen, num_passes

    def _note_pass(self, began_s: float) -> None:
        """Learn what the copy's last pass took, which is over."""
        if self._last is not None:
            ended_s, scout_s, size = self._last
            self._times.saw((began_s - ended_s) / size, scout_s)

    def _worth(
        self,
        nodes: Sequence[Standing],
        num_picked: int,
        guessed: Sequence[int],
        num_passes: int,
        row_share: float,
    ) -> tuple[Sequence[int], float]:
        """Return the first guesses that bring the largest rate, and that: chances over times of a row.

        A row that the copy agrees with would be run in any case, so only others take time.
        """
        values = accumulate(
            (nodes[index].chance for index in guessed),
            initial=sum(node.chance for node in nodes[:num_picked]),
        )
        num_in_vain = accumulate(
            (1 - nodes[index].agreement for index in guessed), initial=num_picked - 1.0
        )
        least = 1 + num_passes * self._times.ratio
        rates = [
            value / (least + row_share * in_vain)
            for value, in_vain in zip(values, num_in_vain, strict=True)
        ]
        best = int(np.argmax(rates))
        return guessed[:best], rates[best]

    def _guesses_at(
        self, guesses: Guesses, node: Standing, index: int, most: float
    ) -> list[Standing]:
        """Return the children of a node that was run, by the scout and by other sources.

        Args:
            index: of the node.
            most: the largest chance of any.
        """
        scouted = self._children[node.path]
        chances, rest = guesses.children(node.cursor, confidence(max(scouted.values())))
        for token, share in scouted.items():
            chances[token] = chances.get(token, 0.0) + rest * share
        return [
            Standing(
                node.chance * share,
                node.depth + 1,
                guesses.follow(node.cursor, token),
                token,
                index,
                (*node.path, token),
                node.agreement * share,
            )
            for token, share in chances.items()
            if node.chance * share > _LEAST_SHARE * most
        ]

    def _run(self, paths: Sequence[tuple[int, ...]]) -> bool:
        """Score the ends of these paths, and what leads there; return False where there is no room."""
        tree = self._tree
        if not self.row_of:
            logits_1V = catch_up([tree.draft], [tree.tokens])
            self.row_of[()] = 0
            self._keep([()], logits_1V)
        missing = {
            path[:end]: None
            for path in paths
            for end in range(1, len(path) + 1)
            if path[:end] not in self.row_of
        }
        added = sorted(missing, key=len)
        if tree.num_run + len(added) > self._most_rows:
            return False
        if added:
            for row, path in enumerate(added, tree.num_run):
                self.row_of[path] = row
            rows = tree.add(_as_candidates(added), [self.row_of[path[:-1]] for path in added])
            self._keep(added, run_together([(tree.draft, rows)]))
        return True

    def _keep(self, paths: Sequence[tuple[int, ...]], logits_WV: Tensor) -> None:
        tree = self._tree
        if tree.sampler.is_adjusted:
            logits_WV = tree.sampler.adjusted(logits_WV, paths)
        positions = [tree.root + 1 + len(path) for path in paths]
        score_WV = point_mass_scores(logits_WV, tree.sampler, positions).float()
        log_pi_WV, token_WK = ranked_children(score_WV, tree.exponent)
        token_WK = token_WK[:, :_NUM_CHILDREN]
        pi_WK = log_pi_WV.gather(1, token_WK).exp()
        listed = zip(paths, score_WV.unbind(), token_WK.tolist(), pi_WK.tolist(), strict=True)
        for path, score_V, tokens, shares in listed:
            self.score_of[path] = score_V
            self._children[path] = dict(zip(tokens, shares, strict=True))


def _as_candidates(paths: Sequence[tuple[int, ...]]) -> Candidates:
    nodes = candidates(len(paths))
    nodes["token"] = [path[-1] for path in paths]
    nodes["depth"] = [len(path) for path in paths]
    return nodes


@dataclass
class TieredState:
    """What a copy and its scout keep of one text, and what the scout has run in this step."""

    copy: KVCache
    scout: Any  # that of the scout's drafter, see `DraftState`
    tree: ScoutTree | None = None

    @property
    def saved(self) -> KVCache | None:
        """Return the tensors that a session keeps; a scout reads the text again."""
        return self.copy.saved

    def can_follow(self, num_positions: int) -> int:
        """Return the fewer of both answers, see `DraftState`."""
        return min(self.copy.can_follow(num_positions), self.scout.can_follow(num_positions))

    def copy_from(self, other: "TieredState", num_tokens: int) -> None:
        """Take over the first `num_tokens` tokens of another text."""
        self.copy.copy_from(other.copy, num_tokens)
        self.scout.copy_from(other.scout, num_tokens)

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text beyond its first `num_kept` tokens."""
        self.tree = None
        self.copy.clear(num_kept)
        self.scout.clear(num_kept)


class TieredDrafter(ModelDrafter):
    """Grows trees with a copy, and with a scout below it where one text is drafted alone."""

    def __init__(self, setup: DraftSetup, scout: ModelDrafter) -> None:
        super().__init__(*setup, is_in_tiers=True)
        self._scout = scout
        self._times = PassTimes()

    @property
    def needs(self) -> Taps | None:
        """Return which of the target's states the scout reads."""
        return self._scout.needs

    @property
    def num_bytes(self) -> int:
        """Return the bytes of both."""
        return super().num_bytes + self._scout.num_bytes

    def new_state(self, target: KVCache | None = None) -> Any:
        """Return empty caches of both."""
        return TieredState(super().new_state(), self._scout.new_state(target))

    def share_states(self, states: Sequence[Any]) -> None:
        """Let the copy's passes be shared; the scout guesses for one text alone."""
        super().share_states([state.copy for state in states])

    def observe(self, tokens: Sequence[int], state: Any) -> None:
        """Let the scout take in a prompt, see `Proposer`."""
        self._scout.observe(tokens, state.scout)

    def propose(
        self, batch: Sequence[DraftText], guesses: Sequence[Guesses] = ()
    ) -> list[TokenTree]:
        """Return a tree for each text; see `ModelDrafter`."""
        for text in batch:
            text.state.tree = None
        return super().propose(batch, guesses)

    def growing(self, text: DraftText, guesses: Guesses = NO_GUESSES) -> GrowingTree:
        """Return the tree of one text, with what the scout will run of it."""
        tree = super().growing(text, guesses)
        below = text._replace(state=text.state.scout)
        if self._scout.is_ready(below):
            room = tier_rows(text.shape.num_nodes)
            text.state.tree = ScoutTree(self._scout.growing(below), room, self._times)
        tree.scout = text.state.tree
        return tree

    def accepted(self, tree: TokenTree, path: Acceptance, sampler: Sampler, state: Any) -> None:
        """Keep the accepted path in both caches, and learn how often both were right."""
        super().accepted(tree, path, sampler, state.copy)
        scouted: ScoutTree | None = state.tree
        state.tree = None
        if scouted is None or not scouted.row_of:
            return
        # what the scout has run has both a row and scores
        place_of = {
            node: place
            for index, node in enumerate(path.nodes)
            if (place := tuple(path.tokens[:index])) in scouted.row_of
        }
        rows = {node: scouted.row_of[place] - 1 for node, place in place_of.items()}
        scores = {node: scouted.score_of[place] for node, place in place_of.items()}
        self._scout.keep(path, rows, scores, sampler, state.scout)

    def _draft(self, state: Any) -> Draft:
        return super()._draft(state.copy)
