"""Penalties and biases against transformers' processors and OpenAI's formula, whatever part of a past is committed."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from offload.sampling.adjustments import Penalties, Send, stay
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling

SIZE = 40
PROMPT, NEW, PATHS = [3, 3, 7, 11], [5, 7, 5], [[], [5], [5, 5], [9], [9, 3], [9, 9]]
LOGITS_TV = 4 * torch.randn(len(PATHS), SIZE, generator=torch.Generator().manual_seed(1))
EVERY = {"repeat_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": -0.35,
         "logit_bias": {9: 2.5, 3: -1.25, 30: 4.0}}  # fmt: skip
CASES = [*({name: value} for name, value in EVERY.items()), EVERY]


def by_hand(logits_V: Tensor, past: Sequence[int], new: Sequence[int], how: Sampling) -> Tensor:
    """One row by transformers' own processors, then by the formula of OpenAI, token after token."""
    scores_1V, ids_1T = logits_V[None].float().clone(), torch.tensor([past])
    if how.logit_bias:
        bias = [[[token], number] for token, number in dict(how.logit_bias).items()]
        scores_1V = SequenceBiasLogitsProcessor(bias)(ids_1T, scores_1V)
    if how.repeat_penalty != 1:
        scores_1V = RepetitionPenaltyLogitsProcessor(how.repeat_penalty)(ids_1T, scores_1V)
    for token in set(new):
        num = list(new).count(token)
        scores_1V[0, token] -= num * how.frequency_penalty + (num > 0) * how.presence_penalty
    return scores_1V[0]


def sampler_of(how: Sampling, new: Sequence[int] = NEW) -> Sampler:
    sampler = Sampler(how, SIZE)
    sampler.begin(PROMPT)
    sampler.accept(new)
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[*EVERY, "every"])
def test_rows_are_adjusted_as_others_do_it(case: dict[str, float], dtype: torch.dtype) -> None:
    how, logits_TV = Sampling(**case), LOGITS_TV.to(dtype)
    before_TV, got_TV = logits_TV.clone(), sampler_of(how).adjusted(logits_TV, PATHS)
    pasts = [(row_V, [*NEW, *path]) for row_V, path in zip(logits_TV, PATHS, strict=True)]
    wanted_TV = torch.stack([by_hand(row_V, [*PROMPT, *new], new, how) for row_V, new in pasts])
    torch.testing.assert_close(got_TV, wanted_TV, rtol=0, atol=1e-6)
    assert got_TV.dtype == torch.float32
    assert torch.equal(logits_TV, before_TV), "what a model has scored is changed in place"
    assert not torch.equal(got_TV, logits_TV.float())
    longer = sampler_of(how, [*NEW, 20, 21])
    longer.cut(NEW)
    assert torch.equal(longer.adjusted(logits_TV, PATHS), got_TV), "a cut text has never said what was cut"


def test_the_past_of_a_row_is_its_text_and_its_path_alone() -> None:
    # A row's past is the same, whether its tokens were accepted or lie on its path.
    how, past = Sampling(**EVERY), [5, 9, 5, 3, 30, 9]
    rows = [sampler_of(how, past[:at]).adjusted(LOGITS_TV[:1], [past[at:]]) for at in range(len(past) + 1)]
    assert all(torch.equal(one, other) for one, other in pairwise(rows))
    # A new text knows nothing of the one before.
    sampler = sampler_of(Sampling(**EVERY), [20, 21])
    sampler.begin(PROMPT)
    sampler.accept(NEW)
    assert torch.equal(sampler.adjusted(LOGITS_TV, PATHS), sampler_of(Sampling(**EVERY)).adjusted(LOGITS_TV, PATHS))
    # Without any adjustment nothing is touched.
    sampler = sampler_of(Sampling(temperature=0.7, top_p=0.9))
    assert not sampler.is_adjusted
    assert sampler.adjusted(LOGITS_TV, PATHS) is LOGITS_TV
    # Pairs and mappings say the same.
    assert Sampling(logit_bias={9: 1, 3: -2}) == Sampling(logit_bias=((3, -2.0), (9, 1.0)))
    assert hash(Sampling(logit_bias={9: 1})) == hash(Sampling(logit_bias=((9, 1.0),)))
    assert not Sampling(min_p=0.3, temperature=1.0).is_adjusted


class OneTokenOnly:
    """Another adjustment: only the number of tokens written so far may come."""

    is_over = False

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.num = 0

    def accept(self, tokens: Sequence[int]) -> None:
        self.num += len(tokens)

    def adjust(self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = stay) -> Tensor:
        only_T1 = torch.tensor([[self.num + len(path)] for path in paths])
        return torch.full_like(logits_TV.float(), -torch.inf).scatter(1, only_T1, 0.0)


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.9, repeat_penalty=1.5)], ids=["greedy", "warm"])
def test_others_adjust_behind_the_penalties(how: Sampling) -> None:
    sampler = Sampler(how, SIZE, adjustments=[OneTokenOnly()])
    sampler.begin(PROMPT)
    sampler.accept(NEW)
    scores_TV = sampler.perturbed(sampler.adjusted(LOGITS_TV, PATHS), 5)
    assert scores_TV.argmax(1).tolist() == [3 + len(path) for path in PATHS]
    assert sampler.is_adjusted and not sampler.draws_rows


def test_a_long_past_costs_little() -> None:
    """Tokens of the past are looked at, not the vocabulary row by row; nor are they counted anew for each row."""
    penalties, paths = Penalties(Sampling(**EVERY)), [[row] for row in range(256)]
    penalties.begin(list(range(4000)))
    penalties.accept(list(range(2000)))
    first = penalties._said_C
    got_TV = penalties.adjust(torch.zeros(256, 5000), paths)
    said_C = penalties._said_C
    penalties.adjust(torch.zeros(1, 5000), [[]])
    assert first is None and penalties._said_C is said_C
    assert torch.equal(got_TV[0, 4000:], torch.zeros(1000))
