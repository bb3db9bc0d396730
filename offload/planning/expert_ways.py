"""How the experts of a mixture come: one by one as passes need them, or with their layers.

It is decided from headers alone, by the bytes per token of either way with the tree that is best
for it by the default acceptance, since how fast this machine computes is not known yet. Where a
mixture chooses few of many experts, on demand wins by far; where its best tree needs nearly all of
them, both ways read the same, and whole layers are never waited for. No torch.
"""

from dataclasses import replace
from functools import partial

from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.memory.planner import MemoryBudget, ModelFiles
from offload.planning.acceptance import prior_for
from offload.planning.cost_model import Traffic, link_alone, step_of
from offload.planning.room import traffic_in
from offload.planning.search import known_trees
from offload.trees.topology import SIZES

# the trees that are compared
_MAX_NODES = 128
_MAX_DEPTH = 16


def with_experts(
    budget: MemoryBudget, files: ModelFiles, *, num_nodes: int | None = None
) -> MemoryBudget:
    """Return the budget with `experts` settled as demand or layers.

    Routing is taken as is usual: profiles are looked for later, since their counts are of experts
    that are read on demand.

    Args:
        num_nodes: of the tree that was named; None compares the best ones.
    """
    if budget.experts != "auto":
        return budget
    if model_shape(files.target, budget.dtype).experts is None or not _is_streamed(
        budget, files, num_nodes or 1
    ):
        return replace(budget, experts="layers")
    sizes = (
        [num_nodes]
        if num_nodes
        else [size for size in SIZES if size <= _MAX_NODES and (size == 1 or files.draft)]
    )
    ways = [replace(budget, experts=experts) for experts in ("demand", "layers")]
    # on demand, where both are equal
    return min(ways, key=partial(_s_per_token, files=files, sizes=sizes))


def _is_streamed(budget: MemoryBudget, files: ModelFiles, num_nodes: int) -> bool:
    """Return whether layers are streamed; a budget that is too small is refused later."""
    try:
        return budget.plan(files, num_nodes).is_streamed
    except UserError:
        return True


def _s_per_token(budget: MemoryBudget, files: ModelFiles, sizes: list[int]) -> float:
    """Return the cost per token at a byte per second, with the best tree of these sizes.

    It is infinite where none fits.
    """
    trees = known_trees(
        prior_for(files.draft).acceptance, max_nodes=max(sizes), max_depth=_MAX_DEPTH
    )
    found = [float("inf")]
    for size in sizes:
        traffic = traffic_in(budget, files, size)
        if traffic is not None:
            found.append(_sweep_s(traffic, size) / trees.expected(size, min(_MAX_DEPTH, size)))
    return min(found)


def _sweep_s(traffic: Traffic, num_rows: int) -> float:
    return step_of(link_alone(1.0), traffic, num_rows, ()).sweep_s
