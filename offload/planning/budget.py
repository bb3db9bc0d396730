"""The memory budget of a run, made of its options and of what the machine has.

How the experts of a mixture come belongs to it: one by one as passes need them, or with their
layers. It is decided from headers alone, by the bytes per token of either way with the tree that is
best for it by the default acceptance, since how fast this machine computes is not known yet. Where
a mixture chooses few of many experts, on demand wins by far; where its best tree needs nearly all
of them, both ways read the same, and whole layers are never waited for. No torch.

Invariant: free memory is asked for once, since loading takes some of it and it changes while trees
are compared; that of the host by `LoadOptions.ram_bytes`.
"""

from dataclasses import replace
from functools import partial

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.sizes import model_shape, shapes_of
from offload.errors import UserError, require
from offload.machine import available_gpu_bytes, available_ram_bytes, library_bytes
from offload.memory.plan import MemoryBudget
from offload.memory.planner import plan_memory
from offload.memory.prompt_rows import USUAL_GPU, row_s
from offload.planning.acceptance import SMALL, prior_for
from offload.planning.cost_model import (
    FILLED_SHARE,
    Costs,
    Curve,
    Traffic,
    costs_on,
    link_alone,
    step_of,
)
from offload.planning.hardware import Hardware, rates_of
from offload.planning.load_options import LoadOptions
from offload.planning.search import known_trees
from offload.trees.topology import SIZES
from offload.units import ByteSize, format_bytes

# Free memory of a GPU that is left to what else it shows.
_GPU_RESERVE_SHARE = 0.02
# the trees that are compared
_MAX_NODES = 128
_MAX_DEPTH = 16


def free_gpu_bytes(place: str) -> int:
    """Return the bytes of a GPU that a run may take."""
    return int((1 - _GPU_RESERVE_SHARE) * available_gpu_bytes(place))


def budget_of(
    options: LoadOptions, place: str | None = None, hardware: Hardware | None = None
) -> MemoryBudget:
    """Return the budget on this machine, or on `hardware`.

    What is not given is the machine's: of this one, what is free. `place` is the device here that
    computes, None without one. Raises `UserError` for a GPU's budget where there is none.
    """
    gpu = options.gpu_memory
    if hardware is None:
        ram = options.ram_bytes
    else:
        is_there = bool(hardware.gpu_bytes) or not gpu
        require(is_there, f"{hardware.name} has no GPU", gpu, "leave it out")
        ram = ByteSize.parse(options.ram or hardware.ram_bytes, "`ram`")
        gpu = gpu or hardware.gpu_bytes
    own_bytes = None
    if gpu is None and place is not None:
        own_bytes = free_gpu_bytes(place)
    has_gpu = gpu is not None or own_bytes is not None
    rates = rates_of(hardware) if hardware else USUAL_GPU if has_gpu else None
    return MemoryBudget(
        ram_bytes=ram,
        gpu_bytes=own_bytes if gpu is None else ByteSize.parse(gpu, "`gpu_memory`"),
        dtype=options.dtype,
        context=options.context,
        rule=options.rule,
        experts=options.experts if options.ranks is None else "layers",
        parallel=options.parallel,
        kv_dtype=options.kv_dtype,
        prompt_cache_bytes=options.prompt_cache_bytes,
        rates=rates if options.ranks is None else None,
    )


def ram_warning(ram: str | int) -> str | None:
    """Return a line for the user who allows more than there is, with what libraries will take."""
    wanted = ByteSize.parse(ram, "`ram`")
    free_bytes = available_ram_bytes()
    needed_bytes = library_bytes()
    if wanted + needed_bytes <= free_bytes:
        return None
    free = format_bytes(free_bytes, is_decimal=wanted.is_decimal)
    libraries = format_bytes(needed_bytes, is_decimal=wanted.is_decimal)
    needs = f"`ram` {wanted}" + (f" and {libraries} for Python" if wanted <= free_bytes else "")
    return f"{needs} is more than the {free} free here: it may not hold"


