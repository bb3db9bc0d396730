"""Sizes of routed experts from headers alone: by expert or in stacks, plain or coded, and headers that contradict."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mixture_headers import CONFIG, coded_stacks, mixture
from tiny import FAMILIES, build, save

from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.safetensors import Checkpoint, open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError

EXPERT_BYTES = 3 * 2048 * 768 * 2


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_layer_is_its_dense_part_and_its_experts(is_stacked: bool) -> None:
    shape = model_shape(mixture(is_stacked=is_stacked))
    experts = shape.experts
    assert experts is not None
    assert (experts.num_layers, experts.num_experts, experts.num_chosen, experts.num_records) == (6, 32, 4, 6 * 32)
    bias_bytes = 2 * 1536 if is_stacked else 0
    num_runs = 3 if is_stacked else 1  # each begins and ends inside a block
    assert EXPERT_BYTES + bias_bytes <= experts.slot_bytes <= EXPERT_BYTES + bias_bytes + 2 * num_runs * BLOCK_BYTES
    dense_bytes = 2 * (4 * 1024 * 2048 + 768 * 2048 + 32 * 2048)
    for whole, dense in zip(shape.layer_bytes, experts.dense_bytes, strict=True):
        assert dense_bytes <= dense <= dense_bytes + 4 * BLOCK_BYTES, "shared experts and the router stay in it"
        assert whole <= dense + 32 * experts.slot_bytes
    assert experts.row_bytes == 4 * 2048 * 2 and experts.scratch_bytes == experts.cast_bytes == 0
    wide = model_shape(mixture(is_stacked=is_stacked), "float32").experts
    assert wide is not None and wide.cast_bytes == 2 * (dense_bytes + bias_bytes + EXPERT_BYTES)


def test_first_layers_may_be_dense_and_layers_behind_the_last_do_not_count() -> None:
    more = mixture(num_dense=2, num_hidden_layers=7)  # one that a model for several tokens would have
    checkpoint = replace(more, config={**more.config, "num_hidden_layers": 6})
    experts = model_shape(checkpoint).experts
    assert experts is not None and experts.num_layers == 4 and len(experts.dense_bytes) == 6
    assert experts == model_shape(mixture(num_dense=2)).experts


def test_stacks_of_words_come_apart_and_one_expert_is_expanded_at_a_time() -> None:
    plain, coded = (model_shape(one) for one in (mixture(is_stacked=True), coded_stacks(mixture(is_stacked=True))))
    assert plain.experts is not None and coded.experts is not None
    assert coded.experts.slot_bytes == pytest.approx(plain.experts.slot_bytes / 4, rel=0.01)
    assert coded.experts.scratch_bytes == EXPERT_BYTES + 2 * 256
    assert coded.scratch_bytes > 31 * coded.experts.scratch_bytes, "a layer's experts are expanded together"
    assert coded.companion_bytes > 6 * 32 * EXPERT_BYTES / 64


def test_a_stack_that_cannot_be_taken_apart_comes_with_its_layer() -> None:
    """Packed without loss, all mantissas of a stack lie before all exponents."""
    checkpoint = mixture(is_stacked=True)
    name = "model.layers.0.mlp.experts.down_proj"
    entry = coded_stacks(checkpoint).tensors[name]
    assert entry.coded is not None
    odd = entry.coded._replace(companions=(("_scales", entry.coded.companions[0][1]._replace(shape=(7,))),))
    assert model_shape(_with(checkpoint, name, entry._replace(coded=odd))).experts is None


@pytest.mark.parametrize("changes", [{"model_type": "dbrx"}, {"num_experts_per_tok": None}, {"model_type": "llama4"}])
def test_families_that_multiply_all_experts_have_none_on_demand(changes: dict[str, object]) -> None:
    assert model_shape(mixture(**changes)).experts is None


@pytest.mark.parametrize("is_stacked", [False, True])
def test_one_expert_alone_is_no_choice(is_stacked: bool) -> None:
    """A pool has two slots or more."""
    changes = {"num_experts": 1, "num_experts_per_tok": 1}
    assert model_shape(mixture(is_stacked=is_stacked, num_hidden_layers=1, **changes)).experts is None
    two = model_shape(mixture(is_stacked=is_stacked, num_hidden_layers=2, **changes)).experts
    assert two is not None and two.num_records == 2


def _with(checkpoint: Checkpoint, name: str, entry: object) -> Checkpoint:
    tensors = {**checkpoint.tensors, name: entry}
    return replace(checkpoint, tensors={key: value for key, value in tensors.items() if value is not None})


def _without(*parts: str) -> Callable[[Checkpoint], Checkpoint]:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        kept = {name: one for name, one in checkpoint.tensors.items() if not any(part in name for part in parts)}
        return replace(checkpoint, tensors=kept)

    return change


def _moved(part: str, other: str) -> Callable[[Checkpoint], Checkpoint]:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        return replace(checkpoint, tensors={n.replace(part, other): one for n, one in checkpoint.tensors.items()})

    return change


def _sized(num_experts: int, width: int) -> Callable[[Checkpoint], Checkpoint]:
    """All stacks of so many experts, which have so many numbers in all."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        stacks = {name: one for name, one in checkpoint.tensors.items() if ".mlp.experts." in name}
        size = num_experts * width
        sized = {name: one._replace(shape=(num_experts, width), hi=one.lo + 2 * size) for name, one in stacks.items()}
        config = {**checkpoint.config, "num_experts": num_experts}
        return replace(checkpoint, config=config, tensors={**checkpoint.tensors, **sized})

    return change


