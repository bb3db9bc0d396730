"""Which kernels a run takes: those that agree with what runs without them, at the sizes of its own models."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from marks import DEVICE, ON_DEVICE, needs_triton
from passes import text_scores
from plans import plan_memory
from test_device_path import BUDGETS, TIERS, device, pair_of, place_layers  # noqa: F401
from test_families import config_of, tiny_model
from test_tiny import prompts
from tiny import FAMILIES, save

import offload
from offload.calibration import kernels as comparisons
from offload.calibration import link as device_link
from offload.calibration import startup
from offload.calibration.kernel_shapes import Heads, Int4Shape, Norm, Shapes, shapes_of
from offload.calibration.kernels import KernelChoice, choose_kernels
from offload.calibration.trial import ComparisonOutcome, KernelComparison, compare, rows_of, used
from offload.checkpoint.open import open_checkpoint
from offload.cli.run_lines import kernel_line
from offload.drafting.model_drafter import ModelDrafter
from offload.engine.build import resident_model
from offload.kernels.jit import is_for_kernels
from offload.kernels.kv_commit import kv_commit_reference
from offload.kernels.registry import KERNELS, REFERENCES
from offload.kernels.rms_norm import FORMS
from offload.model.kv_cache import KVCache
from offload.model.path_attention import path_attention
from offload.model.tree_model import TreeModel
from offload.planning.choice import TreeRoom, most_nodes
from offload.planning.cost_model import Curve, Traffic
from offload.planning.knowledge import Knowledge
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.spec import parse_tree

ROOT = Path(__file__).resolve().parents[2]
pytestmark = ON_DEVICE
SMALL = Shapes(
    heads=(
        Heads(4, 2, 16, 16, torch.float16, (None, 3)),
        Heads(2, 2, 24, 16, torch.float32, (None,), cap=5.0, has_sinks=True),
    ),
    num_layers=2,
    num_slots=100,
    num_nodes=(1, 5),
    num_scored=(5,),
    num_prefix=(8,),
    vocab_sizes=(300,),
    norms=tuple(Norm(48, form, dtype=torch.float16) for form in FORMS),
    int4_shapes=(
        Int4Shape(192, 320, dtype=torch.float16),
        Int4Shape(64, 96, group=32, block_rows=32, dtype=torch.float16),
    ),
    num_drafted=(1, 5),
)


@pytest.fixture(autouse=True)
def few_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter code is not compiled, so lengths differ in nothing but the time they take."""
    monkeypatch.setattr(comparisons, "_PATHS", (2, 16))


def comparison(agrees: Callable[[], bool] = lambda: True, kernel: str = "thing") -> KernelComparison:
    return KernelComparison(kernel, "N 1", lambda: None, lambda: None, agrees)


def refuses() -> bool:
    raise RuntimeError("out of shared memory\nand more")


def test_a_kernel_that_is_wrong_or_does_not_run_is_not_used_and_told() -> None:
    right, wrong, broken = compare(comparison()), compare(comparison(lambda: False)), compare(comparison(refuses))
    assert (right.reason, wrong.reason) == ("", "its results differ")
    assert broken == ComparisonOutcome("thing", "N 1", "RuntimeError: out of shared memory")
    assert used([right]) == {"thing": True}
    for bad in (wrong, broken):
        assert used([right, bad]) == used([bad, right]) == {"thing": False}, "wrong once is wrong"
    # What runs is told and why others do not.
    outcomes = [compare(comparison(kernel="quick")), compare(comparison(refuses, kernel="broken"))]
    assert kernel_line(outcomes) == "kernels: quick; left out: broken (RuntimeError: out of shared memory)"
    rows = json.loads(json.dumps(rows_of(outcomes)))
    quick, broken = [(row["kernel"], row["is_used"], row["reason"]) for row in rows]
    assert quick == ("quick", True, "") and broken == ("broken", False, "RuntimeError: out of shared memory")


def test_a_kernel_that_breaks_the_device_is_named() -> None:
    """What fails afterwards would otherwise be blamed for it."""

    class Lost(FakeDevice):
        def synchronize(self, event: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match=r"thing at N 1 has left the device unusable \(RuntimeError: out of shared"):
        compare(comparison(refuses), Lost())
    assert not compare(comparison(), Lost()).reason, "nothing is waited for where nothing failed"


