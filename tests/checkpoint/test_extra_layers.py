"""Layers that checkpoints carry beyond their model, to guess several tokens ahead: passed over, never read, told of."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixture_headers import mixture
from safetensors.torch import load_file, save_file
from test_families import config_of, tiny_model
from tiny import FAMILIES, VOCAB_SIZE, save, streaming_ram
from torch import Tensor
from transformers import PreTrainedModel

import offload
from offload.checkpoint.families import text_part
from offload.checkpoint.safetensors import open_checkpoint, read_header
from offload.checkpoint.sizes import model_shape
from offload.checkpoint.tensors import TensorEntry
from offload.streaming.disk import DiskReader

ENTRY = TensorEntry(0, "F32", (4,), 0, 16)
PROMPT = torch.randint(3, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(8)).tolist()


def model_of(family: str) -> PreTrainedModel:
    return tiny_model(FAMILIES[family]() if family in FAMILIES else config_of(family))


def copies(tensors: dict[str, Tensor], target: str) -> dict[str, Tensor]:
    """The last layer once more, by other names, and NaN."""
    own = {name: tensor for name, tensor in tensors.items() if ".layers.3." in f".{name}"}
    return {name.replace("model.layers.3.", target): torch.full_like(t, torch.nan) for name, t in own.items()}


def of_its_own(target: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As each family has them: a whole layer, and what joins it with the model."""
    more = {f"{target}eh_proj.weight": torch.full((64, 128), torch.nan), f"{target}enorm.weight": torch.ones(64),
            f"{target}embed_tokens.weight": torch.ones(VOCAB_SIZE, 64),
            f"{target}shared_head.head.weight": torch.ones(VOCAB_SIZE, 64)}  # fmt: skip
    return {**copies(tensors, target), **more}


CASES = {
    "a layer more": ("deepseek_v3", "model.layers.4."),
    "the fifth more": ("deepseek_v3", "model.layers.9."),
    "another family's": ("glm4_moe", "model.layers.4."),
    "layers of their own": ("qwen3-moe", "mtp.layers.0."),
    "in the model": ("ernie4_5_moe", "model.mtp_block.0."),
    "in the model, as layers": ("qwen3", "model.mtp.layers.0."),
    "in a list": ("llama", "model.mtp_layers.0."),
}


@pytest.mark.parametrize("case", CASES)
def test_extra_layers_change_nothing(case: str, tmp_path: Path) -> None:
    family, target = CASES[case]
    plain = save(model_of(family), tmp_path / "plain", max_shard_size="1GB")
    tensors, more = load_file(plain / "model.safetensors"), tmp_path / "more"
    extra = of_its_own(target, tensors)
    more.mkdir()
    (more / "config.json").write_text((plain / "config.json").read_text())
    save_file({**tensors, **extra}, more / "model.safetensors")
    known, wanted = open_checkpoint(more), open_checkpoint(plain)
    assert known.tensors.keys() == wanted.tensors.keys() and known.num_bytes == wanted.num_bytes
    assert model_shape(known).num_bytes <= model_shape(wanted).num_bytes + 5 * 8192, "they may lie otherwise in blocks"
    for name in ("kv_bytes_per_token", "routed_bytes", "num_weights", "row_bytes", "scratch_bytes"):
        assert getattr(model_shape(known), name) == getattr(model_shape(wanted), name)
    assert known.left_out == {"extra layers": sum(tensor.nbytes for tensor in extra.values())}
    assert text_of(more, extra) == text_of(plain, {})


def text_of(directory: Path, unread: dict[str, Tensor]) -> list[int]:
    """With layers streamed; nothing may be read of these."""
    pieces: list[Any] = []

    class Reads(DiskReader):
        def read(self, layout: Any, slab: Any) -> Any:
            pieces.extend(layout.pieces)
            return super().read(layout, slab)

    ram = streaming_ram(directory, context=64, num_nodes=8)
    how: dict[str, Any] = {"context": 64, "tree": "8x3", "threads": 1, "open_source": Reads}
    with offload.load(directory, directory, ram=ram, **how) as decoder:
        ids = decoder.generate(PROMPT, max_new_tokens=16).token_ids
    header = read_header(directory / "model.safetensors")[0]
    spans = {name: (header[name].lo, header[name].hi) for name in unread}
    large = {name: (lo, hi) for name, (lo, hi) in spans.items() if hi - lo > 256}
    touched = [name for name, (lo, hi) in large.items() if any(one.lo < hi and one.hi > lo for one in pieces)]
    assert pieces and not touched
    return ids


# Python turns no number of more than 4,300 digits into one.
ENDLESS = f"model.layers.{'9' * 5000}.mlp.experts.{'9' * 5000}.up_proj.weight"
IGNORED = {  # names of released checkpoints, and the class of transformers that passes over them
    "model.layers.92.eh_proj.weight": ("glm4_moe", "Glm4MoePreTrainedModel", 92),
    "model.layers.46.mlp.experts.3.up_proj.weight": ("glm4_moe", "Glm4MoePreTrainedModel", 46),
    "mtp.layers.0.self_attn.q_proj.weight": ("qwen3_next", "Qwen3NextPreTrainedModel", 48),
    "mtp.pre_fc_norm_hidden.weight": ("qwen3_5_moe", "Qwen3_5MoeForCausalLM", 40),
    "model.mtp_linear_proj.0.weight": ("ernie4_5_moe", "Ernie4_5_MoePreTrainedModel", 28),
    "model.mtp.layers.0.eh_proj.weight": ("longcat_flash", "LongcatFlashPreTrainedModel", 28),
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_transformers_passes_over_is_passed_over(name: str) -> None:
    family, model_class, num_layers = IGNORED[name]
    name_of_module = f"transformers.models.{family}.modeling_{family}"
    module = pytest.importorskip(name_of_module, reason=f"this transformers has no {family}")
    patterns = getattr(module, model_class)._keys_to_ignore_on_load_unexpected
    assert any(re.search(pattern, name) for pattern in patterns), "the example is one of transformers' own"
    found = text_part("here", {"num_hidden_layers": num_layers}, {name: ENTRY, "model.layers.1.x": ENTRY})
    assert found.tensors.keys() == {"model.layers.1.x"} and found.left_out == {"extra layers": 16}


@pytest.mark.parametrize("name", [
    "model.layers.1.mlp.mtpx.weight", "lm_head.weight", "model.layers.1.smtp.weight", ENDLESS,
])  # fmt: skip
def test_other_names_stay(name: str) -> None:
    assert text_part("here", {"num_hidden_layers": 2}, {name: ENTRY}).tensors == {name: ENTRY}


def test_numbers_that_are_none_leave_nothing_out() -> None:
    for number in ("4", None, -1, 0, True, 1.5):
        assert not text_part("here", {"num_hidden_layers": number}, {"model.layers.7.x": ENTRY}).left_out, number
    plain = mixture()
    more = replace(plain, tensors={**plain.tensors, ENDLESS: ENTRY, ENDLESS.replace("9", "1", 1): ENTRY})
    assert model_shape(more).experts == model_shape(plain).experts
