"""GGUF files as checkpoints: Hugging Face's tensor names, bytes as stored, and a config.

A GGUF file describes its model in llama.cpp's terms. The original model's own config is better: the
user may name one, or a config.json may lie in the file's folder. It is checked against the file.
Without it, the config is derived from the file. Invariant: every tensor of a file has one known
meaning, or the file is refused.
"""

import math
import os
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.download import folder_of
from offload.checkpoint.files import open_regular, read_part, readable, stamp_of
from offload.checkpoint.gguf_config import (
    GIVE_CONFIG,
    config_of,
    require_factors,
    require_same,
    require_stated,
    stated_config,
)
from offload.checkpoint.gguf_header import Metadata, gguf_parts, read_gguf_header
from offload.checkpoint.gguf_names import tensors_of
from offload.checkpoint.safetensors import FileHeader, damaged
from offload.checkpoint.small_files import has_tokenizer, of_text, read_config
from offload.checkpoint.tensors import Entries, TensorEntry
from offload.encoding.base import Settings
from offload.errors import UserError, installing
from offload.families.gguf import ARCHITECTURES, FACTORS

_KNOWN = f"those of {', '.join(ARCHITECTURES)} are: take this model in safetensors"


def require_reader(file: Path) -> None:
    """Raise `UserError` if the package that reads tokenizers of GGUF files is not installed."""
    if find_spec("gguf") is None:
        complaint = f"the tokenizer in {file.name} is read by the package gguf, which is missing"
        raise UserError(f"{complaint}: {installing('gguf')}, or {GIVE_CONFIG}")


def open_gguf(file: Path, config: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Read the headers of a GGUF file, or of all parts of a split one.

    `config` is folder or hub id of the original model. Raises `UserError` for contradictions.
    """
    files = gguf_parts(file)
    for path in files:
        if not os.path.isfile(path):
            complaint = f"{path.name} is missing beside {file.name}"
            raise UserError(f"{complaint}: download all parts into one folder")
    headers = [read_gguf_header(path, index) for index, path in enumerate(files)]
    metadata, stored = _joined(files, headers)
    where = files[0].name
    kind = metadata.get("general.architecture")
    content = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind not in ARCHITECTURES or content != "model":
        complaint = f"{content!s:.40} of architecture {kind!s:.40}"
        raise UserError(f"{where}: a GGUF {complaint} is not read; {_KNOWN}")
    factors = _factors(files, stored.get(FACTORS) if kind == "llama" else None)
    folder = file.parent if os.path.isfile(file.parent / "config.json") else None
    folder = folder if config is None else folder_of(config, with_weights=False)
    config_stamp = None if folder is None else stamp_of(folder / "config.json")
    if folder is not None:
        settings = _checked_config(where, folder, metadata, factors)
    elif ARCHITECTURES[kind].keys is None:
        complaint = f"{where}: a file of architecture {kind} does not say all of its model"
        raise UserError(f"{complaint}: {GIVE_CONFIG}")
    else:
        shapes = {name: entry.shape for name, entry in stored.items()}
        settings = config_of(where, metadata, shapes, factors)
    text_config = of_text(settings)
    tensors = tensors_of(where, kind, stored, stated_config(where, metadata), text_config)
    _require_biases(where, settings, text_config, tensors)
    texts = folder if folder is not None and has_tokenizer(folder) else file.parent
    has_own = metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")
    return Checkpoint(
        directory=files[0],
        config=settings,
        shards=files,
        tensors=tensors,
        stamps=tuple(header.stamp for header in headers),
        small_folder=folder or file.parent,
        tokenizer=files[0] if has_own and not has_tokenizer(texts) else texts,
        config_stamp=config_stamp,
    )


def _joined(
    files: Sequence[Path], headers: Sequence[FileHeader]
) -> tuple[Metadata, dict[str, TensorEntry]]:
    """Return the metadata of the first part and the tensors of all parts."""
    first = headers[0].metadata
    stored = dict[str, TensorEntry]()
    for index, (path, header) in enumerate(zip(files, headers, strict=True)):
        part = (header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1)
        if part != (index, len(files)):
            says = f"{path.name} says it is part {part[0]!s:.20} (from 0) of {part[1]!s:.20}"
            raise UserError(f"{says}: give parts the names that they were made with")
        twice = next(iter(header.tensors.keys() & stored.keys()), None)
        if twice is not None:
            raise damaged(f"{path.name}: {twice} is in another part as well")
        stored |= header.tensors
    wanted = first.get("split.tensors.count", len(stored))
    if len(files) > 1 and wanted != len(stored):
        raise damaged(f"{files[0].name}: all parts have {len(stored)} tensors, of {wanted!s:.20}")
    return first, stored


def _checked_config(
    where: str, folder: Path, metadata: Metadata, factors: Sequence[float]
) -> dict[str, Any]:
    """Return the config in `folder`, checked against the file. Raises `UserError`."""
    source = folder / "config.json"
    settings = read_config(source)
    stated = stated_config(where, metadata)
    kind = metadata["general.architecture"]
    named = settings.get("model_type", "none")
    if named not in ARCHITECTURES[kind].model_types:
        complaint = f"{where} is of architecture {kind}, {source} of {named}"
        raise UserError(f"{complaint}: give `config` of its own model")
    text_config = of_text(settings)
    require_same(where, text_config, stated, str(source))
    require_stated(where, text_config, metadata, str(source))
    if factors:
        require_factors(where, text_config, factors, stated)
    return {key: value for key, value in settings.items() if key != "quantization_config"}


def _factors(files: Sequence[Path], entry: TensorEntry | None) -> tuple[float, ...]:
    """Return the divisors in `rope_freqs.weight`, empty without that tensor. Raises `UserError`."""
    if entry is None:
        return ()
    where = files[entry.shard].name
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.shape[0] > 4096:
        raise damaged(f"{where}: {FACTORS} is {entry.dtype} of shape {list(entry.shape)}")
    path = files[entry.shard]
    with readable(path), open_regular(path) as file:
        raw = read_part(file.fileno(), entry.lo, entry.hi)
    factors = struct.unpack(f"<{entry.shape[0]}f", raw)
    if not all(0 < factor < math.inf for factor in factors):
        raise damaged(f"{where}: {FACTORS} must be finite and above 0")
    return factors


def _require_biases(where: str, config: Settings, text_config: Settings, tensors: Entries) -> None:
    """Raise `UserError` for biases in the file that a model of this config would ignore."""
    wanted = "qkvo" if text_config.get("attention_bias") else ""
    wanted = "qkv" if config.get("model_type") == "qwen2" else wanted
    end = "_proj.bias"
    biased = {name.rpartition(end)[0][-1:] for name in tensors if name.endswith(end)}
    if extra := biased - set(wanted):
        complaint = f"{where} has biases of {min(extra)}_proj, which its config has not"
        raise UserError(f"{complaint}: give `config` of its own model")
