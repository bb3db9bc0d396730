"""Layers that choose by an index what they attend to, by each row's own path: every promise of a decoder holds.

All texts here are longer than what a layer chooses, 16 tokens, or 4 pools of 4, but where a length is told.
"""

import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from passes import causal, sees
from plans import model_shape
from rounding import choices_beyond_doubt
from safetensors import safe_open
from safetensors.torch import load_file
from test_families import config_of, greedy_choices, meta_model_of, tiny_model
from test_recurrent import (
    assert_a_copy_drafts,
    assert_experts_come_one_by_one,
    assert_follows_trees,
    assert_goes_on,
    assert_goes_on_after_interrupts,
    assert_refuses,
    assert_texts_share_passes,
    filled_cache,
    opened,
    random_parents,
)
from test_wrappers import saved
from tiny import random_ids, save
from torch import Tensor
from transformers import AutoModelForCausalLM

import offload
from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.engine.state_tensors import write_tensors
from offload.kernels.path_attention import PathRows, ScoreTerms
from offload.model import meta
from offload.model.headers import describe
from offload.model.kv_cache import KVCache
from offload.model.meta import build_meta_model
from offload.model.mixers import indexed, selection
from offload.model.mixers.selection import Pool, TopBlocks, TopK, index_scores, select
from offload.model.parts import BatchMask, BatchPart
from offload.model.path_attention import path_attention, path_rows
from offload.model.tree_model import TreeModel
from offload.planning.budget import require_no_states

# with an index for each layer, with one that layers share, and of pools, beside a recurrence
KINDS = ("deepseek_v32", "glm_moe_dsa", "qwen4_exp_text")
# keys that are rotated by their last numbers, gates on attention, and layers that see a window beside
MORE = ("hy_v4", "axk2", "dots3_note_text", "minimax_m3_vl_text")
# of prompts by their length, so that rounding decides no choice of their texts
SEEDS = {
    "deepseek_v32": {5: 1, 130: 5},
    "glm_moe_dsa": {5: 1, 130: 1},
    "qwen4_exp_text": {5: 1, 600: 1},
}


def short(kind: str) -> Any:
    """The config of three layers, the fewest that stream, that takes longer texts than other tests have."""
    config = config_of(kind)
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:3])
    config.num_hidden_layers = 3
    config.max_position_embeddings = 1024
    return config


def folder_of(kind: str, directory: Path) -> Path:
    return save(tiny_model(short(kind)), directory)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("glm_moe_dsa", tmp_path_factory.mktemp("glm"))


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_every_node_of_a_tree_chooses_as_its_path_alone_would(kind: str, tmp_path: Path) -> None:
    save(tiny_model(config_of(kind)), tmp_path)
    with choices_beyond_doubt():
        assert_follows_trees(tmp_path)


def test_texts_are_transformers(folder: Path) -> None:
    """Behind prompts that are shorter and longer than what a layer chooses, of which one takes two passes."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with opened(folder, tree="dynamic:64x12", context=720, num_slots=2) as decoder:
        assert decoder.plan.is_streamed
        for num_tokens, seed in SEEDS[theirs.config.model_type].items():
            prompt = random_ids(num_tokens, seed)
            got = decoder.generate(prompt, max_new_tokens=48)
            with choices_beyond_doubt():
                assert got.token_ids == greedy_choices(theirs, got.token_ids, prompt)
            assert got.stats.tokens_per_sweep > 2


@pytest.mark.parametrize("folder", ["glm_moe_dsa", "qwen4_exp_text", "minimax_m3_vl_text"], indirect=True)
def test_bits_are_those_of_one_token_at_a_time(folder: Path) -> None:
    """In bfloat16, where every difference of order shows: drawn texts and the chances of their tokens."""
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 4, "num_logprobs": 2}
    texts = []
    for tree in ("none", "dynamic:16x4"):
        with opened(folder, tree=tree, dtype="bfloat16", ram="2GiB", invariant=True) as decoder:
            assert decoder.invariance.holds, decoder.invariance.reason
            got = decoder.generate(random_ids(70), max_new_tokens=20, **drawn)
            texts.append((got.token_ids, got.logprobs))
    assert all(text == texts[0] for text in texts) and len({*texts[0][0]}) > 3


def test_scores_that_depend_on_others_are_found_out(glm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what a pass of many rows scores differs in the last bits from what one of few does."""
    scores = selection.index_scores
    other = lambda *others, **options: scores(*others, **options) * (1 if len(others[0]) < 9 else -1)  # noqa: E731
    monkeypatch.setattr(selection, "index_scores", other)
    with opened(glm, tree="chain:8", context=720, ram="2GiB", invariant=True) as decoder:
        assert not decoder.invariance.holds


