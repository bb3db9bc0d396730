"""Where a model lies on a cluster: on each rank rows of every layer (shards), or layers (stages).

Plans are those that the ranks themselves would make, from the same headers cut in the same way, so
that a cluster can be planned from elsewhere. The first rank is the head: it holds the draft, and of
shards what lies around the layers; of stages the last one has the model's head. No torch.

Invariant: a layout fits every rank, and a refusal names the rank.
"""

from typing import NamedTuple

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.cuts import MatrixRows, Section, checkpoint_of
from offload.checkpoint.sizes import (
    ModelShape,
    config_sizes,
    head_dim,
    model_shape,
    shapes_of,
)
from offload.checkpoint.small_files import has_encoder
from offload.distributed.sharding import (
    gathers_of,
    layers_alone,
    row_sizes,
    shard_files,
    share_layers,
)
from offload.errors import UserError
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.planner import plan_memory
from offload.planning.cluster import Cluster, Gathers, Hops
from offload.planning.cost_model import FILLED_SHARE, NOTHING, Curve, Traffic, costs_on
from offload.planning.hardware import Hardware
from offload.planning.shares import Load, RankCapacity, shard_fractions, stage_layers
from offload.units import format_bytes

_KEYS = "self_attn.k_proj"


class ClusterRequest(NamedTuple):
    """What is to run on a cluster."""

    files: ModelFiles
    cluster: Cluster
    dtype: str = "auto"
    context: int | None = None
    rule: str = "match"

    @property
    def knows_compute(self) -> bool:
        return all(machine.flops_per_s for machine in self.cluster.ranks)


class RankPart(NamedTuple):
    """What one rank has of the model."""

    machine: Hardware
    layers: range  # its own layers, or those of which it has rows
    rows: dict[str, MatrixRows]  # by matrix of these layers; empty where it has all rows
    shape: ModelShape
    plan: MemoryPlan
    fraction: float  # its share of all layers' bytes
    num_heads: int = 0  # key/value heads, where attention is computed by the ranks that have them

    @property
    def link_s(self) -> float:
        """Seconds that its link, or a disk behind it, needs in every pass."""
        return (
            Traffic.from_plan(self.plan, self.machine).streamed_bytes
            / self.machine.feed_bytes_per_s
        )

    @property
    def compute_s(self) -> Curve:
        """Seconds of its processor against rows; nothing where its rates are not known."""
        if self.machine.flops_per_s is None:
            return NOTHING
        positions = int(FILLED_SHARE * self.plan.context)
        return costs_on(self.machine, self.shape, None, positions).compute_s

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        return {
            "name": self.machine.name,
            "fraction": self.fraction,
            "layers": [self.layers.start, self.layers.stop],
            "rows": {name: list(rows) for name, rows in self.rows.items()},
            "num_key_value_heads": self.num_heads,
            "link_bytes_per_s": self.machine.feed_bytes_per_s,
            "bytes_per_pass": self.plan.streamed_bytes,
            "link_s": self.link_s,
            "plan": self.plan.as_dict(),
        }


class ClusterLayout(NamedTuple):
    """All parts of one model, and what their ranks send each other."""

    request: ClusterRequest
    parts: tuple[RankPart, ...]
    exchange: Gathers | Hops

    @property
    def draft_step_s(self) -> Curve:
        """Seconds of a draft step against its rows, on the head; nothing if not known."""
        files, _, dtype, *_ = self.request
        if not self.request.knows_compute:
            return NOTHING
        head = self.parts[0]
        num_positions = int(FILLED_SHARE * head.plan.context)
        return costs_on(head.machine, *shapes_of(files, dtype), num_positions).draft_step_s


def lay_out_shards(request: ClusterRequest, num_nodes: int) -> ClusterLayout:
    """Lay out rows of every layer on each rank. Raises `UserError`."""
    target = request.files.target
    machines = request.cluster.ranks
    even = share_layers(target, [1 / len(machines)] * len(machines))
    whole = model_shape(target, request.dtype)
    kept_bytes = 0 if even.has_own_heads else whole.kv_bytes_per_token
    capacities = list[RankCapacity]()
    for rank, machine in enumerate(machines):
        files = shard_files(request.files, even, rank)
        capacity, num_slots = _capacity(request, num_nodes, machine, files, kept_bytes)
        capacities.append(capacity)
    shared_kv_bytes = (whole.kv_bytes_per_token - kept_bytes) * num_slots
    sharding = share_layers(
        target, shard_fractions(capacities, Load(whole.layer_bytes, shared_kv_bytes))
    )
    parts = list[RankPart]()
    for rank, machine in enumerate(machines):
        files = shard_files(request.files, sharding, rank)
        rows = {name: matrix.rows_R[rank] for name, matrix in sharding.matrices.items()}
        part = _part(request, num_nodes, machine, files, range(len(whole.layer_bytes)))
        num_heads = 0
        if sharding.has_own_heads:
            num_heads = rows[_KEYS].num // head_dim(config_sizes(files.target))
        parts.append(part._replace(rows=rows, num_heads=num_heads))
    return ClusterLayout(request, tuple(parts), gathers_of(target, sharding, request.dtype))


