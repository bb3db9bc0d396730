"""What a cluster will do with a model: who holds what adds up, and times are those of a pocket calculator."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import assert_refused
from shell import process, shell
from test_device_planner import CONFIGS
from tiny import FAMILIES, save_pair

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.imagined import checkpoint_of_config
from offload.distributed.layout import ClusterLayout, ClusterRequest, lay_out_shards, lay_out_stages
from offload.errors import UserError
from offload.planning.cluster import Cluster, Network
from offload.planning.hardware import Hardware
from offload.rank_roles import PipelineOptions
from offload.reports.forecast import in_flight_gain

GB, LAYER = 10**9, 1_711_308_800  # bytes of a layer of the 70B model
GBE = {"gbit_per_s": 1}
LAPTOP = {"ram": "32GB", "disk": "3GB/s"}
TARGET = checkpoint_of_config(CONFIGS["Llama-3-70B"], Path("/nowhere/config.json"))
DRAFT = checkpoint_of_config(CONFIGS["Llama-3-8B"], Path("/nowhere/config.json"))


def wish(*machines: Hardware, has_draft: bool = True) -> ClusterRequest:
    named = tuple(Hardware(**{**_fields(one), "name": f"r{rank}"}) for rank, one in enumerate(machines))
    return ClusterRequest(ModelFiles(TARGET, DRAFT if has_draft else None), Cluster(named, Network(117e6, 1e-4)))


def _fields(machine: Hardware) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in Hardware.__dataclass_fields__}


def laptop(ram_gb: float = 32, disk_gb: float = 3) -> Hardware:
    return Hardware(name="laptop", ram_bytes=int(ram_gb * GB), disk_bytes_per_s=disk_gb * GB)


CARD = Hardware(
    name="card", ram_bytes=64 * GB, disk_bytes_per_s=3e9, gpu_bytes=24 << 30, link_bytes_per_s=25e9,
    flops_per_s=165e12, memory_bytes_per_s=1e12,
)  # fmt: skip
CASES = {
    "alike": (laptop(), laptop()),
    "uneven": (laptop(48, 2), laptop(16, 7), laptop(24, 0.5)),
    "cards": (CARD, CARD),
    "more ranks than heads": (laptop(),) * 9,
}


@pytest.mark.parametrize("lay_out", [lay_out_shards, lay_out_stages])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_fits_and_together_they_have_all_of_it(case: str, lay_out: Any) -> None:
    machines = CASES[case]
    layout: ClusterLayout = lay_out(wish(*machines), 128)
    everywhere = 2e-4 if case != "more ranks than heads" or lay_out is lay_out_stages else 8 * 0.02  # keys and values
    assert 0 <= sum(part.fraction for part in layout.parts) - 1 <= everywhere  # norms are everywhere
    slots = layout.parts[0].plan.cache_slots
    for part in layout.parts:
        assert part.plan.total_bytes <= part.plan.ram_bytes == part.machine.ram_bytes
        assert part.plan.gpu_total_bytes <= (part.machine.gpu_bytes or 0) and part.plan.cache_slots == slots
        assert sum(part.plan.layer_bytes) == sum(part.shape.layer_bytes)
    head, *others = layout.parts
    assert head.plan.draft_bytes > 16 * GB and not any(part.plan.draft_bytes for part in others)
    kv_bytes = [part.plan.kv_bytes for part in layout.parts]
    if case == "more ranks than heads" and lay_out is lay_out_shards:
        assert kv_bytes == [320 * 1024 * slots] * 9 and not any(part.num_heads for part in layout.parts)
    else:
        assert sum(kv_bytes) == 320 * 1024 * slots
    if lay_out is lay_out_stages:
        assert [layer for part in layout.parts for layer in part.layers] == list(range(80))
    elif case != "more ranks than heads":
        assert sum(part.num_heads for part in layout.parts) == 8


@pytest.mark.parametrize("case", ["alike", "uneven"])
def test_links_are_done_at_once_as_far_as_whole_layers_stay(case: str) -> None:
    parts = lay_out_shards(wish(*CASES[case]), 128).parts
    streamed_bytes = 80 * LAYER - sum(part.plan.resident_bytes for part in parts)
    by_hand_s = streamed_bytes / sum(part.machine.disk_bytes_per_s for part in parts)
    for part in parts:
        of_a_layer_s = part.fraction * LAYER / part.machine.disk_bytes_per_s
        assert abs(part.link_s - by_hand_s) <= 1.5 * of_a_layer_s


def test_embeddings_head_and_noise_are_where_they_are_used() -> None:
    alike = wish(laptop(), laptop(), laptop(), has_draft=False)
    shards, stages = lay_out_shards(alike, 1).parts, lay_out_stages(alike, 1).parts
    table_bytes = 128256 * 8192 * 2
    assert shards[0].plan.rest_bytes >= 2 * table_bytes and shards[1].plan.rest_bytes == shards[2].plan.rest_bytes == 0
    first, middle, last = (part.plan for part in stages)
    assert middle.rest_bytes == 0 and table_bytes <= first.rest_bytes <= 1.001 * table_bytes
    assert table_bytes <= last.rest_bytes <= 1.001 * table_bytes
    assert last.activation_bytes > first.activation_bytes == middle.activation_bytes  # who scores rows also draws


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    for name in ("Llama-3-70B", "Llama-3-8B"):
        (tmp_path / f"{name}.json").write_text(json.dumps(CONFIGS[name]))

    def flags(*ranks: dict[str, Any], draft: bool = True, network: dict[str, Any] | None = None) -> tuple[object, ...]:
        named = [{"name": f"r{rank}", **one} for rank, one in enumerate(ranks)]
        (tmp_path / "lab.json").write_text(json.dumps({"ranks": named, "network": network or GBE}))
        models = ("-m", tmp_path / "Llama-3-70B.json", *(("-d", tmp_path / "Llama-3-8B.json") if draft else ()))
        return *models, "--ranks", tmp_path / "lab.json"

    return flags


def figures(*flags: object) -> dict[str, Any]:
    outcome = shell("plan", *flags, "--json")
    assert outcome.code == 0 and outcome.err == ""
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def test_disks_are_shared_by_shards(cluster: Any) -> None:
    """Two laptops: 136.9 GB less what stays, over 6 GB/s; stages take turns."""
    found = figures(*cluster(LAPTOP, LAPTOP, draft=False))
    shards, stages = found["shards"], found["stages"]
    assert found["better"] == "shards" and found["is_link_alone"] and "hide behind it" in found["why"]
    streamed = [rank["bytes_per_pass"] for rank in shards["ranks"]]
    resident = [rank["plan"]["tiers"]["resident"]["num_bytes"] for rank in shards["ranks"]]
    assert sum(streamed) + sum(resident) == pytest.approx(80 * LAYER, rel=1e-3)
    seconds = {one["num_rows"]: one["seconds"] for one in shards["passes"]}
    assert seconds[1] == seconds[64] == pytest.approx(sum(streamed) / 6e9, rel=0.01)
    turns = sum(rank["bytes_per_pass"] for rank in stages["ranks"]) / 3e9
    assert stages["passes"][0]["seconds"] == pytest.approx(turns, rel=0.01)
    assert stages["passes"][0]["cycle_s"] < 0.6 * turns
    one_row = shards["passes"][0]["sent_bytes"]
    rows = [rank["rows"] for rank in shards["ranks"]]
    gathered = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    widest = sum(max(own[name][1] - own[name][0] for own in rows) for name in gathered)
    assert one_row == [80 * widest * 2 + 8192 * 2, 80 * widest * 2]


def test_a_slow_network_is_for_stages_that_fit(cluster: Any) -> None:
    rank = {"ram": "96GB", "disk": "3GB/s", "flops": 2e12, "memory": "80GB/s"}
    found = figures(*cluster(rank, rank, draft=False, network={"bytes_per_s": "5MB/s", "latency_us": 5000}))
    assert found["better"] == "stages" and "each share stays in memory" in found["why"] and not found["is_link_alone"]
    assert figures(*cluster(rank, rank, draft=False, network={"gbit_per_s": 10}))["better"] == "shards"


def test_what_one_rank_alone_is_known_to_compute_counts_for_none(cluster: Any) -> None:
    rank = {"ram": "96GB", "disk": "3GB/s"}
    found = figures(*cluster({**rank, "flops": 2e12, "memory": "80GB/s"}, rank, draft=False))
    assert found["is_link_alone"] and [one["busy_s"] for one in found["stages"]["ranks"]] == [0, 0]


def test_runs_in_flight_are_counted_where_they_are_quicker(cluster: Any) -> None:
    """A tree that is named is the shards' alone: stages run batches of rows that cost nothing beside their links."""
    found = figures(*cluster(LAPTOP, LAPTOP), "--tree", "64x16", "--tokens-per-sweep", "5")
    assert found["shards"]["predictions"][1]["tokens_per_pass_range"] == [5, 5]
    stages = found["stages"]
    plain, batches = stages["predictions"]
    assert (plain["num_in_flight"], batches["num_in_flight"]) == (1, PipelineOptions().num_runs(2))
    assert batches["tree"] == "runs of 32 rows" and batches["num_nodes"] == 32
    one = next(one for one in stages["passes"] if one["num_rows"] == 32)
    most = batches["tokens_per_pass_range"][1]
    assert most * batches["s_per_token_range"][0] == pytest.approx(one["cycle_s"] * 2 / in_flight_gain(2, 32))
    assert len(figures(*cluster(LAPTOP, LAPTOP), "--tree", "none")["stages"]["predictions"]) == 1
    assert in_flight_gain(1, 64) == 1.0 and in_flight_gain(64, 4) == in_flight_gain(8, 4) == 1.39
    assert in_flight_gain(2, 32) == pytest.approx(1.04) and 1.07 < in_flight_gain(3, 8) < 1.14


