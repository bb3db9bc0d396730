"""The memory budget of a run, made of its options and of what the machine has.

Invariant: free memory is asked for once, since loading takes some of it and it changes while trees
are compared.
"""

from dataclasses import replace

from offload.checkpoint.sizes import model_shape
from offload.errors import UserError, require
from offload.memory.planner import (
    MemoryBudget,
    ModelFiles,
    default_gpu_bytes,
    default_ram_bytes,
)
from offload.memory.prompt_rows import USUAL_GPU, row_s
from offload.planning.cost_model import Costs, Curve, Traffic, link_alone
from offload.planning.hardware import Hardware, rates_of
from offload.planning.options import LoadOptions
from offload.units import ByteSize


def budget_of(
    options: LoadOptions, place: str | None = None, hardware: Hardware | None = None
) -> MemoryBudget:
    """Return the budget on this machine, or on `hardware`.

    What is not given is the machine's: of this one, what is free. `place` is the device here that
    computes, None without one. Raises `UserError` for a GPU's budget where there is none.
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
    return MemoryBudget(
        ram=default_ram_bytes() if ram is None else ByteSize.parse(ram, "`ram`"),
        gpu=own_bytes if gpu is None else ByteSize.parse(gpu, "`gpu_memory`"),
        dtype=options.dtype,
        context=options.context,
        rule=options.rule,
        experts=options.experts if options.ranks is None else "layers",
        parallel=options.parallel,
        rates=rates if options.ranks is None else None,
    )


def traffic_in(
    budget: MemoryBudget, files: ModelFiles, num_nodes: int, hardware: Hardware | None = None
) -> Traffic | None:
    """Return what a sweep moves with trees of this size; None where memory is too small."""
    try:
        return Traffic.of(budget.plan(files, num_nodes), hardware)
    except UserError:
        return None


def prompt_costs(budget: MemoryBudget, files: ModelFiles, num_rows: int) -> Costs | None:
    """Return the costs of a prompt's pass by the rates that chose its rows; None without rates."""
    if budget.rates is None:
        return None
    seconds = num_rows * row_s(model_shape(files.target, budget.dtype), budget.rates.flops_per_s)
    compute_s = Curve((1, num_rows), (seconds / num_rows, seconds))
    return replace(link_alone(budget.rates.link_bytes_per_s), compute_s=compute_s)
