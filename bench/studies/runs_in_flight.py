"""What runs in flight yield: tokens per cycle along a text that is known, with a draft that is asked anything in time.

In every cycle one run of `num_nodes` nodes begins and the one that began `num_runs` - 1 cycles ago ends, so a cycle is
what the slowest stage takes. Rules that repeat the target's draws make the text a function of the seed: which guesses
come true is looked up, nothing is decoded. The runs are chosen, drawn and dropped by the table that serves. No torch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload.ranks.runs import Node, RunTable

Path = tuple[int, ...]
Guesses = Sequence[tuple[int, float]]  # tokens after a path and their chances
Draft = Callable[[list[Path]], list[Guesses]]  # of many paths, each from the text's first token
_NO_END = 1 << 40


class FlightYield(NamedTuple):
    """Of one text."""

    num_tokens: int
    num_cycles: int
    num_dead: int  # runs that nobody needed any more when they ended
    num_ended: int  # ... among so many


def flight_yield(
    draft: Draft, prompt: Sequence[int], text: Sequence[int], num_nodes: int, num_runs: int
) -> FlightYield:
    """Cycles until so much of `text` is written after `prompt` that the next run might need what comes behind it."""
    table, everything = RunTable(num_runs, _NO_END), (*prompt, *text)
    table.begin(prompt[-1], len(prompt) - 1, _NO_END)
    table.commit_prompt(table.new_run(), len(prompt))
    table.drawn(0, False, [text[0]])
    table.walk()
    grown, on_way = _Grown(table, draft), deque[tuple[int, list[Node]]]()
    num_cycles = num_dead = num_ended = 0
    while table.root.position < len(everything) - 1:
        nodes = grown.run(everything, num_nodes)
        on_way.append((table.issue(nodes).run, nodes))
        num_cycles += 1
        if len(on_way) == num_runs:
            run, nodes = on_way.popleft()
            num_dead, num_ended = num_dead + (run not in table.alive), num_ended + 1
            table.drawn(run, False, [_draw(everything, node) for node in nodes])
            table.walk()
    return FlightYield(table.root.position - len(prompt), num_cycles, num_dead, num_ended)


def _draw(everything: Path, node: Node) -> int:
    """What comes at its position; a node beside the text is never walked through, so its draw does not matter."""
    return everything[node.position + 1] if node.position + 1 < len(everything) else -1


class _Grown:
    """Guesses of an ideal draft, as far as the best ones need."""

    def __init__(self, table: RunTable, draft: Draft) -> None:
        self._table, self._draft = table, draft
        self._closed = list[Node]()  # whose children are not known

    def run(self, everything: Path, num_nodes: int) -> list[Node]:
        """The next run: the root, if it was not issued, and the best guesses."""
        root = self._table.root
        if root.parent is None and not root.children and root not in self._closed:
            self._closed.append(root)
        count = num_nodes - (root.run is None)
        while opened := self._worth_opening(count):
            paths = [_path(everything, root, node) for node in opened]
            for node, guesses in zip(opened, self._draft(paths), strict=True):
                found = (self._table.guess(node, token, p) for token, p in guesses)
                self._closed += [guess for guess in found if guess is not None]
        return [*([root] if root.run is None else []), *self._table.best(count)]

    def _worth_opening(self, count: int) -> list[Node]:
        """Nodes whose children could be among the best, some at a time; from now on they are known."""
        best = self._table.best(count)
        least_f = best[-1].f if len(best) == count else 0.0
        first = self._table.root.position  # what was passed before it was opened is not a guess any more
        closed = [node for node in self._closed if not node.is_dead and node.position >= first]
        self._closed = sorted(closed, key=lambda node: -node.f)
        opened = [node for node in self._closed[: max(1, count // 4)] if node.f > least_f]
        self._closed = self._closed[len(opened) :]
        return opened


def _path(everything: Path, root: Node, node: Node) -> Path:
    """The tokens that lead to a node; down to the root they are the text."""
    below = list[int]()
    while node is not root:
        assert node.parent is not None
        below.append(node.token)
        node = node.parent
    return (*everything[: root.position + 1], *reversed(below))