def lay_out_stages(request: ClusterRequest, num_nodes: int) -> ClusterLayout:
    """Lay out layers on each rank. Raises `UserError`."""
    target = request.files.target
    ranks = request.cluster.ranks
    if has_encoder(target.config):
        raise UserError(
            f"{target.name}: it has an encoder, and stages have none: run it on one rank"
        )
    whole = model_shape(target, request.dtype)
    last = len(ranks) - 1
    capacities = list[RankCapacity]()

    def files_of(rank: int, first: int, end: int) -> ModelFiles:
        section = checkpoint_of(target, Section(first, end, rank == 0, rank == last))
        files = request.files if rank == 0 else request.files.alone
        return files._replace(target=section)

    for rank, machine in enumerate(ranks):
        files = files_of(rank, 0, len(whole.layer_bytes))
        capacity, num_slots = _capacity(request, num_nodes, machine, files, 0)
        capacities.append(capacity)
    load = Load(whole.layer_bytes, whole.kv_bytes_per_token * num_slots)
    parts = tuple(
        _part(request, num_nodes, ranks[rank], files_of(rank, layers.start, layers.stop), layers)
        for rank, layers in enumerate(stage_layers(capacities, load))
    )
    return ClusterLayout(request, parts, Hops(len(ranks), *row_sizes(target, request.dtype)))


def _part(
    request: ClusterRequest, num_nodes: int, machine: Hardware, files: ModelFiles, layers: range
) -> RankPart:
    """Return the sizes of a rank that reads these files, with its share of all layers' bytes."""
    own_bytes, whole_bytes = (
        checkpoint_of(checkpoint, layers_alone(checkpoint)).num_bytes
        for checkpoint in (files.target, request.files.target)
    )
    shape = model_shape(files.target, request.dtype)
    plan = _plan(request, num_nodes, machine, files)
    return RankPart(machine, layers, {}, shape, plan, own_bytes / whole_bytes)


def _plan(
    request: ClusterRequest,
    num_nodes: int,
    machine: Hardware,
    files: ModelFiles,
    *,
    is_unlimited: bool = False,
) -> MemoryPlan:
    """Return one rank's plan; `is_unlimited` plans without a limit, to see what is no layer."""
    room = MemoryBudget(
        ram_bytes=machine.ram_bytes,
        gpu_bytes=machine.gpu_bytes,
        experts="layers",
        dtype=request.dtype,
        context=request.context,
        rule=request.rule,
    )
    try:
        return plan_memory(files, room.unlimited() if is_unlimited else room, num_nodes)
    except UserError as error:
        words = str(error).replace("`gpu_memory`", "gpu").replace("`ram`", "ram")
        raise UserError(words if is_unlimited else f"rank {machine.name} {words}") from None


def _capacity(
    request: ClusterRequest, num_nodes: int, machine: Hardware, files: ModelFiles, kept_bytes: int
) -> tuple[RankCapacity, int]:
    """Return a rank's bytes for layers and cache, and the number of a cache's slots.

    `kept_bytes` of each slot it keeps in any case. Raises `UserError` where nothing is left.
    """
    unlimited = _plan(request, num_nodes, machine, files, is_unlimited=True)
    compute_s = 0.0
    target = request.files.target
    if request.knows_compute:
        layers = model_shape(checkpoint_of(target, layers_alone(target)), request.dtype)
        positions = int(FILLED_SHARE * unlimited.context)
        compute_s = costs_on(machine, layers, None, positions).compute_s.at(num_nodes)
    capacity = RankCapacity.beside(
        unlimited,
        kept_bytes * unlimited.cache_slots,
        ram_bytes=machine.ram_bytes,
        gpu_bytes=machine.gpu_bytes,
        name=machine.name,
        link_bytes_per_s=machine.feed_bytes_per_s,
        disk_bytes_per_s=machine.disk_bytes_per_s,
        compute_s=compute_s,
    )
    if capacity.memory_bytes <= 0:
        key, room_bytes = (
            ("gpu", machine.gpu_bytes) if machine.gpu_bytes else ("ram", machine.ram_bytes)
        )
        held = format_bytes(room_bytes - capacity.memory_bytes)
        room = format_bytes(room_bytes)
        shortage = f"rank {machine.name} has {room} of {key}, and all but its layers takes {held}"
        raise UserError(f"{shortage}: give it more, or lower `context` from {unlimited.context}")
    return capacity, unlimited.cache_slots
