"""What `offload plan` says of machines that are not here and of models that are not here, against sums done by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from shell import shell
from test_device_planner import CONFIGS, PAIRS, SHAPES
from tiny import FAMILIES, build, save, save_pair

import offload
from offload.bench.latency.prediction import PAPER_BASE_S, paper_rows
from offload.calibration import device_link
from offload.calibration import estimate as estimate_module
from offload.calibration.estimate import Estimate, estimate
from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.cli.flags import as_flags
from offload.config import Sampling, format_bytes
from offload.errors import UserError
from offload.memory import planner as plan
from offload.memory.planner import Budgets, make_plan
from offload.planning.cost_model import (
    DRAFT_OVERHEAD_S,
    VERIFY_S,
    Costs,
    Curve,
    costs_on,
    is_disk_slower,
    predict,
    traffic_on,
)
from offload.planning.hardware import KNOWN, Hardware, read_hardware
from offload.planning.options import LoadOptions
from offload.planning.profile import Identity, Machine, Profile, save_profile
from offload.planning.traces import DynamicYield
from offload.tree.topology import DEFAULT_ACCEPTANCE, best_first, chain, expected_tokens

GB = 10**9
TOY = Hardware(name="toy", gpu_bytes=48 << 30, memory_bytes_per_s=1e12, flops_per_s=2e14, link_bytes_per_s=20e9,
               ram_bytes=256 * GB, disk_bytes_per_s=4e9, memory_share=0.5, flops_share=0.5)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """config.json of Llama-2-70B and 7B, and nothing else of them."""
    paths = [tmp_path_factory.mktemp(name) / "config.json" for name in PAIRS[0]]
    for path, name in zip(paths, PAIRS[0], strict=True):
        path.write_text(json.dumps(CONFIGS[name]))
    return [str(path) for path in paths]


def ask(
    models: Sequence[str | Path], *, hardware: str | None = None, tokens_per_sweep: float | None = None, **options: Any
) -> Estimate:
    """What `offload plan` finds for these flags."""
    target, draft = map(str, models)
    return estimate(target, draft, LoadOptions(**options), hardware=hardware, tokens_per_sweep=tokens_per_sweep)


# The paper


def test_the_papers_l40_is_predicted_from_data_sheets() -> None:
    base, *trees = paper_rows()
    assert base["paper_s"] == PAPER_BASE_S and len(trees) == 6
    for key in ("in_turn", "overlapped"):
        assert base[key] == pytest.approx(PAPER_BASE_S, rel=0.10)
        for row in trees:
            assert row[key] == pytest.approx(row["paper_s"], rel=0.15), row["row"]
    assert all(row["here"] < row["overlapped"] < row["in_turn"] for row in [base, *trees])


# A GPU's figures


def test_a_pass_reads_its_weights_or_multiplies_them() -> None:
    target, draft = SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    costs = costs_on(TOY, target, draft, num_positions=1000)
    weights = sum(target.layer_bytes) + target.head_bytes
    read_s = (weights + 1000 * 80 * 2 * 8 * 128 * 2) / 0.5e12
    assert costs.compute_s.at(1) == costs.compute_s.at(50) == pytest.approx(read_s)
    for rows in (512, 768, 2048):
        assert costs.compute_s.at(rows) == pytest.approx(2 * target.num_weights * rows / 1e14, rel=0.005)
    assert costs.draft_step_s.at(4) == pytest.approx(
        DRAFT_OVERHEAD_S + (13.2e9 + 1000 * 32 * 8192 * 2) / 0.5e12, rel=0.01
    )
    assert costs_on(TOY, target, None, 0).draft_step_s == Curve((1,), (DRAFT_OVERHEAD_S,))


def test_a_row_is_multiplied_with_its_own_experts_and_many_rows_read_them_all() -> None:
    dense = SHAPES["Llama-2-70B"]
    routed = replace(
        dense, routed_weights=dense.num_weights // 2, routed_bytes=dense.num_bytes // 2, routed_share=1 / 8
    )
    costs, all_read = (costs_on(TOY, shape, None, 0).compute_s for shape in (routed, dense))
    row_weights = dense.num_weights / 2 * (1 + 1 / 8)
    for rows in (1024, 2048):
        assert costs.at(rows) == pytest.approx(2 * row_weights * rows / 1e14, rel=0.005)
        assert all_read.at(rows) == pytest.approx(2 * dense.num_weights * rows / 1e14, rel=0.005)
    read_s = (sum(dense.layer_bytes) + dense.head_bytes) / 0.5e12
    for rows, share in ((1, 1 / 8), (4, 4 / 8), (8, 1.0), (50, 1.0)):
        idle_s = (1 - share) * routed.routed_bytes / 0.5e12
        assert costs.at(rows) == pytest.approx(read_s - idle_s), "n rows read at most n times k experts"


@pytest.mark.parametrize(("family", "share"), [("mixtral", 2 / 4), ("qwen3-moe", 2 / 12), ("llama", 1.0)])
def test_experts_are_counted_in_the_headers(family: str, share: float, tmp_path: Path) -> None:
    model = build(FAMILIES[family]())
    shape = model_shape(open_checkpoint(save(model, tmp_path)))
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    assert shape.routed_share == pytest.approx(share) and shape.routed_weights == sum(map(torch.numel, experts))
    assert shape.routed_bytes == 4 * shape.routed_weights < sum(shape.layer_bytes)


def test_a_step_is_drafting_and_the_slower_side() -> None:
    target, draft = SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    memory = make_plan(target, draft, Budgets(TOY.ram_bytes, TOY.gpu_bytes), context=512, num_nodes=64)
    costs = costs_on(TOY, target, draft, 256)
    got = predict("64x8", costs, traffic_on(TOY, memory), best_first([0.7, 0.2, 0.05], 64, 8), 4.0)
    slots_s = 3 * memory.slot_bytes / 20e9
    hidden_s = min(slots_s, got.step.draft_s + VERIFY_S)
    assert got.step.draft_s == pytest.approx(8 * costs.draft_step_s.at(1), rel=0.01)
    assert got.step.link_s == pytest.approx(memory.streamed_bytes / 20e9 - hidden_s)
    assert got.s_per_token == pytest.approx((got.step.draft_s + got.step.link_s + VERIFY_S) / 4)
    assert got.limit == "link" and got.as_dict()["s_per_token"] == got.s_per_token
    slow = replace(costs, draft_step_s=Curve((1,), (2.0,)))
    assert predict("x", slow, traffic_on(TOY, memory), chain(9), 4.0).limit == "draft"
    assert (
        predict("x", replace(costs, link_bytes_per_s=1e15), traffic_on(TOY, memory), chain(1), 1.5).limit == "compute"
    )


def test_the_disk_sets_the_pace_where_it_feeds_the_card_too_slowly() -> None:
    target = SHAPES["Llama-2-70B"]
    memory = make_plan(target, None, Budgets(64 * GB, TOY.gpu_bytes), context=512, num_nodes=1)
    assert memory.disk_streamed_bytes > memory.streamed_bytes / 5 and is_disk_slower(TOY, memory)
    traffic = traffic_on(TOY, memory)
    assert traffic.streamed_bytes / TOY.link_bytes_per_s == pytest.approx(memory.disk_streamed_bytes / 4e9)
    quick = replace(TOY, disk_bytes_per_s=20e9)
    assert not is_disk_slower(quick, memory) and traffic_on(quick, memory).streamed_bytes == memory.streamed_bytes


def test_known_cards_are_what_their_data_sheets_say() -> None:
    assert set(KNOWN) == {"l40", "rtx4090", "rtx3090", "a100-80gb", "h100", "h200"}
    for name, nominal_gb in {"l40": 48, "rtx4090": 24, "rtx3090": 24, "a100-80gb": 80, "h100": 80, "h200": 141}.items():
        assert nominal_gb * 0.93 < KNOWN[name].gpu_bytes / 2**30 < nominal_gb * 1.01
        assert KNOWN[name].link_bytes_per_s in (25e9, 52e9) and KNOWN[name].flops_per_s < 1e15


MACHINE = {"gpu_bytes": "48GiB", "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": "25GB/s"}


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**MACHINE, "ram_bytes": 64 * GB}))
    wanted = {"gpu_bytes": 48 << 30, "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": 25e9}
    assert read_hardware(path) == Hardware(name="mine", ram_bytes=64 * GB, **wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "holds a JSON list"),
        ("{", "is not valid JSON"),
        (json.dumps({**MACHINE, "ram": 1}), "a machine has the fields"),
        (json.dumps({"gpu_bytes": 1}), "needs memory_bytes_per_s, flops_per_s, link_bytes_per_s as well"),
        (json.dumps({**MACHINE, "gpu_bytes": "much"}), "gpu_bytes must be a size such as 8GiB"),
        (json.dumps({**MACHINE, "flops_per_s": "181T"}), "flops_per_s must be a number, got '181T'"),
        (json.dumps({**MACHINE, "flops_per_s": True}), "flops_per_s must be a number, got True"),
        (json.dumps({**MACHINE, "link_bytes_per_s": -1}), "link_bytes_per_s must be above 0, got -1"),
        (json.dumps({**MACHINE, "disk_bytes_per_s": float("nan")}), "disk_bytes_per_s must be above 0, got nan"),
        (json.dumps({**MACHINE, "gpu_bytes": float("inf")}), "gpu_bytes must be above 0, got inf"),
        (json.dumps({**MACHINE, "flops_share": 1.5}), "flops_share must be at most 1, got 1.5"),
    ],
)
def test_a_malformed_machine_is_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        read_hardware(path)
    assert words in str(refusal.value) and "mine" in str(refusal.value)


# offload plan


def test_plan_predicts_another_machine_without_any_weights(configs: list[str]) -> None:
    settings = ("plan", "-m", configs[0], "-d", configs[1], "--hardware", "l40", "--context", 256)
    got = json.loads(shell(*settings, "--tree", "768x22", "--tokens-per-sweep", 12.18, "--json").out)
    plain, tree = got["predictions"]
    assert (plain["tree"], plain["tokens_per_sweep"], tree["tree"], tree["tokens_per_sweep"]) == (
        "none",
        1,
        "768x22",
        12.18,
    )
    base, here = (row["here"] for row in paper_rows()[:2])
    assert plain["s_per_token"] == pytest.approx(base, rel=0.01), "without a tree the draft's memory goes to layers"
    assert tree["s_per_token"] == pytest.approx(here, rel=0.01) and tree["limit"] == "link"
    assert got["tiers"]["disk"]["num_layers"] == 0 and got["hardware"] == "l40" and got["device"] == "cuda"
    printed = shell(*settings, "--tree", "768x22", "--tokens-per-sweep", 12.18).out
    for words in (
        "on the GPU",
        "layers in pinned memory",
        "tokens per sweep as given",
        f"{tree['s_per_token']:.3f}  link",
    ):
        assert words in printed


def test_the_best_tree_depends_on_the_machine(configs: list[str]) -> None:
    slow, quick = (ask(configs, context=512, hardware=name) for name in ("l40", "h200"))
    assert slow.basis.startswith("default acceptance, of ") and slow.predictions[1].shape.num_nodes == 1024
    assert slow.predictions[1].label == "dynamic:1024x32" and "predicted as the static one" in slow.notes[-1]
    assert quick.predictions[1].shape.num_nodes < 1024, "what fits into the card is not hidden behind a link"
    for found in (slow, quick):
        assert found.predictions[1].s_per_token < found.predictions[0].s_per_token
        assert found.plan.num_nodes == found.predictions[1].shape.num_nodes


def test_tokens_of_named_trees_follow_the_acceptance(configs: list[str]) -> None:
    for tree, least in (("64x16", 5.0), ("chain:8", 3.5), ("sequences:40x4", 3.0)):
        _, row = ask(configs, context=512, hardware="l40", tree=tree).predictions
        assert row.label == tree and least < row.tokens_per_sweep < 8
        assert row.tokens_per_sweep == pytest.approx(expected_tokens(row.shape, [*DEFAULT_ACCEPTANCE, *[0.0] * 32]))


@pytest.mark.parametrize("size", ["64x8", "4096x24"])
def test_a_grown_tree_is_predicted_as_the_fixed_one_of_its_size(size: str, configs: list[str]) -> None:
    """The larger one has more nodes than the trees to choose from."""
    static, dynamic = (ask(configs, hardware="l40", tree=tree) for tree in (size, f"dynamic:{size}"))
    assert dynamic.predictions[-1].tokens_per_sweep == pytest.approx(static.predictions[-1].tokens_per_sweep)


def test_a_smaller_host_sends_layers_to_its_disk(configs: list[str]) -> None:
    got = ask(configs, context=512, hardware="rtx4090", ram="64GiB", tree="64x8")
    assert got.plan.disk_streamed_bytes > 0 and got.predictions[1].limit == "disk" and got.plan.ram_bytes == 64 << 30
    assert got.sweep_s == pytest.approx(got.plan.disk_streamed_bytes / 5e9, rel=0.01)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"tokens_per_sweep": 4.0, "hardware": "l40"}, "belongs to one tree"),
        ({"tokens_per_sweep": 0.5, "hardware": "l40", "tree": "64x8"}, "must be 1 or more, got 0.5"),
        ({"tokens_per_sweep": 4.0, "tree": "64x8"}, "goes with `hardware`"),
        ({"hardware": "rtx4090", "gpu_memory": "12GiB"}, "take a draft of at most"),
    ],
)
def test_wishes_that_cannot_be_met(wish: dict[str, Any], words: str, configs: list[str]) -> None:
    with pytest.raises(UserError, match=words):
        ask(configs, **wish)


def test_a_card_of_any_size_is_planned_without_rates(configs: list[str]) -> None:
    got = ask(configs, gpu_memory="48GiB", ram="200GiB", tree="64x8")
    assert (got.plan.gpu_bytes, got.link_bytes_per_s, got.sweep_s, got.predictions) == (48 << 30, None, None, ())
    assert any("not here" in note for note in got.notes)


def profile_of(directories: tuple[Path, Path]) -> Profile:
    """For this machine; a sweep computes for 0.5 s, a draft step for 0.01 s."""
    target, draft = (open_checkpoint(path) for path in directories)
    identity = Identity.of(target, draft, Sampling(), "match", Machine.here("float32"))
    link = Costs(compute_s=Curve((1, 64), (0.5, 0.6)), draft_step_s=Curve((1,), (0.01,)), verify_s=0.0,
                         link_bytes_per_s=1.0)  # fmt: skip
    return Profile(identity=identity, target_name="big", draft_name="small", created="2026-01-01T00:00:00+00:00",
                   num_tokens=8, is_teacher_forced=False, acceptance=(0.5, 0.25), standard_error=(0.1, 0.1),
                   smoothing=1e9, num_threads=1, costs=link, dynamic_yields=(),
                   traces=((0, 1, -1, 0, 0, 0, 1, -1),))  # fmt: skip


def test_this_machine_is_predicted_from_its_profile_and_todays_link(tmp_path: Path) -> None:
    pair = save_pair(FAMILIES["llama"](), tmp_path)
    profile = profile_of(pair)
    bare = ask(pair, ram="1GiB", tree="chain:4")
    assert bare.predictions == () and "no profile" in bare.basis and bare.link_bytes_per_s > 1e6
    save_profile(profile)
    got = ask(pair, ram="1GiB", tree="chain:4")
    assert got.link_bytes_per_s > 1e6 and got.basis.startswith("profile ")
    plain, tree = got.predictions
    assert plain.s_per_token == pytest.approx(0.5) and plain.limit == "compute"
    assert tree.tokens_per_sweep == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert tree.step.total_s == pytest.approx(4 * 0.01 + 0.5 + 0.1 * 4 / 63)
    other = replace(profile, identity=replace(profile.identity, target="c" * 64))
    path = tmp_path / "other.json"
    path.write_text(save_profile(other).read_text())
    with pytest.raises(UserError, match="measured for another run"):
        ask(pair, ram="1GiB", profile=str(path))


class PaperCard(FakeDevice):
    name, place = "Paper 9000", torch.device("cuda", 1)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """A GPU of this machine with 3 GiB free, and how it was asked for."""
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(estimate_module, "has_cuda_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("offload.streaming.device.open_device", lambda *how: asked.append(how) or PaperCard())
    monkeypatch.setattr(plan, "available_gpu_bytes", lambda place: {"cuda:1": 3 << 30}[place])
    monkeypatch.setattr(device_link, "_COPY_BYTES", 1 << 16)
    return asked


def test_a_plan_is_of_the_card_that_a_run_would_take(tmp_path: Path, card: list[tuple[str, object]]) -> None:
    pair = [str(path) for path in save_pair(FAMILIES["llama"](), tmp_path)]
    roomy = ask(pair, ram="2GiB", context=128, tree="8x3")
    assert card == [("auto", None)] and roomy.plan.device == "cuda"
    assert 2.9 * 2**30 < roomy.plan.gpu_bytes < 3 * 2**30 and roomy.plan.num_slots == 0
    assert "cuda:1 is a Paper 9000, 2.94 GiB of it to use; `device` cpu does without" in roomy.notes
    tight = roomy.plan.gpu_total_bytes - 1
    found = ask(pair, ram="2GiB", context=128, tree="8x3", gpu_memory=tight, device="cuda:1")
    assert card[1:] == [("cuda:1", tight)] and found.plan.gpu_bytes == tight and found.plan.streamed_bytes
    assert found.link_bytes_per_s == pytest.approx(1 << 16), "a copy takes a second on this card"
    assert found.predictions == () and "no profile" in found.basis


def test_a_card_is_predicted_from_the_profile_that_was_made_on_it(
    tmp_path: Path, card: list[tuple[str, object]]
) -> None:
    pair = save_pair(FAMILIES["llama"](), tmp_path)
    on_cpu = profile_of(pair)
    wish = {"ram": "2GiB", "tree": "chain:4"}
    save_profile(on_cpu)
    assert ask(pair, **wish).predictions == (), "a CPU's times say nothing"
    machine = replace(on_cpu.identity.machine, device="Paper 9000")
    path = save_profile(replace(on_cpu, identity=replace(on_cpu.identity, machine=machine)))
    for named in (None, str(path)):
        plain, tree = ask(pair, profile=named, **wish).predictions
        assert plain.s_per_token == pytest.approx(0.5) and tree.tokens_per_sweep == pytest.approx(1.9375)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "cuda"), "--device cuda needs a CUDA device"),
        (("--device", "cpu", "--gpu-mem", "4GiB"), "--gpu-mem limits a CUDA device"),
        (("--device", "gpu"), "--device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (("--device", "cuda", "--hardware", "l40"), "--device cuda is of this machine, --hardware names another"),
    ],
)
def test_a_plan_for_a_device_that_is_not_here_is_refused(
    options: tuple[str, ...], words: str, configs: list[str]
) -> None:
    outcome = shell("plan", "-m", configs[0], *options)
    assert outcome.code == 2 and not outcome.out and words in outcome.err and outcome.err.count("\n") == 1


def test_acceptance_travels_from_machine_to_machine(tmp_path: Path, configs: list[str]) -> None:
    """Times do not: a profile tells a GPU how many tokens a tree yields, and nothing else."""
    path = save_profile(profile_of(save_pair(FAMILIES["llama"](), tmp_path)))
    wish = {"context": 512, "hardware": "l40", "tree": "chain:4"}
    plain, tree = ask(configs, profile=str(path), **wish).predictions
    assert tree.tokens_per_sweep == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert plain.step == ask(configs, **wish).predictions[0].step


def test_what_grown_trees_yield_comes_from_the_profile(tmp_path: Path, configs: list[str]) -> None:
    counted = (DynamicYield(num_nodes=64, depth=8, tokens_per_sweep=5.0, num_sweeps=100),)
    path = save_profile(replace(profile_of(save_pair(FAMILIES["llama"](), tmp_path)), dynamic_yields=counted))
    wish = {"context": 512, "hardware": "l40", "profile": str(path)}
    fixed, named = (ask(configs, tree=tree, **wish) for tree in ("64x8", "dynamic:64x8"))
    assert named.predictions[1].tokens_per_sweep == pytest.approx(5.0) and not named.notes
    assert fixed.predictions[1].tokens_per_sweep < 3.5
    draft_s = [found.predictions[1].step.draft_s for found in (fixed, named)]
    assert draft_s[1] == pytest.approx(draft_s[0] * 17 / fixed.predictions[1].shape.depth, rel=0.02), (
        "root and 16 parts"
    )
    chosen = ask(configs, **wish).predictions[1]
    assert chosen.label.startswith("dynamic:") and chosen.tokens_per_sweep > 5


def test_plan_says_what_its_figures_rest_on(configs: list[str], tmp_path: Path) -> None:
    command = ("plan", "-m", configs[0], "-d", configs[1], "--hardware", "l40", "--context", "512")
    printed = shell(*command).out
    assert (
        "l40, default acceptance, of a 16 M target" in printed and "predicted as the static one of its size" in printed
    )
    assert "predicted as the static" not in shell(*command, "--tree", "64x8").out
    assert "predicted as the static" not in shell(*command, "--tree", "dynamic:64x8", "--tokens-per-sweep", "5").out
    pair = save_pair(FAMILIES["llama"](), tmp_path)
    save_profile(profile_of(pair))
    printed = shell("plan", "-m", pair[0], "-d", pair[1], "--ram", "1GiB").out
    assert "\nprofile /" in printed and "predicted as the static one of its size" in printed


def test_more_memory_than_there_is_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = save_pair(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr(plan, "available_ram_bytes", lambda: 3 << 30)
    outcome = shell("plan", "-m", target, "--ram", "4GiB")
    warnings = [line for line in outcome.out.splitlines() if "--ram" in line]
    assert outcome.code == 0 and warnings == ["--ram 4 GiB is more than the 3 GiB free here: it may not hold"]
    assert "--ram" not in shell("plan", "-m", target, "--ram", "3GiB").out

    with offload.load(target, ram="4GiB", threads=1) as decoder:
        assert list(map(as_flags, decoder.notes)) == warnings
    assert format_bytes(3 << 30) == "3 GiB"
