"""The memory budget of a run, and memory plans for trees of any size within it.

Invariant: free memory is asked for once, since loading takes some of it and it changes while trees
are compared.
"""

from dataclasses import dataclass, fields, replace

from offload.checkpoint.remembered import remembered
from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.sizes import ExpertShape, model_shape
from offload.errors import UserError, require
from offload.memory.plan import PATH_SCRATCH_BYTES, MemoryPlan, draft_bytes, noise_bytes
from offload.memory.planner import (
    RUNTIME_BYTES,
    ModelFiles,
    default_gpu_bytes,
    default_ram_bytes,
    plan_memory,
)
from offload.memory.prompt_rows import USUAL_GPU, Rates, row_s
from offload.planning.cost_model import Costs, Curve, Traffic, link_alone
from offload.planning.hardware import Hardware, rates_of
from offload.planning.options import LoadOptions
from offload.units import ByteSize, format_bytes

_ROOMY = 1 << 59


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """What all memory plans of a run have in common; the fields are arguments of `plan_memory`."""

    ram: int  # a `ByteSize` where the user gave it
    gpu: int | None  # None on a CPU
    dtype: str
    context: int | None
    rule: str
    experts: str = "auto"
    parallel: int = 1
    rates: Rates | None = None  # of the machine, where they are known

    @classmethod
    def of(
        cls, options: LoadOptions, place: str | None = None, hardware: Hardware | None = None
    ) -> "MemoryBudget":
        """Return the budget on this machine, or on `hardware`.

        What is not given is the machine's: of this one, what is free. `place` is the device here
        that computes, None without one. Raises `UserError` for a GPU's budget where there is none.
        """
        ram = options.ram
        gpu = options.gpu_memory
        if hardware is not None:
            is_there = bool(hardware.gpu_bytes) or not gpu
            require(is_there, f"{hardware.name} has no GPU", gpu, "leave it out")
            ram = ram or hardware.ram_bytes
            gpu = gpu or hardware.gpu_bytes
        own_bytes = default_gpu_bytes(place) if gpu is None and place is not None else None
        has_gpu = gpu is not None or own_bytes is not None
        rates = rates_of(hardware) if hardware else USUAL_GPU if has_gpu else None
        return cls(
            ram=default_ram_bytes() if ram is None else ByteSize.parse(ram, "`ram`"),
            gpu=own_bytes if gpu is None else ByteSize.parse(gpu, "`gpu_memory`"),
            dtype=options.dtype,
            context=options.context,
            rule=options.rule,
            experts=options.experts if options.ranks is None else "layers",
            parallel=options.parallel,
            rates=rates if options.ranks is None else None,
        )

    def plan(self, files: ModelFiles, num_nodes: int) -> MemoryPlan:
        """Plan memory for trees of `num_nodes` nodes. Raises `UserError` for too little."""
        return _planned(files.target, files.draft, self, num_nodes)

    def require_draft(self, draft: Checkpoint, context: int, num_rows: int) -> None:
        """Raise `UserError` where a rank that only drafts has no room for its model and cache.

        Args:
            num_rows: rows of the cache behind `context` committed positions.
        """
        shape = model_shape(draft, self.dtype)
        is_gpu = self.gpu is not None
        needed_bytes = draft_bytes(shape, context, num_rows, is_gpu=is_gpu) + RUNTIME_BYTES
        needed_bytes += noise_bytes(shape.vocab_size) + PATH_SCRATCH_BYTES
        if needed_bytes > self.ram:
            raise UserError(
                f"needs {format_bytes(needed_bytes)} of RAM for the draft, budget is "
                f"{format_bytes(self.ram)}: raise `ram`, or take a smaller draft"
            )

    def experts_of(self, files: ModelFiles) -> ExpertShape | None:
        """Return the target's routed experts if they are read on demand."""
        return model_shape(files.target, self.dtype).experts if self.experts == "demand" else None

    def roomy(self) -> "MemoryBudget":
        """Return a budget without limits, to see what everything but layers takes."""
        return replace(self, ram=_ROOMY, gpu=self.gpu and _ROOMY)

    def traffic(
        self, files: ModelFiles, num_nodes: int, hardware: Hardware | None = None
    ) -> Traffic | None:
        """Return what a sweep moves with trees of this size; None where memory is too small."""
        try:
            return Traffic.of(self.plan(files, num_nodes), hardware)
        except UserError:
            return None


def prompt_costs(budget: MemoryBudget, files: ModelFiles, num_rows: int) -> Costs | None:
    """Return the costs of a prompt's pass by the rates that chose its rows; None without rates."""
    if budget.rates is None:
        return None
    seconds = num_rows * row_s(model_shape(files.target, budget.dtype), budget.rates.flops_per_s)
    compute_s = Curve((1, num_rows), (seconds / num_rows, seconds))
    return replace(link_alone(budget.rates.link_bytes_per_s), compute_s=compute_s)


@remembered
def _planned(
    target: Checkpoint, draft: Checkpoint | None, room: MemoryBudget, num_nodes: int
) -> MemoryPlan:
    """Plan memory once for all that ask: compared drafts, trees, and reports."""
    own = {field.name: getattr(room, field.name) for field in fields(room)}
    return plan_memory(ModelFiles(target, draft), num_nodes=num_nodes, **own)
