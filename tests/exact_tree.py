"""Sequoia's dynamic program (2402.12374, Algorithm 5): the best tree for any acceptance vector, to hold others against.

The product needs no more than best-first trees of vectors that fall; that those are the best ones is what this proves.
K ranks, N nodes, D draft steps.
"""

import numpy as np

from offload.trees.topology import AcceptanceVector, Floats, Ints, Topology, check_acceptance


def optimal(p: AcceptanceVector, num_nodes: int, max_depth: int | None = None) -> Topology:
    """The best tree for ANY `p`, by the exact dynamic program (Alg. 5); no bound on the depth when it is None.

    It has exactly `num_nodes` nodes, or as many as `len(p)` ranks and `max_depth` levels can hold. O(N^2 D K) time and
    O(N D K) memory with a bound; O(N^2 K) without one.
    """
    p_K = check_acceptance(p)
    deepest = num_nodes - 1 if max_depth is None else max_depth
    num_nodes = _largest_size(p_K.size, deepest, num_nodes)
    if deepest >= num_nodes - 1:  # the bound does not bind: one table serves every depth
        value_N = _only_root(num_nodes)
        sizes_D = [_fill_depth(p_K, value_N, value_N, num_nodes)] * num_nodes
        deepest = num_nodes - 1
    else:
        _, sizes_D = fill_depths(p_K, num_nodes, deepest)
    return Topology.from_parents(_rebuild(sizes_D, num_nodes, deepest))


def _largest_size(num_ranks: int, max_depth: int, num_nodes: int) -> int:
    """`num_nodes`, or all 1 + K + K^2 + ... + K^D nodes there are if that is less."""
    size = width = 1
    for _ in range(min(max_depth, num_nodes - 1)):
        if size >= num_nodes:
            break
        width *= num_ranks
        size += width
    return min(size, num_nodes)


def _only_root(num_nodes: int) -> Floats:
    value_N = np.full(num_nodes + 1, -np.inf)
    value_N[1] = 1.0
    return value_N


def fill_depths(p_K: Floats, num_nodes: int, max_depth: int) -> tuple[Floats, list[Ints]]:
    """`value_DN`, the best F of exactly n nodes within d steps (-inf: none), and per depth its `size_KN` table."""
    value_DN = np.tile(_only_root(num_nodes), (max_depth + 1, 1))
    sizes_D = [np.zeros((0, num_nodes), dtype=np.int64)]  # depth 0 has no children to choose
    for depth in range(1, max_depth + 1):
        limit = _largest_size(p_K.size, depth - 1, num_nodes)
        sizes_D.append(_fill_depth(p_K, value_DN[depth - 1], value_DN[depth], limit))
    return value_DN, sizes_D


def _fill_depth(p_K: Floats, below_N: Floats, value_N: Floats, limit: int) -> Ints:
    """Algorithm 5 for one depth: fills `value_N` from the subtrees' `below_N`, whose sizes up to `limit` exist.

    Siblings are chosen from the last rank to the first, so that later ones exist only after earlier ones:
    rest[k][m] = max over s of p[k] * below[s] + rest[k + 1][m - s] is the best of m nodes below the ranks k, k + 1, ...
    Returns the s of every cell, `size_KN`. For a free depth `below_N` *is* `value_N`: m reads sizes up to m alone.
    """
    num_nodes, row_K = value_N.size - 1, np.arange(p_K.size)
    size_KN = np.zeros((p_K.size, num_nodes), dtype=np.int64)
    scaled_KN = np.empty((p_K.size, num_nodes))  # [k, s - 1] = p[k] * below[s]
    rest_KN = np.full((p_K.size + 1, num_nodes), -np.inf)  # [k, -1 - m], backwards: both operands are read forwards
    rest_KN[:, -1] = 0.0
    for m in range(1, num_nodes):
        top = min(m, limit)
        scaled_KN[:, top - 1] = p_K * below_N[top]
        total_KN = scaled_KN[:, :top] + rest_KN[1:, num_nodes - m : num_nodes - m + top]
        best_K = total_KN.argmax(axis=1)
        size_KN[:, m] = best_K + 1
        rest_KN[:-1, -1 - m] = total_KN[row_K, best_K]
        value_N[m + 1] = 1.0 + rest_KN[0, -1 - m]
    return size_KN


def _rebuild(sizes_D: list[Ints], num_nodes: int, max_depth: int) -> list[int]:
    """Walks the tables from the root, breadth first, which is level order; returns the parents."""
    parents, queue = [-1], [(num_nodes, max_depth)]
    for node, (size, depth) in enumerate(queue):  # grows while it is read
        remaining, rank = size - 1, 0
        while remaining:
            child_size = int(sizes_D[depth][rank, remaining])
            parents.append(node)
            queue.append((child_size, depth - 1))
            remaining, rank = remaining - child_size, rank + 1
    return parents
