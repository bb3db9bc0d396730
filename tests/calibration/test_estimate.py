"""What `offload plan` says of machines and models that are not here, against sums by hand; pairs that cannot be."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expected import expected_tokens
from fake_device import FakeDevice
from paper_l40 import paper_rows
from shell import shell
from test_device_planner import CONFIGS, PAIRS
from tiny import FAMILIES, Pair, build, save, save_tokenizer

import offload
from offload.calibration import link as device_link
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.open import open_checkpoint
from offload.engine.request import Request
from offload.engine.setup import Setup
from offload.errors import UserError
from offload.model.headers import describe
from offload.planning.acceptance import DynamicYield
from offload.planning.budget import budget_of
from offload.planning.cost_model import Costs, Curve
from offload.planning.knowledge import Provenance
from offload.planning.load_options import LoadOptions
from offload.planning.profile import FindProfile, Identity, Machine, Profile, save_profile
from offload.planning.search import range_for
from offload.reports.estimate import Estimate, estimate
from offload.sampling_options import Sampling
from offload.streaming.device import HOST
from offload.trees.spec import parse_tree
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape


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
    models: Sequence[str | Path], *, hardware: str | None = None, tokens_per_sweep: float | None = None,
    disk_speed: str | None = None, **options: Any,
) -> Estimate:  # fmt: skip
    of_machine = {"hardware": hardware, "disk_speed": disk_speed, "tokens_per_sweep": tokens_per_sweep}
    return estimate(LoadOptions(*models, **options), **of_machine)  # type: ignore[arg-type]


def test_plan_predicts_another_machine_without_any_weights(configs: list[str]) -> None:
    settings = ("plan", "-m", configs[0], "-d", configs[1], "--hardware", "l40", "--context", 256)
    got = json.loads(shell(*settings, "--tree", "768x22", "--tokens-per-sweep", 12.18, "--json").out)
    plain, tree = got["predictions"]
    trees = [(prediction["tree"], prediction["tokens_per_sweep"]) for prediction in (plain, tree)]
    assert trees == [("none", 1), ("768x22", 12.18)]
    base, here = (row["here"] for row in paper_rows()[:2])
    assert plain["s_per_token"] == pytest.approx(base, rel=0.01), "without a tree the draft's memory goes to layers"
    assert tree["s_per_token"] == pytest.approx(here, rel=0.01) and tree["limit"] == "link"
    assert got["tiers"]["disk"]["num_layers"] == 0 and got["hardware"] == "l40" and got["device"] == "cuda"


def test_the_best_tree_depends_on_the_machine(configs: list[str]) -> None:
    slow, quick = (ask(configs, context=512, hardware=name) for name in ("l40", "h200"))
    assert slow.basis.startswith("a range, as measured for Llama-2 70B with 7B (arXiv 2402.12374);")
    assert slow.predictions[1].label == "dynamic:2048x48" and "counted as the static one" in slow.basis
    assert quick.predictions[1].shape.num_nodes < 1024, "what fits into the card is not hidden behind a link"
    for counted in (slow, quick):
        assert counted.predictions[1].s_per_token < counted.predictions[0].s_per_token
        num_nodes = counted.predictions[1].shape.num_nodes
        assert num_nodes <= counted.plan.num_nodes <= 4 * num_nodes, "passes may yet show that more pay"


def test_tokens_of_named_trees_follow_the_acceptance(configs: list[str]) -> None:
    for tree, least in (("64x16", 5.0), ("chain:8", 3.5), ("sequences:40x4", 3.0)):
        _, row = ask(configs, context=512, hardware="l40", tree=tree).predictions
        assert row.label == tree and least < row.tokens_per_sweep < 8
        expected = range_for(0.098).around(expected_tokens(row.shape, [*DEFAULT_ACCEPTANCE, *[0.0] * 32]))
        assert row.tokens_range == pytest.approx(expected)
        assert row.s_per_token_range == pytest.approx([row.step.total_s / tokens for tokens in expected[::-1]])


@pytest.mark.parametrize("size", ["64x8", "4096x24"])
def test_a_grown_tree_is_predicted_as_the_fixed_one_of_its_size(size: str, configs: list[str]) -> None:
    """The larger one has more nodes than the trees to choose from."""
    static, dynamic = (ask(configs, hardware="l40", tree=tree) for tree in (size, f"dynamic:{size}"))
    assert dynamic.predictions[-1].tokens_per_sweep == pytest.approx(static.predictions[-1].tokens_per_sweep)


def test_a_smaller_host_sends_layers_to_its_disk_and_a_card_of_any_size_is_planned(configs: list[str]) -> None:
    got = ask(configs, context=512, hardware="rtx4090", ram="64GiB", tree="64x8")
    assert got.plan.disk_streamed_bytes > 0 and got.plan.ram_bytes == 64 << 30
    assert got.predictions[1].step.limit == "disk"
    assert got.sweep_s == pytest.approx(got.plan.disk_streamed_bytes / 5e9, rel=0.01)
    # A card of any size is planned without rates.
    got = ask(configs, gpu_memory="48GiB", ram="200GiB", tree="64x8")
    assert (got.plan.gpu_bytes, got.link.bytes_per_s, got.sweep_s, got.predictions) == (48 << 30, None, None, ())
    assert any("not here" in note for note in got.notes)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"tokens_per_sweep": 4.0, "hardware": "l40"}, "belongs to one tree"),
        ({"tokens_per_sweep": 0.5, "hardware": "l40", "tree": "64x8"}, "must lie in 1 to 9, got 0.5"),
        ({"tokens_per_sweep": 4.0, "tree": "64x8"}, "goes with `hardware`"),
        ({"hardware": "rtx4090", "gpu_memory": "12GiB"}, "take a draft of at most"),
    ],
)
def test_wishes_that_cannot_be_met(wish: dict[str, Any], words: str, configs: list[str]) -> None:
    with pytest.raises(UserError, match=words):
        ask(configs, **wish)


def profile_of(directories: Pair) -> Profile:
    """For this machine; a sweep computes for 0.5 s, a draft step for 0.01 s."""
    target, draft = (open_checkpoint(path) for path in directories)
    identity = Identity.from_models(target, draft, Sampling(), "match", Machine.here("float32"))
    link = Costs(compute_s=Curve((1, 64), (0.5, 0.6)), draft_step_s=Curve((1,), (0.01,)), verify_s=0.0,
                         link_bytes_per_s=1.0)  # fmt: skip
    return Profile(identity=identity, target_name="big", draft_name="small", created="2026-01-01T00:00:00+00:00",
                   num_tokens=8, acceptance=(0.5, 0.25), standard_error=(0.1, 0.1),
                   num_threads=1, costs=link, dynamic_yields=())  # fmt: skip


def test_this_machine_is_predicted_from_its_profile_and_todays_link(tmp_path: Path, pair: Pair) -> None:
    profile = profile_of(pair)
    bare = ask(pair, ram="1GiB", tree="chain:4")
    assert bare.predictions == () and bare.computing is Provenance.UNKNOWN
    assert bare.link.bytes_per_s > 1e6, "and nothing is streamed"
    save_profile(profile)
    got = ask(pair, ram="1GiB", tree="chain:4")
    assert got.link.bytes_per_s > 1e6 and got.basis.startswith("profile ")
    plain, tree = got.predictions
    assert plain.s_per_token == pytest.approx(0.5) and plain.step.limit == "compute"
    assert tree.tokens_per_sweep == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert tree.step.total_s == pytest.approx(4 * 0.01 + 0.5 + 0.1 * 4 / 63)
    other = replace(profile, identity=replace(profile.identity, target="c" * 64))
    path = tmp_path / "other.json"
    path.write_text(save_profile(other).read_text())
    with pytest.raises(UserError, match="measured for another run"):
        ask(pair, ram="1GiB", profile=str(path))


class PaperCard(FakeDevice):
    name, torch_device = "Paper 9000", torch.device("cuda", 1)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """A GPU of this machine with 3 GiB free, and how it was asked for."""
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr("offload.streaming.device.has_cuda_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("offload.streaming.cuda.open_device", lambda *given, **_: asked.append(given) or PaperCard())
    monkeypatch.setattr("offload.planning.budget.available_gpu_bytes", lambda place: {"cuda:1": 3 << 30}[place])
    monkeypatch.setattr(device_link, "_COPY_BYTES", 1 << 16)
    return asked


def test_a_plan_is_of_the_card_that_a_run_would_take(pair: Pair, card: list[tuple[str, object]]) -> None:
    roomy = ask(pair, ram="2GiB", context=128, tree="8x3")
    assert card == [("auto", None)] and roomy.plan.device == "cuda"
    assert 2.9 * 2**30 < roomy.plan.gpu_bytes < 3 * 2**30 and roomy.plan.num_layer_slots == 0
    assert roomy.notes == ("cuda:1 is a Paper 9000, 2.94 GiB of it to use; `device` cpu does without",)
    tight = roomy.plan.gpu_total_bytes - 1
    got = ask(pair, ram="2GiB", context=128, tree="8x3", gpu_memory=tight, device="cuda:1")
    assert card[1:] == [("cuda:1", tight)] and got.plan.gpu_bytes == tight and got.plan.streamed_bytes
    assert got.link.bytes_per_s == pytest.approx(1 << 16), "a copy takes a second on this card"
    assert (
        got.computing is Provenance.UNKNOWN
        and "no profile" in got.basis
        and got.sweep_s == got.predictions[-1].step.link_s
    )


def test_a_card_is_predicted_from_the_profile_that_was_made_on_it(pair: Pair, card: list[tuple[str, object]]) -> None:
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
        (("--device", "cuda", "--hardware", "l40"), "--device cuda is of this machine, --hardware names another"),
    ],
)
def test_a_plan_for_a_device_that_is_not_here_is_refused(
    options: tuple[str, ...], words: str, configs: list[str]
) -> None:
    outcome = shell("plan", "-m", configs[0], *options)
    assert outcome.code == 2 and not outcome.out and words in outcome.err and outcome.err.count("\n") == 1


def test_acceptance_travels_from_machine_to_machine(pair: Pair, configs: list[str]) -> None:
    """Times do not: a profile tells a GPU how many tokens a tree yields, and nothing else."""
    path = save_profile(profile_of(pair))
    wish = {"context": 512, "hardware": "l40", "tree": "chain:4"}
    plain, tree = ask(configs, profile=str(path), **wish).predictions
    assert tree.tokens_per_sweep == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert plain.step == ask(configs, **wish).predictions[0].step


def test_what_grown_trees_yield_comes_from_the_profile(pair: Pair, configs: list[str]) -> None:
    counted = (DynamicYield(num_nodes=64, depth=8, tokens_per_sweep=5.0, num_sweeps=100),)
    path = save_profile(replace(profile_of(pair), dynamic_yields=counted))
    wish = {"context": 512, "hardware": "l40", "profile": str(path)}
    fixed, named = (ask(configs, tree=tree, **wish) for tree in ("64x8", "dynamic:64x8"))
    assert named.predictions[1].tokens_per_sweep == pytest.approx(5.0) and "static" not in named.basis
    assert fixed.predictions[1].tokens_per_sweep < 3.5
    draft_s = [counted.predictions[1].step.draft_s for counted in (fixed, named)]
    shape = named.predictions[1].shape
    assert isinstance(shape, DynamicShape)
    num_passes = len(shape.draft_widths)
    assert draft_s[1] == pytest.approx(draft_s[0] * num_passes / fixed.predictions[1].shape.depth, rel=0.02)
    chosen = ask(configs, **wish).predictions[1]
    assert chosen.label.startswith("dynamic:") and chosen.tokens_per_sweep > 5


def test_memory_and_disk_are_enough_of_a_machine(configs: list[str]) -> None:
    """Seconds are those of the disk alone, over a range of tokens that pairs like this one have yielded."""
    got = ask(configs, context=512, ram="32GiB", disk_speed="3GB/s", tree="64x8")
    plain, tree = got.predictions
    assert (
        got.computing is Provenance.UNKNOWN
        and got.link.source is Provenance.GIVEN
        and got.plan.gpu_bytes is None
        and got.notes == ()
    )
    assert tree.step.total_s == pytest.approx(got.plan.streamed_bytes / 3e9) == pytest.approx(got.sweep_s)
    assert plain.step.total_s < tree.step.total_s, "without a draft more layers stay"
    low, high = tree.tokens_range
    assert 1 < low < high and tree.s_per_token_range == pytest.approx((got.sweep_s / high, got.sweep_s / low))
    given = ask(configs, context=512, ram="32GiB", disk_speed="3GB", tree="64x8", tokens_per_sweep=5.0)
    assert given.predictions[1].tokens_range == (5.0, 5.0) and given.basis == "tokens per pass as given"


def test_a_context_of_one_position_has_a_pass_of_one_row(configs: list[str]) -> None:
    """The mistake that was: its seconds made no curve, and the command ended in a traceback."""
    got = ask(configs, gpu_memory="24GiB", ram="256GiB", context=1, disk_speed="3GB")
    assert got.prompt is not None and got.prompt.rows_per_pass == 1 and got.plan.context == 1


@pytest.mark.parametrize(
    ("disk_speed", "tree", "limit"),
    [("3GB", "64x8", "link"), ("100GB", "64x8", "compute"), ("100GB", "512x16", "compute"), ("3GB", "auto", None)],
)
def test_no_pass_is_quicker_than_its_products(
    disk_speed: str, tree: str, limit: str | None, configs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were timed for the rows of a prompt's pass: 2 operations for each weight and row, 1e12 in a second."""
    monkeypatch.setattr("offload.calibration.rates.known_flops_per_s", lambda *_: 1e12)
    wish = {"ram": "32GiB", "context": 1024, "disk_speed": disk_speed}
    got = ask(configs, tree=tree, **wish)
    assert got.computing is Provenance.ASSUMED
    layers = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    for prediction in got.predictions:
        assert prediction.step.compute_s == pytest.approx(prediction.shape.num_nodes * 2 * layers / 1e12, rel=0.001)
        assert prediction.step.total_s == pytest.approx(max(prediction.step.compute_s, prediction.step.link_s))
    chosen = got.predictions[-1]
    assert limit is None or chosen.step.limit == limit
    if limit is None:
        others = [ask(configs, tree=other, **wish).predictions[-1] for other in ("4x3", "64x8", "2048x32")]
        assert chosen.s_per_token < min(other.s_per_token for other in others)

    # Where nothing was timed, the link alone counts, as it says.
    alone = ask(configs, tree=tree, **{**wish, "context": 512})
    assert alone.computing is Provenance.UNKNOWN and alone.predictions[-1].step.compute_s == 0


