"""Keyed noise as noise and as a key; draws against exact distributions; penalties against transformers and OpenAI."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from rounding import LOGARITHMS
from scipy import stats
from tables import p_value
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from offload.errors import UserError
from offload.kernels import keyed_gumbel as noise
from offload.kernels.keyed_gumbel import keyed_gumbel_reference as keyed_gumbel
from offload.kernels.registry import REFERENCES, KernelSet
from offload.memory.sizes import noise_bytes
from offload.sampling.sampler import Sampler
from offload.sampling_options import LEAST_TEMPERATURE, Sampling

MASK = (1 << 64) - 1
P_MIN = 1e-3  # everything here is deterministic: a p-value is met once and for all
LOGITS_V = torch.tensor([2.0, 1.1, -0.3, 1.9, 0.4, -1.0, 0.0, 1.5, -2.5, 0.9])


def splitmix(value: int) -> int:
    """The finaliser in plain integers (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def noise_table(seeds: int, positions: int, tokens: int) -> Tensor:
    """(seeds, positions, tokens)"""
    return torch.stack([torch.stack([keyed_gumbel(s, p, tokens) for p in range(positions)]) for s in range(seeds)])


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345])
@pytest.mark.parametrize("position", [0, 7, 100_000])
def test_noise_is_the_hash_that_it_claims_to_be(seed: int, position: int) -> None:
    """In Python's own integers, token by token: no wrap-around, no sign, no order of evaluation to get wrong."""
    got_V = keyed_gumbel(seed, position, 300)
    for token in (0, 1, 2, 255, 299):
        bits = splitmix(splitmix(token ^ splitmix(splitmix(seed) ^ position)))
        uniform = ((bits >> 11) + 0.5) * 2.0**-53
        assert got_V[token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-13)


def test_a_narrower_draft_is_coupled_on_what_both_know() -> None:
    # A draft with fewer tokens than the target sees the same noise on those that both have.
    torch.testing.assert_close(keyed_gumbel(3, 9, 5000)[:700], keyed_gumbel(3, 9, 700), **LOGARITHMS)
    sampler = Sampler(Sampling(temperature=1.0, seed=2), 10)
    assert torch.equal(sampler.perturbed(LOGITS_V[None, :6], 8), sampler.perturbed(LOGITS_V[None], 8)[:, :6])


def test_noise_does_not_depend_on_the_order_of_questions() -> None:
    ahead, back = Sampler(Sampling(temperature=1.0, seed=4), 50), Sampler(Sampling(temperature=1.0, seed=4), 50)
    logits_TV = torch.zeros(2, 50)
    positions = list(range(600))  # more than a sampler keeps
    single = {position: ahead.perturbed(logits_TV, position) for position in positions}
    two = {position: back.perturbed(logits_TV, position) for position in reversed(positions)}
    assert all(torch.equal(single[position], two[position]) for position in positions)
    assert all(torch.equal(single[position], ahead.perturbed(logits_TV, position)) for position in (0, 300, 599))
    assert torch.equal(single[5][0], single[5][1]), "rows that predict the same position share its noise"
    assert torch.equal(single[5][0], keyed_gumbel(4, 5, 50))


def test_no_more_noise_is_kept_than_was_planned() -> None:
    """256 positions of a vocabulary of 128,256 would be 263 MB."""
    sampler, held = Sampler(Sampling(temperature=1.0), 5003), []
    for root in range(300):
        sampler.perturbed(torch.zeros(24, 5003), [root + depth for depth in range(1, 25)])
        sampler.draw(torch.zeros(5003), root + 1)
        held.append(sum(noise_V.nbytes for noise_V in sampler._noise.values()))
    assert 24 * 8 * 5003 <= max(held) <= noise_bytes(5003)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_is_the_same_on_every_device() -> None:
    torch.testing.assert_close(keyed_gumbel(1, 2, 4096, "cuda").cpu(), keyed_gumbel(1, 2, 4096), **LOGARITHMS)


def test_noise_is_gumbel_and_neighbours_have_nothing_to_do_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for sample in (keyed_gumbel(0, 0, 200_000), noise_table(60, 60, 10).flatten(), noise_table(1, 3000, 10).flatten()):
        assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > P_MIN
        assert sample.isfinite().all()
    table = noise_table(20, 20, 50)
    assert table.unique().numel() == table.numel()
    assert max(correlations(noise_table(40, 40, 40))) < 4
    # Planted: without the finaliser's products, neighbouring tokens get neighbouring numbers.
    monkeypatch.setattr(noise, "_mix", lambda value: value << 20)
    assert max(correlations(noise_table(10, 10, 40))) > 20


