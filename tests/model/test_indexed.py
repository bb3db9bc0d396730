"""Layers that choose by an index what they attend to: every promise of a decoder holds for them as for any other.

All texts here are longer than what a layer chooses, 16 tokens, or 4 pools of 4, but where a length is told.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import matrix
from plans import plan_memory
from rounding import choices_beyond_doubt
from safetensors.torch import load_file, safe_open
from test_families import config_of, greedy_choices, meta_model_of, tiny_model
from test_recurrent import (
    PARENTS,
    assert_experts_come_one_by_one,
    assert_follows_trees,
    assert_goes_on,
    assert_goes_on_after_interrupts,
    assert_texts_share_passes,
    forward,
    opened,
    prompt_of,
)
from test_wrappers import saved
from tiny import save
from transformers import AutoModelForCausalLM

import offload
from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.engine.build import resident_model
from offload.engine.session import write_tensors
from offload.memory.planner import ModelFiles, require_no_states
from offload.model import indexed

# with an index for each layer, with one that layers share, and of pools, beside a recurrence
KINDS = ("deepseek_v32", "glm_moe_dsa", "qwen4_exp_text")
MORE = ("hy_v4", "axk2", "dots3_note_text")
# of prompts by their length, so that rounding decides no choice of their texts
SEEDS = {
    "deepseek_v32": {5: 1, 16: 1, 130: 5, 600: 8},
    "glm_moe_dsa": {5: 1, 16: 2, 130: 1, 600: 24},
    "qwen4_exp_text": {5: 1, 16: 1, 130: 1, 600: 1},
    "hy_v4": {5: 2, 130: 1},
    "axk2": {5: 1, 130: 5},
    "dots3_note_text": {5: 2, 130: 3},
}
TREES = ("none", "chain:8", "64x12", "dynamic:64x12", "256x12", "dynamic:256x12")


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_of_a_tree_chooses_as_its_path_alone_would(kind: str, tmp_path: Path) -> None:
    save(tiny_model(config_of(kind)), tmp_path)
    with choices_beyond_doubt():
        assert_follows_trees(tmp_path)


MISTAKES = {
    "the whole tree": (indexed, "_seen", lambda rows, num: torch.ones(len(rows.walk_TL), num, dtype=torch.bool)),
    "a sibling's key": (
        indexed._CacheOf,
        "update_indexer",
        lambda self, keys, layer, own=indexed._CacheOf.update_indexer: own(self, keys.flip(1), layer),
    ),
    "no choice": (indexed, "choose", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_would_show(mistake: str, glm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, other = MISTAKES[mistake]
    if other is None:
        where, name, other = indexed, "choose", lambda choice, seen, *_: seen
    monkeypatch.setattr(where, name, other)
    with pytest.raises(AssertionError):
        assert_follows_trees(glm)


def spec_of(tree: str) -> dict[str, Any]:
    num_nodes = 1 if tree == "none" else 9 if tree == "chain:8" else int(tree.split(":")[-1].split("x")[0])
    return {"tree": tree, "num_nodes": num_nodes}


def decoder_of(folder: Path, tree: str, *, is_resident: bool = False, context: int = 720, **more: Any) -> Any:
    """A decoder whose draft is the model itself."""
    sizes: dict[str, Any] = {"context": context, "num_nodes": spec_of(tree)["num_nodes"], "dtype": "float32"}
    roomy = plan_memory((open_checkpoint(folder),) * 2, ram=1 << 40, experts="layers", **sizes)
    ram = "4GiB" if is_resident else roomy.fixed_bytes + 2 * max(roomy.layer_bytes) + 100
    how = {"ram": ram, "context": context, "tree": tree, "threads": 1, "experts": "layers", "dtype": "float32"}
    return offload.load(folder, folder, **(how | more))


@matrix("tree", TREES, always=["dynamic:64x12"])
@matrix("is_resident", [True, False], always=[False])
def test_texts_are_transformers(tree: str, is_resident: bool, folder: Path) -> None:
    """Behind prompts that are shorter and longer than what a layer chooses, of which one takes two passes."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths = (5, 130) if tree == "dynamic:64x12" else (5, 16, 130, 600)
    seeds = SEEDS[theirs.config.model_type]
    with decoder_of(folder, tree, is_resident=is_resident) as decoder:
        assert decoder.plan.is_streamed != is_resident
        for num_tokens in filter(seeds.get, lengths):
            prompt = prompt_of(num_tokens, seeds[num_tokens])
            got = decoder.generate(prompt, max_new_tokens=96)
            with choices_beyond_doubt():
                assert got.token_ids == greedy_choices(theirs, got.token_ids, prompt)
            assert tree == "none" or got.stats.tokens_per_sweep > 2


@pytest.mark.full
@pytest.mark.parametrize("kind", MORE)
def test_texts_of_more_families_are_transformers(kind: str, tmp_path: Path) -> None:
    test_texts_are_transformers("dynamic:256x12", False, folder_of(kind, tmp_path))


def test_the_same_seed_gives_the_same_text(folder: Path) -> None:
    texts = []
    for tree in ("none", "64x12", "dynamic:64x12"):
        with decoder_of(folder, tree, context=160) as decoder:
            got = decoder.generate(prompt_of(30), max_new_tokens=32, temperature=0.8, seed=4)
            texts.append(got.token_ids)
    assert texts[0] == texts[1] == texts[2] and len({*texts[0]}) > 3


