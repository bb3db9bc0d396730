"""Plans for GPUs of data sheets: two budgets and three tiers, counted again; figures are in `goldens/plans.json`."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan, model_shape, plan_memory

from offload.checkpoint.imagined import checkpoint_of_config
from offload.checkpoint.sizes import ModelShape
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.sizes import DRAW_BYTES, MAX_LOGITS_ROWS
from offload.memory.tiers import NUM_LOADERS, LayerTier
from offload.planning.budget import budget_of
from offload.planning.load_options import LoadOptions

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20
_70B = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16"}  # fmt: skip
_8B = {**_70B, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-70B": {**_70B, "vocab_size": 32000},
    "Llama-2-7B": {**_8B, "vocab_size": 32000, "num_key_value_heads": 32, "intermediate_size": 11008},
    "Llama-3-70B": {**_70B, "vocab_size": 128256},
    "Llama-3-8B": {**_8B, "vocab_size": 128256},
    "Qwen2.5-72B": {**_70B, "model_type": "qwen2", "intermediate_size": 29568, "vocab_size": 152064},
    "Qwen2.5-7B": {**_8B, "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
                   "vocab_size": 152064},
}  # fmt: skip
PAIRS = [("Llama-2-70B", "Llama-2-7B"), ("Llama-3-70B", "Llama-3-8B"), ("Qwen2.5-72B", "Qwen2.5-7B")]
MACHINES = list(product((24, 48, 80), (64, 128, 256)))  # GiB of a GPU, GB of its host


NOWHERE = Path("/nowhere/config.json")
SHAPES = {name: model_shape(checkpoint_of_config(config, NOWHERE)) for name, config in CONFIGS.items()}


def plan_of(pair: tuple[str, str | None], gpu_bytes: int, ram_bytes: int, **sizes: Any) -> MemoryPlan:
    draft = SHAPES[pair[1]] if pair[1] else None
    settings = {"context": 512, "num_nodes": 384, **sizes}
    return make_plan(SHAPES[pair[0]], draft, ram_bytes, gpu_bytes, **settings)


def on_card(plan: MemoryPlan) -> int:
    items = (plan.gpu_runtime_bytes, plan.rest_bytes, plan.draft_bytes, plan.distribution_bytes, plan.kv_bytes)
    return (
        sum(items)
        + plan.activation_bytes
        + plan.num_layer_slots * plan.layer_slot_bytes
        + layers_in(plan, LayerTier.RESIDENT)
    )


def on_host(plan: MemoryPlan) -> int:
    items = (
        plan.runtime_bytes,
        plan.table_bytes,
        plan.staging_bytes,
        plan.num_host_layer_slots * plan.layer_slot_bytes,
    )
    return sum(items) + layers_in(plan, LayerTier.PINNED)


def layers_in(plan: MemoryPlan, tier: LayerTier) -> int:
    return sum(plan.layer_bytes[layer] for layer, held in enumerate(plan.tier_L) if held is tier)


def check(plan: MemoryPlan, target: ModelShape) -> None:
    """What every plan of a GPU must hold, counted afresh."""
    assert plan.gpu_bytes is not None and plan.device == "cuda"
    assert on_card(plan) == plan.gpu_total_bytes <= plan.gpu_bytes, "the card overflows"
    assert on_host(plan) == plan.total_bytes <= plan.ram_bytes, "the host overflows"
    assert plan.layer_bytes == target.layer_bytes and len(plan.tier_L) == len(target.layer_bytes), "a layer is lost"
    assert plan.pinned_bytes == layers_in(plan, LayerTier.PINNED)
    assert plan.resident_bytes + plan.pinned_bytes + plan.disk_streamed_bytes == sum(target.layer_bytes)
    assert plan.streamed_bytes == plan.pinned_bytes + plan.disk_streamed_bytes
    if plan.streamed_bytes:
        assert plan.num_layer_slots in (2, 3) and plan.layer_slot_bytes == max(target.layer_bytes), (
            "layers have no way in"
        )
        assert on_card(plan) + max(target.layer_bytes) > plan.gpu_bytes, "the card has room for one more layer"
        assert plan.num_layer_slots == 3 or plan.num_resident == 0, "a third slot comes before resident layers"
    if plan.disk_streamed_bytes:
        assert plan.num_host_layer_slots in (2, 3), "layers from disk have no way through the host"
        assert on_host(plan) + max(target.layer_bytes) > plan.ram_bytes, "the host has room for one more layer"
    else:
        assert plan.num_host_layer_slots == 0, "slots for nothing"
    passing_bytes = max(NUM_LOADERS * max(target.layer_bytes), target.head_bytes)
    arena_bytes = plan.pinned_bytes + plan.num_host_layer_slots * plan.layer_slot_bytes
    assert plan.staging_bytes + arena_bytes >= passing_bytes, "loading needs more than the host was planned for"


@pytest.mark.parametrize(("gpu_gib", "ram_gb"), MACHINES)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_both_budgets_add_up_and_tiers_are_what_a_pocket_calculator_says(
    pair: tuple[str, str], gpu_gib: int, ram_gb: int
) -> None:
    """Driver 1.1 GB, head and draft by their parameters, 1.5 GB of caches and activations."""
    target, draft = (SHAPES[name] for name in pair)
    check(plan_of((pair[0], None), gpu_gib * GIB, ram_gb * GB, num_nodes=1), target)
    plan, layer_gb = plan_of(pair, gpu_gib * GIB, ram_gb * GB), target.layer_bytes[0] / GB
    check(plan, target)
    fixed_gb = 1.1 + (target.head_bytes + draft.num_bytes) / GB + 1.5
    by_hand = max(0, int((gpu_gib * GIB / GB - fixed_gb) / layer_gb) - 3)
    assert abs(plan.num_resident - by_hand) <= 1
    left_gb = (80 - plan.num_resident) * layer_gb
    host_gb = ram_gb - 1.1 - target.table_bytes / GB
    by_hand = 80 - plan.num_resident if host_gb >= left_gb else int(host_gb / layer_gb) - 3
    assert abs(plan.num_layers_in(LayerTier.PINNED) - by_hand) <= 1
    assert (plan.num_layers_in(LayerTier.DISK) > 0) == (left_gb > host_gb)
    assert ram_gb != 64 or plan.num_layers_in(LayerTier.DISK) > 0, "64 GB cannot hold what is left of 138 GB"
    assert ram_gb != 256 or plan.num_layers_in(LayerTier.DISK) == 0


LEAST = [*((pair, "gpu_memory") for pair in [*PAIRS, ("Llama-2-70B", None)]), (PAIRS[1], "ram")]


@pytest.mark.parametrize(("pair", "budget"), LEAST, ids=str)
def test_the_least_budget_that_is_named_works_and_a_byte_less_does_not(
    pair: tuple[str, str | None], budget: str
) -> None:
    is_card = budget == "gpu_memory"

    def planned(num_bytes: int) -> MemoryPlan:
        return plan_of(pair, num_bytes, 256 * GB) if is_card else plan_of(pair, 48 * GB, num_bytes)

    with pytest.raises(UserError, match=f"raise `{budget}` to") as refusal:
        planned(GB if is_card else 2 * GB)
    named_mib = int(re.search(rf"raise `{budget}` to (\d+)MiB", str(refusal.value))[1])
    least = planned(named_mib * MIB)
    least_bytes = least.gpu_total_bytes if is_card else least.total_bytes
    assert (named_mib - 1) * MIB < least_bytes <= named_mib * MIB
    for plan in (least, planned(least_bytes)):
        slots = (
            (plan.num_layer_slots, plan.num_resident)
            if is_card
            else (plan.num_host_layer_slots, plan.num_layers_in(LayerTier.PINNED))
        )
        assert slots == (2, 0) and (is_card or plan.num_layers_in(LayerTier.DISK) > 60)
    with pytest.raises(UserError, match=f"raise `{budget}` to {named_mib}MiB"):
        planned(least_bytes - 1)


def test_logits_come_in_chunks_and_distributions_lie_on_the_card() -> None:
    """768 x 128256 logits would be 0.6 GB; of the activations only rows grow with the tree."""
    small, large = (plan_of(PAIRS[1], 80 * GB, 256 * GB, num_nodes=size) for size in (MAX_LOGITS_ROWS, 768))
    assert small.num_logits_rows == large.num_logits_rows == MAX_LOGITS_ROWS
    assert plan_of(PAIRS[1], 80 * GB, 256 * GB, num_nodes=9).num_logits_rows == 9
    row_bytes, rows = SHAPES["Llama-3-70B"].row_bytes, 768 - MAX_LOGITS_ROWS
    mask_bytes = [3 * (512 + size) * (512 + 512 + size) for size in (MAX_LOGITS_ROWS, 768)]  # in bf16, and its bits
    assert large.activation_bytes - small.activation_bytes == rows * row_bytes + mask_bytes[1] - mask_bytes[0]
    keeping = plan_of(PAIRS[1], 80 * GB, 256 * GB, num_nodes=768, rule="sequoia")
    assert keeping.distribution_bytes == 767 * 4 * 128256 + DRAW_BYTES and keeping.total_bytes >= large.total_bytes
    check(keeping, SHAPES["Llama-3-70B"])


def test_the_table_stays_on_the_host_and_a_tied_head_is_the_table() -> None:
    tied = {**CONFIGS["Llama-3-8B"], "tie_word_embeddings": True}
    shapes = [SHAPES["Llama-3-8B"], model_shape(checkpoint_of_config(tied, NOWHERE))]
    table_bytes = 128256 * 4096 * 2
    for shape in shapes:
        assert table_bytes <= shape.table_bytes <= table_bytes + 2 * 4096
        assert table_bytes + 8192 <= shape.head_bytes <= table_bytes + 4 * 4096, "one matrix and the norm"
    assert shapes[0].rest_bytes - shapes[1].rest_bytes == pytest.approx(table_bytes, abs=8192)


def test_loading_plans_for_a_card_by_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [checkpoint_of_config(CONFIGS[name], NOWHERE) for name in PAIRS[0]]
    settings: dict[str, Any] = {"ram": 64 * GB, "dtype": "auto", "context": 512, "num_nodes": 64}
    named = plan_memory(files, gpu="24GiB", **settings)
    assert (named.device, named.gpu_bytes, named.ram_bytes) == ("cuda", 24 << 30, 64 * GB)
    check(named, SHAPES["Llama-2-70B"])
    asked: list[str] = []
    monkeypatch.setattr("offload.planning.budget.available_gpu_bytes", lambda device: asked.append(device) or 48 * GB)
    budget = budget_of(LoadOptions(), "cuda:1")
    assert asked == ["cuda:1"] and 46 * GB < budget.gpu_bytes < 48 * GB
    host = plan_memory(files, **settings)
    assert (host.device, host.gpu_bytes, host.gpu_total_bytes) == ("cpu", None, 0)
    assert (host.pinned_bytes, host.num_host_layer_slots) == (0, 0)
    assert set(host.tier_L) == {LayerTier.RESIDENT, LayerTier.DISK}
    assert host.total_bytes == host.fixed_bytes + host.resident_bytes + host.num_layer_slots * host.layer_slot_bytes


@pytest.mark.parametrize(("key", "value", "words"), [
    ("vocab_size", None, "vocab_size must be a whole number above 0 and below 4294967296, got None"),
    ("torch_dtype", "float8", "cannot compute in float8"),
])  # fmt: skip
def test_a_config_that_tells_too_little_is_refused(key: str, value: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        checkpoint_of_config({**CONFIGS["Llama-2-7B"], key: value}, NOWHERE)
