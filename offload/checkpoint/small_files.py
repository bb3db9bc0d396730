"""The small files beside a model's weights, config.json and those of tokenizers: what they say.

They are checked before a library reads them. transformers counts up to numbers of a config: one of
10^12 layers would fill memory before anything could be refused. Rust aborts when memory runs out,
and Python cannot catch that. A config of a model around a language model gets the sizes of text
that files often leave out; T5 and mT5 have sizes under other names, and two stacks of layers.

Invariants: the config of any other model is left unchanged; no model that exists and is read is
refused; what passes the check of tokenizer files can only fail as an exception.
"""

import base64
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint.files import name_of_folder, read_json, read_small
from offload.checkpoint.spec import ModelSpec, keep_spec, kept_spec, spec_key
from offload.encoding.base import PLAIN_OF, Settings
from offload.errors import UserError, ensure, reason, require
from offload.families.types import ENCODER_DECODERS, SIZES_OUTSIDE

TRAINED_CONTEXT = 512  # of both stacks; positions are relative, so longer texts are allowed
_USUAL_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
}
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
_NO_TEXT_CONFIG = "text_config in config.json must describe a language model"
ANOTHER_FOLDER = "give the folder of a model that transformers has, or of its language model alone"
# classifiers of 20,000 labels are common
_MOST_LAYERS = 10_000
_MOST_LABELS = 100_000
_LAYERS = re.compile(r"(?:(?<!per_)layers?|depth)$")  # `..._per_layer` is a size
_LABELS = ("id2label", "label2id")
_FLOAT = "__float__"
_FLOATS = ("Infinity", "-Infinity", "NaN")
# one of each layer, in a list or as letters
_LAYER_KINDS = ("layers_block_type", "hybrid_override_pattern")


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's config. Raises `UserError` where it is missing, or of no language model."""
    return _with_text_sizes(name_of_folder(path.parent), _spelled_out(read_json(path)))


def _spelled_out(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with `{"__float__": "Infinity"}` as a number, and its count of layers."""
    left: list[Any] = [config]
    while left:
        part = left.pop()
        for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
            if isinstance(value, dict) and value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS:
                part[key] = float(value[_FLOAT])
            elif isinstance(value, dict | list):
                left.append(value)
        if isinstance(part, dict) and "num_hidden_layers" not in part:
            kinds = next((part[name] for name in _LAYER_KINDS if part.get(name)), None)
            if isinstance(kinds, list | str):
                part["num_hidden_layers"] = len(kinds)
    return config


def _with_text_sizes(where: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with all sizes of the language model in `text_config`.

    Files often leave out the usual ones. Raises `UserError` where the config describes no language
    model, or its model type is not text.
    """
    check_types(where, config)
    inner = config.get("text_config")
    if inner is None or (isinstance(inner, dict) and all(key in inner for key in _SIZES)):
        return config
    if not isinstance(inner, dict) or not inner:
        kind = config.get("model_type", "unknown")
        complaint = f"{where}: {_NO_TEXT_CONFIG} (model type {kind}), got {inner!r:.80}"
        raise UserError(f"{complaint}: {ANOTHER_FOLDER}")
    check_counts(where, config)
    key = spec_key(config)
    spec = kept_spec(key)
    if spec is None:
        spec = keep_spec(key, ModelSpec(text_sizes=_usual_text_sizes(where, config, inner)))
    return {**config, "text_config": {**inner, **spec.text_sizes}}


def _usual_text_sizes(where: str, config: dict[str, Any], inner: Settings) -> dict[str, Any]:
    """Return the sizes that a family has where its config leaves them out. Raises `UserError`."""
    # this import takes seconds, so it waits until it is needed
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type", "unknown")
    try:
        known = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config)).get_text_config(decoder=True)
    # transformers rejects a config with exceptions of any type
    except Exception as error:
        complaint = f"{where}: {_NO_TEXT_CONFIG} (model type {kind}; {reason(error)})"
        raise UserError(f"{complaint}: {ANOTHER_FOLDER}") from None
    usual = {key: getattr(known, key, None) for key in _SIZES if key not in inner}
    return {key: size for key, size in usual.items() if size is not None}


def check_counts(where: str, config: Settings, file: str = "config.json") -> None:
    """Raise `UserError` for a count, in any part of a config, that no model has."""
    for part in objects(config):
        for key, value in part.items():
            size = len(value) if key in _LABELS and isinstance(value, dict) else value
            most = _most(str(key))  # tables that were built, and not read, have numbers for keys
            if most is not None and isinstance(size, int | float):
                requirement = f"{where}: {key} in {file} must be at most {most}"
                require(size <= most, requirement, size, "fix it")


def _most(key: str) -> int | None:
    """Return the largest count under this key; None for keys that are no counts."""
    if key in _LABELS or key.endswith("labels"):
        return _MOST_LABELS
    return _MOST_LAYERS if _LAYERS.search(key) else None


def check_types(where: str, config: Settings, file: str = "config.json") -> None:
    """Raise `UserError` where a part of a config has a model type that is not text."""
    requirement = f"{where}: model_type in {file} must be text"
    for kind in (part.get("model_type") for part in objects(config)):
        require(isinstance(kind, str | None), requirement, kind, "fix it")


def objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a JSON value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        values = part.values() if isinstance(part, dict) else part
        left += (value for value in values if isinstance(value, dict | list))


def of_text(config: Settings) -> Settings:
    """Return the part of a config that is of the decoder of text: all of it, where none is named."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def first_size(config: Settings, *names: str, most: float = (1 << 31) - 1) -> int:
    """Return the first of these keys' values that is a whole number in 1 to `most`, else 0."""
    given = (config.get(name) for name in names)
    return next((size for size in given if type(size) is int and 0 < size <= most), 0)


