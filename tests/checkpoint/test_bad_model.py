"""Models that cannot be run: drafts of strangers, unknown architectures and codings, code in a checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from quantised import RECIPES
from refusals import BOTH, assert_refused, drop, generate, header
from shell import shell
from tiny import FAMILIES, VOCAB_SIZE, build, save, save_reciter, save_tokenizer

from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.tensors import check_counts, check_method, check_types
from offload.errors import UserError

pytestmark = pytest.mark.usefixtures("_instant_link")


@pytest.mark.usefixtures("_no_weights")
def test_draft_with_another_vocabulary_is_refused(sound: Path, tmp_path: Path) -> None:
    stranger = save_reciter(tmp_path / "stranger", [":", " un", " deux"])
    outcome = generate(sound, "-d", stranger, "-p", "Count:")
    assert_refused(outcome, "the draft must share the target's vocabulary", "stranger", "target's family")


@pytest.mark.usefixtures("_no_weights")
def test_draft_of_another_width_is_refused(sound: Path, tmp_path: Path) -> None:
    """Without tokenizers to compare, the widths decide."""
    settings = FAMILIES["llama"]()
    settings.vocab_size = VOCAB_SIZE + 1
    draft = save(build(settings), tmp_path / "wide")
    outcome = generate(sound, "-d", draft, "-p", "Count:")
    assert_refused(outcome, "share the target's vocabulary", f"{VOCAB_SIZE + 1} entries", f"against {VOCAB_SIZE}")


def test_broken_draft_is_refused(sound: Path, broken: Path) -> None:
    drop("*-00002-of-*")(broken)
    for command in BOTH:
        assert_refused(shell(*command, "-m", sound, "-d", broken, "--ram", "1GiB"), "model-00002-of-", "missing")


def test_expert_without_a_partner_is_refused(tmp_path: Path) -> None:
    """Tensors that transformers fuses: every expert must bring both halves."""
    directory = save(build(FAMILIES["mixtral"]()), tmp_path / "experts", max_shard_size="1GB")
    save_tokenizer(directory)
    names = open_checkpoint(directory).tensors
    lost = next(name for name in sorted(names) if ".2.w1." in name)
    header(lambda content: content.update(spare=content.pop(lost)))(directory)
    assert_refused(generate(directory, "-p", "Count:"), "experts", "download the checkpoint again")


REAL: dict[str, dict[str, Any]] = {
    "a classifier of ImageNet-21k": {"id2label": {str(index): f"{index}" for index in range(21_841)}},
    "the same by its number": {"num_labels": 21_841},
    "a size for each layer": {"text_config": {"hidden_size_per_layer": 16_384, "vocab_size_per_layer": 262_144}},
    "126 layers, the last but one looked at": {"num_hidden_layers": 126, "vision_feature_layer": -2},
}
FALSE: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
    "layers inside": ({"vision_config": {"depth": 10_001}}, "depth"),
    "layers of a part in a list": ({"towers": [{"kind": "eye"}, {"num_layers": 20_000}]}, "num_layers"),
    "layers written as a float": ({"num_hidden_layers": 1e12}, "num_hidden_layers"),
    "labels": ({"audio_config": {"num_labels": 10**6}}, "num_labels"),
    "a table of labels": ({"label2id": {str(index): index for index in range(100_001)}}, "label2id"),
}


@pytest.mark.parametrize(
    ("config", "key"), [*((one, None) for one in REAL.values()), *FALSE.values()], ids=[*REAL, *FALSE]
)
def test_counts_that_models_have_are_let_through_and_others_refused(config: dict[str, Any], key: str | None) -> None:
    told = rf"model: {key} in config\.json must be at most"
    with nullcontext() if key is None else pytest.raises(UserError, match=told):
        check_counts("model", config)


UNQUANTISED = {"quantization_config": None, "quantization": None}
READ: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("config", [*({"quantization_config": one} for one in READ), {}, UNQUANTISED], ids=str)
def test_what_is_read_passes(config: dict[str, Any]) -> None:
    check_method("model", config)


@pytest.mark.parametrize(("settings", "named"), REFUSED, ids=str)
def test_what_is_not_read_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        check_method("model", {"quantization_config": settings})
    line = str(caught.value)
    assert line.startswith("model: ") and named in line and "not read" in line and "bf16" in line and "\n" not in line


OTHERS: list[dict[str, Any]] = [
    {"quantization": {"group_size": 64, "bits": 4}},
    {"quantization_config": "fp8"},
    {"quantization_config": [1]},
]


@pytest.mark.parametrize(("check", "config", "words"), [
    (check_counts, {"depth": 10**6}, r"depth in tokenizer_config\.json must be at most"),
    (check_types, {"inner": [{"model_type": 5}]}, r"model_type in tokenizer_config\.json must be text"),
    *((check_method, config, ".*(MLX|object)") for config in OTHERS),
])  # fmt: skip
def test_what_a_config_says_is_refused_by_the_files_name(
    check: Callable[..., object], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=f"model: {words}"):
        check("model", config, *([] if check is check_method else ["tokenizer_config.json"]))
