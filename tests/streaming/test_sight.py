"""Weights are looked at when they are first read: what is not finite or odd is told by the names of tensors."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import MODELS, write_gguf
from matrix import matrix
from quantised import save_quantised
from safetensors.torch import load_file, save_file
from shell import shell
from small_llama import inflate, save_small
from stored import change_tensor
from tiny import FAMILIES, Pair, build, save, streaming_ram
from transformers import GPTNeoXConfig

import offload
from offload.checkpoint.layout import SlabLayout, SlabRead
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.whole import open_whole
from offload.engine.hooks import Hooks
from offload.engine.load import open_decoder
from offload.integrity import verify
from offload.memory.tiers import LayerTier
from offload.planning.load_options import LoadOptions
from offload.streaming import scan as sights

CONTEXT, PROMPT = 64, [5, 9, 2]
LAYER, EMBEDDING = "model.layers.2.mlp.down_proj.weight", "model.embed_tokens.weight"
HOW = {"context": CONTEXT, "threads": 1}


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Path:
    return pair[0]


def changed(source: Path, folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> Path:
    change_tensor(shutil.copytree(source, folder), name, change)
    return folder


def notes_of(model: Path, **how: object) -> tuple[list[str], list[str]]:
    """Before and after a short text."""
    with offload.load(model, **{**HOW, **how}) as decoder:  # type: ignore[arg-type]
        before = list(decoder.notes)
        decoder.generate(PROMPT, max_new_tokens=3)
        first = list(decoder.notes)
        decoder.generate(PROMPT, max_new_tokens=3)
        assert decoder.notes == first, "told once"
    return before, [note for note in first if note not in before]


def damage_of(model: Path, **how: object) -> str:
    """What is told to be not finite, while the scores of a short text are refused."""
    with offload.load(model, **{**HOW, **how}) as decoder:  # type: ignore[arg-type]
        with pytest.raises(offload.UserError, match="scores are not finite"):
            decoder.generate(PROMPT, max_new_tokens=3)
        return "\n".join(note for note in decoder.notes if "not finite" in note)


@matrix("number", [torch.nan, -torch.inf], daily=1)
@matrix("name", [LAYER, EMBEDDING, "model.norm.weight", "lm_head.weight"], always=[LAYER], daily=1)
@pytest.mark.parametrize("how", ["streamed", "resident"])
def test_numbers_that_are_not_finite_are_told_by_name(
    how: str, name: str, number: float, plain: Path, tmp_path: Path
) -> None:
    model = changed(plain, tmp_path / "bad", name, lambda tensor: tensor.view(-1)[-1:].fill_(number))
    ram = streaming_ram(plain) if how == "streamed" else "1GiB"
    shard = open_checkpoint(model).shards[open_checkpoint(model).tensors[name].shard]
    line = f"{shard.name}: {name} has numbers that are not finite: offload verify says how much is damaged"
    with offload.load(model, ram=ram, **HOW) as decoder:
        for _ in range(2):
            with nullcontext() if name == EMBEDDING else pytest.raises(offload.UserError, match="scores are not"):
                decoder.generate(PROMPT, max_new_tokens=2)
        assert decoder.notes.count(line) == 1


def test_what_is_wholly_damaged_is_told_in_a_few_lines(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "bad")
    for path in (tmp_path / "bad").glob("*.safetensors"):
        save_file({name: tensor.fill_(torch.nan) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    with offload.load(tmp_path / "bad", **HOW) as decoder:
        with pytest.raises(offload.UserError, match="scores are not"):
            decoder.generate(PROMPT, max_new_tokens=2)
        assert sum("not finite" in note for note in decoder.notes) == 5


def test_a_draft_and_experts_as_they_come_are_looked_at_as_well(tmp_path: Path, pair: Pair) -> None:
    target, draft = pair
    bad = changed(draft, tmp_path / "bad", LAYER, lambda tensor: tensor[0, 0].fill_(torch.nan))
    assert any(f"{LAYER} has numbers that are not finite" in note for note in notes_of(target, draft=bad)[1])
    # Experts are looked at as they come.
    model = save(build(FAMILIES["qwen3-moe"]()), tmp_path / "model")
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if "layers.3.mlp.experts" in name:
                tensor.view(-1)[-1] = torch.nan
        save_file(tensors, path, {"format": "pt"})
    assert notes_of(save(build(FAMILIES["qwen3-moe"]()), tmp_path / "sound"), experts="demand")[1] == []
    assert "layers.3.mlp.experts" in damage_of(model, experts="demand")


@pytest.mark.parametrize("recipe", ["fp8-block", "gptq"])
def test_words_of_coded_weights(recipe: str, plain: Path, tmp_path: Path) -> None:
    folder = save_quantised(plain, recipe, tmp_path / recipe).directory
    assert not notes_of(folder)[1]
    end = ".weight" if recipe == "fp8-block" else ".qweight"
    words = LAYER.removesuffix(".weight") + end
    model = changed(folder, tmp_path / "zero", words, lambda tensor: tensor.view(torch.uint8).zero_())
    assert any(note.startswith(f"all zero: {LAYER}") for note in notes_of(model)[1])
    if recipe == "fp8-block":
        model = changed(folder, tmp_path / "nan", words, lambda tensor: tensor.view(torch.uint8)[0, 0].fill_(0xFF))
        assert LAYER in damage_of(model)


def test_scales_of_gguf_blocks(tmp_path: Path) -> None:
    def break_one(name: str, rows: np.ndarray) -> np.ndarray:
        if name == "blk.1.ffn_up.weight":
            rows = rows.copy()
            rows[3, :2] = np.array([0x7E00], "<u2").view(np.uint8)
        return rows

    assert not notes_of(write_gguf(MODELS["llama"](), tmp_path / "sound.gguf", "Q8_0").path)[1]
    model = write_gguf(MODELS["llama"](), tmp_path / "bad.gguf", "Q8_0", changed=break_one).path
    assert "model.layers.1.mlp.up_proj.weight" in damage_of(model)


@pytest.mark.parametrize("how", ["streamed", "resident"])
def test_odd_weights_are_told_after_the_first_sweep(how: str, plain: Path, tmp_path: Path) -> None:
    model = changed(plain, tmp_path / "zero", LAYER, lambda tensor: tensor.zero_())
    model = changed(model, tmp_path / "both", "model.layers.0.input_layernorm.weight", lambda tensor: tensor.fill_(3e6))
    heard, ram = list[str](), streaming_ram(plain) if how == "streamed" else "1GiB"
    before, after = notes_of(model, ram=ram)
    assert not any("all zero" in note or "as large" in note for note in before)
    assert [note.split(":")[0] for note in after] == ["all zero", "numbers as large as 3.0e+06, as no model has"]
    assert LAYER in after[0] and all(note.endswith("offload verify says how much is damaged") for note in after)
    options = LoadOptions(model, ram=ram, context=CONTEXT, threads=1)
    with open_decoder(options, hooks=Hooks(on_note=heard.append)) as decoder:
        decoder.generate(PROMPT, max_new_tokens=2)
    assert heard == after


@matrix("family", FAMILIES, always=["llama"], daily=3)
def test_sound_models_of_every_family_are_not_remarked_on(family: str, tmp_path: Path) -> None:
    model = save(build(FAMILIES[family]()), tmp_path / family)
    assert notes_of(model)[1] == []


def test_a_mask_of_older_files_is_no_weight(tmp_path: Path) -> None:
    """-1e9 in float16 is infinite; it lies in the gap between two weights, and is read with them."""
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    model = save(build(GPTNeoXConfig(vocab_size=128, **small)).half(), tmp_path / "model", max_shard_size="1GB")
    path = model / "model.safetensors"
    masks = {f"gpt_neox.layers.{index}.attention.masked_bias": torch.tensor(-1e9).half() for index in range(3)}
    save_file({**load_file(path), **masks}, path, {"format": "pt"})
    assert notes_of(model)[1] == []
    report = verify(open_whole(str(model)), None, progress=lambda done, total: None)
    assert not report.damage and not report.notes


def test_inflated_models_have_zeros_and_say_so(tmp_path: Path) -> None:
    folder = inflate(save_small(tmp_path / "small", dtype=torch.bfloat16), tmp_path / "large", 3_000_000)
    for path in folder.glob("*token*"):
        path.unlink()  # which are none
    assert notes_of(folder)[1] == []
    (folder / "inflation.json").unlink()
    assert any(note.startswith("all zero") for note in notes_of(folder)[1])


def test_every_part_is_looked_at_once_and_what_is_read_twice_is_not_the_whole(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, counted, real = open_checkpoint(plain), list[int](), sights.top_bits
    monkeypatch.setattr(sights, "top_bits", lambda stored, form: counted.append(len(stored)) or real(stored, form))
    with offload.load(plain, ram=streaming_ram(plain), **HOW) as decoder:
        decoder.generate(PROMPT, max_new_tokens=1)
        once = sum(counted)
        decoder.generate(PROMPT, max_new_tokens=4)
    assert sum(counted) == once and checkpoint.num_bytes <= once < 1.5 * checkpoint.num_bytes
    # What is read twice is not seen for the whole.
    checkpoint, stored = open_checkpoint(plain), np.zeros(1 << 20, np.uint8)
    entry = checkpoint.tensors[LAYER]
    half = entry.num_bytes // 2
    sight = sights.WeightScan(checkpoint, lambda line: None)
    for size in (half, half - 64, half + 64):
        sight.look(entry.shard, entry.lo, stored[:size])
    assert not sight.news(), "its second half may hold anything"
    sight.look(entry.shard, entry.hi - 64, stored[:64])
    assert not sight.news()
    sight.look(entry.shard, entry.lo + half, stored[: half - 64])
    assert [LAYER in note for note in sight.news()] == [True]
    assert not sight.news(), "told once"


WIDE = 1 << 20  # numbers of a matrix of two bytes each: one read of 2 MiB


def passing(folder: Path, heard: list[str], num_reads: int = 1) -> tuple[sights.WeightScan, Callable[..., None]]:
    """A sight of one wide matrix that every sweep reads, and how one reads so many numbers of it, from a byte on."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"wide.weight": torch.ones(num_reads * 1024, 1024, dtype=torch.float16)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.tensors["wide.weight"]
    sight = sights.WeightScan(checkpoint, heard.append)
    layout = SlabLayout((SlabRead(entry.shard, entry.lo, entry.hi, 0),), {}, entry.num_bytes, 0)
    sight.expect([layout], [LayerTier.DISK])
    return sight, lambda stored, at=0: sight.look(entry.shard, entry.lo + at, stored.view(np.uint8))


