"""What a stranger's tokenizer files may claim that ends a process, or fills its memory, inside of a library.

Rust ends a process that asks for more memory than there is, and Python can catch nothing. Invariant: what passes may
still be refused by the library, but as an exception.
"""

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

from offload.checkpoint.config_counts import check_counts, check_types, objects
from offload.checkpoint.safetensors import read_json
from offload.checkpoint.small_files import read_small
from offload.errors import UserError, ensure, reason

_COUNTED = "config.json", "tokenizer_config.json"  # transformers makes configs of what stands there
_AS_NUMBER = re.compile(r"\\u00[2-7]")  # how JSON may write a letter, so that a word is not seen as such
# What libraries read whole: vocabularies and settings by the names that they give them, no weights or texts beside.
_READ = re.compile(
    r"(tokenizer(\..*)?|added_tokens|special_tokens_map|tekken.*|(.*[-_])?vocab(-.*)?|.*config|.*template)\.json"
    r"|(emoji|normalizer|byte_maps|word_\w+)\.json|(vocab|merges|dict)\.txt|tokenizer\.model.*|.*\.(jinja|model|spm)"
)
_MOST_BYTES = 256 << 20  # the largest take some 40 MiB
_AGAIN = "download its files again"


def check_tokenizer_files(directory: Path) -> None:
    """Raises `UserError` for files that must not reach a library."""
    _check_sizes(directory)
    for path in (directory / name for name in _COUNTED):
        if os.path.isfile(path):
            config = read_json(path)
            check_types(directory.name, config, path.name)
            check_counts(directory.name, config, path.name)
    path = directory / "tokenizer.json"
    try:
        text = read_small(path, _MOST_BYTES) if os.path.isfile(path) else ""
        may_have_map = "Precompiled" in text or _AS_NUMBER.search(text) is not None
        for part in objects(json.loads(text)) if may_have_map else ():
            if part.get("type") == "Precompiled":
                _check_map(part.get("precompiled_charsmap"))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): {_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read the tokenizer in {directory} ({reason(error)}): {_AGAIN}") from None


def _check_sizes(directory: Path) -> None:
    for path in directory.iterdir():
        size = os.path.getsize(path) if _READ.fullmatch(path.name) and os.path.isfile(path) else 0
        if size > _MOST_BYTES:
            what = f"{path.name} has {size >> 20} MiB, no such file has more than {_MOST_BYTES >> 20}"
            raise UserError(f"{directory.name}: {what}: {_AGAIN}")


def _check_map(encoded: Any) -> None:
    """A table of so many bytes as its first four say, then texts. Raises `ValueError`."""
    ensure(isinstance(encoded, str), "precompiled_charsmap must be text")
    raw = base64.b64decode(encoded)
    ensure(int.from_bytes(raw[:4], "little") <= max(0, len(raw) - 4), "precompiled_charsmap is cut short")
