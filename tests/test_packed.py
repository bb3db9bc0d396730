"""A packed model is the model: logits have the same bits, and ids are the same, streamed or resident, with any tree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from passes import text_scores
from plans import model_shape, plan_memory
from rounding import Promise, assert_same_bits
from shell import run_python
from test_families import config_of, tiny_model
from test_tiny import prompts
from tiny import FAMILIES, build, save, save_pair, streaming_ram

import offload
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import PAIR
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, REFERENCE
from offload.kernels.machine_code import fused_lanes
from offload.memory.sizes import RUNTIME_BYTES
from offload.packing.forecast import stack_of
from offload.packing.format import read_packed, write_original
from offload.packing.pack import pack, unpack
from offload.planning.draft_kinds import files_of

FORMS = [REFERENCE, pytest.param(COMPILED, marks=pytest.mark.skipif(not HAS_NUMBA, reason="needs numba"))]


def packed(model: Path) -> Path:
    return pack(model, model.with_name(f"{model.name}-packed"), progress=lambda *_: None).folder


def half(folder: Path, config: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """In bfloat16, or in float16 that was bfloat16 once."""
    return save(build(FAMILIES[config](), seed).bfloat16().to(dtype), folder)


def logits(folder: Path, dtype: str, expansion=REFERENCE) -> torch.Tensor:
    model = resident_model(open_checkpoint(folder), dtype)
    model.set_expansion(expansion)
    return text_scores(model, torch.tensor(prompts()[1]))


@pytest.mark.parametrize("expansion", FORMS, ids=["torch", "numba"])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32"),
     ("float16", "bfloat16")],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama-tied", "phi3", "gemma3", "qwen3-moe"])
def test_logits_have_the_same_bits(family: str, stored: str, dtype: str, expansion, tmp_path: Path) -> None:
    model = half(tmp_path / "model", family, dtype=getattr(torch, stored))
    wanted = logits(model, dtype)
    folder = packed(model)
    assert any(".layers.0." in name and value.coded for name, value in open_checkpoint(folder).tensors.items())
    assert_same_bits(logits(folder, dtype, expansion), wanted, Promise.SAME_PRODUCTS)
    other = packed(half(tmp_path / "other", family, 1, getattr(torch, stored)))
    assert not torch.equal(logits(other, dtype, expansion), wanted), "else nothing is shown"


@pytest.mark.parametrize(
    ("family", "stored", "dtype"),
    [("llama", torch.bfloat16, "float32"), ("qwen3-moe", torch.bfloat16, "float32"), ("llama", torch.float16, "auto")],
)
def test_streamed_and_resident_ids_are_the_same_with_every_tree(
    family: str, stored: torch.dtype, dtype: str, tmp_path: Path
) -> None:
    """What is packed is computed with in the type of what it was made from."""
    _, draft = save_pair(FAMILIES[family](), tmp_path, noise=0.003)
    target = half(tmp_path / "half", family, dtype=stored)
    folder, wanted, resident = packed(target), dict[str, list[int]](), list[int]()
    sampling = {"temperature": 0.7, "seed": 3, "max_new_tokens": 24, "top_p": 0.95}
    for model in (target, folder):
        for ram in (streaming_ram(model, draft, num_nodes=64, num_slots=2, dtype=dtype), "1GiB"):
            options = {"ram": ram, "context": 256, "tree": "64x16", "threads": 1, "dtype": dtype}
            with offload.load(model, draft, **options) as decoder:
                resident.append(decoder.plan.num_resident)
                for tree in ("none", "64x16"):
                    got = decoder.generate(prompts()[1], tree=tree, **sampling).token_ids
                    assert wanted.setdefault("ids", got) == got, (model, ram, tree)
    assert resident[0] == resident[2] == 0 < resident[1] == resident[3]


def test_layers_take_what_is_stored(tmp_path: Path) -> None:
    target = half(tmp_path / "target", "llama")
    plain, coded = (model_shape(open_checkpoint(folder)) for folder in (target, packed(target)))
    assert max(coded.layer_bytes) < 0.85 * max(plain.layer_bytes)
    assert coded.scratch_bytes >= 2 * 96 * 64, "what the largest module is expanded into"


# the first with biases beside its stacks
@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_experts_of_packed_stacks_come_one_by_one(family: str, tmp_path: Path) -> None:
    """With the text of whole layers, of the model before, and none of it in any number that is not read."""
    model = tmp_path / "model"
    save(tiny_model(config_of(family)).bfloat16(), model)
    stacks = {name for name in open_checkpoint(model).tensors if name.endswith("experts.gate_up_proj")}
    folder = packed(model)
    tensors = open_checkpoint(folder).tensors
    parts = [name for name in tensors if name.endswith(".gate_up_proj.rows.0")]
    assert stacks and not stacks & {*tensors} and all(tensors[name].coded for name in parts)
    assert len(parts) == sum(open_checkpoint(model).tensors[name].shape[0] for name in stacks)
    sizes = [model_shape(open_checkpoint(source)).experts for source in (model, folder)]
    assert all(sizes), "one by one, before and after"
    options: dict[str, Any] = {"ram": "1GiB", "context": 128, "threads": 1, "dtype": "float32"}
    texts = []
    for target, experts in ((model, "layers"), (folder, "layers"), (folder, "demand")):
        with offload.load(target, target, experts=experts, tree="16x8", **options) as decoder:
            assert decoder.plan.has_experts == (experts == "demand")
            texts.append(decoder.generate(prompts()[1], max_new_tokens=16).token_ids)
    assert texts[0] == texts[1] == texts[2]
    back = unpack(folder, tmp_path / "back", progress=lambda *_: None)
    for path in model.glob("*.safetensors"):
        assert (back / path.name).read_bytes() == path.read_bytes()


def test_an_expert_that_a_packed_file_lost_is_told(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(tiny_model(config_of("gpt_oss")).bfloat16(), model)
    files = [read_packed(path) for path in packed(model).glob("*.safetensors")]
    origin, lost = next((file, name) for file in files for name in file.tensors if name.endswith(".3.down_proj.rows.0"))
    assert stack_of(lost).endswith("experts.down_proj")
    others = {name: entry for name, entry in origin.tensors.items() if name != lost}
    with pytest.raises(UserError, match=r"is in its header or in its packed files, not in both"):
        write_original(tmp_path / "a.safetensors", [origin._replace(tensors=others)], lambda _: None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama-tied", "phi3", "gemma3", "qwen3"])
def test_beside_a_copy_bits_are_the_same_and_the_copy_is_there_once(family: str, dtype: str, tmp_path: Path) -> None:
    """In logits, and in ids with the copy as a draft, another draft, and none; memory as planned."""
    config = FAMILIES[family]()
    config.num_hidden_layers = 8
    if getattr(config, "layer_types", None):
        config.layer_types = (list(config.layer_types) * 8)[:8]
    model = save(build(config, 0).bfloat16(), tmp_path / "model")
    folder = pack(model, tmp_path / "beside", beside="int4", progress=lambda *_: None).folder
    for expansion in (REFERENCE, COMPILED) if HAS_NUMBA else (REFERENCE,):
        assert_same_bits(logits(folder, dtype, expansion), logits(model, dtype), Promise.SAME_PRODUCTS)
    sampling = {"temperature": 0.7, "seed": 3, "max_new_tokens": 24}
    ids = []
    for target, draft in ((model, None), (model, "self:int4"), (folder, None), (folder, model), (folder, "self:int4")):
        files = files_of([open_checkpoint(model) for model in (target, draft) if isinstance(model, Path)], draft, None)
        roomy = plan_memory(files, ram=1 << 40, dtype=dtype, context=256, num_nodes=16)
        passing_bytes = max(model_shape(file, dtype).beside_bytes for file in files if file)
        ram = roomy.fixed_bytes + max(2 * max(roomy.layer_bytes), passing_bytes) + 100
        options = {"ram": ram, "context": 256, "tree": "16x15" if draft else "none", "threads": 1, "dtype": dtype}
        with offload.load(str(target), draft and str(draft), **options) as decoder:
            plan = decoder.plan
            assert plan.streamed_bytes or dtype == "float32"
            ids.append(decoder.generate(prompts()[1], **sampling).token_ids)
            if target == folder and draft == "self:int4":
                tensor = decoder.drafter.model
                copy, shared = decoder.target._model._expanded._companions, tensor.held._matrices
                words = {held["word"].data_ptr() for held in copy.values()}
                assert words == {weights.word_NK.data_ptr() for weights in shared}, "the copy is there twice"
                scales = {held["scale"].data_ptr() for held in copy.values()}
                assert (scales == {weights.scale.data_ptr() for weights in shared}) == (dtype == "bfloat16")
    assert all(tokens == ids[0] for tokens in ids)


_DRAFTED_BY_ITS_COPY = """
import sys, offload
options = {"ram": "1GiB", "context": 256, "tree": "dynamic:32x31", "device": "cpu", "profile": "none"}
with offload.load(sys.argv[1], "self:int4", **options) as decoder:
    decoder.generate([3, 4, 5] * 20, max_new_tokens=24)
    print(decoder.plan.runtime_bytes, "numba" in sys.modules)
"""


@pytest.mark.skipif(not fused_lanes(), reason="no machine code can be made for this processor")
def test_beside_a_copy_no_compiler_is_planned_for_or_imported(tmp_path: Path) -> None:
    """Neither to read the weights, nor to draft with few rows and many."""
    folder = pack(PAIR / "target", tmp_path / "beside", beside="int4", progress=lambda *_: None).folder
    assert run_python("-c", _DRAFTED_BY_ITS_COPY, folder).split() == [str(RUNTIME_BYTES), "False"]


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3-moe"])
def test_what_is_held_beside_the_words_is_what_is_planned(family: str, tmp_path: Path) -> None:
    """This is so for layers; what lies around them is expanded once, and its companions are let go."""
    checkpoint = open_checkpoint(packed(half(tmp_path / "model", family)))
    assert any(entry.coded for name, entry in checkpoint.tensors.items() if "embed_tokens" in name)
    held = resident_model(checkpoint, "bfloat16")._expanded._companions
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensors in held.values() for tensor in tensors.values())
    assert num_bytes == model_shape(checkpoint).companion_bytes > 0
