"""`offload verify`: a model is sound, damaged or cannot be judged; what it compares with is a stranger's, too.

Weights are damaged apart from the checksums: where these are whole, a model that is called sound has all its bits.
"""

import hashlib
import json
import time
from pathlib import Path

from case import Target
from damage import BYTES, JSON, cut, data, flip, front, header, integer, only, piece, special, text
from gguf_files import MODELS, write_gguf
from model_files import save_files
from shell import Outcome, shell

_KEYS = ("format", "version", "crc32", "files", "x")
_LATER_S = 1e6  # what was written to after the download is not judged
_SUMS = ("offload_sums.json", "*.sums.json")  # written again where a file was written to, with the same bytes


def _save_noted(folder: Path) -> None:
    """With a manifest of an earlier time, and the notes that the hub's library leaves beside a download."""
    save_files(folder / "model", shards=True)
    notes = folder / "model/.cache/huggingface/download"
    notes.mkdir(parents=True)
    for path in filter(Path.is_file, (folder / "model").iterdir()):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        (notes / f"{path.name}.metadata").write_text(f"{'0' * 40}\n{sha256}\n{time.time() + _LATER_S}\n")
    _keep_sound(folder, "model")


def _save_gguf(folder: Path) -> None:
    config = MODELS["llama"]()
    config.num_hidden_layers = 1
    write_gguf(config, folder / "m.gguf", "Q8_0")
    _keep_sound(folder, "m.gguf")


def _keep_sound(folder: Path, model: str, *others: object) -> None:
    outcome = shell("verify", folder / model, "--write", *others)
    assert outcome.code == 0, outcome.err
    (folder / "wanted.json").write_text(json.dumps(_bits(folder)))


def _bits(folder: Path) -> dict[str, str]:
    weights = sorted([*folder.glob("model/*.safetensors"), *folder.glob("*.gguf")])
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}


def _verify(folder: Path) -> Outcome:
    return shell("verify", folder / ("model" if (folder / "model").exists() else "m.gguf"), "--write")


def _save_compared(folder: Path) -> None:
    """With a manifest in a place of its own, and nothing beside the model."""
    save_files(folder / "model", shards=True)
    _keep_sound(folder, "model", "--manifest", folder / "sums.json")


def _compare(folder: Path) -> Outcome:
    """With a manifest that is named; of whole weights and a manifest that holds for them nothing is damaged."""
    return shell("verify", folder / "model", "--manifest", folder / "sums.json")


def _verify_bits(folder: Path) -> Outcome:
    outcome = _verify(folder)
    assert outcome.code != 0 or _bits(folder) == json.loads((folder / "wanted.json").read_text()), "called sound"
    return outcome


_SAFETENSORS = {"model/*.safetensors": (header, data, data, special, *BYTES)}
_GGUF = {"m.gguf": (front(2048, integer), front(10_000, flip), front(10_000, piece), cut, special, *BYTES)}
_NOTES = {
    "model/offload_sums.json": (only(*_KEYS), *JSON),
    "model/.cache/huggingface/download/*": (text, special, *BYTES),
    "model/model.safetensors.index.json": JSON,
}
TARGETS = [
    Target("verify/weights", _save_noted, _SAFETENSORS, _verify_bits, writes=_SUMS),
    Target("verify/notes", _save_noted, _NOTES, _verify, writes=_SUMS),
    Target(
        "verify/reads-only", _save_noted, {**_SAFETENSORS, **_NOTES}, lambda folder: shell("verify", folder / "model")
    ),
    Target("verify/manifest", _save_compared, {"sums.json": (only(*_KEYS), text, special, *JSON)}, _compare),
    Target("verify/gguf", _save_gguf, _GGUF, _verify_bits, writes=_SUMS),
    Target("verify/gguf-sums", _save_gguf, {"m.gguf.sums.json": (only(*_KEYS), *JSON)}, _verify, writes=_SUMS),
]
