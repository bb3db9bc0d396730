"""`offload pack`, `unpack` and `verify` as a person and a program meet them."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from flipping import flip, random_place
from gguf_files import MODELS, write_gguf
from quantised import save_quantised
from refusals import assert_refused
from shell import shell
from tiny import FAMILIES, build, save, save_tokenizer

from offload.cli.verify_command import verify
from offload.errors import UserError
from offload.options import CHAT_PAIR, OutputOptions, VerifyOptions


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(build(FAMILIES["llama"]()).bfloat16(), tmp_path_factory.mktemp("model"))
    save_tokenizer(folder)
    return folder


def test_pack_verify_run_and_unpack(bf16: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "packed", tmp_path / "back"
    outcome = shell("pack", "-m", bf16, "--out", packed)
    assert outcome.code == 0 and outcome.out == ""
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"{packed}: ") and last.endswith("files; read back and decoded, the same bits")
    assert shell("pack", "-m", bf16, "--out", packed).err.splitlines()[-1].endswith("already: --verify reads it")
    result = json.loads(shell("pack", "-m", bf16, "--out", packed, "--json").out)
    assert result["was_there"] and "is_sound" not in result, "nothing was looked at"
    result = json.loads(shell("pack", "-m", packed, "--verify", "--json").out)
    assert result["is_sound"] and result["packed_bytes"] < result["source_bytes"] and 0 < result["share"] < 1
    texts = [
        shell("generate", "-m", model, "-p", "a", "-n", "8", "--ram", "1GiB", "-q").out for model in (bf16, packed)
    ]
    assert texts[0] == texts[1] != ""
    outcome = shell("unpack", "-m", packed, "--out", back, "--json")
    assert outcome.err == "" and json.loads(outcome.out)["folder"] == str(back)
    for path in bf16.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes()


def test_what_has_nothing_to_gain_is_refused_by_name(bf16: Path, tmp_path: Path) -> None:
    blocks = write_gguf(MODELS["qwen3"](), tmp_path / "m.gguf", "Q8_0").path
    model = save_quantised(save(build(FAMILIES["llama"]()), tmp_path / "plain"), "gptq", tmp_path / "gptq").directory
    shell("pack", "-m", bf16, "--out", tmp_path / "packed")
    for source, words in (
        (blocks, ("m.gguf is stored as Q8_0", "nothing to gain, run it as it is")),
        (tmp_path, ("m.gguf is stored as Q8_0", "nothing to gain, run it as it is")),
        (model, ("gptq is stored as int4 in", "nothing to gain")),
        (tmp_path / "packed", ("packed is packed already",)),
    ):
        assert_refused(shell("pack", "-m", source, "--out", tmp_path / "x"), *words)


def test_sound_then_damaged_then_sound(sound: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(sound, tmp_path / "model"))
    before = sorted(model.iterdir())
    outcome = shell("verify", model)
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out.startswith(f"{model}: sound; ") and "written to" not in outcome.out
    assert outcome.out.endswith(
        "nothing to compare its bits with; --write keeps checksums to compare them with next time\n"
    )
    assert sorted(model.iterdir()) == before, "what verifies only reads"
    outcome = shell("verify", model, "--write")
    assert outcome.code == 0 and "checksums written to " in outcome.out
    outcome = shell("verify", model)
    assert outcome.code == 0 and outcome.out.endswith("as in offload_sums.json\n") and "written" not in outcome.out
    paths = sorted(model.glob("*.safetensors"))
    path, name, at, bit = random_place(random.Random(1), paths)
    flip(path, at, bit)
    outcome = shell("verify", model)
    first, last = outcome.out.splitlines()
    assert outcome.code == 1 and first.startswith(f"{path.name}: {name}: its bytes are not those of offload_sums.json")
    assert last.startswith(f"{model}: DAMAGED in 1 file; ")
    result = json.loads(shell("verify", model, "--json").out)
    assert result["is_sound"] is False and [damage["tensor"] for damage in result["damage"]] == [name]
    flip(path, at, bit)
    result = json.loads(shell("verify", model, "--json").out)
    assert result["is_sound"] is True and result["num_as_before"] == len(paths) == result["num_files"]
    assert result["bytes_per_s"] > 0 and result["manifest"] == str(model / "offload_sums.json")


def test_what_cannot_be_asked_is_one_line(sound: Path, tmp_path: Path) -> None:
    assert_refused(shell("verify", "nowhere/nothing"), "nowhere/nothing", "download it first")
    (tmp_path / "sums.json").write_text("{}")
    assert_refused(shell("verify", sound, "--manifest", tmp_path / "sums.json"), "is no manifest", "--manifest")
    assert (tmp_path / "sums.json").read_text() == "{}"
    assert not (sound / "offload_sums.json").exists()
    assert_refused(shell("verify", sound, "--manifest", tmp_path / "no.json"), "no manifest at", "--write")
    assert not (tmp_path / "no.json").exists()
    outcome = shell("verify", sound, "--manifest", tmp_path / "no.json", "--write")
    assert outcome.code == 0 and f"checksums written to {tmp_path / 'no.json'}" in outcome.out


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(24, "Too many open files"), "Too many open files; raise the limit"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("can't start new thread"), "the system starts no more threads"),
        (UserError("no such model"), "^no such model$"),
    ],
)
def test_what_the_machine_refuses_is_not_told_as_damage(
    error: Exception, line: str, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("offload.integrity.verify", refuse)
    with pytest.raises(UserError, match=line):
        verify(str(sound), VerifyOptions(), OutputOptions(quiet=True))


def test_of_what_could_not_be_read_no_speed_is_told(tmp_path: Path) -> None:
    model = Path(shutil.copytree(CHAT_PAIR / "target", tmp_path / "model"))
    (path,) = model.glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 100)
    outcome = shell("verify", model)
    assert outcome.code == 1 and "truncated: download the checkpoint again" in outcome.out
    assert outcome.out.endswith(f"{model}: DAMAGED in 1 file; no file was read\n")
