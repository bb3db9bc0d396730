"""Models as planning sees them: headers and sizes from a folder, the hub, or a config.json alone.

No weights are read, and the shards of the resulting `Checkpoint` need not exist: code that reads
them asks `is_here` first. The module also checks, before anything is built, that two models share a
vocabulary, and that tokenizer files do not claim sizes that would end the process inside a library
(Rust aborts when memory runs out, and Python cannot catch that). Invariant: no pair of models is
refused that loading would accept, where complete tokenizers are compared; and what passes the check
of tokenizer files can only fail as an exception.
"""

import base64
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.download import in_cache, is_hub_id, not_on_the_hub
from offload.checkpoint.families import with_shared_layers
from offload.checkpoint.files import read_small
from offload.checkpoint.gguf import gguf_file, open_gguf
from offload.checkpoint.safetensors import (
    Checkpoint,
    check_shard_names,
    checked_entry,
    has_tokenizer,
    has_weights,
    open_checkpoint,
    read_config,
    read_json,
    stored_dtype,
    weights_of,
)
from offload.checkpoint.sizes import model_shape
from offload.checkpoint.tensors import TensorEntry, check_counts, check_types, objects
from offload.encoding.base import PLAIN_OF
from offload.errors import UserError, ensure, reason, require

# families that share one layer structure, but for biases and norms of heads
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_HEADS = "num_attention_heads"
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", _HEADS, "vocab_size")
_DEFAULTED = ("num_key_value_heads", "head_dim")
_MAX_LAYERS = 10_000  # no model has as many, and each layer takes memory even here
_MAX_SIZE = 1 << 32


def config_alone(model: str | os.PathLike[str]) -> Path | None:
    """Return a config.json that was named itself or lies in a folder without weights, else None."""
    path = Path(os.path.expanduser(model))
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
    is_name = isinstance(model, str | os.PathLike)
    require(is_name, rule, f"{model!r:.80}", "give its path or name")
    path = Path(os.path.expanduser(model))
    file = gguf_file(model)
    if file is not None:
        return open_gguf(file, config)
    require(config is None, "`config` goes with a model in a GGUF file", f"{model}", "leave it out")
    if not os.path.isdir(path) and is_hub_id(str(model)):
        return _on_the_hub(str(model))
    return open_checkpoint(model)


def headers_here(
    model: str | os.PathLike[str], config: str | os.PathLike[str] | None = None
) -> Checkpoint | None:
    """Read headers; None for a hub id that is not in the cache. Raises `UserError`."""
    if os.path.exists(os.path.expanduser(model)) or not is_hub_id(str(model)):
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


def checkpoint_of_config(config: dict[str, Any], path: Path) -> Checkpoint:
    """Return headers of a Llama-like model, in a file that is not there. Raises `UserError`."""
    assert config["model_type"] in LLAMA_LIKE, "sizes that do not follow from the config here"
    for name in (*_SIZES, *_DEFAULTED):
        size = config.get(name)
        limit = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
        is_usual = size is None and name in _DEFAULTED
        if not is_usual and not (type(size) is int and 0 < size < limit):
            rule = f"{path}: {name} must be a whole number above 0 and below {limit}"
            raise UserError(f"{rule}, got {size!r:.80}: fix it")
    width = config["hidden_size"]
    vocab = config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    own = layer_shapes(config)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, width)
    dtype = stored_dtype(config, path)
    return imagined(config, path, {name: (dtype, shape) for name, shape in shapes.items()})


