"""The layers of a target on several cards of one machine, shared out as ranks do when they have met.

From headers and links alone: nothing is measured. Invariant: what one card has no room for is refused
with its name.
"""

from collections.abc import Sequence

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.cuts import Section, checkpoint_of
from offload.checkpoint.sizes import model_shape
from offload.distributed.sharding import layers_alone, shard_files, share_layers
from offload.distributed.shares import Load, RankCapacity, shard_fractions, stage_layers
from offload.engine.setup import Setup
from offload.errors import UserError
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.planner import plan_memory
from offload.planning.hardware import Hardware
from offload.planning.load_options import LoadOptions
from offload.trees.spec import AUTO_NODES


def layer_bytes_of(files: ModelFiles) -> int:
    """Return the bytes of all layers of a target."""
    return checkpoint_of(files.target, layers_alone(files.target)).num_bytes


class CardLayers:
    """The layers of a target, to be shared out as `RankCapacity`s allow."""

    def __init__(self, setup: Setup, options: LoadOptions) -> None:
        self._setup = setup
        self._options = options
        tree = options.planned_tree(None)
        is_plain = tree.kind == "none"
        self._num_nodes = options.parallel * (
            1 if is_plain else AUTO_NODES if tree.is_chosen else tree.num_nodes
        )

    def shards(self, machines: Sequence[Hardware]) -> list[ModelFiles]:
        """Return each card's rows of all layers. Raises `UserError`."""
        files = self._setup.files
        even = share_layers(files.target, [1 / len(machines)] * len(machines))
        parts = [shard_files(files, even, rank) for rank in range(len(machines))]
        kv_bytes = self._kv_bytes(machines[0])
        kept = 0 if even.has_own_heads else kv_bytes
        load = self._load(kv_bytes - kept)
        pairs = zip(machines, parts, strict=True)
        capacities = [self._capacity(machine, part, kept) for machine, part in pairs]
        sharding = share_layers(files.target, shard_fractions(capacities, load))
        return [shard_files(files, sharding, rank) for rank in range(len(machines))]

    def stages(self, machines: Sequence[Hardware]) -> list[ModelFiles]:
        """Return each card's layers. Raises `UserError`."""
        last = len(machines) - 1
        load = self._load(self._kv_bytes(machines[0]))
        whole = range(len(load.layer_bytes))
        capacities = [
            self._capacity(machine, self._section(rank, last, whole), 0)
            for rank, machine in enumerate(machines)
        ]
        parts = enumerate(stage_layers(capacities, load))
        return [self._section(rank, last, layers) for rank, layers in parts]

    def plan(
        self, files: ModelFiles, machine: Hardware, *, is_unlimited: bool = False
    ) -> MemoryPlan:
        """Plan one card's memory. Raises `UserError`, which names the card."""
        budget = MemoryBudget(
            ram_bytes=machine.ram_bytes,
            gpu_bytes=machine.gpu_bytes,
            experts="layers",
            dtype=self._setup.dtype,
            context=self._options.context,
            rule=self._options.rule,
            parallel=self._options.parallel,
        )
        try:
            room = budget.unlimited() if is_unlimited else budget
            return plan_memory(files, room, self._num_nodes)
        except UserError as error:
            raise UserError(f"{machine.name}: {error}") from None

    def _section(self, rank: int, last: int, layers: range) -> ModelFiles:
        files = self._setup.files if rank == 0 else self._setup.files.alone
        section = Section(layers.start, layers.stop, rank == 0, rank == last)
        return files._replace(target=checkpoint_of(files.target, section))

    def _kv_bytes(self, machine: Hardware) -> int:
        """Return the bytes of the whole target's keys and values, which hang on no machine."""
        return self.plan(self._setup.files, machine, is_unlimited=True).kv_bytes

    def _load(self, kv_bytes: int) -> Load:
        return Load(model_shape(self._setup.files.target, self._setup.dtype).layer_bytes, kv_bytes)

    def _capacity(self, machine: Hardware, files: ModelFiles, kept_bytes: int) -> RankCapacity:
        return RankCapacity.beside(
            self.plan(files, machine, is_unlimited=True),
            kept_bytes,
            ram_bytes=machine.ram_bytes,
            gpu_bytes=machine.gpu_bytes,
            name=machine.name,
            link_bytes_per_s=machine.feed_bytes_per_s,
            disk_bytes_per_s=machine.disk_bytes_per_s,
        )
