"""What the program asks of transformers by name: each name is there, from the version that is written beside it.

A version that gives one up fails here, in seconds and without weights; what has to change then is `model/library.py`.
"""

import runpy
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import UserError
from offload.model import library
from offload.model.meta import build_meta_model

INSTALLED = tuple(map(int, transformers.__version__.split(".")[:2]))
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": EXPERTS,
    "deepseek_v3": LATENT,
    "qwen3_next": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                   "shared_expert_intermediate_size": 16},
    "mamba": {"state_size": 8},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "is_encoder_decoder": True},
}  # fmt: skip


def built(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    config = {**SMALL, **MODELS[kind], "model_type": kind}
    return build_meta_model(Checkpoint(Path(kind), config, (), {}), dtype)


@pytest.mark.parametrize("name", [name for name in vars(library) if not name.startswith("_")])
def test_what_is_handed_on_is_there(name: str) -> None:
    """From 5.17: library.py would not have been imported, but who renames one of these sees which."""
    assert getattr(library, name) is not None


def test_from_5_24_a_cache_is_called_cache() -> None:
    assert ("cache" if INSTALLED >= (5, 24) else "past_key_values") == library.CACHE
    assert library.CACHE in signature(create_causal_mask).parameters


@pytest.mark.parametrize("kind", MODELS)
def test_from_5_17_a_family_is_built_and_passes_rows_without_a_warning(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = built(kind)
    library.require_rows(model.get_decoder())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_next", "deepseek_v3"])
def test_in_which_type_a_router_is_computed(kind: str) -> None:
    """From 5.24 DeepSeek's are kept in float32, which decides about 16-bit texts of files that store them so."""
    model = built(kind, torch.bfloat16)
    routers = [
        tensor for name, tensor in model.state_dict().items() if name.endswith((".gate.weight", "router.weight"))
    ]
    is_kept = kind == "deepseek_v3" and INSTALLED >= (5, 24)
    assert {tensor.dtype for tensor in routers} == {torch.float32 if is_kept else torch.bfloat16}


# Planted libraries: each has one name less, and what says so names it.


def with_other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    right = transformers.LlamaModel.forward

    def forward(self: Any, input_ids: Any = None, row_positions: Any = None, cache: Any = None, **options: Any) -> Any:
        return right(self, input_ids, position_ids=row_positions, **{library.CACHE: cache}, **options)

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)


def with_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading as loading

    monkeypatch.setattr(loading, "rename_key", loading.rename_source_key, raising=False)
    monkeypatch.delattr(loading, "rename_source_key")


def with_another_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "append", Cache.update, raising=False)
    monkeypatch.delattr(Cache, "update")


def imported_anew() -> None:
    runpy.run_path(str(library.__file__))


PLANTED = [
    (with_other_positions, lambda: built("llama"), "argument position_ids of LlamaModel.forward"),
    (with_another_function, imported_anew, "'rename_source_key' from 'transformers.core_model_loading'"),
    (with_another_method, imported_anew, "Cache.update"),
]


@pytest.mark.parametrize(("plant", "use", "missing"), PLANTED, ids=["argument", "function", "method"])
def test_a_rename_is_told_as_what_is_missing(
    plant: Callable[..., None], use: Callable[[], Any], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    plant(monkeypatch)
    with pytest.raises(UserError) as refused:
        use()
    line = str(refused.value)
    assert f"transformers {transformers.__version__} has no {missing}" in line
    assert line.endswith("pip install 'transformers>=5.17,<5.25'") and "model type" not in line


def test_beyond_what_was_tested_an_error_is_told_as_the_version_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.version_notes() == []
    monkeypatch.setattr(library.transformers, "__version__", "5.25.1")
    (note,) = library.version_notes()
    assert note == "transformers 5.25.1 is newer than 5.24, up to which this was tested"

    def renamed(*_: Any, **__: Any) -> None:
        raise TypeError("forward() got an unexpected keyword argument 'cache'")

    monkeypatch.setattr(transformers.LlamaModel, "forward", renamed)
    monkeypatch.setattr("offload.model.meta.require_rows", lambda decoder: None)
    with pytest.raises(UserError) as refused:
        built("llama")
    assert f"{note}, and fails (TypeError: " in str(refused.value) and "model type" not in str(refused.value)


def test_what_a_config_gets_wrong_stays_its_fault_under_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.transformers, "__version__", "5.25.1")
    monkeypatch.setitem(MODELS, "gpt_neox", {"num_attention_heads": 5})
    with pytest.raises(UserError, match="a value does not fit model type gpt_neox"):
        built("gpt_neox")


def test_without_docstrings_nothing_is_blamed_on_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.flags", SimpleNamespace(optimize=2))
    with pytest.raises(UserError, match="no docstrings under -OO"):
        imported_anew()
