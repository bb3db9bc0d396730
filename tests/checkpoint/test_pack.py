"""Packing and unpacking as files: the same bytes come back, interrupted or not, and nothing wrong passes for right.

Invariant: a folder that is not whole never has the name that was asked for.
"""

import errno
import hashlib
import json
import math
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flipping import flip
from refusals import contents, join, split
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, build, save

import offload
from offload.checkpoint.files import MANIFEST
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.safetensors import read_header
from offload.checkpoint.tensors import TensorEntry
from offload.encoding import residuals
from offload.encoding.exponents import Exponents, ExponentWindow
from offload.errors import ReadError, UserError
from offload.packing import format as packed_writing
from offload.packing import pack as module
from offload.packing.forecast import by_expert
from offload.packing.format import read_packed
from offload.packing.pack import verify


def silent(_done: int, _total: int) -> None:
    pass


damage = partial(flip, keeps_time=False)
pack = partial(module.pack, progress=silent)
unpack = partial(module.unpack, progress=silent)


@pytest.fixture(scope="session", params=[torch.bfloat16, torch.float16], ids=str)
def packable_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files, with some that are no weights; what is float16 was bfloat16 once."""
    folder = save(build(FAMILIES["qwen3-moe"]()).bfloat16().to(request.param), tmp_path_factory.mktemp("model"))
    (folder / "tokenizer.model").write_bytes(os.urandom(100))
    (folder / "LICENSE").write_text("Do as you like.\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (folder / ".hidden").write_text("not copied")
    (folder / "consolidated.pth").write_bytes(b"not copied")
    return folder


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PORTION_BYTES", 100_000)


@pytest.fixture
def model(packable_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packable_model, tmp_path / "model"))


@pytest.fixture
def packed(model: Path, tmp_path: Path) -> Path:
    return pack(model, tmp_path / "packed").folder


def sums(folder: Path) -> dict[str, str]:
    files = filter(Path.is_file, folder.rglob("*"))
    sum_of = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {name: digest for name, digest in sum_of.items() if name not in (".hidden", "consolidated.pth")}


def test_what_is_unpacked_has_the_same_sha256(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = pack(model, tmp_path / "packed", progress=lambda *how_far: seen.append(how_far))
    assert report.num_files > len(list(model.glob("*.safetensors"))) > 1 and report.num_kept == 0
    before, after = (open_checkpoint(folder).num_bytes for folder in (model, tmp_path / "packed"))
    assert after < 0.8 * before, "except for headers"
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    assert unpack(tmp_path / "packed", tmp_path / "back") == tmp_path / "back"
    assert sums(tmp_path / "back") == sums(model)
    assert verify(tmp_path / "packed", progress=silent) == report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_anything_that_a_file_may_hold_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Every pattern of bits, types that are not coded, empty tensors, notes; in one file without an index."""
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    random = torch.Generator().manual_seed(0)
    usual = (torch.randn(300, 1000, generator=random) * 0.02).bfloat16().to(dtype)
    patterns = torch.arange(65536).to(torch.int16).view(dtype)
    odd, rare = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 3e38, -1.5]).to(dtype), usual.clone()
    rare[::7, ::50] = odd.repeat(144)[:860].view(43, 20)
    tensors = {
        "model.layers.0.a.weight": usual, "model.layers.0.b.weight": patterns, "model.layers.0.experts.c": rare,
        "d.weight": torch.randn(50, 60), "e.weight": torch.zeros(0, 8, dtype=dtype), "f.weight": usual[0, :5].clone(),
        "g.bias": torch.randint(0, 255, (999,), dtype=torch.uint8), "h": torch.zeros(50, 100, dtype=dtype),
        "i.bias": torch.zeros(5000, dtype=dtype),
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "note": 'ü "quoted"'})
    pack(folder, tmp_path / "packed")
    entries = open_checkpoint(tmp_path / "packed").tensors
    assert entries.keys() == tensors.keys()
    coded = {name for name, entry in entries.items() if entry.coded is not None}
    assert coded == {"model.layers.0.a.weight", "model.layers.0.experts.c", "h"}
    assert all(entries[name].shape == tuple(tensors[name].shape) for name in coded)
    unpack(tmp_path / "packed", tmp_path / "back")
    assert sums(tmp_path / "back") == sums(folder)