def imagined(
    config: dict[str, Any], path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Checkpoint:
    """Return headers of these (type, shape) by name, in a file beside `path` that is not there."""
    entries = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = PLAIN_OF[dtype].stored_bytes(shape)
        entries[name] = TensorEntry(0, PLAIN_OF[dtype].name, shape, at, at + num_bytes)
        at += num_bytes
    weights = with_shared_layers(config, entries)
    return Checkpoint(path.parent, config, (path.with_name("model.safetensors"),), weights)


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors of one layer, in the order of their use."""
    width, inner, num_heads = (config[name] for name in (*_SIZES[:2], _HEADS))
    head = config.get("head_dim") or width // num_heads
    queries = num_heads * head
    keys = (config.get("num_key_value_heads") or num_heads) * head
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
        shapes |= {
            f"self_attn.{name}_proj.bias": (size,)
            for name, size in (("q", queries), ("k", keys), ("v", keys))
        }
    if config["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes


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


def require_one_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise `UserError` unless target and draft share a vocabulary.

    Compares tokenizers; where a local model has none, the sizes of the vocabularies.
    """
    sizes = [model_shape(checkpoint).vocab_size for checkpoint in (target, draft)]
    known = [_vocabulary(checkpoint.tokenizer_path) for checkpoint in (target, draft)]
    here = [one.tokenizer_path for one in (target, draft) if is_here(one)]
    is_bare = not all(map(has_tokenizer, here))
    if known[0] != known[1] if None not in known else is_bare and sizes[0] != sizes[1]:
        raise other_vocabulary(draft.directory.name, *sizes)


def are_same(one: Mapping[str, int], other: Mapping[str, int], *, is_exact: bool) -> bool:
    """Return whether two vocabularies give the same meaning to the same ids.

    GGUF files pad theirs to the width of the embedding, and their tokenizers are rebuilt (not
    `is_exact`): then the larger must contain the smaller.
    """
    if is_exact:
        return one == other
    small, large = sorted((one, other), key=len)
    return all(large.get(token) == index for token, index in small.items())


def other_vocabulary(draft: str, target_size: int, draft_size: int) -> UserError:
    """Return the error for a draft whose tokens are not the target's."""
    return UserError(
        f"the draft must share the target's vocabulary, {draft} has {draft_size} entries "
        f"of its own against {target_size}: choose a smaller model of the target's family"
    )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Return the vocabulary without the tokens that transformers may add, or None if unreadable."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not os.path.isfile(file):
        return None
    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False))
    # tokenizers raises nothing more specific; loading tells what is wrong
    except Exception:
        return None


_CONFIGS = ("config.json", "tokenizer_config.json")  # transformers builds configs from these
_ESCAPED_LETTER = re.compile(r"\\u00[2-7]")  # JSON may hide a word behind such escapes
# The names of files that libraries read whole: vocabularies and settings, no weights or texts.
READ_BY_LIBRARIES = re.compile(
    r"(tokenizer(\..*)?|added_tokens|special_tokens_map|tekken.*|(.*[-_])?vocab(-.*)?|.*config|.*template)\.json"
    r"|(emoji|normalizer|byte_maps|word_\w+)\.json|(vocab|merges|dict)\.txt|tokenizer\.model.*|.*\.(jinja|model|spm)"
)
_MOST_BYTES = 256 << 20  # the largest take some 40 MiB
_DOWNLOAD_AGAIN = "download its files again"


def check_tokenizer_files(directory: Path) -> None:
    """Raise `UserError` for files that must not reach a library."""
    for path in directory.iterdir():
        is_read = READ_BY_LIBRARIES.fullmatch(path.name) and os.path.isfile(path)
        size = os.path.getsize(path) if is_read else 0
        if size > _MOST_BYTES:
            has = f"{directory.name}: {path.name} has {size >> 20} MiB"
            rule = f"no such file has more than {_MOST_BYTES >> 20}"
            raise UserError(f"{has}, {rule}: {_DOWNLOAD_AGAIN}")
    for path in (directory / name for name in _CONFIGS):
        if os.path.isfile(path):
            config = read_json(path)
            check_types(directory.name, config, path.name)
            check_counts(directory.name, config, path.name)
    path = directory / "tokenizer.json"
    try:
        text = read_small(path, _MOST_BYTES) if os.path.isfile(path) else ""
        may_have_map = "Precompiled" in text or _ESCAPED_LETTER.search(text) is not None
        for part in objects(json.loads(text)) if may_have_map else ():
            if part.get("type") == "Precompiled":
                # a table that begins with its length in four bytes
                encoded = part.get("precompiled_charsmap")
                ensure(isinstance(encoded, str), "precompiled_charsmap must be text")
                raw = base64.b64decode(str(encoded))
                is_whole = int.from_bytes(raw[:4], "little") <= max(0, len(raw) - 4)
                ensure(is_whole, "precompiled_charsmap is cut short")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): {_DOWNLOAD_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        what = f"cannot read the tokenizer in {directory} ({reason(error)})"
        raise UserError(f"{what}: {_DOWNLOAD_AGAIN}") from None