def test_bits_are_those_of_one_token_at_a_time(folder: Path) -> None:
    """In bfloat16, where every difference of order shows: texts and the chances of their tokens."""
    texts = []
    for tree in ("none", "dynamic:16x4"):
        with decoder_of(folder, tree, dtype="bfloat16", context=160, ram="2GiB", invariant=True) as decoder:
            assert decoder.invariance.holds, decoder.invariance.reason
            got = decoder.generate(prompt_of(70), max_new_tokens=20, num_logprobs=2)
            texts.append((got.token_ids, got.logprobs))
    assert all(one == texts[0] for one in texts) and len({*texts[0][0]}) > 3


def test_scores_that_depend_on_others_are_found_out(glm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what a pass of many rows scores differs in the last bits from what one of few does."""
    scores = indexed.index_scores
    other = lambda *what: scores(*what) * (1 if len(what[0]) < 9 else -1)  # noqa: E731
    monkeypatch.setattr(indexed, "index_scores", other)
    with decoder_of(glm, "chain:8", ram="2GiB", invariant=True) as decoder:
        assert not decoder.invariance.holds


def test_a_step_that_is_cut_short_leaves_what_is_committed(folder: Path) -> None:
    assert_goes_on_after_interrupts(folder, (2, 6, 11), invariant=True)


def test_a_text_goes_on_from_anywhere(glm: Path) -> None:
    """Index keys are kept as far as the text is the same."""
    assert_goes_on(glm, 17, 17, invariant=True)


def test_texts_share_passes_and_a_prompt(folder: Path) -> None:
    assert_texts_share_passes(folder, invariant=True)


def test_a_cache_takes_what_was_planned_for_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    shape, model = model_shape(checkpoint, "float32"), resident_model(checkpoint, "float32")
    cache = model.new_cache(80)
    cache.promise(30)
    forward(model, cache, [*range(-1, 29)], prompt_of(30))
    cache.commit(range(30))
    forward(model, cache, PARENTS, prompt_of(len(PARENTS)))
    held = [(name, one.nbytes) for layer in cache.layers for name, one in layer.held.items()]
    index_bytes = sum(size for name, size in held if name == "index")
    assert index_bytes == 80 * shape.index_bytes_per_token > 0
    assert sum(size for _, size in held) <= 80 * shape.kv_bytes_per_token
    if not shape.recurrent.state_bytes:
        assert sum(size for _, size in held) == 80 * shape.kv_bytes_per_token


def test_a_session_with_other_index_keys_is_refused(glm: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with opened(glm, invariant=True) as decoder:
        wanted = decoder.generate(prompt_of(30), max_new_tokens=12).token_ids
        decoder.generate(prompt_of(30), max_new_tokens=4)
        decoder.save_session(path)
        held = decoder.load_session(path).tokens
        run = decoder.run(held, offload.Sampling(), max_new_tokens=8, continues=True)
        assert run.sequence.stats.num_kept_tokens > 30
        tensors = load_file(path)
        assert {name for name in tensors if ".index." in name} >= {"target.index.0", "target.index.2"}
        with safe_open(path, framework="pt") as file:
            notes = {key: value for key, value in file.metadata().items() if key != "crc32"}
        for name, other in (("target.index.0", tensors["target.index.0"][..., 1:]), ("target.index.2", None)):
            wrong = {key: one for key, one in tensors.items() if key != name} | ({} if other is None else {name: other})
            write_tensors(path, notes, {key: one.contiguous() for key, one in wrong.items()})
            with pytest.raises(offload.UserError, match="index"):
                decoder.load_session(path)
    assert wanted[:4] == held[30:34]


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "qwen4_exp_text"])
def test_experts_come_one_by_one(kind: str, tmp_path: Path) -> None:
    assert_experts_come_one_by_one(folder_of(kind, tmp_path))


def test_a_copy_of_itself_in_few_bits_drafts(tmp_path: Path) -> None:
    config = short("glm_moe_dsa")
    config.mlp_layer_types = ["dense"] * 3
    save(tiny_model(config), tmp_path)
    with offload.load(tmp_path, "self:int8", ram="1GiB", context=160, tree="dynamic:16x4", threads=1) as decoder:
        got = decoder.generate(prompt_of(30), max_new_tokens=24)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with choices_beyond_doubt():
        assert got.token_ids == greedy_choices(theirs, got.token_ids, prompt_of(30))
    assert got.stats.tokens_per_sweep > 1.5


def test_sizes_of_mistrals_own_form(tmp_path: Path) -> None:
    """Names are other ones there, and some layers have the keys of others."""
    saved("mistral_large4", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    shape = model_shape(checkpoint, "float32")
    assert shape.index_bytes_per_token == 3 * 16 * 4
    assert shape.kv_bytes_per_token == (2 * (16 + 8) + 16 + 3 * 16) * 4


def test_ranks_are_refused(glm: Path) -> None:
    with pytest.raises(offload.UserError, match="stays on one rank: leave `ranks` out"):
        require_no_states(ModelFiles(open_checkpoint(glm)), "auto")


WRONG = {
    "no index to share": ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full", "full"]}, "share an index"),
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
    monkeypatch.setattr(indexed, "_MAKES", ())
    indexed._follower_of.cache_clear()
    try:
        with pytest.raises(offload.UserError, match="layers of kind indexed_attention"):
            meta_model_of(config_of("axk2"), tmp_path)
    finally:
        indexed._follower_of.cache_clear()