def test_a_step_that_is_cut_short_leaves_what_is_committed(glm: Path) -> None:
    assert_goes_on_after_interrupts(glm, (2, 6, 11), invariant=True)


def test_a_text_goes_on_from_anywhere(glm: Path) -> None:
    """Index keys are kept as far as the text is the same."""
    assert_goes_on(glm, 17, 17, invariant=True)


def test_texts_share_passes_and_a_prompt(glm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails would be run again text by text, and so be right all the same."""
    run, shared = TreeModel.forward_parts, []

    def noted(self: TreeModel, parts: Any, **options: Any) -> Tensor:
        logits = run(self, parts, **options)
        shared.append(len(parts) > 1)
        return logits

    monkeypatch.setattr(TreeModel, "forward_parts", noted)
    assert_texts_share_passes(glm, invariant=True)
    assert sum(shared) > 4


@pytest.mark.parametrize("folder", [*KINDS, "minimax_m3_vl_text"], indirect=True)
def test_a_cache_takes_what_was_planned_for_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    shape, cache = model_shape(checkpoint, "float32"), filled_cache(resident_model(checkpoint, "float32"))
    held = [
        (name, held.nbytes) for layer in range(cache.num_layers) for name, held in cache.layer_states(layer).items()
    ]
    index_bytes = sum(size for name, size in held if name == "index")
    assert index_bytes == 80 * shape.index_bytes_per_token > 0
    assert sum(size for _, size in held) == 80 * shape.kv_bytes_per_token


def test_a_session_with_other_index_keys_is_refused(glm: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with opened(glm, invariant=True) as decoder:
        wanted = decoder.generate(random_ids(30), max_new_tokens=12).token_ids
        decoder.generate(random_ids(30), max_new_tokens=4)
        decoder.save_session(path)
        held = decoder.load_session(path).tokens
        run = decoder.run(held, offload.Sampling(), max_new_tokens=8, continues=True)
        assert run.sequence.stats.num_kept_tokens > 30
        changed = {"target.index.0": lambda tensor: tensor[..., 1:], "target.index.2": lambda _: None}
        assert_refuses(decoder, path, changed, "index")
    assert wanted[:4] == held[30:34]


@pytest.mark.parametrize("folder", ["glm_moe_dsa", "qwen4_exp_text", "minimax_m3_vl_text"], indirect=True)
def test_an_index_key_that_is_no_number_ends_the_text(folder: Path, tmp_path: Path) -> None:
    """As NaN in keys, values and states does; it would decide what rows see, and leave no trace."""
    path = tmp_path / "session"
    with opened(folder, invariant=True) as decoder:
        decoder.generate(random_ids(40), max_new_tokens=4)
        decoder.save_session(path)
        tensors = load_file(path)
        name = next(name for name in tensors if ".index." in name)
        tensors[name][..., 17, 3] = torch.nan
        with safe_open(path, framework="pt") as file:
            notes = {key: value for key, value in file.metadata().items() if key != "crc32"}
        write_tensors(path, notes, tensors)
        held = decoder.load_session(path).tokens
        with pytest.raises(offload.UserError, match="not finite numbers"):
            deque(decoder.run(held, offload.Sampling(), max_new_tokens=8, continues=True))


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "qwen4_exp_text"])
def test_experts_come_one_by_one(kind: str, tmp_path: Path) -> None:
    assert_experts_come_one_by_one(folder_of(kind, tmp_path))


def test_a_copy_of_itself_in_few_bits_drafts(tmp_path: Path) -> None:
    config = short("glm_moe_dsa")
    config.mlp_layer_types = ["dense"] * 3
    assert_a_copy_drafts(save(tiny_model(config), tmp_path), "int8")


def test_sizes_of_mistrals_own_form(tmp_path: Path) -> None:
    """Names are other ones there, and some layers have the keys of others."""
    saved("mistral_large4", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    shape = model_shape(checkpoint, "float32")
    assert shape.index_bytes_per_token == 3 * 16 * 4
    assert shape.kv_bytes_per_token == (2 * (16 + 8) + 16 + 3 * 16) * 4


def test_ranks_are_refused(glm: Path) -> None:
    with pytest.raises(offload.UserError, match="stays on one rank: leave `ranks` out"):
        require_no_states(ModelFiles(describe(glm)), "auto")


WRONG = {
    "no index to share": ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full", "full"]}, "share an index"),
    "an index that chooses no token": ("deepseek_v32", {"index_topk": 0}, "an index that chooses nothing"),
    "tables of n-grams": ("qwen4_exp_text", {"ple_layer_ids": [1], "eos_token_id": 2}, "tables of n-grams"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_trees_cannot_follow_is_refused(case: str, tmp_path: Path) -> None:
    kind, changes, words = WRONG[case]
    config = config_of(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(offload.UserError, match=words):
        meta_model_of(config, tmp_path)


def test_an_index_of_another_make_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed.Indexer, "makes", [])
    with pytest.raises(offload.UserError, match="layers of kind indexed_attention"):
        meta_model_of(config_of("axk2"), tmp_path)


@pytest.mark.parametrize("kind", ["deepseek_sparse_attention", "indexed_attention"])
def test_an_older_transformers_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls such layers otherwise, and does not know what newer ones call them."""
    allowed = [layer_type for layer_type in meta.ALLOWED_LAYER_TYPES if layer_type != "indexed_attention"]
    monkeypatch.setattr(meta, "ALLOWED_LAYER_TYPES", allowed)
    checkpoint = saying(kind, tmp_path)
    monkeypatch.setattr(meta, "_kinds_of", lambda _: checkpoint.config["layer_types"])
    with pytest.raises(offload.UserError, match=r"too old for model type axk2 .*pip install -U transformers"):
        build_meta_model(checkpoint, torch.bfloat16)


def test_what_an_older_transformers_wrote_is_taken(tmp_path: Path) -> None:
    build_meta_model(saying("deepseek_sparse_attention", tmp_path), torch.bfloat16)


def saying(kind: str, directory: Path) -> Checkpoint:
    """Headers of a model whose config calls its layers so."""
    settings = config_of("axk2").to_dict()
    return Checkpoint(directory, {**settings, "layer_types": [kind] * len(settings["layer_types"])}, (), {})


NUM_HEADS, WIDTH = 3, 8
MEANS = Pool(4, lambda raw_JRW, first_J: raw_JRW.mean(1) + first_J[:, None])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small whole ones, so that sums are exact and many scores are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def case(num_prefix: int, num_rows: int, seed: int, num_earlier: int = 0) -> tuple[PathRows, list[list[int]], Any]:
    """Rows of a pass, the columns of each one's path, and queries, weights and states for them."""
    sees_NN = sees(random_parents(num_earlier + num_rows, seed, straight=0.7)).numpy()[num_earlier:]
    rows = path_rows(num_prefix, torch.from_numpy(sees_NN), path_attention)
    paths = [[*range(num_prefix), *(num_prefix + np.flatnonzero(sees)).tolist()] for sees in sees_NN]
    query_THK = numbers(num_rows, NUM_HEADS, WIDTH, seed=seed)
    weight_TH = numbers(num_rows, NUM_HEADS, seed=seed + 1)
    state_SW = numbers(num_prefix + num_earlier + num_rows, WIDTH, seed=seed + 2)
    return rows, paths, (query_THK, weight_TH, state_SW)


def wanted(choice: TopK, path: list[int], query_HK: Tensor, weight_H: Tensor, state_SW: Tensor) -> set[int]:
    """The columns that a row with this path chooses, by itself."""
    size = choice.pool.size if choice.pool else 1
    pools = [path[lo : lo + size] for lo in range(0, len(path) - size + 1, size)]
    keys = [
        choice.pool.keys(state_SW[pool][None], torch.tensor([index * size]))[0] if choice.pool else state_SW[pool[0]]
        for index, pool in enumerate(pools)
    ]
    scores = [float((weight_H * (query_HK @ key).relu()).sum()) for key in keys]
    best = sorted(range(len(pools)), key=lambda index: (-scores[index], index))[: choice.num_keys]
    return {column for index in best for column in pools[index]} | {*path[len(pools) * size :]}


def chosen(rows: PathRows, paths: list[list[int]]) -> list[set[int]]:
    if rows.chosen_TS is None:
        return [{*path} for path in paths]
    return [{*path} & {*row_S.nonzero().flatten().tolist()} for path, row_S in zip(paths, rows.chosen_TS, strict=True)]


def assert_chooses(choice: TopK, num_prefix: int, num_rows: int, seed: int, num_earlier: int = 0) -> None:
    rows, paths, (query_THK, weight_TH, state_SW) = case(num_prefix, num_rows, seed, num_earlier)
    got = select(choice, rows, query_THK, weight_TH, state_SW)
    for row, chosen_rows in enumerate(chosen(got, paths)):
        assert chosen_rows == wanted(choice, paths[row], query_THK[row], weight_TH[row], state_SW), row
    if got.chosen_TS is not None:
        result = ({*chosen_S.nonzero().flatten().tolist()} for chosen_S in got.chosen_TS)
        assert all(rows <= {*path} for rows, path in zip(result, paths, strict=True)), "nothing beside the path"


CHOICES = {"tokens": TopK(12), "pools": TopK(3, MEANS), "wide pools": TopK(2, MEANS._replace(size=8))}
SIZES = [(0, 1), (0, 40), (5, 24), (63, 64), (64, 30), (130, 24), (600, 9)]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("num_prefix", "num_rows"), SIZES)
def test_each_row_chooses_on_its_own_path(choice: str, num_prefix: int, num_rows: int) -> None:
    for seed in range(3):
        assert_chooses(CHOICES[choice], num_prefix, num_rows, seed)
    assert_chooses(CHOICES[choice], num_prefix, num_rows, 7, num_earlier=11)


