"""`verify` finds whatever was damaged, names it, and finds nothing else.

Where a bit lies is read from headers by others' readers, see `flipping.py`.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from flipping import extents, flip, random_place
from shell import shell
from stored import Make, change_tensor, gguf, packed, plain, quantised

from offload import integrity as measuring
from offload.checkpoint.whole import Damage, default_manifest, open_whole, read_manifest
from offload.errors import UserError
from offload.integrity import Report, verify

NUM_FLIPS = 12


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def note(path: Path, etag: str = "", *, later_s: float = 60) -> None:
    """What the hub's library leaves beside a download: its sum, and when that was."""
    noted = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text(f"0123456789\n{etag or sha256(path)}\n{path.stat().st_mtime + later_s}\n")


def ask(model: Path, manifest: Path | None = None, *, may_write: bool | None = None) -> Report:
    """Verify; the usual manifest is written unless that is forbidden, one that is named only if it is allowed."""
    may_write = manifest is None if may_write is None else may_write
    return verify(open_whole(str(model)), manifest, may_write=may_write, progress=lambda done, total: None)


def silent(*_: object) -> None:
    pass


shards_of, one_file = plain(), plain("llama-tied", torch.float16, in_one_file=True)
KINDS: dict[str, Make] = {
    "shards": shards_of, "one file": one_file, "mixture": plain("qwen3-moe", torch.bfloat16), "packed": packed(),
    "gptq": quantised("gptq"), "fp8": quantised("fp8-block"), "nf4": quantised("nf4"), "gguf Q4_K": gguf("Q4_K"),
    "gguf Q8_0": gguf("Q8_0"), "gguf in parts": gguf("F16", max_tensors=9),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_named_wherever_it_is(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind](tmp_path / "model")
    first, again = ask(model), ask(model)
    assert not first.damage and not first.notes and first.is_written and first.num_as_before == 0
    assert not again.damage and not again.is_written and again.num_as_before == again.num_files > 0
    paths = [file.path for file in open_whole(str(model)).files]
    assert again.num_bytes == sum(path.stat().st_size for path in paths), "all of it is read"
    rng = random.Random(f"{kind}/3")
    for _ in range(NUM_FLIPS):
        path, name, at, bit = random_place(rng, paths)
        flip(path, at, bit)
        response = ask(model)
        assert [(hit.file, hit.tensor) for hit in response.damage] == [(path.name, name)], f"bit {bit} of byte {at}"
        assert not response.is_written and response.num_as_before == response.num_files - 1
        flip(path, at, bit)
    assert not ask(model).damage


def test_bits_of_headers_and_padding_count(tmp_path: Path) -> None:
    model = gguf("Q8_0")(tmp_path / "model")
    assert not ask(model).damage
    ends = sorted(extents(model).values())
    at = next(hi for (_, hi), (lo, _) in pairwise(ends) if hi < lo)
    owner = next(name for name, (_, hi) in extents(model).items() if hi == at)
    flip(model, at)
    assert [item.tensor for item in ask(model).damage] == [owner], "padding is of the tensor before it"
    flip(model, at)
    folder = shards_of(tmp_path / "shards")
    assert not ask(folder).damage
    shard = sorted(folder.glob("*.safetensors"))[0]
    flip(shard, shard.read_bytes().index(b'"pt"') + 1)
    (damage,) = ask(folder).damage
    assert damage.file == shard.name and not damage.tensor and "in its header" in damage.fault


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_damage_the_first_time(number: float, tmp_path: Path) -> None:
    folder, name = shards_of(tmp_path / "model"), "model.layers.2.mlp.down_proj.weight"
    path = change_tensor(folder, name, lambda tensor: tensor[7].fill_(number))
    assert ask(folder).damage == [Damage(path.name, name, "has numbers that are not finite")]
    assert not default_manifest(folder).exists(), "these are not to be compared with"


def move(folder: Path, path: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index_content = json.loads(index.read_text())
    index_content["weight_map"]["model.norm.weight"] = path.name
    index.write_text(json.dumps(index_content))


BROKEN: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "cut": (lambda folder, path: os.truncate(path, path.stat().st_size - 1), "truncated"),
    "removed": (lambda folder, path: path.unlink(), "is missing"),
    "a pipe": (lambda folder, path: (path.unlink(), os.mkfifo(path)), "no regular file"),
    "moved": (move, "is not in the file that the index"),
}


@pytest.mark.parametrize(("breaks", "words"), BROKEN.values(), ids=BROKEN)
def test_files_that_lack_something_are_damaged(
    breaks: Callable[[Path, Path], object], words: str, tmp_path: Path
) -> None:
    folder = shards_of(tmp_path / "model")
    path = sorted(folder.glob("*.safetensors"))[0]
    breaks(folder, path)
    report = ask(folder)
    (damage,) = report.damage
    assert damage.file == path.name and words in damage.fault and path.name not in damage.fault
    assert report.num_files >= 2 and not report.is_written, "the others are looked at all the same"


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("no model")
    for model, line in (("empty", "no safetensors files in"), ("missing", "no model at"), ("a.txt", "no model at")):
        with pytest.raises(UserError, match=line):
            ask(tmp_path / model)
    with pytest.raises(UserError, match="nowhere/nothing is neither a folder nor in the hub's cache"):
        open_whole("nowhere/nothing")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_is_written_to_meanwhile_is_no_damage(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards_of(tmp_path / "model")
    path, whole = sorted(folder.glob("*.safetensors"))[1], open_whole(str(folder))
    if when == "before":
        os.utime(path, ns=(0, 0))
    else:
        monkeypatch.setattr(measuring, "finish", lambda reads: (os.utime(path, ns=(0, 0)), [r.result() for r in reads]))
    with pytest.raises(UserError, match=f"{path.name} .*changed"):
        verify(whole, None, progress=silent)
    assert not default_manifest(whole.path).exists()


def test_a_manifest_that_was_named_is_compared_with_and_never_written(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model")
    with pytest.raises(UserError, match=r"no manifest at .* give `write` as well"):
        ask(folder, tmp_path / "sums.json")
    assert not (tmp_path / "sums.json").exists()
    manifest = ask(folder, tmp_path / "sums.json", may_write=True).manifest
    before = manifest.read_text()
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    path = copy / "model.safetensors"
    note(path)
    report = ask(copy, manifest)
    assert not report.damage and report.num_as_before == report.num_as_hub == 1 and not report.is_written
    change_tensor(copy, "model.norm.weight", lambda tensor: tensor.add_(1))
    assert ask(copy, manifest).damage and manifest.read_text() == before
    path.rename(copy / "other.safetensors")
    has, lacks = ask(copy, manifest).notes
    assert has == "sums.json has files that the model has not: model.safetensors"
    assert lacks == "sums.json lacks files of the model: other.safetensors"
    assert manifest.read_text() == before


BREAKS: dict[str, Callable[[str], str]] = {
    "a sum changed": lambda text: text.replace(json.loads(text)["files"]["model.safetensors"]["header"], "00000000"),
    "cut": lambda text: text[:-20],
    "deep": lambda _: "[" * 100_000,
    "a list": lambda _: "[]",
    "of others": lambda _: '{"format": "others"}',
    "other version": lambda text: text.replace('"version": 1', '"version": 2'),
    "no files": lambda text: json.dumps(json.loads(text) | {"files": 7}),
    "no sums": lambda _: json.dumps({"format": "offload.sums", "version": 1, "crc32": "f8bc5ec3", "files": {"a": []}}),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_manifest_that_is_none_is_refused_and_stays(broken: str, tmp_path: Path) -> None:
    folder = one_file(tmp_path / "model")
    manifest = ask(folder).manifest
    text = BREAKS[broken](manifest.read_text())
    manifest.write_text(text)
    with pytest.raises(UserError, match=r"offload_sums\.json"):
        ask(folder)
    assert manifest.read_text() == text


def test_a_manifest_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_file(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not (Path(path) == folder and mode & os.W_OK))
        with pytest.raises(UserError, match=r"model may not be written to\): `manifest` and `write` name another"):
            ask(folder)
    # such a disk shows when all has been read
    ended = shell("verify", folder, "--manifest", "/proc/nowhere/sums.json", "--write")
    assert ended.code == 2 and "cannot write /proc/nowhere" in ended.out, ended
    assert "nothing to compare with the next time" in ended.out
    assert "sound; " in ended.out and "keeps checksums" not in ended.out


def test_sums_of_the_hub_beside_a_download_count(tmp_path: Path) -> None:
    folder = shards_of(tmp_path / "model")
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        note(path)
    config, first = (folder / "config.json").read_bytes(), next(iter(extents(paths[0]).values()))[0]
    note(folder / "config.json", hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest())
    flip(paths[0], first)
    report = ask(folder)
    (damage,) = report.damage
    assert damage == Damage(paths[0].name, "", "its bytes are not those of the hub (sha256)"), "without any manifest"
    assert report.num_as_hub == len(paths) - 1
    flip(paths[0], first)
    report = ask(folder)
    assert not report.damage and not report.notes and report.num_as_hub == len(paths)
    known = read_manifest(report.manifest)
    assert {entry.sha256 for entry in known.values()} == {*map(sha256, paths)}
    flip(folder / "config.json", 5)
    assert ask(folder).notes == ["not as the hub has it: config.json"]
    flip(folder / "config.json", 5)
    note(paths[0], "0" * 64, later_s=-60)
    assert not ask(folder).damage, "it was written to since it was downloaded: the hub's sum is of another"


def test_the_hubs_cache_is_read_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = one_file(tmp_path / "source"), tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in source.iterdir():
        blob = cache / "blobs" / sha256(path)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    before = sorted(cache.rglob("*"))
    report = ask(snapshot)
    assert not report.damage and report.num_as_hub == 1 and sorted(cache.rglob("*")) == before
    assert report.manifest == tmp_path / "own" / "offload" / "sums" / "models--org--name-0123456789ab.json"
    monkeypatch.chdir(snapshot)
    assert default_manifest(Path(".")) == report.manifest and not ask(Path(".")).is_written
    path = snapshot / "model.safetensors"
    flip(path.resolve(), extents(path)["model.norm.weight"][0])
    assert [damage.tensor for damage in ask(snapshot).damage] == ["model.norm.weight"]
    report.manifest.unlink()
    assert ask(snapshot).damage == [Damage(path.name, "", "its bytes are not those of the hub (sha256)")]
    # A gguf file in the hubs cache has its manifest elsewhere.
    model = gguf("Q8_0")(snapshot / "Q8_0")
    name = "models--org--name-0123456789ab-Q8_0-m.gguf.json"
    assert ask(model).manifest == tmp_path / "own" / "offload" / "sums" / name