@pytest.mark.parametrize("at", [0, 8191, 8192, 64 * 1024 + 1, WIDE // 2 + 77, WIDE - 1])
def test_what_passes_is_looked_at_within_a_few_sweeps(at: int, tmp_path: Path) -> None:
    heard = list[str]()
    sight, sweep = passing(tmp_path / "model", heard)
    stored = np.ones(WIDE, np.float16)
    stored[at] = np.inf
    for _ in range(sights.TURNS):
        sweep(stored)
    assert [line.split()[1] for line in heard] == ["wide.weight"]
    assert not sight.news(), "it is told of as damaged"


@pytest.mark.parametrize("at", [0, 5000, WIDE // 3, 2 * WIDE])
def test_long_damage_shows_in_the_first_sweep(at: int, tmp_path: Path) -> None:
    heard, piece = list[str](), 1 << 20
    _, sweep = passing(tmp_path / "model", heard, num_reads=4)
    stored = np.ones(4 * WIDE, np.float16)
    stored[at : at + 3 * WIDE // 2] = np.nan
    for read in range(4):
        sweep(stored[read * piece : (read + 1) * piece], 2 * read * piece)
    assert len(heard) == 1


def test_a_sweep_looks_at_a_share_and_what_is_odd_waits_for_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, real = list[int](), sights.top_bits
    monkeypatch.setattr(sights, "top_bits", lambda stored, form: counted.append(stored.size) or real(stored, form))
    sight, sweep = passing(tmp_path / "model", [])
    stored = np.zeros(WIDE, np.float16)
    for _ in range(sights.TURNS - 1):  # in the last of them it has no turn
        assert not sight.news(), "what was not looked at may hold anything"
        sweep(stored)
    assert sum(counted) == 2 * WIDE and max(counted) == 2 * WIDE // sights._NUM_STRIPES
    assert [line.split(":")[0] for line in sight.news()] == ["all zero"]
    sweep(stored)
    assert sum(counted) == 2 * WIDE, "all of it was looked at"


def test_blocks_of_many_bytes_are_cut_nowhere_and_all_have_a_turn() -> None:
    item_bytes, num_items = 34, 9999
    blocks = np.repeat(np.arange(num_items, dtype=np.uint16), item_bytes // 2).view(np.uint8)
    seen = set[int]()
    for stripe in range(sights._NUM_STRIPES):
        for some in sights._stripes(blocks, item_bytes, stripe):
            items = some.reshape(-1, item_bytes).view(np.uint16)
            assert (items == items[:, :1]).all()
            seen |= set(items[:, 0].tolist())
    assert seen == set(range(num_items))


def test_the_command_line_tells(talker: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    odd = changed(talker, tmp_path / "odd", name, lambda tensor: tensor.zero_())
    bad = changed(talker, tmp_path / "bad", name, lambda tensor: tensor[0].fill_(torch.inf))
    told = f"{name} has numbers that are not finite: offload verify"
    for model, code, words in ((odd, 0, f"all zero: {name} in model-"), (talker, 0, ""), (bad, 2, told)):
        outcome = shell("generate", "-m", model, "-p", "Hi", "-n", "4", "--ram", "1GiB", "--threads", "1")
        assert outcome.code == code and words in outcome.err and ("all zero" in outcome.err) == (model is odd)


def test_codes_that_a_file_keeps_as_floats_are_no_numbers(plain: Path, tmp_path: Path) -> None:
    """`quant_storage` of bitsandbytes: bytes of all ones are the last code twice, and NaN as a float32."""
    model = save_quantised(plain, "nf4", tmp_path, max_shard_size="1GB").directory
    tensors = load_file(model / "model.safetensors")
    for name in [name.removesuffix(".absmax") for name in tensors if name.endswith(".absmax")]:
        tensors[name].view(-1)[:4] = 255
        tensors[name] = tensors[name].view(-1).view(torch.float32)[:, None]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert not any("not finite" in note for notes in notes_of(model) for note in notes)
    assert not verify(open_whole(str(model)), None, progress=lambda *_: None).damage
