"""A model's headers, wherever it is: in a folder, in a GGUF file or on the hub.

No weights are read, and the shards of the resulting `Checkpoint` need not exist: code that reads
them asks `is_here` first.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from offload.checkpoint.download import in_cache, is_hub_id, not_on_the_hub
from offload.checkpoint.files import gguf_file
from offload.checkpoint.gguf import open_gguf
from offload.checkpoint.safetensors import (
    Checkpoint,
    check_shard_names,
    checked_entry,
    has_weights,
    open_checkpoint,
    weights_of,
)
from offload.checkpoint.small_files import read_config
from offload.errors import UserError, require

ReadHeaders = Callable[..., Checkpoint]  # takes a model and what its GGUF file was made from


def is_from_hub(model: str | os.PathLike[str]) -> bool:
    """Return whether this could name a model on the hub, and names nothing here."""
    return not os.path.exists(os.path.expanduser(model)) and is_hub_id(str(model))


def config_alone(model: str | os.PathLike[str]) -> Path | None:
    """Return a config.json that was named itself or lies in a folder without weights, else None."""
    path = Path(os.path.expanduser(model))
    # an empty name is no name of the folder that a program happens to be in
    if not os.fspath(model):
        return None
    if os.path.isdir(path) and os.path.isfile(path / "config.json"):
        return None if has_weights(path) else path / "config.json"
    return path if os.path.isfile(path) and path.suffix == ".json" else None


def open_headers(
    model: str | os.PathLike[str], config: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """Read the headers of a folder, a GGUF file or a hub id, without downloading weights.

    `config` is the folder or hub id of the model that a GGUF file was made from, for its config and
    tokenizer. Raises `UserError` for anything else.
    """
    rule = "a model must be a folder, a GGUF file or a hub id"
    is_name = isinstance(model, str | os.PathLike) and bool(os.fspath(model))
    require(is_name, rule, f"{model!r:.80}", "give its path or name")
    file = gguf_file(model)
    if file is not None:
        return open_gguf(file, config)
    require(config is None, "`config` goes with a model in a GGUF file", f"{model}", "leave it out")
    return _on_the_hub(str(model)) if is_from_hub(model) else open_checkpoint(model)


def headers_here(
    model: str | os.PathLike[str], config: str | os.PathLike[str] | None = None
) -> Checkpoint | None:
    """Read headers; None for a hub id that is not in the cache. Raises `UserError`."""
    if not is_from_hub(model):
        return open_headers(model, config)
    return _in_cache(str(model)) if config is None else None


def fetch(
    models: Sequence[str | os.PathLike[str]],
    headers: Sequence[Checkpoint],
    on_phase: Callable[[str], None],
) -> list[Checkpoint]:
    """Return checkpoints to read weights from; what is not here of `headers` is downloaded."""
    found = []
    for model, known in zip(models, headers, strict=True):
        if not is_here(known):
            on_phase(f"downloading {model}")
        found.append(known if os.path.exists(os.path.expanduser(model)) else open_checkpoint(model))
    return found


def is_here(checkpoint: Checkpoint) -> bool:
    """Return whether the weight files exist on this machine."""
    return all(os.path.isfile(shard) for shard in checkpoint.shards)


def _on_the_hub(repo: str) -> Checkpoint:
    """Return the hub's copy in the cache, else config and headers alone: kilobytes."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    # the HTTP library beneath changes from release to release
    network_error: type[Exception] = hub.HfHubHTTPError.__bases__[0]
    unusable = (hub.HFValidationError, hub.NotASafetensorsRepoError, hub.SafetensorsParsingError)
    cached = _in_cache(repo)
    if cached is not None:
        return cached
    try:
        # Not hf_hub_download, which tries six times, for 23 s, where there is no network at all.
        config = Path(snapshot_download(repo, allow_patterns=["config.json"])) / "config.json"
        found = get_safetensors_metadata(repo)
    except (OSError, network_error, *unusable) as error:
        raise not_on_the_hub(repo, error) from None
    files = sorted(found.files_metadata)
    tensors = {}
    check_shard_names(Path(repo), files)
    for index, file in enumerate(files):
        for name, tensor in found.files_metadata[file].tensors.items():
            place = {"shape": list(tensor.shape), "data_offsets": tensor.data_offsets}
            meta = {"dtype": tensor.dtype, **place}
            if found.weight_map.get(name) == file:
                tensors[name] = checked_entry(Path(file), name, meta, index, 0)
    settings = read_config(config)
    shards = tuple(Path(f"{repo}/{file}") for file in files)
    weights, left_out = weights_of(repo, settings, tensors)
    return Checkpoint(Path(repo), settings, shards, weights, left_out=left_out)


def _in_cache(repo: str) -> Checkpoint | None:
    """Return the hub's copy in the cache; None where it is not there, or only in part."""
    from huggingface_hub import errors as hub

    try:
        return open_checkpoint(in_cache(repo))
    except (OSError, hub.HFValidationError, UserError):
        return None
