"""Numbers of a config that are counted up to: what models have is let through, what would fill memory is not."""

from typing import Any

import pytest

from offload.checkpoint.tensors import check_counts, check_types
from offload.errors import UserError

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


@pytest.mark.parametrize("config", REAL.values(), ids=REAL)
def test_what_models_have_is_let_through(config: dict[str, Any]) -> None:
    check_counts("model", config)


@pytest.mark.parametrize(("config", "key"), FALSE.values(), ids=FALSE)
def test_what_no_model_has_is_refused(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"model: {key} in config\.json must be at most"):
        check_counts("model", config)


def test_the_file_that_says_so_is_named() -> None:
    with pytest.raises(UserError, match=r"model: depth in tokenizer_config\.json must be at most"):
        check_counts("model", {"depth": 10**6}, "tokenizer_config.json")
    with pytest.raises(UserError, match=r"model: model_type in tokenizer_config\.json must be text"):
        check_types("model", {"inner": [{"model_type": 5}]}, "tokenizer_config.json")
