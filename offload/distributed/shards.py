"""One target on many ranks, each with some rows of every matrix: both sides of a pass.

The head decides everything and sends the others three things, in its own order: what its cache
forgets, what it commits, and which rows come next. Embeddings, the model's head and the draft are
the head's alone. `Exchange` combines what ranks compute in a pass.

Invariant: every rank runs every pass to its end, since a gather that one of them misses cannot be
resumed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch

from offload.distributed.exchange import Exchange
from offload.distributed.orders import (
    HEAD,
    Commit,
    Figures,
    Order,
    Reset,
    RunOrder,
    Stop,
    packed,
)
from offload.distributed.section import SectionModel
from offload.distributed.service import Acts, obey
from offload.distributed.transport import Channel
from offload.errors import RankError, UserError
from offload.interrupts import held_back
from offload.memory.plan import MemoryPlan
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.target import Taps, Target
from offload.model.tree_model import TreeModel
from offload.sampling.logits import Logits
from offload.stats import RankFigures
from offload.streaming.layers import LayerStream

Tell = Callable[[Order], None]


class ShardedTarget(Target):
    """The head's side: a target whose model was cut, see `cut_model`. Others run `serve_shard`."""

    def __init__(
        self,
        model: TreeModel,
        stream: LayerStream,
        plan: MemoryPlan,
        *,
        exchange: Exchange,
        on_layer: Callable[[int], None] = lambda layer: None,
        **settings: Any,
    ) -> None:
        super().__init__(model, stream, plan, on_layer=self._hear_layer, **settings)
        exchange.send = self.send
        self._transport = exchange.transport
        self._exchange = exchange
        self._listener = on_layer
        self._is_broken = False
        self._held_back: BaseException | None = None
        self._all_figures = partial(exchange.figures, stream, plan)

    def new_cache(self) -> KVCache:
        """Return an empty cache, which all other ranks follow."""
        return _HeadCache(
            self._tell, self._model.num_layers, self._cache_slots, self._gather, self._model.send
        )

    def figures(self) -> list[RankFigures]:
        """Return each rank's figures so far, between two passes. Raises `RankError`."""
        self._require_whole()
        self._tell(Figures())
        return self._all_figures()

    def stop(self) -> None:
        """End the other ranks unless they have ended; no pass follows."""
        with suppress(RankError, UserError):
            self._tell(Stop())

    def _sweep(self, parts: Sequence[BatchPart], num_logits: int, taps: Taps | None) -> Logits:
        self._require_whole()
        # several texts need a single process
        (part,) = parts
        with held_back(), self._whole_pass():
            rows = (part.token_T.tolist(), part.position_U.tolist(), packed(part.ancestor_TU))
            self._tell(RunOrder(self._exchange.num_passes, *rows, num_drawn=0))
            with self._exchange.opened():
                logits = super()._sweep(parts, num_logits, taps)
        return logits

    def _require_whole(self) -> None:
        if self._is_broken:
            raise RankError("a pass of all ranks was cut short: load the model again")

    @contextmanager
    def _whole_pass(self) -> Iterator[None]:
        """Raise a listener's exception once the pass is over; a failure ends all later passes."""
        self._is_broken = True
        self._held_back = None
        yield
        self._is_broken = False
        if self._held_back is not None:
            raise self._held_back

    def _hear_layer(self, layer: int) -> None:
        try:
            if self._held_back is None:
                self._listener(layer)
        except BaseException as error:
            self._held_back = error

    def _tell(self, order: Order) -> None:
        for rank in range(1, self._transport.num_ranks):
            self._transport.send(rank, Channel.DATA, order)


class _HeadCache(KVCache):
    """A cache that tells the other ranks what happens to its rows."""

    def __init__(self, tell: Tell, *args: Any) -> None:
        super().__init__(*args)
        self._tell = tell

    def commit(self, rows: Sequence[int], kept: Sequence[int] = ()) -> None:
        with held_back():
            super().commit(rows, kept)
            self._tell(Commit(list(rows), list(kept)))

    def clear(self, num_kept: int = 0) -> None:
        with held_back():
            if num_kept < self.length:
                self._tell(Reset(num_kept))
            super().clear(num_kept)

    def states(self, *_: Any) -> NoReturn:
        """Raise: other ranks have the other keys and values."""
        raise UserError(
            "sessions keep keys and values of one rank, and there are several: leave `ranks` out"
        )

    def refill(self, *_: Any) -> NoReturn:
        """Raise, as `states` does."""
        self.states()


def serve_shard(
    model: SectionModel, stream: LayerStream, plan: MemoryPlan, exchange: Exchange
) -> None:
    """Follow the head until it ends. Raises `RankError` if it is lost, and `ReadError`."""
    cache = model.new_cache(plan.cache_slots)
    model.stream_layers(stream)
    exchange.send = model.send

    def run(order: RunOrder) -> None:
        _, position_T, sees_TT = order.rows(0)
        stream.begin_sweep()
        with exchange.opened():
            hidden_TD = exchange.share(torch.empty(len(position_T), model.width, dtype=model.dtype))
            model.forward(hidden_TD, position_T, sees_TT, cache)

    def commit(order: Commit) -> None:
        order.require_rows(cache.num_uncommitted)
        cache.commit(order.path, order.kept)

    acts: Acts = {
        Reset: lambda order: cache.clear(order.num_kept),
        RunOrder: run,
        Commit: commit,
        Figures: lambda _: exchange.figures(stream, plan),
    }
    obey(exchange.transport, HEAD, Channel.DATA, acts)
