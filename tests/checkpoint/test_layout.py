"""Layouts against safetensors' own reading, whatever the order of the file; layers beyond a model are passed over."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from matrix import matrix
from mixture_headers import mixture
from plans import model_shape
from random_files import Planned, assert_same_bytes, parameter_bytes, random_checkpoint, stored_bytes, write_file
from safetensors.torch import load_file, save_file
from test_families import tiny_model
from test_path_rows import config_named
from test_wrappers import streamed
from tiny import VOCAB_SIZE, save
from torch import Tensor

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, TensorPart, group_by_layer, slab_bytes_bound, slab_layout
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.safetensors import read_header
from offload.checkpoint.tensors import TensorEntry
from offload.checkpoint.text_part import text_part

SEEDS = range(25)


def fill(layout: SlabLayout, checkpoint: Checkpoint) -> np.ndarray:
    """The plainest reader there is: one piece after the other."""
    slab = np.full(layout.slab_bytes, 0xA5, np.uint8)
    for piece in layout.pieces:
        data = checkpoint.shards[piece.shard].read_bytes()[piece.lo : piece.hi]
        slab[piece.slab_lo : piece.slab_lo + len(data)] = np.frombuffer(data, np.uint8)
    return slab


def laid(entries: Mapping[str, TensorEntry]) -> SlabLayout:
    return slab_layout({name: single(entry) for name, entry in entries.items()})


def single(entry: TensorEntry) -> tuple[tuple[int, ...], list[TensorPart]]:
    return entry.shape, [TensorPart(entry)]


def layer_parameters(checkpoint: Checkpoint, layer: int) -> dict[str, tuple[tuple[int, ...], list[TensorPart]]]:
    prefix = f"model.layers.{layer}."
    return {name: single(entry) for name, entry in checkpoint.tensors.items() if name.startswith(prefix)}


def stands_well(entry: TensorEntry) -> bool:
    """Whether the file has it where its type, and a product of float32, want it in memory."""
    width = {"F32": 4, "BF16": 2, "F16": 2}[entry.dtype]
    return entry.lo % (64 if entry.dtype == "F32" and len(entry.shape) > 1 else width) == 0


@pytest.mark.parametrize("remainder", [0, 1])
@matrix("seed", SEEDS, always=range(4), daily=1)
def test_every_parameter_is_what_safetensors_reads(seed: int, remainder: int, tmp_path: Path) -> None:
    """On the host, and in what a device gets, where it stands at a place of its type."""
    checkpoint = random_checkpoint(tmp_path, seed, remainder=remainder)
    stored = stored_bytes(checkpoint)
    for layer in range(3):
        parameters = layer_parameters(checkpoint, layer)
        layout, wanted = slab_layout(parameters), {name: stored[name] for name in parameters}
        assert layout.is_direct == all(stands_well(entry) for _, [(entry, _)] in parameters.values())
        assert not remainder or not layout.is_direct
        slab = fill(layout, checkpoint)
        assert_same_bytes(parameter_bytes(layout, slab), wanted)
        assert_pieces_fit(layout)
        for name, placed in layout.parameters.items():
            lo = placed.slab_lo - layout.lead_bytes
            assert stands_well(checkpoint.tensors[name]._replace(lo=lo))
            assert slab[layout.sent][lo : lo + placed.num_bytes].tobytes() == wanted[name]


def assert_pieces_fit(layout: SlabLayout) -> None:
    """Pieces stay inside the slab and apart; those that are read whole block by whole block keep whole blocks apart."""
    assert layout.slab_bytes % BLOCK_BYTES == 0
    unit = BLOCK_BYTES if layout.is_direct else 1
    spans = sorted((p.slab_lo // unit * unit, -(-(p.slab_lo + p.hi - p.lo) // unit) * unit) for p in layout.pieces)
    assert all(0 <= lo <= hi <= layout.slab_bytes for lo, hi in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    if layout.is_direct:
        assert all(piece.slab_lo % BLOCK_BYTES == piece.lo % BLOCK_BYTES for piece in layout.pieces)


@matrix("seed", SEEDS, always=range(4), daily=1)
def test_parts_are_joined_in_their_order_and_the_bound_holds(seed: int, tmp_path: Path) -> None:
    """As experts are: several tensors, from several shards, make up one parameter."""
    checkpoint = random_checkpoint(tmp_path, seed)
    rng, wanted = np.random.default_rng(seed), stored_bytes(checkpoint)
    names = [name for name, entry in checkpoint.tensors.items() if entry.dtype == "F32"]
    groups = np.array_split(rng.permutation(names), 2)
    parameters, joined = {}, {}
    for index, group in enumerate(groups):
        parts, end = [], 0
        for name in group:
            parts.append(TensorPart(checkpoint.tensors[name], end))
            end += len(wanted[name]) // 4
        parameters[f"fused{index}"] = ((end,), parts)
        joined[f"fused{index}"] = b"".join(wanted[name] for name in group)
    layout = slab_layout(parameters)
    assert not layout.is_direct
    assert_same_bytes(parameter_bytes(layout, fill(layout, checkpoint)), joined)
    assert_pieces_fit(layout)
    assert layout.slab_bytes <= slab_bytes_bound(part.entry for _, parts in parameters.values() for part in parts)
    # A plan knows the tensors of a layer by name alone; what the model then wants may be fewer, directly or not.
    rng = np.random.default_rng(seed)
    checkpoint = random_checkpoint(tmp_path, seed, remainder=seed % 2)
    entries = list(checkpoint.tensors.values())
    bound = slab_bytes_bound(entries)
    for share in (1.0, 0.7, 0.3):
        chosen = [entry for entry in entries if rng.random() < share and entry.dtype != "U8"]
        layout = slab_layout({str(index): single(entry) for index, entry in enumerate(chosen)})
        assert layout.slab_bytes <= bound
    assert bound <= checkpoint.num_bytes + (2 * len(checkpoint.shards) + 1) * BLOCK_BYTES + 256 * len(entries), "loose"


def test_small_tensors_take_256_bytes_each_in_a_scattered_slab() -> None:
    """A hundred numbers at odd offsets fit into one block of their file."""
    entries = [TensorEntry(0, "F32", (1,), 4097 + 4 * index, 4101 + 4 * index) for index in range(100)]
    layout = laid({str(entry.lo): entry for entry in entries})
    assert not layout.is_direct and layout.slab_bytes == 7 * BLOCK_BYTES == slab_bytes_bound(entries)


def test_what_a_device_gets_begins_with_its_largest_run() -> None:
    # Runs of two files have nothing in common.
    small, large = TensorEntry(0, "BF16", (128,), 4104, 4360), TensorEntry(1, "BF16", (4096,), 24, 8216)
    layout = laid({"small": small, "large": large})
    assert layout.parameters["large"].slab_lo == layout.lead_bytes == 24 and layout.parameters["small"].slab_lo > 8192
    assert_pieces_fit(layout)
    # A wide type behind a narrow one keeps its alignment.
    narrow, wide = TensorEntry(0, "BF16", (1,), 4098, 4100), TensorEntry(0, "F32", (64,), 4100, 4356)
    layout = laid({"narrow": narrow, "wide": wide})
    assert layout.is_direct and layout.lead_bytes == 0, "2 would be the first weight's own"
    assert (layout.parameters["wide"].slab_lo - layout.lead_bytes) % 4 == 0
    # A piece never spans two files.
    layout = laid({str(shard): TensorEntry(shard, "F32", (4,), 128, 144) for shard in range(3)})
    assert [piece.shard for piece in layout.pieces] == [0, 1, 2]
    assert_pieces_fit(layout)


def test_layers_are_told_by_name_and_numbers_that_are_none_leave_nothing_out(tmp_path: Path) -> None:
    names = ["model.layers.0.a", "layers.1.a", "model.layers.1.b", "model.layers.2.c", "model.norm", "my_layers.0.x"]
    write_file(tmp_path / "model.safetensors", [Planned(n, "F32", (1,)) for n in names], np.random.default_rng(0))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    layers, rest = group_by_layer(checkpoint, 2)
    assert [len(entries) for entries in layers] == [1, 2]
    # a layer beyond the decoder's last (an extra head for several tokens) belongs to no layer
    assert {name for name, entry in checkpoint.tensors.items() if entry in rest} == {"model.norm", "my_layers.0.x"}
    # Numbers that are none leave nothing out.
    for number in ("4", None, -1, 0, True, 1.5):
        assert not text_part("here", {"num_hidden_layers": number}, {"model.layers.7.x": ENTRY}).left_out, number
    plain = mixture()
    longer = replace(plain, tensors={**plain.tensors, ENDLESS: ENTRY, ENDLESS.replace("9", "1", 1): ENTRY})
    assert model_shape(longer).experts == model_shape(plain).experts


ENTRY = TensorEntry(0, "F32", (4,), 0, 16)


def of_its_own(target: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As each family has them: a whole layer, the last one once more and NaN, and what joins it with the model."""
    prefix = {name: tensor for name, tensor in tensors.items() if ".layers.3." in f".{name}"}
    copies = {
        name.replace("model.layers.3.", target): torch.full_like(kept, torch.nan) for name, kept in prefix.items()
    }
    wide = torch.ones(VOCAB_SIZE, 64)
    extra = {"eh_proj": torch.full((64, 128), torch.nan), "enorm": torch.ones(64), "embed_tokens": wide}
    return {
        **copies,
        **{f"{target}{name}.weight": tensor for name, tensor in extra.items()},
        f"{target}shared_head.head.weight": wide.clone(),
    }


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
    plain = save(tiny_model(config_named(family)), tmp_path / "plain", max_shard_size="1GB")
    tensors, options = load_file(plain / "model.safetensors"), tmp_path / "more"
    extra = of_its_own(target, tensors)
    options.mkdir()
    (options / "config.json").write_text((plain / "config.json").read_text())
    save_file({**tensors, **extra}, options / "model.safetensors")
    known, wanted = open_checkpoint(options), open_checkpoint(plain)
    assert known.tensors.keys() == wanted.tensors.keys() and known.num_bytes == wanted.num_bytes
    assert model_shape(known).num_bytes <= model_shape(wanted).num_bytes + 5 * 8192, "they may lie otherwise in blocks"
    for name in ("kv_bytes_per_token", "routed_bytes", "num_weights", "row_bytes", "scratch_bytes"):
        assert getattr(model_shape(known), name) == getattr(model_shape(wanted), name)
    assert known.left_out == {"extra layers": sum(tensor.nbytes for tensor in extra.values())}
    assert text_of(options, extra) == text_of(plain, {})


def text_of(directory: Path, unread: dict[str, Tensor]) -> list[int]:
    """With layers streamed; nothing may be read of these."""
    got, pieces = streamed(directory)
    header = read_header(directory / "model.safetensors").tensors
    large = [(header[name].lo, header[name].hi) for name in unread if header[name].num_bytes > 256]
    assert pieces and not [piece for piece in pieces for lo, hi in large if piece.lo < hi and piece.hi > lo]
    return got.token_ids


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
    result = text_part("here", {"num_hidden_layers": num_layers}, {name: ENTRY, "model.layers.1.x": ENTRY})
    assert result.tensors.keys() == {"model.layers.1.x"} and result.left_out == {"extra layers": 16}


@pytest.mark.parametrize("name", [
    "model.layers.1.mlp.mtpx.weight", "lm_head.weight", "model.layers.1.smtp.weight", ENDLESS,
    "encoder.block.3.layer.0.SelfAttention.q.weight",
])  # fmt: skip
def test_other_names_stay(name: str) -> None:
    assert text_part("here", {"num_hidden_layers": 2}, {name: ENTRY}).tensors == {name: ENTRY}