def correlations(table: Tensor) -> list[float]:
    """Return those of neighbours along each axis, as ranks of a uniform: in units of what chance would give."""
    uniform, scores = torch.exp(-torch.exp(-table)) - 0.5, []
    for axis, step in product(range(3), (1, 2, 8)):
        num = uniform.shape[axis] - step
        here, there = uniform.narrow(axis, 0, num), uniform.narrow(axis, step, num)
        scores.append(abs(float((here * there).mean() * 12 * math.sqrt(here.numel()))))
    return scores


def distribution_by_hand(logits_V: Tensor, sampling: Sampling) -> np.ndarray:
    """Temperature, the k largest, the smallest set of the most probable with at least p of the mass, then min-p."""
    chance_V = np.exp(logits_V.double().numpy() / sampling.temperature)
    chance_V /= chance_V.sum()
    order = np.argsort(-chance_V)
    if sampling.top_k:
        chance_V[order[sampling.top_k :]] = 0
        chance_V /= chance_V.sum()
    if sampling.top_p < 1:
        before_V = np.cumsum(chance_V[order]) - chance_V[order]
        chance_V[order[before_V >= sampling.top_p]] = 0
    chance_V[chance_V < sampling.min_p * chance_V.max()] = 0
    return chance_V / chance_V.sum()


SETTINGS = {"T1": {"temperature": 1.0}, "T0.6": {"temperature": 0.6}, "top-k": {"temperature": 1.0, "top_k": 4},
            "top-p": {"temperature": 1.0, "top_p": 0.8}, "min-p": {"temperature": 1.0, "min_p": 0.3},
            "all": {"temperature": 0.6, "top_k": 6, "top_p": 0.9, "min_p": 0.1}}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_drawn_from_is_the_formula(name: str) -> None:
    sampling = Sampling(**SETTINGS[name])
    np.testing.assert_allclose(
        Sampler(sampling, 10).host_distribution(LOGITS_V), distribution_by_hand(LOGITS_V, sampling), 1e-5
    )


def draws_over_seeds(settings: dict[str, float], num_draws: int = 2000, kernels: KernelSet = REFERENCES) -> np.ndarray:
    samplers = (Sampler(Sampling(**settings, seed=seed), 10, kernels=kernels) for seed in range(num_draws))
    return np.bincount([sampler.draw(LOGITS_V, 17) for sampler in samplers], minlength=10)


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    """Over seeds, and in one generation: one seed, and every position a fresh draw."""
    sampling = Sampling(**SETTINGS[name], seed=7)
    probs_V, sampler = distribution_by_hand(LOGITS_V, sampling), Sampler(sampling, 10)
    assert {"T1": 10, "T0.6": 10, "top-k": 4, "top-p": 5, "min-p": 5, "all": 4}[name] == np.count_nonzero(probs_V)
    np.testing.assert_allclose(sampler.host_distribution(LOGITS_V), probs_V, atol=1e-7)
    assert p_value(draws_over_seeds(SETTINGS[name]), probs_V) > P_MIN
    counts_V = np.bincount([sampler.draw(LOGITS_V, position) for position in range(2000)], minlength=10)
    assert p_value(counts_V, probs_V) > P_MIN


def test_two_positions_are_drawn_independently() -> None:
    probs_V = distribution_by_hand(LOGITS_V, Sampling(temperature=1.0))
    counts_VV = np.zeros((10, 10))
    for seed in range(1500):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), 10)
        counts_VV[sampler.draw(LOGITS_V, 4), sampler.draw(LOGITS_V, 5)] += 1
    assert p_value(counts_VV, np.outer(probs_V, probs_V)) > P_MIN


def flatter(seed: int, position: int, vocab_size: int, device: object) -> Tensor:
    return 0.85 * keyed_gumbel(seed, position, vocab_size)