def test_the_first_stage_drafts_between_its_passes(cluster: Any) -> None:
    """Beside its link: what counts is whichever of the two takes longer."""
    for disk, draft_counts in (("3GB/s", False), ("100GB/s", True)):
        rank = {"ram": "32GB", "disk": disk, "flops": 2e13, "memory": "400GB/s"}
        stages = figures(*cluster(rank, rank))["stages"]
        batches = stages["predictions"][1]
        assert batches["num_in_flight"] == 3 and batches["num_nodes"] == 32 and batches["draft_s"] > 0.3
        cycle_s = next(one["cycle_s"] for one in stages["passes"] if one["num_rows"] == 32)
        run_s = batches["tokens_per_pass_range"][1] * batches["s_per_token_range"][0]
        longer_s = run_s * in_flight_gain(2, 32) / 2 - cycle_s
        assert 0 < longer_s < batches["draft_s"] if draft_counts else longer_s == pytest.approx(0, abs=1e-6)


def test_the_answer_is_for_people(cluster: Any) -> None:
    outcome = shell("plan", *cluster(LAPTOP, {**LAPTOP, "name": "a long name of a machine"}))
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and outcome.err == "" and max(map(len, lines)) < 80
    assert lines[0].startswith("As shards: at least ") and lines[0].endswith(" as stages).")
    told = " ".join(outcome.out.split())
    for words in ("118 MB/s each way, 100 us a message", "stays on r0", "3 heads", "layers 0-34", "3 runs in flight",
                  "at most 0.07 tokens",
                  "all ranks are done at once; each waits for its disk", "of 32 GB", "a long name"):  # fmt: skip
        assert words in told
    assert "memory of" not in told
    told = shell("plan", *cluster(LAPTOP, LAPTOP), "--verbose").out
    for words in ("memory of r0 as one of the shards", "memory of r1 as", "draft with its cache", "keys and values"):
        assert words in told


