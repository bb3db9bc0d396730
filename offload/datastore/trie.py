"""The prefixes that continuations share, with how many share them: REST's choice of what to guess (2311.08252, Alg. 2).

Shapes: M continuations, C their tokens, R nodes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Trie(NamedTuple):
    """Nodes in falling order of their counts; a parent stands before its children."""

    parent_R: Ints  # index of the parent among the nodes, -1 below the root
    token_R: Ints
    count_R: Ints  # continuations that pass through the node
    num_continuations: int


def heaviest(continuations_MC: Ints, num_nodes: int) -> Trie:
    """The nodes that most continuations pass through, with all their ancestors; a row ends where it is negative.

    Of nodes with the same count the less deep comes first, then the one whose path has the lower tokens, wherever the
    two paths part. So the choice does not depend on the order of the rows.
    """
    num_rows, depth = continuations_MC.shape
    if not num_rows or not depth:
        none_R = np.empty(0, np.int64)
        return Trie(none_R, none_R, none_R, num_rows)
    is_over_MC = np.logical_or.accumulate(continuations_MC < 0, axis=1)
    sorted_CM = _sorted_rows(np.where(is_over_MC, -1, continuations_MC)).T
    # A run of rows with the same first tokens is a node; runs of one depth lie side by side, those below them behind.
    is_first_CM = np.ones((depth, num_rows), bool)
    np.logical_or.accumulate(sorted_CM[:, 1:] != sorted_CM[:, :-1], axis=0, out=is_first_CM[:, 1:])
    first = np.flatnonzero(is_first_CM)
    count = np.diff(first, append=num_rows * depth)
    run_CM = np.cumsum(is_first_CM) - 1
    token = sorted_CM.ravel()[first]
    kept = np.argsort(np.where(token < 0, 0, -count), kind="stable")[: min(num_nodes, np.count_nonzero(token >= 0))]
    parent = np.where(first < num_rows, -1, run_CM[first - num_rows])
    rank = np.full(len(first) + 1, -1)  # the last entry is the root's
    rank[kept] = np.arange(len(kept))
    return Trie(rank[parent[kept]], token[kept], count[kept], num_rows)


def _sorted_rows(rows_MC: Ints) -> Ints:
    """By the first token, then the second and so on: big-endian bytes compare in that order, and in one go."""
    keys_MC = np.ascontiguousarray(rows_MC + 1, dtype=">u4")
    order_M = np.argsort(keys_MC.view(f"S{4 * rows_MC.shape[1]}").ravel(), kind="stable")
    return rows_MC[order_M]
