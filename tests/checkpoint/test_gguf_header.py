"""Headers of GGUF files: whatever is wrong there is refused in one line, in bounded time and memory."""

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import MODELS, write_gguf
from refusals import damaged

from offload.checkpoint.gguf_header import read_gguf_header
from offload.errors import UserError


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 0, at: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)


def note(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def file(*tensors: bytes, notes: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] | None = None,
         magic: bytes = b"GGUF", data: int = 4096) -> bytes:  # fmt: skip
    """A whole file of these parts."""
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(notes)))) + b"".join((*notes, *tensors))
    return head + bytes(-len(head) % 32 + data)


SOUND = file(tensor(), tensor("b", at=256), notes=(note("general.alignment", 4, struct.pack("<I", 64)),))
MANY = 2**63 - 1
ALIGNED = "general.alignment must be a power of two of 8 or more"
BAD: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("needs 4 bytes at byte 0, of 0", "again")),
    "another magic": (b"GGML" + SOUND[4:], ("does not begin as a GGUF file does",)),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", ("pointer of Git LFS",)),
    "version 1": (file(tensor(), version=1), ("GGUF version 1 is not read", "version 2 or 3")),
    "version 4": (file(tensor(), version=4), ("GGUF version 4 is not read",)),
    "big-endian": (file(tensor(), version=3 << 24), ("big-endian GGUF files are not read",)),
    "endless tensors": (file(counts=(MANY, 0)), ("its header needs", "again")),
    "endless notes": (file(counts=(0, MANY)), ("its header needs", "again")),
    "endless text": (file(notes=(struct.pack("<Q", MANY),)), ("its header needs", "again")),
    "endless list": (file(notes=(note("a", 9, struct.pack("<IQ", 4, MANY)),)), ("its header needs", "again")),
    "endless texts": (file(notes=(note("a", 9, struct.pack("<IQ", 8, MANY)),)), ("its header needs", "again")),
    "list of lists": (file(notes=(note("a", 9, struct.pack("<IQ", 9, 1)),)), ("list of type 9",)),
    "unknown value": (file(notes=(note("a", 99, b""),)), ("value of type 99",)),
    "key twice": (file(notes=(note("a", 0, b"1"), note("a", 0, b"2"))), ("says a twice",)),
    "not UTF-8": (file(tensor("\x00"), notes=(note("a", 8, text(b"\xff\xfe")),)), ("not UTF-8",)),
    "alignment 0": (file(notes=(note("general.alignment", 4, bytes(4)),)), (ALIGNED, "got 0")),
    "alignment 3": (file(notes=(note("general.alignment", 4, b"\3\0\0\0"),)), (ALIGNED, "got 3")),
    "alignment a fraction": (file(notes=(note("general.alignment", 6, struct.pack("<f", 32)),)), (ALIGNED, "got 32.0")),
    "alignment a text": (file(notes=(note("general.alignment", 8, text("32")),)), (ALIGNED,)),
    "tensor twice": (file(tensor(), tensor(at=256)), ("has a twice",)),
    "long name": (file(tensor("n" * 2000)), ("with a name of 2000 characters",)),
    "no dimensions": (file(tensor(dims=())), ("has 0 dimensions",)),
    "nine dimensions": (file(tensor(dims=(1,) * 9)), ("has 9 dimensions",)),
    "size 0": (file(tensor(dims=(32, 0))), ("has shape [0, 32]",)),
    "huge": (file(tensor(dims=(2**40, 2**40))), ("has shape",)),
    "rows of half blocks": (file(tensor(dims=(48, 2), kind=8)), ("rows of 48", "no whole blocks of Q8_0")),
    "offset between": (file(tensor(at=16)), ("begins at 16, no multiple of 32",)),
    "offset beyond": (file(tensor(at=1 << 40)), ("ends at byte", "truncated")),
    "overlap": (file(tensor(), tensor("b", at=128)), ("b and a overlap",)),
    "far too long": (file(tensor()) + bytes((1 << 20) + 64), ("belong to no tensor",)),
    "cut short": (file(tensor(dims=(4096, 4))), ("truncated",)),
    "cut in the header": (SOUND[:40], ("its header needs", "again")),
    **{f"type {name}": (file(tensor(kind=number)), (f"is {name}, which is not read", "Q4_K_M"))
       for name, number in (("Q2_K", 10), ("Q3_K", 11), ("IQ4_XS", 23), ("IQ2_XXS", 16), ("MXFP4", 39), ("I32", 26))},
    "type 77": (file(tensor(kind=77)), ("is of type 77, which is not read",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_header_is_refused(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_gguf_header(tmp_path / "m.gguf")
    line = str(caught.value)
    assert "\n" not in line and len(line) < 600 and "m.gguf" in line
    assert all(word in line for word in words), line


def test_sound_header_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(SOUND)
    found = read_gguf_header(tmp_path / "m.gguf")
    spans = {name: (entry.shape, entry.lo % 64, entry.num_bytes) for name, entry in found.tensors.items()}
    assert spans == {"a": ((2, 32), 0, 256), "b": ((2, 32), 0, 256)} and found.metadata == {"general.alignment": 64}


def test_a_folder_and_no_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(UserError, match="cannot read"):
            read_gguf_header(path)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "BF16"])
def test_headers_are_read_as_gguf_reads_them(kind: str, tmp_path: Path) -> None:
    written = write_gguf(MODELS["gemma3"](), tmp_path / "m.gguf", kind)
    found, wanted = read_gguf_header(written.path), gguf.GGUFReader(written.path)
    told = {name: (e.dtype, e.shape, e.lo, e.num_bytes) for name, e in found.tensors.items()}
    assert told == {
        one.name: (one.tensor_type.name, tuple(reversed(one.shape.tolist())), one.data_offset, one.n_bytes)
        for one in wanted.tensors
    }
    fields = wanted.fields.items()
    values: dict[str, Any] = {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}
    assert found.metadata == values


def test_random_damage_never_surprises(tmp_path: Path) -> None:
    path = write_gguf(MODELS["qwen3"](), tmp_path / "m.gguf", "Q8_0").path
    whole = path.read_bytes()
    first = min(entry.lo for entry in read_gguf_header(path).tensors.values())
    rng, num_refused = random.Random(1), 0
    for _ in range(300):
        path.write_bytes(damaged(whole[:first], rng) + whole[first:])
        try:
            found = read_gguf_header(path)
        except UserError:
            num_refused += 1
        else:
            size = path.stat().st_size
            assert all(0 < entry.lo < entry.hi <= size for entry in found.tensors.values())
    assert num_refused > 100
