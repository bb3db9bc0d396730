"""The rule `match`: on hand-written scores, against decoding without a tree, and as a distribution."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from test_topology import random_topology
from torch import Tensor

from offload.drafting.static import draw_children
from offload.errors import UserError
from offload.kernels.match_rows import match_rows_reference
from offload.kernels.registry import REFERENCES, KernelSet
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import Proposals, TokenTree
from offload.trees.topology import Topology, best_first, chain, k_ary
from offload.trees.verification import Acceptance, match, ratio_trials, walk

GREEDY = Sampler(Sampling(), 10)
#         0
#       / | \        tokens: 5; 1 2 3; 4 6 under 1; 1 under 2; 8 under 4
#      1  2  3
PARENTS, TOKENS = [-1, 0, 0, 0, 1, 1, 2, 4], [5, 1, 2, 3, 4, 6, 1, 8]


def scores(*best: int) -> Tensor:
    """Logits after every node, whose greedy choices are these."""
    return torch.nn.functional.one_hot(torch.tensor(best), 10).float()


def accept(best: list[int], tokens: list[int] = TOKENS) -> Acceptance:
    return match(TokenTree(Topology.from_parents(PARENTS), torch.tensor(tokens)), scores(*best), GREEDY, 7)


WALKS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "never": ([9, 0, 0, 0, 0, 0, 0, 0], [0], [9]),
    "always": ([1, 4, 0, 0, 8, 0, 0, 3], [0, 1, 4, 7], [1, 4, 8, 3]),
    "sometimes": ([1, 6, 0, 0, 8, 7, 0, 3], [0, 1, 5], [1, 6, 7]),
    "second child": ([2, 4, 1, 0, 8, 0, 9, 3], [0, 2, 6], [2, 1, 9]),
    "a leaf's own token": ([3, 4, 1, 7, 8, 0, 9, 3], [0, 3], [3, 7]),
    "a grandchild is no child": ([1, 8, 0, 0, 8, 0, 0, 0], [0, 1], [1, 8]),
    "the root is not its own child": ([5, 1, 0, 0, 0, 0, 0, 0], [0], [5]),
}


@pytest.mark.parametrize(("best", "nodes", "tokens"), WALKS.values(), ids=WALKS)
def test_the_walk_follows_the_targets_choices(best: list[int], nodes: list[int], tokens: list[int]) -> None:
    assert accept(best)[:2] == (nodes, tokens)


def test_of_equal_siblings_the_first_is_taken() -> None:
    """Its rows are as good as its reference's, and the draft was surer of what stands below it."""
    references = [5, 1, 1, 1, 4, 6, 9, 8]
    assert accept([1, 4, 9, 0, 8, 0, 0, 2], references)[:2] == ([0, 1, 4, 7], [1, 4, 8, 2])
    assert accept([1, 9, 9, 0, 8, 0, 0, 2], references)[:2] == ([0, 1], [1, 9]), "node 6 is a child of the twin"
    assert match(TokenTree(chain(0), torch.tensor([5])), scores(3), GREEDY, 0)[:2] == ([0], [3]), "a lone root"


AT_ONCE = REFERENCES._replace(match_rows=match_rows_reference)


