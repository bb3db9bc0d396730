"""What a model weighs, before any of its weights are here: from its folder, from the hub's headers, or a config.json.

Invariant: nothing is read of weights, and what comes back is a `Checkpoint` whose shards need not exist; whoever wants
to read asks `is_here` first.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.download import in_cache, is_hub_id, not_on_the_hub
from offload.checkpoint.gguf import gguf_file, open_gguf
from offload.checkpoint.safetensors import (
    Checkpoint,
    check_shard_names,
    checked_entry,
    has_weights,
    open_checkpoint,
    read_config,
    weights_of,
)
from offload.checkpoint.tensors import TensorEntry
from offload.config import require
from offload.encoding.registry import PLAIN_OF
from offload.errors import UserError

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # one block, but for biases and norms of heads
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_DEFAULTED = ("num_key_value_heads", "head_dim")
_MAX_LAYERS, _MAX_SIZE = 10_000, 1 << 32  # no model has as many; each layer takes memory even here


def config_alone(model: str | os.PathLike[str]) -> Path | None:
    """A config.json that was named itself, or lies in a folder without weights; None for other models."""
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path) and os.path.isfile(path / "config.json"):
        return None if has_weights(path) else path / "config.json"
    return path if os.path.isfile(path) and path.suffix == ".json" else None


def open_headers(model: str | os.PathLike[str], config: str | os.PathLike[str] | None = None) -> Checkpoint:
    """A model as planning sees it: a folder, a GGUF file or a hub id. Raises `UserError` for anything else.

    `config` is the folder or hub id that a GGUF file was made from, for its config and tokenizer.
    """
    is_name = isinstance(model, str | os.PathLike)
    require(is_name, "a model must be a folder, a GGUF file or a hub id", f"{model!r:.80}", "give its path or name")
    path, file = Path(os.path.expanduser(model)), gguf_file(model)
    if file is not None:
        return open_gguf(file, config)
    require(config is None, "`config` goes with a model in a GGUF file", f"{model}", "leave it out")
    if not os.path.isdir(path) and is_hub_id(str(model)):
        return _on_the_hub(str(model))
    return open_checkpoint(model)


def fetch(
    models: Sequence[str | os.PathLike[str]], check: Callable[..., object], on_phase: Callable[[str], None],
    config: str | os.PathLike[str] | None = None,
) -> tuple[Checkpoint, ...]:  # fmt: skip
    """Checkpoints to read weights from, fetched if need be once `check` has found the headers of all models useful.

    `config` is that of the first, see `open_headers`.
    """
    headers = [open_headers(model, None if index else config) for index, model in enumerate(models)]
    check(*headers)
    found = []
    for model, known in zip(models, headers, strict=True):
        if not is_here(known):
            on_phase(f"downloading {model}")
        found.append(known if os.path.exists(os.path.expanduser(model)) else open_checkpoint(model))
    return tuple(found)


def is_here(checkpoint: Checkpoint) -> bool:
    """Whether the weights can be read."""
    return all(os.path.isfile(shard) for shard in checkpoint.shards)


def checkpoint_of_config(config: dict[str, Any], path: Path) -> Checkpoint:
    """The headers that a Llama-like model of this config has, in a file that does not exist. Raises `UserError`."""
    assert config["model_type"] in LLAMA_LIKE, "sizes that do not follow from the config here"
    for name in (*_SIZES, *_DEFAULTED):
        _check_size(config, name, path)
    dtype = stored_dtype(config, path)
    return imagined(config, path, {name: (dtype, shape) for name, shape in _shapes(config).items()})


def stored_dtype(config: dict[str, Any], path: Path) -> str:
    """What most weights of a model of this config are stored in. Raises `UserError` where nothing computes in it."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if named not in PLAIN_OF:
        raise UserError(f"{path}: cannot compute in {named}: bfloat16, float16 or float32 it must be")
    return named


def imagined(config: dict[str, Any], path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Checkpoint:
    """Headers with these types and shapes by name, in one file beside `path` that does not exist."""
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = PLAIN_OF[dtype].stored_bytes(shape)
        entries[name] = TensorEntry(0, PLAIN_OF[dtype].name, shape, at, at + num_bytes)
        at += num_bytes
    return Checkpoint(path.parent, config, (path.with_name("model.safetensors"),), entries)


def _check_size(config: dict[str, Any], name: str, path: Path) -> None:
    size, limit = config.get(name), _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
    if (size is None and name in _DEFAULTED) or (type(size) is int and 0 < size < limit):
        return
    raise UserError(f"{path}: {name} must be a whole number above 0 and below {limit}, got {size!r:.80}: fix it")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(config).items()}
    shapes["model.norm.weight"] = (width,)
    return shapes if config.get("tie_word_embeddings") else {**shapes, "lm_head.weight": (vocab, width)}


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of one layer, in the order of their use."""
    width, inner, num_heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head = config.get("head_dim") or width // num_heads
    queries, keys = num_heads * head, (config.get("num_key_value_heads") or num_heads) * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", queries), ("k", keys), ("v", keys))}
    if config["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes


def _on_the_hub(repo: str) -> Checkpoint:
    """The hub's copy where it is in the cache, else its config and headers alone: kilobytes, not gigabytes."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    network_error: type[Exception] = hub.HfHubHTTPError.__bases__[0]  # of the HTTP library beneath, which changes
    unusable = (
        OSError,
        network_error,
        hub.HFValidationError,
        hub.NotASafetensorsRepoError,
        hub.SafetensorsParsingError,
    )
    try:
        return open_checkpoint(in_cache(repo))
    except (OSError, hub.HFValidationError, UserError):
        pass  # not in the cache, or only in part
    try:
        # Not hf_hub_download, which tries six times, for 23 s, where there is no network at all.
        config = Path(snapshot_download(repo, allow_patterns=["config.json"])) / "config.json"
        found = get_safetensors_metadata(repo)
    except unusable as error:
        raise not_on_the_hub(repo, error) from None
    files, tensors = sorted(found.files_metadata), {}
    check_shard_names(Path(repo), files)
    for index, file in enumerate(files):
        for name, tensor in found.files_metadata[file].tensors.items():
            meta = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": tensor.data_offsets}
            if found.weight_map.get(name) == file:
                tensors[name] = checked_entry(Path(file), name, meta, index, 0)
    settings = read_config(config)
    shards = tuple(Path(f"{repo}/{file}") for file in files)
    weights, left_out = weights_of(repo, settings, tensors)
    return Checkpoint(Path(repo), settings, shards, weights, left_out=left_out)
