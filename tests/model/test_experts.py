"""Experts that come one by one: the bits of transformers' own loop, with any pool, and all other numbers NaN."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from matrix import matrix, rows
from passes import text_scores, with_weights
from rounding import Promise, assert_same_bits
from safetensors.torch import load_file, save_file
from stored import packed, quantised
from test_families import INDEXED, config_of, tiny_model
from test_wrappers import saved
from tiny import save
from transformers import AutoModelForCausalLM
from transformers.models.aria import modeling_aria as aria

from offload.checkpoint.open import open_checkpoint
from offload.errors import ReadError, UserError
from offload.model.library import CACHE
from offload.model.tree_model import TreeModel
from offload.planning.cost_model import NEVER
from offload.streaming.device import HOST, Device, Event
from offload.streaming.disk import DiskReader
from offload.streaming.expert_cache import ExpertCache
from offload.streaming.experts import ExpertPool, open_pool

# Mixtures whose experts run one by one, for their own rows; all others multiply every row with every expert.
_ONE_BY_ONE = """
afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2_text deepseek_v2
deepseek_v3 deepseek_v32 dots1 dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint gemma4_text
glm4_moe glm4_moe_lite glm4v_moe_text glm5_next_text glm_moe_dsa gpt_oss granitemoe granitemoe_swa
granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 jamba kimi_linear kolibri1 laguna
lfm2_moe llama4_text mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
mistral_large4_text mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe
qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text qwen4_exp_text solar_open step3p5
"""
EXPERTS_ONE_BY_ONE = frozenset(_ONE_BY_ONE.split())
# language models inside of others
WRAPPED = sorted(
    family for family in EXPERTS_ONE_BY_ONE - {*INDEXED} if family.endswith("_text") or family == "step3p5"
)
WRAPPERS = {"qwen3_omni_moe": "qwen3_omni_moe_thinker", "step3p5": "step3p7"}
FAMILIES = sorted(EXPERTS_ONE_BY_ONE - {*WRAPPED})
# Some have layers without experts, too, unless told otherwise.
MIXED = {"gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}}
_NUM_ROWS = 24
_TOKEN_T = torch.randint(3, 199, (_NUM_ROWS,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=rows("folder", FAMILIES, always=["mixtral", "gpt_oss"], daily=3))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(request.param)
    return save(tiny_model(config), tmp_path_factory.mktemp(request.param))


@contextmanager
def opened(
    folder: Path,
    num_slots: int,
    *,
    ahead_rows: int = NEVER,
    device: Device = HOST,
    dtype: str = "float32",
    **options: int,
) -> Iterator[tuple[TreeModel, ExpertPool]]:
    """The model with its layers bound, on a device if there is one, and its pool of experts."""
    with ExitStack() as resources:
        model = TreeModel(open_checkpoint(folder), dtype, device.torch_device, on_demand=True)
        resources.callback(model.close)
        store = DiskReader(model.checkpoint.shards)
        resources.callback(store.close)
        model.read_rest(store.fetch)
        for layer, layout in enumerate(model.layer_layouts):
            model.bind_layer(layer, store.fetch(layout))
        if device.has_own_memory:
            resources.callback(device.finish)
        records = [expert.records for expert in model.experts]
        pool = open_pool(store, records, num_slots, device, resources, ahead_rows=ahead_rows, **options)
        pool.poison_released = True
        model.bring_experts(pool.bring)
        yield model, pool


def logits_of(model: TreeModel, pool: ExpertPool, cuts: tuple[int, ...]) -> torch.Tensor:
    return text_scores(model, _TOKEN_T, cuts, pool.begin_pass)


def reference(folder: Path, cuts: tuple[int, ...]) -> torch.Tensor:
    """transformers' own loop over experts, with the attention that we compute with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    parts, cache = [], None
    with torch.inference_mode():
        for part_T in _TOKEN_T.split(list(cuts)):
            out = model(input_ids=part_T[None], use_cache=True, **{CACHE: cache})
            parts, cache = [*parts, out.logits[0]], out[CACHE]
    return torch.cat(parts)


