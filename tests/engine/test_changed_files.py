"""Weight files that change between the reading of their header and their opening: refused, never decoded as zeros."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from reciting import CONTEXT, streaming_ram

import offload
from offload.streaming.disk import DiskReader


def cut(shard: Path) -> None:
    os.truncate(shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little"))  # the header is still there


def replace(shard: Path) -> None:
    """By a file of the same size and time; on this file system its number tells."""
    old, other = shard.stat(), shard.with_name("other")
    other.write_bytes(bytes(old.st_size))
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    other.replace(shard)


def write_over(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.write(bytes(file.seek(0, os.SEEK_END)))
    os.utime(shard, ns=(0, 0))


def append(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [cut, replace, write_over, append])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_a_shard_that_changes_before_it_is_opened_is_refused(
    whose: str, change: Callable[[Path], None], sound: Path, tmp_path: Path
) -> None:
    models = {name: Path(shutil.copytree(sound, tmp_path / name)) for name in ("target", "draft")}
    changed = sorted(models[whose].glob("*.safetensors"))[-1]

    def open_source(shards: Sequence[Path], **options: Any) -> DiskReader:
        if changed in shards:
            change(changed)
        return DiskReader(shards, **options)

    num_open, ram = len(os.listdir("/proc/self/fd")), streaming_ram(sound)
    with pytest.raises(offload.ReadError, match=f"{changed.name} changed since the model was opened: load the model"):
        offload.load(*models.values(), ram, "4x2", context=CONTEXT, threads=1, open_source=open_source)
    assert len(os.listdir("/proc/self/fd")) == num_open
