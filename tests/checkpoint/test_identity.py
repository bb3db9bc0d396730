"""A model is taken for the same where its weights are the same to the last byte, and for another where anything is."""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flipping import flip
from safetensors.torch import load_file, save_file
from tiny import Pair
from transformers import LlamaConfig, LlamaForCausalLM

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.identity import ModelIdentity, identity_of, proved, same_model
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import open_checkpoint
from offload.engine.identities import Identities
from offload.errors import ReadError
from offload.streaming import summing
from offload.streaming.summing import BlockSum, with_sum


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = saved(0, tmp_path / "model")
    (target / "tokenizer.json").write_text('{"version": "1.0"}')
    (target / "tokenizer_config.json").write_text('{"chat_template": "a", "name_or_path": "x"}')
    (target / "generation_config.json").write_text('{"eos_token_id": 2}')
    return target


def saved(seed: int, folder: Path) -> Path:
    """In one file, with matrices that samples do not cover."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 131}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder)
    return folder


def copy_of(folder: Path) -> Path:
    return shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))


def identity(folder: Path) -> ModelIdentity:
    return identity_of(open_checkpoint(folder))


def summed(folder: Path) -> ModelIdentity:
    checkpoint = open_checkpoint(folder)
    return with_sum(checkpoint, identity_of(checkpoint))


def set_json(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "config": (lambda one: set_json(one, "config.json", rms_norm_eps=1e-4), "config differs"),
    "end": (lambda one: set_json(one, "generation_config.json", eos_token_id=3), "generation config differs"),
    "template": (lambda one: set_json(one, "tokenizer_config.json", chat_template="b"), "chat template differs"),
    "beside": (lambda one: (one / "chat_template.jinja").write_text("b"), "chat template differs"),
    "tokens": (lambda one: (one / "tokenizer.json").write_text('{"version": "1.1"}'), "tokenizer differs"),
    "flag": (lambda one: set_json(one, "tokenizer_config.json", add_bos_token=True), "tokenizer differs"),
    "new words": (lambda one: (one / "added_tokens.json").write_text("{}"), "tokenizer differs"),
    "both": (
        lambda one: set_json(one, "tokenizer_config.json", chat_template="b", split=1),
        "tokenizer and chat template differ",
    ),
}


@pytest.mark.always
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_text_depends_on_beside_weights_is_named(change: str, folder: Path) -> None:
    other, (make, words) = copy_of(folder), CHANGES[change]
    make(other)
    assert same_model(summed(folder), summed(other)) == words


@pytest.mark.parametrize("is_tuned", [False, True])
def test_another_model_of_the_same_shapes_is_told_at_start(is_tuned: bool, folder: Path, tmp_path: Path) -> None:
    """A fine-tune of one matrix, too."""
    other = copy_of(folder)
    tensors = load_file((folder if is_tuned else saved(1, tmp_path / "another")) / "model.safetensors")
    if is_tuned:
        tensors["model.layers.1.self_attn.q_proj.weight"] += 1e-3
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert same_model(identity(folder), identity(other)) == "weights differ"


def test_a_single_byte_is_told_by_samples_or_by_the_sum(folder: Path) -> None:
    """50 places at random: never taken for the same, before the sum is known or after."""
    mine, generator, num_unsampled = summed(folder), np.random.default_rng(0), 0
    spans = [(one.lo, one.hi) for one in open_checkpoint(folder).tensors.values()]
    for turn in range(50):
        other = copy_of(folder)
        lo, hi = spans[turn % len(spans)]
        at, bit = int(generator.integers(lo, hi)), int(generator.integers(8))
        flip(other / "model.safetensors", at, bit, keeps_time=False)
        found = identity(other)
        num_unsampled += not mine.difference(found)
        assert same_model(mine, found) in ("weights differ", "nothing proves that the weights are the same")
        assert same_model(mine, summed(other)) == "weights differ"
        shutil.rmtree(other)
    assert num_unsampled, "some of these edits lie between the samples: else nothing is tried of the sum"


def test_a_copy_is_the_same_once_all_is_read_and_the_next_time_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy_of(folder)
    told, mine = summed(folder), identity(other)
    assert same_model(told, mine) == "nothing proves that the weights are the same"
    assert same_model(identity(folder), identity(folder)) == "", "these files are untouched"
    identities = Identities(ModelFiles(open_checkpoint(other), None))
    assert identities.difference(told) == "" and identities.target.has_sum
    monkeypatch.setattr(summing, "read_left", None)
    assert identity(other).has_sum and Identities(ModelFiles(open_checkpoint(other), None)).difference(told) == ""
    path = other / "model.safetensors"
    path.touch()
    assert not identity(other).has_sum, "what is kept is of the files as they were"


@pytest.mark.parametrize(
    ("told", "mine", "is_same"),
    [
        ({"files": "a"}, {"files": "a"}, True),
        ({"files": "a"}, {"files": "b"}, None),
        ({"files": "a", "xxh3": "1"}, {"files": "a", "xxh3": "2"}, False),
        ({"files": "a", "xxh3": "1"}, {"files": "b", "xxh3": "1"}, True),
        ({"files": "a", "hub": "1"}, {"files": "b", "hub": "2"}, False),
        ({"files": "a", "hub": "1"}, {"files": "b", "xxh3": "1"}, None),
        ({"files": "a", "hub": "1"}, {"files": "b", "hub": "1"}, True),
        ({"files": "a", "hub": "1", "xxh3": "1"}, {"files": "b", "hub": "1"}, None),
        ({"files": "a", "sum": "1"}, {"files": "b", "xxh3": "2"}, None),
    ],
)
def test_proofs_agree_contradict_or_say_nothing(told: Any, mine: Any, is_same: bool | None) -> None:
    assert proved(told, mine) is is_same is proved(mine, told)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_has_gone_or_changed_is_one_line(name: str, folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / name).touch()
    with pytest.raises(ReadError, match=f"{name} changed since the model was opened: load the model again"):
        identity_of(checkpoint)
    (folder / name).unlink()
    with pytest.raises(ReadError, match=rf"reading .*{name} failed: No such file"):
        identity_of(checkpoint)


# The sum of all bytes


def bytes_of(checkpoint: Checkpoint) -> np.ndarray:
    (path,) = checkpoint.shards
    return np.fromfile(path, np.uint8)


def sum_of(checkpoint: Checkpoint, content: np.ndarray, cuts: list[tuple[int, int]]) -> str | None:
    total = BlockSum(checkpoint)
    for lo, hi in cuts:
        total.look(0, lo, content[lo:hi])
    return total.result


def cut(size: int, step: int) -> list[tuple[int, int]]:
    return [(lo, min(size, lo + step)) for lo in range(0, size, step)]


def test_the_sum_does_not_depend_on_how_it_was_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    content, generator = bytes_of(checkpoint), np.random.default_rng(1)
    whole = sum_of(checkpoint, content, [(0, len(content))])
    assert whole is not None and len(content) % BLOCK_BYTES, "its end is no whole block"
    for step in (BLOCK_BYTES, 5 * BLOCK_BYTES, 300 * BLOCK_BYTES):
        parts = cut(len(content), step)
        generator.shuffle(parts)
        pieces = [(int(lo), int(hi)) for lo, hi in [*parts, *parts[:3]]]  # some are read twice
        assert sum_of(checkpoint, content, pieces) == whole
        assert sum_of(checkpoint, content, pieces[3:-3]) is None, "some are missing"
    total = BlockSum(checkpoint)
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda one: total.look(0, one[0], content[one[0] : one[1]]), cut(len(content), BLOCK_BYTES) * 2)]
    assert total.result == whole


def test_no_structure_of_an_edit_hides_it(folder: Path) -> None:
    """Blocks that change places, and two bits that would cancel out in a sum of columns."""
    checkpoint, size = open_checkpoint(folder), summing._HASHED_BYTES
    content = bytes_of(checkpoint)
    moved, flipped = content.copy(), content.copy()
    moved[size : 2 * size], moved[2 * size : 3 * size] = content[2 * size : 3 * size], content[size : 2 * size]
    flipped[[5 * BLOCK_BYTES + 7, 6 * BLOCK_BYTES + 7]] ^= 0x80
    sums = [sum_of(checkpoint, one, [(0, len(one))]) for one in (content, moved, flipped)]
    assert len(content) > 3 * size and len(set(sums)) == 3 and None not in sums


def test_equal_times_of_an_archive_do_not_hide_another_model(folder: Path) -> None:
    """Reproducible archives have one time for all, and the file system may give a freed inode again."""
    mine, path = summed(folder), folder / "model.safetensors"
    lo = max((one for one in open_checkpoint(folder).tensors.values()), key=lambda one: one.num_bytes).lo
    flip(path, lo + 3001)
    assert (
        path.stat().st_mtime_ns and same_model(mine, identity(folder)) == "nothing proves that the weights are the same"
    )
    assert same_model(mine, summed(folder)) == "weights differ"


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_name_that_the_hub_gave_proves_nothing_of_what_was_written_since(is_summed: bool, folder: Path) -> None:
    blob = folder.parent / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    shutil.move(folder / "model.safetensors", blob)
    (folder / "model.safetensors").symlink_to(blob)
    mine = summed(folder) if is_summed else identity(folder)
    assert "hub" in mine.proofs
    time.sleep(2.1)
    flip(blob, 3000 + max((one for one in open_checkpoint(folder).tensors.values()), key=lambda one: one.num_bytes).lo)
    assert same_model(mine, identity(folder)) == "nothing proves that the weights are the same"


def test_weights_are_summed_as_they_are_read(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one more read of the files, and to the same sum as by reading them."""
    from offload.engine import identities
    from offload.engine.load import open_decoder
    from offload.engine.request import Request
    from offload.planning.load_options import LoadOptions

    wanted = [summed(one).proofs["xxh3"] for one in pair]
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(identities, "_LITTLE_BYTES", 0)
    monkeypatch.setattr(summing, "read_left", None)
    options = LoadOptions(*pair, ram="1GiB", tree="4x2", dtype="float32", context=64, threads=1)
    with open_decoder(options, Request(is_named=True)) as decoder:
        decoder.generate([5, 6], max_new_tokens=1)
        found = [decoder.identities.for_part(part) for part in ("target", "draft")]
    assert [one and one.proofs.get("xxh3") for one in found] == wanted
    with open_decoder(options) as decoder:
        assert decoder.identities.target.has_sum, "it is kept"
