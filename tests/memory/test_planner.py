"""Plans for models and machines of any size, from headers alone; rows of prompts, limits of containers."""

import random
import re
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from mixture_headers import mixture
from plans import make_plan, model_shape, plan_memory
from test_device_planner import CONFIGS as LARGE

from offload import machine
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.imagined import checkpoint_of_config
from offload.checkpoint.sizes import ModelShape
from offload.errors import UserError
from offload.memory import planner as plan
from offload.memory.plan import MemoryBudget, MemoryPlan, Rates
from offload.memory.planner import least_budget
from offload.memory.sizes import PROMPT_ROWS
from offload.planning.budget import budget_of
from offload.planning.load_options import LoadOptions

GB, MIB = 10**9, 1 << 20
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-70B": {**LARGE["Llama-2-70B"], "torch_dtype": "float16"},
    "Llama-3-70B": {**LARGE["Llama-3-70B"], "max_position_embeddings": 8192},
    "Qwen2.5-72B": {**LARGE["Qwen2.5-72B"], "max_position_embeddings": 32768},
}
SMALL = {**LARGE["Llama-2-7B"], "hidden_size": 2048, "num_hidden_layers": 22, "num_key_value_heads": 4,
         "intermediate_size": 5632, "max_position_embeddings": 2048}  # fmt: skip


def checkpoint_of(config: dict[str, Any]) -> Checkpoint:
    """Headers of files that do not exist: they are all that planning may look at."""
    return checkpoint_of_config(config, Path("/nowhere/config.json"))


def plan_for(name: str, ram: int, **options: Any) -> MemoryPlan:
    settings = {"dtype": "auto", "context": None, "num_nodes": 256, **options}
    return plan_memory((checkpoint_of(CONFIGS[name]), checkpoint_of(SMALL)), ram=ram, **settings)


@pytest.mark.parametrize("ram_gb", [16, 64, 128, 256])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_items_of_a_plan_stay_within_its_budget(name: str, ram_gb: int) -> None:
    got = plan_for(name, ram_gb * GB)
    names = ("runtime_bytes", "rest_bytes", "draft_bytes", "distribution_bytes", "kv_bytes", "activation_bytes")
    items = [getattr(got, name) for name in names]
    assert all(item >= 0 for item in items) and got.fixed_bytes == sum(items)
    assert (
        got.total_bytes == sum(items) + got.resident_bytes + got.num_layer_slots * got.layer_slot_bytes <= ram_gb * GB
    )
    assert got.resident_bytes + got.streamed_bytes == sum(got.layer_bytes)
    assert (got.num_resident == 80) == (ram_gb == 256)
    if got.num_resident < 80:
        assert got.layer_slot_bytes == max(got.layer_bytes) and got.num_layer_slots in (2, 3)
        assert got.total_bytes + max(got.layer_bytes) > ram_gb * GB, "there was room for one more layer"
        assert got.num_layer_slots == 3 or got.num_resident == 0, "a third slot comes before resident layers"
    else:
        assert (got.num_layer_slots, got.layer_slot_bytes, got.streamed_bytes) == (0, 0, 0), "nothing is read twice"
    printed: dict[str, Any] = got.as_dict()
    assert printed["tiers"]["resident"] == {"num_layers": got.num_resident, "num_bytes": got.resident_bytes}
    assert printed["tiers"]["disk"] == {"num_layers": 80 - got.num_resident, "num_bytes": got.streamed_bytes}
    assert printed["budgets"] == {"ram_bytes": ram_gb * GB, "planned_bytes": got.total_bytes}
    assert [got.is_resident[layer] for layer in printed["resident_layers"]] == [True] * got.num_resident


@pytest.mark.parametrize(("name", "layer_gb", "rest_gb"), [("Llama-2-70B", 1.711, 1.049), ("Llama-3-70B", 1.711, 4.203),
                                                           ("Qwen2.5-72B", 1.756, 4.983)])  # fmt: skip
