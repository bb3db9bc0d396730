"""One tree for each machine, whoever is asked: what plans, decodes, tunes and measures choose from the same sizes.

From headers alone: each caller's own code is given the same acceptance, the same costs and the same memory.
"""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from test_device_planner import CONFIGS, GIB

from offload.bench.latency import prediction
from offload.calibration.startup import RunSettings, trees_of
from offload.checkpoint.sizes import model_shape
from offload.memory.planner import ModelFiles
from offload.model.meta import describe
from offload.planning import selector as tree_policy
from offload.planning.acceptance import PRODUCT_FORM
from offload.planning.cost_model import Costs, costs_on
from offload.planning.hardware import KNOWN, Hardware
from offload.planning.options import LoadOptions
from offload.planning.profile import Identity, Machine, Profile
from offload.planning.room import MemoryBudget
from offload.planning.selector import TreeSelector
from offload.reports import estimate as estimating
from offload.reports import tune as tuning
from offload.trees.spec import label_of
from offload.trees.topology import DEFAULT_ACCEPTANCE
from offload.units import Sampling

CONTEXT = 2048
_CARD = KNOWN["l40"]
MACHINES = {
    **KNOWN,
    "two links": replace(_CARD, name="two links", link_bytes_per_s=50e9),
    "slow link": replace(_CARD, name="slow link", link_bytes_per_s=3e9),
    "small card": replace(_CARD, name="small card", gpu_bytes=24 * GIB),
    "slow card": replace(_CARD, name="slow card", flops_per_s=20e12, memory_bytes_per_s=200e9),
    "server": Hardware(name="server", memory_bytes_per_s=200e9, flops_per_s=3e12, ram_bytes=64 * GIB),
    "laptop": Hardware(
        name="laptop", memory_bytes_per_s=60e9, flops_per_s=1e12, ram_bytes=32 * GIB, disk_bytes_per_s=3e9
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    paths = [tmp_path_factory.mktemp(name) / "config.json" for name in ("Llama-2-70B", "Llama-2-7B")]
    for path in paths:
        name = next(name for name in ("Llama-2-70B", "Llama-2-7B") if name in str(path))
        path.write_text(json.dumps(CONFIGS[name]))
    return [str(path) for path in paths]


@pytest.fixture
def files(models: list[str]) -> ModelFiles:
    return ModelFiles(*map(describe, models))


def profile_of(costs: Costs) -> Profile:
    """What a tune of such a machine would have found of a pair that is like the usual one."""
    return Profile(
        identity=Identity(target="0" * 64, draft="1" * 64, rule="match", temperature=0.0, top_p=1.0, top_k=0,
                          machine=Machine.here("bfloat16")),
        target_name="70B", draft_name="7B", created="2026-01-01T00:00:00+00:00", num_tokens=2048,
        is_teacher_forced=False, acceptance=DEFAULT_ACCEPTANCE, standard_error=(0.01,) * len(DEFAULT_ACCEPTANCE),
        smoothing=PRODUCT_FORM, num_threads=1, costs=costs, dynamic_yields=(), traces=((0,) * 64,),
    )  # fmt: skip


def named(files: ModelFiles, models: list[str], machine: Hardware, folder: Path) -> dict[str, str]:
    """By caller the tree that it chooses."""
    place = "cuda" if machine.gpu_bytes else None
    options = LoadOptions(context=CONTEXT, ram=machine.ram_bytes, gpu_memory=machine.gpu_bytes)
    room = MemoryBudget.of(options, place)
    context = room.plan(ModelFiles(files.target), 1).context
    costs = costs_on(machine, *(model_shape(one) for one in files if one is not None), context // 2)
    profile = profile_of(costs)
    path, described = folder / "profile.json", folder / "machine.json"
    path.write_text(json.dumps(profile.as_dict()))
    told = {field.name: getattr(machine, field.name) for field in fields(machine)}
    described.write_text(json.dumps({name: value for name, value in told.items() if value is not None}))
    plan = estimating.estimate(
        *models, LoadOptions(context=CONTEXT, profile=str(path)), hardware=str(described), has_packing=False
    )
    bill = prediction.bill_of(models, str(described), "auto", context=CONTEXT, profile=path)
    trees = trees_of(files, replace(options, profile="none"), room, RunSettings(Sampling(), "match"))
    trees.find = lambda *_: (profile, "")
    settled = trees.nodes_to_plan(Sampling(), "match")
    decoded = trees.for_run(Sampling(), "match")
    assert settled == decoded.shape.num_nodes, "memory is planned for the tree that was chosen, and for no larger one"
    return {
        "plan": label_of(plan.predictions[-1].shape),
        "generate": label_of(decoded.shape),
        "tune": label_of(tuning.choice_from(profile, files, room).shape),
        "bench": label_of(bill.predictions[-1].shape),
    }


@pytest.mark.parametrize("name", MACHINES)
def test_every_caller_names_the_same_tree(name: str, models: list[str], files: ModelFiles, tmp_path: Path) -> None:
    found = named(files, models, MACHINES[name], tmp_path)
    assert len(set(found.values())) == 1, found


def test_sizes_follow_what_rows_cost(models: list[str], files: ModelFiles, tmp_path: Path) -> None:
    """Large where a slow link leaves rows free, small where computing is what takes the time."""
    sizes = {
        name: int(named(files, models, MACHINES[name], tmp_path)["plan"].split(":")[1].split("x")[0])
        for name in ("slow link", "l40", "h200", "server", "laptop")
    }
    assert sizes["slow link"] == 2048 >= sizes["l40"] > 512 > sizes["h200"], sizes
    assert max(sizes["server"], sizes["laptop"]) < sizes["h200"], sizes


def capped(most: int) -> Callable[..., TreeSelector]:
    """A selector with a cap of its own, as each caller once had."""
    return lambda *given, **more: replace(TreeSelector(*given, **more), max_nodes=most)


CAPS = {"plan": (estimating, 1024), "generate": (tree_policy, 512), "tune": (tuning, 512)}


@pytest.mark.parametrize("caller", CAPS)
def test_a_cap_of_one_caller_is_noticed(
    caller: str, models: list[str], files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, most = CAPS[caller]
    monkeypatch.setattr(module, "TreeSelector", capped(most))
    found = named(files, models, MACHINES["slow link"], tmp_path)
    assert found[caller] != found["tune" if caller != "tune" else "generate"], found
    assert int(found[caller].split(":")[1].split("x")[0]) == most