def _claims(**changes: int) -> Callable[[Checkpoint], Checkpoint]:
    return lambda checkpoint: replace(checkpoint, config={**checkpoint.config, **changes})


@pytest.mark.parametrize(
    ("is_stacked", "spoil", "words"),
    [
        (False, _claims(num_experts=64), "it has 64 and layer 0 has tensors of 32"),
        (False, _claims(num_experts=16), "it has 16 and layer 0 has tensors of 32"),
        (True, _claims(num_experts=16), "it has 16 and model.layers.0.mlp.experts.gate_up_proj has shape [32, 2048"),
        (False, _claims(num_experts_per_tok=33), "it has 32 and 33 of them are to be chosen"),
        (False, _without("layers.3.mlp.experts.7."), "it has 32 and layer 3 has tensors of 31"),
        (False, _moved("experts.5.", "experts.40."), "layer 0 has tensors of 32, not of expert 5"),
        (False, _moved("experts.31.", "experts.32."), "layer 0 has tensors of 32, not of expert 31"),
        (False, _moved("layers.3.mlp.experts.0.", "layers.3.mlp.experts.32."), "layer 3 has tensors of 32, not of"),
        (True, _sized(32, 0), "gate_up_proj must not be empty, it has shape [32, 0]"),
        (True, _sized(70_000, 1), "a layer must have at most 65536 experts, it has 70000"),
        (False, _without("layers.3.mlp.experts.7.up"), "expert 7 of layer 3 differs from expert 0 in whether it"),
    ],
)  # fmt: skip
def test_headers_that_contradict_are_refused(
    is_stacked: bool, spoil: Callable[[Checkpoint], Checkpoint], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        model_shape(spoil(mixture(is_stacked=is_stacked)))
    assert words in str(caught.value) and str(caught.value).startswith("mixture: ")
    assert "download the checkpoint again" in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_that_does_not_count_them_leaves_it_to_the_tensors() -> None:
    for is_stacked in (False, True):
        checkpoint = mixture(is_stacked=is_stacked)
        config = {key: value for key, value in CONFIG.items() if key != "num_experts"}
        experts = model_shape(replace(checkpoint, config=config)).experts
        assert experts is not None and experts.num_experts == 32


@pytest.mark.parametrize(("family", "num_experts", "num_chosen"), [("mixtral", 4, 2), ("qwen3-moe", 12, 2)])
def test_saved_models_have_the_experts_that_their_parameters_are(
    family: str, num_experts: int, num_chosen: int, tmp_path: Path
) -> None:
    model = build(FAMILIES[family]())
    shape = model_shape(open_checkpoint(save(model, tmp_path)))
    stacks = [weight for name, weight in model.named_parameters() if ".experts." in name]
    experts = shape.experts
    assert experts is not None and (experts.num_experts, experts.num_chosen) == (num_experts, num_chosen)
    record_bytes = sum(weight[0].nbytes for weight in stacks) / experts.num_layers
    assert record_bytes <= experts.slot_bytes <= record_bytes + 6 * BLOCK_BYTES
