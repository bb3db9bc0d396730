"""A model's folder and what it holds: whatever is wrong there, or cannot be run, is refused in one line.

The line names rule, value and remedy; refusing writes nothing.
"""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from plans import plan_memory
from quantised import RECIPES
from refusals import BOTH, Break, assert_refused, case, config, damaged, drop, generate, header, refuse_folder
from shell import shell
from tiny import FAMILIES, VOCAB_SIZE, build, save, save_reciter, save_tokenizer

from offload.checkpoint.files import read_json
from offload.checkpoint.methods import check_method
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.small_files import check_counts, check_types
from offload.errors import UserError
from offload.model.meta import build_meta_model

pytestmark = pytest.mark.usefixtures("_instant_link")


def overwrite(name: str, content: bytes) -> Break:
    return lambda directory: (directory / name).write_bytes(content)


def both(*breaks: Break) -> Break:
    return lambda directory: [folder(directory) for folder in breaks]


def only_pickles(directory: Path) -> None:
    for number, shard in enumerate(directory.glob("*.safetensors*")):
        shard.rename(directory / f"pytorch_model-{number}.bin")


def only_adapter(directory: Path) -> None:
    """What a LoRA is saved as."""
    only_pickles(directory)
    (directory / "config.json").rename(directory / "adapter_config.json")
    (directory / "adapter_model.safetensors").touch()


def only_gguf(directory: Path) -> None:
    drop("*.safetensors*")(directory)
    (directory / "model-Q4_K_M.gguf").touch()


def edited(name: str, **changes: object) -> Break:
    def edit(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def inside(seeing: Mapping[str, object] = MappingProxyType({}), **changes: object) -> Break:
    """A model around a language model with these settings, which leaves the usual ones out."""
    return config(model_type="gemma3", text_config={"model_type": "gemma3_text", **changes}, vision_config={**seeing})


def tokenizer(**changes: object) -> Break:
    return edited("tokenizer_config.json", **changes)


def charsmap(encoded: object) -> Break:
    """What SentencePiece replaces before it cuts a text into tokens."""
    return edited("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": encoded})


