"""One pass over the weights for all texts being written: grow -> score -> accept -> commit.

Texts share the pass and nothing else: each has its own tree, keys and values, noise and limits, and
joins or leaves between passes. Prompts are read in chunks, in order of arrival, by the same passes
as the others' trees. Invariant: a text's gain does not depend on other texts, except for how much
of it comes in one pass.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from offload.drafting.base import DraftText, Proposer
from offload.engine.sequence import StepMetrics, TokenSequence, path_logprobs
from offload.errors import RunError
from offload.model.parts import BatchPart
from offload.model.target import Target
from offload.planning.observed_passes import ObservedPass
from offload.sampling.logits import Rows
from offload.stats import Transfers
from offload.threads import Mode, StepModes, ThreadPolicy
from offload.trees.token_tree import TokenTree
from offload.trees.topology import Shape
from offload.trees.verification import Acceptance


def share_out(texts: Sequence[TokenSequence], num_rows: int) -> list[tuple[TokenSequence, int]]:
    """Share out a pass that reads at most `num_rows` tokens of prompts.

    Return its texts, each with its number of tokens; those without a row wait for the next pass.
    """
    batch = []
    for text in texts:
        taken = min(text.num_pending, num_rows)
        num_rows -= taken
        if taken or not text.num_pending:
            batch.append((text, taken))
    return batch


@dataclass(slots=True, eq=False)
class TextStep:
    """One text in a step; each of the four acts adds its part."""

    text: TokenSequence
    num_read: int  # prompt tokens that the pass reads
    shape: Shape | None  # shape of its tree; None while more of the prompt is left
    tree: TokenTree | None = None
    part: BatchPart | None = None
    rows: Rows | None = None  # the tree's scores
    accepted: Acceptance | None = None
    kept: Acceptance | None = None  # emitted tokens, up to the text's end
    gained: list[int] | Exception = field(default_factory=list)
    verify_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        return isinstance(self.gained, Exception)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Time the work for this text; an error of its own ends no other text."""
        began_s = time.perf_counter()
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # from its scores, or its grammar
            self.gained = error
        self.verify_s += time.perf_counter() - began_s


class StepResult(NamedTuple):
    """The result of a step for its listeners: figures, threads, the choice of trees."""

    texts: Sequence[TextStep]
    modes: StepModes
    draft_s: float
    sweep_s: float
    moved: Transfers
    peak_device_bytes: int
    # rows of each pass of the draft
    draft_widths: Sequence[int] = ()

    @property
    def observed(self) -> ObservedPass | None:
        """None if a text read its prompt or failed: such a pass is not typical."""
        if any(each.num_read or each.has_failed for each in self.texts):
            return None
        # tokens accepted beyond a text's end count as well
        seen = [(each.shape, each.tree, each.accepted) for each in self.texts]
        shapes = [shape for shape, _, _ in seen if shape is not None]
        nodes = [tree.num_nodes for _, tree, _ in seen if tree is not None]
        tokens = [len(accepted.tokens) for _, _, accepted in seen if accepted is not None]
        link = (self.moved.stall_s, self.moved.num_bytes, self.moved.reading_s)
        times = (self.draft_s, self.sweep_s, *link)
        verify_s = sum(each.verify_s for each in self.texts)
        return ObservedPass(shapes, nodes, tokens, *times, self.draft_widths, verify_s)


Listener = Callable[[StepResult], None]


