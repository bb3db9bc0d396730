"""What `offload pack` would win, forecast from the exponents of a few weights where these lie here."""

from typing import NamedTuple

from offload.checkpoint.sizes import model_shape
from offload.errors import UserError
from offload.memory.planner import MemoryBudget, ModelFiles
from offload.packing.forecast import PackingForecast, as_packed, forecast
from offload.planning.cost_model import Traffic
from offload.planning.hardware import Hardware


class Packing(NamedTuple):
    """What `offload pack` would make of the target, and of a weight pass with the same tree."""

    forecast: PackingForecast
    # bytes of one pass; None where packing is not worth it, or needs more memory than there is
    streamed_bytes: int | None
    sweep_s: float | None

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        own = {"bytes_per_sweep": self.streamed_bytes, "sweep_s": self.sweep_s}
        return {**self.forecast._asdict(), "share": self.forecast.share, **own}


def packing_of(
    files: ModelFiles,
    budget: MemoryBudget,
    num_nodes: int,
    hardware: Hardware | None,
    link_bytes_per_s: float | None,
) -> Packing | None:
    """Return what packing the target would win, None where there is nothing to pack."""
    found = forecast(files.target)
    if found is None:
        return None
    if not found.is_worth_it:
        return Packing(found, None, None)
    packed = as_packed(files.target, found)
    # stacks that `packing.stacks` does not take apart come whole
    if budget.experts == "demand" and model_shape(packed).experts is None:
        return None
    try:
        plan = budget.plan(files._replace(target=packed), num_nodes)
    # what weights are expanded into takes room as well
    except UserError:
        return Packing(found, None, None)
    streamed_bytes = Traffic.of(plan, hardware).bytes_at(1)
    return Packing(
        found,
        round(Traffic.of(plan).bytes_at(1)),
        None if link_bytes_per_s is None else streamed_bytes / link_bytes_per_s,
    )
