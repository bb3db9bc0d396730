"""Blocks of a prompt cache on a disk: a safetensors file each, named by what it holds.

Several programs may use one folder at the same time. A file is written under another name first,
its name determines its content, and a block that another program has removed is computed again.
Blocks of other models, types or versions have other names and are never read; they only count to
the size.

Invariant: tensors are returned only from a file that states this same name, has the shapes of the
model, and whose checksum is right. A fault of the disk ends no text: it is reported once.
"""

import os
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.checkpoint.files import is_scratch, open_regular, read_json, write_json
from offload.checkpoint.safetensors import parse_header
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import STORED
from offload.engine.state_tensors import SUM, write_tensors
from offload.errors import UserError, ensure, reason, system_reason
from offload.units import format_bytes

_MARK = "offload-prompt-cache.json"
_FORMAT = "offload prompt cache, version 1"
_ENDING = ".safetensors"
_NAME = "name"  # key of the note with the block's own name
_AFRESH = "name another folder, or delete it"
# share of the size that is kept when blocks have to go, so that few writes scan the folder
_KEPT_SHARE = 0.95
_STALE_S = 3600.0  # seconds after which an unfinished file is given up
Tensors = Mapping[str, Tensor]


class BlockHeader(NamedTuple):
    """The names, shapes and types of a block's tensors, with `safe_open`'s methods."""

    entries: Mapping[str, TensorEntry]

    def keys(self) -> list[str]:
        """Return the names."""
        return [*self.entries]

    def get_slice(self, name: str) -> "TensorHeader":
        """Return the header of one tensor."""
        entry = self.entries[name]
        return TensorHeader(list(entry.shape), entry.dtype)


class TensorHeader(NamedTuple):
    """The shape and the type of a tensor."""

    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return self.shape

    def get_dtype(self) -> str:
        """Return the type by its name in files."""
        return self.dtype