# Rust's way to fail, which Python sees as no `Exception`.
panicking_tokenizer = edited("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"})
GENERATION, WORDY_END = "generation_config.json", b'{"eos_token_id": "</s>"}'
SEEING = config(model_type="clip", vision_config={}, text_config=...)
NOT_TEXT = "model_type in config.json must be text"
SU = {"rope_type": "su", "rope_theta": 1e4}
GPTQ = {"quant_method": "gptq", "bits": 4}
FOLDERS = [
    case("missing directory", shutil.rmtree, "no model directory", "check the path"),
    case("no config", drop("config.json"), "no config.json", "Hugging Face model"),
    case("config not JSON", overwrite("config.json", b"{"), "config.json", "not valid JSON", "again"),
    case("config not UTF-8", overwrite("config.json", b"\xff\xfe{}"), "config.json", "again"),
    case("config nested too deep", overwrite("config.json", b"[" * 100_000), "config.json", "again"),
    case("config a list", overwrite("config.json", b"[]"), "list, not an object"),
    case("config a folder", both(drop("config.json"), lambda folder: (folder / "config.json").mkdir()), "config.json"),
    case("config without sizes", config(hidden_size=...), "no hidden_size", "model.layers.0"),
    case("sizes as text", config(hidden_size="64"), "hidden_size"),
    case("more layers than tensors", config(num_hidden_layers=10**12), "no tensors for layer", "model.layers.0"),
    case("vocabulary as text", config(vocab_size="many"), "vocab_size"),
    case("a width for each layer", config(hidden_size=[64]), "hidden_size", "whole number", "[64]"),
    case("an endless vocabulary", config(vocab_size=10**400), "vocab_size", "below 2^63"),
    case("heads as text", config(num_attention_heads="4"), "num_attention_heads"),
    case("positions as text", config(max_position_embeddings="long"), "max_position_embeddings"),
    case("feed-forward as a list", config(intermediate_size=[96]), "intermediate_size"),
    case("no heads", config(num_attention_heads=0), "model type llama is not supported"),
    case("an end in words", config(eos_token_id="2"), "a value does not fit model type llama", "mend config.json"),
    case("a kind of rotation", config(rope_parameters=SU), "does not know 'su' of config.json"),
    case("a window in words", config(model_type="mistral", sliding_window="32"), "sliding_window"),
    case("a window in a list", config(model_type="mistral", sliding_window=[1]), "sliding_window"),
    case("an endless window", config(model_type="mistral", sliding_window=2**64), "sliding_window"),
    case("negative heads", config(num_key_value_heads=-2), "num_key_value_heads"),
    case("a kind of model in a list", config(model_type=["llama"]), NOT_TEXT, "['llama']"),
    case("a kind of text in a list", inside(model_type=["llama"]), NOT_TEXT),
    case("endless layers of text", inside(num_hidden_layers=10**12), "num_hidden_layers", "at most 10000"),
    case("endless layers of sight", inside({"num_hidden_layers": 10**12}), "num_hidden_layers", "at most 10000"),
    case("labels without end", config(num_labels=10**12), "num_labels", "at most 100000"),
    case("labels of sight without end", inside({"num_labels": 10**12}), "num_labels", "at most 100000"),
    case("config of another model", config(intermediate_size=128), "must have shape [128, 64]"),
    case("quantised", config(quantization_config=GPTQ), "as GPTQ says, no tensor is", "remove quantization_config"),
    case("quantised in its own way", config(quantization_config="int4"), "must be an object", "mend"),
    case("type of integers", config(dtype="int8"), "cannot compute in int8", "--dtype bfloat16"),
    case("pickles only", only_pickles, "pickled weights", "can run code", "convert to safetensors"),
    case("an adapter", only_adapter, "holds an adapter, such as LoRA", "merge it into the model"),
    case("GGUF", only_gguf, "model-Q4_K_M.gguf: its header needs 4 bytes at byte 0, of 0", "again"),
    case("GGUF alone", both(only_gguf, drop("config.json")), "model-Q4_K_M.gguf: its header needs 4 bytes", "again"),
    case("nothing of its text", config(model_type="llava", text_config={}), "describe a language model", "llava", "{}"),
    case("text in words", config(model_type="llava", text_config="llama"), "must describe a language model", "llama"),
    case("text of no model", config(model_type="llava", text_config={"model_type": "no"}), "describe a language model"),
    case("around what is unknown", config(model_type="no", text_config={"hidden_size": 8}), "describe a language"),
    case("no text inside", SEEING, "does not write text"),
    case("no weights", drop("*.safetensors*"), "no safetensors files", "download the checkpoint again", by_plan=False),
    case(
        "another form",
        both(drop("*.safetensors*"), lambda folder: (folder / "model.onnx").touch()),
        "it has model.onnx",
        "form that is read",
        by_plan=False,
    ),
    case("generation config broken", overwrite(GENERATION, b"{"), GENERATION, by_plan=False),
    case("end token in words", overwrite(GENERATION, WORDY_END), "eos_token_id", "'</s>'", by_plan=False),
    case("tokenizer broken", overwrite("tokenizer.json", b"{}"), "tokenizer", "again", by_plan=False),
    case("tokenizer config cut", overwrite("tokenizer_config.json", b"{"), "tokenizer", "again", by_plan=False),
    case("tokenizer's longest text in words", tokenizer(model_max_length="long"), "tokenizer failed", by_plan=False),
    case("tokenizer of another kind", tokenizer(tokenizer_class="BertTokenizer"), "tokenizer failed", by_plan=False),
    case("a table of 4 GiB", charsmap("/////w=="), "tokenizer", "precompiled_charsmap is cut short", by_plan=False),
    case("a table that is a number", charsmap(7), "tokenizer", "precompiled_charsmap must be text", by_plan=False),
    case("labels of a tokenizer", tokenizer(num_labels=10**12), "num_labels", "at most 100000", by_plan=False),
    case("tokenizer that panics", panicking_tokenizer, "tokenizer failed", by_plan=False),
    case("a type that moves the cursor", config(dtype="int8\n\x1b[2J" * 1000), "cannot compute in int8\\n\\x1b"),
    case("tokenizer cut", overwrite("tokenizer.json", b'{"model'), "tokenizer", "again", by_plan=False),
]


