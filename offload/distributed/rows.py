"""The uncommitted rows of a cache, and the nodes of a tree that they hold.

With it the head knows the contents of every stage's cache, and a draft those of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class RowNode:
    """A token after a path."""

    token: int
    position: int
    parent: Self | None = None
    p: float = 1.0  # its chance among its siblings, as drafted
    # index among the uncommitted rows; None before it is there and once it is committed
    row: int | None = field(default=None, init=False)


Node = TypeVar("Node", bound=RowNode)


class UncommittedRows(Generic[Node]):
    """Nodes in the order of their rows, each of which sees the rows of its path."""

    def __init__(self) -> None:
        self.nodes = list[Node]()

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, nodes: Sequence[Node]) -> NDArray[np.bool_]:
        """Give nodes the next rows, parents first; return which rows they see, (W, U)."""
        for row, node in enumerate(nodes, len(self)):
            node.row = row
        self.nodes += nodes
        sees_WU = np.zeros((len(nodes), len(self)), dtype=bool)
        for sees_U, node in zip(sees_WU, nodes, strict=True):
            above: Node | None = node
            while above is not None and above.row is not None:
                sees_U[above.row] = True
                above = above.parent
        return sees_WU

    def commit(
        self, path: Sequence[Node], is_kept: Callable[[Node], bool]
    ) -> tuple[list[int], list[int]]:
        """Commit the rows of a path, and keep others; return both's old rows, in their new order."""
        committed = [node.row for node in path if node.row is not None]
        for node in path:
            node.row = None
        kept = list[int]()
        stay = list[Node]()
        for node in self.nodes:
            if node.row is not None and is_kept(node):
                kept.append(node.row)
                node.row = len(stay)
                stay.append(node)
        self.nodes = stay
        return committed, kept
