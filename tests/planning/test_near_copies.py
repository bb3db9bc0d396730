"""Which draft the planner takes for the best, on three kinds of machines."""

import json
from pathlib import Path

import pytest

from offload.planning.load_options import LoadOptions
from offload.reports.estimate import compare_drafts

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "dtype": "bfloat16",
         "max_position_embeddings": 8192, "tie_word_embeddings": False}  # fmt: skip
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8}  # fmt: skip
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8}  # fmt: skip
# A fast device with room for a copy, the same beside a link that is nearly as fast as it, and a slow one.
MACHINES = {
    "fast": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 3e12, "flops_per_s": 9e14, "link_bytes_per_s": 12e9},
    "wide": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 3e11, "flops_per_s": 4e14, "link_bytes_per_s": 200e9},
    "slow": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 1e11, "flops_per_s": 2e13, "link_bytes_per_s": 25e9},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    paths = [tmp_path_factory.mktemp(name) / "config.json" for name in ("large", "small")]
    for path, sizes in zip(paths, (LARGE, SMALL), strict=True):
        path.write_text(json.dumps({**LLAMA, **sizes}))
    return str(paths[0]), str(paths[1])


@pytest.mark.parametrize(("name", "best"), [("fast", "copy"), ("wide", "small"), ("slow", "small")])
def test_the_best_draft_follows_from_the_machine(name: str, best: str, models: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**MACHINES[name], "ram_bytes": "512GiB"}))
    ways = compare_drafts(*models, LoadOptions(context=2048), str(path))
    assert all(one.prediction for one in ways[:3]), [one.refusal for one in ways]
    plain = {one.draft: one for one in ways if not one.draft_dtype}
    kinds = {"small": models[1], "copy": "self:int4", "none": None}
    seconds = {kind: plain[draft].prediction.s_per_token for kind, draft in kinds.items()}  # type: ignore[union-attr]
    assert min(seconds, key=seconds.__getitem__) == best, seconds
