"""One target on many ranks, each with some rows of every matrix: both sides of a pass.

The head decides everything and tells the others three things, in the order in which it does them
itself: what its cache forgets, what it commits, and which rows come next. Embeddings, the model's
head and the draft are the head's alone. `Exchange` brings together what ranks compute of one pass,
and `cut_model` cuts a model to what one of them computes.

Invariants: every rank runs every pass to its end, since a gather that one of them misses cannot be
resumed. Outside of a pass no rank is waited for: the columns of other ranks are then zeros, so that
one rank's share can be timed, and tried out, alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from offload.distributed.layout import Sharding, ShardRole
from offload.distributed.orders import all_gather_objects
from offload.distributed.transport import Channel, Kind, Message, Transport
from offload.errors import RankError, UserError
from offload.interrupts import held_back
from offload.memory.plan import MemoryPlan
from offload.model.kv_cache import KVCache
from offload.model.meta import layer_stacks
from offload.model.parts import BatchPart
from offload.model.places import is_plain_product
from offload.model.section import SectionModel
from offload.model.target import Target
from offload.sampling.sampler import Logits
from offload.stats import RankFigures
from offload.streaming.layers import Layers


class Exchange:
    """One rank's part in the passes of a shared model.

    What is exchanged passes through host memory on every rank, on whatever each of them computes.

    Attributes:
        num_passes: passes that all ranks have run together.
        num_rows: rows of these passes.
        send: brings rows of the host to where this rank computes.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._is_open = False
        self.send: Callable[[Tensor], Tensor] = lambda rows: rows
        self.num_passes = 0
        self.num_rows = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Run the same pass on all ranks meanwhile."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def share(self, rows: Tensor) -> Tensor:
        """Return the head's rows, on every rank."""
        if not self._is_open:
            return rows
        self.num_passes += 1
        self.num_rows += len(rows)
        return self.send(self._transport.broadcast(rows.cpu()))

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks, of which `part`, (..., widths[rank]), has this one's."""
        before = sum(widths[: self._transport.rank])
        if not self._is_open:
            return pad(part, (before, sum(widths) - before - part.shape[-1]))
        return self.send(self._transport.gather(part.flatten(0, -2).cpu(), widths)).unflatten(
            0, part.shape[:-1]
        )


def cut_model(meta_model: nn.Module, sharding: Sharding, exchange: Exchange, rank: int) -> None:
    """Let every layer of a model without storage compute one rank's rows, and gather the others'.

    On the head the input of the first layer is shared with other ranks, which ask `Exchange.share`
    for it. Raises `UserError` for other modules.
    """
    layers = layer_stacks(meta_model)[0]
    if rank == 0:
        layers[0].register_forward_pre_hook(partial(_share_input, exchange), with_kwargs=True)
    for layer in layers:
        for name, matrix in sharding.matrices.items():
            module = layer.get_submodule(name)
            if not is_plain_product(module):
                raise UserError(
                    f"layers cannot be shared, {name} is no plain product: run it on one rank, or as stages"
                )
            _cut(module, matrix.rows_R[rank].num)
            if matrix.role is ShardRole.JOINED:
                widths = sharding.input_widths(name)
                module.register_forward_pre_hook(partial(_gather_input, exchange, widths))
            if matrix.role is not ShardRole.OWN:
                module.register_forward_hook(
                    partial(_gather_output, exchange, sharding.widths(name))
                )


def _cut(module: nn.Linear, num_rows: int) -> None:
    module.out_features = num_rows
    for key, whole in module._parameters.items():
        if whole is not None:
            part = torch.empty(num_rows, *whole.shape[1:], dtype=whole.dtype, device="meta")
            module._parameters[key] = nn.Parameter(part, requires_grad=False)


