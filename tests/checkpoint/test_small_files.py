"""Files that are none, pipes without a writer, devices without an end; and two that write to one folder."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from refusals import assert_refused, generate
from tiny import save_tokenizer

from offload.checkpoint import files as small_files
from offload.checkpoint.files import locked, locked_anew, read_given, read_small, replacing
from offload.checkpoint.small_files import check_tokenizer_files
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.planning.hardware import read_hardware
from offload.planning.profile import parse_profile, tuning_text

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


def test_what_is_too_large_or_no_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="neither a file nor a pipe"):
        read_given(Path("/dev/zero"))
    hole(tmp_path / "hole")
    for read in (read_given, read_small):
        with pytest.raises(OSError, match="it has more than 64 MiB"):
            read(tmp_path / "hole")
    monkeypatch.setattr(small_files, "_MAX_BYTES", 1 << 20)
    path = tmp_path / "some.json"
    path.write_bytes(b" " * (1 << 20))
    assert len(read_small(path)) == 1 << 20
    path.write_bytes(b" " * (1 << 20) + b"3")
    with pytest.raises(OSError, match="it has more than 1 MiB"):
        read_small(path)


READ_WHOLE = ["tokenizer.json", "tokenizer.4.0.json", "tokenizer_config.json", "tokenizer.model.v3", "merges.txt",
              "chat_template.jinja", "entity_vocab.json", "vocab-src.json", "vocab.txt", "source.spm",
              "special_tokens_map.json", "additional_chat_templates/tool_use.jinja"]  # fmt: skip
UNREAD = ["corpus.txt", "trainer_state.json", "llama-newvocab.safetensors", "tokenizer_corpus.txt", "tokenizer.bin"]


@pytest.mark.parametrize("name", READ_WHOLE)
def test_what_a_library_would_read_whole_is_not_too_large_either(name: str, broken_file: Path) -> None:
    """A hole takes no room on the disk, and all memory where it is read."""
    path = broken_file / name
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab") as file:
        file.truncate(1 << 36)
    line = rf"{path.name} has 65536 MiB, no such file has more than 256: download .* again"
    with pytest.raises(UserError, match=line):
        load_tokenizer(broken_file)


def test_what_no_library_reads_may_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text to tune with, a log of training; and a tokenizer of half a million words written with indents."""
    tokenizer = save_tokenizer(tmp_path)
    for name in UNREAD:
        hole(tmp_path / name)
    result = load_tokenizer(tmp_path)
    assert result is not None and result("Hi")["input_ids"] == tokenizer("Hi")["input_ids"]
    (tmp_path / "config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").unlink()
    monkeypatch.setattr(small_files, "_MAX_BYTES", 100)
    check_tokenizer_files(tmp_path)


def test_what_the_user_names_may_be_a_pipe(tmp_path: Path) -> None:
    """As that of `-f <(command)`; one without a writer is empty, and nothing is waited for."""
    os.mkfifo(tmp_path / "pipe")
    assert read_given(tmp_path / "pipe") == b""
    ours, theirs = os.pipe()
    timer = threading.Timer(0.2, lambda: (os.write(theirs, b"Say:"), os.close(theirs)))
    timer.start()
    assert read_given(Path(f"/proc/self/fd/{ours}")) == b"Say:", "the writer is waited for"
    os.close(ours)
    timer.join()


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
        tuning_text(tmp_path / "some.jsonl")


@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero", "out.jsonl"])
def test_results_go_into_files_alone(place: str, sound_file: Path, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"prompt": "Count:"}')
    hole(tmp_path / "out.jsonl")
    words = (f"results must be kept in a file, {place} is none", "leave --out out")
    if place == "out.jsonl":
        words = ("out.jsonl, line 1 is no result of offload", "another file")
    outcome = generate(sound_file, "-f", tmp_path / "some.jsonl", "--out", tmp_path / place)
    assert_refused(outcome, *words)


def test_one_at_a_time_and_two_that_replace_one_file_share_nothing(tmp_path: Path) -> None:
    refusal = pytest.raises(UserError, match=r"another process is writing to .*: wait for it")
    with locked(tmp_path), refusal, locked(tmp_path):
        raise AssertionError("it is locked")
    with locked(tmp_path):
        assert tmp_path.is_dir()
    # As threads of one process do, and programs that are process 1, each in a container of its own.
    path = tmp_path / "profile.json"
    with replacing(path) as opened, replacing(path) as other:
        assert opened != other
        opened.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one" and [*tmp_path.iterdir()] == [path]


def test_a_folder_that_another_finishes_meanwhile_is_not_ours(tmp_path: Path) -> None:
    """Opened before it was renamed and locked after: the lock is that of the finished one."""
    folder, flock = tmp_path / "work", fcntl.flock

    def finish_first(descriptor: int, flags: int) -> None:
        folder.rename(tmp_path / "finished")
        folder.mkdir()
        (folder / "of a third").touch()
        flock(descriptor, flags)

    refusal = pytest.raises(UserError, match="another process")
    with patch.object(fcntl, "flock", finish_first), refusal, locked_anew(folder):
        raise AssertionError("what lies there is a third one's")
    assert (folder / "of a third").exists() and (tmp_path / "finished").is_dir()
