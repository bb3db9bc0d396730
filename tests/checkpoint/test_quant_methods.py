"""Which quantised checkpoints are refused by their config, in one line that names what is wrong and what would work."""

from typing import Any

import pytest
from quantised import RECIPES

from offload.checkpoint.tensors import check_method
from offload.errors import UserError

READ = [
    *(recipe.config for recipe in RECIPES.values()),
    {"quant_method": "fbgemm_fp8"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "extra_config": {}},
    {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4},
    {"load_in_8bit": True},
    {"config_groups": {}},
    {"config_groups": {}, "transform_config": {}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"quant_method": name}, name) for name in (
        "exl2", "exl3", "hqq", "aqlm", "quark", "torchao", "eetq", "higgs", "spqr", "vptq", "quanto", "bitnet")),
    ({"quant_method": "awq", "version": "gemv", "bits": 4}, "gemv"),
    ({"quant_method": "awq", "version": "GEMV_FAST", "bits": 4}, "gemv_fast"),
    ({"quant_method": "awq", "version": "marlin", "bits": 4}, "marlin"),
    ({"quant_method": "awq", "backend": "llm-awq", "bits": 4}, "llm-awq"),
    ({"quant_method": "awq", "bits": 3}, "of 3 bits"),
    ({"quant_method": "gptq", "bits": 3}, "of 3 bits"),
    ({"quant_method": "gptq", "bits": 2}, "of 2 bits"),
    ({"quant_method": "gptq", "bits": [4]}, "of [4] bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:ark"}, "ark"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
     "transform_config"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ({"quant_method": ["fp8"]}, "fp8"),
    ({"bits": 4}, "None"),
]  # fmt: skip


@pytest.mark.parametrize("settings", READ, ids=str)
def test_what_is_read_passes(settings: dict[str, Any]) -> None:
    check_method("model", {"quantization_config": settings})


def test_what_is_not_quantised_passes() -> None:
    check_method("model", {})
    check_method("model", {"quantization_config": None, "quantization": None})


@pytest.mark.parametrize(("settings", "named"), REFUSED, ids=str)
def test_what_is_not_read_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        check_method("model", {"quantization_config": settings})
    line = str(caught.value)
    assert line.startswith("model: ") and named in line and "not read" in line and "bf16" in line and "\n" not in line


@pytest.mark.parametrize("config", [
    {"quantization": {"group_size": 64, "bits": 4}},
    {"quantization_config": "fp8"},
    {"quantization_config": [1]},
], ids=str)  # fmt: skip
def test_other_configs_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"model: .*(MLX|object)"):
        check_method("model", config)