@pytest.mark.parametrize("ram_gb", [16, 64, 128])
def test_as_many_layers_stay_as_a_pocket_calculator_says(
    ram_gb: int, name: str, layer_gb: float, rest_gb: float
) -> None:
    """A 1.1B draft takes 2.2 GB, the target's cache 1.6 GB; activations and the runtime may cost one layer more."""
    at_most = max(0, int((ram_gb - rest_gb - 2.2 - 1.6) / layer_gb) - 3)
    got = plan_for(name, ram_gb * GB)
    assert max(0, at_most - 1) <= got.num_resident <= at_most
    assert got.streamed_bytes == pytest.approx((80 - got.num_resident) * layer_gb * GB, rel=0.002)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_take_what_their_tensors_take(name: str) -> None:
    checkpoint = checkpoint_of(CONFIGS[name])
    shape = model_shape(checkpoint)
    layer_bytes = sum(e.hi - e.lo for key, e in checkpoint.tensors.items() if key.startswith("model.layers.7."))
    assert len(shape.layer_bytes) == 80 and shape.cast_bytes == 0
    assert all(layer_bytes <= size <= layer_bytes + 6 * 4096 + MIB for size in shape.layer_bytes)
    assert checkpoint.num_bytes <= shape.num_bytes <= 1.001 * checkpoint.num_bytes
    assert shape.kv_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert shape.vocab_size == CONFIGS[name]["vocab_size"]


def test_resident_layers_are_spread_evenly() -> None:
    """A long stretch of streamed layers would let the stream fall behind after a stretch of resident ones."""
    got = plan_for("Llama-2-70B", 64 * GB)
    _, *gaps, _ = [len(list(run)) for stays, run in groupby(got.is_resident) if not stays]
    assert max(gaps) - min(gaps) <= 1
    stretches = [len(list(run)) for stays, run in groupby(got.is_resident) if stays]
    assert max(stretches) == 1


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_least_budget_that_is_named_works_and_a_byte_less_does_not(name: str, draft: bool) -> None:
    target, helper = model_shape(checkpoint_of(CONFIGS[name])), model_shape(checkpoint_of(SMALL)) if draft else None
    sizes = {"context": 4096, "num_nodes": 128}
    with pytest.raises(UserError, match="raise `ram` to") as refusal:
        make_plan(target, helper, GB, **sizes)
    named_mib = int(re.search(r"raise `ram` to (\d+)MiB", str(refusal.value))[1])
    least = make_plan(target, helper, named_mib * MIB, **sizes)
    assert (least.num_layer_slots, least.num_resident) == (2, 0)
    assert make_plan(target, helper, least.total_bytes, **sizes).num_layer_slots == 2
    with pytest.raises(UserError, match=f"raise `ram` to {named_mib}MiB or lower `context` from 4096 to") as refused:
        make_plan(target, helper, least.total_bytes - 1, **sizes)
    assert (named_mib - 1) * MIB < least.total_bytes <= named_mib * MIB
    shorter = int(str(refused.value).rpartition(" to ")[2])
    short = {**sizes, "context": shorter}
    assert make_plan(target, helper, least.total_bytes - 1, **short).num_layer_slots, "what is named works"
    with pytest.raises(UserError, match="raise `ram` to"):
        make_plan(target, helper, least.total_bytes - 1, **{**sizes, "context": shorter + 16})


def test_a_model_of_one_layer_needs_room_for_no_two() -> None:
    """The mistake that was: two slots were named as the least that would do."""
    shape, sizes = model_shape(checkpoint_of({**SMALL, "num_hidden_layers": 1})), {"context": 64, "num_nodes": 1}
    least = least_budget(lambda size: make_plan(shape, None, size, **sizes))
    assert make_plan(shape, None, least, **sizes).num_layer_slots == 0
    with pytest.raises(UserError, match="of RAM for its layers and") as refused:
        make_plan(shape, None, least - 1, **sizes)
    named_mib = int(re.search(r"raise `ram` to (\d+)MiB", str(refused.value))[1])
    assert (named_mib - 1) * MIB < least <= named_mib * MIB


