"""GGUF files as checkpoints: headers, names, configs, parts; what is wrong is refused in a line, in bounded time."""

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import ARCH, CURRENT, LLAMA3, MODELS, metadata_of, write_gguf
from refusals import damaged
from tiny import build

from offload.checkpoint.gguf import open_gguf
from offload.checkpoint.gguf_config import require_stated
from offload.checkpoint.gguf_header import read_gguf_header
from offload.checkpoint.gguf_names import _OUTER
from offload.checkpoint.open import open_headers
from offload.errors import ReadError, UserError
from offload.families.gguf import ARCHITECTURES
from offload.model.meta import build_meta_model


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 0, at: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)


def note(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def file(*tensors: bytes, notes: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] | None = None,
         magic: bytes = b"GGUF", data: int = 4096) -> bytes:  # fmt: skip
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(notes)))) + b"".join((*notes, *tensors))
    return head + bytes(-len(head) % 32 + data)


SOUND = file(tensor(), tensor("b", at=256), notes=(note("general.alignment", 4, struct.pack("<I", 64)),))
MANY = 2**63 - 1
ALIGNED = "general.alignment must be a power of two of 8 or more"
BAD: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("needs 4 bytes at byte 0, of 0", "again")),
    "another magic": (b"GGML" + SOUND[4:], ("does not begin as a GGUF file does",)),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", ("pointer of Git LFS",)),
    "version 1": (file(tensor(), version=1), ("GGUF version 1 is not read", "version 2 or 3")),
    "version 4": (file(tensor(), version=4), ("GGUF version 4 is not read",)),
    "big-endian": (file(tensor(), version=3 << 24), ("big-endian GGUF files are not read",)),
    "many tensors": (file(counts=(2**19 + 1, 0), data=13 << 20), ("at most 524288 tensors", "take another")),
    "many notes": (file(counts=(0, 2**16 + 1), data=1 << 20), ("65537 notes, of 65536 at most", "again")),
    "endless tensors": (file(counts=(MANY, 0)), ("its header needs", "again")),
    "endless notes": (file(counts=(0, MANY)), ("its header needs", "again")),
    "endless text": (file(notes=(struct.pack("<Q", MANY),)), ("its header needs", "again")),
    "endless list": (file(notes=(note("a", 9, struct.pack("<IQ", 4, MANY)),)), ("its header needs", "again")),
    "endless texts": (file(notes=(note("a", 9, struct.pack("<IQ", 8, MANY)),)), ("its header needs", "again")),
    "list of lists": (file(notes=(note("a", 9, struct.pack("<IQ", 9, 1)),)), ("list of type 9",)),
    "unknown value": (file(notes=(note("a", 99, b""),)), ("value of type 99",)),
    "key twice": (file(notes=(note("a", 0, b"1"), note("a", 0, b"2"))), ("says a twice",)),
    "not UTF-8": (file(tensor("\x00"), notes=(note("a", 8, text(b"\xff\xfe")),)), ("not UTF-8",)),
    "alignment 0": (file(notes=(note("general.alignment", 4, bytes(4)),)), (ALIGNED, "got 0")),
    "alignment 3": (file(notes=(note("general.alignment", 4, b"\3\0\0\0"),)), (ALIGNED, "got 3")),
    "alignment a fraction": (file(notes=(note("general.alignment", 6, struct.pack("<f", 32)),)), (ALIGNED, "got 32.0")),
    "alignment a text": (file(notes=(note("general.alignment", 8, text("32")),)), (ALIGNED,)),
    "tensor twice": (file(tensor(), tensor(at=256)), ("has a twice",)),
    "long name": (file(tensor("n" * 2000)), ("with a name of 2000 characters",)),
    "no dimensions": (file(tensor(dims=())), ("has 0 dimensions",)),
    "nine dimensions": (file(tensor(dims=(1,) * 9)), ("has 9 dimensions",)),
    "size 0": (file(tensor(dims=(32, 0))), ("has shape [0, 32]",)),
    "huge": (file(tensor(dims=(2**40, 2**40))), ("has shape",)),
    "rows of half blocks": (file(tensor(dims=(48, 2), kind=8)), ("rows of 48", "no whole blocks of Q8_0")),
    "offset between": (file(tensor(at=16)), ("begins at 16, no multiple of 32",)),
    "offset beyond": (file(tensor(at=1 << 40)), ("ends at byte", "truncated")),
    "overlap": (file(tensor(), tensor("b", at=128)), ("b and a overlap",)),
    "a hole": (file(tensor(), tensor("b", at=512)), ("behind a, belong to no tensor",)),
    "far too long": (file(tensor()) + bytes((1 << 20) + 64), ("belong to no tensor",)),
    "cut short": (file(tensor(dims=(4096, 4))), ("truncated",)),
    "cut in the header": (SOUND[:40], ("its header needs", "again")),
    **{f"type {name}": (file(tensor(kind=number)), (f"is {name}, which is not read", "Q4_K_M"))
       for name, number in (("Q8_K", 15), ("IQ3_S", 21), ("TQ1_0", 34), ("IQ2_XXS", 16), ("NVFP4", 40), ("I32", 26))},
    "type 77": (file(tensor(kind=77)), ("is of type 77, which is not read",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_header_is_refused(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_gguf_header(tmp_path / "m.gguf")
    line = str(caught.value)
    assert "\n" not in line and len(line) < 600 and "m.gguf" in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "BF16"])
def test_headers_are_read_as_gguf_reads_them(kind: str, tmp_path: Path) -> None:
    written = write_gguf(MODELS["gemma3"](), tmp_path / "m.gguf", kind)
    header, wanted = read_gguf_header(written.path), gguf.GGUFReader(written.path)
    got = {name: (e.dtype, e.shape, e.lo, e.num_bytes) for name, e in header.tensors.items()}
    assert got == {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(reversed(tensor.shape.tolist())),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in wanted.tensors
    }
    fields = wanted.fields.items()
    values: dict[str, Any] = {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}
    assert header.metadata == values


def test_random_damage_never_surprises(tmp_path: Path) -> None:
    path = write_gguf(MODELS["qwen3"](), tmp_path / "m.gguf", "Q8_0").path
    whole = path.read_bytes()
    first = min(entry.lo for entry in read_gguf_header(path).tensors.values())
    rng, num_refused = random.Random(1), 0
    for _ in range(300):
        path.write_bytes(damaged(whole[:first], rng) + whole[first:])
        try:
            header = read_gguf_header(path)
        except UserError:
            num_refused += 1
        else:
            size = path.stat().st_size
            assert all(0 < entry.lo < entry.hi <= size for entry in header.tensors.values())
    assert num_refused > 100


@pytest.mark.parametrize("name", MODELS)
def test_names_and_config_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    config = MODELS[name]()
    checkpoint = open_headers(write_gguf(config, tmp_path / "m.gguf", "Q4_0").path)
    model = build(config)
    shapes = {
        key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if key not in model.all_tied_weights_keys
    }
    assert {key: entry.shape for key, entry in checkpoint.tensors.items()} == shapes
    got, wanted = (c.to_dict() for c in (build_meta_model(checkpoint, torch.float32).config, build(config).config))
    assert not {key for key in wanted if got[key] != wanted[key]} - {"dtype", "architectures", "return_dict"}


def test_every_name_of_gguf_is_known() -> None:
    """All of the library's table for these architectures, except for other models' names; all are tried here."""
    assert set(ARCH.values()) == set(ARCHITECTURES)
    for arch, architecture in ARCHITECTURES.items():
        keys = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]  # none where it is newer
        names = {gguf.TENSOR_NAMES[tensor] for key in keys for tensor in gguf.MODEL_TENSORS[key]}
        known = {f"blk.{{bid}}.{part}" for part in (*architecture.parts, *architecture.experts, *architecture.woven)}
        known |= {f"blk.{{bid}}.{name.rpartition('.')[0] or name}" for name in architecture.others}
        known |= {part.removesuffix(".weight") for part in (*_OUTER, *architecture.outer, *architecture.ignored)}
        if arch == "deepseek2":  # heads of one matrix
            known |= {"blk.{bid}.attn_k_b", "blk.{bid}.attn_v_b"}
        others = {name for name in names if "nextn" in name or name.endswith(("rope_freqs", "rot_embd"))}
        assert not names - others - known, arch