def test_what_the_cases_break_works(sound: Path, sound_file: Path) -> None:
    for directory in (sound, sound_file):
        assert generate(directory, "-p", "Count:").code == 0
        assert shell("plan", "-m", directory, "--ram", "1GiB").code == 0


def index(change: Callable[[dict[str, Any]], object]) -> Break:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def place_first_tensor_in(name: str) -> Break:
    return index(lambda content: content["weight_map"].update({min(content["weight_map"]): name}))


def shard_outside(directory: Path) -> None:
    shutil.copy(min(directory.glob("*.safetensors")), directory.parent / "outside.safetensors")
    place_first_tensor_in("../outside.safetensors")(directory)


def shard_dangling(directory: Path) -> None:
    shard = min(directory.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to("blobs/gone")


def swap_two_places(directory: Path) -> None:
    """Two tensors that lie in different files, each said to lie in the other's."""
    path = directory / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    places = content["weight_map"]
    first, last = min(places, key=places.__getitem__), max(places, key=places.__getitem__)
    places[first], places[last] = places[last], places[first]
    path.write_text(json.dumps(content))


INDEX = "model.safetensors.index.json"
INDEXES = [
    case("shard missing", drop("*-00002-of-*"), "model-00002-of-", "missing", "again"),
    case("shard dangling", shard_dangling, "model-00001-of-", "missing", "again"),
    case("shard outside", shard_outside, "../outside.safetensors", "not a file beside it"),
    case("shard absolute", place_first_tensor_in("/dev/zero.safetensors"), "not a file beside it"),
    case("shard a pickle", place_first_tensor_in("config.json"), "not a file beside it"),
    case("shard with a long name", place_first_tensor_in("x" * 300 + ".safetensors"), "missing"),
    case("shard with a zero byte", place_first_tensor_in("x\0.safetensors"), "not a file beside it"),
    case("index not JSON", overwrite(INDEX, b"nothing"), "not valid JSON", "again"),
    case("index without a map", index(lambda content: content.pop("weight_map")), "no usable weight_map"),
    case("index with an empty map", index(lambda content: content["weight_map"].clear()), "no usable weight_map"),
    case("index of numbers", index(lambda content: content["weight_map"].update(a=1)), "no usable weight_map"),
    case("index names another tensor", index(lambda c: c["weight_map"].update(a=c["weight_map"]["lm_head.weight"])),
         "places a in model-", "lacks it"),
    case("index mixes up shards", swap_two_places, "the index places", "lacks it"),
    case("shards without index", drop(INDEX), "safetensors files but no model.safetensors.index.json", "again"),
]  # fmt: skip


@pytest.mark.parametrize(("breaks", "words", "by_plan"), [*FOLDERS, *INDEXES])
def test_folder_is_refused(breaks: Break, words: tuple[str, ...], by_plan: bool, broken: Path) -> None:
    refuse_folder(broken, breaks, words, by_plan=by_plan)


def test_random_damage_to_a_config_never_surprises(broken_file: Path) -> None:
    path, rng, num_refused = broken_file / "config.json", random.Random(2), 0
    text = path.read_bytes()
    for number in range(100):
        path.write_bytes(damaged(text, rng))
        try:
            checkpoint = open_checkpoint(broken_file)
            plan_memory((checkpoint, None), ram="1GiB", dtype="auto", context=None, num_nodes=1)
            build_meta_model(checkpoint, torch.float32)
        except UserError as error:
            assert len(str(error)) < 600, number
            num_refused += 1
    assert 20 < num_refused < 100


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_nan_is_blamed_neither_on_weights_nor_on_the_download(broken_file: Path, name: str) -> None:
    """Files are published with it: what mends it is a number."""
    path = broken_file / name
    path.touch()
    path.write_text(path.read_text() or "{}")
    path.write_text(path.read_text().replace("{", '{"rope_theta": NaN, "limit": [0, Infinity],', 1).replace(",}", "}"))
    with pytest.raises(UserError, match=r"config.json is not valid JSON \(NaN is no number\): write a number in its"):
        read_json(path)


def test_an_index_that_a_later_save_has_left_behind_counts_for_nothing(broken_file: Path, sound: Path) -> None:
    """As transformers leaves it; where its own files are there as well, transformers reads the single file."""
    wanted = open_checkpoint(broken_file).tensors
    shutil.copyfile(sound / INDEX, broken_file / INDEX)
    assert open_checkpoint(broken_file).tensors == wanted
    assert "twice" not in generate(broken_file, "-p", "Count:", "-n", 2).err
    first, *others = sorted(sound.glob("model-*.safetensors"))
    shutil.copyfile(first, broken_file / first.name)
    assert open_checkpoint(broken_file).tensors == wanted
    errors = generate(broken_file, "-p", "Count:", "-n", 2).err
    said = f"holds weights twice: model.safetensors is read, as by transformers, {first.name} is not; remove those"
    assert said in " ".join(errors.split())
    (broken_file / "model.safetensors").unlink()
    with pytest.raises(UserError, match=rf"the index names {others[0].name}, which is missing"):
        open_checkpoint(broken_file)


def test_a_link_to_nothing_is_no_file_of_an_index(broken_file: Path) -> None:
    (broken_file / "model.safetensors").rename(broken_file / "gone")
    (broken_file / "model.safetensors").symlink_to(broken_file / "nowhere")
    with pytest.raises(UserError, match=r"model\.safetensors leads to no file: download"):
        open_checkpoint(broken_file)


@pytest.mark.usefixtures("_no_weights")
def test_draft_with_another_vocabulary_or_width_is_refused(sound: Path, tmp_path: Path) -> None:
    stranger = save_reciter(tmp_path / "stranger", [":", " un", " deux"])
    outcome = generate(sound, "-d", stranger, "-p", "Count:")
    assert_refused(outcome, "the draft must share the target's vocabulary", "stranger", "target's family")
    # Without tokenizers to compare, the widths decide.
    settings = FAMILIES["llama"]()
    settings.vocab_size = VOCAB_SIZE + 1
    draft = save(build(settings), tmp_path / "wide")
    outcome = generate(sound, "-d", draft, "-p", "Count:")
    assert_refused(outcome, "share the target's vocabulary", f"{VOCAB_SIZE + 1} entries", f"against {VOCAB_SIZE}")


def test_broken_draft_and_expert_without_a_partner_are_refused(sound: Path, broken: Path, tmp_path: Path) -> None:
    drop("*-00002-of-*")(broken)
    for command in BOTH:
        assert_refused(shell(*command, "-m", sound, "-d", broken, "--ram", "1GiB"), "model-00002-of-", "missing")
    # Tensors that transformers fuses: every expert must bring both halves.
    directory = save(build(FAMILIES["mixtral"]()), tmp_path / "experts", max_shard_size="1GB")
    save_tokenizer(directory)
    names = open_checkpoint(directory).tensors
    lost = next(name for name in sorted(names) if ".2.w1." in name)
    header(lambda content: content.update(spare=content.pop(lost)))(directory)
    assert_refused(generate(directory, "-p", "Count:"), "experts", "download the checkpoint again")


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


@pytest.mark.parametrize(
    ("config", "key"), [*((settings, None) for settings in REAL.values()), *FALSE.values()], ids=[*REAL, *FALSE]
)
def test_counts_that_models_have_are_let_through_and_others_refused(config: dict[str, Any], key: str | None) -> None:
    line = rf"model: {key} in config\.json must be at most"
    with nullcontext() if key is None else pytest.raises(UserError, match=line):
        check_counts("model", config)


UNQUANTISED = {"quantization_config": None, "quantization": None}
READ: list[dict[str, Any]] = [
    *(recipe.config for recipe in RECIPES.values()),
    {"quant_method": "fbgemm_fp8"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "extra_config": {}},
    {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4},
    {"load_in_8bit": True},
    {"quant_method": "gptq", "bits": 3, "format": "gptq_v2"},
    {"quant_method": "fp8", "weight_scale_semantics": "inverse"},
    {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8},
    {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4},
    {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    {"quant_method": "torchao", "quant_type": {}},
    {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": False, "model.embed_tokens": {"bits": 8}},
    {"config_groups": {}},
    {"config_groups": {}, "transform_config": {}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"quant_method": name}, name) for name in (
        "exl2", "exl3", "hqq", "aqlm", "quark", "gptq_p", "eetq", "higgs", "spqr", "vptq", "quanto", "bitnet")),
    ({"quant_method": "awq", "version": "gemv", "bits": 4}, "gemv"),
    ({"quant_method": "awq", "version": "GEMV_FAST", "bits": 4}, "gemv_fast"),
    ({"quant_method": "awq", "version": "marlin", "bits": 4}, "marlin"),
    ({"quant_method": "awq", "backend": "llm-awq", "bits": 4}, "llm-awq"),
    ({"quant_method": "awq", "bits": 3}, "of 3 bits"),
    ({"quant_method": "gptq", "bits": 5}, "of 5 bits is not read, of 2, 3, 4 and 8 it is"),
    ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, "format 'gptq_p'"),
    ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "checkpoint_format": "gptq"},
     "format 'gptq_v2' and checkpoint_format 'gptq'"),
    ({"quant_method": "fp8", "weight_scale_semantics": "factor"}, "weight_scale_semantics is 'factor'"),
    ({"group_size": 32, "bits": 4, "mode": "nf4"}, "mode 'nf4'"),
    ({"group_size": 32, "bits": 4, "lm_head": {"mode": "nf4"}}, "mode 'nf4'"),
    ({"quant_method": "gptq", "bits": [4]}, "of [4] bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:ark"}, "ark"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
     "transform_config"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ({"quant_method": ["fp8"]}, "fp8"),
    ({"bits": 4}, "None"),
]  # fmt: skip


