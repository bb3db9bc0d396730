"""The run table: runs that the head of a pipeline has ordered, and their draws.

Guesses are nodes of one tree. A run is a group of them, rows that pass the stages together. Several
runs are on their way at once, each building on rows of earlier runs. Uncommitted rows lie behind
each other in every stage's cache, in the order in which they were issued. PipeInfer (2407.11798)
gives every run a private range of the cache and copies; here a row's ancestors are its partition,
and one operation keeps, drops and renumbers rows.

    stage's cache     committed: 0 .. P     uncommitted: 0 .. U       run 6: "on"       run 8: "mat" "rug"
                    [ the   cat   sat    |  on   a   mat  rug  hat ]  run 7: "a"        run 9: "hat"
                                            0    1    2    3    4
                                            |--> a -> mat       |     "on" is the root; "a" is drawn after it:
                                            |     '------------>'     Commit path 0 1, kept 2 4
                                            '--> rug
                    [ the   cat   sat   on   a   |   mat  hat      ]  P grows by 2, U = 2, "a" is the root, run 8
                                                      0    1          is needed for "mat", "rug" is forgotten

The root is the newest token that was emitted; its draw is what all ranks wait for. Once it has
arrived, the child with that token is the root, and all that does not lie below is dead. A child
that was not guessed goes into the next run first. A run without a live row is dead: cancelled or
not, its rows are never kept.

Invariants: stages do what they are told in order, and the head renumbers when it *sends*, so at the
same place of the sequence all caches have the same P and U, whatever is on its way. A row sees
exactly its path. A live run is never among the dead ones, since what is dead stays dead: the root
never moves back. f never rises along a path, and ties go to the node found first, so the best nodes
contain their parents.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from offload.distributed.orders import RunOrder, packed


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
    """The nodes that a cache's uncommitted rows hold, in their order; each sees its path's rows.

    With it the head knows the contents of every stage's cache, and a draft those of its own.
    """

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
        kept_nodes = list[Node]()
        for node in self.nodes:
            if node.row is not None and is_kept(node):
                kept.append(node.row)
                node.row = len(kept_nodes)
                kept_nodes.append(node)
        self.nodes = kept_nodes
        return committed, kept


@dataclass(slots=True, eq=False)
class RunNode(RowNode):
    """A guess or an emitted token; one that was issued has a row."""

    f: float = 1.0  # chance of its path below the root
    serial: int = 0  # number in order of creation
    run: int | None = None  # None: not issued yet
    drawn: int | None = None  # the target's token after it
    is_dead: bool = False
    children: "dict[int, RunNode]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Run:
    nodes: tuple[RunNode, ...]
    is_speculative: bool  # True if it has nodes besides the root
    is_dead: bool = False


class RunStep(NamedTuple):
    """Consequences of draws: tokens to emit, one Commit, and runs to stop."""

    tokens: list[int]  # emitted, at least one
    path: list[int]  # rows that are committed, by their old numbers
    kept: list[int]  # rows that stay uncommitted, in their new order, by their old numbers
    dead: list[int]  # runs on their way that are no longer needed, each named once


class RunTable:
    """Nodes, and runs on their way, of one text after the other.

    The root is the node whose draw all ranks wait for, `num_committed` is P.
    """

    def __init__(self, credits: int, capacity: int) -> None:
        self._credits = credits  # most runs on their way, including dead ones that are not back yet
        self._capacity = capacity  # uncommitted rows that stages have room for; at least 1
        self._next_run = 0
        self._num_found = 0
        self._on_way: dict[int, _Run] = {}
        self.begin(0, 0, 0)

    def begin(self, token: int, position: int, end: int, num_kept: int = 0) -> None:
        """Begin a text of at most `end` positions: `token` is the last of its prompt.

        `num_kept` positions are committed already. Runs still on their way are dead.
        """
        for run in self._on_way.values():
            run.is_dead = True
        self.root = RunNode(token, position)
        self._end = end
        self.num_committed = num_kept
        self._nodes = {0: self.root}
        self._most_nodes = 1000
        # guesses not issued yet
        self._open: list[RunNode] = []
        self._rows = UncommittedRows[RunNode]()

    def new_run(self) -> int:
        """Return the number of a new run, larger than all before."""
        self._next_run += 1
        return self._next_run - 1

    def commit_prompt(self, run: int, num_rows: int) -> None:
        """Note a run of the prompt, whose rows are committed at once; the last one is drawn."""
        self.num_committed += num_rows
        if self.num_committed <= self.root.position:
            return
        self.root.run = run
        self._on_way[run] = _Run((self.root,), is_speculative=False)

    @property
    def num_rows(self) -> int:
        """U: uncommitted rows in the stages' caches once they have done all orders so far."""
        return len(self._rows)

    @property
    def room(self) -> int:
        """Rows that guesses may take; one is left for the next root."""
        return max(0, self._capacity - self.num_rows - 1)

    @property
    def num_on_way(self) -> int:
        return len(self._on_way)

    @property
    def has_credit(self) -> bool:
        return self.num_on_way < self._credits

    @property
    def speculates(self) -> bool:
        return any(run.is_speculative and not run.is_dead for run in self._on_way.values())

    @property
    def is_complete(self) -> bool:
        return self.root.position + 1 >= self._end

    @property
    def alive(self) -> list[int]:
        return [number for number, run in self._on_way.items() if not run.is_dead]

    def offer(self, number: int, parent_number: int, token: int, p: float) -> RunNode | None:
        """Add a `guess` by the draft's own numbers, unless its parent is unknown or dead."""
        parent = self._nodes.get(parent_number)
        if parent is None or parent.is_dead:
            return None
        node = self.guess(parent, token, p)
        if (known := node or parent.children.get(token)) is not None:
            self._nodes[number] = known
        return node

    def guess(self, parent: RunNode, token: int, p: float) -> RunNode | None:
        """Return a new node with the chance p among its siblings; None if it is of no use."""
        if token in parent.children or not self.root.position <= parent.position < self._end - 2:
            return None
        # NaN counts as a chance of 0: f must not rise
        node = self._new_node(token, parent, min(1.0, max(0.0, p)))
        self._open.append(node)
        return node

    def best(self, count: int, least_f: float = 0.0) -> list[RunNode]:
        """Return the likeliest guesses not issued yet, as many as there is room for, parents first."""
        worth = (node for node in self._open if node.f >= least_f)
        return heapq.nsmallest(
            min(count, self.room), worth, key=lambda node: (-node.f, node.serial)
        )

    def issue(self, nodes: Sequence[RunNode]) -> RunOrder:
        """Issue a run of these nodes, each after its parent, the root first; it takes a credit."""
        assert self.has_credit and len(nodes) + self.num_rows <= self._capacity, "no room for a run"
        run = self.new_run()
        for node in nodes:
            assert node.parent is None or node.parent.run is not None, "a child before its parent"
            node.run = run
        self._open = [node for node in self._open if node.run is None]
        self._on_way[run] = _Run(
            tuple(nodes), is_speculative=any(node is not self.root for node in nodes)
        )
        tokens = [node.token for node in nodes]
        positions = [node.position for node in nodes]
        sees = packed(self._rows.add(nodes))
        return RunOrder(run, tokens, positions, sees, num_drawn=len(nodes))

    def drawn(self, number: int, is_dead: bool, tokens: Sequence[int]) -> None:
        """Note a run that is back, with its draws. Raises `ValueError` for one not asked for."""
        run = self._on_way.pop(number, None)
        if run is None:
            if tokens:
                raise ValueError(f"run {number} is not on its way")
            # a run of a prompt draws nothing
            return
        if run.is_dead:
            return
        if is_dead or len(tokens) != len(run.nodes):
            raise ValueError(
                f"run {number} came back with {len(tokens)} draws of {len(run.nodes)}, and is needed"
            )
        for node, token in zip(run.nodes, tokens, strict=True):
            node.drawn = token

    def walk(self) -> RunStep | None:
        """Emit draws that are there, if any; rows are renumbered, so a Commit must be sent next."""
        passed = [self.root]
        tokens = list[int]()
        while passed[-1].drawn is not None:
            tokens.append(passed[-1].drawn)
            passed.append(self._descend(passed[-1], tokens[-1]))
        if not tokens:
            return None
        self.root = passed[-1]
        self.root.parent = None
        self._renormalise()
        self._forget()
        path, kept = self._rows.commit(passed, lambda node: not node.is_dead)
        self.num_committed += len(path)
        return RunStep(tokens, path, kept, self._newly_dead())

    def abandon(self) -> list[int]:
        """Mark all runs as dead; return those that were needed, except the root's."""
        dead = self.alive
        for number in dead:
            self._on_way[number].is_dead = True
        return [number for number in dead if number != self.root.run]

    def _new_node(self, token: int, parent: RunNode, p: float) -> RunNode:
        self._num_found += 1
        node = RunNode(token, parent.position + 1, parent, p, parent.f * p, self._num_found)
        parent.children[token] = node
        return node

    def _descend(self, root: RunNode, token: int) -> RunNode:
        """Return the child that was drawn; its siblings die with everything below them."""
        child = root.children.get(token) or self._new_node(token, root, 1.0)
        dying = [node for node in root.children.values() if node is not child]
        while dying:
            node = dying.pop()
            node.is_dead = True
            dying += node.children.values()
        # kept, because the draft may refer to it until it learns of the draw
        root.children = {token: child}
        return child

    def _renormalise(self) -> None:
        self.root.f = 1.0
        below = [self.root]
        while below:
            node = below.pop()
            for child in node.children.values():
                child.f = node.f * child.p
                below.append(child)

    def _forget(self) -> None:
        """Drop dead guesses, and from time to time the numbers of dead nodes."""
        self._open = [node for node in self._open if not node.is_dead and node is not self.root]
        if len(self._nodes) > self._most_nodes:
            self._nodes = {number: node for number, node in self._nodes.items() if not node.is_dead}
            self._most_nodes = 2 * len(self._nodes) + 1000

    def _newly_dead(self) -> list[int]:
        """Mark and return runs without a live node; those of passed nodes are back already."""
        dead = [
            number
            for number in self.alive
            if all(node.is_dead for node in self._on_way[number].nodes)
        ]
        for number in dead:
            self._on_way[number].is_dead = True
        return dead
