"""The service of the draft rank: it guesses ahead all the time, and answers the head from what it has.

    DRAFT    RESET, GROW, ACCEPT from the head; GROW is answered once, soon: with fewer nodes if more would take long
    RESULT   TREE, where a head waits for stages, too; ERROR

Invariant: every GROW gets one TREE, and what is told is the tree's best, in their order (`draft_tree.py`); how far the
tree was run ahead changes how soon.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from offload.config import Sampling
from offload.drafting.by_kind import ByKind
from offload.drafting.confidence import Sharpness
from offload.ranks.draft_tree import DraftTree, Told
from offload.ranks.messages import Channel, Kind, Message
from offload.ranks.orders import error_message, sampling_of, text_of
from offload.ranks.transport import RankError, Transport
from offload.sampling.sampler import Sampler

_MOST_PASSES = 4  # for one answer, if it has a node at all
_ANSWER = 8  # nodes that are made ready while nobody asks
_AHEAD = 2  # one of so many rows may be run while nobody asks; the others are kept for answers


@dataclass(slots=True)
class _Asked:
    """A GROW that was not answered yet."""

    num_nodes: int
    least_f: float
    least_p: float
    num_passes: int = 0


def serve_draft(transport: Transport, tree: DraftTree, vocab_size: int, head: int = 0) -> None:
    """Draft until the head says STOP; `vocab_size` is the target's.

    Raises `RankError` where the head is lost; any other error is told to it, and raised.
    """
    service, is_idle = _Service(transport, tree, vocab_size, head), True
    try:
        while True:
            # Whoever has nothing to run sleeps; else what has arrived comes first: it may change what is worth running.
            message = (transport.receive if is_idle else transport.poll)(head, Channel.DRAFT)
            if message is None:
                is_idle = not service.step()
            elif message.kind in (Kind.STOP, Kind.ERROR):
                return
            else:
                service.take(message)
                is_idle = False
    except RankError:
        raise
    except Exception as error:
        transport.send(head, Channel.RESULT, error_message(error))
        raise


class _Service:
    """One tree, and what the head has asked for."""

    def __init__(self, transport: Transport, tree: DraftTree, vocab_size: int, head: int) -> None:
        self._transport, self._tree, self._vocab_size, self._head = transport, tree, vocab_size, head
        self._sharpness = ByKind[Sampling, Sharpness](Sharpness)
        self._asked: _Asked | None = None

    def take(self, message: Message) -> None:
        """Note what the head says."""
        if message.kind == Kind.RESET:
            self._begin(message)
        elif message.kind == Kind.ACCEPT:
            self._tree.accept(message.numbers)
        elif message.kind == Kind.GROW and message.payload is not None:
            assert self._asked is None, "one question at a time"
            self._asked = _Asked(message.numbers[0], *message.payload.tolist())
        else:
            raise ValueError(f"a draft was told to {message.kind.name}")

    def step(self) -> bool:
        """Answer, or run one pass; False where there is nothing to do."""
        asked, tree = self._asked, self._tree
        if asked is None:
            room = tree.capacity // _AHEAD - tree.num_rows
            to_run = tree.best(_ANSWER, 1 / tree.capacity, 0.0).to_run[: max(0, room)]
        else:
            nodes, to_run = tree.best(asked.num_nodes, asked.least_f, asked.least_p)
            is_late = asked.num_passes >= _MOST_PASSES and bool(nodes)
            if len(nodes) == asked.num_nodes or not to_run or is_late:
                self._answer(tree.tell(nodes))
                return True
            asked.num_passes += 1
        if to_run:
            tree.run(to_run)
        return bool(to_run)

    def _begin(self, message: Message) -> None:
        if self._asked is not None:  # at a tree that is gone
            self._answer([])
        sampling = sampling_of(message)
        sharpness = self._sharpness[replace(sampling, seed=0)]
        self._tree.begin(text_of(message), Sampler(sampling, self._vocab_size), sharpness)

    def _answer(self, told: Sequence[Told]) -> None:
        self._asked = None
        numbers = [number for node in told for number in (node.number, node.parent, node.token)]
        payload = torch.tensor([(node.f, node.p) for node in told], dtype=torch.float64) if told else None
        self._transport.send(self._head, Channel.RESULT, Message(Kind.TREE, numbers, payload))