@needs_triton
def test_kernels_that_agree_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(FakeDevice, "torch_device", torch.device(DEVICE))
    chosen = choose_kernels(SMALL, FakeDevice())
    outcomes = chosen.comparisons
    assert chosen.kernels == KERNELS and not any(outcome.reason for outcome in outcomes), outcomes
    assert {outcome.kernel for outcome in outcomes} == set(KERNELS._fields)
    stems = {path.stem for path in (ROOT / "kernels").glob("*_*.py")}
    of_weights_and_states = ("expand_", "encode_", "int4_", "exponents_", "residual_", "gated_")
    chosen_elsewhere = (*of_weights_and_states, "machine_", "widened_", "path_attention_")  # code of a CPU
    assert set(KERNELS._fields) == {stem for stem in stems if not stem.startswith(chosen_elsewhere)}
    attended = [outcome.shape for outcome in outcomes if outcome.kernel == "path_attention"]
    assert len(attended) == 2 * 3 and any("window 3" in shape for shape in attended)


@needs_triton
@pytest.mark.parametrize("name", KERNELS._fields)
def test_a_kernel_that_computes_something_else_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "torch_device", torch.device(DEVICE))

    def wrong(*args: Any, **options: Any) -> Any:
        if name == "kv_commit":
            return getattr(KERNELS, name)(args[0], args[1] + 1, args[2])
        out = getattr(KERNELS, name)(*args, **options)
        return out.roll(1, 0 if out.shape[0] > 1 else -1)

    monkeypatch.setattr(comparisons, "KERNELS", KERNELS._replace(**{name: wrong}))
    chosen = choose_kernels(SMALL, FakeDevice())
    assert chosen.kernels == KERNELS._replace(**{name: getattr(REFERENCES, name)})
    assert {comparison.kernel for comparison in chosen.comparisons if comparison.reason} == {name}


@needs_triton
def test_attention_whose_bits_depend_on_other_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within rounding is not enough of it: a row's bits are its own."""
    monkeypatch.setattr(FakeDevice, "torch_device", torch.device(DEVICE))

    def by_number_of_rows(query_HTK: torch.Tensor, *others: Any) -> torch.Tensor:
        assert KERNELS.path_attention is not None
        return KERNELS.path_attention(query_HTK, *others) * (1 + 2**-9 * (query_HTK.shape[1] > 1))

    monkeypatch.setattr(comparisons, "KERNELS", KERNELS._replace(path_attention=by_number_of_rows))
    assert choose_kernels(SMALL, FakeDevice()).kernels.path_attention is None


def test_comparisons_leave_the_callers_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    for comparison in comparisons.comparisons(SMALL, "cpu"):
        comparison.rival()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["qwen3-sliding", "gemma2", "gpt_oss", "deepseek_v3"])
