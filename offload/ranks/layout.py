"""Where a model lies on a cluster that may be nobody's: rows of every layer, or layers, and a memory plan of each rank.

Plans are those that the ranks themselves would make, from the same headers cut in the same way. The first rank is the
head: it holds the draft, and of shards embeddings and head; of stages the last one has the head. No torch. Invariant: a
layout is one that fits every rank, and a refusal names the rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from offload.checkpoint.encoder_decoder import has_encoder
from offload.checkpoint.rows import Rows
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name
from offload.checkpoint.section import Section, checkpoint_of
from offload.checkpoint.sizes import ModelShape, config_sizes, head_dim, model_shape
from offload.config import format_bytes
from offload.encoding.registry import PLAIN_OF
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import Files
from offload.planning.cluster import Cluster
from offload.planning.cost_model import Curve, Traffic, costs_on
from offload.planning.exchange import Gathers, Hops
from offload.planning.hardware import Hardware
from offload.planning.room import Room
from offload.planning.shares import Load, RankCapacity, shard_fractions, stage_layers
from offload.ranks.sharding import Role, Sharding, share_layers

_KEYS = "self_attn.k_proj"
_FILLED_SHARE = 0.5  # of the context, whose keys and values a pass reads on average


class Wish(NamedTuple):
    """What is to run on a cluster."""

    files: Files
    cluster: Cluster
    dtype: str = "auto"
    context: int | None = None
    rule: str = "match"


class Part(NamedTuple):
    """What one rank has."""

    machine: Hardware
    layers: range  # its own, or those of which it has rows
    rows: dict[str, Rows]  # of each matrix of these; empty where it has all
    shape: ModelShape  # of what it has
    plan: MemoryPlan
    fraction: float  # of all layers' bytes
    num_heads: int = 0  # of keys and values, where attention is computed by those that have them

    @property
    def link_s(self) -> float:
        """Seconds that its link, or a disk behind it, needs in every pass."""
        return Traffic.of(self.plan, self.machine).streamed_bytes / self.machine.feed_bytes_per_s

    @property
    def compute_s(self) -> Curve | None:
        """Seconds of its processor against rows; None where its rates are not known."""
        if self.machine.flops_per_s is None:
            return None
        return costs_on(self.machine, self.shape, None, int(_FILLED_SHARE * self.plan.context)).compute_s

    def as_dict(self) -> dict[str, object]:
        """What `--json` says of it."""
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


class Layout(NamedTuple):
    """All parts of one model, and what their ranks send each other."""

    parts: tuple[Part, ...]
    exchange: Gathers | Hops


def lay_out_shards(wish: Wish, num_nodes: int) -> Layout:
    """Rows of every layer on each rank. Raises `UserError` for layers that cannot be cut, and for too little memory."""
    target, machines = wish.files.target, wish.cluster.ranks
    even = share_layers(target, [1 / len(machines)] * len(machines))
    whole, capacities = model_shape(target, wish.dtype), list[RankCapacity]()
    for rank, machine in enumerate(machines):
        roomy = _plan(wish, num_nodes, machine, shard_files(wish.files, even, rank), is_roomy=True)
        kv_bytes = 0 if even.has_own_heads else whole.kv_bytes_per_token * roomy.cache_slots
        capacities.append(_capacity(wish, machine, roomy, kv_bytes, num_nodes))
    shared_kv_bytes = whole.kv_bytes_per_token * roomy.cache_slots if even.has_own_heads else 0
    sharding = share_layers(target, shard_fractions(capacities, Load(whole.layer_bytes, shared_kv_bytes)))
    parts = tuple(_shard(wish, num_nodes, sharding, rank) for rank in range(len(machines)))
    return Layout(parts, Gathers(gathered_widths(sharding), len(whole.layer_bytes), *_row_sizes(wish)))


def _shard(wish: Wish, num_nodes: int, sharding: Sharding, rank: int) -> Part:
    machine, files = wish.cluster.ranks[rank], shard_files(wish.files, sharding, rank)
    rows = {name: matrix.rows_R[rank] for name, matrix in sharding.matrices.items()}
    shape, num_heads = model_shape(files.target, wish.dtype), 0
    if sharding.has_own_heads:
        num_heads = rows[_KEYS].num // head_dim(config_sizes(files.target))
    plan, fraction = _plan(wish, num_nodes, machine, files), _fraction(wish, files.target)
    return Part(machine, range(len(shape.layer_bytes)), rows, shape, plan, fraction, num_heads)


def lay_out_stages(wish: Wish, num_nodes: int) -> Layout:
    """Layers on each rank. Raises `UserError` for more ranks than layers, and for too little memory."""
    target, ranks = wish.files.target, wish.cluster.ranks
    if has_encoder(target.config):
        raise UserError(f"{target.directory.name}: it has an encoder, and stages have none: run it on one rank")
    whole, last, capacities = model_shape(target, wish.dtype), len(ranks) - 1, list[RankCapacity]()

    def files_of(rank: int, first: int, end: int) -> Files:
        section = checkpoint_of(target, Section(first, end, rank == 0, rank == last))
        return Files(section, wish.files.draft if rank == 0 else None)

    for rank, machine in enumerate(ranks):
        roomy = _plan(wish, num_nodes, machine, files_of(rank, 0, len(whole.layer_bytes)), is_roomy=True)
        capacities.append(_capacity(wish, machine, roomy, 0, num_nodes))
    load, parts = Load(whole.layer_bytes, whole.kv_bytes_per_token * roomy.cache_slots), list[Part]()
    for rank, layers in enumerate(stage_layers(capacities, load)):
        files = files_of(rank, layers.start, layers.stop)
        shape, plan = model_shape(files.target, wish.dtype), _plan(wish, num_nodes, ranks[rank], files)
        parts.append(Part(ranks[rank], layers, {}, shape, plan, _fraction(wish, files.target)))
    return Layout(tuple(parts), Hops(len(ranks), *_row_sizes(wish)))


def gathered_widths(sharding: Sharding) -> list[Sequence[int]]:
    """Of each gather of a layer: numbers in a row, rank by rank."""
    widths = list[Sequence[int]]()
    for name, matrix in sharding.matrices.items():
        widths += [sharding.input_widths(name)] if matrix.role is Role.JOINED else []
        widths += [] if matrix.role is Role.OWN else [sharding.widths(name)]
    return widths


def shard_files(files: Files, sharding: Sharding, rank: int) -> Files:
    """What a rank of shards reads; embeddings, head and draft are the head's."""
    own = sharding.checkpoint_of(rank, files.target)
    return Files(own, files.draft) if rank == 0 else Files(checkpoint_of(own, layers_alone(own)))


