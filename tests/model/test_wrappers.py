"""Text models inside of models that also see or hear: they stream as others do, and what is around them is not read.

The towers of every folder here are made NaN once transformers has written its text, and every read is noted.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrix import matrix
from passes import text_scores
from plans import model_shape
from refusals import set_json
from rounding import beyond_doubt
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, save, streaming_ram
from torch import Tensor, nn
from transformers import PreTrainedModel
from wrappers import wrapper_config, wrapper_model

import offload
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.generation_config import generation_settings
from offload.checkpoint.layout import SlabLayout, SlabRead
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.safetensors import read_header
from offload.checkpoint.text_part import text_part
from offload.engine.build import resident_model
from offload.kernels.path_attention import AttentionChunk
from offload.model.attention import windows_of
from offload.streaming.disk import DiskReader

PROMPT = torch.randint(3, VOCAB_SIZE - 5, (30,), generator=torch.Generator().manual_seed(8)).tolist()
NUM_NEW = 30
FAMILIES = ("gemma3", "gemma3n", "gemma4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
            "llama4", "internvl", "llava", "llava_next", "idefics3", "glm4v", "glm4v_moe", "aya_vision", "voxtral",
            "minimax_m3_vl", "qwen3_5", "qwen3_5_moe",
            "aria", "cohere2_vision", "cohere_compass", "deepseek_ocr2",
            "cosmos3_edge", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid",
            "exaone4_5", "fuyu", "gemma4_unified", "glm_ocr", "got_ocr2", "granite4_vision", "granite_docling",
            "hyperclovax_vision_v2", "idefics2", "janus", "lfm2_vl", "lfm3_vl", "lighton_ocr",
            "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
            "moss_transcribe_diarize", "muse_glimmer", "paddleocr_vl", "pp_chart2table", "qianfan_ocr",
            "qwen2_5_omni_thinker", "shieldgemma2", "smolvlm", "step3p7", "video_llama_3", "video_llava",
            "vipllava", "mistral_large4", "glm5_next", "qwen4_exp")  # fmt: skip


def saved(kind: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Written with its towers, which are made NaN in the files; what comes back has them as they were."""
    model = wrapper_model(wrapper_config(kind, **changes))
    save(model, directory)
    poison(directory)
    return model


def poison(directory: Path) -> None:
    checkpoint, num_spoiled = open_checkpoint(directory), 0
    for index, shard in enumerate(checkpoint.shards):
        text = {(entry.shard, entry.lo) for entry in checkpoint.tensors.values()}
        with open(shard, "r+b") as file:
            for entry in read_header(shard, index).tensors.values():
                if (index, entry.lo) not in text:
                    file.seek(entry.lo)
                    file.write(b"\xff" * (entry.hi - entry.lo))
                    num_spoiled += entry.hi - entry.lo
    assert num_spoiled == sum(checkpoint.left_out.values()) > 0


@pytest.fixture
def without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's eyes are of another library; here they are one matrix."""
    from transformers.models.gemma3n import modeling_gemma3n as gemma3n

    make = gemma3n.AutoModel.from_config
    blind = lambda config, **options: nn.Linear(96, 96) if "vision" in config.model_type else make(config, **options)  # noqa: E731
    monkeypatch.setattr(gemma3n.AutoModel, "from_config", blind)


class NotedReads(DiskReader):
    pieces: list[SlabRead]

    def read(self, layout: SlabLayout, slab: Any) -> Any:
        type(self).pieces += layout.pieces
        return super().read(layout, slab)