SIZES = {"hidden_size": (64, 1024, 4096), "num_hidden_layers": (1, 2, 5, 48), "intermediate_size": (64, 8192),
         "vocab_size": (100, 128256), "num_attention_heads": (8,), "num_key_value_heads": (1,)}  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_budget_is_kept_or_refused_with_what_works(seed: int) -> None:
    """Shapes, budgets and wishes are drawn by chance: two slots at least, no byte too many, remedies that help."""
    chance = random.Random(seed)
    shapes = [
        model_shape(checkpoint_of({**SMALL, **{name: chance.choice(sizes) for name, sizes in SIZES.items()}}))
        for _ in range(chance.choice((1, 2)))
    ]
    ram, gpu = (int(10 ** chance.uniform(7.5, 11)) for _ in range(2))
    rates = chance.choice((None, Rates(10 ** chance.uniform(6, 11), 10 ** chance.uniform(10, 15))))
    wishes = {"context": chance.choice((1, 64, 4096)), "parallel": chance.choice((1, 2, 64)), "rates": rates}
    budget = MemoryBudget(ram_bytes=ram, gpu_bytes=chance.choice((None, gpu)), **wishes)
    plan_so = partial(plan.make_plan, shapes[0], shapes[-1] if len(shapes) > 1 else None)
    num_nodes = chance.choice((1, 64, 2048))
    try:
        result = plan_so(budget, num_nodes)
    except UserError as refusal:
        words = str(refusal)
        which, named_mib = re.search(r"raise `(\w+)` to (\d+)MiB", words).groups()  # type: ignore[union-attr]
        field = {"ram": "ram_bytes", "gpu_memory": "gpu_bytes"}[which]
        with pytest.raises(UserError):
            plan_so(replace(budget, **{field: (int(named_mib) - 1) * MIB - 1}), num_nodes)
        # the other memory may be too small as well
        plan_so(replace(budget.unlimited(), **{field: int(named_mib) * MIB}), num_nodes)
        for name, most in re.findall(r"`(context|parallel)` from \d+ to (\d+)", words):
            plan_so(replace(budget, **{name: int(most)}), num_nodes)
    else:
        assert result.total_bytes <= ram and result.gpu_total_bytes <= (result.gpu_bytes or 0)
        assert result.num_layer_slots >= 2 or result.streamed_bytes == 0


def test_texts_at_a_time_are_named_where_fewer_would_do() -> None:
    """And a context that no shortening mends is not."""
    shape = model_shape(checkpoint_of(CONFIGS["Llama-2-70B"]))
    sizes: Any = {"context": 2048, "num_nodes": 8}
    least = least_budget(lambda size: make_plan(shape, None, size, **sizes, parallel=2))
    with pytest.raises(UserError, match=r"or lower `context` from 2048 to \d+ or `parallel` from 8 to 2$"):
        make_plan(shape, None, least, **sizes, parallel=8)
    with pytest.raises(UserError, match=r"raise `ram` to \d+MiB$"):
        make_plan(shape, None, MIB, **sizes, parallel=8)