class BlockFolder:
    """Blocks by name in a folder of at most this many bytes; the least recently used make room.

    Args:
        directory: created if it is missing.
        on_fault: called with a line once for files that cannot be read, and once for failed writes.

    Raises `UserError` for a folder with other content, or one that cannot be created.
    """

    def __init__(self, directory: Path, most_bytes: int, on_fault: Callable[[str], None]) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._on_fault = on_fault
        self._faults = set[str]()
        self._unread = set[bytes]()  # names of files that are of no use
        self._is_writing = True
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _require_ours(directory)
            write_json(directory / _MARK, {"format": _FORMAT})
            self._scan()
        except OSError as error:
            raise UserError(
                f"cannot keep prompts in {directory} ({system_reason(error)}): name another folder"
            ) from None

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def look(self, key: bytes) -> bool:
        """Return True if there is such a block, also if another program wrote it."""
        if key not in self._sizes and key not in self._unread:
            with suppress(OSError):
                self._add(key, self._path(key).stat().st_size)
        return key in self._sizes

    def read(self, key: bytes, check: Callable[[BlockHeader], None]) -> Tensors | None:
        """Return a block's tensors; None if it is gone or damaged, which is reported once.

        `check` raises `ValueError` for tensors that no block of this model has.
        """
        path = self._path(key)
        try:
            with open_regular(path) as file:
                content = bytearray(file.read())
            os.utime(path)
            return _tensors(path, content, key, check)
        except FileNotFoundError:
            self._drop(key)
        except OSError as error:
            self._drop(key)
            self._unread.add(key)
            self._tell("reading", f"{path} cannot be read ({system_reason(error)})")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._drop(key)
            self._unread.add(key)
            with suppress(OSError):
                path.unlink()
            why = reason(error)
            self._tell("damage", f"{path} is damaged ({why}): its rows are computed anew")
        return None

    def write(self, key: bytes, tensors: Tensors) -> bool:
        """Write tensors under a name; return True on success; a failure is reported once."""
        if not self._is_writing:
            return False
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            # other programs write there as well
            if self._num_written > (1 - _KEPT_SHARE) / 2 * self._most_bytes:
                self._scan()
            if self._num_bytes + num_bytes > self._most_bytes:
                self._make_room(num_bytes)
            if num_bytes > self._most_bytes:
                return False
            path = self._path(key)
            write_tensors(path, {"format": _FORMAT, _NAME: key.hex()}, tensors, is_synced=False)
            self._add(key, path.stat().st_size)
            self._num_written += self._sizes[key]
            self._unread.discard(key)
        except OSError as error:
            self._is_writing = False
            why = system_reason(error)
            self._tell("writing", f"no more prompts are kept in {self._directory} ({why})")
            return False
        return True

    def _tell(self, kind: str, line: str) -> None:
        if kind not in self._faults:
            self._faults.add(kind)
            self._on_fault(line)

    def _path(self, key: bytes) -> Path:
        return self._directory / f"{key.hex()}{_ENDING}"

    def _scan(self) -> list[bytes]:
        """Scan the folder; return the names, the least recently used first."""
        used = list[tuple[int, bytes, int]]()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                    if is_scratch(Path(entry.path)) and time.time() - status.st_mtime > _STALE_S:
                        os.unlink(entry.path)
                    if entry.name.endswith(_ENDING):
                        key = bytes.fromhex(entry.name.removesuffix(_ENDING))
                        used.append((status.st_mtime_ns, key, status.st_size))
                # another program has just removed it; or it is no block's name
                except (FileNotFoundError, ValueError):
                    continue
        used.sort()
        self._sizes = {key: size for _, key, size in used}
        self._num_bytes = sum(self._sizes.values())
        self._num_written = 0  # bytes written since then
        return [key for _, key, _ in used]

    def _make_room(self, num_bytes: int) -> None:
        for key in self._scan():
            if self._num_bytes + num_bytes <= _KEPT_SHARE * self._most_bytes:
                break
            self._path(key).unlink(missing_ok=True)
            self._drop(key)

    def _add(self, key: bytes, num_bytes: int) -> None:
        self._drop(key)
        self._sizes[key] = num_bytes
        self._num_bytes += num_bytes

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= self._sizes.pop(key, 0)


def _require_ours(directory: Path) -> None:
    """Raise `UserError` for a folder with other content, or of another version."""
    mark = directory / _MARK
    if not mark.exists():
        # except for a mark that another program is just writing
        others = [name for name in sorted(os.listdir(directory)) if not is_scratch(Path(name))]
        if others:
            raise UserError(
                f"{directory} holds something else than prompts, such as {others[0]}: "
                "name an empty folder, or a new one"
            )
        return
    stated = read_json(mark).get("format")
    if stated != _FORMAT:
        raise UserError(f"{directory} is no {_FORMAT}, but {stated!r:.80}: {_AFRESH}")


def _tensors(
    path: Path, content: bytearray, key: bytes, check: Callable[[BlockHeader], None]
) -> Tensors:
    """Return the tensors of a block's file, whose bytes are `content`. Raises `ValueError`."""
    header_bytes = int.from_bytes(content[:8], "little")
    ensure(8 + header_bytes <= len(content), f"of {format_bytes(len(content))}, cut short")
    entries, notes = parse_header(path, bytes(content[8 : 8 + header_bytes]), len(content))
    ensure(notes.get("format") == _FORMAT, "another format")
    ensure(notes.get(_NAME) == key.hex(), "another block's name")
    total = zlib.crc32(memoryview(content)[8 + header_bytes :])
    ensure(notes.get(SUM) == f"{total:08x}", "its checksum does not fit")
    check(BlockHeader(entries))
    memory = torch.frombuffer(content, dtype=torch.uint8)
    return {
        name: memory[entry.lo : entry.hi]
        .view(getattr(torch, STORED[entry.dtype].dtype))
        .view(entry.shape)
        for name, entry in entries.items()
    }
