"""Scores of prompts' tokens before their texts are written; all that wait share passes.

Invariant: a job has the score of its prompt before its first piece or its end, except after an
error.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload.engine.job import Job
from offload.engine.scoring import Scorer, ScoreRequest

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder


def needs_score(ref: weakref.ref[Job]) -> bool:
    """Return True if a job waits for a score of its prompt."""
    job = ref()
    if job is None or job.is_cancelled:
        return False
    return job.request.num_prompt_logprobs is not None and job.prompt_score is None


class PromptScores:
    """Jobs whose prompts are scored together, a pass at a time."""

    def __init__(self, jobs: Sequence[weakref.ref[Job]]) -> None:
        self.jobs = jobs
        self._scored = list[Job]()
        self._scorer: Scorer | None = None

    def step(self, decoder: "Decoder") -> bool:
        """Run one pass over the weights; return False once all are scored and handed to their jobs."""
        if self._scorer is None:
            # a job that is dropped from now on gets no score
            alive = [(ref, job) for ref in self.jobs if (job := ref()) is not None]
            self._of = [ref for ref, _ in alive]
            self._scorer = decoder.start_scores([_wanted(job) for _, job in alive])
        if decoder.step_scores(self._scorer):
            return True
        for ref, score in zip(self._of, self._scorer.prompt_scores(), strict=True):
            if (job := ref()) is not None:
                job.prompt_score = score
        return False

    def release(self, decoder: "Decoder") -> None:
        """Free its place. Raises `UserError` if the decoder was closed."""
        if self._scorer is not None:
            decoder.release(self._scorer)


def _wanted(job: Job) -> ScoreRequest:
    prompt = job.request.prompt
    assert isinstance(prompt, tuple), "it was prepared"
    return ScoreRequest(prompt, 1, job.request.num_prompt_logprobs)
