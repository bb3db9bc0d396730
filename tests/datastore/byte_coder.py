"""A tokenizer that needs no files: a byte is a token. And stores made with it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from offload.datastore import build as building
from offload.datastore.build import Coder
from offload.datastore.store import Store

VOCABULARY = {f"<{byte}>": byte for byte in range(256)}
CODER = Coder("bytes", VOCABULARY, lambda texts: (list(text.encode()) for text in texts))
TEXTS = ["the cat sat on the mat", "the dog sat on the cat", "a cat may look at a king", "on the mat the cat sat"]


def build(path: Path, texts: Iterable[str] = TEXTS, *, coder: Coder = CODER) -> Store:
    return building.build(path, texts, coder, 1 << 40, ignored)


def append(path: Path, texts: Iterable[str], *, coder: Coder = CODER) -> Store:
    return building.append(path, texts, coder, 1 << 40, ignored)


def ignored(*_: object) -> None:
    """No one asks how far it is."""


def of_small_chunks(patch: pytest.MonkeyPatch, room: int) -> None:
    """Chunks of this many tokens and separators, whatever memory there is."""
    patch.setattr(building, "chunk_room", lambda *_: room)


def failing(act: Callable[..., object], number: int, *, error: BaseException) -> Any:
    """Return the function, but its so-many-th call fails."""
    count = iter(range(1, 1 << 30))

    def call(*arguments: Any) -> object:
        if next(count) == number:
            raise error
        return act(*arguments)

    return call
