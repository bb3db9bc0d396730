"""What `offload pack` would win, said before anybody packs: by exponents of a few weights where these lie here.

Invariant: no more is read than the forecast's few pieces.
"""

from typing import NamedTuple

from offload.checkpoint.packing_forecast import PackingForecast, as_packed, forecast
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.memory.planner import Files
from offload.planning.cost_model import Traffic
from offload.planning.hardware import Hardware
from offload.planning.room import Room


class Packing(NamedTuple):
    """What `offload pack` would make of the target, and of a sweep with the same tree."""

    forecast: PackingForecast
    streamed_bytes: int | None  # of a sweep; None where it is not worth it, or needs more memory than there is
    sweep_s: float | None

    def as_dict(self) -> dict[str, object]:
        """For programs."""
        own = {"bytes_per_sweep": self.streamed_bytes, "sweep_s": self.sweep_s}
        return {**self.forecast._asdict(), "share": self.forecast.share, **own}


def packing_of(
    files: Files, room: Room, num_nodes: int, hardware: Hardware | None, link_bytes_per_s: float | None
) -> Packing | None:
    """Of the target, with trees of so many nodes; None where there is nothing to pack."""
    found = forecast(files.target)
    if found is None:
        return None
    if not found.is_worth_it:
        return Packing(found, None, None)
    packed = as_packed(files.target, found)
    if room.experts == "demand" and model_shape(packed).experts is None:  # a packed stack of experts comes whole
        return None
    try:
        plan = room.plan(files._replace(target=packed), num_nodes)
    except UserError:  # what weights are expanded into takes room as well
        return Packing(found, None, None)
    streamed_bytes = Traffic.of(plan, hardware).bytes_at(1)
    return Packing(
        found,
        round(Traffic.of(plan).bytes_at(1)),
        None if link_bytes_per_s is None else streamed_bytes / link_bytes_per_s,
    )
