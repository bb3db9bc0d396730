"""Numbers of a config that transformers counts up to while it reads them, as lists of layers and tables of labels.

A config of 10^12 layers fills memory before anything could be refused, wherever in it they are claimed. So whoever
hands a config to transformers has it looked at first. Invariant: no model that exists is refused here.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from offload.config import require

_MOST = 10_000  # layers, or labels of a classifier
_COUNT = re.compile(r"(?:layers?|labels|depth)$")
_LABELS = ("id2label", "label2id")


def check_counts(where: str, config: Mapping[str, Any]) -> None:
    """Raises `UserError` for a count, in any part of a config, that no model has."""
    for part in _parts(config):
        for key, value in part.items():
            is_count = type(value) is int and _COUNT.search(key) is not None
            size = len(value) if key in _LABELS and isinstance(value, dict) else value if is_count else 0
            require(size <= _MOST, f"{where}: {key} in config.json must be at most {_MOST}", size, "fix it")


def check_types(where: str, config: Mapping[str, Any]) -> None:
    """Raises `UserError` where a config, or a part of it, names a kind of model by anything but text."""
    for kind in (part.get("model_type") for part in _parts(config)):
        require(isinstance(kind, str | None), f"{where}: model_type in config.json must be text", kind, "fix it")


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A config and all objects in it."""
    left = [config]
    while left:
        part = left.pop()
        yield part
        left += [value for value in part.values() if isinstance(value, dict)]
