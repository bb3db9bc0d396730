"""The proof of tokens must notice a wrong one."""

import math

import pytest
import torch

from offload.bench.harness.gate import Written, draws_hold, prove
from offload.checkpoint.packaged import PAIR, PROMPT
from offload.engine.load import load
from offload.errors import UserError
from offload.reports.proof import BF16_NOISE, draw_gaps, gaps_of
from offload.sampling_options import Sampling


def test_gaps_are_zero_for_drawn_tokens_and_large_for_others() -> None:
    sampling = Sampling(temperature=0.7, seed=4)
    with load(PAIR / "target", dtype="float32", threads=1) as decoder:
        prompt_ids = decoder.encode(PROMPT)
        new_ids = decoder.generate(PROMPT, max_new_tokens=20, temperature=0.7, seed=4).token_ids
    assert max(draw_gaps(PAIR / "target", prompt_ids, new_ids, sampling)) == 0
    wrong_ids = [*new_ids[:10], (new_ids[10] + 1) % 4096]
    assert draw_gaps(PAIR / "target", prompt_ids, wrong_ids, sampling)[10] > BF16_NOISE


def test_a_greedy_gap_is_one_of_logits_and_not_stretched_by_a_temperature() -> None:
    draws_hold([0.0, BF16_NOISE], Sampling())
    with pytest.raises(UserError, match="new token 1 is wrong"):
        draws_hold([0.0, 2 * BF16_NOISE], Sampling())
    draws_hold([0.0, 2 * BF16_NOISE], Sampling(temperature=0.4))
    with pytest.raises(UserError, match="new token 1 is wrong"):
        draws_hold([0.0, 2 * BF16_NOISE], Sampling(temperature=0.6))


@pytest.mark.parametrize("rule", ["match", "sequoia"])
def test_a_reference_that_has_no_numbers_proves_nothing(rule: str) -> None:
    """Every comparison with NaN is false, also the one that would refuse."""
    logits_TV = torch.zeros(3, 5)
    logits_TV[1, 2] = torch.nan
    assert gaps_of(logits_TV, 7, [0, 0, 0], Sampling()) == [0.0, math.inf, 0.0]
    run = Written([1], [0, 0, 0], Sampling(temperature=1.0), rule)
    with pytest.raises(UserError, match="no speed is worth printing"):
        prove([run], lambda prompt_ids, new_ids: logits_TV)
