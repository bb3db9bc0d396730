"""Whether routed experts had better come one by one or with their layers: told from headers, before anything is built.

What either way needs for a token is its bytes, with the tree that is best for it by the usual acceptance, since how
fast this machine computes is not known yet. Where a mixture chooses few of many experts one by one wins by far; where
its best tree needs nearly all of them anyway, both ways read the same, and whole layers keep nobody waiting. This is
the one place that decides it. No torch, no clock. Invariant: what was named is what is taken.
"""

from dataclasses import replace
from functools import partial

from offload.errors import UserError
from offload.memory.planner import Files, shape_of
from offload.planning.cost_model import Traffic, link_alone, step_of
from offload.planning.room import Room
from offload.planning.tree_search import Forest
from offload.planning.usual import usual_for
from offload.tree.sizes import SIZES
from offload.tree.topology import check_acceptance

_MAX_NODES, _MAX_DEPTH = 128, 16  # of the trees that are compared


def with_experts(room: Room, files: Files, *, num_nodes: int | None = None) -> Room:
    """The same room, in which `experts` is demand or layers, whatever tree memory is planned for.

    Routing is taken as is usual: profiles are looked for later, since their counts are of experts that come one by one.

    Args:
        num_nodes: of the tree that was named; None compares the best ones.
    """
    if room.experts != "auto":
        return room
    if shape_of(files.target, room.dtype).experts is None or not _is_streamed(room, files, num_nodes or 1):
        return replace(room, experts="layers")
    sizes = [num_nodes] if num_nodes else [size for size in SIZES if size <= _MAX_NODES and (size == 1 or files.draft)]
    ways = [replace(room, experts=experts) for experts in ("demand", "layers")]
    return min(ways, key=partial(_s_per_token, files=files, sizes=sizes))  # of equals the first


def _is_streamed(room: Room, files: Files, num_nodes: int) -> bool:
    """Whether not everything stays; what has no room at all is refused later."""
    try:
        return room.plan(files, num_nodes).is_streamed
    except UserError:
        return True


def _s_per_token(room: Room, files: Files, sizes: list[int]) -> float:
    """At a byte per second, with the best tree of these sizes; infinite where none has room."""
    forest = Forest(check_acceptance(usual_for(files.draft).acceptance), max_nodes=max(sizes), max_depth=_MAX_DEPTH)
    found = [float("inf")]
    for size in sizes:
        traffic = room.traffic(files, size)
        if traffic is not None:
            found.append(_sweep_s(traffic, size) / forest.expected(size, min(_MAX_DEPTH, size)))
    return min(found)


def _sweep_s(traffic: Traffic, num_rows: int) -> float:
    return step_of(link_alone(1.0), traffic, num_rows, ()).sweep_s