def test_of_two_tensors_with_one_name_the_index_tells_which_is_meant(model: Path, tmp_path: Path) -> None:
    index = model / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    name = next(name for name, file in placed.items() if file == min(placed.values()))
    last = model / max(placed.values())
    save_file({**load_file(last), name: load_file(model / placed[name])[name] + 1}, last)
    pack(model, tmp_path / "packed")
    file_of = json.loads((tmp_path / "packed" / index.name).read_text())["weight_map"]
    files = {file_of[stored] for stored in file_of if stored.startswith(name)}
    assert {read_packed(tmp_path / "packed" / file).origin.file for file in files} == {placed[name]}
    assert open_checkpoint(tmp_path / "packed").tensors.keys() == open_checkpoint(model).tensors.keys()


def test_other_tools_can_tell_what_a_file_is_and_a_layer_is_one_run_of_it(model: Path, packed: Path) -> None:
    weight_map = json.loads((packed / "model.safetensors.index.json").read_text())["weight_map"]
    for path in packed.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "offload.packed" and file.metadata()["version"] == "1"
            assert json.loads(file.metadata()["origin"])["file"] in {path.name for path in model.iterdir()}
            assert all(weight_map[name] == path.name for name in file.keys())  # noqa: SIM118
        entries = sorted(read_header(path).tensors.items(), key=lambda item: item[1].lo)
        is_code = [name.endswith(".code") for name, _ in entries]
        assert is_code == sorted(is_code), "companions lie behind all words"
        assert all(entry.lo % 32 == 0 for name, entry in entries if name.endswith(".mantissas"))


