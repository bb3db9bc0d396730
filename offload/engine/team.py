"""The processes that run one target together, as loading asks them; here: one process by itself.

Who hears of how far loading and decoding have come. Nothing heavy is imported.
"""

from typing import Any, NamedTuple

from offload.engine.hooks import Hooks
from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles
from offload.model.target import Target
from offload.planning.cost_model import NOTHING, Curve
from offload.planning.options import LoadOptions
from offload.planning.room import MemoryBudget
from offload.streaming.device import Device
from offload.streaming.disk import OpenSource


class LoadContext(NamedTuple):
    """What a rank was told to load, and with what."""

    files: ModelFiles
    options: LoadOptions
    room: MemoryBudget
    device: Device | None
    open_source: OpenSource
    hooks: Hooks


class Team:
    """A process that has all of the target."""

    exchange_s: Curve = NOTHING  # what a pass takes beside computing, against its rows
    notes: tuple[str, ...] = ()  # for the user
    profile: str | None = None  # to go by instead of the one that is asked for
    is_alone = True

    def own(self, files: ModelFiles) -> ModelFiles:
        """What of the checkpoints this process reads."""
        return files

    def adapt(self, meta_model: Any) -> None:
        """Cut the model to what this process computes."""

    def settle(self, plan: MemoryPlan) -> None:
        """Let the others load what the plan leaves to them. Raises `UserError` where one of them
        cannot.
        """

    def target(self, *args: Any, **more: Any) -> Target:
        """A `Target` of these arguments, which speaks for all."""
        return Target(*args, **more)