@pytest.mark.parametrize(("num_prefix", "num_rows"), SIZES)
def test_each_group_of_heads_chooses_blocks_on_its_rows_own_paths(num_prefix: int, num_rows: int) -> None:
    top = TopBlocks(num_keys=3, size=8, num_last=1)
    rows, paths, (query_THK, _, state_SW) = case(num_prefix, num_rows, seed=2, num_earlier=11)
    got = select(top, rows, query_THK, None, state_SW)
    groups = got if isinstance(got, tuple) else (got,) * NUM_HEADS
    assert isinstance(got, tuple) == (max(map(len, paths)) > 24)
    for head, group in enumerate(groups):
        for row, chosen_rows in enumerate(chosen(group, paths)):
            blocks = [paths[row][lo : lo + 8] for lo in range(0, len(paths[row]), 8)]
            scores = [float((state_SW[block] @ query_THK[row, head]).max()) for block in blocks[:-1]] + [math.inf]
            best = sorted(range(len(blocks)), key=lambda index: (-scores[index], index))[:3]
            assert chosen_rows == {column for index in best for column in blocks[index]}, (head, row)


def test_a_prompt_chooses_row_by_row() -> None:
    """Rows that lie in order, most of which end before the blocks that all have in common."""
    rows = path_rows(70, causal(150), path_attention)
    paths = [[*range(70 + row + 1)] for row in range(150)]
    query_THK, weight_TH = numbers(150, NUM_HEADS, WIDTH), numbers(150, NUM_HEADS, seed=1)
    state_SW = numbers(220, WIDTH)
    for choice in CHOICES.values():
        got = chosen(select(choice, rows, query_THK, weight_TH, state_SW), paths)
        for row in (0, 5, 57, 58, 120, 149):
            assert got[row] == wanted(choice, paths[row], query_THK[row], weight_TH[row], state_SW)