def test_an_interrupted_packing_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(model, tmp_path / "whole")
    write, written = packed_writing.write_packed, list[str]()

    def stop_at_third(path: Path, *rest: object) -> None:
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(module, "write_packed", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        pack(model, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    report = pack(model, tmp_path / "packed")
    kept = report.num_kept
    # two are under way at once; the one that was not stopped is whole
    assert 1 <= kept <= 2 and len({*written[3:]}) == whole.num_files - kept
    assert sums(tmp_path / "packed") == sums(tmp_path / "whole")
    assert pack(model, tmp_path / "packed") == report._replace(num_kept=report.num_files, was_there=True)
    assert len(written) == 3 + whole.num_files - kept, "what is whole is not written again"


def test_a_packing_goes_on_that_was_cut_elsewhere(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another version: what it has left is no part of the model."""
    whole = pack(model, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_PORTION_BYTES", 20_000)
        patch.setattr(module, "_write_index", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack(model, tmp_path / "packed")
    assert pack(model, tmp_path / "packed").num_files == whole.num_files
    assert sums(tmp_path / "packed") == sums(tmp_path / "whole")
    verify(tmp_path / "packed", progress=silent)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def wrong_coders(patch: pytest.MonkeyPatch) -> None:
    encode = packed_writing.encode_exponents

    def wrong(weight_N, top, width):
        words = encode(weight_N, top, width)
        words.mantissa_N[len(weight_N) // 2] ^= 1
        return words

    patch.setattr(packed_writing, "encode_exponents", wrong)


@pytest.mark.parametrize(("plant", "refusal"), [
    (lambda patch: patch.setattr("offload.packing.format.os.fsync", interrupt), pytest.raises(KeyboardInterrupt)),
    (wrong_coders, pytest.raises(UserError, match="does not decode to what was packed")),
], ids=["dies", "codes wrongly"])  # fmt: skip
def test_what_ends_within_a_file_leaves_none(
    plant: Callable[[pytest.MonkeyPatch], None],
    refusal: Any,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with refusal:
        pack(model, tmp_path / "packed")
    assert [path.name for path in (tmp_path / "packed.unfinished").iterdir()] == ["offload_pack.json"]


def test_a_source_that_changed_in_between_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    line = rf"another {shard.name}, which changed since: remove"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_packed", interrupt)
        pack(model, tmp_path / "packed")
    damage(shard, -1)
    with pytest.raises(UserError, match=line):
        pack(model, tmp_path / "packed")
    shutil.rmtree(tmp_path / "packed.unfinished")
    pack(model, tmp_path / "packed")
    # as a reproducible archive leaves it: in place, as large, and with the old time
    before = shard.stat()
    flip(shard, -1)
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(UserError, match=line):
        pack(model, tmp_path / "packed")


@pytest.mark.parametrize("step", ["check_pack", "write_packed"])
def test_a_source_that_changes_behind_a_step_is_noticed(
    step: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = getattr(module, step)

    def change_after(*given: Any) -> Any:
        result = act(*given)
        damage(result.shards[0] if step == "check_pack" else given[1].path, -1)
        return result

    monkeypatch.setattr(module, step, change_after)
    with pytest.raises(ReadError, match="changed while it was packed"):
        pack(model, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_stack_of_a_type_that_is_not_known_stays_whole() -> None:
    odd = {"model.layers.0.mlp.experts.down_proj": TensorEntry(0, "F4", (4, 3, 5), 0, 30)}
    assert by_expert(odd) == odd


def test_a_config_that_changes_meanwhile_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def cutting(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
        def cut_after(*given: Any) -> Any:
            os.truncate(folder / "config.json", 9)
            return function(*given)

        return cut_after

    config, packed, back = (model / "config.json").read_bytes(), tmp_path / "packed", tmp_path / "back"
    line = "config.json changed while it was to be copied"
    with monkeypatch.context() as patch, pytest.raises(ReadError, match=line):
        patch.setattr(module, "write_packed", cutting(model, module.write_packed))
        pack(model, packed)
    (model / "config.json").write_bytes(config)
    pack(model, packed)
    with monkeypatch.context() as patch, pytest.raises(ReadError, match=line):
        patch.setattr(module, "write_original", cutting(packed, module.write_original))
        unpack(packed, back)
    assert not back.exists()
    (packed / "config.json").write_bytes(config)
    unpack(packed, back)
    assert (back / "config.json").read_bytes() == config == (packed / "config.json").read_bytes()


def place_of(folder: Path, suffix: str) -> tuple[Path, int]:
    """A file, and where in it such a tensor begins."""
    headers = [(path, read_header(path).tensors) for path in sorted(folder.glob("*.safetensors"))]
    named = ((path, name, entry) for path, entries in headers for name, entry in entries.items())
    return next((path, entry.lo) for path, name, entry in named if name.endswith(suffix) and entry.num_bytes)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    made = build(FAMILIES["llama"]()).bfloat16()
    made.get_parameter("model.layers.0.mlp.down_proj.weight").data[-1, -1] = torch.nan  # listed by its place
    model = save(made, tmp_path / "dense")
    return pack(model, tmp_path / "beside", beside="int4").folder


RESIDUAL = (*residuals.WORDS, *residuals.COMPANIONS)


@pytest.mark.parametrize("suffix", [".mantissas", ".exponents", ".escapes", ".code", "norm.weight"])
def test_a_damaged_byte_is_found(suffix: str, packed: Path, tmp_path: Path) -> None:
    damage(*place_of(packed, suffix))
    assert_found(packed, tmp_path / "back")


@pytest.mark.parametrize("suffix", RESIDUAL)
def test_a_damaged_byte_beside_a_copy_is_found(suffix: str, beside: Path, tmp_path: Path) -> None:
    damage(*place_of(beside, suffix))
    assert_found(beside, tmp_path / "back")


def assert_found(damaged: Path, back: Path) -> None:
    with pytest.raises(UserError, match=r"pack the model again$"):
        verify(damaged, progress=silent)
    with pytest.raises(UserError, match=rf"pack the model again; .* in {back}\.unfinished, which may be"):
        unpack(damaged, back)
    assert not back.exists() and back.with_name("back.unfinished").is_dir()


def test_a_matrix_beside_its_copy_comes_back_whatever_it_holds(tmp_path: Path) -> None:
    """All patterns, zeros alone, fewer rows than a tile; what the copy has no groups for stays by itself."""
    folder = save(build(FAMILIES["llama"]()).bfloat16(), tmp_path / "dense", max_shard_size="1GB")
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.{}.mlp.down_proj.weight"
    tensors[name.format(0)] = torch.arange(65536).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    tensors[name.format(1)] = torch.zeros(70, 320).bfloat16()
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.randn(100, 50).bfloat16()
    save_file(tensors, path)
    done = pack(folder, tmp_path / "beside", beside="int4")
    coded = {key: entry.coded.coding for key, entry in open_checkpoint(done.folder).tensors.items() if entry.coded}
    assert isinstance(coded[name.format(0)], residuals.Residual) and isinstance(
        coded[name.format(1)], residuals.Residual
    )
    assert not isinstance(coded.get("model.layers.0.mlp.up_proj.weight"), residuals.Residual)
    unpack(done.folder, tmp_path / "back")
    assert sums(tmp_path / "back") == sums(folder)


@pytest.mark.parametrize("suffix", residuals.COMPANIONS)
def test_a_run_beside_another_copy_is_refused(suffix: str, beside: Path) -> None:
    """One code or one scale of another model is enough, though it runs as well."""
    damage(*place_of(beside, suffix))
    for draft in (None, "self:int4"):
        with pytest.raises(UserError, match=r"it was damaged, pack the model again"):
            offload.load(str(beside), draft, context=64)


def test_what_is_asked_beside_must_be_possible(model: Path, beside: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    half = save(build(FAMILIES["llama"]()).bfloat16().half(), tmp_path / "half")
    for source, options, words in (
        (dense, "nf4", "must be int4, got 'nf4'"),
        (model, "int4", "fused experts"),
        (half, "int4", "needs matrices in bfloat16"),
        (beside, "int4", "is packed already"),
    ):
        with pytest.raises(UserError, match=words):
            pack(source, tmp_path / "other", beside=options)
        assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="was packed beside int4, not by itself: choose another folder"):
        pack(dense, beside)
    with pytest.raises(UserError, match="has 4 bits, got `draft` self:int8: give self:int4"):
        offload.load(str(beside), "self:int8")


def test_a_file_that_is_missing_or_cut_is_found(packed: Path, tmp_path: Path) -> None:
    first, second, *_ = sorted(packed.glob("*.safetensors"))
    os.truncate(second, second.stat().st_size - 1)
    for look in (lambda: verify(packed, progress=silent), lambda: open_checkpoint(packed)):
        with pytest.raises(UserError, match="truncated: pack the model again"):
            look()
    first.unlink(), second.unlink()
    with pytest.raises(UserError, match="not the whole: pack the model again"):
        unpack(packed, tmp_path / "back")


def test_tensors_that_look_better_than_they_are_stay_plain(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sample misleads."""
    monkeypatch.setattr(module, "window_of", lambda *_: ExponentWindow(3, 4, 12.0))
    pack(model, tmp_path / "packed")
    assert not any(entry.coded for entry in open_checkpoint(tmp_path / "packed").tensors.values())
    unpack(tmp_path / "packed", tmp_path / "back")
    assert sums(tmp_path / "back") == sums(model)


def test_narrow_exponents_take_eleven_bits(tmp_path: Path) -> None:
    pack(save(build(FAMILIES["llama"]()).bfloat16(), tmp_path / "model"), tmp_path / "packed")
    codings = [tensor.coded.coding for tensor in open_checkpoint(tmp_path / "packed").tensors.values() if tensor.coded]
    assert {coding.width for coding in codings if isinstance(coding, Exponents)} == {3}


@pytest.mark.parametrize(("dtype", "words"), [
    (torch.float32, r"its weights are F32: run it as it is"),
    (torch.float16, r"for float16 that stems from it, its weights are F16, of which a sample would keep 100%: run"),
])  # fmt: skip
def test_other_types_are_refused(dtype: torch.dtype, words: str, tmp_path: Path) -> None:
    folder = save(build(FAMILIES["llama"]()).to(dtype), tmp_path / "model")
    with pytest.raises(UserError, match=words):
        pack(folder, tmp_path / "packed")
    assert not list(tmp_path.glob("packed*"))


def test_folders_that_are_in_the_way_are_refused(model: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    with pytest.raises(UserError, match="`out` must be another folder"):
        pack(model, model / ".")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds files already, .*: choose another folder"):
        pack(model, tmp_path / "other")
    (tmp_path / "other" / "diary.txt").unlink()
    packed = pack(model, tmp_path / "other").folder  # an empty one is no hindrance
    with pytest.raises(UserError, match=r"packed already: run it as it is"):
        pack(packed, tmp_path / "again")
    elsewhere = save(build(FAMILIES["llama"]()).bfloat16(), tmp_path / "llama")
    with pytest.raises(UserError, match=r"is made from .*model: choose another folder"):
        pack(elsewhere, packed)
    with pytest.raises(UserError, match="holds files already"):
        unpack(packed, elsewhere)
    with pytest.raises(UserError, match="holds no packed model"):
        unpack(elsewhere, tmp_path / "back")
    shutil.rmtree(elsewhere), shutil.rmtree(packed)
    assert contents(tmp_path) == before


def test_what_lies_in_a_folder_of_that_name_is_left_alone(model: Path, tmp_path: Path) -> None:
    """Hidden or not; a file under way, of a packing that was killed, is removed."""
    (tmp_path / "packed.unfinished").mkdir()
    (tmp_path / "packed.unfinished" / ".diary.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"packed\.unfinished holds files already"):
        pack(model, tmp_path / "packed")
    assert contents(tmp_path) == before
    (tmp_path / "packed.unfinished" / ".diary.txt").rename(tmp_path / "packed.unfinished" / ".x.json.12-0a1b2c3d")
    assert not list(pack(model, tmp_path / "packed").folder.glob(".*"))


@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_an_unpacking_that_fails_in_its_last_steps_goes_on(
    step: str, model: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, does = tmp_path / "back", getattr(Path, step)

    def refuse(path: Path, *given: Any, **options: Any) -> Any:
        if path.name == "back.unfinished" or path == back / MANIFEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return does(path, *given, **options)

    with monkeypatch.context() as patch, pytest.raises((UserError, OSError), match="Input/output error"):
        patch.setattr(Path, step, refuse)
        unpack(packed, back)
    assert unpack(packed, back) == back
    assert sums(back) == sums(model) and not (tmp_path / "back.unfinished").exists()


def test_a_disk_that_is_too_small_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 1 << 20)
    monkeypatch.setattr("offload.checkpoint.files.shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"more of disk, .* has 1 MiB: free some, the same command goes on"):
        pack(model, tmp_path / "packed")


def test_a_strangers_manifest_writes_nowhere_else(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / "offload_pack.json").read_text())
    first = next(iter(manifest["files"].values()))
    for name in ("../evil.safetensors", "config.json", "/tmp/evil.safetensors"):
        (packed / "offload_pack.json").write_text(json.dumps({**manifest, "files": {name: first}}))
        with pytest.raises(UserError, match=r"is not of offload\.packed 1"):
            unpack(packed, tmp_path / "back")
    assert read_packed(next(packed.glob("*.safetensors"))).tensors
    assert not (tmp_path / "back").exists()


def test_a_strangers_header_takes_no_memory(packed: Path, tmp_path: Path) -> None:
    first = min(packed.glob("*.safetensors"))
    origin = read_packed(first).origin._asdict()
    set_notes(first, origin=json.dumps(origin | {"num_portions": 1 << 60}))
    with pytest.raises(UserError, match="not the whole: pack the model again"):
        unpack(packed, tmp_path / "back")
    for note in ("origin", "crc32"):
        set_notes(first, **{"origin": json.dumps(origin), note: "[" * 100_000})
        with pytest.raises(UserError, match="lacks what unpacking needs"):
            unpack(packed, tmp_path / "back")


def set_notes(path: Path, **changed: str) -> None:
    def rewrite(header: dict[str, Any]) -> None:
        header["__metadata__"] |= changed

    rewrite_header(path, rewrite)


def rewrite_header(path: Path, rewrite: Callable[[dict[str, Any]], None]) -> None:
    """Change what a file says of itself; its tensors stay where they are."""
    header, data = split(path.read_bytes())
    rewrite(header)
    path.write_bytes(join(json.dumps(header).encode(), data))


@pytest.mark.parametrize(("suffix", "dtype", "shape"), [
    (".code", "U8", lambda count: [8 * count]), (".mantissas", "I16", lambda count: [count // 2])
], ids=["code", "mantissas"])  # fmt: skip
def test_parts_of_another_type_are_refused(
    suffix: str, dtype: str, shape: Callable[[int], list[int]], packed: Path
) -> None:
    def rewrite(header: dict[str, Any]) -> None:
        named_entry = next(entry for name, entry in header.items() if name.endswith(suffix))
        named_entry |= {"dtype": dtype, "shape": shape(math.prod(named_entry["shape"]))}

    rewrite_header(min(packed.glob("*.safetensors")), rewrite)
    with pytest.raises(UserError, match="packed as by another version"):
        verify(packed, progress=silent)


LACKS = "lacks what unpacking needs"
ORIGINS: list[tuple[str, object, str]] = [
    ("file", "../../evil.safetensors", LACKS),
    ("file", "/tmp/evil.safetensors", LACKS),
    ("file", "evil.sh", LACKS),
    ("file", 7, LACKS),
    ("portion", 1.0, LACKS),
    ("portion", -1, LACKS),
    ("num_bytes", True, LACKS),
    ("file", "evil.safetensors", r"names no evil\.safetensors, packed files do"),
]


@pytest.mark.parametrize(("key", "value", "words"), ORIGINS)
def test_a_strangers_origin_writes_nowhere_else(
    key: str, value: object, words: str, packed: Path, tmp_path: Path
) -> None:
    first, evil = min(packed.glob("*.safetensors")), packed / "model-evil.safetensors"
    shutil.copy(first, evil)
    set_notes(evil, origin=json.dumps(read_packed(first).origin._asdict() | {key: value}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=words):
        unpack(packed, tmp_path / "back")
    assert contents(tmp_path) == before