def test_heads_ends_and_scaling_come_from_the_file(tmp_path: Path) -> None:
    # Heads of Llama alone are interleaved.
    for name, wanted in (("mistral", {"q": 4, "k": 2}), ("qwen3", {"q": None, "k": None})):
        tensors = open_gguf(write_gguf(MODELS[name](), tmp_path / f"{name}.gguf").path).tensors
        coded = {part: tensors[f"model.layers.0.self_attn.{part}_proj.weight"].coded for part in "qk"}
        assert {part: held and held.coding.num_heads for part, held in coded.items()} == wanted
    # Ends of texts, of turns and of messages.
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    path = write_gguf(MODELS["llama"](), tmp_path / "m.gguf", says=ends).path
    assert open_gguf(path).config["eos_token_id"] == [2, 7, 9]


OTHER = {"general.architecture": "qwen2moe"}
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
SAID: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("llama", OTHER, "architecture qwen2moe is not read; those of llama,"),
    "adapter": ("llama", {"general.type": "adapter"}, "a GGUF adapter of architecture llama is not read"),
    "experts": ("llama", {"llama.expert_count": 8}, "its header does not say num_experts_per_tok"),
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
    "endless layers": ("gemma3", {"gemma3.block_count": 10**8}, "num_hidden_layers in its header must be at most"),
    "endless heads": ("llama", {f"llama.{of}": 10**8 for of in WIDTHS}, "its rope scaling .rope_freqs.weight."),
    "odd heads": ("mistral", {"llama.attention.head_count": 3}, "has 256 rows for 3 heads"),
}