def test_a_laptop_from_a_file_is_predicted_like_its_figures(configs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "laptop.json"
    machine = {"ram_bytes": "32GiB", "disk_bytes_per_s": "3GB"}
    path.write_text(json.dumps(machine))
    ways = ({"hardware": str(path)}, {"ram": "32GiB", "disk_speed": "3GB"})
    estimates = [ask(configs, context=512, **way) for way in ways]
    assert estimates[0].predictions == estimates[1].predictions and estimates[0].plan == estimates[1].plan
    path.write_text(json.dumps({**machine, "memory_bytes_per_s": 60e9, "flops_per_s": 1e12}))
    whole = ask(configs, context=512, hardware=str(path), tree=estimates[0].predictions[1].label)
    assert (
        whole.computing is Provenance.GIVEN
        and whole.predictions[1].step.compute_s > 1
        and whole.predictions[1].step.draft_s > 1
    )
    with pytest.raises(UserError, match="laptop has no GPU, got 8 GiB: leave it out"):
        ask(configs, hardware=str(path), gpu_memory="8GiB")


def test_a_disk_speed_stands_for_that_of_any_machine(configs: list[str], pair: Pair) -> None:
    slow, quick = (ask(configs, hardware="rtx4090", ram="64GiB", tree="64x8", disk_speed=gb) for gb in ("1GB", "8GB"))
    assert slow.sweep_s == pytest.approx(8 * quick.sweep_s, rel=0.01) and slow.predictions[1].step.limit == "disk"
    save_profile(profile_of(pair))
    here = ask(pair, ram="1GiB", disk_speed="3GB", tree="chain:4")
    assert here.link.bytes_per_s == 3e9 and here.basis.startswith("profile ") and here.predictions[0].s_per_token == 0.5
    with pytest.raises(UserError, match="`disk_speed` must be bytes per second, got"):
        ask(pair, disk_speed="fast")


OPTIONS: dict[str, Any] = {"ram": "1GiB", "device": "cpu"}
IMPOSSIBLE = [("num_hidden_layers", 2 * 10**6), ("num_hidden_layers", 10**12), ("head_dim", "16"), ("head_dim", [16]),
              ("num_key_value_heads", "2"), ("num_key_value_heads", [2]), ("hidden_size", 10**30)]  # fmt: skip


@pytest.mark.usefixtures("_instant_link")
@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_sizes_that_are_none_are_refused_at_once(family: str, name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]().to_dict() | {name: value}))
    with pytest.raises(
        UserError,
        match=f"{name} (in config.json )?must be a whole number|model type mixtral",
    ):
        estimate(LoadOptions(tmp_path / "config.json", **OPTIONS))


