"""A model is taken for the same where its weights are the same to the last byte, and for another where anything is."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flipping import flip
from gguf_files import write_gguf
from quantised import RECIPES, save_quantised
from refusals import set_json
from safetensors.torch import load_file, save_file
from tiny import Pair
from transformers import LlamaConfig, LlamaForCausalLM

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.identity import PARTS, ModelIdentity, identity_of, proved, same_model
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import open_checkpoint, open_headers
from offload.cli.batch_file import ResultsFile
from offload.distributed.join import require_same_weights
from offload.engine import session
from offload.engine.identities import Identities
from offload.engine.session import check_session
from offload.errors import ReadError, UserError
from offload.planning.profile import Identity as ProfileIdentity
from offload.planning.profile import Machine, require_same_run
from offload.sampling_options import Sampling
from offload.streaming import summing
from offload.streaming.summing import BlockSum, with_sum


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = saved(0, tmp_path / "model")
    (target / "tokenizer.json").write_text('{"version": "1.0"}')
    (target / "tokenizer_config.json").write_text('{"chat_template": "a", "name_or_path": "x"}')
    (target / "generation_config.json").write_text('{"eos_token_id": 2}')
    return target


def saved(seed: int, folder: Path) -> Path:
    """In one file, with matrices that samples do not cover."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 131}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder)
    return folder


def copy_of(folder: Path) -> Path:
    return shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))


def identity(folder: Path) -> ModelIdentity:
    return identity_of(open_checkpoint(folder))


def summed(folder: Path) -> ModelIdentity:
    checkpoint = open_checkpoint(folder)
    return with_sum(checkpoint, identity_of(checkpoint))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "config": (lambda folder: set_json(folder / "config.json", rms_norm_eps=1e-4), "config differs"),
    "end": (lambda folder: set_json(folder / "generation_config.json", eos_token_id=3), "generation config differs"),
    "template": (lambda folder: set_json(folder / "tokenizer_config.json", chat_template="b"), "chat template differs"),
    "beside": (lambda folder: (folder / "chat_template.jinja").write_text("b"), "chat template differs"),
    "tokens": (lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.1"}'), "tokenizer differs"),
    "flag": (lambda folder: set_json(folder / "tokenizer_config.json", add_bos_token=True), "tokenizer differs"),
    "new words": (lambda folder: (folder / "added_tokens.json").write_text("{}"), "tokenizer differs"),
    "both": (
        lambda folder: set_json(folder / "tokenizer_config.json", chat_template="b", split=1),
        "tokenizer and chat template differ",
    ),
}


@pytest.mark.always
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_text_depends_on_beside_weights_is_named(change: str, folder: Path) -> None:
    other, (make, words) = copy_of(folder), CHANGES[change]
    make(other)
    assert same_model(summed(folder), summed(other)) == words


def test_names_of_places_and_other_files_are_no_difference(folder: Path) -> None:
    other = copy_of(folder)
    set_json(other / "config.json", _name_or_path="elsewhere", transformers_version="9")
    set_json(other / "tokenizer_config.json", name_or_path="elsewhere")
    set_json(other / "generation_config.json", temperature=0.5)  # part of a request
    (other / "README.md").write_text("words")
    assert same_model(summed(folder), summed(other)) == ""


@pytest.mark.parametrize("is_tuned", [False, True])
def test_another_model_of_the_same_shapes_is_told_at_start(is_tuned: bool, folder: Path, tmp_path: Path) -> None:
    """A fine-tune of one matrix, too."""
    other = copy_of(folder)
    tensors = load_file((folder if is_tuned else saved(1, tmp_path / "another")) / "model.safetensors")
    if is_tuned:
        tensors["model.layers.1.self_attn.q_proj.weight"] += 1e-3
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert same_model(identity(folder), identity(other)) == "weights differ"


