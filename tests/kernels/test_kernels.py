"""Kernels against their references, bit for bit where they draw.

Without a GPU the kernels run in Triton's interpreter; whether the compiler accepts them test_kernels_compile.py tells.
"""

import numpy as np
import pytest
import torch
from marks import DEVICE, ON_DEVICE, needs_triton
from rounding import LOGARITHMS
from scipy import stats
from torch import Tensor

from offload.kernels.draw_without_replacement import draw_without_replacement_kernel, draw_without_replacement_reference
from offload.kernels.keyed_gumbel import keyed_gumbel_kernel, keyed_gumbel_reference, row_keys, uniform
from offload.kernels.kv_commit import are_alike, kv_commit_kernel, kv_commit_reference
from offload.kernels.match_rows import match_rows_kernel, match_rows_reference
from offload.kernels.registry import REFERENCES
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import k_ary
from offload.trees.verification import match

pytestmark = ON_DEVICE


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345])
@pytest.mark.parametrize("position", [0, 1, 7, 100_000])
def test_noise_of_the_kernel_is_that_of_its_reference(seed: int, position: int) -> None:
    for vocab_size in (1, 1024, 3001):
        got_V = keyed_gumbel_kernel(seed, position, vocab_size, DEVICE)
        wanted_V = keyed_gumbel_reference(seed, position, vocab_size, DEVICE)
        torch.testing.assert_close(got_V, wanted_V, **LOGARITHMS)


AT_ONCE = REFERENCES._replace(match_rows=match_rows_reference)
TEMPERATURES = {"greedy": {}, "T1": {"temperature": 1.0}, "T0.3": {"temperature": 0.3}}
FILTERS = {
    "top-k": {"temperature": 0.7, "top_k": 2},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "both": {"temperature": 2.0, "top_k": 4, "top_p": 0.95},
}


