"""Beam search with guesses: what one run of the target settles, counted on bigram tables; its beams stay its own."""

from collections.abc import Sequence

import numpy as np
import pytest

from offload.bench.studies.beams import Beam, Floats, LogProbs, beam_steps_per_run, extended

VOCAB_SIZE, WIDTH, STEPS = 12, 3, 60


def table(seed: int, weight: float = 1.0) -> LogProbs:
    """A bigram model; the weight says how much of it is that of seed 0."""
    both_VV = [np.random.default_rng(one).normal(0, 2, (VOCAB_SIZE, VOCAB_SIZE)) for one in (0, seed)]
    logits_VV = weight * both_VV[0] + (1 - weight) * both_VV[1]
    log_probs_VV = logits_VV - np.log(np.exp(logits_VV).sum(1, keepdims=True))

    def log_probs(beams: Sequence[Beam]) -> Floats:
        found: Floats = log_probs_VV[[beam[-1] for beam in beams]]
        return found

    return log_probs


def per_run(draft: LogProbs, *, draft_width: int = WIDTH, gamma: int = 4) -> float:
    steps = beam_steps_per_run(table(0), draft, [1], width=WIDTH, draft_width=draft_width, gamma=gamma, num_steps=STEPS)
    assert set(steps) <= set(range(1, gamma + 2)) and sum(steps) >= STEPS
    return float(np.mean(steps))


def test_a_step_keeps_the_best_continuations() -> None:
    log_probs = table(0)
    wanted = sorted(((log_probs([(1,)])[0, a] + log_probs([(a,)])[0, b], (1, a, b)) for a in range(VOCAB_SIZE)
                     for b in range(VOCAB_SIZE)), reverse=True)[:WIDTH]  # fmt: skip
    found = extended(extended({(1,): 0.0}, log_probs, VOCAB_SIZE), log_probs, WIDTH)
    assert list(found) == [beam for _, beam in wanted]
    assert list(found.values()) == pytest.approx([score for score, _ in wanted])


def test_the_target_as_its_own_draft_settles_all_and_a_stranger_next_to_nothing() -> None:
    assert per_run(table(0)) == 5
    assert per_run(table(0), draft_width=WIDTH - 1) == 1, "three beams cannot be among two"
    assert 1 <= per_run(table(7, weight=0)) < 1.3


def test_wider_drafts_and_better_ones_settle_more() -> None:
    by_width = [per_run(table(7, weight=0.8), draft_width=width) for width in (WIDTH, 2 * WIDTH, 4 * WIDTH)]
    assert by_width == sorted(by_width) and by_width[-1] > by_width[0] + 0.5
    assert per_run(table(7, weight=0.95)) > per_run(table(7, weight=0.6))