def test_a_single_byte_is_told_by_samples_or_by_the_sum(folder: Path) -> None:
    """50 places at random: never taken for the same, before the sum is known or after."""
    mine, generator, num_unsampled = summed(folder), np.random.default_rng(0), 0
    spans = [(entry.lo, entry.hi) for entry in open_checkpoint(folder).tensors.values()]
    for turn in range(50):
        other = copy_of(folder)
        lo, hi = spans[turn % len(spans)]
        at, bit = int(generator.integers(lo, hi)), int(generator.integers(8))
        flip(other / "model.safetensors", at, bit, keeps_time=False)
        result = identity(other)
        num_unsampled += not mine.difference(result)
        assert same_model(mine, result) in ("weights differ", "nothing proves that the weights are the same")
        assert same_model(mine, summed(other)) == "weights differ"
        shutil.rmtree(other)
    assert num_unsampled, "some of these edits lie between the samples: else nothing is tried of the sum"


def test_a_copy_is_the_same_once_all_is_read_and_the_next_time_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy_of(folder)
    theirs, mine = summed(folder), identity(other)
    assert same_model(theirs, mine) == "nothing proves that the weights are the same"
    assert same_model(identity(folder), identity(folder)) == "", "these files are untouched"
    identities = Identities(ModelFiles(open_checkpoint(other), None))
    assert identities.difference(theirs) == "" and identities.target.has_sum
    monkeypatch.setattr(summing, "read_left", None)
    assert identity(other).has_sum and Identities(ModelFiles(open_checkpoint(other), None)).difference(theirs) == ""
    path = other / "model.safetensors"
    path.touch()
    assert not identity(other).has_sum, "what is kept is of the files as they were"


def test_what_was_never_summed_is_no_copy(folder: Path) -> None:
    saved = identity(folder)
    mine = Identities(ModelFiles(open_checkpoint(copy_of(folder)), None))
    assert mine.difference(saved) == "nothing proves that the weights are the same"


@pytest.mark.parametrize(
    ("saved", "mine", "is_same"),
    [
        ({"files": "a"}, {"files": "a"}, True),
        ({"files": "a"}, {"files": "b"}, None),
        ({"files": "a", "xxh3": "1"}, {"files": "a", "xxh3": "2"}, False),
        ({"files": "a", "xxh3": "1"}, {"files": "b", "xxh3": "1"}, True),
        ({"files": "a", "hub": "1"}, {"files": "b", "hub": "2"}, False),
        ({"files": "a", "hub": "1"}, {"files": "b", "xxh3": "1"}, None),
        ({"files": "a", "hub": "1"}, {"files": "b", "hub": "1"}, True),
        ({"files": "a", "hub": "1", "xxh3": "1"}, {"files": "b", "hub": "1"}, None),
        ({"files": "a", "sum": "1"}, {"files": "b", "xxh3": "2"}, None),
    ],
)
def test_proofs_agree_contradict_or_say_nothing(saved: Any, mine: Any, is_same: bool | None) -> None:
    assert proved(saved, mine) is is_same is proved(mine, saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_has_gone_or_changed_is_one_line(name: str, folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / name).touch()
    with pytest.raises(ReadError, match=f"{name} changed since the model was opened: load the model again"):
        identity_of(checkpoint)
    (folder / name).unlink()
    with pytest.raises(ReadError, match=rf"reading .*{name} failed: No such file"):
        identity_of(checkpoint)


@pytest.mark.parametrize("saved", [None, 5, [], {}, {"weights": "a"}, {"proofs": {}}, {**dict.fromkeys(PARTS, "a")}])
def test_what_is_no_identity_is_none(saved: Any) -> None:
    assert ModelIdentity.parse(saved) is None
    assert ModelIdentity.parse({**dict.fromkeys(PARTS, "a"), "proofs": {"xxh3": 5}}) is None
    good = ModelIdentity(dict.fromkeys(PARTS, "a"), {"xxh3": "b"})
    assert ModelIdentity.parse(json.loads(json.dumps(good.as_dict()))) == good


# The sum of all bytes


def bytes_of(checkpoint: Checkpoint) -> np.ndarray:
    (path,) = checkpoint.shards
    return np.fromfile(path, np.uint8)


def sum_of(checkpoint: Checkpoint, content: np.ndarray, cuts: list[tuple[int, int]]) -> str | None:
    total = BlockSum(checkpoint)
    for lo, hi in cuts:
        total.look(0, lo, content[lo:hi])
    return total.result


def cut(size: int, step: int) -> list[tuple[int, int]]:
    return [(lo, min(size, lo + step)) for lo in range(0, size, step)]


def test_the_sum_does_not_depend_on_how_it_was_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    content, generator = bytes_of(checkpoint), np.random.default_rng(1)
    whole = sum_of(checkpoint, content, [(0, len(content))])
    assert whole is not None and len(content) % BLOCK_BYTES, "its end is no whole block"
    for step in (BLOCK_BYTES, 5 * BLOCK_BYTES, 300 * BLOCK_BYTES):
        parts = cut(len(content), step)
        generator.shuffle(parts)
        pieces = [(int(lo), int(hi)) for lo, hi in [*parts, *parts[:3]]]  # some are read twice
        assert sum_of(checkpoint, content, pieces) == whole
        assert sum_of(checkpoint, content, pieces[3:-3]) is None, "some are missing"
    total = BlockSum(checkpoint)
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda span: total.look(0, span[0], content[span[0] : span[1]]), cut(len(content), BLOCK_BYTES) * 2)]
    assert total.result == whole


