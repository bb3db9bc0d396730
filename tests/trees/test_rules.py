"""The rules end to end, on streamed models: greedy text, reproducible draws, distributions, refusals."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from bigrams import BigramModel
from matrix import matrix
from tables import distributions, p_value
from tiny import FAMILIES, VOCAB_SIZE, Pair, save_pair
from transformers import AutoModelForCausalLM

import offload
from offload.drafting.base import DraftText
from offload.drafting.model_drafter import ModelDrafter
from offload.memory.sizes import DRAW_BYTES
from offload.rules import RULES, ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees import verification as rules
from offload.trees.token_tree import Draw, Proposals, TokenTree
from offload.trees.topology import Topology, best_first, k_ary
from offload.trees.verification import find_rule

TREES = ("none", "16x4", "chain:6", "sequences:3x3")
SMALL_VOCAB = 8
PROMPT = [3, 1, 5]
load = partial(offload.load, ram="1GiB", context=160, tree="16x4", threads=1)


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = FAMILIES["llama"]()
    config.vocab_size, config.num_hidden_layers = SMALL_VOCAB, 1
    return save_pair(config, tmp_path_factory.mktemp("small"), noise=0.03)


@pytest.fixture(scope="module")
def greedy_ids(pair: Pair) -> list[int]:
    with load(pair[0], tree="none") as alone:
        return alone.generate(PROMPT, max_new_tokens=40).token_ids


@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_is_the_same_under_every_rule(rule: str, pair: Pair, greedy_ids: list[int]) -> None:
    with load(*pair, rule=rule) as decoder:
        for tree in TREES:
            got = decoder.generate(PROMPT, max_new_tokens=40, tree=tree)
            assert got.token_ids == greedy_ids, tree
            assert got.rule == rule and (got.stats.tokens_per_sweep > 1.2 or tree == "none")


@pytest.mark.parametrize("rule", RULES)
def test_one_seed_one_text(rule: str, pair: Pair) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "max_new_tokens": 40}
    with load(*pair, rule=rule) as decoder:
        texts = [decoder.generate(PROMPT, seed=seed, **sampling).token_ids for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]
        if find_rule(rule).repeats_draws:
            assert decoder.generate(PROMPT, seed=1, tree="none", **sampling).token_ids == texts[0]


@matrix("rule", RULES, always=["match"], daily=1)
def test_first_tokens_have_the_target_distribution(rule: str, small_models: Pair) -> None:
    """The distribution of both together over some hundred seeds, against `transformers` in float32."""
    sampling, count_VV = Sampling(temperature=1.0, top_p=0.95), np.zeros((SMALL_VOCAB, SMALL_VOCAB))
    with load(*small_models, rule=rule, tree="8x3", context=32) as decoder:
        runs = [decoder.generate(PROMPT, seed=s, max_new_tokens=2, temperature=1.0, top_p=0.95) for s in range(300)]
    np.add.at(count_VV, tuple(np.array([run.token_ids for run in runs]).T), 1)
    assert sum(run.stats.num_first_tokens > 1 for run in runs) > 75, "the draft hardly ever agreed"
    model = AutoModelForCausalLM.from_pretrained(small_models[0], dtype=torch.float32).eval()
    first_V = next_distributions(model, [PROMPT], sampling)[0]
    second_VV = next_distributions(model, [[*PROMPT, token] for token in range(SMALL_VOCAB)], sampling)
    assert p_value(count_VV, first_V[:, None] * second_VV) > 1e-3


def next_distributions(model: torch.nn.Module, prompts: list[list[int]], sampling: Sampling) -> np.ndarray:
    with torch.inference_mode():
        return distributions(model(torch.tensor(prompts)).logits[:, -1], sampling)


def test_what_the_plan_has_no_room_for_is_refused(pair: Pair) -> None:
    wanted = "`rule` must be one of match, sequoia, specinfer, spectr, topk, got 'tree'"
    with pytest.raises(offload.UserError, match=wanted):
        load(*pair, rule="tree")
    with load(*pair) as decoder, pytest.raises(offload.UserError, match=wanted):
        decoder.generate(PROMPT, rule="tree")
    # Rules beyond the plan are refused.
    with load(*pair) as decoder:
        assert decoder.plan.distribution_bytes == 0
        assert decoder.generate(PROMPT, max_new_tokens=4, rule="topk").rule == "topk"
        for rule in ("sequoia", "specinfer", "spectr"):
            with pytest.raises(offload.UserError, match=f"load the model with `rule` {rule}"):
                decoder.generate(PROMPT, rule=rule)
    with load(*pair, rule="spectr") as decoder:
        assert decoder.plan.distribution_bytes == 15 * VOCAB_SIZE * 4 + DRAW_BYTES
        for rule in RULES:
            decoder.generate(PROMPT, max_new_tokens=4, rule=rule)
    with load(pair[0], tree="none", rule="sequoia") as alone:
        assert (
            alone.plan.distribution_bytes == 0
            and alone.generate(PROMPT, max_new_tokens=4, rule="spectr").rule == "spectr"
        )


def test_rules_stand_in_one_table() -> None:
    """The functions are those that it names, no more; what users read names the same rules."""
    assert {terms.test for terms in RULES.values()} == set(rules._TRIALS)
    for name, terms in RULES.items():
        rule = find_rule(name)
        assert (rule.name, rule.drafting) == (name, terms.drafting)
        assert rule.repeats_draws == (terms.test == "match")
    named = re.findall(r"^\| (\w+) \|", str(rules.__doc__), flags=re.MULTILINE)
    assert sorted(named[1:]) == sorted(RULES), "the table in the docstring"


NARROW = BigramModel(4, 1.0)  # a draft of four tokens beside a target of six


def grow_bigrams(topology: Topology, tokens: list[int], sampler: Sampler, vocab_size: int = 6) -> TokenTree:
    drafter = ModelDrafter(NARROW, vocab_size, 64)  # type: ignore[arg-type]
    return drafter.propose([DraftText(topology, tokens, sampler, drafter.new_state())])[0]


@pytest.mark.parametrize("drafting", [ChildSampling.WITHOUT_REPLACEMENT, ChildSampling.WITH_REPLACEMENT])
def test_a_tree_carries_the_distributions_of_the_nodes_that_have_children(drafting: ChildSampling) -> None:
    topology, sampler = best_first((0.5, 0.3, 0.1), 12, 3), Sampler(Sampling(temperature=0.7), 6, drafting)
    tree = grow_bigrams(topology, [1, 5], sampler)
    assert tree.proposals is not None and tree.proposals.probs_EV.dtype == torch.float32
    expanded = np.flatnonzero(topology.num_children_N)
    assert tree.proposals.probs_EV.shape == (len(expanded), 6)
    for row, node in enumerate(expanded):
        # What the draft does not know reads as its last token: the root here, and the fall-back's children.
        wanted_V = sampler.distribution(NARROW.logits_VV[min(tree.tokens[node], 3)][None])[0]
        assert tree.proposals.row_N[node] == row
        assert torch.equal(tree.proposals.probs_EV[row], torch.cat([wanted_V, torch.zeros(2)]))
    assert {tree.proposals.row_N[node] for node in range(12) if node not in expanded} == {-1}


def test_children_beyond_a_narrow_draft() -> None:
    # Six children of a draft of four tokens: the last two are those that only the target has (Alg.
    # 1).
    sampler = Sampler(Sampling(temperature=0.7), 6, ChildSampling.WITHOUT_REPLACEMENT)
    tree = grow_bigrams(k_ary(6, 7), [1, 0], sampler)
    assert sorted(tree.tokens[1:5]) == [0, 1, 2, 3] and sorted(tree.tokens[5:]) == [4, 5]
    assert [offer.probs_V[offer.token] for offer in tree.offers(0)][4:] == [0.5, 1.0]
    # Seven children of four tokens: the four draws are offered, and the fourth is accepted for
    # certain.
    sampler = Sampler(Sampling(temperature=0.7), 4, ChildSampling.WITHOUT_REPLACEMENT)
    tree = grow_bigrams(k_ary(7, 8), [1, 0], sampler, 4)
    assert sorted(tree.tokens[1:5]) == [0, 1, 2, 3] and [offer.child for offer in tree.offers(0)] == [1, 2, 3, 4]
    for _ in range(200):
        accepted = find_rule("sequoia").verify(tree, torch.zeros(8, 4), sampler, 0)
        assert len(accepted.nodes) == 2
    # A child that its distribution cannot give is a bug.
    proposals = Proposals.blank(k_ary(2, 3), 4, Draw.WITH_REPLACEMENT)
    proposals.write([0], torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    with pytest.raises(AssertionError, match="child 2 cannot have been drawn"):
        list(proposals.offers(0, [1, 2], [1, 3]))
