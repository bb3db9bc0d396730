"""A pipeline without threads or sleeping: a heap of events, stages and a draft that answer after random delays.

The head is the real one; its transport runs the events while it waits. The target's draw is a function of the path
that a row *sees* in the last stage's cache, so a wrong ancestor, a wrong number or a row that was never computed shows.
Every stage compares its cache with what the head believed when it sent the order.
"""

import hashlib
import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from offload.distributed.head import Head, RowPrice, RunEvent
from offload.distributed.orders import (
    Accept,
    Cancel,
    Commit,
    DraftNodeUpdate,
    Drawn,
    Grow,
    Guessed,
    Order,
    Reset,
    RunOrder,
)  # fmt: skip
from offload.distributed.transport import Channel
from offload.rank_roles import PipelineOptions, Roles
from offload.sampling_options import Sampling

VOCABULARY = 7
Way = tuple[int, int, Channel]  # sender, receiver, channel
Path = tuple[int, ...]


def target(path: Sequence[int]) -> int:
    """The token after a path; every token before it matters."""
    return hashlib.sha256(bytes(path)).digest()[0] % VOCABULARY


def own_text(prompt: Sequence[int], end: int) -> list[int]:
    """What the target alone writes."""
    tokens = list(prompt)
    while len(tokens) < end:
        tokens.append(target(tokens))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Speeds:
    """Seconds, each drawn afresh from [0, 2 x]; `is_random` False takes x itself."""

    hop_s: float = 1.0
    run_s: float = 3.0  # of a stage
    row_s: float = 0.5  # ... for every row more
    draft_s: float = 1.0  # of an answer
    is_random: bool = True


class World:
    """The head's transport, and everything behind it."""

    def __init__(self, roles: Roles, speeds: Speeds, seed: int, accuracy: float = 0.7) -> None:
        self.rank, self.num_ranks, self.now_s = 0, 1 + max(*roles.stages, roles.draft or 0), 0.0
        self.random, self.speeds = random.Random(seed), speeds
        self.boxes: dict[Way, deque[Order]] = defaultdict(deque)
        self.sent: list[tuple[int, Channel, Order]] = []
        self.events: list[RunEvent] = []
        self.believed: list[Believed] = []  # by order on DATA
        self.most_on_way, self.cancelled = 0, set[int]()
        self._run_of_row = list[int]()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._last_s = itertools.count(), defaultdict[Way, float](float)
        self._services: dict[Way, Callable[[Order], None]] = {}
        self.stages = [_Stage(self, roles, place) for place in range(len(roles.stages))]
        for stage in self.stages:
            self._services[stage.source, stage.rank, Channel.DATA] = stage.arrive
            self._services[0, stage.rank, Channel.CONTROL] = stage.control
        if roles.draft is not None:
            self.draft = _Draft(self, roles.draft, accuracy)
            self._services[0, roles.draft, Channel.DRAFT] = self.draft.arrive

    def post(self, way: Way, order: Order) -> None:
        """Orders of one way arrive in order."""
        self._last_s[way] = max(self._last_s[way], self.now_s + self.some(self.speeds.hop_s))
        take = self._services.get(way, self.boxes[way].append)
        self.at(self._last_s[way], lambda: take(order))

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._count), act))

    def some(self, mean_s: float) -> float:
        return self.random.uniform(0, 2 * mean_s) if self.speeds.is_random else mean_s

    def send(self, to: int, channel: Channel, order: Order) -> None:
        self.sent.append((to, channel, order))
        self._check_order(order)
        table = self.head._table
        self.most_on_way = max(self.most_on_way, table.num_on_way)
        assert table.num_on_way <= table._credits and table.num_rows <= table._capacity
        self.post((0, to, channel), order)

    def _check_order(self, order: Order) -> None:
        """A run that was cancelled keeps no row from then on; stages may still have older orders before them."""
        if isinstance(order, Cancel):
            self.cancelled |= set(order.runs)
        elif isinstance(order, Reset):
            self._run_of_row = []
        elif isinstance(order, RunOrder):
            self._run_of_row += [order.number] * len(order.tokens)
        elif isinstance(order, Commit):
            path, kept = ([self._run_of_row[row] for row in rows] for rows in (order.path, order.kept))
            assert not self.cancelled & {*path, *kept}, "a row of a cancelled run is kept"
            self._run_of_row = kept
        if isinstance(order, Reset | RunOrder | Commit) and self.sent[-1][1] == Channel.DATA:
            self.believed.append(believed(self.head))

    def wait_any(self, ways: Sequence[tuple[int, Channel]]) -> tuple[int, Channel]:
        while True:
            for source, channel in ways:
                if self.boxes[source, 0, channel]:
                    return source, channel
            self.step()

    def step(self) -> None:
        assert self._heap, "every process waits"
        self.now_s, _, act = heapq.heappop(self._heap)
        act()

    def run_out(self) -> None:
        """Everything that is on its way happens."""
        while self._heap:
            self.step()

    def poll(self, source: int, channel: Channel) -> Order | None:
        box = self.boxes[source, 0, channel]
        return box.popleft() if box else None


