"""Headers of weight files: lengths, entries, offsets, names. Whatever is wrong there is refused in one line.

Invariant: random damage leads to a refusal or to a load that is consistent, never to a traceback.
"""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import model_shape
from refusals import Break, assert_refused, case, cut_file, damaged, header, join, refuse_folder, split
from shell import process

from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.safetensors import check_extents
from offload.checkpoint.tensors import TensorEntry
from offload.errors import UserError

pytestmark = pytest.mark.usefixtures("_instant_link")


NORM, UP, LAST = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.3.mlp.gate_proj.weight"


def entry(name: str, **changes: object) -> Break:
    return header(lambda content: content[name].update(changes))


def moved(name: str, *, lo: int = 0, hi: int = 0) -> Break:
    def move(content: dict[str, Any]) -> None:
        offsets = content[name]["data_offsets"]
        content[name]["data_offsets"] = [offsets[0] + lo, offsets[1] + hi]

    return header(move)


def rewritten(change: Callable[[bytes], bytes]) -> Break:
    def write(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return write


def whole_file(content: bytes) -> Break:
    return rewritten(lambda _: content)


def raw_header(text: bytes) -> Break:
    return whole_file(join(text, b"\0" * 256))


def header_length(num_bytes: int) -> Break:
    return rewritten(lambda raw: num_bytes.to_bytes(8, "little") + raw[8:])


def renamed(name: str, other: str) -> Break:
    return header(lambda content: content.update({other: content.pop(name)}))


def recoded(encoding: str) -> Break:
    """The header in another encoding than UTF-8, which Python's JSON would read all the same."""

    def change(raw: bytes) -> bytes:
        content, data = split(raw)
        return join(json.dumps(content).encode(encoding), data)

    return rewritten(change)


def with_room(*, before: int = 0, between: int = 0, behind: int = 0) -> Break:
    """Bytes that are no tensor's: where another file could be hidden."""

    def make(raw: bytes) -> bytes:
        content, data = split(raw)
        tensors = [entry for name, entry in content.items() if name != "__metadata__"]
        last = max(tensors, key=lambda entry: entry["data_offsets"])
        cut = last["data_offsets"][0]
        for entry in tensors:
            entry["data_offsets"] = [at + before + (between if entry is last else 0) for at in entry["data_offsets"]]
        whole = bytes(before) + data[:cut] + bytes(between) + data[cut:] + bytes(behind)
        return join(json.dumps(content).encode(), whole)

    return rewritten(make)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
MALFORMED = ("malformed header entry", "again")
TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
HEADERS = [
    case("truncated", cut_file(-10), "model.safetensors", "truncated", "again"),
    case("truncated in the header", cut_file(100), "header of", "in a file of 100", "again"),
    case("truncated in the length", cut_file(5), "in a file of 5", "again"),
    case("a pointer", whole_file(LFS_POINTER), "a pointer of Git LFS", "run git lfs pull"),
    case("empty", cut_file(0), "in a file of 0", "again"),
    case("header longer than the file", header_length(1 << 30), "header of 1073741824 bytes", "again"),
    case("header of the greatest length", header_length(2**64 - 1), "header of", "again"),
    case("header of no length", header_length(0), "not valid JSON", "again"),
    case("header not JSON", raw_header(b"<html>"), "not valid JSON", "again"),
    case("header not UTF-8", raw_header(b'{"\xff": 1}'), "not valid JSON", "again"),
    case("header a list", raw_header(b"[]"), "list, not an object", "again"),
    case("header nested too deep", raw_header(b'{"a":' * 100_000), "not valid JSON", "again"),
    case("header with endless digits", raw_header(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON", "again"),
    case("header empty", whole_file(join(b"{}", b"")), "no tensors for layer 0"),
    case("header alone", raw_header(b"{}"), "bytes 10 to 266 belong to no tensor", "again"),
    case("header in UTF-16", recoded("utf-16-le"), "not valid JSON", "again"),
    case("header in UTF-32", recoded("utf-32"), "not valid JSON", "again"),
    case("header behind a mark", recoded("utf-8-sig"), "not valid JSON", "again"),
    case("notes of numbers", header(lambda content: content.update(__metadata__={"a": 1})), "must be texts by name"),
    case("notes a list", header(lambda content: content.update(__metadata__=["pt"])), "must be texts by name", "again"),
    case("room before the tensors", with_room(before=64), "belong to no tensor", "again"),
    case("room between two tensors", with_room(between=8), "belong to no tensor", "again"),
    case("room behind the tensors", with_room(behind=64), "belong to no tensor", "again"),
    case("name twice", raw_header(TWICE), "occurs twice", "again"),
    case("key twice", raw_header(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'), "twice"),
    case("entry a number", header(lambda content: content.update({NORM: 7})), *MALFORMED),
    case("entry without a type", header(lambda content: content[NORM].pop("dtype")), *MALFORMED),
    case("type a number", entry(NORM, dtype=32), *MALFORMED),
    case("negative shape", entry(NORM, shape=[-64]), *MALFORMED),
    case("boolean shape", entry(NORM, shape=[True, 64]), *MALFORMED),
    case("fractional shape", entry(NORM, shape=[64.0]), *MALFORMED),
    case("huge shape", entry(NORM, shape=[2**62, 2**62]), "model.norm.weight", "again"),
    case("endless shape", entry(NORM, shape=[10**4000, 10**4000]), "model.norm.weight", "again"),
    case("shape of a thousand dimensions", entry(NORM, shape=[2**60] * 1000), "model.norm.weight", "again"),
    case("shape a text", entry(NORM, shape="64"), *MALFORMED),
    case("shape an object", entry(NORM, shape={}), *MALFORMED),
    case("one offset", entry(NORM, data_offsets=[0]), *MALFORMED),
    case("offsets reversed", entry(NORM, data_offsets=[256, 0]), *MALFORMED),
    case("negative offset", entry(NORM, data_offsets=[-256, 0]), *MALFORMED),
    case("endless offset", entry(NORM, data_offsets=[0, 9 * 10**4299]), "model.norm.weight", "again"),
    case("offsets too narrow", moved(NORM, hi=-4), "of shape [64] and F32 needs 256 bytes, has 252"),
    case("offsets beyond the end", moved(NORM, lo=1 << 40, hi=1 << 40), "ends at byte", "truncated"),
    case(
        "offsets overlap",
        header(lambda c: c[UP].update(data_offsets=c[LAST]["data_offsets"])),
        UP,
        LAST,
        "overlap",
        "again",
    ),
    case("tensor missing", renamed(UP, "spare"), f"tensor {UP} is missing"),
    case("norm missing", renamed(NORM, "spare"), f"tensor {NORM} is missing"),
    case("tensor of wrong shape", entry(UP, shape=[64, 96]), UP, "must have shape [96, 64]", "[64, 96]"),
    case("endless name", renamed(UP, "layers." * 30_000), "layers.layers.", "name of 210000 characters", "again"),
    case("scalar", entry(UP, shape=[64 * 96]), UP, "must have shape [96, 64]", "[6144]"),
    case("type of 8 bits", entry(UP, dtype="F8_E4M3"), f"{UP} of shape [96, 64]", "needs 6144 bytes, has 24576"),
    case("unknown type", entry(UP, dtype="\x1b[2J\nX"), UP, "bf16, fp16, fp32 or quantised"),
]


SCALARS = [
    ("self_attn.indexer.wk.weight", {}),
    ("self_attn.output_gate.weight", {"model_type": "minimax"}),
    ("mlp.experts.down_proj", {"model_type": "mixtral", "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("name", "changes"), SCALARS)
def test_a_scalar_where_models_have_matrices_does_not_surprise(
    name: str, changes: dict[str, object], broken_file: Path
) -> None:
    checkpoint = open_checkpoint(broken_file)
    entries = {f"model.layers.0.{name}": TensorEntry(0, "F32", (), 0, 4)}
    odd = replace(checkpoint, config={**checkpoint.config, **changes}, tensors={**checkpoint.tensors, **entries})
    assert model_shape(odd).experts is None


@pytest.mark.parametrize(("breaks", "words", "by_plan"), HEADERS)
def test_header_is_refused(breaks: Break, words: tuple[str, ...], by_plan: bool, broken_file: Path) -> None:
    refuse_folder(broken_file, breaks, words, by_plan=by_plan)


@pytest.mark.full
def test_a_million_tensors_are_refused(broken_file: Path) -> None:
    text = ",".join(f'"x{index}":{{}}' for index in range(1 << 20))
    breaks = whole_file(join(f"{{{text}}}".encode(), b""))
    refuse_folder(broken_file, breaks, ("at most 524288 tensors, got 1048", "take another"))


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(8, 16), (16, 16), (16, 24)], None),
        ([(8, 16), (12, 20)], "b and a overlap"),
        ([(16, 24), (8, 24)], "a and b overlap"),
        ([(8, 16), (16, 25)], "b ends at byte 25, the file at 24"),
    ],
)
def test_tensors_lie_beside_one_another_and_inside(spans: list[tuple[int, int]], words: str | None) -> None:
    entries = {name: TensorEntry(0, "U8", (hi - lo,), lo, hi) for name, (lo, hi) in zip("abc", spans, strict=False)}
    with nullcontext() if words is None else pytest.raises(UserError, match=words):
        check_extents(Path("model.safetensors"), entries, 24)


def test_refusal_in_a_process_of_its_own(broken_file: Path) -> None:
    cut_file(-10)(broken_file)
    assert_refused(process("plan", "-m", broken_file), "truncated", "download the checkpoint again")


def test_random_damage_to_a_header_never_surprises(broken_file: Path) -> None:
    path, rng, num_refused = broken_file / "model.safetensors", random.Random(1), 0
    shard = path.read_bytes()
    data_lo = 8 + int.from_bytes(shard[:8], "little")
    for number in range(400):
        text = damaged(shard[8:data_lo], rng)
        claimed_bytes = len(text) + rng.choice((0, 0, 0, -1, 1, 1 << 40))
        path.write_bytes(claimed_bytes.to_bytes(8, "little") + text + shard[data_lo:])
        try:
            checkpoint = open_checkpoint(broken_file)
            model_shape(checkpoint)
        except UserError as error:
            assert len(str(error)) < 600, number
            num_refused += 1
        else:
            file_bytes = path.stat().st_size
            assert all(data_lo - 64 < e.lo <= e.hi <= file_bytes for e in checkpoint.tensors.values()), number
    assert 200 < num_refused < 400
