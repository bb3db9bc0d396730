"""The promise, end to end: streamed tree decoding emits exactly what transformers emits, for every family and tree."""

from pathlib import Path

import pytest
import torch
from rounding import beyond_doubt
from tiny import FAMILIES, VOCAB_SIZE, build, save_pair, streaming_ram
from transformers import AutoModelForCausalLM

import offload

TREES = ("none", "8x3", "64x16", "chain:8", "sequences:4x4", "grown:64x16")
LARGEST = ("none", "64x16", "grown:64x16")
ALL_TREES = ("llama", "qwen3-sliding", "gemma3")  # families: to the others a small tree is part of a large one
NUM_NEW = 80  # with the longer prompt five times a sliding window of 24
BEHIND_ONE = ("none", "grown:64x16")  # trees behind a prompt of one token, and tokens: past the window's first slides
NUM_BEHIND_ONE = 32


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 40)]


def reference(directory: Path, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": num_new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return beyond_doubt(torch.cat(out.logits)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers(family: str, tmp_path: Path) -> None:
    target, draft = save_pair(FAMILIES[family](), tmp_path, noise=0.003)
    ram = streaming_ram(target, draft, num_nodes=64)
    with offload.load(target, draft, ram=ram, context=256, tree="64x16", threads=1, experts="layers") as decoder:
        assert decoder.plan.num_layer_slots == 3 and decoder.plan.num_resident == 0
        yields = []
        all_trees = TREES if family in ALL_TREES else LARGEST
        for prompt, num_new, trees in zip(prompts(), (NUM_BEHIND_ONE, NUM_NEW), (BEHIND_ONE, all_trees), strict=True):
            wanted = reference(target, prompt, num_new)
            for tree in trees:
                got = decoder.generate(prompt, max_new_tokens=num_new, tree=tree)
                assert got.token_ids == wanted, f"{tree}, prompt of {len(prompt)}"
                yields.append(got.stats.tokens_per_sweep)
    assert max(yields) > 1.5, "the draft never agreed: acceptance was not exercised"
    assert min(yields) == 1, "the tree-less run must take one sweep a token"


def test_same_seed_same_ids_for_every_tree(tmp_path: Path) -> None:
    target, draft = save_pair(FAMILIES["llama"](), tmp_path)
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_new_tokens": 40}
    with offload.load(target, ram="1GiB", context=128, threads=1) as alone:
        wanted = [alone.generate(prompts()[1], seed=seed, **sampling).token_ids for seed in range(2)]
    assert wanted[0] != wanted[1], "seeds must matter"
    with offload.load(target, draft, ram="1GiB", context=128, tree="64x16", threads=1) as decoder:
        for seed, ids in enumerate(wanted):
            for tree in TREES:
                got = decoder.generate(prompts()[1], seed=seed, tree=tree, **sampling)
                assert got.token_ids == ids, f"seed {seed}, {tree}"


def test_another_draft_changes_nothing_but_speed(tmp_path: Path) -> None:
    target, good = save_pair(FAMILIES["qwen3"](), tmp_path, noise=0.005)
    bad = tmp_path / "bad"
    build(FAMILIES["qwen3"](), seed=9).save_pretrained(bad)
    results = []
    for draft in (good, bad):
        with offload.load(target, draft, ram="1GiB", context=128, tree="8x3", threads=1) as decoder:
            results.append(decoder.generate(prompts()[1], max_new_tokens=60, temperature=1.0, seed=1))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].stats.tokens_per_sweep > 1.3 * results[1].stats.tokens_per_sweep


def test_prompt_longer_than_one_sweep_takes_in(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 2048
    target, draft = save_pair(config, tmp_path)
    prompt = torch.randint(3, VOCAB_SIZE, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    with offload.load(target, draft, ram="1GiB", context=1024, tree="8x3", threads=1) as decoder:
        got = decoder.generate(prompt, max_new_tokens=NUM_NEW)
    assert got.token_ids == reference(target, prompt)
