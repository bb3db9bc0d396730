"""One target on many ranks: what they agree on before a weight is read, and loading on followers.

Shares follow from what each rank measures of itself. An error on one rank ends all of them, with
its message.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from offload.checkpoint.checkpoint import compute_dtype_name
from offload.checkpoint.sizes import model_shape
from offload.distributed.agreement import agree_on, broadcast_from_head, gather_values, try_together
from offload.distributed.exchange import Exchange, cut_model
from offload.distributed.join import meet_ranks
from offload.distributed.section import capacity_of, load_section
from offload.distributed.sharding import (
    Sharding,
    gathers_of,
    layers_alone,
    shard_files,
    share_layers,
)
from offload.distributed.shards import ShardedTarget, serve_shard
from offload.distributed.shares import Load, RankCapacity, shard_fractions
from offload.distributed.transport import Transport
from offload.engine.setup import Setup
from offload.engine.team import Team
from offload.machine import rss_bytes
from offload.memory.plan import MemoryPlan
from offload.trees.spec import AUTO_NODES

_Planned = tuple[int, int]  # nodes of a tree, and the context
_BY_HOST = "ranks exchange rows of GPUs by way of host memory, which is slower than NCCL, and the way that was tried"


class Shards(Team):
    """The head of several ranks, each of which has some rows of every matrix."""

    is_alone = False

    def __init__(
        self, sharding: Sharding, exchange: Exchange, resources: ExitStack, notes: Sequence[str]
    ) -> None:
        self.sharding = sharding
        self.exchange = exchange
        self._resources = resources
        self.notes = (f"rows of every layer by rank: {sharding.percentages}", *notes)

    def local_setup(self, setup: Setup) -> Setup:
        """Return the setup with this rank's rows, and all that lies around the layers."""
        shard = self.sharding.checkpoint_of(self.exchange.transport.rank, setup.files.target)
        # profiles are those of one process
        options = replace(setup.options, profile="none")
        return replace(setup, files=setup.files._replace(target=shard), options=options)

    def adapt(self, meta_model: Any) -> None:
        """Cut the model to these rows."""
        cut_model(meta_model, self.sharding, self.exchange)

    def tell_plan(self, plan: MemoryPlan) -> None:
        """Make the other ranks plan for this plan's rows and positions. Raises `UserError`."""
        broadcast_from_head(self.exchange.transport, (plan.num_nodes, plan.context), _Planned)
        agree_on(self.exchange.transport)

    def target(self, *args: Any, **settings: Any) -> ShardedTarget:
        """Return the team of ranks once all have loaded; it lasts until `resources` are closed."""
        agree_on(self.exchange.transport)  # all have loaded
        target = ShardedTarget(*args, exchange=self.exchange, **settings)
        self._resources.callback(target.stop)
        return target


def join_shards(setup: Setup, resources: ExitStack, transport: Transport | None) -> Shards:
    """Return the head's view, once all ranks have agreed.

    Any other rank follows the head to its end, then raises `SystemExit`. Raises `UserError` if
    ranks do not come or do not fit, or if layers cannot be shared.
    """
    own_bytes = rss_bytes()
    transport, notes = meet_ranks(setup, resources, transport)
    setup.hooks.on_phase("measuring links, sharing layers")
    shards = _share(setup, transport, own_bytes, resources, notes)
    if transport.rank:
        _follow(shards, setup, resources)
        raise SystemExit(0)
    return shards


def _share(
    setup: Setup,
    transport: Transport,
    own_bytes: int,
    resources: ExitStack,
    notes: Sequence[str],
) -> Shards:
    """Measure, and share layers out so that all ranks take equally long."""
    files = setup.files
    dtype = setup.dtype
    even = share_layers(files.target, [1 / transport.num_ranks] * transport.num_ranks)
    # links are measured at the same time: ranks may share them
    has_gpu = any(gather_values(transport, setup.device.has_own_memory, bool))
    roomy = replace(setup, budget=setup.budget.unlimited())
    shard_setup = replace(roomy, files=shard_files(files, even, transport.rank))
    mine = capacity_of(setup, shard_setup.plan_for(AUTO_NODES), shares_kv=even.has_own_heads)
    capacities = gather_values(transport, mine, RankCapacity)
    shape = model_shape(files.target, dtype)
    kv_bytes = roomy.plan_for(AUTO_NODES).kv_bytes if even.has_own_heads else 0
    load = Load(shape.layer_bytes, kv_bytes)
    # computed with the rates of the head's processor
    fractions = broadcast_from_head(transport, shard_fractions(capacities, load), tuple[float, ...])
    sharding = share_layers(files.target, fractions)
    gathers = gathers_of(files.target, sharding, dtype)
    exchange = Exchange(transport, own_bytes)
    exchange.row_bytes = gathers.sent_bytes(1)[transport.rank]
    notes = [*([_BY_HOST] if has_gpu else []), *notes]
    shards = Shards(sharding, exchange, resources, notes)
    torch_dtype = getattr(torch, compute_dtype_name(files.target, dtype))
    shards.exchange_s = exchange.pass_s(gathers, torch_dtype)
    return shards


def _follow(shards: Shards, setup: Setup, resources: ExitStack) -> None:
    """Load what the head's plan leaves to this rank, and compute for the head until it ends."""
    transport = shards.exchange.transport
    num_nodes, context = broadcast_from_head(transport, (0, 0), _Planned)
    files = shard_files(setup.files, shards.sharding, transport.rank)
    planned = replace(setup, files=files, budget=replace(setup.budget, context=context))
    plan = try_together(transport, lambda: planned.plan_for(num_nodes))
    shard = shards.local_setup(setup).files.target
    model, stream = load_section(
        setup, shard, layers_alone(shard), plan, resources, adapt=shards.adapt
    )
    agree_on(transport)
    serve_shard(model, stream, plan, shards.exchange)