Rows = np.ndarray  # bytes of a matrix, (rows, bytes a row)
Edit = Callable[[Rows, int, np.random.Generator], None]


def _negate_column(rows: Rows, item_bytes: int, draws: np.random.Generator) -> None:
    """As a tool folds a sign into weights: the top bit of a column's numbers, an even number of them."""
    at = int(draws.integers(rows.shape[1] // item_bytes)) * item_bytes + item_bytes - 1
    rows[: len(rows) // 2 * 2, at] ^= 0x80


def _scale_column(rows: Rows, item_bytes: int, draws: np.random.Generator) -> None:
    at = int(draws.integers(rows.shape[1] // item_bytes)) * item_bytes + item_bytes - 1
    rows[:, at] += 1


def _exchange_rows(rows: Rows, item_bytes: int, draws: np.random.Generator) -> None:
    first, second = draws.choice(len(rows), 2, replace=False)
    rows[[first, second]] = rows[[second, first]]


def _exchange_columns(rows: Rows, item_bytes: int, draws: np.random.Generator) -> None:
    first, second = draws.choice(rows.shape[1], 2, replace=False)
    rows[:, [first, second]] = rows[:, [second, first]]


def _flip_pair(rows: Rows, item_bytes: int, draws: np.random.Generator) -> None:
    """The top bits of two words, a whole number of sectors apart where the matrix is so large."""
    raw = rows.reshape(-1)
    first = int(draws.integers(len(raw) // 8)) * 8 + 7
    apart = BLOCK_BYTES * int(draws.integers(1, 9))
    second = (first + (apart if apart < len(raw) // 2 else 8)) % len(raw)
    raw[[first, second]] ^= 0x80


EDITS: tuple[Edit, ...] = (_negate_column, _scale_column, _exchange_rows, _exchange_columns, _flip_pair)
FORMATS = ("float32", "bfloat16", "gguf", *(name for name in RECIPES if name != "mxfp4"))[:10]


def _stored(name: str, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 131}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    plain = tmp_path / "plain"
    if name == "gguf":
        config.save_pretrained(plain)
        return write_gguf(config, plain / "model.gguf", "Q8_0").path.parent
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    LlamaForCausalLM(config).to(dtype).save_pretrained(plain)
    if name in RECIPES:
        return save_quantised(plain, name, tmp_path / name, max_shard_size="1GB").directory
    return plain


@pytest.fixture
def edited(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Checkpoint, Iterator[np.ndarray]]:
    """A stored model, and twenty others that an edit makes of it, to some of which sums of columns are blind."""
    name = request.param
    checkpoint = open_headers(_stored(name, tmp_path))
    (path,) = checkpoint.shards
    return checkpoint, _edits(checkpoint, np.fromfile(path, np.uint8), 4 if name == "float32" else 2)


def _edits(checkpoint: Checkpoint, content: np.ndarray, item_bytes: int) -> Iterator[np.ndarray]:
    draws = np.random.default_rng(51)
    large = sorted(
        {(entry.lo, entry.hi, len(entry.shape) and entry.shape[0]) for _, entry in checkpoint.stored_entries}
    )
    large = [(lo, hi, num_rows) for lo, hi, num_rows in large if hi - lo >= 4 * BLOCK_BYTES and num_rows > 1]
    for turn in range(18):
        lo, hi, num_rows = large[int(draws.integers(len(large)))]
        other = content.copy()
        num_rows = num_rows if (hi - lo) % num_rows == 0 else 1
        EDITS[turn % len(EDITS)](other[lo:hi].reshape(num_rows, -1), item_bytes, draws)
        assert (other != content).any()
        yield other
    (first_lo, first_hi), (second_lo, second_hi) = _twins(checkpoint)
    moved = content.copy()
    moved[first_lo:first_hi], moved[second_lo:second_hi] = content[second_lo:second_hi], content[first_lo:first_hi]
    yield moved
    lo = -(-large[0][0] // BLOCK_BYTES) * BLOCK_BYTES
    turned = content.copy()
    turned[lo : lo + 2 * BLOCK_BYTES] = np.roll(content[lo : lo + 2 * BLOCK_BYTES], BLOCK_BYTES)
    yield turned


def _twins(checkpoint: Checkpoint) -> list[tuple[int, int]]:
    """Where the largest matrices of both layers lie that have one name."""
    by_name = {name: (entry.lo, entry.hi) for name, entry in checkpoint.stored_entries if entry.num_bytes > 256}
    name = next(key for key in sorted(by_name) if re.search(r"(layers|blk)\.0\..*(q_proj|attn_q)", key))
    return [by_name[name], by_name[re.sub(r"\.0\.", ".1.", name, count=1)]]


@pytest.mark.parametrize("edited", FORMATS, indirect=True)
def test_no_structure_of_an_edit_hides_it(edited: tuple[Checkpoint, Iterator[np.ndarray]]) -> None:
    checkpoint, others = edited
    content = np.fromfile(checkpoint.shards[0], np.uint8)
    sums = [sum_of(checkpoint, raw, [(0, len(raw))]) for raw in (content, *others)]
    assert len(set(sums)) == 21 and None not in sums


def _doors(saved: ModelIdentity, session: Path) -> dict[str, Callable[[Checkpoint], object]]:
    """Return the doors that continue another run's results, session, weights or profile, or raises `UserError`."""
    machine = Machine(cpu="a", num_cores=1, torch="2", dtype="float32", device="cpu")

    def results(checkpoint: Checkpoint) -> None:
        kept = ResultsFile("o.jsonl", print)
        parsed = ModelIdentity.parse(json.loads(json.dumps(saved.as_dict())))
        assert parsed is not None
        kept.models = {1: parsed}
        kept.require(Identities(ModelFiles(checkpoint, None)).difference)

    def gone_on_with(checkpoint: Checkpoint) -> None:
        identities = Identities(ModelFiles(checkpoint, None), dtype="float32")
        check_session(session, identities, SimpleNamespace(context=99))  # type: ignore[arg-type]

    def ranks(checkpoint: Checkpoint) -> None:
        mine = identity_of(checkpoint)
        require_same_weights([saved.proofs, mine.proofs], is_final=False)
        if not proved(saved.proofs, mine.proofs):
            require_same_weights([saved.proofs, with_sum(checkpoint, mine).proofs], is_final=True)

    def profile(checkpoint: Checkpoint) -> None:
        greedy = Sampling()
        mine = replace(
            ProfileIdentity.from_models(checkpoint, checkpoint, greedy, "match", machine),
            proofs=dict.fromkeys(("target", "draft"), with_sum(checkpoint, identity_of(checkpoint)).proofs),
        )
        made = replace(mine, target=saved.digest, draft=saved.digest, proofs=dict.fromkeys(mine.proofs, saved.proofs))
        require_same_run(SimpleNamespace(identity=made), mine, Path("p.json"))  # type: ignore[arg-type]

    return {"results": results, "session": gone_on_with, "ranks": ranks, "profile": profile}


@pytest.mark.parametrize("edited", FORMATS, indirect=True)
def test_no_edit_passes_a_door(edited: tuple[Checkpoint, Iterator[np.ndarray]], tmp_path: Path) -> None:
    """In place and with the old times, as archives have them: twenty of each of ten formats."""
    checkpoint, others = edited
    (path,), folder = checkpoint.shards, checkpoint.directory
    before = path.stat()
    saved = with_sum(checkpoint, identity_of(checkpoint))
    notes = {"target": json.dumps(saved.as_dict()), "target_dtype": "float32", "draft": "", "draft_dtype": ""}
    notes |= {"format": session._FORMAT, "messages": "null", "num_turns": "0"}
    session.write_tensors(tmp_path / "kept", notes, {"tokens": torch.arange(4)})
    doors = _doors(saved, tmp_path / "kept")
    for open_door in doors.values():
        open_door(open_headers(folder))
    accepted = []
    for number, other in enumerate(others):
        with path.open("r+b") as file:
            file.write(other.tobytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        now = path.stat()
        assert (now.st_ino, now.st_size, now.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
        for name, open_door in doors.items():
            with suppress(UserError):
                open_door(open_headers(folder))
                accepted.append((name, number))
    assert number == 19 and not accepted


def test_equal_times_of_an_archive_do_not_hide_another_model(folder: Path) -> None:
    """Reproducible archives have one time for all, and the file system may give a freed inode again."""
    mine, path = summed(folder), folder / "model.safetensors"
    lo = max((entry for entry in open_checkpoint(folder).tensors.values()), key=lambda entry: entry.num_bytes).lo
    flip(path, lo + 3001)
    assert (
        path.stat().st_mtime_ns and same_model(mine, identity(folder)) == "nothing proves that the weights are the same"
    )
    assert same_model(mine, summed(folder)) == "weights differ"


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_name_that_the_hub_gave_proves_nothing_of_what_was_written_since(is_summed: bool, folder: Path) -> None:
    blob = folder.parent / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    shutil.move(folder / "model.safetensors", blob)
    (folder / "model.safetensors").symlink_to(blob)
    mine = summed(folder) if is_summed else identity(folder)
    assert "hub" in mine.proofs
    time.sleep(2.1)
    flip(
        blob,
        3000 + max((entry for entry in open_checkpoint(folder).tensors.values()), key=lambda entry: entry.num_bytes).lo,
    )
    assert same_model(mine, identity(folder)) == "nothing proves that the weights are the same"


def test_weights_are_summed_as_they_are_read(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one more read of the files, and to the same sum as by reading them."""
    from offload.engine import identities
    from offload.engine.load import open_decoder
    from offload.engine.request import Request
    from offload.planning.load_options import LoadOptions

    wanted = [summed(folder).proofs["xxh3"] for folder in pair]
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(identities, "_LITTLE_BYTES", 0)
    monkeypatch.setattr(summing, "read_left", None)
    options = LoadOptions(*pair, ram="1GiB", tree="4x2", dtype="float32", context=64, threads=1)
    with open_decoder(options, Request(is_named=True)) as decoder:
        decoder.generate([5, 6], max_new_tokens=1)
        results = [decoder.identities.for_part(part) for part in ("target", "draft")]
    assert [identity and identity.proofs.get("xxh3") for identity in results] == wanted
    with open_decoder(options) as decoder:
        assert decoder.identities.target.has_sum, "it is kept"