def test_texts_that_share_a_pass_choose_among_their_own() -> None:
    first, other = case(40, 9, seed=3), case(70, 12, seed=4)
    query_THK, weight_TH = (torch.cat([first[2][at], other[2][at]]) for at in range(2))
    gap_SW = torch.full((7, WIDTH), torch.nan)  # slots that nothing was written to
    state_SW = torch.cat([first[2][2], gap_SW, other[2][2]])
    num_first = len(first[2][2])
    caches = [KVCache(1, num_first + 7) for _ in range(2)]
    KVCache.side_by_side(caches)
    num_other = len(state_SW) - num_first - 7
    sizes = zip(caches, (0, 9), (9, 12), (num_first, num_other), strict=True)
    parts = [BatchPart(*[torch.empty(num)] * 3, cache, 0, lo, end - num) for cache, lo, num, end in sizes]
    seen = BatchMask(parts, (first[0], other[0]))
    for choice in CHOICES.values():
        got = select(choice, seen, query_THK, weight_TH, state_SW)
        for mask, (rows, paths, part) in zip(got.masks, (first, other), strict=True):
            assert chosen(mask, paths) == chosen(select(choice, rows, *part), paths)


def test_scores_are_added_up_over_heads() -> None:
    query_THK, weight_TH = torch.randn(40, NUM_HEADS, WIDTH), torch.randn(40, NUM_HEADS)
    key_JK = torch.randn(700, WIDTH)
    wanted_TJ = ((query_THK @ key_JK.T).relu() * weight_TH[..., None]).sum(1)
    torch.testing.assert_close(index_scores(query_THK, weight_TH, key_JK), wanted_TJ, atol=1e-4, rtol=1e-5)
    even_TJ = (query_THK @ key_JK.T).relu().sum(1)
    torch.testing.assert_close(index_scores(query_THK, None, key_JK), even_TJ, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("num_prefix", "num_rows"), SIZES[1:])
def test_attention_sees_what_was_chosen(num_prefix: int, num_rows: int) -> None:
    rows, paths, (query_THK, weight_TH, state_SW) = case(num_prefix, num_rows, seed=5)
    rows = select(CHOICES["tokens"], rows, query_THK, weight_TH, state_SW)
    query_HTK, key_GSK, value_GSV = torch.randn(4, num_rows, 16), *torch.randn(2, 2, len(state_SW), 16)
    got_THV = path_attention(query_HTK, key_GSK, value_GSV, rows, ScoreTerms(0.3))
    without = path_attention(query_HTK, key_GSK, value_GSV, replace(rows, chosen_TS=None), ScoreTerms(0.3))
    for row, chosen_rows in enumerate(chosen(rows, paths)):
        columns = sorted(chosen_rows)
        for head in range(4):
            weight_C = (0.3 * key_GSK[head // 2, columns] @ query_HTK[head, row]).softmax(0)
            wanted_V = weight_C @ value_GSV[head // 2, columns]
            torch.testing.assert_close(got_THV[row, head], wanted_V, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got_THV, without, atol=1e-2), "a choice that is not heeded would show"
