"""The processes that run one target together, as loading asks them; here: one process by itself.

How several load it, `offload.distributed`, which lies above, says in `LOADERS`. `import offload`
reads this file, so it imports nothing that takes time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from offload.rank_roles import is_placed, placed

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder
    from offload.engine.request import Request
    from offload.engine.setup import Setup
    from offload.memory.plan import MemoryPlan
    from offload.model.target import Target
    from offload.planning.cost_model import Curve
    from offload.planning.load_options import LoadOptions
    from offload.rank_roles import RankInfo

# given the setup, the first request, what a decoder takes over to close in the end, the transport;
# on a rank that is not the head they raise `SystemExit` when it has served
Loader = Callable[["Setup", "Request", ExitStack, Any], "Decoder"]
LOADERS: dict[Literal["shards", "stages"], Loader] = {}
# starts a process for each card but the first, which this process computes on; gives its place
Starter = Callable[["LoadOptions"], AbstractContextManager["RankInfo"]]
STARTERS: dict[Literal["cards"], Starter] = {}


@contextmanager
def beside_cards(setup: "Setup", resources: ExitStack, transport: Any) -> Iterator[None]:
    """Start a process for each other card, if any: this one has its place among them meanwhile.

    They end with `resources`. Ranks that were started elsewhere have their places.
    """
    options = setup.options
    if not options.cards or transport is not None or is_placed():
        yield
        return
    setup.hooks.on_phase(f"starting a process for each of {len(options.cards)} cards")
    with placed(resources.enter_context(STARTERS["cards"](options))):
        yield


class Team:
    """A process that has all of the target."""

    exchange_s: "Curve | None" = None  # what a pass takes beside computing, against its rows
    notes: tuple[str, ...] = ()  # for the user
    # cuts a model without weights to what this process computes
    adapt: Callable[[Any], None] | None = None
    is_alone = True

    def local_setup(self, setup: "Setup") -> "Setup":
        """Return the setup with what this process reads of the checkpoints."""
        return setup

    def tell_plan(self, plan: "MemoryPlan") -> None:
        """Send the plan to the other processes, which load. Raises `UserError` if one cannot."""

    def target(self, *args: Any, **kwargs: Any) -> "Target":
        """Return a `Target` of these arguments, which speaks for all."""
        from offload.model.target import Target

        return Target(*args, **kwargs)
