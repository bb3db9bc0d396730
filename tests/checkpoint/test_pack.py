"""Packing and unpacking as files: the same bytes come back, interrupted or not, and nothing wrong passes for right.

Invariant: a folder that is not whole never has the name that was asked for.
"""

import hashlib
import json
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
from refusals import contents, join
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, build, save

import offload
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.safetensors import read_header
from offload.encoding import residuals
from offload.errors import UserError
from offload.packing import format as packed_writing
from offload.packing import pack as module
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
    found = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {name: own for name, own in found.items() if name not in (".hidden", "consolidated.pth")}


def test_what_is_unpacked_has_the_same_sha256(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = pack(model, tmp_path / "packed", progress=lambda *how_far: seen.append(how_far))
    assert found.num_files > len(list(model.glob("*.safetensors"))) > 1 and found.num_kept == 0
    before, after = (open_checkpoint(folder).num_bytes for folder in (model, tmp_path / "packed"))
    assert after < 0.8 * before, "but for headers"
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    assert unpack(tmp_path / "packed", tmp_path / "back") == tmp_path / "back"
    assert sums(tmp_path / "back") == sums(model)
    assert verify(tmp_path / "packed", progress=silent) == found


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
    found = open_checkpoint(tmp_path / "packed").tensors
    assert found.keys() == tensors.keys()
    coded = {name for name, entry in found.items() if entry.coded is not None}
    assert coded == {"model.layers.0.a.weight", "model.layers.0.experts.c", "h"}
    assert all(found[name].shape == tuple(tensors[name].shape) for name in coded)
    unpack(tmp_path / "packed", tmp_path / "back")
    assert sums(tmp_path / "back") == sums(folder)


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
    found = pack(model, tmp_path / "packed")
    kept = found.num_kept
    # two are under way at once; the one that was not stopped is whole
    assert 1 <= kept <= 2 and len({*written[3:]}) == whole.num_files - kept
    assert sums(tmp_path / "packed") == sums(tmp_path / "whole")
    assert pack(model, tmp_path / "packed") == found._replace(num_kept=found.num_files, was_there=True)
    assert len(written) == 3 + whole.num_files - kept, "what is whole is not written again"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_source_that_changed_in_between_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    told = rf"another {shard.name}, which changed since: remove"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_packed", interrupt)
        pack(model, tmp_path / "packed")
    damage(shard, -1)
    with pytest.raises(UserError, match=told):
        pack(model, tmp_path / "packed")
    shutil.rmtree(tmp_path / "packed.unfinished")
    pack(model, tmp_path / "packed")
    # as a reproducible archive leaves it: in place, as large, and with the old time
    before = shard.stat()
    flip(shard, -1)
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(UserError, match=told):
        pack(model, tmp_path / "packed")


def place_of(folder: Path, suffix: str) -> tuple[Path, int]:
    """A file, and where in it such a tensor begins."""
    headers = [(path, read_header(path).tensors) for path in sorted(folder.glob("*.safetensors"))]
    named = ((path, name, one) for path, own in headers for name, one in own.items())
    return next((path, one.lo) for path, name, one in named if name.endswith(suffix) and one.num_bytes)


@pytest.mark.parametrize("kind", [".mantissas", ".exponents", ".escapes", ".code", "norm.weight"])
def test_a_damaged_byte_is_found(kind: str, packed: Path, tmp_path: Path) -> None:
    damage(*place_of(packed, kind))
    with pytest.raises(UserError, match=r"pack the model again$"):
        verify(packed, progress=silent)
    with pytest.raises(UserError, match=rf"pack the model again; .* in {tmp_path / 'back'}\.unfinished, which may be"):
        unpack(packed, tmp_path / "back")
    assert not (tmp_path / "back").exists() and (tmp_path / "back.unfinished").is_dir()


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    made = build(FAMILIES["llama"]()).bfloat16()
    made.get_parameter("model.layers.0.mlp.down_proj.weight").data[-1, -1] = torch.nan  # listed by its place
    model = save(made, tmp_path / "dense")
    return pack(model, tmp_path / "beside", beside="int4").folder


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
    coded = {key: one.coded.coding for key, one in open_checkpoint(done.folder).tensors.items() if one.coded}
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


def test_a_file_that_is_missing_or_cut_is_found(packed: Path, tmp_path: Path) -> None:
    first, second, *_ = sorted(packed.glob("*.safetensors"))
    os.truncate(second, second.stat().st_size - 1)
    for look in (lambda: verify(packed, progress=silent), lambda: open_checkpoint(packed)):
        with pytest.raises(UserError, match="truncated: pack the model again"):
            look()
    first.unlink(), second.unlink()
    with pytest.raises(UserError, match="not the whole: pack the model again"):
        unpack(packed, tmp_path / "back")


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
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    rewrite(header)
    path.write_bytes(join(json.dumps(header).encode(), raw[8 + size :]))


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
