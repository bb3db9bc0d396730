"""What speculation would save a beam search: an estimate after Leviathan et al. (2211.17192, section A.4).

The draft runs its own beam search, `draft_width` wide, for gamma steps; one run of the target scores all that it met. A
step of the target's search is settled by that run as long as all of its beams so far were among the draft's. Beams are
kept as the target's search keeps them, so its outcome is the same; nothing here decodes, it only counts. No torch.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Beam = tuple[int, ...]  # its tokens, those of the prompt included
LogProbs = Callable[[Sequence[Beam]], Floats]  # beams -> log probabilities (B, V) of what follows each
Beams = dict[Beam, float]  # with their scores, best first


def extended(beams: Beams, log_probs: LogProbs, width: int) -> Beams:
    """One step of a beam search: the best `width` continuations of all beams."""
    names, scores = list(beams), np.array(list(beams.values()))
    score_BV = scores[:, None] + log_probs(names)
    best = np.argsort(-score_BV, axis=None, kind="stable")[:width]
    return {(*names[at // score_BV.shape[1]], int(at % score_BV.shape[1])): float(score_BV.flat[at]) for at in best}


def beam_steps_per_run(
    target: LogProbs,
    draft: LogProbs,
    prompt: Iterable[int],
    *,
    width: int,
    draft_width: int,
    gamma: int,
    num_steps: int,
) -> list[int]:
    """Steps of the target's beam search that each of its runs settles, 1 to gamma + 1; at least `num_steps` in all.

    A run scores `width` + gamma `draft_width` rows, where the search alone scores `width` in each step.
    """
    beams, steps = {tuple(prompt): 0.0}, list[int]()
    while sum(steps) < num_steps:
        guesses = [beams]
        for _ in range(gamma):
            guesses.append(extended(guesses[-1], draft, draft_width))
        beams, settled = extended(beams, target, width), 1
        while settled <= gamma and beams.keys() <= guesses[settled].keys():
            beams, settled = extended(beams, target, width), settled + 1
        steps.append(settled)
    return steps
