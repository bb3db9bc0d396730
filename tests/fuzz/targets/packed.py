"""Models that `offload pack` has made, run and unpacked: their files are checkpoints and hold what unpacking needs."""

import json
import random
from pathlib import Path

import torch
from case import Target
from damage import BYTES, JSON, damaged_value, dumped, header, only, special
from model_files import ENOUGH, as_wanted, config_of, keep_wanted
from shell import Outcome, shell
from tiny import build, save, save_tokenizer

_KEYS = ("format", "version", "files", "source", "packed_bytes", "source_bytes", "x")
_NOTES = ("origin", "crc32", "source_header", "format", "version", "about", "x")


def _save(folder: Path, *others: str) -> None:
    save(build(config_of("llama")).to(torch.bfloat16), folder / "model", max_shard_size="50KB")
    save_tokenizer(folder / "model")
    packed = shell("pack", "-m", folder / "model", "--out", folder / "packed", "--quiet", *others)
    assert packed.code == 0, packed.err
    keep_wanted(folder, _generate(folder))


def _save_beside(folder: Path) -> None:
    _save(folder, "--beside", "int4")


def _note(path: Path, rng: random.Random) -> str:
    """One of the texts in the header that unpacking reads, itself JSON."""
    raw = path.read_bytes()
    try:
        size = int.from_bytes(raw[:8], "little")
        content, key = json.loads(raw[8 : 8 + size]), rng.choice(_NOTES)
        notes = content["__metadata__"]
        value, done = damaged_value(json.loads(notes[key]) if key in ("origin", "crc32") else notes.get(key, ""), rng)
        notes[key] = dumped(value, rng) if rng.random() < 0.9 else value
    except (ValueError, KeyError, TypeError, RecursionError):
        return header(path, rng)
    new = json.dumps(content).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])
    return f"{key}: {done}"


def _generate(folder: Path) -> Outcome:
    return shell("generate", "-m", folder / "packed", "-p", "Count: a", "-n", 3, "--greedy", *ENOUGH)


def _generate_or_tell(folder: Path) -> Outcome:
    """A run does not look at checksums: where it writes another text, `--verify` must tell why."""
    outcome = _generate(folder)
    return outcome if _verify(folder).code else as_wanted(folder, outcome)


def _verify(folder: Path) -> Outcome:
    return shell("pack", "--verify", "-m", folder / "packed", "--quiet")


def _unpack_whole(folder: Path) -> Outcome:
    """What is unpacked is the model, to the bit."""
    outcome = shell("unpack", "-m", folder / "packed", "--out", folder / "unpacked", "--quiet")
    for path in (folder / "model").iterdir() if outcome.code == 0 else ():
        assert (folder / "unpacked" / path.name).read_bytes() == path.read_bytes(), f"{path.name} is another"
    return outcome


_FILES = {
    "packed/*.safetensors": (_note, _note, header, special, *BYTES),
    "packed/offload_pack.json": (only(*_KEYS), *JSON),
    "packed/model.safetensors.index.json": JSON,
}
TARGETS = [
    Target("packed/generate", _save, _FILES, _generate_or_tell),
    Target("packed/verify", _save, _FILES, _verify),
    Target("packed/unpack", _save, _FILES, _unpack_whole, writes=("unpacked*", "unpacked*/*")),
    Target("beside/generate", _save_beside, _FILES, _generate_or_tell),
    Target("beside/unpack", _save_beside, _FILES, _unpack_whole, writes=("unpacked*", "unpacked*/*")),
]
