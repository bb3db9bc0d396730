"""What each of several cards of one machine will hold and stream, as `device` names them.

Each card is a rank with its share of the host's memory and disk. The link to a card is assumed, and
computing and exchanging are left out, so seconds are a lower bound. Invariant: no weight is read but
to measure the disk.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.sizes import ModelFacts
from offload.distributed.layout import CardLayers, layer_bytes_of
from offload.engine.resolve import resolve
from offload.errors import require
from offload.memory.plan import MemoryPlan
from offload.planning.budget import require_no_states
from offload.planning.cost_model import Traffic
from offload.planning.hardware import DEVICE_LINK_BYTES_PER_S, Assumptions, Hardware
from offload.planning.load_options import LoadOptions
from offload.reports.estimate import facts_of, models_told
from offload.units import parse_size


class CardPlan(NamedTuple):
    """What one card has of the target."""

    machine: Hardware
    share: float  # of all layers' bytes
    plan: MemoryPlan

    @property
    def link_s(self) -> float:
        """Seconds in which its link, or the disk behind it, brings what does not stay."""
        traffic = Traffic.from_plan(self.plan, self.machine)
        return traffic.streamed_bytes / self.machine.feed_bytes_per_s

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        return {
            "name": self.machine.name,
            "share": self.share,
            "bytes_per_pass": self.plan.streamed_bytes,
            "link_s": self.link_s,
            "plan": self.plan.as_dict(),
        }


class CardsPlan(NamedTuple):
    """All cards, and how they share the target."""

    models: tuple[ModelFacts, ...]
    is_sharded: bool
    cards: tuple[CardPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def pass_s(self) -> float:
        """Seconds that links need for a pass: shards read at once, stages take turns."""
        seconds = [card.link_s for card in self.cards]
        return max(seconds) if self.is_sharded else sum(seconds)

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        return {
            "fits": True,
            "ranks": "shards" if self.is_sharded else "stages",
            "pass_s": self.pass_s,
            "models": models_told(self.models),
            "cards": [card.as_dict() for card in self.cards],
            "notes": list(self.notes),
        }


def plan_cards(options: LoadOptions, assumed: Assumptions) -> CardsPlan:
    """Plan the cards that `options` name, of this machine or of an assumed one.

    Raises `UserError` for cards that are not there, and for models that have no room on them or
    cannot be shared so.
    """
    is_limited = options.gpu_memory is not None
    requirement = "`gpu_memory` limits each card"
    require(
        not is_limited or "cpu" not in options.cards, requirement, options.device, "leave it out"
    )
    roles = options.roles()
    assert roles is not None, "several cards are ranks"
    alone = replace(options, device="auto", ram=None, gpu_memory=None, ranks=None, pipeline=None)
    machines = _machines_of(options, assumed)
    setup = resolve(alone, assumed=Assumptions(machines[0]), admit=lambda _: None)
    require_no_states(setup.files, setup.dtype)
    layers = CardLayers(setup, options)
    files = (layers.shards if roles.is_sharded else layers.stages)(machines)
    whole_bytes = layer_bytes_of(setup.files)
    cards = tuple(
        CardPlan(machine, layer_bytes_of(part) / whole_bytes, layers.plan(part, machine))
        for machine, part in zip(machines, files, strict=True)
    )
    return CardsPlan(facts_of(setup), roles.is_sharded, cards, setup.notes)


def _machines_of(options: LoadOptions, assumed: Assumptions) -> list[Hardware]:
    """Return each card as a machine with its share of the host's memory and disk."""
    cards = options.cards
    machine = assumed.hardware
    if machine is None:
        disk = assumed.disk_bytes_per_s or _disk_bytes_per_s(options)
        machine = Hardware(name="host", ram_bytes=options.machine_ram_bytes, disk_bytes_per_s=disk)
    elif options.ram is not None:
        machine = replace(machine, ram_bytes=parse_size(options.ram, "`ram`"))
    is_here = assumed.hardware is None
    host = replace(
        machine,
        ram_bytes=machine.ram_bytes // len(cards),
        disk_bytes_per_s=machine.disk_bytes_per_s / len(cards),
    )
    return [
        replace(
            host,
            name=card if card != "cpu" else f"cpu {number}",
            **_of_card(options, card, is_here),
        )
        for number, card in enumerate(cards)
    ]


def _of_card(options: LoadOptions, card: str, is_here: bool) -> dict[str, Any]:
    """Return a card's memory, as far as it is not that of the assumed machine."""
    given = options.gpu_memory
    limit = {} if given is None else {"gpu_bytes": parse_size(given, "`gpu_memory`")}
    if card == "cpu" or not is_here:
        return limit
    from offload.planning.budget import free_gpu_bytes
    from offload.streaming.cuda import find_card

    find_card(card)
    # computing is left out, whatever its rates
    rates = {
        "link_bytes_per_s": DEVICE_LINK_BYTES_PER_S,
        "flops_per_s": 1.0,
        "memory_bytes_per_s": 1.0,
    }
    return {"gpu_bytes": free_gpu_bytes(card), **rates, **limit}


def _disk_bytes_per_s(options: LoadOptions) -> float:
    """Measure the disk that the target is on. Raises `UserError` where that is elsewhere."""
    from offload.model.headers import describe

    target = describe(options.model, options.config)
    requirement = "the disk of several cards is measured where the weights are"
    require(target.is_here, requirement, "a model that is not here", "give `disk_speed`")
    return link_bytes_per_s(target.shards)
