"""A model's headers, wherever it is: in a folder, in a GGUF file or on the hub.

No weights are read, and the shards of the resulting `Checkpoint` need not exist: code that reads
them asks `Checkpoint.is_here` first. An index may be hostile: it is refused unless it names files
beside it.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.download import (
    INDEX,
    SINGLE,
    check_shard_names,
    download_small,
    folder_of,
    in_cache,
    is_hub_id,
    not_on_the_hub,
    shard_names,
)
from offload.checkpoint.files import Stamp, name_of_folder, read_json, stamp_of
from offload.checkpoint.gguf import open_gguf
from offload.checkpoint.gguf_header import SPLIT
from offload.checkpoint.methods import check_method, check_names, quantisation, unexplained
from offload.checkpoint.mlx import as_in_transformers, is_of_mlx, require_known
from offload.checkpoint.safetensors import checked_entry, damaged, read_header, require_few
from offload.checkpoint.small_files import read_config
from offload.checkpoint.tensors import TensorEntry, with_codings
from offload.checkpoint.text_part import TextPart, text_part, with_shared_layers, with_turned_stacks
from offload.encoding.base import AGAIN
from offload.errors import UserError, require

# called with a model and the source of its GGUF file
ReadHeaders = Callable[..., Checkpoint]

_GGUF = "*.[gG][gG][uU][fF]"
_OTHERS = ("*.onnx", "onnx/*.onnx", "openvino*.xml", "*.npz", "*.nemo", "*.msgpack", "*.h5")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def is_from_hub(model: str | os.PathLike[str]) -> bool:
    """Return True if this could name a model on the hub, and names nothing here."""
    return not os.path.exists(os.path.expanduser(model)) and is_hub_id(str(model))


def config_alone(model: str | os.PathLike[str]) -> Path | None:
    """Return a config.json named directly or in a folder without weights, else None."""
    # an empty name must not mean the working directory
    if not os.fspath(model):
        return None
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path) and os.path.isfile(path / "config.json"):
        return None if has_weights(path) else path / "config.json"
    return path if os.path.isfile(path) and path.suffix == ".json" else None


def gguf_file(model: str | os.PathLike[str]) -> Path | None:
    """Return the first GGUF file of a model, or None where the model is not GGUF.

    `model` is the file itself, or a folder with GGUF files and no safetensors. Raises `UserError`
    if a folder has several models.
    """
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path):
        return path if path.suffix.lower() == ".gguf" else None
    if not os.path.isdir(path) or any(True for _ in path.glob("*.safetensors*")):
        return None
    # vision encoders (mmproj) are left out
    files = sorted(file for file in path.glob(_GGUF) if "mmproj" not in file.name.lower())
    first = [
        file
        for file in files
        if (match := SPLIT.fullmatch(file.name)) is None or int(match[2]) == 1
    ]
    if len(first) > 1:
        names = ", ".join(file.name for file in first)
        raise UserError(f"{path} has several GGUF models ({names}): give the path of one of them")
    return next(iter(first or files), None)


def require_name(model: str | os.PathLike[str]) -> None:
    """Raise `UserError` for a text that cannot name a model."""
    requirement = "a model must be a folder, a GGUF file or a hub id"
    is_name = isinstance(model, str | os.PathLike) and bool(os.fspath(model))
    require(is_name, requirement, f"{model!r:.80}", "give its path or name")


def open_headers(
    model: str | os.PathLike[str], config: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """Read the headers of a folder, a GGUF file or a hub id, without downloading weights.

    `config` is the folder or hub id of the model that a GGUF file was made from, for its config and
    tokenizer. Raises `UserError` for anything else.
    """
    require_name(model)
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
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> list[Checkpoint]:
    """Return checkpoints with weights; files of `headers` that are missing here are downloaded.

    Where files are here, their commit stays.

    Args:
        on_bytes: is called with the bytes of a model's weights that are here by now, and all.
    """
    checkpoints = []
    for model, known in zip(models, headers, strict=True):
        if not known.is_here:
            on_phase(f"downloading {model}")
            known = open_checkpoint(model, _in_all(known, on_bytes))
        elif is_from_hub(model):
            download_small(str(model), revision=known.directory.name)
        checkpoints.append(known)
    return checkpoints


def _in_all(known: Checkpoint, on_bytes: Callable[[int, int], None]) -> Callable[[int], None]:
    """Return a function that counts landed bytes on top of the files that were here as a whole."""
    ends = Counter[int]()
    for entry in (*known.tensors.values(), *known.extra.values()):
        ends[entry.shard] = max(ends[entry.shard], entry.hi)
    total = ends.total()
    with suppress(OSError):
        folder = in_cache(str(known.directory))
        for shard, size in list(ends.items()):
            if os.path.isfile(folder / known.shards[shard].name):
                ends[shard] -= size
    here = total - ends.total()
    return lambda done: on_bytes(min(here + done, total), total)


def open_checkpoint(
    model: str | os.PathLike[str], on_bytes: Callable[[int], None] = lambda done: None
) -> Checkpoint:
    """Read config and headers of a Hugging Face folder or hub id. Raises `UserError`.

    `on_bytes` is that of `folder_of`.
    """
    directory = folder_of(model, on_bytes=on_bytes)
    where = name_of_folder(directory)
    if not os.path.isfile(directory / "config.json"):
        _refuse_other_formats(directory)
    config_stamp = stamp_of(directory / "config.json")
    config = read_config(directory / "config.json")
    shards, weight_map = find_shards(directory)
    for path in shards:
        if not os.path.isfile(path):
            complaint = f"the index names {path.name}, which is missing"
            complaint = complaint if weight_map else f"{path.name} leads to no file"
            raise damaged(f"{directory}: {complaint}", directory)
    tensors = dict[str, TensorEntry]()
    stamps = list[Stamp]()
    formats = set[object]()
    for index, shard in enumerate(shards):
        header = read_header(shard, index)
        stamps.append(header.stamp)
        formats.add(header.metadata.get("format"))
        require_few(where, len(tensors) + len(header.tensors))
        for name, entry in header.tensors.items():
            if weight_map is None or weight_map.get(name) == shard.name:
                tensors[name] = entry
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            complaint = f"the index places {name} in {file}, which lacks it"
            raise damaged(f"{where}: {complaint}", directory)
    weights, left_out, extra = weights_of(where, config, tensors, formats)
    return Checkpoint(
        directory,
        config,
        shards,
        weights,
        tuple(stamps),
        left_out=left_out,
        config_stamp=config_stamp,
        extra=extra,
    )


def weights_of(
    where: str,
    config: dict[str, Any],
    tensors: dict[str, TensorEntry],
    formats: Collection[object] = (),
) -> TextPart:
    """Return a language model's tensors by its own names.

    `formats` are the formats that the files name. Raises `UserError` for contradictions.
    """
    check_method(where, config)
    check_names(where, tensors)
    is_mlx = is_of_mlx(config, formats, tensors)
    if is_mlx:
        require_known(where, config)
    text = text_part(where, config, tensors)
    weights = with_codings(where, config, text.tensors)
    if quantisation(config) and not any(entry.coded for entry in weights.values()):
        raise unexplained(where, config)
    if is_mlx:
        weights = as_in_transformers(where, config, weights)
    turned = with_turned_stacks(config, weights)
    return text._replace(tensors=with_shared_layers(config, turned))


def has_weights(directory: Path) -> bool:
    """Return True if a folder holds weights in any format, readable or not."""
    return any(
        True for pattern in ("*.safetensors*", *_PICKLES, _GGUF) for _ in directory.glob(pattern)
    )


def find_shards(directory: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """Return the weight files, existing or not, and the index's map of tensors to them, if any.

    Raises `UserError` where there are none, or the index makes no sense.
    """
    # transformers reads this file, too, though an old index may lie beside it
    if os.path.isfile(directory / SINGLE):
        return (directory / SINGLE,), None
    if os.path.isfile(directory / INDEX):
        weight_map = read_json(directory / INDEX).get("weight_map")
        return tuple(directory / name for name in shard_names(directory, weight_map)), weight_map
    shards = sorted(directory.glob("*.safetensors"))
    if len(shards) == 1:
        return tuple(shards), None
    if shards:
        complaint = f"{directory} has {len(shards)} safetensors files but no {INDEX}"
        raise damaged(complaint, directory)
    pickles = sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern))
    if pickles:
        complaint = f"{directory} has only pickled weights ({pickles[0]}), which can run code"
        raise UserError(f"{complaint}: convert to safetensors")
    _refuse_other_formats(directory)
    has_config = os.path.isfile(directory / "config.json")
    remedy = AGAIN if has_config else "give the folder of a Hugging Face model"
    raise UserError(f"no safetensors files in {directory}: {remedy}")


def other_weights(checkpoint: Checkpoint) -> str:
    """Return a note if a folder has shards beside the one file that is read; else an empty text.

    transformers 5.24.0 leaves the file there when it saves a larger model, and goes on reading it.
    """
    if [path.name for path in checkpoint.shards] != [SINGLE]:
        return ""
    folder = checkpoint.directory
    others = sorted(folder.glob("model-*-of-*.safetensors"))
    if not others:
        return ""
    read = f"{SINGLE} is read, as by transformers, {others[0].name} is not"
    return f"{folder} holds weights twice: {read}; remove those that are older"


def _refuse_other_formats(directory: Path) -> None:
    """Raise `UserError` for an adapter without its model, and for weights in another form."""
    if os.path.isfile(directory / "adapter_config.json"):
        complaint = f"{directory} holds an adapter, such as LoRA, without its model"
        raise UserError(f"{complaint}: merge it into the model, give the result")
    others = sorted(path.name for pattern in _OTHERS for path in directory.glob(pattern))
    if others:
        complaint = f"{directory} has no weights in safetensors or GGUF, it has {others[0]}"
        raise UserError(f"{complaint}: take the model in a form that is read")


def shard_name(index: int, count: int) -> str:
    """Return the name of one of `count` weight files."""
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _on_the_hub(repo: str) -> Checkpoint:
    """Return the hub's copy in the cache, or else config and headers alone: kilobytes."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    # the HTTP library behind it differs between versions
    network_error: type[Exception] = hub.HfHubHTTPError.__bases__[0]
    unusable = (hub.HFValidationError, hub.NotASafetensorsRepoError, hub.SafetensorsParsingError)
    cached = _in_cache(repo)
    if cached is not None:
        return cached
    try:
        # Not hf_hub_download, which tries six times, for 23 s, where there is no network at all.
        config = Path(snapshot_download(repo, allow_patterns=["config.json"])) / "config.json"
        listing = get_safetensors_metadata(repo)
    except (OSError, network_error, *unusable) as error:
        raise not_on_the_hub(repo, error) from None
    files = sorted(listing.files_metadata)
    tensors = {}
    check_shard_names(Path(repo), files)
    for index, file in enumerate(files):
        for name, tensor in listing.files_metadata[file].tensors.items():
            place = {"shape": list(tensor.shape), "data_offsets": tensor.data_offsets}
            meta = {"dtype": tensor.dtype, **place}
            if listing.weight_map.get(name) == file:
                tensors[name] = checked_entry(Path(file), name, meta, index, 0)
    settings = read_config(config)
    shards = tuple(Path(f"{repo}/{file}") for file in files)
    weights, left_out, extra = weights_of(repo, settings, tensors)
    return Checkpoint(Path(repo), settings, shards, weights, left_out=left_out, extra=extra)


def _in_cache(repo: str) -> Checkpoint | None:
    """Return the hub's copy in the cache; None if it is missing or incomplete."""
    from huggingface_hub import errors as hub

    try:
        return open_checkpoint(in_cache(repo))
    except (OSError, hub.HFValidationError, UserError):
        return None
