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
    Copy,
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
from offload.errors import RankError, UserError, ensure
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
        self._num_caches = 0

    def new_cache(self) -> KVCache:
        """Return an empty cache of one text more, which all other ranks follow."""
        text = self._num_caches
        self._num_caches += 1
        sizes = (self._model.num_layers, self._cache_slots)
        return _HeadCache(self._tell, text, *sizes, self._gather, self._model.send)

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
        """Order the same pass from all ranks, then run this rank's share of it."""
        self._require_whole()
        with held_back(), self._whole_pass():
            for number, part in enumerate(parts, 1):
                assert isinstance(part.cache, _HeadCache), "it is one of `new_cache`"
                position_T = part.position_U[-len(part.token_T) :]
                rows = (part.token_T.tolist(), position_T.tolist(), packed(part.ancestor_TU))
                order = RunOrder(self._exchange.num_passes, *rows, num_drawn=0)
                order.text = part.cache.text
                order.is_last = number == len(parts)
                self._tell(order)
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
    """A cache whose changes the other ranks repeat in theirs; `text` is its number there."""

    def __init__(self, tell: Tell, text: int, *args: Any) -> None:
        super().__init__(*args)
        self._tell = tell
        self.text = text

    def commit(self, rows: Sequence[int], kept: Sequence[int] = ()) -> None:
        with held_back():
            super().commit(rows, kept)
            self._tell(Commit(list(rows), list(kept), self.text))

    def clear(self, num_kept: int = 0) -> None:
        with held_back():
            if num_kept < self.length:
                self._tell(Reset(num_kept, text=self.text))
            super().clear(num_kept)

    def copy_from(self, other: KVCache, num_positions: int) -> None:
        assert isinstance(other, _HeadCache), "texts of one decoder"
        with held_back():
            self.clear()
            num_copied = min(num_positions, other.length)
            self._tell(Copy(self.text, other.text, num_copied))
            super().refill(KVCache.states(other, num_copied).items(), num_copied)
            self.is_long = other.is_long

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
    caches = [model.new_cache(plan.cache_slots) for _ in range(plan.parallel)]
    if plan.parallel > 1:
        model.share_passes()
        KVCache.side_by_side(caches)
    model.stream_layers(stream)
    exchange.send = model.send
    parts = list[BatchPart]()

    def cache_of(text: int) -> KVCache:
        ensure(text < len(caches), f"text {text} is none of the {len(caches)} that are written")
        return caches[text]

    def run(order: RunOrder) -> None:
        cache = cache_of(order.text)
        # a text's tree may come behind a part of its prompt
        position_U = next(
            (part.position_U for part in reversed(parts) if part.cache is cache),
            torch.empty(0, dtype=torch.long),
        )
        token_T, position_T, sees_TU = order.rows(len(position_U))
        parts.append(BatchPart(token_T, torch.cat([position_U, position_T]), sees_TU, cache))
        if not order.is_last:
            return
        num_rows = sum(len(part.token_T) for part in parts)
        stream.begin_sweep()
        with exchange.opened():
            hidden_TD = exchange.share(torch.empty(num_rows, model.width, dtype=model.dtype))
            rows_of = hidden_TD.split([len(part.token_T) for part in parts])
            sent = zip(parts, rows_of, strict=True)
            model.forward_parts([part._replace(token_T=rows_TD) for part, rows_TD in sent])
        parts.clear()

    def commit(order: Commit) -> None:
        cache = cache_of(order.text)
        order.require_rows(cache.num_uncommitted)
        cache.commit(order.path, order.kept)

    acts: Acts = {
        Reset: lambda order: cache_of(order.text).clear(order.num_kept),
        RunOrder: run,
        Commit: commit,
        Copy: lambda order: cache_of(order.text).copy_from(
            cache_of(order.source), order.num_positions
        ),
        Figures: lambda _: exchange.figures(stream, plan),
    }
    obey(exchange.transport, HEAD, Channel.DATA, acts)