def whole_layers(folder: Path, cuts: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    model = with_weights(TreeModel(open_checkpoint(folder), dtype))
    return text_scores(model, _TOKEN_T, cuts)


def assert_one_by_one(folder: Path, cuts: tuple[int, ...] = (9, 15), num_slots: int = 5) -> None:
    """Experts that come one by one give the bits of whole layers."""
    wanted = whole_layers(folder, cuts)
    with opened(folder, num_slots) as (model, pool):
        assert_same_bits(logits_of(model, pool, cuts), wanted, Promise.SAME_PRODUCTS)


@matrix("cuts", [(24,), (9, 1, 1, 4, 9)], always=[(9, 1, 1, 4, 9)])
def test_bits_are_those_of_all_experts_at_once(folder: Path, cuts: tuple[int, ...]) -> None:
    wanted = whole_layers(folder, cuts)
    # transformers' Mamba forgets its state where several rows follow it; MiniMax counts positions from zero
    theirs = (_NUM_ROWS,) if folder.name.rstrip("0123456789") in ("jamba", "minimax") else cuts
    torch.testing.assert_close(wanted, reference(folder, theirs), rtol=1e-4, atol=1e-4)
    for num_slots, ahead_rows in ((2, NEVER), (2, 1), (9, NEVER), (9, 4), (100, 4)):
        with opened(folder, num_slots, ahead_rows=ahead_rows) as (model, pool):
            assert_same_bits(logits_of(model, pool, cuts), wanted, Promise.SAME_PRODUCTS, "cold")
            assert_same_bits(logits_of(model, pool, cuts), wanted, Promise.SAME_PRODUCTS, "warm")


@torch.inference_mode()
def test_experts_add_up_in_16_bits_as_in_the_familys_own_loop(folder: Path) -> None:
    """Whether they come one by one or with their layers: some round once, others for each expert."""
    cuts = (9, 1, 14)
    with opened(folder, 5, dtype="bfloat16") as (model, pool):
        got = logits_of(model, pool, cuts)
    assert_same_bits(got, whole_layers(folder, cuts, "bfloat16"), Promise.SAME_PRODUCTS)
    whole = with_weights(TreeModel(open_checkpoint(folder), "bfloat16"))
    experts = next(module for module in whole.meta_model.modules() if hasattr(module, "_apply_gate"))
    if not hasattr(experts, "config"):
        pytest.skip("experts of our own stand for those of this family")
    rows_ND = torch.randn(7, experts.down_proj.shape[-1 if experts.is_transposed else -2]).bfloat16()
    expert_NK = torch.randint(experts.num_experts, (7, 1)).expand(-1, 2).contiguous()
    expert_NK[:, 1] = (expert_NK[:, 0] + 1) % experts.num_experts
    given = (rows_ND, expert_NK, torch.rand(7, 2))
    ours = experts(*given)
    whole.meta_model.set_experts_implementation("eager")
    assert_same_bits(ours, experts(*given), Promise.SAME_PRODUCTS)


def test_only_what_a_router_chose_is_read(folder: Path) -> None:
    with opened(folder, 100) as (model, pool):
        logits_of(model, pool, (1,) * _NUM_ROWS)
        chosen = int((pool.uses_LE > 0).sum())
        assert pool.num_misses == chosen, "each once, since there is room for all"
        assert pool.bytes_read == sum(
            np.array([layout.slab_bytes for layout in pool.layouts])[(pool.uses_LE > 0).ravel()]
        )
        before = pool.bytes_read
        logits_of(model, pool, (1,) * _NUM_ROWS)
        assert pool.bytes_read == before and pool.num_rows == 2 * _NUM_ROWS


Calls = list[tuple[str, tuple[object, ...]]]  # of the pool's bookkeeping: what passes were, and what they asked for


def recorded(pool: ExpertPool) -> Calls:
    calls: Calls = []

    def listen(name: str) -> None:
        answer = getattr(pool._cache, name)
        setattr(pool._cache, name, lambda *given: calls.append((name, given)) or answer(*given))

    listen("begin_pass")
    listen("use")
    return calls


def missed(calls: Calls, cache: ExpertCache) -> list[int]:
    """The blocks that these passes have to read, by the bookkeeping alone; hits come first."""
    results = list[int]()
    for name, given in calls:
        getattr(cache, name)(*given)
        blocks = [*given[0]] if name == "use" else []  # type: ignore[misc]
        waiting = [block for block in blocks if cache.lend(block) is not None]
        for block in [block for block in blocks if block not in waiting]:
            while cache.make_room(block) is None:
                cache.release(waiting.pop(0))
            waiting.append(block)
            results.append(block)
        for block in waiting:
            cache.release(block)
    return results


@pytest.mark.parametrize(
    ("family", "num_slots"),
    [("qwen3_moe", 5), ("qwen3_moe", 9), ("qwen3_moe", 16), ("gemma4", 9), ("packed gpt_oss", 9)],
)
def test_bytes_are_those_of_the_misses_of_the_replayed_trace(
    family: str, num_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fewer than those of all experts, which whole layers would read for every token."""
    folder = tmp_path / "model"
    if family in MIXED:
        saved(family, folder, **MIXED[family])
    elif family.startswith("packed "):
        packed(family.removeprefix("packed "))(folder)
    else:
        save(tiny_model(config_of(family)), folder)
    with opened(folder, num_slots) as (model, pool):
        calls, num_blocks, num_passing = recorded(pool), len(pool.layouts), pool._cache.num_passing
        # in order, whatever the disk does
        monkeypatch.setattr(pool, "_has_come", lambda slot: slot not in pool._arriving)
        for cuts in ((9, 1, 1, 4, 9), (1,) * _NUM_ROWS):
            logits_of(model, pool, cuts)
        wanted = missed(calls, ExpertCache(num_blocks, num_slots, num_passing=num_passing))
        assert pool.num_misses == len(wanted) and pool.num_hits > 0
        assert pool.bytes_read == sum(pool.layouts[block].slab_bytes for block in wanted)
        num_passes = sum(name == "begin_pass" for name, _ in calls)
        whole_bytes = num_passes * sum(record.slab_bytes for record in pool.layouts)
        assert 0 < pool.bytes_read < 0.6 * whole_bytes, f"{pool.bytes_read / whole_bytes:.0%} of whole layers"
        others = missed(calls, ExpertCache(num_blocks, num_slots + 1, num_passing=num_passing))
        assert len(others) != len(wanted), "it depends on the slots"


@pytest.mark.parametrize("kind", WRAPPED)
def test_experts_inside_of_models_that_see(kind: str, tmp_path: Path) -> None:
    family = kind.removesuffix("_text")
    saved(WRAPPERS.get(family, family), tmp_path, **MIXED.get(family, {}))
    if kind == "aria_text" and not hasattr(aria, "AriaTextTopKRouter"):
        with pytest.raises(UserError, match=r"too old for model type aria .*or give --experts layers"):
            TreeModel(open_checkpoint(tmp_path), "float32", on_demand=True)
        pytest.skip("this transformers has no aria_text whose experts come one by one")
    assert_one_by_one(tmp_path)


def turn_stacks(folder: Path) -> int:
    """Write stacks of experts as the makers of Qwen3-VL-MoE do: columns before rows."""
    num_turned = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
            num_turned += 1
        save_file(tensors, path, metadata={"format": "pt"})
    return num_turned


def test_stacks_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    saved("qwen3_vl_moe", tmp_path, moe_intermediate_size=24)  # a square would not tell
    wanted = whole_layers(tmp_path, (9, 15))
    assert turn_stacks(tmp_path) == 8, "two in each layer"
    assert_same_bits(whole_layers(tmp_path, (9, 15)), wanted, Promise.SAME_PRODUCTS)
    assert_one_by_one(tmp_path)


CODED = [("gpt_oss", "mxfp4"), ("mixtral", "ct-w4-zeros"), ("mixtral", "gptq-order"), ("olmoe", "nf4")]
CODED += [("qwen3_moe", recipe) for recipe in ("fp8-block", "awq", "nvfp4")]


@pytest.mark.parametrize(("family", "recipe"), CODED)
def test_coded_experts_are_expanded_one_by_one(family: str, recipe: str, tmp_path: Path) -> None:
    folder = quantised(recipe, family)(tmp_path / "coded")
    wanted = whole_layers(folder, (9, 1, 14))
    for num_slots, ahead_rows in ((2, NEVER), (9, 4)):
        with opened(folder, num_slots, ahead_rows=ahead_rows) as (model, pool):
            assert any(record.coded for record in pool.layouts)
            assert_same_bits(logits_of(model, pool, (9, 1, 14)), wanted, Promise.SAME_PRODUCTS)


def test_a_layer_may_have_a_single_expert(tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    config.num_experts = config.num_local_experts = config.num_experts_per_tok = 1
    folder = save(tiny_model(config), tmp_path)
    assert {expert.num_experts for expert in TreeModel(open_checkpoint(folder), on_demand=True).experts} == {1}
    assert_one_by_one(folder, (9, 1, 14), 2)


def test_a_router_of_numbers_that_are_not_finite_is_told(tmp_path: Path) -> None:
    model = tiny_model(config_of("qwen3_moe"))
    model.model.layers[1].mlp.gate.weight.data[3] = float("nan")
    with opened(save(model, tmp_path), 4) as (streamed, pool), pytest.raises(UserError, match="not finite numbers"):
        logits_of(streamed, pool, (4, 20))


@pytest.mark.parametrize(("num_slots", "ahead_rows"), [(5, 12), (30, 1), (30, NEVER)])
def test_a_pass_that_fails_leaves_nothing_half_read(num_slots: int, ahead_rows: int, tmp_path: Path) -> None:
    """Neither an outage of the disk, whatever was on its way, nor Ctrl-C in the middle of the books."""
    folder = save(tiny_model(config_of("olmoe")), tmp_path)
    wanted = whole_layers(folder, (9, 15))
    with opened(folder, num_slots, ahead_rows=ahead_rows) as (model, pool):
        working = pool._carry

        def failing(error: BaseException, num_good: int) -> Callable[..., list[Future[None]]]:
            calls, failed = iter(range(1000)), Future[None]()
            failed.set_exception(error)

            def carry(block: int, slot: torch.Tensor, free: Event) -> list[Future[None]]:
                if next(calls) < num_good:
                    return list(working(block, slot, free))
                if isinstance(error, KeyboardInterrupt):
                    raise error
                return [failed]

            return carry

        for error in (ReadError("the disk is gone"), KeyboardInterrupt()):
            for num_good in (0, 3, 7):
                pool._carry, pool._cache = failing(error, num_good), pool._cache.emptied()
                with pytest.raises(type(error)):
                    logits_of(model, pool, (9, 15))
                pool._carry = working
                got = logits_of(model, pool, (9, 15))
                assert_same_bits(got, wanted, Promise.SAME_PRODUCTS, f"{error!r} behind {num_good}")
