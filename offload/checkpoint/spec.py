"""What transformers makes of a model, kept on disk, so that who plans it again imports nothing.

`model/headers.py` makes it, from the library's meta model. It is kept by a hash of config and
headers, with the versions of this program and of transformers. What is damaged, of another version
or cannot be written is made anew. Refusals are not kept: each is found again, with its reason of
today.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from offload.checkpoint.files import cache_folder, read_small, write_whole
from offload.encoding.base import PLAIN_OF
from offload.errors import UserError

_MOST_BYTES = 256 << 20
# what makes other specs of the same files
_FORM = 1


def _versions() -> tuple[str, ...]:
    found = []
    for package in ("offload", "transformers", "torch"):
        try:
            found.append(version(package))
        except PackageNotFoundError:  # a checkout that was not installed
            found.append("")
    return (str(_FORM), *found)


class ModelSpec(msgspec.Struct, frozen=True):
    """What building a model has told of it.

    Attributes:
        versions: of what has made it.
        tensors: type and shape by the names that files have, of a model known by its config alone.
        text_sizes: sizes of the language model that a config leaves to its family.
    """

    versions: tuple[str, ...] = msgspec.field(default_factory=_versions)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    text_sizes: dict[str, Any] = {}


def spec_key(config: Mapping[str, Any], headers: object = ()) -> str:
    """Return the hash of a config and of what headers say."""
    text = json.dumps(config, sort_keys=True, default=str)
    return blake2b(f"{text}\n{headers!r}".encode(), digest_size=16).hexdigest()


def kept_spec(key: str) -> ModelSpec | None:
    """Return the spec of this key, None where there is none that holds."""
    try:
        text = read_small(cache_folder() / "specs" / f"{key}.json", _MOST_BYTES)
        spec = msgspec.json.decode(text, type=ModelSpec)
    except (OSError, ValueError, UserError):
        return None
    is_known = all(dtype in PLAIN_OF for dtype, _ in spec.tensors.values())
    return spec if spec.versions == _versions() and is_known else None


def keep_spec(key: str, spec: ModelSpec) -> ModelSpec:
    """Return the spec, which is kept where there is a place for it."""
    text = msgspec.json.encode(spec).decode()
    with suppress(OSError, UserError):
        write_whole(cache_folder() / "specs" / f"{key}.json", text)
    return spec