def normal(seed: int, position: int, vocab_size: int, device: object) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + position)
    return 1.28 * torch.randn(vocab_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("planted", [flatter, normal])
def test_a_planted_bias_is_detected(planted: Callable[..., Tensor]) -> None:
    kernels = REFERENCES._replace(keyed_gumbel=planted)
    probs_V = distribution_by_hand(LOGITS_V, Sampling(temperature=1.0))
    assert p_value(draws_over_seeds(SETTINGS["T1"], kernels=kernels), probs_V) < 1e-4


def test_greedy_knows_no_chance_and_the_least_temperature_still_tells_scores_apart() -> None:
    for seed in range(20):
        sampler = Sampler(Sampling(seed=seed), 10)
        assert sampler.draw(LOGITS_V, seed) == 0
        assert torch.equal(sampler.perturbed(LOGITS_V[None], 3), LOGITS_V[None])
    assert Sampler(Sampling(), 3).draw(torch.tensor([1.0, 5.0, 5.0]), 0) == 1, "the lowest id of equals"
    # The least temperature still tells scores apart.
    logits_V = torch.tensor([900.0, 1000.0, 999.0])
    assert Sampler(Sampling(temperature=LEAST_TEMPERATURE), 3).draw(logits_V, 0) == 1
    with pytest.raises(UserError, match="`temperature` must be 0, or at least 1e-30, got 1e-40: 0 is greedy"):
        Sampling(temperature=1e-40)
    assert (logits_V / 1e-40).isinf().all(), "this is why"


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    """bfloat16 has steps of 2^-6 around 4: the sum with the noise must not be rounded to them."""
    logits_V = torch.linspace(3, 5, 10).bfloat16()
    scores_TV = Sampler(Sampling(temperature=0.7), 10).perturbed(logits_V[None], 0)
    assert scores_TV.dtype in (torch.float32, torch.float64)
    wanted_V = logits_V.double() / 0.7 + keyed_gumbel(0, 0, 10)
    torch.testing.assert_close(scores_TV[0].double(), wanted_V, atol=1e-5, rtol=0)


def test_a_lower_temperature_draws_the_likeliest_more_often() -> None:
    shares = [draws_over_seeds({"temperature": t}, 500)[0] / 500 for t in (2.0, 1.0, 0.5, 0.1)]
    assert shares == sorted(shares) and shares[-1] > 0.6
    # Filters in another order would show: top-p of all keeps tokens that top-p of the four largest
    # drops.
    sampling = Sampling(temperature=1.0, top_k=4, top_p=0.8)
    kept = np.flatnonzero(Sampler(sampling, 10).host_distribution(LOGITS_V))
    assert kept.tolist() == [0, 3, 7] == np.flatnonzero(distribution_by_hand(LOGITS_V, sampling)).tolist()
    assert np.count_nonzero(distribution_by_hand(LOGITS_V, Sampling(temperature=1.0, top_p=0.8))[[0, 1, 3, 7]]) == 4


SIZE = 40
PROMPT, NEW, PATHS = [3, 3, 7, 11], [5, 7, 5], [[], [5], [5, 5], [9], [9, 3], [9, 9]]
LOGITS_TV = 4 * torch.randn(len(PATHS), SIZE, generator=torch.Generator().manual_seed(1))
EVERY = {"repeat_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": -0.35,
         "logit_bias": {9: 2.5, 3: -1.25, 30: 4.0}}  # fmt: skip
CASES = [*({name: value} for name, value in EVERY.items()), EVERY]


def by_hand(logits_V: Tensor, past: Sequence[int], new: Sequence[int], sampling: Sampling) -> Tensor:
    """One row by transformers' own processors, then by the formula of OpenAI, token after token."""
    scores_1V, ids_1T = logits_V[None].float().clone(), torch.tensor([past])
    if sampling.logit_bias:
        bias = [[[token], number] for token, number in dict(sampling.logit_bias).items()]
        scores_1V = SequenceBiasLogitsProcessor(bias)(ids_1T, scores_1V)
    if sampling.repeat_penalty != 1:
        scores_1V = RepetitionPenaltyLogitsProcessor(sampling.repeat_penalty)(ids_1T, scores_1V)
    for token in set(new):
        num = list(new).count(token)
        scores_1V[0, token] -= num * sampling.frequency_penalty + (num > 0) * sampling.presence_penalty
    return scores_1V[0]


def sampler_of(sampling: Sampling, new: Sequence[int] = NEW) -> Sampler:
    sampler = Sampler(sampling, SIZE)
    sampler.begin(PROMPT)
    sampler.accept(new)
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[*EVERY, "every"])
def test_rows_are_adjusted_as_others_do_it(case: dict[str, float], dtype: torch.dtype) -> None:
    sampling, logits_TV = Sampling(**case), LOGITS_TV.to(dtype)
    before_TV, got_TV = logits_TV.clone(), sampler_of(sampling).adjusted(logits_TV, PATHS)
    pasts = [(row_V, [*NEW, *path]) for row_V, path in zip(logits_TV, PATHS, strict=True)]
    wanted_TV = torch.stack([by_hand(row_V, [*PROMPT, *new], new, sampling) for row_V, new in pasts])
    torch.testing.assert_close(got_TV, wanted_TV, rtol=0, atol=1e-6)
    assert got_TV.dtype == torch.float32
    assert torch.equal(logits_TV, before_TV), "what a model has scored is changed in place"
    assert not torch.equal(got_TV, logits_TV.float())
    longer = sampler_of(sampling, [*NEW, 20, 21])
    longer.cut(NEW)
    assert torch.equal(longer.adjusted(logits_TV, PATHS), got_TV), "a cut text has never said what was cut"


def test_the_past_of_a_row_is_its_text_and_its_path_alone() -> None:
    # A row's past is the same, whether its tokens were accepted or lie on its path.
    sampling, past = Sampling(**EVERY), [5, 9, 5, 3, 30, 9]
    rows = [sampler_of(sampling, past[:at]).adjusted(LOGITS_TV[:1], [past[at:]]) for at in range(len(past) + 1)]
    assert all(torch.equal(left, other) for left, other in pairwise(rows))
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