def is_wrapper(config: Settings) -> bool:
    """Return True if a config is of a model around a language model."""
    return isinstance(config.get("text_config"), dict) or config.get("model_type") in SIZES_OUTSIDE


def has_encoder(config: Settings) -> bool:
    """Return True if a config is that of a T5 whose encoder reads the prompt."""
    is_one = config.get("model_type") in ENCODER_DECODERS
    return is_one and config.get("is_encoder_decoder") is not False


def decoder_config(config: Settings) -> Settings:
    """Return the config with the decoder's sizes under their usual names."""
    if not has_encoder(config):
        return config
    named = {usual: config.get(key) for usual, key in _USUAL_NAMES.items()}
    num_layers = config.get("num_layers")
    named |= {
        "num_hidden_layers": config.get("num_decoder_layers") or num_layers,
        "num_encoder_layers": num_layers,
    }
    return {**config, **named}


def stored_dtype(
    config: Settings,
    where: str | Path,
    usual: str = "bfloat16",
    remedy: str = "bfloat16, float16 or float32 it must be",
) -> str:
    """Return the type of most weights. Raises `UserError` for one that is not computed in."""
    named = str(config.get("dtype") or config.get("torch_dtype") or usual)
    name = named.removeprefix("torch.")
    if name not in PLAIN_OF:
        raise UserError(f"{where}: cannot compute in {name}: {remedy}")
    return name


TOKENIZER_CONFIG = "tokenizer_config.json"
# what a tokenizer is made of
_TOKENIZERS = ("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model", "vocab.json")
TEMPLATE = "chat_template"  # in `TOKENIZER_CONFIG`, or a file of its own
PROCESSOR_TEMPLATE = f"{TEMPLATE}.json"  # of models that also see, where tokenizers do not look
MORE_TEMPLATES = "additional_chat_templates"  # a folder
# what tells speakers apart: a template, or the kind of tokenizer
_SPEAKERS = (f"{TEMPLATE}.jinja", PROCESSOR_TEMPLATE, MORE_TEMPLATES, "tekken.json")
_CONFIGS = ("config.json", TOKENIZER_CONFIG)  # transformers builds configs from these
_ESCAPED_LETTER = re.compile(r"\\u00[2-7]")  # JSON may hide a word behind such escapes
# The names of files that libraries read whole: vocabularies and settings, no weights or texts.
_READ_BY_LIBRARIES = re.compile(
    r"(tokenizer(\..*)?|added_tokens|special_tokens_map|tekken.*|(.*[-_])?vocab(-.*)?|.*config|.*template)\.json"
    r"|(emoji|normalizer|byte_maps|word_\w+)\.json|(vocab|merges|dict)\.txt|tokenizer\.model.*|.*\.(jinja|model|spm)"
)
_MOST_BYTES = 256 << 20  # the largest take some 40 MiB
_DOWNLOAD_AGAIN = "download its files again"


def has_tokenizer(directory: Path) -> bool:
    """Return True if a folder has files that a tokenizer is made of; a GGUF file is one."""
    files = (directory, *(directory / name for name in _TOKENIZERS))
    return any(map(os.path.isfile, files))


def has_chat_template(directory: Path) -> bool:
    """Return True if a folder tells speakers apart, by a template or its kind of tokenizer."""
    if any(os.path.exists(directory / name) for name in _SPEAKERS):
        return True
    path = directory / TOKENIZER_CONFIG
    return os.path.isfile(path) and bool(read_json(path).get(TEMPLATE))


def no_chat_template() -> UserError:
    """Return the error for a conversation with a model that has no chat template."""
    return UserError(
        "the model has no chat template, so it cannot tell who speaks: take one made for chat, "
        "or give it a text to go on with (offload generate -p without `system`, /v1/completions)"
    )


def text_files(folder: Path) -> list[Path]:
    """Return the files that texts depend on, without the model's configs. Raises `OSError`."""
    templates = folder / MORE_TEMPLATES
    names = filter(_READ_BY_LIBRARIES.fullmatch, sorted(os.listdir(folder)))
    directly = [
        name for name in names if name == TOKENIZER_CONFIG or not name.endswith("config.json")
    ]
    beside = sorted(os.listdir(templates)) if os.path.isdir(templates) else []
    paths = [*(folder / name for name in directly), *(templates / name for name in beside)]
    return [path for path in paths if os.path.isfile(path)]


def is_template(path: Path) -> bool:
    """Return True if one of the `text_files` is a chat template alone."""
    return path.suffix == ".jinja" or path.name == PROCESSOR_TEMPLATE


def check_tokenizer_files(directory: Path) -> None:
    """Raise `UserError` for files that must not reach a library."""
    where = name_of_folder(directory)
    for path in (*directory.iterdir(), *(directory / MORE_TEMPLATES).glob("*")):
        is_read = _READ_BY_LIBRARIES.fullmatch(path.name) and os.path.isfile(path)
        size = os.path.getsize(path) if is_read else 0
        if size > _MOST_BYTES:
            has = f"{where}: {path.name} has {size >> 20} MiB"
            requirement = f"no such file has more than {_MOST_BYTES >> 20}"
            raise UserError(f"{has}, {requirement}: {_DOWNLOAD_AGAIN}")
    for path in (directory / name for name in _CONFIGS):
        if os.path.isfile(path):
            config = read_json(path)
            check_types(where, config, path.name)
            check_counts(where, config, path.name)
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
        complaint = f"cannot read the tokenizer in {directory} ({reason(error)})"
        raise UserError(f"{complaint}: {_DOWNLOAD_AGAIN}") from None