class Believed(NamedTuple):
    """What the head takes a stage's cache for, once it has done an order."""

    num_committed: int
    num_rows: int | None  # None while the prompt is read, whose rows are in no table
    paths: dict[int, Path]  # of live uncommitted rows, below the committed positions


def believed(head: Head) -> Believed:
    table, paths = head._table, dict[int, Path]()
    stack = [(table.root, ())]
    while stack:
        node, above = stack.pop()
        path = above if node.row is None else (*above, node.token)
        if node.row is not None:
            paths[node.row] = path
        stack += [(child, path) for child in node.children.values()]
    return Believed(table.num_committed, None if table.root.run is None else table.num_rows, paths)


@dataclass
class _Row:
    token: int
    position: int
    sees: list[int]
    is_computed: bool


class _Stage:
    """A stage's cache, without a model."""

    def __init__(self, world: World, roles: Roles, place: int) -> None:
        self.world, self.rank, self.place = world, roles.stages[place], place
        self.source = roles.stages[place - 1] if place else 0
        self.next_rank = None if place + 1 == len(roles.stages) else roles.stages[place + 1]
        self.committed, self.rows = list[_Row](), list[_Row]()
        self.dead = set[int]()
        self.num_computed = self.num_orders = 0
        self._queue, self._now = deque[Order](), None

    def control(self, order: Order) -> None:
        self.dead |= set(order.runs) if isinstance(order, Cancel) else set()
        if isinstance(self._now, RunOrder) and self._now.number in self.dead:
            self._finish(self._now)  # between two layers

    def arrive(self, order: Order) -> None:
        self._queue.append(order)
        self._next()

    def _next(self) -> None:
        if not self._queue or self._now is not None:
            return
        order = self._now = self._queue.popleft()
        is_work = isinstance(order, RunOrder) and not order.is_dead and order.number not in self.dead
        speeds = self.world.speeds
        work_s = speeds.run_s + speeds.row_s * (len(order.tokens) - 1) if is_work else 0.0
        self.world.at(self.world.now_s + self.world.some(work_s), lambda: self._finish(order))

    def _finish(self, order: Order) -> None:
        if self._now is not order:
            return  # it was stopped before
        self._now = None
        if isinstance(order, RunOrder):
            order = self._run(order)
        elif isinstance(order, Commit):
            self._commit(order)
        elif isinstance(order, Reset):
            del self.committed[order.num_kept :]
            assert all(row.is_computed for row in self.committed), "a position is kept that was never computed"
            self.rows = []
        self._compare()
        if self.next_rank is not None:
            self.world.post((self.rank, self.next_rank, Channel.DATA), order)
        self._next()

    def _compare(self) -> None:
        """The cache is what the head believed when it sent this order."""
        if self.num_orders < len(self.world.believed):
            head = self.world.believed[self.num_orders]
            assert len(self.committed) == head.num_committed, "P differs from the head's"
            assert head.num_rows in (None, len(self.rows)), "U differs from the head's"
            for row, path in head.paths.items():
                assert tuple(self.rows[seen].token for seen in self.rows[row].sees) == path, "a row is another's"
        self.num_orders += 1

    def _run(self, order: RunOrder) -> RunOrder:
        is_dead = order.is_dead or order.number in self.dead
        lo, num_rows = len(self.rows), len(order.tokens)
        _, _, sees_WU = order.rows(lo)
        for token, position, sees_U in zip(order.tokens, order.positions, sees_WU, strict=True):
            self.rows.append(_Row(token, position, sees_U.nonzero()[:, 0].tolist(), not is_dead))
        self.num_computed += num_rows * (not is_dead)
        if self.next_rank is None:
            drawn = [] if is_dead else [self._draw(row) for row in self.rows[len(self.rows) - order.num_drawn :]]
            self.world.post((self.rank, 0, Channel.RESULT), Drawn(order.number, is_dead, drawn))
        return replace(order, is_dead=is_dead)

    def _draw(self, row: _Row) -> int:
        path = self.committed + [self.rows[seen] for seen in row.sees]
        if not all(node.is_computed for node in path):
            return self.world.random.randrange(-1, VOCABULARY)  # it may not be looked at
        assert [node.position for node in path] == list(range(len(path))), "a row sees something else than its path"
        return target([node.token for node in path])

    def _commit(self, order: Commit) -> None:
        path_rows, kept_rows = order.path, order.kept
        order.require_rows(len(self.rows))
        path, kept = ([self.rows[row] for row in rows] for rows in (path_rows, kept_rows))
        new_of_old = {old: new for new, old in enumerate(kept_rows)}
        for row in kept:
            row.sees = [new_of_old[seen] for seen in row.sees if seen not in path_rows]
        self.committed, self.rows = self.committed + path, kept
        assert [row.position for row in self.committed] == list(range(len(self.committed)))


