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
from dataclasses import dataclass
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
from offload.trees.verification import Acceptance


def share_out(texts: Sequence[Text], num_rows: int) -> list[tuple[Text, BatchEntry]]:
    """Share out a pass that takes in at most `num_rows` tokens of prompts.

    Return its texts, each with what it has in the pass; texts that get no row wait for the next. No
    trees are grown yet.
    """
    batch = []
    for text in texts:
        cache = text.caches.target
        missing = len(text.tokens) - 1 - cache.length
        taken = min(missing, num_rows)
        num_rows -= taken
        if taken or not missing:
            batch.append((text, BatchEntry(text.tokens, cache, taken)))
    return batch


@dataclass(slots=True)
class SpeculationStep:
    """The passes of one decoder."""

    _target: Target
    _drafter: Drafter
    _threads: ThreadPolicy
    _compute_in: Callable[[Mode], None]  # from then on computes in this mode
    _max_prompt_rows: int  # committed tokens that one pass takes in, of all texts together
    # hears of every pass in which all texts had trees, and none a prompt
    _learn: Callable[[ObservedPass], None]

    def step(self, texts: Sequence[Text]) -> list[list[int]]:
        """Run one round of speculation; return the newly accepted tokens of each text.

        They are none for a text whose prompt is under way.
        """
        for text in texts:
            # of a step that was cut short they may hold more
            text.caches.clear(len(text.tokens) - 1)
        batch = share_out(texts, self._max_prompt_rows)
        num_pending = sum(entry.num_pending for _, entry in batch)
        growing = [text for text, entry in batch if entry.is_whole]
        shapes = [text.next_shape(len(growing)) for text in growing]
        moved = self._target.moved
        started = time.perf_counter()

        num_rows = num_pending + sum(shape.num_nodes for shape in shapes)
        modes = self._threads.modes(_rows_alike(num_rows))
        self._compute_in(modes.draft)
        drafted = self._grow(batch, shapes)
        grown = time.perf_counter()

        num_rows = num_pending + sum(one.tree.num_nodes for one in drafted if one)
        modes = modes._replace(sweep=self._threads.modes(_rows_alike(num_rows)).sweep)
        self._compute_in(modes.sweep)
        scored = self._score(batch, drafted)
        ended = time.perf_counter()

        moved = self._target.moved.since(moved)
        times = _Times(len(batch), grown - started, ended - grown, moved)
        gained = list[list[int]]()
        num_accepted = list[int]()
        for (text, entry), one, rows in zip(batch, drafted, scored, strict=True):
            text.stats.threads = modes
            text.stats.peak_device_bytes = self._target.peak_device_bytes
            if one is None:
                entry.cache.commit(range(entry.num_pending))
                gained.append([])
                continue
            began = time.perf_counter()
            adjusted = text.sampler.adjusted_rows(one.tree, rows)
            accepted = text.rule.verify(one.tree, adjusted, text.sampler, len(text.tokens) - 1)
            gained.append(self._commit(text, one, accepted, rows))
            num_accepted.append(len(accepted.tokens))
            self._note(text, one, accepted, times, began)
        if not num_pending:
            self._learn_from(shapes, drafted, num_accepted, times)
        by_text = {id(text): own for (text, _), own in zip(batch, gained, strict=True)}
        return [by_text.get(id(text), []) for text in texts]

    def _grow(
        self, batch: Sequence[tuple[Text, BatchEntry]], shapes: Sequence[Shape]
    ) -> list[Drafted | None]:
        """Return a tree for each text that is taken in whole; `shapes` are theirs."""
        growing = [text for text, entry in batch if entry.is_whole]
        asked = [
            DraftText(shape, text.tokens, text.sampler, text.caches.draft)
            for text, shape in zip(growing, shapes, strict=True)
        ]
        trees = iter(self._drafter.grow(asked))
        return [next(trees) if entry.is_whole else None for _, entry in batch]

    def _score(
        self, batch: Sequence[tuple[Text, BatchEntry]], drafted: Sequence[Drafted | None]
    ) -> Sequence[Rows]:
        """Return each text's logits after the nodes of its tree, when the pass is over."""
        scored = self._target.score(
            [
                entry._replace(tree=one and one.tree)
                for (_, entry), one in zip(batch, drafted, strict=True)
            ]
        )
        self._target.wait()
        return scored

    def _commit(self, text: Text, drafted: Drafted, accepted: Acceptance, rows: Rows) -> list[int]:
        """Keep the accepted path as far as the text goes on; return the tokens that it has gained."""
        caches = text.caches
        num_tokens = len(text.tokens)
        logprobs = []
        if text.num_logprobs is not None:
            logprobs = path_logprobs(rows, accepted.nodes, accepted.tokens, text.num_logprobs)
        counted = text.accept(accepted.tokens, logprobs)
        # a state cannot go back to where a text has ended
        nodes = accepted.nodes[: len(counted)]
        tokens = accepted.tokens[: len(counted)]
        self._target.commit(nodes, num_tokens, caches.target)
        self._drafter.commit(drafted, nodes, tokens, text.sampler, caches.draft)
        text.stats.first_guess.add(accepted.guesses[: len(counted)])
        return counted

    def _note(
        self, text: Text, drafted: Drafted, accepted: Acceptance, times: "_Times", began: float
    ) -> None:
        """Count the step in the text's figures, and let its next chain follow from them.

        `began` is when accepting and committing did.
        """
        stats = text.stats
        tree = drafted.tree
        verify_s = time.perf_counter() - began
        stats.add_step(times.moved, draft_s=times.draft_s, sweep_s=times.sweep_s, verify_s=verify_s)
        text.last_pass = PassFigures(
            tree.topology.parent_N.tolist(), tree.tokens, accepted.nodes, *times
        )
        text.lengthen()

    def _learn_from(
        self,
        shapes: Sequence[Shape],
        drafted: Sequence[Drafted | None],
        num_accepted: Sequence[int],
        times: "_Times",
    ) -> None:
        """Let later passes of trees alone profit from what this one took and yielded.

        What counts is what was accepted, also beyond the end of a text.
        """
        draft_s = times.draft_s
        sweep_s = times.sweep_s
        nodes = [one.tree.num_nodes for one in drafted if one]
        self._threads.took(_rows_alike(sum(nodes)), draft_s=draft_s, sweep_s=sweep_s)
        moved = times.moved
        link = (moved.stall_s, moved.num_bytes, moved.reading_s)
        self._learn(ObservedPass(shapes, nodes, num_accepted, draft_s, sweep_s, *link))


class _Times(NamedTuple):
    """What all texts of a pass have in common."""

    num_texts: int
    draft_s: float
    sweep_s: float
    moved: Transfers


def _rows_alike(num_rows: int) -> int:
    """Round up the rows of a pass, so that passes of nearly one size are compared with each other.

    Trees of guesses have another size in every step.
    """
    return 1 << (num_rows - 1).bit_length()
