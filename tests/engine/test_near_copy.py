"""A copy of the target, or any draft, in fewer bits: the same text, more guesses, memory as planned."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrix import matrix
from passes import text_scores
from plans import model_shape, plan_memory
from quantised import save_quantised
from test_families import WORKING, config_of
from tiny import FAMILIES, Pair, build, save, save_pair

import offload
from offload.checkpoint.open import open_checkpoint
from offload.errors import UserError
from offload.packing.pack import pack
from offload.planning.draft_kinds import files_of

PROMPT, TREE, CONTEXT = list(range(3, 15)), "dynamic:16x15", 256
FAMILY = ("llama", "llama-tied", "qwen3", "gemma2", "phi3")


def run(target: Path, draft: str | Path | None, *, temperature: float = 0.0, **options: object) -> SimpleNamespace:
    given = {"tree": TREE if draft else "none", "lookup": False, "profile": "none", "context": CONTEXT, **options}
    with offload.load(str(target), draft and str(draft), **given) as decoder:
        generation = decoder.generate(PROMPT, max_new_tokens=48, temperature=temperature, seed=3)
        held = getattr(getattr(decoder.drafter, "model", None), "held", None)
        return SimpleNamespace(
            ids=generation.token_ids, tokens=generation.stats.tokens_per_sweep, plan=decoder.plan,
            held_bytes=0 if held is None else held.num_bytes,
        )  # fmt: skip


def slots_alone(target: Path, draft: str) -> int:
    """A budget with room for three slots and no more."""
    files = files_of([open_checkpoint(target)], draft, None)
    roomy = plan_memory(files, ram=1 << 40, dtype="auto", context=CONTEXT, num_nodes=16)
    passing_bytes = model_shape(files.draft).beside_bytes if files.draft else 0
    return roomy.fixed_bytes + max(3 * max(roomy.layer_bytes), passing_bytes) + 100


@matrix("family, draft", [("llama", "self:int8"), ("llama-tied", "self:int4")], daily=1)
def test_the_text_is_the_same_with_a_copy_and_without(family: str, draft: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    config.num_hidden_layers = 8  # or what passes while layers are rounded has all of them stay
    target = save(build(config), tmp_path / "target")
    ram = slots_alone(target, draft)
    for temperature in (0.0, 0.8):
        alone = run(target, None, temperature=temperature)
        whole, streamed = (run(target, draft, temperature=temperature, ram=size) for size in (None, ram))
        assert streamed.plan.streamed_bytes and not whole.plan.streamed_bytes
        assert alone.ids == whole.ids == streamed.ids
        assert whole.tokens > 2, "a copy guesses badly"


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_text_is_the_same_with_a_draft_in_fewer_bits(dtype: str, pair: Pair) -> None:
    target, draft = pair
    alone, plain, held = run(target, None), run(target, draft), run(target, draft, draft_dtype=dtype)
    assert alone.ids == plain.ids == held.ids
    assert held.plan.draft_bytes < plain.plan.draft_bytes and held.held_bytes


def test_a_router_is_no_product_though_it_is_derived_from_one(tmp_path: Path) -> None:
    target, draft = save_pair(config_of("llama4_text"), tmp_path, noise=0.003)
    alone, held = (run(target, beside, draft_dtype=dtype) for beside, dtype in ((None, None), (draft, "int8")))
    assert alone.ids == held.ids
    assert held.held_bytes and held.tokens > 1.2, "a draft whose experts are chosen at random guesses badly"


@matrix("recipe", ["fp8-block", "packed"], daily=1)
def test_coded_weights_are_rounded_as_well(recipe: str, pair: Pair, tmp_path: Path) -> None:
    """A copy of a coded target, and a coded draft: what is held has no words left to expand."""
    if recipe == "packed":
        halves = [save(build(FAMILIES["llama"](), seed).bfloat16(), tmp_path / f"half{seed}") for seed in (0, 1)]
        coded = [pack(half, tmp_path / f"packed{half.name}", progress=lambda *_: None).folder for half in halves]
    else:
        coded = [save_quantised(model, recipe, tmp_path / model.name).directory for model in pair]
    alone, copied = (run(coded[0], draft, dtype="float32") for draft in (None, "self:int4"))
    held = run(coded[0], coded[1], draft_dtype="int4", dtype="float32")
    assert alone.ids == copied.ids == held.ids
    assert copied.held_bytes and held.held_bytes
    assert copied.tokens > 2, "a copy guesses badly"


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """New memory holds NaN until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned_memory")
@matrix("family", [*FAMILY, *WORKING], always=["llama", "llama-tied", "mamba"], daily=3)
@matrix("bits", [4, 8], daily=1)
def test_what_is_held_is_what_was_planned_and_the_model_runs(family: str, bits: int, tmp_path: Path) -> None:
    """Routers and the like, and what is read beside its module, stay what they are in plans and in memory."""
    from offload.engine.build import resident_model

    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    checkpoint = open_checkpoint(save(build(config), tmp_path / "target"))
    held = files_of([checkpoint, checkpoint], "draft", f"int{bits}").draft
    assert held is not None
    shape, model = model_shape(held), resident_model(held, "auto")
    others = {tensor.data_ptr(): tensor for layer in model._layers for tensor in layer.state_dict().values()}
    small = [tensor for tensor in others.values() if not tensor.is_meta]
    storages = sum(tensor.untyped_storage().nbytes() for tensor in small)
    assert model.held is not None
    # tables of decays that a model makes itself are read with its layers, and dropped
    tables = (entry for name, entry in checkpoint.tensors.items() if name.endswith(("_decay", "slope_rate")))
    dropped_bytes = sum(4 * math.prod(entry.shape) for entry in tables)
    planned_bytes = sum(shape.layer_bytes) + shape.scratch_bytes
    assert model.held.num_bytes + storages + dropped_bytes == planned_bytes
    with torch.inference_mode():
        assert text_scores(model, torch.tensor(PROMPT)).isfinite().all()
    model.close()


def test_scales_of_the_wrong_group_cost_guesses_and_change_no_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run(pair[0], "self:int4")
    from offload.model import quantised_draft as held

    def planted(*given: Any) -> Any:
        words = encode(*given)
        return words._replace(scale_GN2=words.scale_GN2.roll(1, 1))  # of the row before

    encode = held.encode_int4
    monkeypatch.setattr(held, "encode_int4", planted)
    wrong = run(pair[0], "self:int4")
    assert wrong.ids == right.ids
    assert wrong.tokens < 0.8 * right.tokens


def test_what_makes_no_sense_is_refused_before_weights_are_read(pair: Pair, _no_weights: None) -> None:
    for draft, options, said in (
        ("self", {}, "try self:int4"),
        ("self:int3", {}, "got 'self:int3'"),
        ("self:int4", {"draft_dtype": "int4"}, "says its bits itself"),
        (None, {"draft_dtype": "int8"}, "goes with `draft`"),
        (pair[1], {"draft_dtype": "int5"}, "must be int8 or int4"),
        ("self:int4", {"ram": "1MB"}, "raise `ram` to"),
    ):
        with pytest.raises(UserError) as caught:
            offload.load(pair[0], draft, **options)
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_experts_are_not_copied(tmp_path: Path) -> None:
    target = save(build(FAMILIES["qwen3-moe"]()), tmp_path / "moe")
    with pytest.raises(UserError, match="fused experts"):
        offload.load(str(target), "self:int4")