@pytest.mark.parametrize("config", [*({"quantization_config": recipe} for recipe in READ), {}, UNQUANTISED], ids=str)
def test_what_is_read_passes(config: dict[str, Any]) -> None:
    check_method("model", config)
    check_method("model", {"text_config": config})


@pytest.mark.parametrize(("settings", "named"), REFUSED, ids=str)
@pytest.mark.parametrize("place", [{}, {"text_config": ...}], ids=["of the model", "of its text"])
def test_what_is_not_read_is_named(place: dict[str, Any], settings: dict[str, Any], named: str) -> None:
    config = {"quantization_config": settings}
    with pytest.raises(UserError) as caught:
        check_method("model", dict.fromkeys(place, config) or config)
    line = str(caught.value)
    assert line.startswith("model: ") and named in line and "not read" in line and "bf16" in line and "\n" not in line


OTHERS: list[dict[str, Any]] = [
    {"quantization_config": "fp8"},
    {"quantization_config": [1]},
]


@pytest.mark.parametrize(("check", "config", "words"), [
    (check_counts, {"depth": 10**6}, r"depth in tokenizer_config\.json must be at most"),
    (check_types, {"inner": [{"model_type": 5}]}, r"model_type in tokenizer_config\.json must be text"),
    *((check_method, config, ".*object") for config in OTHERS),
])  # fmt: skip
def test_what_a_config_says_is_refused_by_the_files_name(
    check: Callable[..., object], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=f"model: {words}"):
        check("model", config, *([] if check is check_method else ["tokenizer_config.json"]))
