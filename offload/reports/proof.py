"""Proof after the fact: is every emitted token what a resident float32 run of the model draws?

Speed is only worth printing for right tokens. In bf16 two tokens can lie closer than rounding, so
the proof is a gap per token: zero for the float32 draw, the distance to it otherwise.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint.open import open_headers
from offload.engine.build import resident_model
from offload.model.tree_model import TreeModel
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling

# two steps of bf16, 2^-7 of the value each, for logits around 10 in size
BF16_NOISE = 0.15


def rounding(sampling: Sampling) -> float:
    """Return the largest gap of scores, logits over the temperature, that bf16 explains."""
    return BF16_NOISE if sampling.is_greedy else BF16_NOISE / sampling.temperature


def draw_gaps(
    model: Path, prompt_ids: Sequence[int], new_ids: Sequence[int], sampling: Sampling
) -> list[float]:
    """Return by how much each new token misses the best perturbed score in float32 (see `Sampler`).

    `model` is a checkpoint that fits into memory; for an inflated target what it was made from.
    """
    reference = resident_model(open_headers(model), "float32")
    try:
        logits_TV = chain_logits(reference, [*prompt_ids, *new_ids])
    finally:
        reference.close()
    return gaps_of(logits_TV[-len(new_ids) - 1 : -1], len(prompt_ids), new_ids, sampling)


def chain_logits(model: TreeModel, ids: list[int]) -> Tensor:
    """Return scores (T, V) after each of these ids, except for those that an encoder reads."""
    cache = model.new_cache(len(ids))
    model.encode_prompt(ids, cache)
    token_T = torch.tensor(ids[cache.length :])
    return model.forward_chain(token_T, cache)


def gaps_of(
    logits_TV: Tensor, position: int, new_ids: Sequence[int], sampling: Sampling
) -> list[float]:
    """Return the gaps for logits (T, V) that predicted `new_ids`, the first at `position`.

    Infinite where logits are not finite, which no limit lets pass.
    """
    assert not sampling.is_adjusted, (
        "what a text's own past has changed cannot be told from its logits"
    )
    sampler = Sampler(sampling, logits_TV.shape[1])
    gaps = []
    for index, token in enumerate(new_ids):
        score_V = sampler.perturbed(logits_TV[index : index + 1], position + index)[0]
        gap = float(score_V.max() - score_V[token])
        gaps.append(math.inf if math.isnan(gap) else gap)
    return gaps
