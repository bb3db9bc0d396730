"""Files that are none: pipes that nobody writes to, devices without an end, and more than anybody would read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import assert_refused, generate

from offload.checkpoint import small_files
from offload.checkpoint.small_files import read_small
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.planning.hardware import read_hardware
from offload.planning.profile import parse_profile

pytestmark = pytest.mark.usefixtures("_no_weights")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


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


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"])
def test_what_a_library_would_read_whole_is_not_too_large_either(name: str, broken_file: Path) -> None:
    """A hole takes no room on the disk, and all memory where it is read."""
    with open(broken_file / name, "ab") as file:
        file.truncate(1 << 36)
    with pytest.raises(UserError, match=rf"{name} has 65536 MiB, no such file has more than 256: download .* again"):
        load_tokenizer(broken_file)