def require_no_states(files: ModelFiles, dtype: str) -> None:
    """Raise `UserError` for models that ranks cannot share, since layers keep states or choose."""
    for checkpoint in files:
        if checkpoint is None:
            continue
        shape = model_shape(checkpoint, dtype)
        if shape.recurrent.state_bytes:
            obstacle = "has recurrent or convolutional layers, whose states stay on one rank"
            raise UserError(f"{checkpoint.name} {obstacle}: leave `ranks` out")
        if shape.index_bytes_per_token:
            obstacle = (
                "has layers that choose by an index what they attend to, which stays on one rank"
            )
            raise UserError(f"{checkpoint.name} {obstacle}: leave `ranks` out")


def traffic_in(
    budget: MemoryBudget, files: ModelFiles, num_nodes: int, hardware: Hardware | None = None
) -> Traffic | None:
    """Return the bytes of a sweep with trees of this size; None where memory is too small."""
    try:
        return Traffic.from_plan(plan_memory(files, budget, num_nodes), hardware)
    except UserError:
        return None


def machine_costs(
    budget: MemoryBudget, files: ModelFiles, hardware: Hardware | None
) -> Costs | None:
    """Return the costs of a step on a named machine; None where nothing is known of computing."""
    if hardware is None or not hardware.flops_per_s:
        return None
    positions = int(FILLED_SHARE * plan_memory(files.alone, budget, 1).context)
    return costs_on(hardware, *shapes_of(files, budget.dtype), positions)


def prompt_costs(budget: MemoryBudget, files: ModelFiles, num_rows: int) -> Costs | None:
    """Return the costs of a prompt's pass by the rates that chose its rows; None without rates."""
    if budget.rates is None:
        return None
    own_s = row_s(model_shape(files.target, budget.dtype), budget.rates.flops_per_s)
    rows = (1, max(2, num_rows))
    compute_s = Curve(rows, tuple(own_s * num for num in rows))
    return replace(link_alone(budget.rates.link_bytes_per_s), compute_s=compute_s)


def with_experts(
    budget: MemoryBudget, files: ModelFiles, *, num_nodes: int | None = None
) -> MemoryBudget:
    """Return the budget with `experts` settled as demand or layers, by the usual routing.

    Profiles, whose counts are of experts on demand, come later. Without `num_nodes`, that of a
    named tree, the best trees are compared.
    """
    if budget.experts != "auto":
        return budget
    by_layers = replace(budget, experts="layers")
    if model_shape(files.target, budget.dtype).experts is None:
        return by_layers
    # a budget that is too small is refused later
    traffic = traffic_in(by_layers, files, budget.parallel * (num_nodes or 1))
    if traffic is not None and not traffic.is_streamed:
        return by_layers
    sizes = (
        [num_nodes]
        if num_nodes
        else [size for size in SIZES if size <= _MAX_NODES and (size == 1 or prior_for(files))]
    )
    # on demand, where both are equal
    ways = [replace(budget, experts="demand"), by_layers]
    return min(ways, key=partial(_s_per_token, files=files, sizes=sizes))


def _s_per_token(budget: MemoryBudget, files: ModelFiles, sizes: list[int]) -> float:
    """Return the cost per token at a byte per second with the best of these sizes, or infinity."""
    usual = prior_for(files) or SMALL
    trees = known_trees(usual.acceptance, max_nodes=max(sizes), max_depth=_MAX_DEPTH)
    times_s = [float("inf")]
    for size in sizes:
        num_rows = budget.parallel * size
        traffic = traffic_in(budget, files, num_rows)
        if traffic is not None:
            sweep_s = step_of(link_alone(1.0), traffic, num_rows, ()).sweep_s
            tokens = budget.parallel * trees.expected(size, min(_MAX_DEPTH, size))
            times_s.append(sweep_s / tokens)
    return min(times_s)
