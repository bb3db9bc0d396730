"""GGUF files: their metadata, names, offsets and data, with and without a tokenizer, in one part and in several."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from case import Target
from damage import BYTES, cut, flip, front, integer, json_value, piece, special
from gguf_files import MODELS, metadata_of, write_gguf
from model_files import generate, plan
from reciting import TEMPLATE
from tiny import VOCAB_SIZE, save_tokenizer


def _file(folder: Path) -> Path:
    return min(folder.glob("m*.gguf"), default=folder / "m.gguf")


def _generate(folder: Path) -> object:
    return generate(_file(folder))


def _save(folder: Path, *, name: str, kind: str, max_tensors: int = 0) -> None:
    write_gguf(_config(name), folder / "m.gguf", kind, max_tensors=max_tensors, says=_tokenizer_says(folder))


def _config(name: str) -> Any:
    """Two layers; 256 columns are the least that Q4_K has."""
    config = MODELS[name]()
    config.num_hidden_layers = min(config.num_hidden_layers, 2)
    return config


def _tokenizer_says(folder: Path) -> dict[str, Any]:
    tokenizer = save_tokenizer(folder / "plain", chat_template=TEMPLATE)
    shutil.rmtree(folder / "plain")
    tokens = [tokenizer.convert_ids_to_tokens(index) for index in range(VOCAB_SIZE)]
    kinds = [3 if index < 3 else 5 if token.startswith("<unused") else 1 for index, token in enumerate(tokens)]
    tokens[-2:] = "<p", "p>"  # which the merges make; of one alone transformers 5.17 takes the letters for several
    said = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": kinds, "merges": ["< p", "p >"]}
    says = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    return says | {"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": tokenizer.chat_template}


def _save_metadata(folder: Path) -> None:
    (folder / "says.json").write_text(json.dumps(metadata_of(_config("llama"), "llama") | _tokenizer_says(folder)))


def _write_and_generate(folder: Path) -> object:
    """The file is written here, as says.json has it, so that keys lack, and values have another type or none."""
    config, usual = _config("llama"), metadata_of(_config("llama"), "llama")
    try:
        damaged = json.loads((folder / "says.json").read_text()).items()
        says = {key: value % 2**32 if type(value) is int else value for key, value in damaged}
        write_gguf(config, folder / "m.gguf", "Q8_0", says=dict.fromkeys(usual) | says)
    except Exception:  # GGUF cannot say that
        return None
    return _generate(folder)


_START = tuple(front(2048, damage) for damage in (flip, integer, integer, piece))
_HEADER = tuple(front(10_000, damage) for damage in (flip, flip, integer, piece, cut))
_FILES = {"*.gguf": (*_START, *_HEADER, *BYTES, special)}
TARGETS = [
    Target("gguf_file/qwen3", partial(_save, name="qwen3", kind="Q4_K"), _FILES, _generate),
    Target("gguf_file/llama", partial(_save, name="llama", kind="Q8_0"), _FILES, _generate),
    Target("gguf_file/gemma3", partial(_save, name="gemma3", kind="F16"), _FILES, _generate),
    Target("gguf_file/parts", partial(_save, name="qwen3", kind="Q5_1", max_tensors=9), _FILES, _generate),
    Target("gguf_file/metadata", _save_metadata, {"says.json": (json_value,)}, _write_and_generate, writes=("m.gguf",)),
    Target("gguf_file/plan", partial(_save, name="llama", kind="Q6_K"), _FILES, lambda folder: plan(_file(folder))),
]