def test_layers_stay_by_the_byte_and_slots_are_of_the_largest() -> None:
    shape = ModelShape(layer_bytes=(300 * MIB,) * 9, rest_bytes=0, kv_bytes_per_token=0, row_bytes=0,
                       logits_row_bytes=0)  # fmt: skip
    sizes = {"context": 8, "num_nodes": 1}
    fixed_bytes = make_plan(shape, None, 1 << 40, **sizes).fixed_bytes
    for num_resident in range(1, 6):
        enough_bytes = fixed_bytes + (3 + num_resident) * 300 * MIB
        assert make_plan(shape, None, enough_bytes, **sizes).num_resident == num_resident
        assert make_plan(shape, None, enough_bytes - 1, **sizes).num_resident == num_resident - 1
    assert make_plan(shape, None, fixed_bytes + 9 * 300 * MIB, **sizes).num_layer_slots == 0
    assert make_plan(shape, None, fixed_bytes + 9 * 300 * MIB - 1, **sizes).num_layer_slots == 3
    # Layers of different size share slots of the largest.
    sizes = tuple((1 + index % 3) * 100 * MIB for index in range(9))
    shape = ModelShape(layer_bytes=sizes, rest_bytes=0, kv_bytes_per_token=0, row_bytes=0, logits_row_bytes=0)
    for ram_mib in range(850, 2000, 130):
        got = make_plan(shape, None, ram_mib * MIB, context=8, num_nodes=1)
        assert got.total_bytes <= ram_mib * MIB and (got.layer_slot_bytes == 300 * MIB or got.num_resident == 9)
    # The refusal says what is needed.
    shape = ModelShape(layer_bytes=(300 * MIB,) * 4, rest_bytes=100 * MIB, kv_bytes_per_token=0, row_bytes=0,
                       logits_row_bytes=0)  # fmt: skip
    with pytest.raises(UserError) as refusal:
        make_plan(shape, None, 400 * MIB, context=10, num_nodes=1)
    assert str(refusal.value) == (
        "needs 600 MiB of RAM for two layer slots and 228 MiB for the rest, budget is 400 MiB: raise `ram` to 829MiB"
    )


UNPLANNED: list[tuple[str, Any, str]] = [
    ("num_hidden_layers", None, "config.json has no num_hidden_layers"),
    ("hidden_size", 0, "config.json has no hidden_size"),
    ("num_hidden_layers", 23, "no tensors for layer 22 of 23"),
    ("num_hidden_layers", 10**12, "no tensors for layer 22 of 1000000000000"),
    ("vocab_size", "many", r"vocab_size in config.json must be a whole number above 0 and below 2\^63, got 'many'"),
]


@pytest.mark.parametrize(("key", "value", "message"), UNPLANNED)
def test_configs_that_cannot_be_planned(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_shape(replace(checkpoint_of(SMALL), config={**SMALL, key: value}))


def test_the_default_budget_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    for free_gb, reserve_bytes in ((3, 1 << 30), (8, 2 * GB), (100, 25 * GB)):
        monkeypatch.setattr("offload.planning.load_options.available_ram_bytes", lambda free=free_gb: free * GB)
        assert budget_of(LoadOptions()).ram_bytes == free_gb * GB - reserve_bytes


def control_group(root: Path, path: str, names: tuple[str, str], limit: str, used: int, stat: str = "") -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    if stat:
        (folder / "memory.stat").write_text(stat)


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


V1_LINES, ROOMY = ("12:cpu,cpuacct:/docker/x", "4:memory:/docker/x", "0::/"), 9223372036854771712
# Old pages of the page cache are free on demand; /proc names the host's path, which does not exist in a container: the
# mounted root is the group itself.
GROUPS: dict[str, tuple[list[tuple[Any, ...]], tuple[str, ...], list[tuple[int, int]]]] = {
    "nested": ([("a/b", V2, "4000", 1000, "anon 7\nfile 800\ninactive_file 300\nactive_file 500\n"),
                ("a", V2, "max", 5000), ("", V2, "9000", 6000)], ("0::/a/b",), [(4000, 700), (9000, 6000)]),
    "version 1": ([("memory/docker/x", V1, "4000", 1000, "inactive_file 1\ntotal_inactive_file 250\n"),
                   ("memory", V1, str(ROOMY), 5000)], V1_LINES, [(4000, 750), (ROOMY, 5000)]),
    "slowed down": ([("a", V2, "max", 1000), ("a", ("memory.high", V2[1]), "4000", 1000)], ("0::/a",), [(4000, 1000)]),
    **{f"container at {path}": ([("", V2, "4000", 1000)], (f"0::{path}",), [(4000, 1000)])
       for path in ("/kubepods/pod1/c1", "/../../..", "/")},
    "none": ([], ("0::/a", "3:cpu:/"), []),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "lines", "limits"), GROUPS.values(), ids=GROUPS)