EXTRA = {
    "blk.0.ssm_in.weight": "blk.0.ssm_in.weight is not known of architecture qwen3",
    "blk.0.attn_q.bias": "has biases of q_proj, which its config has not",
    "rope_freqs.weight": "rope",
}
OTHER_SCALING = r"its rope scaling .rope_freqs.weight. is not known from the file alone"
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (model, {"says": says}, words) for name, (model, says, words) in SAID.items()},
    **{name: ("qwen3", {"extra": {name: np.ones(16, np.float32)}}, words) for name, words in EXTRA.items()},
    "factors": ("llama", {"changed": lambda name, raw: raw * 1.5 if "rope" in name else raw}, OTHER_SCALING),
    "no factors": ("llama", {"changed": lambda name, raw: raw * 0 if "rope" in name else raw}, "be finite and above 0"),
}


@pytest.mark.parametrize(("model", "options", "words"), UNFIT.values(), ids=UNFIT)
def test_what_a_file_says_is_refused(model: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_gguf(MODELS[model](), tmp_path / "m.gguf", **options).path
    with pytest.raises(UserError, match=words):
        open_headers(path)


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


def test_a_file_that_is_cut_behind_its_header_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(MODELS["llama"](), tmp_path / "m.gguf").path
    factors = read_gguf_header(path).tensors["rope_freqs.weight"]

    def cut_after(*given: Any) -> Any:
        result = read_gguf_header(*given)
        os.truncate(path, factors.hi - 4)
        return result

    monkeypatch.setattr("offload.checkpoint.gguf.read_gguf_header", cut_after)
    with pytest.raises(ReadError, match="cut short while in use"):
        open_gguf(path)


SCALED = {"rope_parameters": {**LLAMA3, "factor": 32.0}}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
OTHERS = [
    ("llama", {"model_type": "qwen2"}, "is of architecture llama, .* of qwen2"),
    pytest.param("llama", {"hidden_size": 512}, "hidden_size is 256 there and 512 in", id="hidden_size"),
    ("llama", {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-05 there and 1e-06"),
    ("llama", SCALED, "not that of rope_freqs.weight"),
    ("llama", PLAIN, "not that of rope_freqs.weight"),
    ("qwen3", PLAIN, "rope_theta is 10000.0 there"),
    ("gemma3", {"sliding_window": 512}, "sliding_window is 24 there and 512"),
]


@pytest.mark.parametrize(("name", "changes", "words"), OTHERS)
def test_a_config_of_another_model_is_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_gguf(MODELS[name](), tmp_path / "m.gguf").path
    with pytest.raises(UserError, match=words):
        open_headers(path, config_folder(MODELS[name](), tmp_path / "original", **changes))


STATED = ("vocab_size", "rope.freq_base", "attention.head_count_kv", "attention.key_length", "feed_forward_length",
          "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_scale")  # fmt: skip


@pytest.mark.parametrize("name", [*MODELS, *CURRENT])
def test_every_number_of_a_header_is_held_against_the_config(name: str) -> None:
    """Those of equal shapes, too: another base, or another number of experts a token."""
    config = {**MODELS, **CURRENT}[name]()
    arch, settings = ARCH[config.model_type], config.to_dict()
    said = {**metadata_of(config, arch), "general.architecture": arch}
    if settings.get("routed_scaling_factor"):
        said[f"{arch}.expert_weights_scale"] = float(settings["routed_scaling_factor"])
    require_stated("m.gguf", settings, said, "config.json")
    num_refused = 0
    for key in (f"{arch}.{name}" for name in STATED):
        if key in said:
            with pytest.raises(UserError, match=rf"{key} is .* there and .* in config.json: give `config`"):
                require_stated("m.gguf", settings, {**said, key: said[key] * 2 + 1}, "config.json")
            num_refused += 1
    assert num_refused >= (7 if f"{arch}.expert_count" in said else 4)


def test_parts_are_one_model(tmp_path: Path) -> None:
    first = write_gguf(MODELS["qwen3"](), tmp_path / "m.gguf", max_tensors=9).path
    assert first.name.startswith("m-00001-of-0000")
    whole = open_headers(write_gguf(MODELS["qwen3"](), tmp_path / "whole.gguf").path)
    for model in (first, max(tmp_path.glob("m-*"))):
        checkpoint = open_headers(model)
        assert len(checkpoint.shards) == len(checkpoint.stamps) > 2
        assert {name: e.shape for name, e in checkpoint.tensors.items()} == {
            n: e.shape for n, e in whole.tensors.items()
        }
    (tmp_path / "whole.gguf").unlink()
    assert open_headers(tmp_path).shards == checkpoint.shards


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
    beyond = tmp_path / f"m-{len(parts) + 1:05}-of-{len(parts):05}.gguf"
    shutil.copy(tmp_path / "kept", beyond)
    with pytest.raises(UserError, match="give it another name"):
        open_headers(beyond)
    shutil.copy(tmp_path / "kept", tmp_path / "alone.gguf")
    with pytest.raises(UserError, match="give parts the names that they were made with"):
        open_headers(tmp_path / "alone.gguf")


def test_several_models_in_a_folder_are_refused_by_name(sound: Path, tmp_path: Path) -> None:
    for kind in ("Q4_0", "Q8_0"):
        write_gguf(MODELS["qwen3"](), tmp_path / f"m-{kind}.gguf", kind)
    with pytest.raises(UserError, match=r"several GGUF models \(m-Q4_0.gguf, m-Q8_0.gguf\): give the path of one"):
        open_headers(tmp_path)
    other = tmp_path / "m-Q4_0.gguf"
    for name in ("mmproj-m.gguf", "m-mmproj-F16.gguf"):
        other = other.rename(tmp_path / name)
        assert open_headers(tmp_path).directory.name == "m-Q8_0.gguf"
    (tmp_path / "m-Q8_0.gguf").rename(tmp_path / "m-Q8_0.GGUF")
    assert open_headers(tmp_path).directory.name == "m-Q8_0.GGUF"
    with pytest.raises(UserError, match="`config` goes with a model in a GGUF file"):
        open_headers(sound, sound)
