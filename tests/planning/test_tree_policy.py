"""One tree for all that ask, on each machine: what decodes, plans, tunes and measures mean one shape and one yield."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from expected import expected_tokens
from known import selector
from plans import model_shape
from test_device_planner import CONFIGS, GIB

import offload
from offload.checkpoint.checkpoint import ModelFiles
from offload.engine.resolve import resolve
from offload.engine.setup import Setup
from offload.errors import UserError
from offload.memory.planner import plan_memory
from offload.model.headers import describe
from offload.planning.acceptance import DynamicYield
from offload.planning.budget import budget_of
from offload.planning.choice import TreeChoice, TreeRoom, first_choices, planned_nodes
from offload.planning.cost_model import Costs, Curve, costs_on
from offload.planning.hardware import KNOWN, Hardware
from offload.planning.load_options import LoadOptions
from offload.planning.profile import Identity, Machine, Profile, find_profile, save_profile
from offload.planning.search import TreeSearch, range_for
from offload.reports import estimate as estimating
from offload.reports.drafts import compare_drafts
from offload.reports.estimate import estimate
from offload.reports.tune import choice_from
from offload.sampling_options import Sampling
from offload.streaming.device import HOST
from offload.trees.spec import label_of, parse_tree
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape, Topology, best_first, chain, isotonic

CONTEXT, RAM = 128, 2 << 30
NAMED = ("none", "64x16", "24x6", "8x3", "40x2", "dynamic:24x6", "grown:64x16", "chain:4", "sequences:3x5")
LINK_BYTES_PER_S = 2e7
COSTS = Costs(compute_s=Curve((1, 64, 128), (0.1, 0.11, 0.4)), draft_step_s=Curve((1, 64), (1e-3, 2e-3)), verify_s=0.0,
              link_bytes_per_s=LINK_BYTES_PER_S)  # fmt: skip


def profile_with(identity: Identity, **measured: Any) -> Profile:
    """A profile of a tune that measured this."""
    options = {"target_name": "big", "draft_name": "small", "created": "2026-01-01T00:00:00+00:00", "num_tokens": 1536,
           "num_threads": 1}  # fmt: skip
    return Profile(identity=identity, **options, **measured)


ACCEPTANCE = (0.71, 0.12, 0.05, 0.02, 0.03, 0.01)


def profile_of(files: ModelFiles, counted: tuple[DynamicYield, ...] = ()) -> Profile:
    assert files.draft is not None
    identity = Identity.from_models(files.target, files.draft, Sampling(), "match", Machine.here("float32"))
    measured = {"acceptance": ACCEPTANCE, "standard_error": (0.01,) * len(ACCEPTANCE)}
    return profile_with(identity, **measured, costs=COSTS, dynamic_yields=counted)


COUNTED = (DynamicYield(num_nodes=16, depth=8, tokens_per_sweep=5.0, num_sweeps=40),)


@pytest.fixture(scope="module")
def files(pair: tuple[Path, Path]) -> ModelFiles:
    return ModelFiles(*map(describe, pair))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is as the profile says: callers measure it one after the other, and it drifts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("offload.calibration.link.link_bytes_per_s", lambda *_, **__: LINK_BYTES_PER_S)


def decoded(pair: tuple[Path, Path], tree: str) -> TreeChoice:
    with offload.load(*pair, RAM, tree, context=CONTEXT, threads=1) as decoder:
        return decoder.tree_choice(Sampling())


def is_predicted(pair: tuple[Path, Path], tree: str, choice: TreeChoice, profile: Path | None = None) -> bool:
    """Whether `plan` says the same of a tree as a run has chosen; for another machine where a profile is named."""
    options = LoadOptions(*map(str, pair), ram=RAM, context=CONTEXT, tree=tree, profile=profile)
    hardware = None if profile is None else "l40"
    row = estimate(options, hardware=hardware).predictions[-1]
    assert row.label in (label_of(choice.shape), tree.replace("grown", "dynamic"))
    tokens = choice.tokens_per_sweep
    expected = (tokens, tokens) if profile != Path("none") else range_for(1.0).around(tokens)
    return row.shape == choice.shape and row.tokens_range == pytest.approx(expected)


@pytest.mark.parametrize("counted", [(), COUNTED])
def test_callers_with_a_profile_agree(
    counted: tuple[DynamicYield, ...], pair: tuple[Path, Path], files: ModelFiles
) -> None:
    profile = profile_of(files, counted)
    path, setup = save_profile(profile), resolve(LoadOptions(*pair, ram=RAM, context=CONTEXT))
    choice = decoded(pair, "auto")
    assert choice == choice_from(profile, Sampling(), setup, setup) and choice.candidates and choice.is_dynamic
    assert is_predicted(pair, "auto", choice) and choice.shape.num_nodes > 16, "the choice must not be trivial"
    with offload.load(*pair, RAM, "64x16", context=CONTEXT, threads=1) as decoder:
        for tree in NAMED:
            choice = decoder.run([5], Sampling(), max_new_tokens=1, tree=tree).tree_choice
            assert is_predicted(pair, tree, choice), tree
            assert is_predicted(pair, tree, choice, path), "yields do not depend on the machine"
            if parse_tree(tree).kind == "best":
                assert choice.shape == chosen(tree, profile, profile.identity.rule).shape


def test_callers_without_a_profile_agree(pair: tuple[Path, Path]) -> None:
    with offload.load(*pair, RAM, "64x16", context=CONTEXT, threads=1) as decoder:
        assert "no profile for this pair" in decoder.tree_choice(Sampling()).why
        for tree in NAMED:
            choice = decoder.run([5], Sampling(), max_new_tokens=1, tree=tree).tree_choice
            assert is_predicted(pair, tree, choice, Path("none")), tree
            wanted = parse_tree(tree).build()
            assert choice.shape == wanted
            if isinstance(wanted, Topology):
                assert choice.tokens_per_sweep == pytest.approx(expected_tokens(wanted, DEFAULT))


DEFAULT = [*DEFAULT_ACCEPTANCE, *[0.0] * 32]


def chosen(tree: str, profile: Profile | None, rule: str = "match") -> TreeChoice:
    return selector(tree, find=lambda *_: (profile, "")).for_run(Sampling(), rule)


def test_a_named_tree_follows_the_measured_acceptance(files: ModelFiles) -> None:
    """The defect that began this: 64x16 was built from one acceptance and predicted from another."""
    choice, p_K = chosen("64x16", profile_of(files)), isotonic(ACCEPTANCE)
    assert choice.shape == best_first(p_K, 64, 16) != best_first(DEFAULT_ACCEPTANCE, 64, 16)
    assert choice.tokens_per_sweep == pytest.approx(expected_tokens(choice.shape, p_K))


def test_yields_are_of_the_product_form_or_were_counted(files: ModelFiles) -> None:
    choice = chosen("chain:6", profile_of(files))
    product = sum(isotonic(ACCEPTANCE)[0] ** depth for depth in range(7))
    assert choice.shape == chain(6) and choice.tokens_per_sweep == pytest.approx(product)
    counted = chosen("dynamic:16x8", profile_of(files, COUNTED))
    assert counted.shape == DynamicShape(16, 8) and counted.tokens_per_sweep == pytest.approx(5.0)
    with pytest.raises(UserError, match="rule sequoia is exact only without that"):
        chosen("dynamic:16x8", None, "sequoia")
    # A smaller forest has the same trees.
    large, small = (TreeSearch(isotonic(ACCEPTANCE), *bounds) for bounds in ((512, 96), (64, 16)))
    assert large.whole.tree(64, 16) == small.whole.tree(64, 16)
    assert large.expected(64, 16) == pytest.approx(small.expected(64, 16))


@pytest.mark.parametrize("size", [(1, 4), (40, 1), (64, 2), (300, 40), (7, 99)])
def test_a_named_tree_has_as_many_nodes_as_there_are(size: tuple[int, int], files: ModelFiles) -> None:
    choice = chosen("{}x{}".format(*size), profile_of(files))
    most = sum(len(ACCEPTANCE) ** depth for depth in range(size[1] + 1))
    assert choice.shape.num_nodes == min(size[0], most) and choice.shape.depth <= size[1]


def test_other_runs_do_not_need_the_profile_that_a_tree_does_without(
    pair: tuple[Path, Path], files: ModelFiles
) -> None:
    path = save_profile(profile_of(files))
    assert find_profile(profile_of(files).identity)[0] is not None
    other = Sampling(temperature=0.5)
    with offload.load(*pair, RAM, "8x3", context=CONTEXT, threads=1, profile=path) as decoder:
        assert decoder.run([5], other, max_new_tokens=1, tree="chain:3").tree_choice.shape == chain(3)
        with pytest.raises(UserError, match=r"temperature 0\.0, not 0\.5"):
            decoder.run([5], other, max_new_tokens=1, tree="8x3")


LONG = 2048
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
def headers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    paths = [tmp_path_factory.mktemp(name) / "config.json" for name in ("Llama-2-70B", "Llama-2-7B")]
    for path, name in zip(paths, ("Llama-2-70B", "Llama-2-7B"), strict=True):
        path.write_text(json.dumps(CONFIGS[name]))
    return [str(path) for path in paths]


def usual_profile(costs: Costs) -> Profile:
    """What a tune of such a machine would have found of a pair that is like the usual one."""
    identity = Identity(target="0" * 64, draft="1" * 64, rule="match", temperature=0.0, top_p=1.0, top_k=0,
                        machine=Machine.here("bfloat16"))  # fmt: skip
    errors = (0.01,) * len(DEFAULT_ACCEPTANCE)
    figures = {"acceptance": DEFAULT_ACCEPTANCE, "standard_error": errors}
    return profile_with(identity, **figures, costs=costs, dynamic_yields=())


class Capped(Setup):
    """Planted: a way to trees that has a cap of its own, as each caller once had."""

    @property
    def room(self) -> TreeRoom:  # type: ignore[override]
        return TreeRoom(self.traffic_of, 512, self.minimal_plan.context)


def named(headers: list[str], machine: Hardware, folder: Path, capped: str = "") -> dict[str, str]:
    """By caller the tree that it chooses; one of them may have a cap of its own."""

    def seen_by(caller: str, setup: Setup) -> Setup:
        is_capped = caller == capped
        return Capped(**{field.name: getattr(setup, field.name) for field in fields(setup)}) if is_capped else setup

    described, place = ModelFiles(*map(describe, headers)), "cuda" if machine.gpu_bytes else None
    options = LoadOptions(context=LONG, ram=machine.ram_bytes, gpu_memory=machine.gpu_bytes)
    room = budget_of(options, place)
    context = plan_memory(ModelFiles(described.target), room, 1).context
    costs = costs_on(machine, *(model_shape(model) for model in described if model is not None), context // 2)
    profile = usual_profile(costs)
    path, said = folder / "profile.json", folder / "machine.json"
    path.write_text(json.dumps(profile.as_dict()))
    values = {field.name: getattr(machine, field.name) for field in fields(machine)}
    said.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimating, "resolve", lambda *given, **changes: seen_by("plan", resolve(*given, **changes)))
        plan = estimating.estimate(LoadOptions(*headers, context=LONG, profile=str(path)), hardware=str(said))
    options = replace(options, profile="none")
    setup = Setup(files=described, options=options, tree=parse_tree("auto"), device=HOST, budget=room)
    known = setup.knowledge(setup.settings()).with_profile(profile, "")
    room = seen_by("generate", setup).room
    choices = first_choices(setup.tree, known, room, "match")
    settled, decoded = planned_nodes(setup.tree, known, room, "match", choices), choices[1]
    num_nodes = decoded.shape.num_nodes
    assert num_nodes <= settled <= 4 * num_nodes, "memory is planned for the tree that was chosen, and for it to grow"
    assert room.traffic_of(settled) == room.traffic_of(num_nodes), "as far as no more bytes move for that"
    return {
        "plan": label_of(plan.predictions[-1].shape),
        "generate": label_of(decoded.shape),
        "tune": label_of(choice_from(profile, Sampling(), seen_by("tune", setup), setup).shape),
    }


@pytest.mark.parametrize("name", MACHINES)
def test_every_caller_names_the_same_tree(name: str, headers: list[str], tmp_path: Path) -> None:
    trees = named(headers, MACHINES[name], tmp_path)
    assert len(set(trees.values())) == 1, trees


def test_sizes_follow_what_rows_cost(headers: list[str], tmp_path: Path) -> None:
    """Large where a slow link leaves rows free, small where computing is what takes the time."""
    names = ("slow link", "l40", "h200", "server", "laptop")
    trees = [named(headers, MACHINES[name], tmp_path)["plan"] for name in names]
    link, l40, h200, server, laptop = (int(tree.split(":")[1].split("x")[0]) for tree in trees)
    assert link == 2048 >= l40 > 512 > h200 > max(server, laptop), trees


@pytest.mark.parametrize("caller", ["plan", "generate", "tune"])
def test_a_cap_of_one_caller_is_noticed(caller: str, headers: list[str], tmp_path: Path) -> None:
    trees = named(headers, MACHINES["slow link"], tmp_path, caller)
    assert trees[caller] != trees["tune" if caller != "tune" else "generate"], trees
    assert int(trees[caller].split(":")[1].split("x")[0]) == 512


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "dtype": "bfloat16",
         "max_position_embeddings": 8192, "tie_word_embeddings": False}  # fmt: skip
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8}  # fmt: skip
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8}  # fmt: skip
# A fast device with room for a copy, the same beside a link that is nearly as fast as it, and a slow one.
DRAFT_MACHINES = {
    "fast": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 3e12, "flops_per_s": 9e14, "link_bytes_per_s": 12e9},
    "wide": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 3e11, "flops_per_s": 4e14, "link_bytes_per_s": 200e9},
    "slow": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 1e11, "flops_per_s": 2e13, "link_bytes_per_s": 25e9},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    paths = [tmp_path_factory.mktemp(name) / "config.json" for name in ("large", "small")]
    for path, sizes in zip(paths, (LARGE, SMALL), strict=True):
        path.write_text(json.dumps({**LLAMA, **sizes}))
    return str(paths[0]), str(paths[1])


@pytest.mark.parametrize(("name", "best"), [("fast", "copy"), ("wide", "small"), ("slow", "small")])
def test_the_best_draft_follows_from_the_machine(name: str, best: str, models: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**DRAFT_MACHINES[name], "ram_bytes": "512GiB"}))
    ways = compare_drafts(LoadOptions(*models, context=2048), str(path))
    assert all(way.prediction for way in ways[:3]), [way.refusal for way in ways]
    plain = {way.draft: way for way in ways if not way.draft_dtype}
    kinds = {"small": models[1], "copy": "self:int4", "none": None}
    seconds = {kind: plain[draft].prediction.s_per_token for kind, draft in kinds.items()}  # type: ignore[union-attr]
    assert min(seconds, key=seconds.__getitem__) == best, seconds