def written_by_transformers(model: PreTrainedModel) -> list[int]:
    """Its greedy text, of which no rounding decides a token."""
    if model.config.model_type == "llama4":  # the whole fails on text alone in transformers 5.24
        model = model.language_model
    ids_1T = torch.tensor([PROMPT])
    out = model.generate(
        input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=NUM_NEW, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    new_ids = out.sequences[0, len(PROMPT) :].tolist()
    assert beyond_doubt(torch.cat(out.logits)).tolist() == new_ids
    return new_ids


def streamed(directory: Path) -> Any:
    reads = type("Reads", (NotedReads,), {"pieces": []})
    ram = streaming_ram(directory, context=128, num_nodes=8)
    options: dict[str, Any] = {"dtype": "float32", "context": 128, "tree": "8x3", "threads": 1, "open_source": reads}
    options["experts"] = "layers"
    with offload.load(directory, directory, ram=ram, **options) as decoder:
        return decoder.generate(PROMPT, max_new_tokens=NUM_NEW), reads.pieces


def assert_towers_are_untouched(checkpoint: Checkpoint, pieces: list[SlabRead]) -> None:
    text = {(entry.shard, entry.lo, entry.hi) for entry in checkpoint.tensors.values()}
    assert {(piece.shard, piece.lo) for piece in pieces} & {place[:2] for place in text}, (
        "it was this folder that was read"
    )
    for index, shard in enumerate(checkpoint.shards):
        for name, entry in read_header(shard, index).tensors.items():
            if (index, entry.lo, entry.hi) not in text:
                reads = [
                    piece for piece in pieces if piece.shard == index and piece.lo < entry.hi and piece.hi > entry.lo
                ]
                assert not reads, f"{name} was read"


@matrix("kind", FAMILIES, daily=6)
@pytest.mark.usefixtures("without_timm")
def test_the_text_of_a_tree_is_that_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    wanted = written_by_transformers(saved(kind, tmp_path))
    got, pieces = streamed(tmp_path)
    assert got.token_ids == wanted and len(set(wanted)) >= 4
    assert got.plan.num_layer_slots == 3 and got.plan.num_resident == 0
    assert got.stats.tokens_per_sweep > 2, "a draft that is the model itself must be believed"
    assert_towers_are_untouched(open_checkpoint(tmp_path), pieces)


# Only the whole models have a head, which is built behind the text here.
HEADED = ("cosmos3_edge", "glm5_next", "glm_ocr", "granite4_vision", "granite_docling", "mistral_large4",
          "muse_glimmer", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "qwen3_vl",
          "step3p7")  # fmt: skip


def scores(kind: str, directory: Path) -> tuple[Tensor, Tensor]:
    model = saved(kind, directory)
    ids_T = torch.tensor(PROMPT)
    with torch.no_grad():
        wanted_TV = model(input_ids=ids_T[None], attention_mask=torch.ones_like(ids_T)[None]).logits[0]
    return text_scores(resident_model(open_checkpoint(directory), "float32"), ids_T), wanted_TV


@matrix("kind", HEADED, always=["muse_glimmer"], daily=2)
def test_scores_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Greedy text does not tell whether they are scaled, or bounded, as sampling needs them."""
    got_TV, wanted_TV = scores(kind, tmp_path)
    assert torch.allclose(got_TV, wanted_TV, rtol=1e-5, atol=1e-5)


OWN = "model.language_model."
LAYOUTS = {
    "inside, with a model of its own": ("language_model.model.", "language_model.lm_head.", "vision_tower."),
    "in the model": (OWN, "lm_head.", "model.vision_tower."),
    "in the model, with one of its own": (f"{OWN}model.", f"{OWN}lm_head.", "model.visual."),
    "beside the tower": ("model.", "lm_head.", "visual."),
    "as a model of text": ("model.text_model.", "lm_head.", "model.vision_model."),
}


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_old_and_new_files(kind: str, layout: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    text, head, tower = LAYOUTS[layout]
    wanted = {f"model.{name}": tensor for name, tensor in model.get_decoder().state_dict().items()}
    wanted["lm_head.weight"] = model.lm_head.weight.detach()
    named = {f"{text}{name.removeprefix('model.')}": t for name, t in wanted.items() if not name.startswith("lm_head.")}
    named |= {f"{head}weight": wanted["lm_head.weight"], f"{tower}layers.0.self_attn.q_proj.weight": torch.ones(9, 9)}
    rewritten(tmp_path, named)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.left_out == {"vision": 4 * 81} and checkpoint.tensors.keys() == wanted.keys()
    ours = resident_model(checkpoint, "float32").meta_model.state_dict()
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


def rewritten(directory: Path, tensors: dict[str, Tensor]) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def test_sizes_that_a_config_leaves_out_are_usual_ones(tmp_path: Path) -> None:
    """Files on the hub name what differs from the family alone; old ones have the sizes of text outside."""
    saved("qwen2_5_vl", tmp_path)
    path, whole = tmp_path / "config.json", model_shape(open_checkpoint(tmp_path))
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    path.write_text(json.dumps({**text, **config}))
    assert model_shape(open_checkpoint(tmp_path)) == whole
    saved("gemma3", tmp_path / "gemma", num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    whole = model_shape(open_checkpoint(tmp_path / "gemma"))
    set_text(tmp_path / "gemma", num_attention_heads=..., num_key_value_heads=..., head_dim=...)
    assert model_shape(open_checkpoint(tmp_path / "gemma")) == whole


def test_towers_alone_a_language_model_stored_twice_and_one_that_lacks_something_are_refused(tmp_path: Path) -> None:
    model = saved("llava", tmp_path)
    state = model.state_dict()
    twice = {**state, "language_model.lm_head.weight": model.lm_head.weight.detach().clone()}
    lacking = {name: piece for name, piece in state.items() if not name.endswith("layers.1.mlp.up_proj.weight")}
    for tensors, words in (
        ({"vision_tower.layers.0.weight": torch.ones(3)}, "no tensors of a language model, vision alone"),
        (twice, r"lm_head\.weight of the language model is stored twice"),
        (lacking, r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing: download"),
    ):
        rewritten(tmp_path, tensors)
        with pytest.raises(offload.UserError, match=words):
            offload.load(tmp_path, ram="1GiB", context=64)


def set_text(directory: Path, **changes: object) -> None:
    """Change what config.json says of the language model; `...` drops it."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] = {
        key: piece for key, piece in {**config["text_config"], **changes}.items() if piece is not ...
    }
    path.write_text(json.dumps(config))


def test_text_ends_where_its_own_config_says(tmp_path: Path) -> None:
    saved("llava", tmp_path)
    set_text(tmp_path, eos_token_id=[5, 7])
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert generation_settings(open_checkpoint(tmp_path))["eos_token_id"] == [5, 7]
    set_json(tmp_path / "config.json", eos_token_id=9)
    assert generation_settings(open_checkpoint(tmp_path))["eos_token_id"] == 9


@pytest.mark.parametrize("chunk", ["24", -1, 0.5, 1 << 40])
def test_a_chunk_that_is_no_number_of_keys_is_refused(chunk: object, tmp_path: Path) -> None:
    saved("llama4", tmp_path)
    set_text(tmp_path, attention_chunk_size=chunk)
    with pytest.raises(offload.UserError, match=r"attention_chunk_size|not supported"):
        offload.load(tmp_path, ram="1GiB", context=64)


def test_what_is_no_wrapper_keeps_its_names() -> None:
    named: dict[str, Any] = {"language_model.model.layers.0.weight": load_file}
    assert text_part("here", {"model_type": "llama"}, named).tensors == named


def test_each_kind_of_layer_sees_as_far_as_the_config_says() -> None:
    kinds = ["chunked_attention", "full_attention", "sliding_attention"]
    config = SimpleNamespace(model_type="llama4", attention_chunk_size=8, sliding_window=6, layer_types=kinds)
    assert windows_of(config, 3) == [AttentionChunk(8), None, 6]
