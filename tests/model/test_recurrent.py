"""Hybrids: layers with a state follow token trees, step by step, and every promise of a decoder holds for them."""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from passes import sees, tree_scores
from plans import model_shape
from refusals import set_json
from rounding import choices_beyond_doubt
from safetensors import safe_open
from safetensors.torch import load_file
from test_families import HYBRIDS, config_of, greedy_choices, meta_model_of, tiny_model
from tiny import random_ids, save, streaming_ram
from transformers import AutoModelForCausalLM

import offload
from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.engine.state_tensors import write_tensors
from offload.errors import UserError
from offload.model import recurrent_rows
from offload.model.expanded import _runs_with
from offload.model.headers import describe
from offload.model.linear import PLAIN
from offload.model.meta import build_meta_model
from offload.model.mixers import gated_delta, table
from offload.model.mixers.base import Inputs
from offload.model.parameters import parameter_places
from offload.model.parts import BatchPart, causal, lay
from offload.model.recurrent_cache import RecurrentCache
from offload.model.recurrent_rows import (
    BASE,
    RowTree,
    TreeRows,
    previous_inputs,
)
from offload.model.thread_team import TEAM
from offload.model.tree_model import TreeModel
from offload.planning.budget import require_no_states

KINDS = ("qwen3_5_text", "lfm2", "granitemoehybrid", "jamba", "kimi_linear", "minimax", "zamba2")
TREES = ("none", "chain:3", "8x3", "dynamic:16x4")
_HOW: dict[str, Any] = {"context": 160, "tree": "dynamic:16x4", "threads": 1}
Change = Callable[[torch.Tensor], torch.Tensor | None]
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(config_of(request.param)), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["qwen3_5_text", "granitemoehybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With states, and with convolutions before them."""
    return save(tiny_model(config_of(request.param)), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(config_of("qwen3_5_text")), tmp_path_factory.mktemp("qwen"))


def num_nodes_of(tree: str) -> int:
    kind, _, size = tree.rpartition(":")
    return 1 if tree == "none" else int(size) + 1 if kind == "chain" else int(size.partition("x")[0])


@contextmanager
def opened(
    folder: Path, *, tree: str = "8x3", context: int = 160, num_slots: int = 3, **options: Any
) -> Iterator[offload.Decoder]:
    """A decoder whose layers stream, and whose draft is the model itself."""
    parallel = options.get("parallel", 1)
    sizes = {"context": context, "parallel": parallel, "experts": "layers", "dtype": options.get("dtype", "auto")}
    ram = streaming_ram(folder, num_slots=num_slots, num_nodes=num_nodes_of(tree) * parallel, **sizes)
    settings = {"ram": ram, "context": context, "tree": tree, "threads": 1, "experts": "layers"}
    with offload.load(folder, folder, **(settings | options)) as decoder:
        yield decoder


def path_to(node: int) -> list[int]:
    return [*path_to(PARENTS[node]), node] if node >= 0 else []


def assert_follows_trees(
    folder: Path, *, ends: Sequence[int] = (8, 10), nodes: Sequence[int] = (0, 3, 5, 8, 9, 10)
) -> None:
    """These nodes of two trees, behind a prompt in two passes, against transformers over their paths alone."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, ids = resident_model(open_checkpoint(folder), "float32"), random_ids(40)
    cache = ours.new_cache(80)
    for chunk in (ids[:23], ids[23:]):
        cache.expect_rows(len(chunk))
        tree_scores(ours, cache, [*range(-1, len(chunk) - 1)], chunk)
        cache.commit(range(len(chunk)))
    for step, end in enumerate(ends):
        tokens = random_ids(len(PARENTS), seed=step)
        logits_NV = tree_scores(ours, cache, PARENTS, tokens)
        for node in nodes:
            path = [tokens[above] for above in path_to(node)]
            with torch.inference_mode():
                wanted_V = theirs(input_ids=torch.tensor([ids + path])).logits[0, -1]
            torch.testing.assert_close(logits_NV[node], wanted_V, atol=2e-4, rtol=1e-4)
        cache.commit(path_to(end))
        ids += [tokens[above] for above in path_to(end)]
    assert cache.length == len(ids)


def test_trees_and_commits_equal_plain_decoding(folder: Path) -> None:
    assert_follows_trees(folder)


def test_bits_are_those_of_one_token_at_a_time(folder: Path) -> None:
    """In bfloat16, where every difference of order shows: texts and the chances of their tokens, for every tree."""
    texts, trees = [], TREES if "qwen" in folder.name else ("none", "dynamic:16x4")
    for tree in trees:
        with opened(folder, tree=tree, dtype="bfloat16") as decoder:
            assert decoder.invariance.holds, decoder.invariance.reason
            got = decoder.generate(random_ids(30), max_new_tokens=24, num_logprobs=2)
            texts.append((got.token_ids, got.logprobs))
    assert all(text == texts[0] for text in texts) and len({*texts[0][0]}) > 3


def delta_inputs(num_rows: int, rule: gated_delta.GatedDelta) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    width = 2 * rule.num_key_heads * rule.key_size + rule.num_heads * rule.value_size
    shapes = {"mixed": (width,), "g": (rule.num_heads,), "beta": (rule.num_heads,)}
    rows = {name: torch.randn(num_rows, *shape, generator=generator) for name, shape in shapes.items()}
    return Inputs({name: -row.abs() if name == "g" else row.bfloat16() for name, row in rows.items()}, {})


@pytest.mark.parametrize("num_threads", [1, 3])
def test_compiled_steps_have_the_bits_of_the_plain_ones(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down a tree whose slots are used again, behind rows that are certain, and along a path."""
    rule = gated_delta.GatedDelta(2, 6, 40, 64)
    tree = RowTree()
    tree.parents = [BASE, BASE, 0, 1, 0, 2, 2, 5]
    tree._depths = [0, 0, 1, 1, 1, 2, 2, 3]
    base = torch.randn(1, 6, 40, 64)
    inputs = delta_inputs(10, rule)
    ready = rule.prepare(inputs)
    parents, states, wanted = [BASE, 0, *(max(1, parent + 2) for parent in tree.parents)], {BASE: base}, []
    for row, parent in enumerate(parents):
        row_inputs = {name: row_T[row : row + 1] for name, row_T in ready.items()}
        states[row] = rule.advance(states[parent], row_inputs)
        wanted.append(rule.read(states[row], row_inputs))
    before = base.clone()
    monkeypatch.setattr(gated_delta, "_LEAST_SHARED", 0)
    monkeypatch.setattr(TEAM, "_num_threads", num_threads)
    if not rule.walks(base.device):
        pytest.skip("nothing is compiled here")
    steps = TreeRows(tree, 0, num_certain=2).steps()
    out, after = rule.walk(base, inputs, steps)
    assert torch.equal(out, torch.cat(wanted)) and torch.equal(after, states[1]) and torch.equal(base, before)
    brought = inputs.part(torch.tensor([0, 1, 2, 4, 7, 9]))
    assert torch.equal(rule.run(base, brought, is_exact=True)[1], states[9])
    steps.step_R3[5, 1] = steps.step_R3[4, 1]
    assert not torch.equal(rule.walk(base, inputs, steps)[0], torch.cat(wanted)), "a mistake would be seen"


@pytest.mark.parametrize("way", ["_level_by_level", "_branch_by_branch"])
def test_either_way_through_a_tree_is_plain_decoding(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta.GatedDelta, "walks", lambda *_: False)
    most = 0 if way == "_branch_by_branch" else 1 << 40
    monkeypatch.setattr(recurrent_rows, "WIDE_STATES_BYTES", most)
    assert_follows_trees(folder)


def test_a_step_that_depends_on_others_is_found_out(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what two rows get in one step differs in the last bit from what one gets."""
    advance = gated_delta.GatedDelta.advance

    def other(self: Any, state: torch.Tensor, *others: Any) -> Any:
        after = advance(self, state, *others)
        return after if len(after) == 1 else after * (1 + 1e-6)

    monkeypatch.setattr(gated_delta.GatedDelta, "walks", lambda *_: False)
    monkeypatch.setattr(gated_delta.GatedDelta, "advance", other)
    with opened(qwen, dtype="float32") as decoder:
        assert not decoder.invariance.holds and "tree" in decoder.invariance.reason


@pytest.mark.parametrize("kind", HYBRIDS)
def test_each_mixer_does_what_the_library_does(kind: str) -> None:
    """A module by itself: a chain of rows, against the library's forward on the same numbers."""
    config = config_of(kind)
    model = tiny_model(config)
    layers = model.get_decoder().layers
    results = [m for layer in layers for m in layer.modules() if table.kind_of(m) is not None]
    assert results, "every family has one"
    rows = torch.randn(1, 40, config.hidden_size, generator=torch.Generator().manual_seed(1))
    position_T = torch.arange(40)
    extra = {"position_ids": position_T[None], "attention_mask": None, "position_embeddings": None}
    extra = extra if kind in ("minimax", "recurrent_gemma") else {}
    index = next(at for at, layer in enumerate(layers) if results[0] in [*layer.modules()])
    ours = table.kind_of(results[0])(results[0], config, index)  # type: ignore[misc]
    for is_exact in (False, True):
        cache = RecurrentCache(len(layers), 80)
        cache.expect_rows(40)
        part = BatchPart(position_T, position_T, causal(40), cache)
        with torch.inference_mode(), lay([part], PLAIN if is_exact else None).running():
            got = ours(rows)
        with torch.inference_mode():
            wanted = results[0](rows, **extra)
        got, wanted = (state[0] if isinstance(state, tuple) else state for state in (got, wanted))
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_coded_weights_are_expanded_for_a_module_that_runs(kind: str, tmp_path: Path) -> None:
    """Convolutions and gates of mixers are read by the mixer, and their modules never called."""
    model = resident_model(open_checkpoint(save(tiny_model(config_of(kind)), tmp_path)), "float32")
    mixers, called = table.mixers_of(model._layers), set()
    for module in {module for mixer in mixers for module in mixer.modules()}:
        module.register_forward_pre_hook(lambda module, _: called.add(module))
    tree_scores(model, model.new_cache(40), PARENTS, random_ids(len(PARENTS)))
    for mixer in mixers:
        for name, place in parameter_places(mixer).items():
            assert _runs_with(name, place, mixer) in called, name


SIZES = [
    (
        "qwen3_5_text",
        "linear_num_key_heads",
        3,
        r"linear_num_value_heads .* multiple of linear_num_key_heads, got 4 and 3",
    ),
    ("qwen3_next", "linear_num_key_heads", 0, "zero|above 0"),
    ("kimi_linear", "linear_head_dim", -1, "negative dimension"),
    ("granitemoehybrid", "mamba_n_groups", 3, "multiple of mamba_n_groups, got 8 and 3"),
    ("mamba2", "chunk_size", "x", "chunk_size"),
    ("zamba2", "mamba_ngroups", 0, "mamba_ngroups in config.json must be above 0|zero"),
]


@pytest.mark.parametrize("kind, name, size, why", SIZES)
def test_sizes_that_no_mixer_can_take_are_refused(kind: str, name: str, size: Any, why: str) -> None:
    settings = {**config_of(kind).to_dict(), name: size}
    with pytest.raises(UserError, match=f"model type {kind} .*({why})"):
        build_meta_model(Checkpoint(Path(kind), settings, (), {}), torch.bfloat16)


@pytest.mark.parametrize("is_resident", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 5, 130])
def test_prompts_of_any_length_are_read(num_tokens: int, is_resident: bool, qwen: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    extra = {"ram": "2GiB"} if is_resident else {}
    with opened(qwen, tree="dynamic:16x4", context=200, **extra) as decoder:
        new_ids = decoder.generate(random_ids(num_tokens), max_new_tokens=48).token_ids
    assert new_ids == greedy_choices(theirs, new_ids, random_ids(num_tokens))


def assert_goes_on_after_interrupts(folder: Path, broken: tuple[int, int, int], **options: Any) -> None:
    """A text whose passes end in these layers, counted from the first pass on, is the text without."""
    num_layers = 0

    def on_layer() -> None:
        nonlocal num_layers
        num_layers += 1
        if num_layers in broken:
            raise KeyboardInterrupt

    prompt = random_ids(30)
    with opened(folder, **options) as decoder:
        wanted = decoder.generate(prompt, max_new_tokens=24).token_ids
    with opened(folder, on_layer=on_layer, **options) as decoder:
        sequence = decoder.begin(prompt, offload.Sampling(), shape=decoder.tree_choice(offload.Sampling()).shape)
        num_broken = 0
        while len(sequence.new_ids) < 24:
            try:
                decoder.step(sequence)
            except KeyboardInterrupt:
                num_broken += 1
        assert sequence.new_ids[:24] == wanted and num_broken == 3


def test_a_step_that_is_cut_short_leaves_the_committed_state(model: Path) -> None:
    assert_goes_on_after_interrupts(model, (3, 14, 23))


def assert_goes_on(folder: Path, num_alike: int, num_kept_alike: int, **options: Any) -> None:
    """Texts that begin as the one before, as turns of a chat do, or edited in the middle."""
    prompt, continuation = random_ids(30), random_ids(9, seed=3)
    with opened(folder, **options) as decoder:
        first = decoder.generate(prompt, max_new_tokens=12).token_ids
        whole, edited = [*prompt, *first, *continuation], [*prompt[:num_alike], *continuation]
        for text, num_kept in ((whole, len(prompt) + 11), (edited, num_kept_alike), (continuation, 0)):
            run = decoder.run(text, offload.Sampling(), max_new_tokens=10, continues=True)
            assert run.sequence.stats.num_kept_tokens == num_kept
            assert "".join(run) == run.result().text
            assert run.result().token_ids == decoder.generate(text, max_new_tokens=10).token_ids
            decoder.generate(prompt, max_new_tokens=12)


def test_a_text_goes_on_from_its_end_or_from_its_prompt(model: Path) -> None:
    """What has no state is read again."""
    assert_goes_on(model, 30, 29)


def assert_texts_share_passes(folder: Path, **options: Any) -> None:
    """Two texts, and two samples of one prompt, are what each is by itself."""
    prompts = [random_ids(30), random_ids(41, seed=5)]
    drawn: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.8}
    with opened(folder, **options) as decoder:
        wanted = [decoder.generate(prompt, seed=4, **drawn).token_ids for prompt in prompts]
        wanted.append(decoder.generate(prompts[1], seed=5, **drawn).token_ids)
    with opened(folder, parallel=2, **options) as decoder:
        assert [generation.token_ids for generation in decoder.generate(prompts, seed=4, **drawn)] == wanted[:2]
        samples = decoder.generate(prompts[1], num_samples=2, seed=4, **drawn)
        assert [generation.token_ids for generation in samples] == wanted[1:]


def test_texts_share_passes_and_the_state_of_a_prompt(model: Path) -> None:
    assert_texts_share_passes(model)


def test_scores_of_texts_are_transformers(qwen: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    start = random_ids(20)
    texts = [([*start, *random_ids(6, seed)], 20) for seed in (2, 3, 4)]
    with opened(qwen) as decoder:
        for (tokens, first), score in zip(texts, decoder.score_texts(texts), strict=True):
            with torch.inference_mode():
                logprobs_TV = theirs(input_ids=torch.tensor([tokens])).logits[0].log_softmax(1)
            wanted = sum(float(logprobs_TV[at - 1, tokens[at]]) for at in range(first, len(tokens)))
            assert score.logprob == pytest.approx(wanted, abs=1e-3)


def filled_cache(model: TreeModel) -> Any:
    """80 slots: 30 rows are committed, and a tree waits behind them."""
    cache = model.new_cache(80)
    cache.expect_rows(30)
    tree_scores(model, cache, [*range(-1, 29)], random_ids(30))
    cache.commit(range(30))
    tree_scores(model, cache, PARENTS, random_ids(len(PARENTS)))
    return cache


def test_a_cache_takes_what_was_planned_for_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    shape, cache = model_shape(checkpoint, "float32"), filled_cache(resident_model(checkpoint, "float32"))
    assert isinstance(cache, RecurrentCache)
    kept = sum(tensor.nbytes for inputs in cache._kept.values() for tensor in inputs.values())
    point = cache.point_at(30)
    assert sum(held.nbytes for held in [*point.tails.values(), *point.states.values()]) == shape.recurrent.state_bytes
    assert max([tensor.nbytes for tensor in point.states.values()], default=0) == shape.recurrent.largest_bytes
    assert 0 < kept <= len(PARENTS) * shape.recurrent.kept_bytes
    held = [state for layer in range(cache.num_layers) for state in cache.layer_states(layer).values()]
    assert sum(tensor.nbytes for tensor in held) == 80 * shape.kv_bytes_per_token


def assert_refuses(decoder: offload.Decoder, path: Path, changed: dict[str, Change], words: str) -> None:
    """A session in which one of these tensors is another one, or is missing."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        notes = {key: value for key, value in file.metadata().items() if key != "crc32"}
    for name, change in changed.items():
        other = change(tensors[name])
        wrong = {key: tensor for key, tensor in tensors.items() if key != name}
        write_tensors(path, notes, wrong | ({} if other is None else {name: other.contiguous()}))
        with pytest.raises(offload.UserError, match=words):
            decoder.load_session(path)


def test_a_session_with_other_states_is_refused(qwen: Path, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with opened(qwen) as decoder:
        decoder.generate(random_ids(30), max_new_tokens=4)
        decoder.save_session(path)
        changed = {"target.states.0": lambda state: state[1:], "target.tails.1": lambda _: None}
        assert_refuses(decoder, path, changed, "states")


@pytest.mark.parametrize(
    "changes", [{"linear_num_value_heads": 8}, {"linear_key_head_dim": 8}, {"linear_conv_kernel_dim": 3}]
)
def test_states_that_disagree_with_the_config_are_refused(changes: dict[str, int], qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen, tmp_path / "model")
    set_json(tmp_path / "model" / "config.json", **changes)
    with pytest.raises(offload.UserError, match=r"linear_attn\..* must have shape .* do not belong together"):
        offload.load(tmp_path / "model", ram="1GiB", context=64, threads=1)


def test_an_unknown_kind_of_layer_is_named(tmp_path: Path) -> None:
    config = config_of("qwen3_5_text").to_dict()
    config["layer_types"] = ["linear_attention", "holographic", "full_attention", "full_attention"]
    with pytest.raises(offload.UserError, match="holographic"):
        build_meta_model(Checkpoint(tmp_path, config, (), {}), torch.float32)


def test_a_family_whose_mixer_is_of_no_kind_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MIXERS", ())
    with pytest.raises(offload.UserError, match="linear_attention, whose state cannot be rolled back"):
        meta_model_of(config_of("qwen3_next"), tmp_path)


def assert_experts_come_one_by_one(folder: Path) -> None:
    texts = []
    for experts in ("layers", "demand"):
        with offload.load(folder, folder, ram="1GiB", experts=experts, **_HOW) as decoder:
            texts.append(decoder.generate(random_ids(30), max_new_tokens=16).token_ids)
            assert decoder.plan.has_experts == (experts == "demand")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_experts_come_one_by_one_beside_states(kind: str, tmp_path: Path) -> None:
    assert_experts_come_one_by_one(save(tiny_model(config_of(kind)), tmp_path))


def assert_a_copy_drafts(folder: Path, dtype: str) -> None:
    with offload.load(folder, f"self:{dtype}", ram="1GiB", **_HOW) as decoder:
        got = decoder.generate(random_ids(30), max_new_tokens=24)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with choices_beyond_doubt():
        assert got.token_ids == greedy_choices(theirs, got.token_ids, random_ids(30))
    assert got.stats.tokens_per_sweep > 1.5


@pytest.mark.parametrize("draft_dtype", ["int8", "int4"])
def test_a_copy_of_itself_in_few_bits_drafts(draft_dtype: str, qwen: Path) -> None:
    assert_a_copy_drafts(qwen, draft_dtype)


def test_ranks_are_refused(qwen: Path) -> None:
    with pytest.raises(offload.UserError, match="states stay on one rank: leave `ranks` out"):
        require_no_states(ModelFiles(describe(qwen)), "auto")


def random_parents(num_rows: int, seed: int, *, straight: float = 0.6) -> list[int]:
    """Chains that branch now and then; rows come in any order behind their parents."""
    chance = np.random.default_rng(seed)
    return [row - 1 if chance.random() < straight else int(chance.integers(BASE, row)) for row in range(num_rows)]


def tree_of(parents: list[int]) -> RowTree:
    tree = RowTree()
    tree.add(sees(parents).numpy())
    return tree


def most_states(parents: list[int], order: list[int]) -> int:
    """That wait for children at one time."""
    left, held, most = Counter(parents), {BASE}, 1
    for row in order:
        parent = parents[row]
        assert parent in held, "a row behind its parent"
        left[parent] -= 1
        held -= set() if left[parent] else {parent}
        held |= {row} if left[row] else set()
        most = max(most, len(held) + 1)  # and what is being made
    return most


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_rows", [1, 2, 64, 256])
def test_branch_by_branch_few_states_are_held_and_a_slot_has_the_parent_of_each_row(num_rows: int, seed: int) -> None:
    parents = random_parents(num_rows, seed)
    tree = tree_of(parents)
    assert tree.parents == parents
    slots = tree.slots(tree.with_ancestors(range(num_rows)))
    order = [row for row, _, _ in slots]
    assert sorted(order) == [*range(num_rows)]
    assert most_states(parents, order) <= math.log2(num_rows) + 3
    held, most = {BASE: BASE}, 0
    for row, source, target in slots:
        assert held[source] == parents[row] and target != BASE
        held[target], most = row, max(most, target)
    assert most + 1 <= math.log2(num_rows) + 2


@pytest.mark.parametrize("num_taps", [1, 2, 4])
def test_a_convolution_sees_its_path(num_taps: int) -> None:
    parents = random_parents(40, seed=3)
    places = previous_inputs(parents, num_taps)
    for row in range(40):
        path, node = list[int](), row
        while node != BASE:
            path.insert(0, node)
            node = parents[node]
        seen = [*range(num_taps - 1), *(num_taps - 1 + row for row in path)][-num_taps:]
        assert places[:, row].tolist() == seen


def test_what_is_committed_is_a_path() -> None:
    tree = tree_of([BASE, 0, 0, 1, 1, 2, 3])
    tree.check([0, 1, 3])
    with pytest.raises(AssertionError, match="a path follows the tree"):
        tree.check([1, 2])
