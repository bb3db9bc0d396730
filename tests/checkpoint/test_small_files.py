"""Files that are none: pipes that nobody writes to, devices without an end, and more than anybody would read."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import assert_refused, generate
from tiny import save_tokenizer

from offload.checkpoint import files as small_files
from offload.checkpoint.files import read_given, read_small
from offload.checkpoint.hub import check_tokenizer_files
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.planning.hardware import read_hardware
from offload.planning.profile import parse_profile
from offload.reports.tune import read_text

pytestmark = pytest.mark.usefixtures("_no_weights")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def hole(path: Path) -> None:
    """More than memory, of which nothing lies on the disk."""
    path.touch()
    os.truncate(path, 1 << 36)


@pytest.mark.parametrize("make", [pipe, endless])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_of_files_that_are_none_is_refused(name: str, make: Callable[[Path], None], broken_file: Path) -> None:
    (broken_file / name).unlink()
    make(broken_file / name)
    assert_refused(generate(broken_file, "-p", "Count:"))


@pytest.mark.parametrize("read", [read_hardware, parse_profile])
@pytest.mark.parametrize("make", [pipe, endless])
def test_other_files_too(make: Callable[[Path], None], read: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "some.json")
    with pytest.raises(UserError, match=r"some\.json \(it is no regular file\)"):
        read(tmp_path / "some.json")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "_MAX_BYTES", 1 << 20)
    path = tmp_path / "some.json"
    path.write_bytes(b" " * (1 << 20))
    assert len(read_small(path)) == 1 << 20
    path.write_bytes(b" " * (1 << 20) + b"3")
    with pytest.raises(OSError, match="it has more than 1 MiB"):
        read_small(path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer.4.0.json", "tokenizer_config.json", "tokenizer.model.v3", "chat_template.jinja",
     "merges.txt", "entity_vocab.json", "vocab-src.json", "vocab.txt", "source.spm", "special_tokens_map.json"],
)  # fmt: skip
def test_what_a_library_would_read_whole_is_not_too_large_either(name: str, broken_file: Path) -> None:
    """A hole takes no room on the disk, and all memory where it is read."""
    with open(broken_file / name, "ab") as file:
        file.truncate(1 << 36)
    with pytest.raises(UserError, match=rf"{name} has 65536 MiB, no such file has more than 256: download .* again"):
        load_tokenizer(broken_file)


def test_what_no_library_reads_may_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text to tune with, a log of training; and a tokenizer of half a million words written with indents."""
    tokenizer = save_tokenizer(tmp_path)
    for name in (
        "corpus.txt", "trainer_state.json", "llama-newvocab.safetensors", "tokenizer_corpus.txt", "tokenizer.bin",
    ):  # fmt: skip
        hole(tmp_path / name)
    found = load_tokenizer(tmp_path)
    assert found is not None and found("Hi")["input_ids"] == tokenizer("Hi")["input_ids"]
    (tmp_path / "config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").unlink()
    monkeypatch.setattr(small_files, "_MAX_BYTES", 100)
    check_tokenizer_files(tmp_path)


def test_what_the_user_names_may_be_a_pipe(tmp_path: Path) -> None:
    """As that of `-f <(command)`; one that nobody writes to is empty, and nothing is waited for."""
    os.mkfifo(tmp_path / "pipe")
    assert read_given(tmp_path / "pipe") == b""
    ours, theirs = os.pipe()
    timer = threading.Timer(0.2, lambda: (os.write(theirs, b"Say:"), os.close(theirs)))
    timer.start()
    assert read_given(Path(f"/proc/self/fd/{ours}")) == b"Say:", "it is waited for whoever writes"
    os.close(ours)
    timer.join()


def test_devices_and_holes_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="neither a file nor a pipe"):
        read_given(Path("/dev/zero"))
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 40)
    for read in (read_given, read_small):
        with pytest.raises(OSError, match="it has more than 64 MiB"):
            read(tmp_path / "hole")


FLAGS = {"prompt": "-f", "schema": "--json-schema", "grammar": "--grammar"}


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("make", [endless, hole])
def test_texts_of_the_user_that_never_end_are_refused(
    flag: str, make: Callable[[Path], None], sound_file: Path, tmp_path: Path
) -> None:
    make(tmp_path / "some.txt")
    given = [] if flag == "-f" else ["-p", "Count:"]
    assert_refused(generate(sound_file, flag, tmp_path / "some.txt", *given), "some.txt", "check the path")


def test_prompts_and_texts_to_tune_with_that_never_end_are_refused(sound_file: Path, tmp_path: Path) -> None:
    endless(tmp_path / "some.jsonl")
    outcome = generate(sound_file, "-f", tmp_path / "some.jsonl")
    assert_refused(outcome, "cannot read prompts", "neither a file nor a pipe")
    with pytest.raises(UserError, match="neither a file nor a pipe"):
        read_text(tmp_path / "some.jsonl")


@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero"])
def test_results_go_into_files_alone(place: str, sound_file: Path, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"prompt": "Count:"}')
    outcome = generate(sound_file, "-f", tmp_path / "some.jsonl", "--out", place)
    assert_refused(outcome, f"results must be kept in a file, {place} is none", "leave --out out")


def test_a_hole_is_no_file_of_results(sound_file: Path, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"prompt": "Count:"}')
    hole(tmp_path / "out.jsonl")
    outcome = generate(sound_file, "-f", tmp_path / "some.jsonl", "--out", tmp_path / "out.jsonl")
    assert_refused(outcome, "out.jsonl, line 1 is no result of offload", "another file")