@dataclass(slots=True)
class SpeculationStep:
    """Runs the steps of one decoder: grow, score, accept, commit."""

    _target: Target
    _drafter: Proposer
    _threads: ThreadPolicy
    _compute_in: Callable[[Mode], None]  # threads then compute in this mode
    # prompt tokens that a step reads, of all texts together; a single text has no limit
    _max_prompt_rows: int
    # called for every text of whose prompt a pass has read a part
    _keep: Callable[[TokenSequence], None]
    _listeners: Sequence[Listener] = ()

    def run(self, texts: Sequence[TokenSequence]) -> list[list[int] | Exception]:
        """Run one round of speculation; return each text's new tokens, none during its prompt.

        An error of a single text, after the pass, is returned in its place. Texts on both sides of
        longrope's turning point take two passes.
        """
        for text in texts:
            text.recover()
            self._target.turn(text.tokens, text.caches.target)
        sides: list[list[TokenSequence]] = [[], []]
        for text in texts:
            sides[text.caches.target.is_long].append(text)
        results = [self.step(side) for side in sides if side]
        gained = {each.text: each.gained for result in results for each in result.texts}
        return [gained.get(text, []) for text in texts]

    def step(self, texts: Sequence[TokenSequence]) -> StepResult:
        """Run one pass for texts on one side of the turning point."""
        batch = _batch_of(texts, self._max_prompt_rows)
        moved = self._target.moved
        began_s = time.perf_counter()
        draft_mode = self._grow(batch)
        grown_s = time.perf_counter()
        sweep_mode = self._score(batch)
        scored_s = time.perf_counter()
        moved = self._target.moved.since(moved)
        self._accept(batch)
        self._commit(batch)
        result = StepResult(
            batch,
            StepModes(draft_mode, sweep_mode),
            grown_s - began_s,
            scored_s - grown_s,
            moved,
            self._target.peak_device_bytes,
            self._drafter.widths,
        )
        for listener in self._listeners:
            listener(result)
        return result

    def _grow(self, batch: Sequence[TextStep]) -> Mode:
        """Grow the trees of texts whose prompt ends in this pass; return the threads' mode."""
        growing = [(each, each.shape) for each in batch if each.shape is not None]
        num_rows = sum(each.num_read for each in batch)
        num_rows += sum(shape.num_nodes for _, shape in growing)
        mode = self._threads.modes(_bucket(num_rows)).draft
        self._compute_in(mode)
        drafts = [
            DraftText(shape, each.text.tokens, each.text.sampler, each.text.caches.draft)
            for each, shape in growing
        ]
        for (each, _), tree in zip(growing, self._drafter.propose(drafts), strict=True):
            each.tree = tree
        return mode

    def _score(self, batch: Sequence[TextStep]) -> Mode:
        """Score all trees, and read parts of prompts, in one pass; return the threads' mode."""
        num_rows = sum(each.num_read for each in batch)
        num_rows += sum(each.tree.num_nodes for each in batch if each.tree is not None)
        mode = self._threads.modes(_bucket(num_rows)).sweep
        self._compute_in(mode)
        parts = [self._part_of(each) for each in batch]
        scored = self._target.score(parts)
        self._target.wait()
        for each, part, rows in zip(batch, parts, scored, strict=True):
            each.part = part
            each.rows = rows
        return mode

    def _part_of(self, each: TextStep) -> BatchPart:
        """Return a text's part of the pass; the drafter observes a prompt that takes several."""
        text = each.text
        observe = partial(self._observe, text)
        return self._target.part_of(
            text.tokens, text.caches.target, each.tree, each.num_read, observe
        )

    def _observe(self, text: TokenSequence) -> None:
        """Pass a prompt's hidden states to the drafter, and keep its rows for other texts."""
        self._drafter.observe(text.tokens, text.caches.draft)
        self._keep(text)

    def _accept(self, batch: Sequence[TextStep]) -> None:
        """Verify every tree by its text's rule."""
        for each in batch:
            if each.tree is None or each.rows is None:
                continue
            with each.alone():
                text = each.text
                adjusted = text.sampler.adjusted_rows(each.tree.path, each.rows)
                root = len(text.tokens) - 1
                each.accepted = text.rule.verify(each.tree, adjusted, text.sampler, root)

    def _commit(self, batch: Sequence[TextStep]) -> None:
        """Keep the states of accepted paths, and of parts of prompts."""
        for each in batch:
            if each.tree is None:
                assert each.part is not None, "it was scored"
                each.part.cache.commit(range(each.part.num_pending))
                self._observe(each.text)
            elif each.accepted is not None:
                with each.alone():
                    each.gained = self._commit_path(each, each.tree, each.accepted)
                    if each.num_read:
                        self._keep(each.text)

    def _commit_path(self, each: TextStep, tree: TokenTree, accepted: Acceptance) -> list[int]:
        """Keep an accepted path up to the text's end; return the tokens gained."""
        text = each.text
        caches = text.caches
        num_tokens = len(text.tokens)
        accepted = accepted.first(self._target.num_scored(num_tokens))
        logprobs = []
        if text.num_logprobs is not None and each.rows is not None:
            logprobs = path_logprobs(each.rows, accepted.nodes, accepted.tokens, text.num_logprobs)
        counted = text.extend(accepted.tokens, logprobs)
        # a state cannot go back to where a text has ended
        each.kept = accepted.first(len(counted))
        self._target.commit(each.kept.nodes, num_tokens, caches.target)
        self._drafter.accepted(tree, each.kept, text.sampler, caches.draft)
        return counted


def _batch_of(texts: Sequence[TokenSequence], num_rows: int) -> list[TextStep]:
    """Return the texts of a pass, each with a shape if its prompt ends there."""
    shared = share_out(texts, num_rows)
    num_growing = sum(num_read == text.num_pending for text, num_read in shared)
    return [
        TextStep(
            text,
            num_read,
            text.next_shape(num_growing) if num_read == text.num_pending else None,
        )
        for text, num_read in shared
    ]


def count_step(result: StepResult) -> None:
    """Count a step in the figures of its texts."""
    for each in result.texts:
        stats = each.text.stats
        stats.threads = result.modes
        stats.peak_device_bytes = result.peak_device_bytes
        if each.kept is None or each.tree is None or each.accepted is None or each.has_failed:
            continue
        stats.first_guess.add(each.kept.guesses)
        times = {"draft_s": result.draft_s, "sweep_s": result.sweep_s}
        stats.add_step(result.moved, **times, verify_s=each.verify_s)
        each.text.last_pass = StepMetrics(
            each.tree.topology.parent_N.tolist(),
            each.tree.tokens,
            each.accepted.nodes,
            len(result.texts),
            moved=result.moved,
            **times,
        )


def learning(threads: ThreadPolicy, learn: Callable[[ObservedPass], None]) -> Listener:
    """Return a listener from which threads, and the choice of trees, learn."""

    def listen(result: StepResult) -> None:
        if (observed := result.observed) is not None:
            num_rows = _bucket(sum(observed.nodes))
            threads.took(num_rows, draft_s=observed.draft_s, sweep_s=observed.sweep_s)
            learn(observed)

    return listen


def _bucket(num_rows: int) -> int:
    """Round up a pass's rows, so that passes of nearly one size are compared."""
    return 1 << (num_rows - 1).bit_length()
