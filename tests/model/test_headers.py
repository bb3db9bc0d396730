"""A config.json alone against the headers of the checkpoint that transformers saves for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from matrix import matrix
from shell import shell
from test_families import WORKING, config_of
from tiny import FAMILIES, build, save

from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.model.headers import describe

CORE = ("llama", "llama-tied", "gemma3", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "gemma4_text")


# MiniMax's: files may hold them, and nothing reads them
MADE_OF_THE_CONFIG = {"slope_rate", "query_decay", "key_decay", "diagonal_decay"}


@matrix("family", [*FAMILIES, *WORKING], always=CORE, daily=6)
@matrix("is_folder", [True, False], daily=1)
def test_a_config_alone_tells_what_the_headers_tell(family: str, is_folder: bool, tmp_path: Path) -> None:
    """This holds for every family that is known to run."""
    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    model = build(config)
    for module in model.modules():
        module._non_persistent_buffers_set.update(MADE_OF_THE_CONFIG & module._buffers.keys())
    stored = open_checkpoint(save(model, tmp_path / "whole"))
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / ("config.json" if is_folder else "any name.json")
    alone.write_text((tmp_path / "whole" / "config.json").read_text())
    found = describe(str(alone.parent if is_folder else alone))
    told, expected = ({name: (e.dtype, e.shape) for name, e in one.tensors.items()} for one in (found, stored))
    assert told == expected
    shapes = [model_shape(one) for one in (found, stored)]
    assert len({(s.num_weights, s.routed_weights, s.routed_share, s.kv_bytes_per_token) for s in shapes}) == 1


MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
           "vocab_size": 32000, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}  # fmt: skip


def test_plan_counts_the_parameters_of_a_mixture_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    outcome = shell("plan", "-m", tmp_path, "--ram", "32GiB", "--disk-speed", "3GB", "--json")
    assert json.loads(outcome.out)["models"]["target"]["num_parameters"] == 46_702_792_704


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be a whole number below 1024, got 1000000"),
        ({"num_local_experts": 10**12}, "num_local_experts must be a whole number below 1024"),
        ({"head_dim": 10**15}, "head_dim must be a whole number below"),
        ({"hidden_size": "4096"}, "hidden_size in config.json must be a whole number"),
        ({"model_type": "gpt2"}, "model type gpt2 is not supported"),
        ({"model_type": "no such type"}, "is not supported"),
        ({"torch_dtype": "float8"}, "cannot compute in float8"),
    ],
)
def test_a_config_that_no_model_has_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIXTRAL, **change}))
    with pytest.raises(UserError, match=words):
        describe(str(tmp_path))