def _share_input(
    exchange: Exchange, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    hidden_1TD = args[0] if args else kwargs["hidden_states"]
    shared_1TD = exchange.share(hidden_1TD[0])[None]
    return (
        ((shared_1TD, *args[1:]), kwargs)
        if args
        else (args, {**kwargs, "hidden_states": shared_1TD})
    )


def _gather_input(
    exchange: Exchange, widths: Sequence[int], _: nn.Module, args: tuple[Tensor]
) -> tuple[Tensor]:
    return (exchange.gather(args[0], widths),)


def _gather_output(
    exchange: Exchange, widths: Sequence[int], _: nn.Module, __: Any, output: Tensor
) -> Tensor:
    return exchange.gather(output, widths)


Tell = Callable[[Message], None]
# returns this rank's figures now
Read = Callable[[], RankFigures]


class ShardedTarget(Target):
    """The head's side: a target whose model was cut, see `cut_model`. Others run `serve_shard`."""

    def __init__(
        self,
        *args: Any,
        transport: Transport,
        exchange: Exchange,
        read: Read,
        on_layer: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> None:
        super().__init__(*args, on_layer=self._hear_layer, **more)
        exchange.send = self.send
        self._transport = transport
        self._exchange = exchange
        self._listener = on_layer
        self._is_broken = False
        self._held_back: BaseException | None = None
        self._read = read

    def new_cache(self) -> KVCache:
        """Return an empty cache, which all other ranks follow."""
        return _HeadCache(
            self._tell, self._model.num_layers, self._cache_slots, self._gather, self._model.send
        )

    def figures(self) -> list[RankFigures]:
        """Return what each rank has moved and held so far; between two passes.

        Raises `RankError`.
        """
        self._require_whole()
        self._tell(Message(Kind.WORD))
        return [RankFigures(*told) for told in all_gather_objects(self._transport, self._read())]

    def stop(self) -> None:
        """End the other ranks, as far as they have not ended; no pass follows."""
        with suppress(RankError, UserError):
            self._tell(Message(Kind.STOP))

    def _sweep(self, parts: Sequence[BatchPart], num_logits: int) -> Logits:
        self._require_whole()
        # several texts are of one process
        (part,) = parts
        with held_back(), self._whole_pass():
            self._tell(Message(Kind.RUN, part.position_U.tolist(), _packed(part.ancestor_TU)))
            with self._exchange.opened():
                logits = super()._sweep(parts, num_logits)
        return logits

    def _require_whole(self) -> None:
        if self._is_broken:
            raise RankError("a pass of all ranks was cut short: load the model again")

    @contextmanager
    def _whole_pass(self) -> Iterator[None]:
        """Raise what a listener raises when the pass is over; a failure ends all later passes."""
        self._is_broken = True
        self._held_back = None
        yield
        self._is_broken = False
        if self._held_back is not None:
            raise self._held_back

    def _hear_layer(self) -> None:
        try:
            if self._held_back is None:
                self._listener()
        except BaseException as error:
            self._held_back = error

    def _tell(self, message: Message) -> None:
        for rank in range(1, self._transport.num_ranks):
            self._transport.send(rank, Channel.DATA, message)


class _HeadCache(KVCache):
    """A cache that tells the other ranks what becomes of its rows."""

    def __init__(self, tell: Tell, *args: Any) -> None:
        super().__init__(*args)
        self._tell = tell

    def commit(self, rows: Sequence[int], kept: Sequence[int] = ()) -> None:
        super().commit(rows, kept)
        self._tell(Message(Kind.COMMIT, [len(rows), *rows, *kept]))

    def clear(self, num_kept: int = 0) -> None:
        if num_kept < self.length:
            self._tell(Message(Kind.RESET, [num_kept]))
        super().clear(num_kept)

    def states(self, *_: Any) -> NoReturn:
        """Refuse: other ranks have the other keys and values."""
        raise UserError(
            "sessions keep keys and values of one rank, and there are several: leave `ranks` out"
        )

    def refill(self, *_: Any) -> NoReturn:
        """Refuse, like `states`."""
        self.states()


def serve_shard(
    model: SectionModel,
    stream: Layers,
    plan: MemoryPlan,
    transport: Transport,
    exchange: Exchange,
    read: Read,
) -> None:
    """Follow the head until it ends.

    Raises `RankError` where it is lost, `ReadError` where the disk fails.
    """
    cache = model.new_cache(plan.cache_slots)
    model.stream_layers(stream.acquire, stream.release)
    exchange.send = model.send
    while (order := transport.receive(0, Channel.DATA)).kind is not Kind.STOP:
        if order.kind is Kind.RESET:
            cache.clear(order.numbers[0])
        elif order.kind is Kind.COMMIT:
            num_path = order.numbers[0]
            cache.commit(order.numbers[1 : 1 + num_path], order.numbers[1 + num_path :])
        elif order.kind is Kind.WORD:
            all_gather_objects(transport, read())
        else:
            assert order.kind is Kind.RUN and order.payload is not None, (
                f"{order.kind.name} is no order"
            )
            stream.begin_sweep()
            position_T = torch.tensor(order.numbers)
            sees_TT = _unpacked(order.payload, len(position_T))
            with exchange.opened():
                hidden_TD = exchange.share(
                    torch.empty(len(position_T), model.width, dtype=model.dtype)
                )
                model.forward(hidden_TD, position_T, sees_TT, cache)


def _packed(sees_TT: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(sees_TT.numpy(), axis=1))


def _unpacked(bits: Tensor, num_rows: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=num_rows).astype(bool))
