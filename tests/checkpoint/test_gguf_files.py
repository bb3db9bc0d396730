"""GGUF files as checkpoints: names, configs from the file and from beside it, parts, folders, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import ARCH, LLAMA3, MODELS, write_gguf
from tiny import build

from offload.checkpoint.gguf import open_gguf
from offload.checkpoint.hub import open_headers
from offload.errors import UserError
from offload.model.meta import build_meta_model


def of_model(config: Any) -> dict[str, tuple[int, ...]]:
    model = build(config)
    tied = set(model.all_tied_weights_keys)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_config_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """The config is derived from the file alone."""
    import torch

    config = MODELS[name]()
    found = open_headers(write_gguf(config, tmp_path / "m.gguf", "Q4_0").path)
    assert {own: entry.shape for own, entry in found.tensors.items()} == of_model(config)
    told, wanted = (c.to_dict() for c in (build_meta_model(found, torch.float32).config, build(config).config))
    differing = {key for key in wanted if told[key] != wanted[key]} - {"dtype", "architectures", "return_dict"}
    assert not differing


def test_every_name_of_gguf_is_known() -> None:
    """All that its own table has for these architectures, but for what only other models have."""
    from offload.checkpoint.gguf import _ARCHITECTURES, _OUTER

    for arch, own in _ARCHITECTURES.items():
        key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[key]}
        others = {one for one in names if "exps" in one or one.endswith(("rope_freqs", "rot_embd", "gate_inp"))}
        known = {f"blk.{{bid}}.{part}" for part in own.parts} | {one.removesuffix(".weight") for one in _OUTER}
        assert known == names - others, arch


def test_heads_of_llama_alone_are_interleaved(tmp_path: Path) -> None:
    for name, wanted in (("mistral", {"q": 4, "k": 2}), ("qwen3", {"q": None, "k": None})):
        tensors = open_gguf(write_gguf(MODELS[name](), tmp_path / f"{name}.gguf").path).tensors
        coded = {part: tensors[f"model.layers.0.self_attn.{part}_proj.weight"].coded for part in "qk"}
        assert {part: one and one.coding.num_heads for part, one in coded.items()} == wanted


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaling_of_llama_3_comes_from_its_factors(factor: float, tmp_path: Path) -> None:
    config = MODELS["llama"]()
    config.rope_parameters = {**LLAMA3, "factor": factor}
    rope = open_gguf(write_gguf(config, tmp_path / "m.gguf").path).config["rope_scaling"]
    assert rope == {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}


def test_ends_of_texts_and_of_turns(tmp_path: Path) -> None:
    path = write_gguf(MODELS["llama"](), tmp_path / "m.gguf", says={"tokenizer.ggml.eot_token_id": 7}).path
    assert open_gguf(path).config["eos_token_id"] == [2, 7]


SAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": (
        "llama",
        {"general.architecture": "qwen2moe"},
        "a GGUF model of architecture qwen2moe is not read; those of Llama,",
    ),
    "adapter": ("llama", {"general.type": "adapter"}, "a GGUF adapter of architecture llama is not read"),
    "experts": ("llama", {"llama.expert_count": 8}, "experts in GGUF files are not read"),
    "no layers": ("qwen3", {"qwen3.block_count": None}, "its header has no qwen3.block_count: give `config`"),
    "no width": ("qwen3", {"qwen3.embedding_length": 0}, "qwen3.embedding_length must be one whole number above 0"),
    "a text": ("qwen3", {"qwen3.block_count": "3"}, "qwen3.block_count must be one whole number"),
    "not finite": ("qwen3", {"qwen3.rope.freq_base": float("nan")}, "qwen3.rope.freq_base must be a number above 0"),
    "heads by layer": ("qwen3", {"qwen3.attention.head_count_kv": [2, 2, 4]}, "must be one whole number above 0"),
    "unknown word": ("llama", {"llama.logit_scale": 2.0}, "says llama.logit_scale, which is not known here"),
    "unknown scaling": ("qwen2", {"qwen2.rope.scaling.type": "longrope"}, "its rope scaling"),
    "part of a head": ("llama", {"llama.rope.dimension_count": 8}, "rotary positions of part of a head"),
    "widths": ("qwen3", {"qwen3.attention.value_length": 64}, "keys and values of different widths"),
    "part of many": ("qwen3", {"split.count": 3, "split.no": 1}, r"says it is part 1 \(from 0\) of 3"),
    "odd heads": ("mistral", {"llama.attention.head_count": 3}, "has 256 rows for 3 heads"),
}


@pytest.mark.parametrize("name", SAYS)
def test_what_a_file_says_is_refused(name: str, tmp_path: Path) -> None:
    model, says, words = SAYS[name]
    path = write_gguf(MODELS[model](), tmp_path / "m.gguf", says=says).path
    with pytest.raises(UserError, match=words):
        open_headers(path)


def test_unknown_and_useless_tensors_are_refused(tmp_path: Path) -> None:
    import numpy as np

    for extra, words in (
        ("blk.0.ssm_in.weight", "blk.0.ssm_in.weight is not known of architecture qwen3"),
        ("blk.0.attn_q.bias", "has biases of q_proj, which its config has not"),
        ("rope_freqs.weight", "rope"),
    ):
        path = write_gguf(MODELS["qwen3"](), tmp_path / "m.gguf", extra={extra: np.ones(16, np.float32)}).path
        with pytest.raises(UserError, match=words):
            open_headers(path)


def test_factors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        MODELS["llama"](), tmp_path / "m.gguf", changed=lambda own, raw: raw * 1.5 if "rope" in own else raw
    )
    with pytest.raises(UserError, match=r"its rope scaling .rope_freqs.weight. is not known from the file alone"):
        open_headers(path.path)


def config_folder(config: Any, folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **changes}))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_config_of_the_original_goes_before_the_file(name: str, tmp_path: Path) -> None:
    """Named, or beside the file."""
    config = MODELS[name]()
    path = write_gguf(config, tmp_path / "m.gguf").path
    folder = config_folder(config, tmp_path / "original", mark=1)
    assert open_headers(path, folder).config["mark"] == 1
    assert "mark" not in open_headers(path).config
    shutil.copy(folder / "config.json", tmp_path)
    beside = open_headers(tmp_path)
    assert beside.config["mark"] == 1 and beside.small_files == tmp_path


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"model_type": "qwen2"}, "is of architecture llama, .* of qwen2"),
        ("llama", {"hidden_size": 512}, "hidden_size is 256 there and 512 in"),
        ("llama", {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-05 there and 1e-06"),
        ("llama", {"rope_parameters": {**LLAMA3, "factor": 32.0}}, "not that of rope_freqs.weight"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "not that of rope_freqs.weight"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 10000.0 there"),
        ("gemma3", {"sliding_window": 512}, "sliding_window is 24 there and 512"),
    ],
)
def test_a_config_of_another_model_is_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_gguf(MODELS[name](), tmp_path / "m.gguf").path
    with pytest.raises(UserError, match=words):
        open_headers(path, config_folder(MODELS[name](), tmp_path / "original", **changes))


def test_parts_are_one_model(tmp_path: Path) -> None:
    first = write_gguf(MODELS["qwen3"](), tmp_path / "m.gguf", max_tensors=9).path
    assert first.name.startswith("m-00001-of-0000")
    whole = open_headers(write_gguf(MODELS["qwen3"](), tmp_path / "whole.gguf").path)
    for model in (first, max(tmp_path.glob("m-*"))):
        found = open_headers(model)
        assert len(found.shards) == len(found.stamps) > 2
        assert {name: e.shape for name, e in found.tensors.items()} == {n: e.shape for n, e in whole.tensors.items()}
    (tmp_path / "whole.gguf").unlink()
    assert open_headers(tmp_path).shards == found.shards


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = write_gguf(MODELS["qwen3"](), tmp_path / "m.gguf", max_tensors=16).path
    parts = sorted(tmp_path.glob("m-*"))
    shutil.copy(parts[1], tmp_path / "kept")
    shutil.copy(parts[0], parts[1])
    with pytest.raises(UserError, match=r"says it is part 0 \(from 0\) of"):
        open_headers(first)
    parts[1].unlink()
    with pytest.raises(UserError, match=r"is missing beside .*: download all parts"):
        open_headers(first)
    shutil.copy(tmp_path / "kept", tmp_path / "alone.gguf")
    with pytest.raises(UserError, match="give parts the names that they were made with"):
        open_headers(tmp_path / "alone.gguf")


def test_several_models_in_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    for kind in ("Q4_0", "Q8_0"):
        write_gguf(MODELS["qwen3"](), tmp_path / f"m-{kind}.gguf", kind)
    with pytest.raises(UserError, match=r"several GGUF models \(m-Q4_0.gguf, m-Q8_0.gguf\): give the path of one"):
        open_headers(tmp_path)
    (tmp_path / "m-Q4_0.gguf").rename(tmp_path / "mmproj-m.gguf")
    assert open_headers(tmp_path).directory.name == "m-Q8_0.gguf"


def test_a_config_for_a_folder_of_safetensors_is_refused(sound: Path) -> None:
    with pytest.raises(UserError, match="`config` goes with a model in a GGUF file"):
        open_headers(sound, sound)


def test_all_architectures_are_tried_here() -> None:
    from offload.checkpoint.gguf import _ARCHITECTURES

    assert set(ARCH.values()) == set(_ARCHITECTURES)