@dataclass
class _Guess:
    number: int
    path: Path
    p: float
    f: float
    children: dict[int, "_Guess"] = field(default_factory=dict)
    is_announced: bool = False


class _Draft:
    """Guesses three children of every node; the likeliest is the target's own with the chance `accuracy`."""

    def __init__(self, world: World, rank: int, accuracy: float) -> None:
        self.world, self.rank, self.accuracy = world, rank, accuracy
        self._queue, self._is_busy, self._random = deque[Order](), False, random.Random(1)
        self.num_answers = 0

    def arrive(self, order: Order) -> None:
        self._queue.append(order)
        self._next()

    def _next(self) -> None:
        if self._queue and not self._is_busy:
            order, self._is_busy = self._queue.popleft(), True
            work_s = self.world.speeds.draft_s if isinstance(order, Grow) else 0.0
            self.world.at(self.world.now_s + self.world.some(work_s), lambda: self._finish(order))

    def _finish(self, order: Order) -> None:
        self._is_busy = False
        if isinstance(order, Reset):
            self._numbers, self._news = itertools.count(1), list[tuple[_Guess, int]]()
            self._root = _Guess(0, tuple(order.tokens), 1.0, 1.0, {}, True)
        elif isinstance(order, Accept):
            for token in order.tokens:
                self._descend(token)
        elif isinstance(order, Grow):
            self._answer(order.num_nodes, *order.least)
        self._next()

    def _descend(self, token: int) -> None:
        child = self._root.children.get(token)
        if child is None or not child.is_announced:
            child = child or self._made(self._root, token, 1.0)
            child.is_announced = True
            self._news.append((child, self._root.number))
        self._root, f = child, child.f
        stack = [child]
        while stack:
            node = stack.pop()
            node.f /= f
            stack += node.children.values()

    def _answer(self, num_nodes: int, least_f: float, least_p: float) -> None:
        self.num_answers += 1
        news, self._news = self._news, []
        heap = [(-self._root.f, self._root.number, self._root, -1)]
        num_found = 0
        while heap and num_found < num_nodes:
            _, _, node, parent = heapq.heappop(heap)
            if not node.is_announced:
                node.is_announced, num_found = True, num_found + 1
                news.append((node, parent))
            worth = [child for child in self._children(node) if child.f >= least_f and child.p >= least_p]
            for child in worth:
                heapq.heappush(heap, (-child.f, child.number, child, node.number))
        nodes = [DraftNodeUpdate(node.number, parent, node.path[-1], node.p) for node, parent in news]
        self.world.post((self.rank, 0, Channel.RESULT), Guessed(nodes))

    def _children(self, node: _Guess) -> list[_Guess]:
        if len(node.children) < 3:
            right = target(node.path)
            others = self._random.sample([token for token in range(VOCABULARY) if token != right], 3)
            tokens = [right, *others[:2]] if self._random.random() < self.accuracy else others
            for token, p in zip(tokens, (0.7, 0.2, 0.1), strict=True):
                if token not in node.children:
                    self._made(node, token, p)
        return list(node.children.values())

    def _made(self, parent: _Guess, token: int, p: float) -> _Guess:
        child = _Guess(next(self._numbers), (*parent.path, token), p, parent.f * p)
        parent.children[token] = child
        return child


def simulated(
    options: PipelineOptions,
    seed: int,
    *,
    roles: Roles = Roles(4, (0, 1, 2), 3),  # noqa: B008
    speeds: Speeds = Speeds(),
    accuracy: float = 0.7,
    capacity: int = 40,
    price: RowPrice = RowPrice(),  # noqa: B008
) -> World:
    """A world with its head, `world.head`."""
    world = World(roles, speeds, seed, accuracy)
    world.head = Head(
        world, roles, options, capacity, price=price, listen=world.events.append, clock=lambda: world.now_s
    )
    return world


def written(world: World, prompt: Sequence[int], end: int) -> list[int]:
    """The text that the head writes, to its end."""
    world.head.begin(prompt, Sampling(), end)
    tokens = list[int]()
    while extra := world.head.advance():
        tokens += extra
    return tokens