def test_limits_of_control_groups(
    groups: list[Any], lines: tuple[str, ...], limits: list[tuple[int, int]], tmp_path: Path
) -> None:
    for group in groups:
        control_group(tmp_path / "fs", *group)
    (tmp_path / "self").write_text("".join(f"{line}\n" for line in lines))
    assert machine._cgroup_limits(tmp_path / "fs", tmp_path / "self") == limits
    assert machine._cgroup_limits(tmp_path / "fs", tmp_path / "absent") == []


def test_this_machine_has_memory_and_the_tightest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now, after = machine._meminfo_available(), machine.available_ram_bytes(), machine._meminfo_available()
    assert 0 < now <= max(before, after) + 256 * MIB, "others take and give memory meanwhile"
    assert machine.peak_rss_bytes() >= 0.9 * machine.rss_bytes() > 10 * MIB
    # The tightest limit counts.
    monkeypatch.setattr(machine, "_meminfo_available", lambda: 5000)
    for limits, free_bytes in (([], 5000), ([(9000, 100), (4000, 1000)], 3000), ([(4000, 4100)], 0)):
        monkeypatch.setattr(machine, "_cgroup_limits", lambda root, member, limits=limits: limits)
        assert machine.available_ram_bytes() == free_bytes


DENSE = model_shape(checkpoint_of(CONFIGS["Llama-3-70B"]))
MIXTURE = model_shape(mixture())
CPU = Rates(1e9, 1e12)


def plan_of(shape: ModelShape = DENSE, ram: int = 64 * GB, gpu: int | None = None, **options: Any) -> MemoryPlan:
    settings: dict[str, Any] = {"context": 8192, "num_nodes": 64, **options}
    rates = settings.pop("rates", CPU)
    return make_plan(shape, None, ram, gpu, rates=rates, **settings)


def test_rows_of_a_pass_follow_link_disk_and_context() -> None:
    options = {"ram": 40 * GB, "gpu": 48 * GB}
    fast, slow = (plan_of(**options, rates=Rates(25e9, 1e14, disk)).max_prompt_rows for disk in (1e11, 2e9))
    assert fast < slow
    roomy = plan_of(ram=512 * GB, gpu=48 * GB, rates=Rates(25e9, 1e14, 2e9)).max_prompt_rows
    assert roomy == pytest.approx(fast, rel=0.3), "nothing comes from the disk"
    # What stays or is short has the usual rows.
    assert plan_of(ram=512 * GB, rates=Rates(1e6, 1e15)).max_prompt_rows == PROMPT_ROWS
    assert plan_of(context=300, rates=Rates(1e6, 1e15)).max_prompt_rows == 300
    assert plan_of(context=600, rates=Rates(1e6, 1e15)).max_prompt_rows == 600, "one pass, and no more than there are"
    # More rows need no more keys and values.
    few, many = plan_of(rates=None), plan_of(rates=Rates(1e7, 1e15))
    assert many.max_prompt_rows > few.max_prompt_rows
    assert (many.kv_bytes, many.cache_slots, many.draft_slots) == (few.kv_bytes, few.cache_slots, few.draft_slots)


def exceeds(plan: MemoryPlan) -> bool:
    """Whether what its rows take, counted again, is more than the plan has for them."""
    shape = DENSE if plan.num_experts == 0 and len(plan.layer_bytes) == 80 else MIXTURE
    outer = shape.row_bytes - (shape.inner_row_bytes if plan.gpu_bytes is None else 0)
    pairs = shape.pair_bytes * plan.context
    return plan.max_prompt_rows * (outer + pairs) > plan.activation_bytes


def test_where_memory_is_short_passes_get_shorter_before_a_run_is_refused() -> None:
    with pytest.raises(UserError, match="two layer slots") as caught:
        plan_of(ram=2 * GB)
    least = plan.least_budget(lambda size: plan_of(ram=size))
    assert f"raise `ram` to {-(-least // MIB)}MiB" in str(caught.value)
    tight = plan_of(ram=least)
    assert tight.max_prompt_rows < PROMPT_ROWS and tight.total_bytes <= least and not exceeds(tight)
    assert plan_of(ram=least + 4 * GB).max_prompt_rows >= PROMPT_ROWS
