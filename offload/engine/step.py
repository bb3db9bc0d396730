"""One pass over the weights for all texts that are being written: grow -> score -> accept ->
commit.

Texts share the pass and nothing else: each has its own tree, keys and values, noise and limits, and
joins or leaves between passes. Prompts are taken in by the same passes as the others' trees, in
chunks, in the order in which they came.
Invariant: what a text gains does not depend on who else is there, but for how much of it comes in
one pass.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload.drafting.base import Drafted, Drafter, DraftText
from offload.engine.sequence import PassFigures, path_logprobs
from offload.engine.sequence import Sequence as Text
from offload.model.target import BatchEntry, Target
from offload.planning.seen import ObservedPass
from offload.sampling.sampler import Rows
from offload.stats import Transfers
from offload.threads import Mode, ThreadPolicy
from offload.trees.topology import Shape


class BatchShare(NamedTuple):
    """One text's part of a pass."""

    text: Text
    num_pending: int  # tokens that its cache lacks, the root left out, and that this pass takes in
    is_whole: bool  # whether these are all of them: only then there is a root to grow a tree from


def share_out(texts: Sequence[Text], num_rows: int) -> list[BatchShare]:
    """Who has what part of a pass that takes in at most so many tokens; those who get none wait for
    the next.
    """
    shares = []
    for text in texts:
        missing = len(text.tokens) - 1 - text.caches.target.length
        taken = min(missing, num_rows)
        num_rows -= taken
        if taken or not missing:
            shares.append(BatchShare(text, taken, taken == missing))
    return shares


class SpeculationStep:
    """The passes of one decoder.

    Args:
        compute_in: from then on computes in this mode.
        max_prompt_rows: committed tokens that one pass takes in, of all texts together.
        learn: hears of every pass in which several texts had trees, and none a prompt.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        threads: ThreadPolicy,
        compute_in: Callable[[Mode], None],
        max_prompt_rows: int,
        learn: Callable[[ObservedPass], None] = lambda _: None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._threads = threads
        self._compute_in = compute_in
        self._max_prompt_rows = max_prompt_rows
        self._learn = learn

    def step(self, texts: Sequence[Text]) -> list[list[int]]:
        """One round of speculation: the newly accepted tokens of each text, none for one whose
        prompt is under way.
        """
        for text in texts:
            # of a step that was cut short they may hold more
            text.caches.clear(len(text.tokens) - 1)
        shares = share_out(texts, self._max_prompt_rows)
        started = time.perf_counter()
        moved = self._target.moved
        grown_texts = [share.text for share in shares if share.is_whole]
        num_pending = sum(share.num_pending for share in shares)
        shapes = [text.shape_among(len(grown_texts)) for text in grown_texts]
        modes = self._threads.modes(
            _rows_alike(num_pending + sum(shape.num_nodes for shape in shapes))
        )
        self._compute_in(modes.draft)
        drafted = dict(zip(map(id, grown_texts), self._grow(grown_texts, shapes), strict=True))
        grown = time.perf_counter()
        num_rows = num_pending + sum(one.tree.num_nodes for one in drafted.values())
        modes = modes._replace(sweep=self._threads.modes(_rows_alike(num_rows)).sweep)
        self._compute_in(modes.sweep)
        logits = self._score(shares, drafted)
        self._target.wait()
        scored = time.perf_counter()
        times = _Times(
            len(shares), grown - started, scored - grown, self._target.moved.since(moved)
        )
        counted = {
            id(share.text): self._commit(share, drafted.get(id(share.text)), rows, times)
            for share, rows in zip(shares, logits, strict=True)
        }
        if not num_pending:
            self._threads.took(_rows_alike(num_rows), draft_s=times.draft_s, sweep_s=times.sweep_s)
        if not num_pending and len(shares) > 1:
            gained = [len(counted[id(share.text)]) for share in shares]
            self._learn(
                ObservedPass(
                    shapes,
                    gained,
                    times.draft_s,
                    times.sweep_s,
                    times.moved.stall_s,
                    times.moved.num_bytes,
                )
            )
        for share in shares:
            stats = share.text.stats
            stats.threads, stats.peak_device_bytes = modes, self._target.peak_device_bytes
        return [counted.get(id(text), []) for text in texts]

    def _grow(self, texts: Sequence[Text], shapes: Sequence[Shape]) -> list[Drafted]:
        if len(texts) == 1:
            (text,), (shape,) = texts, shapes
            return [self._drafter.grow(shape, text.tokens, text.sampler, text.caches.draft)]
        asked = [
            DraftText(shape, text.tokens, text.sampler, text.caches.draft)
            for text, shape in zip(texts, shapes, strict=True)
        ]
        return self._drafter.grow_all(asked)

    def _score(self, shares: Sequence[BatchShare], drafted: dict[int, Drafted]) -> Sequence[Rows]:
        if len(shares) == 1 and shares[0].is_whole:
            (text, *_), (one,) = shares[0], drafted.values()
            return [self._target.score(one.tree, text.tokens, text.caches.target)]
        trees = [drafted[id(share.text)].tree if share.is_whole else None for share in shares]
        return self._target.score_all(
            [
                BatchEntry(share.text.tokens, share.text.caches.target, share.num_pending, tree)
                for share, tree in zip(shares, trees, strict=True)
            ]
        )

    def _commit(
        self, share: BatchShare, drafted: Drafted | None, rows: Rows, times: "_Times"
    ) -> list[int]:
        text = share.text
        caches = share.text.caches
        started = time.perf_counter()
        if drafted is None:
            caches.target.commit(range(share.num_pending))
            return []
        tree = drafted.tree
        sampler = text.sampler
        tokens = text.tokens
        accepted = text.rule.verify(
            tree, sampler.adjusted_rows(tree, rows), sampler, len(tokens) - 1
        )
        num_top = text.num_logprobs
        path = (accepted.nodes, accepted.tokens)
        num_tokens = len(tokens)
        logprobs = [] if num_top is None else path_logprobs(rows, *path, num_top)
        counted = text.accept(accepted.tokens, logprobs)
        nodes = accepted.nodes[: len(counted)]  # a state cannot go back to where a text has ended
        self._target.commit(nodes, num_tokens, caches.target)
        self._drafter.commit(drafted, nodes, accepted.tokens[: len(counted)], sampler, caches.draft)
        text.stats.first_guess.add(accepted.guesses[: len(counted)])
        seconds = {
            "draft_s": times.draft_s,
            "sweep_s": times.sweep_s,
            "verify_s": time.perf_counter() - started,
        }
        text.stats.add_step(times.moved, **seconds)
        text.last_pass = PassFigures(
            tree.topology.parent_N.tolist(), tree.tokens, accepted.nodes, *times
        )
        text.lengthen()
        return counted


class _Times(NamedTuple):
    """What all texts of a pass have in common."""

    num_texts: int
    draft_s: float
    sweep_s: float
    moved: Transfers


def _rows_alike(num_rows: int) -> int:
    """Of passes whose times can be compared: trees of guesses have another size in every step."""
    return 1 << (num_rows - 1).bit_length()
