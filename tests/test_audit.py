"""The proof of tokens must notice a wrong one."""

from offload.audit import BF16_NOISE, draw_gaps
from offload.config import Sampling
from offload.demo import PAIR, PROMPT
from offload.loading import load


def test_gaps_are_zero_for_drawn_tokens_and_large_for_others() -> None:
    sampling = Sampling(temperature=0.7, seed=4)
    with load(PAIR / "target", dtype="float32", threads=1) as decoder:
        prompt_ids = decoder.encode(PROMPT)
        new_ids = decoder.generate(PROMPT, max_new_tokens=20, temperature=0.7, seed=4).token_ids
    assert max(draw_gaps(PAIR / "target", prompt_ids, new_ids, sampling)) == 0
    wrong_ids = [*new_ids[:10], (new_ids[10] + 1) % 4096]
    assert draw_gaps(PAIR / "target", prompt_ids, wrong_ids, sampling)[10] > BF16_NOISE
