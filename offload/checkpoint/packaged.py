"""The pair of models that the package carries, which runs on any machine without a network.

Its target is small; inflated it takes any size without computing anything else.
"""

from collections.abc import Callable
from pathlib import Path

from offload.checkpoint.files import BusyError, cache_folder
from offload.checkpoint.inflate import inflate
from offload.errors import UserError

PAIR = Path(__file__).parents[1] / "demo_pair"
PROMPT = '''"""Read settings from a file."""

import os


class Settings:
    """A mapping of names to values, read once.
    """

    def __init__(self, path, encoding=None):
'''


def inflated_target(
    size_bytes: int,
    progress: Callable[[int, int], None],
    source: Path = PAIR / "target",
    name: str = "demo",
) -> Path:
    """Return the packaged target, or another, inflated to about `size_bytes`.

    It is made once, then reused. Raises `UserError`.
    """
    folder = cache_folder() / f"{name}-{size_bytes // 10**6}MB"
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        return inflate(source, folder, size_bytes, progress=progress)
    except BusyError:
        raise UserError(
            "another command is making the packaged model just now: try again when it has"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write {folder} ({error.strerror}): set XDG_CACHE_HOME to another folder"
        ) from None