@pytest.mark.usefixtures("_instant_link")
def test_a_pair_of_two_vocabularies_is_refused(tmp_path: Path) -> None:
    models = [save(build(FAMILIES["llama"]()), tmp_path / name) for name in ("target", "draft")]
    for model, pieces in zip(models, ([" one"], [f" {number}" for number in range(20)]), strict=True):
        save_tokenizer(model, pieces)
    rule = r"must share the target's vocabulary, \d+ tokens differ, the first has the id \d+: 'Ġone' in the target"
    with pytest.raises(UserError, match=rule):
        estimate(LoadOptions(*models, **OPTIONS))
    save_tokenizer(models[1], [" one"])
    estimate(LoadOptions(*models, **OPTIONS))


def test_nobody_is_told_to_raise_a_context_that_is_the_longest(tmp_path: Path) -> None:
    model, request = save(build(FAMILIES["llama"]()), tmp_path), Request([5] * 512)
    with pytest.raises(UserError, match="context of 512, the longest that this model is run with: shorten the prompt"):
        offload.load(model, ram="1GiB", threads=1, request=request)
    with pytest.raises(UserError, match="context of 511: raise `context`, shorten the prompt"):
        offload.load(model, ram="1GiB", threads=1, context=511, request=request)


UNKNOWN = [
    (Sampling(temperature=1, min_p=0.2), "min-p"),
    (Sampling(presence_penalty=1), "penalties or biases"),
    (Sampling(logit_bias={5: 1}), "penalties or biases"),
]


