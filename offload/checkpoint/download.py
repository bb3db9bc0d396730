"""What is fetched from the hub: small files by their names, then the shards that a loader reads.

Repositories also hold the same weights in other formats, and code. Invariant: no pickle and no
program is ever asked for, nothing in folders but chat templates, and all files of a model come from
one commit.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.files import hub_id_of
from offload.errors import UserError, reason

_SMALL = ("*.json", "*.jinja", "tokenizer*", "*.txt", "*.model")
SINGLE = "model.safetensors"
_PROGRAMS = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
_IN_FOLDERS = ("*/*.json", "*/tokenizer*", "*/*.txt", "*/*.model", "*/*.safetensors")
_NEVER = (*_IN_FOLDERS, "consolidated*", *_PROGRAMS)


def is_hub_id(model: str) -> bool:
    """Return whether this could name a model on the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not model.startswith(".")


def download_small(repo: str) -> Path:
    """Fetch all but the weights into the hub's cache; return the folder. Raises `UserError`."""
    return download(repo, _SMALL, ignore_patterns=list(_NEVER))


def download_shards(repo: str, small: Path, names: Sequence[str]) -> Path:
    """Fetch these weight files of the commit whose folder is `small`; return their folder."""
    return download(repo, names, revision=small.name, ignore_patterns=list(_NEVER))


def download_unindexed(repo: str, small: Path) -> Path:
    """Fetch the weights of a model without an index; return their folder.

    This is the file of the usual name, or all safetensors files where there is none. `find_shards`
    prefers that name as well: others may be the same weights in another precision.
    """
    # config.json as well: the hub's library warns of a request that matches nothing
    found = download_shards(repo, small, [SINGLE, "config.json"])
    is_single = os.path.isfile(found / SINGLE)
    return found if is_single else download_shards(repo, small, ["*.safetensors"])


def in_cache(repo: str) -> Path:
    """Return the folder that the hub's cache has for a model, complete or not; nothing is fetched.

    Raises `OSError` where there is none, and `HFValidationError` for a malformed name.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except OSError as error:
        # Newer releases know what else the repository has, and call a folder without its README.md
        # incomplete.
        found = getattr(error, "snapshot_path", None)
        if found is None:
            raise
        return Path(found)


def cached_models() -> list[str]:
    """Return the ids of the models that the hub's cache has files of, sorted."""
    from huggingface_hub.constants import HF_HUB_CACHE

    commits = (one / "commit" for one in Path(HF_HUB_CACHE).glob("*/snapshots"))
    return sorted(filter(is_hub_id, filter(None, map(hub_id_of, commits))))


def download(repo: str, wanted: Sequence[str], **options: Any) -> Path:
    """Fetch by patterns; return the folder, or the cached one offline. Raises `UserError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(repo, allow_patterns=list(wanted), **options))
    # the hub's own errors are all OSErrors but for that of a bad name
    except (OSError, HFValidationError) as error:
        raise not_on_the_hub(repo, error) from None


def not_on_the_hub(repo: str, error: Exception) -> UserError:
    """Return the error of the hub's library; the name is questioned only where the hub answered."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # the HTTP library beneath changes from release to release
    network_error = HfHubHTTPError.__bases__[0]
    # ConnectionError: the user has set the hub's library to offline
    unreached = (network_error, LocalEntryNotFoundError, ConnectionError)
    has_answered = isinstance(error, HfHubHTTPError) or not isinstance(error, unreached)
    is_around = isinstance(error, LocalEntryNotFoundError)
    why = reason((error.__cause__ if is_around else None) or error)
    if has_answered:
        what = f"{repo} is neither a directory here nor to be had from the hub ({why})"
        return UserError(f"{what}: check the name")
    what = f"{repo} is no directory here, and the hub is out of reach ({why})"
    return UserError(f"{what}: check the network, or give a folder")
