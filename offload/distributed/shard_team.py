"""One target on many ranks: what they agree on before a weight is read, and loading on those that
follow the head.

Shares come from what each rank has measured of itself. Whatever one rank must refuse ends all of
them, with its line.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from offload.checkpoint.safetensors import compute_dtype_name
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.distributed.layout import (
    Sharding,
    gathered_widths,
    layers_alone,
    shard_files,
    share_layers,
)
from offload.distributed.meeting import capacity_of, load_section, meet_ranks
from offload.distributed.orders import (
    agree_on,
    all_gather_objects,
    broadcast_from_head,
    try_together,
)
from offload.distributed.shards import Exchange, ShardedTarget, cut_model, serve_shard
from offload.distributed.transport import Transport
from offload.engine.request import Request
from offload.engine.resolve import ResolvedRun
from offload.engine.team import Team
from offload.machine import peak_rss_bytes, rss_bytes
from offload.memory.plan import MemoryPlan
from offload.model.streamed import StreamedModel
from offload.planning.cluster import Gathers
from offload.planning.cost_model import Curve
from offload.planning.shares import Load, RankCapacity, shard_fractions
from offload.stats import RankFigures
from offload.streaming.layers import Layers
from offload.timer import timed

_TYPICAL_NODES = 64
_BY_HOST = "ranks exchange rows of GPUs by way of host memory, which is slower than NCCL, and the way that was tried"
_TIMED_ROWS = (1, 16, 64, 256)
_NUM_TIMES = 3


class _Measured(NamedTuple):
    """What a rank knows of itself before it loads."""

    own_bytes: int  # what Python and its libraries take
    row_bytes: int  # that it sends in exchanges for every row of a pass
    exchange_s: Curve  # of a pass, against its rows


class Shards(Team):
    """The head of several ranks, each of which has some rows of every matrix."""

    is_alone = False

    def __init__(
        self,
        transport: Transport,
        sharding: Sharding,
        exchange: Exchange,
        measured: _Measured,
        resources: ExitStack,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.transport = transport
        self.sharding = sharding
        self.exchange = exchange
        self._measured = measured
        self.exchange_s = measured.exchange_s
        self._resources, self.notes = (
            resources,
            (f"rows of every layer by rank: {sharding.percentages}", *notes),
        )

    def own(self, run: ResolvedRun) -> ResolvedRun:
        """Return the run of this rank's rows, with all that is around the layers."""
        own = self.sharding.checkpoint_of(self.transport.rank, run.files.target)
        # profiles are those of one process
        options = replace(run.options, profile="none")
        return replace(run, files=run.files._replace(target=own), options=options)

    def adapt(self, meta_model: Any) -> None:
        """Cut the model to them."""
        cut_model(meta_model, self.sharding, self.exchange, self.transport.rank)

    def settle(self, plan: MemoryPlan) -> None:
        """The others plan for as many rows and positions. Raises `UserError` where one has no room."""
        broadcast_from_head(self.transport, [plan.num_nodes, plan.context])
        agree_on(self.transport)

    def target(
        self, model: StreamedModel, stream: Layers, plan: MemoryPlan, **more: Any
    ) -> ShardedTarget:
        """What the others follow, once all have loaded, until `resources` are closed."""
        agree_on(self.transport)  # all have loaded
        read = partial(self.figures, stream, plan)
        ways: dict[str, Any] = {
            "transport": self.transport,
            "exchange": self.exchange,
            "read": read,
        }
        target = ShardedTarget(model, stream, plan, **ways, **more)
        self._resources.callback(target.stop)
        return target

    def figures(self, stream: Layers, plan: MemoryPlan) -> RankFigures:
        """This rank's own, now."""
        exchange, transport, (own_bytes, row_bytes, _) = (
            self.exchange,
            self.transport,
            self._measured,
        )
        return RankFigures(
            plan.ram_bytes,
            own_bytes,
            peak_rss_bytes(),
            exchange.num_passes,
            exchange.num_rows,
            plan.streamed_bytes,
            stream.bytes_read,
            stream.stall_s,
            row_bytes,
            dict(transport.bytes_sent),
            transport.exchange_s,
        )


