"""Sizes of routed experts from headers alone, by expert or in stacks, plain or coded; and stacks taken apart."""

from dataclasses import replace
from pathlib import Path

import pytest
from mixture_headers import coded_stacks, mixture
from plans import model_shape
from tiny import FAMILIES, build, save

from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import open_checkpoint

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


def test_stacks_of_words_come_apart_and_one_expert_is_expanded_at_a_time() -> None:
    plain, coded = (model_shape(model) for model in (mixture(is_stacked=True), coded_stacks(mixture(is_stacked=True))))
    assert plain.experts is not None and coded.experts is not None
    assert coded.experts.slot_bytes == pytest.approx(plain.experts.slot_bytes / 4, rel=0.01)
    assert coded.experts.scratch_bytes == EXPERT_BYTES + 2 * 256
    assert coded.scratch_bytes > 31 * coded.experts.scratch_bytes, "a layer's experts are expanded together"
    assert coded.companion_bytes > 6 * 32 * EXPERT_BYTES / 64
    # Packed without loss, all mantissas of a stack lie before all exponents: it comes with its layer.
    checkpoint = mixture(is_stacked=True)
    name = "model.layers.0.mlp.experts.down_proj"
    entry = coded_stacks(checkpoint).tensors[name]
    assert entry.coded is not None
    odd = entry.coded._replace(companions=(("_scales", entry.coded.companions[0][1]._replace(shape=(7,))),))
    mixed = {**checkpoint.tensors, name: entry._replace(coded=odd)}
    assert model_shape(replace(checkpoint, tensors=mixed)).experts is None


def test_what_has_no_experts_on_demand() -> None:
    alone = {"num_experts": 1, "num_experts_per_tok": 1}
    for is_stacked in (False, True):
        assert model_shape(mixture(is_stacked=is_stacked, num_hidden_layers=1, **alone)).experts is None
        two = model_shape(mixture(is_stacked=is_stacked, num_hidden_layers=2, **alone)).experts
        assert two is not None and two.num_records == 2
        all_rows = mixture(is_stacked=is_stacked, num_experts_per_tok=0)
        assert model_shape(all_rows).experts is None, "all rows are multiplied with all experts"


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
