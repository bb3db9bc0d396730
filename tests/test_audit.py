"""The proof of tokens must notice a wrong one."""

import pytest

from offload.audit import BF16_NOISE, draw_gaps
from offload.bench.gate import draws_hold
from offload.config import Sampling
from offload.demo import PAIR, PROMPT
from offload.errors import UserError
from offload.loading import load


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