def layers_alone(checkpoint: Checkpoint) -> Section:
    """All of its layers, and nothing of what lies around them."""
    return Section(0, config_sizes(checkpoint)["num_hidden_layers"], has_table=False, has_head=False)


def _fraction(wish: Wish, own: Checkpoint) -> float:
    """Of all layers' bytes in the files; slabs are larger by their alignment."""
    part, whole = (checkpoint_of(one, layers_alone(one)).num_bytes for one in (own, wish.files.target))
    return part / whole


def _plan(wish: Wish, num_nodes: int, machine: Hardware, files: Files, *, is_roomy: bool = False) -> MemoryPlan:
    """Of one rank; `is_roomy`: however much memory there is, to see what everything but layers takes."""
    own: dict[str, Any] = {"ram": machine.ram_bytes, "gpu": machine.gpu_bytes, "experts": "layers"}
    room = Room(**own, dtype=wish.dtype, context=wish.context, rule=wish.rule)
    try:
        return (room.roomy() if is_roomy else room).plan(files, num_nodes)
    except UserError as error:
        words = str(error).replace("`gpu_memory`", "gpu").replace("`ram`", "ram")
        raise UserError(words if is_roomy else f"rank {machine.name} {words}") from None


def _capacity(wish: Wish, machine: Hardware, roomy: MemoryPlan, kv_bytes: int, num_nodes: int) -> RankCapacity:
    """What a rank has for layers, and for keys and values beyond `kv_bytes` that it keeps whatever its share is.

    Raises `UserError` where everything else leaves nothing.
    """
    compute_s, target = 0.0, wish.files.target
    if all(rank.flops_per_s for rank in wish.cluster.ranks):
        layers = model_shape(checkpoint_of(target, layers_alone(target)), wish.dtype)
        positions = int(_FILLED_SHARE * roomy.context)
        compute_s = costs_on(machine, layers, None, positions).compute_s.at(num_nodes)
    capacity = RankCapacity.beside(
        roomy, kv_bytes, ram_bytes=machine.ram_bytes, gpu_bytes=machine.gpu_bytes, name=machine.name,
        link_bytes_per_s=machine.feed_bytes_per_s, disk_bytes_per_s=machine.disk_bytes_per_s, compute_s=compute_s,
    )  # fmt: skip
    if capacity.memory_bytes <= 0:
        key, room_bytes = ("gpu", machine.gpu_bytes) if machine.gpu_bytes else ("ram", machine.ram_bytes)
        held, room = format_bytes(room_bytes - capacity.memory_bytes), format_bytes(room_bytes)
        what = f"rank {machine.name} has {room} of {key}, and all but its layers takes {held}"
        raise UserError(f"{what}: give it more, or lower `context` from {roomy.context}")
    return capacity


def _row_sizes(wish: Wish) -> tuple[int, int]:
    """D, and the bytes of a number."""
    dtype = compute_dtype_name(wish.files.target, wish.dtype)
    return config_sizes(wish.files.target)["hidden_size"], PLAIN_OF[dtype].align_bytes
