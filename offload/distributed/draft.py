"""The draft rank: it guesses ahead all the time, and answers the head with guesses that are ready.

    DRAFT    Reset, Grow, Accept from the head; Grow is answered once, soon: with fewer nodes if
             more would take long
    RESULT   Guessed, where a head waits for stages, too

Its tree (`DraftTree`) is kept from step to step, and hands out its best nodes one after the other.
Every node that was run has children with the chances p = softmax(beta u), as in
`drafting/dynamic.py`; f is the product of p below the root. When tokens are accepted the root moves
down. Rows below it stay in the cache; all others are dropped. Since f never rises along a path, a
node is certain to be the next best once every node with a larger f was run. Only such nodes are
handed out.

Invariants: every Grow gets one answer. Running ahead changes how soon it comes, not which nodes it
has, nor their order; parents come before their children.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from offload.checkpoint.sizes import config_sizes
from offload.distributed.orders import HEAD, Accept, DraftNodeUpdate, Grow, Guessed, Reset
from offload.distributed.runs import RowNode, UncommittedRows
from offload.distributed.service import Acts, obey
from offload.distributed.transport import Channel, Transport
from offload.drafting.base import DraftCalibration, PerKindLRU
from offload.drafting.draft_model import Draft
from offload.drafting.dynamic import ranked_children
from offload.drafting.static import point_mass_scores
from offload.engine.build import resident_model
from offload.engine.cache_pool import num_shared
from offload.engine.setup import Setup
from offload.model.tree_model import TreeModel
from offload.sampling.sampler import Sampler
from offload.trees.topology import GrownNode, grow_best_first

_ROWS_PER_PASS = 8  # most nodes of an answer


@dataclass(slots=True, eq=False)
class DraftNode(RowNode):
    """A guess of the draft; a node that was run has a row."""

    log_f: float = 0.0  # chance of its path below the text's first root
    number: int | None = None  # the head's number of it; None until the head has it
    children: "list[DraftNode] | None" = None  # by falling chance; None until it is run
    score_V: Tensor | None = None  # key by which nodes are ranked


class DraftTree:
    """A resident draft model, its cache of one text, and the tree below the last accepted token.

    The cache has room for `context` committed tokens, and `num_rows` of the tree, its `capacity`.
    The root is the newest committed token, whose path begins every other.
    """

    def __init__(self, model: TreeModel, vocab_size: int, context: int, num_rows: int) -> None:
        self._cache = model.new_cache(context + num_rows)
        self._draft = Draft(model, vocab_size, self._cache)
        self.vocab_size = vocab_size
        self._context = context
        self.capacity = num_rows
        self._tokens = list[int]()

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def begin(self, tokens: Sequence[int], sampler: Sampler, calibration: DraftCalibration) -> None:
        """Begin a text; the part that it shares with the last one is not run again.

        `tokens` are committed ones, at least one; `calibration` learns from those that follow.
        """
        self._cache.clear(num_shared(self._tokens, tokens[:-1]))
        self._tokens = list(tokens)
        self._sampler = sampler
        self._calibration = calibration
        self.root = DraftNode(tokens[-1], len(tokens) - 1, number=0)
        self._rows = UncommittedRows[DraftNode]()
        self._numbers = count(1)
        self._news = list[tuple[DraftNode, int]]()

    def accept(self, tokens: Sequence[int]) -> None:
        """Move the root down to the last of these tokens; unguessed ones are new nodes."""
        path = list[DraftNode]()
        for token in tokens:
            if self.root.score_V is not None:
                self._calibration.learn(self.root.score_V[None], torch.tensor([token]))
            self.root = self._child(token)
            self.root.parent = None
            path.append(self.root)
        self._tokens += tokens
        self._cache.commit(*self._rows.commit(path, self._is_below_root))

    def best(
        self, num_nodes: int, least_f: float, least_p: float
    ) -> tuple[list[DraftNode], list[DraftNode]]:
        """Return the best certain nodes that the head does not have, and nodes to run to find more."""
        nodes = list[DraftNode]()
        to_run = list[DraftNode]()
        num_seen = 0
        most_to_run = min(_ROWS_PER_PASS, self.capacity - len(self._rows))
        for node in self._in_order(least_f, least_p):
            if node.number is None:
                num_seen += 1
                nodes += [] if to_run else [node]
            if num_seen == num_nodes:  # no child of the last one can be better
                break
            if node.children is None and (
                node is self.root or (most_to_run > 0 and node.position < self._context)
            ):
                to_run.append(node)
                if len(to_run) >= most_to_run:
                    break
        return nodes, to_run

    def _in_order(self, least_f: float, least_p: float) -> Iterator[DraftNode]:
        """Return the root, then all known nodes within these bounds by falling f."""
        least_log_f = self.root.log_f + (math.log(least_f) if least_f > 0 else -math.inf)

        def child(node: GrownNode[DraftNode], rank: int) -> tuple[float, DraftNode] | None:
            children = node.item.children or ()
            candidate = children[rank] if rank < len(children) else None
            if candidate is None or candidate.p < least_p or candidate.log_f < least_log_f:
                return None
            return candidate.log_f, candidate

        return (node.item for node in grow_best_first(self.root, child, self.root.log_f))

    def run(self, nodes: Sequence[DraftNode]) -> None:
        """Score nodes whose parents were run, in one pass; the root is run alone."""
        is_root = nodes[0] is self.root
        logits_WV = self._draft.catch_up(self._tokens) if is_root else self._run_rows(nodes)
        score_WV = point_mass_scores(
            logits_WV, self._sampler, [node.position + 1 for node in nodes]
        ).float()
        log_p_WV, token_WK = ranked_children(score_WV, self._calibration.exponent)
        log_p_WK = log_p_WV.gather(1, token_WK)
        columns = (nodes, score_WV, log_p_WK.tolist(), token_WK.tolist())
        for node, score_V, log_p_K, token_K in zip(*columns, strict=True):
            node.score_V = score_V.clone()  # a view would keep all rows of the pass in memory
            node.children = [
                DraftNode(token, node.position + 1, node, math.exp(log_p), node.log_f + log_p)
                for log_p, token in zip(log_p_K, token_K, strict=True)
                if log_p > -math.inf
            ]

    def tell(self, nodes: Sequence[DraftNode]) -> list[DraftNodeUpdate]:
        """Return accepted tokens that the head lacks, then these nodes, with numbers."""
        news = self._news
        self._news = []
        for node in nodes:
            assert node.parent is not None and node.parent.number is not None, (
                "a parent is told before its children"
            )
            node.number = next(self._numbers)
            news.append((node, node.parent.number))
        return [
            DraftNodeUpdate(self._number_of(node), parent, node.token, node.p)
            for node, parent in news
        ]

    def _run_rows(self, nodes: Sequence[DraftNode]) -> Tensor:
        sees_WU = torch.from_numpy(self._rows.add(nodes))
        position_U = torch.tensor([node.position for node in self._rows.nodes])
        return self._draft.run(torch.tensor([node.token for node in nodes]), position_U, sees_WU)

    def _child(self, token: int) -> DraftNode:
        """Return a child of the root that the head has, or is about to get."""
        child = next((node for node in self.root.children or () if node.token == token), None)
        child = child or DraftNode(token, self.root.position + 1, log_f=self.root.log_f)
        if child.number is None:
            child.number = next(self._numbers)
            self._news.append((child, self._number_of(self.root)))
        return child

    def _is_below_root(self, node: DraftNode) -> bool:
        above = node.parent
        while above is not None and above is not self.root:
            above = above.parent
        return above is not None

    @staticmethod
    def _number_of(node: DraftNode) -> int:
        assert node.number is not None, "it was told, or is among the news"
        return node.number


_MOST_PASSES = 4  # most passes for one answer that has a node
_ANSWER = 8  # nodes that are prepared before the head asks
# one node of this many rows may be run before the head asks; the others are kept for answers
_AHEAD = 2


def load_draft(
    setup: Setup, context: int, num_rows: int, on_pass: Callable[[], None] = lambda: None
) -> DraftTree:
    """Return the tree of the run's draft, read into memory; the sizes are those of `DraftTree`.

    `on_pass` is called when a pass begins.
    """
    assert setup.files.draft is not None, "there is one to load"
    model = resident_model(setup.files.draft, setup.dtype, on_note=setup.hooks.on_note)
    model.meta_model.register_forward_pre_hook(lambda *_: on_pass())
    vocab_size = config_sizes(setup.files.target)["vocab_size"]
    return DraftTree(model, vocab_size, context, num_rows)


def serve_draft(transport: Transport, tree: DraftTree) -> None:
    """Draft until the head says stop. Raises a pass's errors, and `RankError` for a lost head."""
    service = _DraftService(transport, tree)
    acts: Acts = {Reset: service.begin, Accept: service.accept, Grow: service.grow}
    obey(transport, HEAD, Channel.DRAFT, acts, between=service.step)


