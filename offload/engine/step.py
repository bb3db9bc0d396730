"""One pass over the weights for all texts being written: grow -> score -> accept -> commit.

Texts share the pass and nothing else: each has its own tree, keys and values, noise and limits, and
joins or leaves between passes. Prompts are taken in by the same passes as the others' trees, in
chunks, in the order in which they came.
Invariant: what a text gains does not depend on who else is there, except how much of it comes in
one pass.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from offload.drafting.base import DraftText, Proposer
from offload.engine.sequence import PassFigures, TokenSequence, path_logprobs
from offload.errors import RunError
from offload.model.parts import BatchPart
from offload.model.target import Target
from offload.planning.seen import ObservedPass
from offload.sampling.logits import Rows
from offload.threads import Mode, ThreadPolicy
from offload.trees.token_tree import TokenTree
from offload.trees.topology import Shape
from offload.trees.verification import Acceptance


def share_out(texts: Sequence[TokenSequence], num_rows: int) -> list[tuple[TokenSequence, int]]:
    """Share out a pass that takes in at most `num_rows` tokens of prompts.

    Return its texts, each with how many that are; those that get no row wait for the next.
    """
    batch = []
    for text in texts:
        taken = min(text.num_pending, num_rows)
        num_rows -= taken
        if taken or not text.num_pending:
            batch.append((text, taken))
    return batch


@dataclass(slots=True)
class SpeculationStep:
    """Runs the steps of one decoder: grow, score, accept, commit."""

    _target: Target
    _drafter: Proposer
    _threads: ThreadPolicy
    _compute_in: Callable[[Mode], None]  # from then on computes in this mode
    # committed tokens that a step takes in, of all texts together; a text alone has no limit
    _max_prompt_rows: int
    # hears of every pass in which all texts had trees, and none a prompt
    _learn: Callable[[ObservedPass], None]
    # hears of every text of whose prompt a pass has taken in a part
    _keep: Callable[[TokenSequence], None]

    def step(self, texts: Sequence[TokenSequence]) -> list[list[int] | Exception]:
        """Run one round of speculation; return each text's new tokens, none during its prompt.

        What fails of one text alone, behind the pass, is returned in its place.
        """
        for text in texts:
            text.recover()
            self._target.turn(text.tokens, text.caches.target)
        long = [text for text in texts if text.caches.target.is_long]
        if 0 < len(long) < len(texts):
            short = [text for text in texts if not text.caches.target.is_long]
            gained = dict(zip(short, self._step(short), strict=True))
            gained |= zip(long, self._step(long), strict=True)
            return [gained[text] for text in texts]
        return self._step(texts)

    def _step(self, texts: Sequence[TokenSequence]) -> list[list[int] | Exception]:
        """Run one pass for texts on one side of the turning point, see `step`."""
        batch = share_out(texts, self._max_prompt_rows)
        num_pending = sum(num for _, num in batch)
        growing = [text for text, num in batch if num == text.num_pending]
        shapes = [text.next_shape(len(growing)) for text in growing]
        moved = self._target.moved

        began_s = time.perf_counter()
        num_rows = num_pending + sum(shape.num_nodes for shape in shapes)
        modes = self._threads.modes(_rows_alike(num_rows))
        self._compute_in(modes.draft)
        drafts = [
            DraftText(shape, text.tokens, text.sampler, text.caches.draft)
            for text, shape in zip(growing, shapes, strict=True)
        ]
        trees = self._drafter.propose(drafts)

        grown_s = time.perf_counter()
        num_rows = num_pending + sum(tree.num_nodes for tree in trees)
        modes = modes._replace(sweep=self._threads.modes(_rows_alike(num_rows)).sweep)
        self._compute_in(modes.sweep)
        tree_of = dict(zip(growing, trees, strict=True))
        parts = [self._part_of(text, tree_of.get(text), num) for text, num in batch]
        scored = self._target.score(parts)
        self._target.wait()

        ended_s = time.perf_counter()
        moved = self._target.moved.since(moved)
        figures = PassFigures([], [], [], len(batch), grown_s - began_s, ended_s - grown_s, moved)
        gained = dict[TokenSequence, list[int] | Exception]()
        num_accepted = list[int]()
        for (text, num_read), part, rows in zip(batch, parts, scored, strict=True):
            text.stats.threads = modes
            text.stats.peak_device_bytes = self._target.peak_device_bytes
            if (tree := tree_of.get(text)) is None:
                part.cache.commit(range(part.num_pending))
                self._observe(text)
                continue
            try:
                accepted, gained[text] = self._verify(text, tree, rows, figures)
                num_accepted.append(len(accepted.tokens))
                if num_read:
                    self._keep(text)
            except RunError:
                raise
            except Exception as error:  # of its scores, or of its grammar
                gained[text] = error
        if not num_pending and len(num_accepted) == len(shapes):
            self._learn_from(shapes, trees, num_accepted, figures)
        return [gained.get(text, []) for text in texts]

    def _part_of(self, text: TokenSequence, tree: TokenTree | None, num_pending: int) -> BatchPart:
        """Return a text's part of the pass; of a prompt that takes several, the drafter hears."""
        caches = text.caches
        observe = partial(self._observe, text)
        return self._target.part_of(text.tokens, caches.target, tree, num_pending, observe)

    def _observe(self, text: TokenSequence) -> None:
        """Let the drafter take in what a pass has read of a prompt, and keep it for other texts."""
        self._drafter.observe(text.tokens, text.caches.draft)
        self._keep(text)

    def _verify(
        self, text: TokenSequence, tree: TokenTree, rows: Rows, figures: PassFigures
    ) -> tuple[Acceptance, list[int]]:
        """Return a scored tree's accepted part, and the text's new tokens, which it has by then."""
        began_s = time.perf_counter()
        adjusted = text.sampler.adjusted_rows(tree.path, rows)
        accepted = text.rule.verify(tree, adjusted, text.sampler, len(text.tokens) - 1)
        counted = self._commit(text, tree, accepted, rows)
        _note(text, tree, accepted, figures, time.perf_counter() - began_s)
        return accepted, counted

    def _commit(
        self, text: TokenSequence, tree: TokenTree, accepted: Acceptance, rows: Rows
    ) -> list[int]:
        """Keep the accepted path as far as the text goes on; return the tokens that it has gained."""
        caches = text.caches
        num_tokens = len(text.tokens)
        accepted = accepted.first(self._target.num_scored(num_tokens))
        logprobs = []
        if text.num_logprobs is not None:
            logprobs = path_logprobs(rows, accepted.nodes, accepted.tokens, text.num_logprobs)
        counted = text.extend(accepted.tokens, logprobs)
        # a state cannot go back to where a text has ended
        kept = accepted.first(len(counted))
        self._target.commit(kept.nodes, num_tokens, caches.target)
        self._drafter.accepted(tree, kept, text.sampler, caches.draft)
        text.stats.first_guess.add(kept.guesses)
        return counted

    def _learn_from(
        self,
        shapes: Sequence[Shape],
        trees: Sequence[TokenTree],
        num_accepted: Sequence[int],
        figures: PassFigures,
    ) -> None:
        """Learn from a pass of trees alone; what is accepted beyond a text's end counts as well."""
        draft_s = figures.draft_s
        sweep_s = figures.sweep_s
        moved = figures.moved
        nodes = [tree.num_nodes for tree in trees]
        self._threads.took(_rows_alike(sum(nodes)), draft_s=draft_s, sweep_s=sweep_s)
        link = (moved.stall_s, moved.num_bytes, moved.reading_s)
        self._learn(ObservedPass(shapes, nodes, num_accepted, draft_s, sweep_s, *link))


def _note(
    text: TokenSequence,
    tree: TokenTree,
    accepted: Acceptance,
    figures: PassFigures,
    verify_s: float,
) -> None:
    """Count the step in the text's figures, and let its next chain follow from them."""
    text.stats.add_step(
        figures.moved, draft_s=figures.draft_s, sweep_s=figures.sweep_s, verify_s=verify_s
    )
    text.last_pass = figures._replace(
        parents=tree.topology.parent_N.tolist(), tokens=tree.tokens, accepted=accepted.nodes
    )
    text.lengthen()


def _rows_alike(num_rows: int) -> int:
    """Round up a pass's rows, so that passes of nearly one size are compared with each other."""
    return 1 << (num_rows - 1).bit_length()
