"""Ratio rules under penalties: the law of two tokens is that of the target whose every row knows its own past."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tables import ROOT, SHAPES, VOCAB_SIZE, TableSampler, distributions, grow, p_value, pair
from torch import Tensor

from offload.sampling.sampler import Sampler
from offload.trees.token_tree import Floats, TokenTree
from offload.trees.verification import Rule, find_rule
from offload.units import Sampling

NUM_RUNS, LEAST_P, WRONG_P = 1500, 1e-3, 1e-6
HOW = Sampling(temperature=0.9, repeat_penalty=2.5, frequency_penalty=0.4, logit_bias={4: 1.0}, seed=1)
CASES = [("sequoia", "binary"), ("specinfer", "sequoia"), ("spectr", "star")]


def law(target_VV: Tensor) -> Floats:
    """Chances (V, V) of the two tokens after `ROOT`, each row changed by the formulas in a plain loop."""
    first_V = distributions(by_hand(target_VV[ROOT], [])[None], HOW)[0]
    second = [distributions(by_hand(target_VV[token], [token])[None], HOW)[0] for token in range(VOCAB_SIZE)]
    return first_V[:, None] * np.array(second)


def by_hand(logits_V: Tensor, new: Sequence[int]) -> Tensor:
    scores_V = logits_V.clone()
    for token, number in dict(HOW.logit_bias).items():
        scores_V[token] += number
    for token in {ROOT, *new}:
        scores_V[token] *= HOW.repeat_penalty if scores_V[token] < 0 else 1 / HOW.repeat_penalty
    for token in new:
        scores_V[token] -= HOW.frequency_penalty
    return scores_V


def count_pairs(rule: Rule, shape: str) -> Floats:
    """How often each two tokens came first; a second step, with another past, where the first gave but one."""
    target_VV, draft_VV = pair("good")
    sampler, count_VV, unfinished = TableSampler(HOW, rule), np.zeros((VOCAB_SIZE, VOCAB_SIZE)), Counter[int]()

    def emitted(tree: TokenTree) -> list[int]:
        return rule.verify(tree, sampler.adjusted_rows(tree, target_VV[tree.token_N]), sampler, 0).tokens

    sampler.begin([ROOT])
    for tree in grow(draft_VV, SHAPES[shape], torch.full((NUM_RUNS,), ROOT), sampler):
        tokens = emitted(tree)
        if len(tokens) > 1:
            count_VV[tokens[0], tokens[1]] += 1
        else:
            unfinished[tokens[0]] += 1
    for token, num in unfinished.items():
        sampler.cut([token])
        for tree in grow(draft_VV, SHAPES[shape], torch.full((num,), token), sampler):
            count_VV[token, emitted(tree)[0]] += 1
    return count_VV


@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_two_tokens_have_the_adjusted_targets_law(rule: str, shape: str) -> None:
    assert p_value(count_pairs(find_rule(rule), shape), law(pair("good")[0])) > LEAST_P


def test_a_path_that_is_forgotten_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    adjusted = Sampler.adjusted
    monkeypatch.setattr(
        Sampler, "adjusted", lambda self, logits_TV, paths: adjusted(self, logits_TV, [()] * len(paths))
    )
    assert p_value(count_pairs(find_rule("sequoia"), "binary"), law(pair("good")[0])) < WRONG_P