class _DraftService:
    """One tree, and the head's open request."""

    def __init__(self, transport: Transport, tree: DraftTree) -> None:
        self._transport = transport
        self._tree = tree
        self._calibration = PerKindLRU[Hashable, DraftCalibration](DraftCalibration)
        self._asked: Grow | None = None
        self._num_passes = 0  # bounds of the answer

    def begin(self, order: Reset) -> None:
        if self._asked is not None:  # the root that the head asked about no longer exists
            self._answer([])
        if not order.tokens:
            raise ValueError("a text begins with a token")
        calibration = self._calibration[order.sampling.kind]
        sampler = Sampler(order.sampling, self._tree.vocab_size)
        self._tree.begin(order.tokens, sampler, calibration)

    def accept(self, order: Accept) -> None:
        self._tree.accept(order.tokens)

    def grow(self, order: Grow) -> None:
        if self._asked is not None:
            raise ValueError("a draft is asked one question at a time")
        self._asked = order
        self._num_passes = 0

    def step(self) -> bool:
        """Answer, or run one pass; return False if there is nothing to do."""
        asked = self._asked
        tree = self._tree
        if asked is None:
            room = tree.capacity // _AHEAD - tree.num_rows
            _, to_run = tree.best(_ANSWER, 1 / tree.capacity, 0.0)
            to_run = to_run[: max(0, room)]
        else:
            nodes, to_run = tree.best(asked.num_nodes, *asked.least)
            is_late = self._num_passes >= _MOST_PASSES and bool(nodes)
            if len(nodes) == asked.num_nodes or not to_run or is_late:
                self._answer(tree.tell(nodes))
                return True
            self._num_passes += 1
        if to_run:
            tree.run(to_run)
            self._transport.note_work("draft", is_under_way=False)
        return bool(to_run)

    def _answer(self, nodes: list[DraftNodeUpdate]) -> None:
        self._asked = None
        self._transport.send(HEAD, Channel.RESULT, Guessed(nodes))