def test_sizes_are_those_of_the_run(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    model = resident_model(open_checkpoint(save(tiny_model(config), tmp_path / "target")), "float32")
    draft = TreeModel(open_checkpoint(save(tiny_model(FAMILIES["llama"]()), tmp_path / "draft")), "bfloat16")
    plan = plan_memory((model.checkpoint, None), num_nodes=40, dtype="float32", ram="4GiB", gpu="4GiB", context=200)
    shapes = shapes_of(model, plan, Sampling(temperature=0.4), draft)
    target_heads, draft_heads = shapes.heads
    seen = set[tuple[int, ...]]()

    def note(query: Any, key: Any, value: Any, *others: Any) -> Any:
        seen.add((query.shape[0], key.shape[0], query.shape[2], value.shape[2]))
        return path_attention(query, key, value, *others)

    model.set_attention_kernel(note)
    text_scores(model, torch.arange(6))
    assert seen == {target_heads[:4]}, "what it is called with"
    assert (target_heads.cap is not None, target_heads.has_sinks) == (family == "gemma2", family == "gpt_oss")
    assert set(target_heads.windows) == model.windows and target_heads.dtype == torch.float32
    assert draft_heads == Heads(4, 2, 16, 16, torch.bfloat16)
    assert (shapes.temperatures, shapes.num_scored) == ((0.4,), (plan.num_logits_rows,))
    assert (shapes.vocab_sizes, shapes.num_layers) == ((model.vocab_size,), model.num_layers)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter stands in for a card")
def test_a_run_reports_its_kernels_and_writes_the_same_tokens(
    device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """The kernels themselves decode, in the interpreter; the text does not tell."""
    target, draft, wanted = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["pinned"])
    monkeypatch.setattr(startup, "is_for_kernels", lambda place: True)
    with offload.load(target, draft, context=128, tree="6x2", threads=1, **BUDGETS) as decoder:
        result = decoder.generate(prompts()[1], max_new_tokens=6)
        assert result.token_ids == wanted[:6]
        text = decoder.begin([5], Sampling())
        assert text.sampler.kernels == KERNELS._replace(multiply_int4=None), "no draft at 4 bits is there"
        assert {cache._gather for cache in text.caches} == {KERNELS.kv_commit}
        assert decoder.target._model.attend is KERNELS.path_attention
        assert decoder.drafter.model.attend is KERNELS.path_attention
        assert decoder.invariance.holds, "it is free there, and so it is on"
    rows = result.as_dict()["kernels"]
    assert {row["kernel"] for row in rows} == set(KERNELS._fields) - {"multiply_int4"}
    assert all(row["is_used"] for row in rows)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter stands in for a card")
def test_a_draft_at_4_bits_multiplies_by_the_kernel(
    device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """And writes the same text; without a card nothing is compared, and weights are expanded."""
    target, draft, _ = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["pinned"])
    ids, calls = list[list[int]](), list[int]()

    def multiply(row_MK: torch.Tensor, *words: Any) -> torch.Tensor:
        calls.append(len(row_MK))
        assert KERNELS.multiply_int4 is not None
        return KERNELS.multiply_int4(row_MK, *words)

    monkeypatch.setattr(comparisons, "KERNELS", KERNELS._replace(multiply_int4=multiply))
    # the others, which are slow here, run in the test above
    monkeypatch.setattr(comparisons, "comparisons", comparisons._products)
    for is_card in (False, True):
        monkeypatch.setattr(startup, "is_for_kernels", lambda place, is_card=is_card: is_card)
        options = {"dtype": "float16", "draft_dtype": "int4", "context": 128, "tree": "6x2", "threads": 1}
        with offload.load(target, draft, **options, **BUDGETS) as decoder:
            num_compared = len(calls)
            assert bool(num_compared) is is_card
            result = decoder.generate(prompts()[1], max_new_tokens=6)
            assert (len(calls) > num_compared) is is_card
            ids.append(result.token_ids)
        used_kernels = {row["kernel"] for row in result.as_dict().get("kernels", ()) if row["is_used"]}
        assert used_kernels == ({"multiply_int4"} if is_card else set())
    assert ids[0] == ids[1]


def test_an_automatic_tree_goes_by_the_times_of_the_kernels_that_run(
    device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """They are chosen before anything is timed."""
    target, draft, wanted = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["pinned"])
    chosen = REFERENCES._replace(path_attention=partial(path_attention), kv_commit=partial(kv_commit_reference))
    order: list[str] = []

    def choose(shapes: Shapes, card: FakeDevice) -> KernelChoice:
        order.append("kernels")
        return KernelChoice(chosen, ())

    def sweep_curve(model: TreeModel, slab: Any, sizes: Any) -> Curve:
        order.append("sweeps with these" if model.attend is chosen.path_attention else "sweeps with others")
        return Curve((1, 64), (1e-3, 2e-3))

    def draft_curve(drafter: ModelDrafter, sampler: Sampler, prompt: Any, cache: KVCache) -> Curve:
        is_chosen = cache._gather is chosen.kv_commit and sampler.kernels == chosen
        is_chosen &= drafter.model.attend is chosen.path_attention
        order.append("drafts with these" if is_chosen else "drafts with others")
        return Curve((1, 64), (1e-4, 2e-4))

    monkeypatch.setattr(startup, "is_for_kernels", lambda place: True)
    monkeypatch.setattr(startup, "choose_kernels", choose)
    monkeypatch.setattr(device_link, "_COPY_BYTES", 1 << 16)
    for curve in (sweep_curve, draft_curve):
        monkeypatch.setattr(startup, curve.__name__, curve)
    with offload.load(target, draft, context=128, tree="auto", threads=1, profile="none", **BUDGETS) as decoder:
        assert decoder.generate(prompts()[1], max_new_tokens=6).token_ids == wanted[:6]
        assert decoder.target._model.attend is chosen.path_attention
    assert order == ["kernels", "sweeps with these", "drafts with these"]


def test_a_tree_that_is_to_be_chosen_has_as_many_nodes_as_there_is_room_for() -> None:
    def largest(wish: str, most: int) -> int:
        room = TreeRoom(lambda num_nodes: Traffic(1, 1) if num_nodes <= most else None)
        return most_nodes(parse_tree(wish), Knowledge(), room)

    assert [largest("auto", most) for most in (5000, 512, 200, 1)] == [2048, 512, 192, 1]
    assert [largest(wish, 5000) for wish in ("none", "24x6", "dynamic:700x9")] == [1, 24, 700]


def test_without_a_card_nothing_is_compared(tmp_path: Path) -> None:
    target = save(tiny_model(config_of("llama")), tmp_path)
    assert not is_for_kernels("cpu")
    with offload.load(target, ram="1GiB", context=64, threads=1, device="cpu") as decoder:
        assert decoder.comparisons == () and "kernels" not in decoder.generate([5], max_new_tokens=1).as_dict()
        assert decoder.begin([5], Sampling()).sampler.kernels == REFERENCES