def test_where_nothing_is_streamed_nothing_is_promised(cluster: Any) -> None:
    out = shell("plan", *cluster({**LAPTOP, "ram": "96GB"}, {**LAPTOP, "ram": "96GB"}, draft=False)).out
    assert out.startswith("As shards all of it stays in memory: computing alone decides how fast.\n")
    told = " ".join(out.split())
    assert "nothing is known of it" in told and "waiting for no disk: computing alone decides" in told
    assert "for its disk" not in told and "decoding at most" in told
    one = shell("plan", *cluster({**LAPTOP, "ram": "300GB"}, draft=False)).out
    assert "inf" not in one and "as fast as it computes, which is not known" in " ".join(one.split())
    [rate] = figures(*cluster({**LAPTOP, "ram": "300GB"}, draft=False))["shards"]["predictions"]
    assert rate["tokens_per_s_range"] is None


@pytest.mark.parametrize(
    ("ranks", "more", "words"),
    [
        ([LAPTOP, {**LAPTOP, "ram": "100MB"}], (), "rank r1 has 95.4 MiB of ram, and all but"),
        ([{**LAPTOP, "ram": "16GB"}, LAPTOP], (), "rank r0 has 14.9 GiB of ram, and all but its layers takes"),
        ([LAPTOP], ("--tokens-per-sweep", "3"), "--tokens-per-pass 3 belongs to one tree"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    ranks: list[Any], more: tuple[str, ...], words: str, cluster: Any
) -> None:
    assert_refused(shell("plan", *cluster(*ranks), *more), words)
    with pytest.raises(UserError, match=r"^rank r1 has .* for layers, and two slots .* take 3.* GiB: give it .* more"):
        lay_out_stages(wish(laptop(64), laptop(3)), 1)


def test_a_way_that_does_not_work_is_said(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(
        json.dumps({"ranks": [{**LAPTOP, "name": f"r{i}"} for i in range(9)], "network": GBE})
    )
    lab = ("--ranks", tmp_path / "lab.json", "--context", "64")
    small, _ = save_pair(FAMILIES["llama"](), tmp_path / "llama")
    found = figures("-m", small, *lab)
    assert found["stages"] == {"works": False, "refusal": "9 stages need as many layers, got 4: take fewer ranks"}
    assert found["better"] == "shards" and "stages do not work here: 9 stages need" in found["why"]
    experts, _ = save_pair(FAMILIES["mixtral"](), tmp_path / "mixtral")
    outcome = shell("plan", "-m", experts, *lab)
    assert outcome.code == 2 and "as shards, " in outcome.err and "; as stages, 9 stages need" in outcome.err


def test_one_rank_needs_no_network_and_either_way_will_do(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps({"ranks": [{**LAPTOP, "name": "r0"}]}))
    lab = ("--ranks", tmp_path / "lab.json", "--context", "64")
    small, _ = save_pair(FAMILIES["llama"](), tmp_path / "llama")
    found = json.loads(shell("plan", "-m", small, *lab, "--json").out, parse_constant=pytest.fail)
    assert found["better"] == "shards" and found["network"] == {"bytes_per_s": None, "latency_s": 0.0}
    assert "each way" not in shell("plan", "-m", small, *lab).out
    experts, _ = save_pair(FAMILIES["mixtral"](), tmp_path / "mixtral")
    found = figures("-m", experts, *lab)
    assert found["better"] == "stages" and found["why"].startswith("shards do not work here: ")


def test_no_torch_is_imported(cluster: Any) -> None:
    code = "import sys; from offload.__main__ import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    flags = [str(one) for one in cluster(LAPTOP, LAPTOP, draft=False)]
    outcome = process("plan", *flags, python=("-c", code), is_cold=True)
    assert outcome.code == 0, outcome.err
