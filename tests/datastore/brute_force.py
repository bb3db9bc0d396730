"""What the suffix index and the trie must find, by looking at every place of every document."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from offload.datastore.index import Trie

Documents = Sequence[Sequence[int]]


class Found(NamedTuple):
    """The longest match and what follows its places, in any order."""

    length: int
    continuations: list[tuple[int, ...]]


def longest(documents: Documents, context: Sequence[int], most: int, least: int, length: int) -> Found:
    for size in range(min(most, len(context)), least - 1, -1):
        end = tuple(context[len(context) - size :])
        rows = [
            tuple(document[at : at + length])
            for document in map(tuple, documents)
            for at in range(size, len(document))
            if document[at - size : at] == end
        ]
        if rows:
            return Found(size, sorted(rows))
    return Found(0, [])


def rows_of(continuations_MC: np.ndarray) -> list[tuple[int, ...]]:
    """Without what stands behind a document's end, sorted."""
    return sorted(tuple(row[row >= 0].tolist()) for row in continuations_MC)


def heaviest(rows: Sequence[Sequence[int]], num_nodes: int) -> list[tuple[int, tuple[int, ...]]]:
    """Counts and paths, in order."""
    counts = Counter(tuple(row[:depth]) for row in rows for depth in range(1, len(row) + 1))
    return sorted(((count, path) for path, count in counts.items()), key=lambda n: (-n[0], len(n[1]), n[1]))[:num_nodes]


def paths_of(trie: Trie) -> list[tuple[int, tuple[int, ...]]]:
    """Counts and paths of a trie, in its order; its parents must stand first."""
    paths: list[tuple[int, ...]] = []
    for index, (parent, token) in enumerate(zip(trie.parent_R.tolist(), trie.token_R.tolist(), strict=True)):
        assert parent < index
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return list(zip(trie.count_R.tolist(), paths, strict=True))


def random_documents(rng: np.random.Generator, num_letters: int, *, most: int = 12) -> list[list[int]]:
    """Short ones of few letters, some of them empty."""
    return [rng.integers(num_letters, size=rng.integers(most)).tolist() for _ in range(rng.integers(1, 9))]