@pytest.mark.parametrize("kernels", [REFERENCES, AT_ONCE], ids=["one by one", "at once"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("score", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused_on_the_way_and_nowhere_else(
    score: float, temperature: float, kernels: KernelSet
) -> None:
    """argmax would call the first of them the largest, and go on writing that token."""
    tree, sampler = TokenTree(Topology.from_parents(PARENTS), torch.tensor(TOKENS)), Sampling(temperature=temperature)
    scores_NV = 1000 * scores(1, 4, 0, 0, 8, 0, 0, 3)
    scores_NV[[2, 3, 5, 6], 7] = score
    walked = match(tree, scores_NV, Sampler(sampler, 10, kernels=kernels), 7)
    assert walked[:2] == ([0, 1, 4, 7], [1, 4, 8, 3]), "nobody looks at what was not accepted"
    scores_NV[7, 2] = score
    with pytest.raises(UserError, match="scores are not finite numbers"):
        match(tree, scores_NV, Sampler(sampler, 10, kernels=kernels), 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("score", [torch.nan, torch.inf])
def test_ratio_rules_refuse_them_too(score: float, temperature: float) -> None:
    logits_1V = scores(3)
    logits_1V[0, 6] = score
    sampler = Sampler(Sampling(temperature=temperature), 10, ChildSampling.WITHOUT_REPLACEMENT)
    with pytest.raises(UserError, match="scores are not finite numbers"):
        walk(TokenTree(chain(0), torch.tensor([5])), logits_1V, sampler, ratio_trials)


@pytest.mark.parametrize("drafting", [ChildSampling.WITHOUT_REPLACEMENT, ChildSampling.WITH_REPLACEMENT])
def test_a_draft_without_numbers_is_refused_when_its_distribution_is_needed(drafting: ChildSampling) -> None:
    logits_1V, sampler = scores(3), Sampler(Sampling(temperature=1.0), 10, drafting)
    logits_1V[0, 6] = torch.nan
    token_1K, draw, distribution_1V = draw_children(logits_1V, 4, sampler, 0)
    assert distribution_1V is not None and token_1K.min() >= 0 and token_1K.max() < 10, (
        "the target can look these tokens up"
    )
    proposals = Proposals.blank(k_ary(4, 5), 10, draw)
    proposals.write([0], distribution_1V)
    tree = TokenTree(k_ary(4, 5), torch.cat([torch.tensor([5]), token_1K[0]]), proposals)
    with pytest.raises(UserError, match="scores are not finite numbers"):
        walk(tree, scores(1, 2, 3, 4, 5), sampler, ratio_trials)


VOCAB_SIZE = 7


@lru_cache(maxsize=1 << 14)
def next_logits(prefix: tuple[int, ...]) -> Tensor:
    """A model that looks at the whole prefix: a fixed random row for each."""
    return 2 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash(prefix) & 0xFFFFFFFF))


def plain_text(sampler: Sampler, prompt: tuple[int, ...], num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(sampler.draw(next_logits(tuple(tokens)), len(tokens)))
    return tokens[len(prompt) :]


Rule = Callable[[TokenTree, Tensor, Sampler, int], Acceptance]


def tree_text(
    sampler: Sampler, prompt: tuple[int, ...], num_new: int, shape: Topology, rule: Rule = match, seed: int = 0
) -> tuple[list[int], int]:
    """Decode with trees of that shape: the likeliest children, some of them replaced by chance; also counts sweeps."""
    rng, tokens, num_sweeps = np.random.default_rng(seed), list(prompt), 0
    while len(tokens) < len(prompt) + num_new:
        prefixes: list[tuple[int, ...]] = [tuple(tokens)]
        for node in range(1, shape.num_nodes):
            above = prefixes[int(shape.parent_N[node])]
            ranked = sampler.perturbed(next_logits(above)[None], len(above))[0].argsort(descending=True)
            token = int(ranked[int(shape.rank_N[node]) % VOCAB_SIZE])
            prefixes.append((*above, token if rng.random() < 0.7 else int(rng.integers(VOCAB_SIZE))))
        tree = TokenTree(shape, torch.tensor([prefix[-1] for prefix in prefixes]))
        logits_NV = torch.stack([next_logits(prefix) for prefix in prefixes])
        accepted = rule(tree, logits_NV, sampler, len(tokens) - 1)
        assert [tree.tokens[node] for node in accepted.nodes[1:]] == accepted.tokens[:-1]
        tokens += accepted.tokens
        num_sweeps += 1
    return tokens[len(prompt) :][:num_new], num_sweeps


SHAPES = {
    "none": chain(0),
    "chain": chain(4),
    "k-ary": k_ary(2, 15),
    "sequoia": best_first((0.6, 0.2, 0.1), 12, 4),
    **{f"random{seed}": random_topology(seed, 14) for seed in range(3)},
}
SAMPLINGS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}]


@pytest.mark.parametrize("settings", SAMPLINGS, ids=["greedy", "T1", "filtered"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_tree_changes_the_text(name: str, settings: dict[str, float]) -> None:
    sweeps = 0
    for seed in range(4):
        sampler = Sampler(Sampling(**settings, seed=seed), VOCAB_SIZE)
        wanted = plain_text(sampler, (1, 2, 3), 25)
        got, num_sweeps = tree_text(Sampler(Sampling(**settings, seed=seed), VOCAB_SIZE), (1, 2, 3), 25, SHAPES[name])
        assert got == wanted
        sweeps += num_sweeps
    assert sweeps == 100 if name == "none" else sweeps < 70, "several tokens a sweep, or nothing was put to the test"
