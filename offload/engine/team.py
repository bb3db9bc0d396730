"""The processes that run one target together, as loading asks them; here: one process by itself.

Who hears of how far loading and decoding have come. Nothing heavy is imported.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles
from offload.model.target import Target
from offload.planning.cost_model import NOTHING, Curve
from offload.planning.options import LoadOptions
from offload.planning.room import MemoryBudget
from offload.streaming.device import Device
from offload.streaming.disk import OpenSource

Progress = Callable[[int, int], None]  # bytes landed, bytes in all
Counted = Callable[[int, int, str], None]  # how many are done, how many there are, of what


class Hooks(NamedTuple):
    """What to call; whatever is raised there ends the work."""

    on_phase: Callable[[str], None] = lambda what: None  # with what is about to be done
    on_bytes: Progress = lambda done, total: None  # for every slab that a phase has read
    on_count: Counted = lambda done, total, what: None  # for windows or rounds of a tune
    on_layer: Callable[[], None] = lambda: None  # for every layer that a sweep has run
    # for what weights show when they are first seen
    on_note: Callable[[str], None] = lambda line: None


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