def join_shards(
    run: ResolvedRun,
    request: Request | None,
    resources: ExitStack,
    transport: Transport | None = None,
) -> Shards:
    """The head's view, once all have agreed. On any other rank: follow the head to its end, then
    raise `SystemExit`.

    Args:
        transport: to the others; None meets them where torchrun's environment says.

    Raises `UserError` where ranks do not come or do not fit, or layers cannot be shared.
    """
    own_bytes = rss_bytes()
    transport, notes = meet_ranks(run, resources, transport)
    run.hooks.on_phase("measuring links, sharing layers")
    shards = _share(run, transport, own_bytes, resources)
    shards.notes += notes
    if transport.rank:
        _follow(shards, run, resources)
        raise SystemExit(0)
    return shards


def _share(run: ResolvedRun, transport: Transport, own_bytes: int, resources: ExitStack) -> Shards:
    files = run.files
    dtype = run.options.dtype
    even = share_layers(files.target, [1 / transport.num_ranks] * transport.num_ranks)
    # links are measured at one time: they may be the same
    has_gpu = any(all_gather_objects(transport, run.device is not None))
    held = run.budget.roomy().plan(shard_files(files, even, transport.rank), _TYPICAL_NODES)
    mine = capacity_of(run, held, shares_kv=even.has_own_heads)
    capacities = [RankCapacity(*one) for one in all_gather_objects(transport, mine)]
    shape = model_shape(files.target, dtype)
    kv_bytes = run.budget.roomy().plan(files, _TYPICAL_NODES).kv_bytes if even.has_own_heads else 0
    fractions = broadcast_from_head(
        transport, shard_fractions(capacities, Load(shape.layer_bytes, kv_bytes))
    )
    sharding = share_layers(files.target, fractions)
    exchange = Exchange(transport)
    column = torch.zeros(1, 1, dtype=getattr(torch, compute_dtype_name(files.target, dtype)))
    layer_s = [
        _layer_s(exchange, sharding, transport.rank, column.expand(rows, -1))
        for rows in _TIMED_ROWS
    ]
    pass_s = tuple(len(shape.layer_bytes) * seconds for seconds in layer_s)
    num_layers = len(shape.layer_bytes)
    width = config_sizes(files.target)["hidden_size"]
    row_bytes = Gathers(gathered_widths(sharding), num_layers, width, column.itemsize).sent_bytes(
        1
    )[transport.rank]
    measured = _Measured(own_bytes, row_bytes, Curve(_TIMED_ROWS, pass_s))
    return Shards(
        transport, sharding, exchange, measured, resources, (_BY_HOST,) if has_gpu else ()
    )


def _layer_s(exchange: Exchange, sharding: Sharding, rank: int, column: torch.Tensor) -> float:
    """Seconds that the gathers of one layer take for so many rows."""

    def gather_all() -> None:
        for widths in gathered_widths(sharding):
            exchange.gather(column.expand(-1, widths[rank]).contiguous(), widths)

    with exchange.opened():
        return median(timed(gather_all) for _ in range(_NUM_TIMES))


def _follow(shards: Shards, run: ResolvedRun, resources: ExitStack) -> None:
    """Load what the head's plan leaves to this rank, and compute what the head says until it ends."""
    transport = shards.transport
    num_nodes, context = broadcast_from_head(transport)
    files = shard_files(run.files, shards.sharding, transport.rank)
    budget = replace(run.budget, context=context)
    plan = try_together(transport, lambda: budget.plan(files, num_nodes))
    own = shards.own(run).files.target
    model, stream = load_section(run, own, layers_alone(own), plan, resources, adapt=shards.adapt)
    agree_on(transport)
    serve_shard(
        model, stream, plan, transport, shards.exchange, partial(shards.figures, stream, plan)
    )