@pytest.fixture(scope="module")
def files(pair: Pair) -> ModelFiles:
    return ModelFiles(*map(describe, pair))


def finder(files: ModelFiles, profile: str | None = None) -> FindProfile:
    options = LoadOptions(ram="1GiB")
    room = budget_of(options)
    object.__setattr__(options, "profile", profile)  # that there is such a file is another matter
    setup = Setup(files=files, options=options, tree=parse_tree("auto"), device=HOST, budget=room)
    return setup.find_profile


@pytest.mark.parametrize(("sampling", "words"), UNKNOWN, ids=str)
def test_one_that_was_found_is_passed_over(files: ModelFiles, sampling: Sampling, words: str) -> None:
    assert finder(files)(sampling, "match") == (None, f"no profile holds for a run with {words}")


@pytest.mark.parametrize(("sampling", "words"), UNKNOWN, ids=str)
def test_one_that_was_named_is_refused(files: ModelFiles, sampling: Sampling, words: str) -> None:
    with pytest.raises(UserError, match=f"with {words}, got `profile` .*: leave one of them out"):
        finder(files, "tuned.json")(sampling, "match")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(min_p=0.5), Sampling(temperature=0.6, top_k=5)], ids=str)
def test_others_are_looked_for(files: ModelFiles, sampling: Sampling) -> None:
    assert "no profile for this pair of models" in finder(files)(sampling, "match")[1]
