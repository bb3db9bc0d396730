"""Numbers of a config that transformers counts up to while it reads them, as lists of layers and tables of labels.

A config of 10^12 layers fills memory before anything could be refused, wherever in it they are claimed. So whoever
hands a config to transformers has it looked at first. Invariant: no model that exists is refused here.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from offload.config import require

_MOST_LAYERS, _MOST_LABELS = 10_000, 100_000  # classifiers of 20,000 labels are common
_LAYERS = re.compile(r"(?:(?<!per_)layers?|depth)$")  # `..._per_layer` is a size
_LABELS = ("id2label", "label2id")


def check_counts(where: str, config: Mapping[str, Any], file: str = "config.json") -> None:
    """Raises `UserError` for a count, in any part of a config, that no model has."""
    for part in objects(config):
        for key, value in part.items():
            size = len(value) if key in _LABELS and isinstance(value, dict) else value
            most = _most(str(key))  # tables that were built, and not read, have numbers for keys
            if most is not None and isinstance(size, int | float):
                require(size <= most, f"{where}: {key} in {file} must be at most {most}", size, "fix it")


def _most(key: str) -> int | None:
    """Of what is counted under this name; None for what is not."""
    if key in _LABELS or key.endswith("labels"):
        return _MOST_LABELS
    return _MOST_LAYERS if _LAYERS.search(key) else None


def check_types(where: str, config: Mapping[str, Any], file: str = "config.json") -> None:
    """Raises `UserError` where a config, or a part of it, names a kind of model by anything but text."""
    for kind in (part.get("model_type") for part in objects(config)):
        require(isinstance(kind, str | None), f"{where}: model_type in {file} must be text", kind, "fix it")


def objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of a JSON value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        own = part.values() if isinstance(part, dict) else part
        left += (one for one in own if isinstance(one, dict | list))