@pytest.mark.parametrize("is_tied", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("name", TEMPERATURES)
def test_rows_are_drawn_as_one_by_one(name: str, is_tied: bool) -> None:
    """Ties are everywhere in half precision."""
    logits_NV = random_logits(24, 500)
    logits_NV = logits_NV.round() if is_tied else logits_NV
    position_N = torch.arange(24, device=DEVICE) // 2 + 90
    for seed in range(8):
        sampler = Sampler(Sampling(**TEMPERATURES[name], seed=seed), 500, kernels=AT_ONCE)
        alone = [sampler.draw(logits_NV[row], int(position_N[row])) for row in range(24)]
        assert sampler.draw_rows(logits_NV, position_N).tolist() == alone


@needs_triton
@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(10, torch.float32), (1024, torch.float16), (9001, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
def test_draws_of_the_kernel_are_those_of_its_reference(
    temperature: float, vocab_size: int, dtype: torch.dtype
) -> None:
    logits_NV, position_N = random_logits(4, vocab_size).to(dtype), torch.tensor([3, 4, 4, 70], device=DEVICE)
    logits_NV[1, ::2] = -torch.inf  # never to be drawn
    logits_NV[3] = -torch.inf
    draws = (match_rows_kernel, match_rows_reference)
    results = [draw(logits_NV, position_N, vocab_size, temperature=temperature) for draw in draws]
    assert results[0].dtype == torch.int64
    assert torch.equal(*results)


@needs_triton
def test_a_wrong_draw_would_show_and_the_greedy_kernel_takes_the_lowest_of_equals() -> None:
    logits_NV, position_N = random_logits(8, 3000), torch.arange(8, device=DEVICE)
    right = match_rows_reference(logits_NV, position_N, 5, temperature=1.5)
    for position, seed, temperature in ((position_N + 1, 5, 1.5), (position_N, 6, 1.5), (position_N, 5, 1.0)):
        wrong = match_rows_kernel(logits_NV, position, seed, temperature=temperature)
        assert not torch.equal(wrong, right)
    # Over lanes, over blocks of one program, and over programs.
    logits_NV = torch.zeros(4, 9000, device=DEVICE)
    for row, tokens in enumerate(([5, 6], [700, 1724], [100, 4196, 8292], [0, 8999])):
        logits_NV[row, tokens] = 1.0
    got = match_rows_kernel(logits_NV, torch.zeros(4, dtype=torch.long, device=DEVICE), 0, temperature=0)
    assert got.tolist() == [5, 700, 100, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_match_walks_alike_on_draws_of_all_rows(temperature: float) -> None:
    """A device draws after every node at once, where the host draws after those that it visits."""
    topology, logits_NV = k_ary(3, 40), random_logits(40, 6).cpu()
    for seed in range(10):
        sampler = Sampler(Sampling(temperature=temperature, seed=seed), 6)
        tokens = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(seed))
        tree = TokenTree(topology, tokens)
        plain = match(tree, logits_NV, sampler, 17)
        at_once = Sampler(sampler.sampling, 6, kernels=AT_ONCE)
        assert match(tree, logits_NV, at_once, 17) == plain


@pytest.mark.parametrize("name", FILTERS)
def test_filtered_rows_are_drawn_where_a_walk_visits_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is sorted, and a walk looks at a few of a chunk."""
    sorted_rows: list[int] = []
    warped = Sampler._warped
    monkeypatch.setattr(Sampler, "_warped", lambda self, rows: sorted_rows.append(len(rows)) or warped(self, rows))
    tree, logits_NV = TokenTree(k_ary(3, 40), torch.arange(40) % 6), random_logits(40, 6).cpu()
    walks = []
    for kernels in (REFERENCES, AT_ONCE):
        sampler = Sampler(Sampling(**FILTERS[name]), 6, kernels=kernels)
        assert not sampler.draws_rows
        walks.append(match(tree, logits_NV, sampler, 17))
        assert sorted_rows == [1] * len(walks[0].tokens)
        sorted_rows.clear()
    assert walks[0] == walks[1]
    assert Sampler(Sampling(temperature=0.7), 6, kernels=AT_ONCE).draws_rows


def random_distribution(num_rows: int, vocab_size: int) -> Tensor:
    probs_WV = random_logits(num_rows, vocab_size, seed=3).softmax(1)
    probs_WV[:, ::3] *= 1e-30  # hardly any mass is more than none
    probs_WV[:, 1::3] = 0
    return probs_WV


@needs_triton
@pytest.mark.parametrize(("vocab_size", "num_draws"), [(10, 40), (1024, 1), (2500, 7), (1100, 30)])
def test_children_of_the_kernel_are_those_of_its_reference(vocab_size: int, num_draws: int) -> None:
    """Also where more are asked for than have mass, or than there are."""
    probs_WV = random_distribution(3, vocab_size)
    draws = (draw_without_replacement_kernel, draw_without_replacement_reference)
    results = [draw(probs_WV, num_draws, 2**61 + 3, 12) for draw in draws]
    assert results[0].shape == (3, min(num_draws, vocab_size))
    assert torch.equal(*results)


@needs_triton
@pytest.mark.parametrize(("seed", "first_row"), [(7, 13), (8, 12)])
def test_children_of_another_row_or_seed_would_show(seed: int, first_row: int) -> None:
    probs_WV = random_distribution(3, 1000)
    wrong = draw_without_replacement_kernel(probs_WV, 5, seed, first_row)
    assert not torch.equal(wrong, draw_without_replacement_reference(probs_WV, 5, 7, 12))


def test_hashed_draws_have_the_distribution_of_draws_without_replacement() -> None:
    probs_V = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    probs_WV = torch.tensor(probs_V, dtype=torch.float32).expand(20_000, 5)
    pairs = draw_without_replacement_reference(probs_WV, 2, 9, 0).numpy()
    counts = np.zeros((5, 5))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    wanted = probs_V[:, None] * probs_V / (1 - probs_V[:, None]) * 20_000
    np.fill_diagonal(wanted, 0)
    assert not counts[wanted == 0].any()
    assert stats.chisquare(counts[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3
    biased = wanted * (1 + 0.1 * (np.arange(5) == 0))
    assert stats.chisquare(counts[wanted > 0], biased[wanted > 0] * 20_000 / biased.sum()).pvalue < 1e-4
    # Tokens without mass come last and in uniform order.
    probs_WV = torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0]).expand(3000, 5)
    order = draw_without_replacement_reference(probs_WV, 9, 1, 0)
    assert order.shape == (3000, 5) and set(order[:, :2].flatten().tolist()) == {0, 3}
    assert stats.chisquare(order[:, 2].bincount(minlength=5)[[1, 2, 4]].numpy()).pvalue > 1e-3


def test_hashed_draws_have_nothing_to_do_with_the_shared_noise() -> None:
    """Under one seed and number: the noise picks the first token no more often than chance does."""
    probs_WV, num_rows = torch.full((4000, 8), 1 / 8), 4000
    drawn = draw_without_replacement_reference(probs_WV, 1, 5, 0)[:, 0]
    shared = torch.stack([keyed_gumbel_reference(5, row, 8).argmax() for row in range(num_rows)])
    assert stats.binomtest(int((drawn == shared).sum()), num_rows, 1 / 8).pvalue > 1e-3
    alike = uniform(row_keys(5, torch.arange(num_rows))[:, None], torch.arange(8)).argmax(1)
    assert torch.equal(alike, shared), "the test can fail: with the same key they agree"


def test_no_row_of_fresh_numbers_is_taken_twice() -> None:
    sampler = Sampler(Sampling(temperature=1.0), 10, ChildSampling.WITHOUT_REPLACEMENT)
    firsts = [sampler.take_rows(count) for count in (3, 1, 5, 2)]
    assert firsts == [0, 3, 4, 9]


def caches(num_layers: int, dtype: torch.dtype, width: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_layers)
    shape = (1, 3, 90, width)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2 * num_layers)]


PATHS = {
    "one": [4],
    "path": [0, 2, 5, 9, 13],
    "overlap": [1, 2, 3, 4, 5],
    "backwards": [6, 3, 0],
    "long": range(2, 78, 2),
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PATHS)
def test_the_kernel_commits_what_its_reference_commits(name: str, dtype: torch.dtype) -> None:
    ours, theirs, row_A = caches(2, dtype), caches(2, dtype), torch.tensor(list(PATHS[name]), device=DEVICE)
    kv_commit_reference(theirs, 7, row_A)
    kv_commit_kernel(ours, 7, row_A)
    assert all(map(torch.equal, ours, theirs))
    untouched = caches(2, dtype)
    assert not any(map(torch.equal, ours, untouched)), "every buffer has moved"


@needs_triton
@pytest.mark.parametrize("width", [7, 128, 300])
def test_buffers_may_lie_anywhere(width: int) -> None:
    """Parts of larger tensors, at addresses that no wide load could use."""
    row_A = torch.tensor([1, 5, 6], device=DEVICE)
    ours, theirs = ([b[:, :, 1:, 1:] for b in caches(2, torch.float16, width + 1)] for _ in range(2))
    assert ours[0].data_ptr() % 16 and are_alike(ours)
    kv_commit_reference(theirs, 4, row_A)
    kv_commit_kernel(ours, 4, row_A)
    assert all(map(torch.equal, ours, theirs))


@needs_triton
def test_unlike_buffers_and_long_paths_are_left_to_the_reference() -> None:
    same = caches(1, torch.float32)
    assert are_alike(same)
    assert not are_alike([*same, torch.zeros(1, 3, 90, 25, device=DEVICE)])
    assert not are_alike([*same, torch.zeros(1, 3, 90, 24, device=DEVICE, dtype=torch.float16)])
    assert not are_alike([torch.zeros(2, 3, 90, 24, device=DEVICE)] * 2)
    assert not are_alike([torch.zeros(1, 3, 24, 90, device=DEVICE).mT] * 2)
    # The kernel hands them to its reference.
    for options, row_A in (([torch.randn(1, 3, 90, 25, device=DEVICE)], torch.tensor([4, 2], device=DEVICE)),
                        ([], torch.arange(80, device=DEVICE).repeat(4)[:300] % 70)):  # fmt: skip
        base = [*caches(1, torch.float32), *options]
        base = [torch.cat([buffer] * 5, 2) for buffer in base]
        ours, theirs = ([buffer.clone() for buffer in base] for _ in range(2))
        kv_commit_reference(theirs, 4, row_A)
        kv_commit_kernel(ours, 4, row_A)
        assert all(map(torch.equal, ours, theirs))
