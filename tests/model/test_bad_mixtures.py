"""Mixtures whose tensors contradict their config, or each other: refused in one line, streamed either way."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_mapping import _ROUTED, _SIZES, REFUSED, our_state, rewrite, rows_of_another_expert, saved, set_config
from tiny import build
from transformers import Glm4MoeConfig

from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.model.streamed import StreamedModel


@pytest.mark.parametrize("on_demand", [False, True])
def test_experts_with_the_rows_of_another_are_refused_one_by_one(on_demand: bool, tmp_path: Path) -> None:
    tensors = saved("qwen3-moe", tmp_path)
    rows_of_another_expert(tensors)
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=REFUSED[rows_of_another_expert]):
        StreamedModel(open_checkpoint(tmp_path), "float32", on_demand=on_demand)


@pytest.mark.parametrize("inner", [16, 32, 24])
def test_stacks_of_another_order_never_pass(inner: int, tmp_path: Path) -> None:
    """Where one of the two is square, the other shows it."""
    config = Glm4MoeConfig(**_SIZES, **{**_ROUTED, "moe_intermediate_size": inner}, head_dim=8, n_group=2, topk_group=1)
    model = build(config)
    stacks = {name: one.mT.contiguous() for name, one in model.state_dict().items() if ".mlp.experts." in name}
    assert {tuple(one.shape) for one in stacks.values()} == {(12, 32, 2 * inner), (12, inner, 32)}
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {**{key: one for key, one in tensors.items() if ".mlp.experts." not in key}, **stacks})
    with pytest.raises(UserError, match=r"_proj is stored transposed, .* cannot be streamed: save the model once"):
        our_state(tmp_path)


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_shared_expert_is_named(part: str, on_demand: bool, tmp_path: Path) -> None:
    tensors = saved("deepseek-v3", tmp_path)
    lost = f"model.layers.1.mlp.shared_experts.{part}.weight"
    del tensors[lost]
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=f"tensor {re.escape(lost)} is missing: download the checkpoint again"):
        StreamedModel(open_checkpoint(tmp_path), "float32", on_demand=on_demand)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_experts", [8, 16])
def test_a_config_with_another_number_of_experts_is_refused(num_experts: int, is_fused: bool, tmp_path: Path) -> None:
    saved("glm4-moe", tmp_path)
    if is_fused:
        rewrite(tmp_path, {key: tensor.clone() for key, tensor in our_state(tmp_path).items()})
    set_config(tmp_path, n_routed_experts=num_experts)
    with pytest.raises(UserError, match=rf"must have shape \[{num_experts}, .*do not belong together"):
        our_state(tmp_path)
    with pytest.raises(UserError, match=rf"must agree on the experts, it has {num_experts} and .*give the config"):
        model_shape(open_checkpoint(tmp_path))
