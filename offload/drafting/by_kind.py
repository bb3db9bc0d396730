"""What is learned for every kind of sampling apart: what is certain at temperature 0 is not at 1.

A server's clients choose their settings freely, so only the kinds that were asked for last are kept. Invariant: what is
forgotten shapes later trees, never what is emitted.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

MOST_KINDS = 256
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByKind(OrderedDict[K, V]):
    """By kind; one that is not known begins with what `new` gives."""

    def __init__(self, new: Callable[[], V]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, kind: K) -> V:
        while len(self) >= MOST_KINDS:
            self.popitem(last=False)
        self[kind] = self._new()
        return self[kind]

    def __getitem__(self, kind: K) -> V:
        value = super().__getitem__(kind)
        self.move_to_end(kind)
        return value
