"""Weights are looked at when they are first read: what is not finite or odd is told by the names of tensors."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from matrix import matrix
from quantised import save_quantised
from safetensors.torch import load_file, save_file
from shell import shell
from stored import change_tensor
from tiny import FAMILIES, Pair, build, save, streaming_ram

import offload
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.whole import open_whole
from offload.integrity import verify

CONTEXT, PROMPT = 64, [5, 9, 2]
LAYER, EMBEDDING = "model.layers.2.mlp.down_proj.weight", "model.embed_tokens.weight"
HOW = {"context": CONTEXT, "threads": 1}


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Path:
    return pair[0]


def changed(source: Path, folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> Path:
    change_tensor(shutil.copytree(source, folder), name, change)
    return folder


def notes_of(model: Path, **options: object) -> tuple[list[str], list[str]]:
    """Before and after a short text."""
    with offload.load(model, **{**HOW, **options}) as decoder:  # type: ignore[arg-type]
        before = list(decoder.notes)
        decoder.generate(PROMPT, max_new_tokens=3)
        first = list(decoder.notes)
        decoder.generate(PROMPT, max_new_tokens=3)
        assert decoder.notes == first, "told once"
    return before, [note for note in first if note not in before]


def damage_of(model: Path, **options: object) -> str:
    """What is told to be not finite, while the scores of a short text are refused."""
    with offload.load(model, **{**HOW, **options}) as decoder:  # type: ignore[arg-type]
        with pytest.raises(offload.UserError, match="scores are not finite"):
            decoder.generate(PROMPT, max_new_tokens=3)
        return "\n".join(note for note in decoder.notes if "not finite" in note)


@matrix("number", [torch.nan, -torch.inf], daily=1)
@matrix("name", [LAYER, EMBEDDING, "model.norm.weight", "lm_head.weight"], always=[LAYER], daily=1)
@pytest.mark.parametrize("place", ["streamed", "resident"])
def test_numbers_that_are_not_finite_are_told_by_name(
    place: str, name: str, number: float, plain: Path, tmp_path: Path
) -> None:
    model = changed(plain, tmp_path / "bad", name, lambda tensor: tensor.view(-1)[-1:].fill_(number))
    ram = streaming_ram(plain) if place == "streamed" else "1GiB"
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


@matrix("family", FAMILIES, always=["llama"], daily=3)
def test_sound_models_of_every_family_are_not_remarked_on(family: str, tmp_path: Path) -> None:
    model = save(build(FAMILIES[family]()), tmp_path / family)
    assert notes_of(model)[1] == []


def test_the_command_line_tells(talker: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    odd = changed(talker, tmp_path / "odd", name, lambda tensor: tensor.zero_())
    bad = changed(talker, tmp_path / "bad", name, lambda tensor: tensor[0].fill_(torch.inf))
    line = f"{name} has numbers that are not finite: offload verify"
    for model, code, words in ((odd, 0, f"all zero: {name} in model-"), (talker, 0, ""), (bad, 2, line)):
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
