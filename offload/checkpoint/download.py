"""The folder of a model, local or in the hub's cache, and downloads into that cache.

Small files are fetched by name first, then the shards that a loader reads.

Repositories also hold the same weights in other formats, and code. Invariant: no pickle and no
program is ever asked for, nothing in folders but chat templates, and all files of a model come from
one commit.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from offload.checkpoint.files import hub_id_of, read_json, require_visible
from offload.checkpoint.safetensors import damaged
from offload.checkpoint.small_files import has_tokenizer
from offload.errors import UserError, did_you_mean, reason

_SMALL = ("*.json", "*.jinja", "tokenizer*", "*.txt", "*.model")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MOST_NAMES = 1000  # how many entries of a folder are searched for a name that may have been meant
_PROGRAMS = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
_IN_FOLDERS = ("*/*.json", "*/tokenizer*", "*/*.txt", "*/*.model", "*/*.safetensors")
_NEVER = (*_IN_FOLDERS, "consolidated*", *_PROGRAMS)


def is_hub_id(model: str) -> bool:
    """Return True if this could name a model on the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not model.startswith(".")


def download_small(repo: str, revision: str | None = None) -> Path:
    """Fetch all but the weights into the hub's cache; return the folder. Raises `UserError`.

    Nothing is asked of the hub for a commit that is complete in the cache.
    """
    if revision is not None:
        with suppress(OSError):
            source = {"revision": revision, "local_files_only": True}
            folder = Path(_snapshot(repo, _SMALL, ignore_patterns=list(_NEVER), **source))
            if has_tokenizer(folder):
                return folder
    return download(repo, _SMALL, revision=revision, ignore_patterns=list(_NEVER))


def in_cache(repo: str) -> Path:
    """Return the folder that the hub's cache has for a model, complete or not; nothing is fetched.

    Raises `OSError` where there is none, and `HFValidationError` for a malformed name.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except OSError as error:
        # Newer versions know which other files the repository has, and call a folder without
        # README.md incomplete.
        snapshot = getattr(error, "snapshot_path", None)
        if snapshot is None:
            raise
        return Path(snapshot)


def cached_models() -> list[str]:
    """Return the ids of the models that the hub's cache has files of, sorted."""
    from huggingface_hub.constants import HF_HUB_CACHE

    commits = (snapshots / "commit" for snapshots in Path(HF_HUB_CACHE).glob("*/snapshots"))
    return sorted(filter(is_hub_id, filter(None, map(hub_id_of, commits))))


def download(repo: str, wanted: Sequence[str], **options: Any) -> Path:
    """Fetch by patterns; return the folder, or the cached one offline. Raises `UserError`."""
    from huggingface_hub.errors import HFValidationError

    try:
        return _snapshot(repo, wanted, **options)
    # all of the hub's errors are OSErrors, except for an invalid name
    except (OSError, HFValidationError) as error:
        raise not_on_the_hub(repo, error) from None


def _snapshot(repo: str, wanted: Sequence[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, allow_patterns=list(wanted), **options))


def not_on_the_hub(repo: str, error: Exception) -> UserError:
    """Return the error for one of the hub's library; the name is only doubted if the hub answered."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # the HTTP library behind it differs between versions
    network_error = HfHubHTTPError.__bases__[0]
    # ConnectionError: the user has set the hub's library offline
    unreached = (network_error, LocalEntryNotFoundError, ConnectionError)
    has_answered = isinstance(error, HfHubHTTPError) or not isinstance(error, unreached)
    is_around = isinstance(error, LocalEntryNotFoundError)
    why = reason((error.__cause__ if is_around else None) or error)
    if has_answered:
        complaint = f"{repo} is neither a directory here nor to be had from the hub ({why})"
        return UserError(f"{complaint}: check the name")
    complaint = f"{repo} is no directory here, and the hub is out of reach ({why})"
    return UserError(f"{complaint}: check the network, or give a folder")


def _silent_bars(on_bytes: Callable[[int], None]) -> type:
    """Return a class of bars for the hub's library that draw nothing and report bytes.

    The library has several bars with the unit "B": of bytes from the network, of those on the disk.
    """
    from tqdm import tqdm

    most_bytes = 0

    class SilentBar(tqdm):
        monitor_interval = 0

        def __init__(self, *args: Any, **settings: Any) -> None:
            # one that is disabled would not count
            super().__init__(
                *args, **{**settings, "disable": False, "file": StringIO(), "delay": 1e9}
            )

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most_bytes
            is_drawn = super().update(n)
            if self.unit == "B":
                most_bytes = max(most_bytes, int(self.n))
                on_bytes(most_bytes)
            return is_drawn

        def refresh(self, *_: Any, **__: Any) -> bool:
            return False

    return SilentBar


def folder_of(
    model: str | os.PathLike[str],
    *,
    with_weights: bool = True,
    on_bytes: Callable[[int], None] = lambda done: None,
) -> Path:
    """Return the folder of a model, downloaded if it is on the hub. Raises `UserError`.

    Args:
        on_bytes: is called from other threads with the bytes of weights that have landed so far.
    """
    path = Path(os.path.expanduser(model))
    require_visible(path)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        requirement = "model must be a directory or a hub id"
        raise UserError(f"{requirement}, {path} is a file: give the folder it lies in")
    if not is_hub_id(str(model)):
        raise _not_there(path)
    small = download_small(str(model))
    names = None
    if os.path.isfile(small / INDEX):
        names = shard_names(small, read_json(small / INDEX).get("weight_map"))
    if not with_weights:
        return small
    fetch = partial(
        download,
        str(model),
        revision=small.name,
        ignore_patterns=list(_NEVER),
        tqdm_class=_silent_bars(on_bytes),
    )
    # Other files may be the same weights in another precision, so this name comes first, as in
    # `find_shards`. config.json is asked for since the hub's library warns of patterns that match
    # nothing.
    folder = fetch([SINGLE, "config.json"])
    return folder if os.path.isfile(folder / SINGLE) else fetch(names or ["*.safetensors"])


def _not_there(path: Path) -> UserError:
    """Return the error for a name that is neither a path here nor a hub id, with a similar name."""
    expected = "file" if path.suffix.lower() == ".gguf" else "model directory"
    beside = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    if meant := did_you_mean(path.name, beside[:_MOST_NAMES]):
        return UserError(f"no {expected} at {path}{meant}")
    return UserError(f"no {expected} at {path}: check the path, or give a hub id such as org/name")


def shard_names(directory: Path, weight_map: Any) -> list[str]:
    """Return the weight files that an index names. Raises `UserError` for what is no index."""
    is_usable = isinstance(weight_map, dict) and bool(weight_map)
    if not is_usable or not all(isinstance(file, str) for file in weight_map.values()):
        raise damaged(f"{directory}: {INDEX} has no usable weight_map", directory)
    names = sorted(set(weight_map.values()))
    check_shard_names(directory, names)
    return names


def is_shard_name(name: object) -> bool:
    """Return True if a name read from a file is of a safetensors file in the same folder."""
    is_name = isinstance(name, str) and Path(name).name == name and "\0" not in name
    return is_name and str(name).endswith(".safetensors")


def check_shard_names(directory: Path, names: Iterable[str]) -> None:
    """Raise `UserError` for names in an index that leave its folder or are not safetensors."""
    for name in names:
        if not is_shard_name(name):
            complaint = f"the index names {name!r}, which is not a file beside it"
            raise damaged(f"{directory}: {complaint}", directory)
