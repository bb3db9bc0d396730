"""Where this process stands among many, as torchrun's environment says; no torch, so that a command can ask at once."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from offload.config import require
from offload.errors import UserError

START = "start it by: offload launch -n 2 -- generate ..."


class Place(NamedTuple):
    """One of `num_ranks` processes; rank 0 owns standard input and output."""

    rank: int
    num_ranks: int
    host_index: int  # which of the hosts this is; rank 0 is on host 0
    rank_on_host: int
    num_on_host: int
    address: str  # where all meet
    port: int


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What torchrun has set; None where nobody has. Raises `UserError` for numbers that cannot be."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    address = environment.get("MASTER_ADDR", "")
    require(address != "", "MASTER_ADDR must be set beside RANK", "nothing", START)
    rank, num_ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    require(rank < num_ranks, f"RANK must be less than WORLD_SIZE {num_ranks}", rank, START)
    return Place(
        rank, num_ranks, _number(environment, "GROUP_RANK", 0), _number(environment, "LOCAL_RANK", rank),
        _number(environment, "LOCAL_WORLD_SIZE", num_ranks), address, _number(environment, "MASTER_PORT"),
    )  # fmt: skip


def require_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The same, where there must be one. Raises `UserError`."""
    if (place := find_place(environment)) is None:
        raise UserError(f"`ranks` needs several processes that know each other, got one by itself: {START}")
    return place


def own_value(text: str, flag: str, place: Place | None) -> str:
    """Of a list with one value per rank this rank's; one value is for all. Raises `UserError` for another length."""
    values = text.split(",")
    if place is None or len(values) == 1:
        return text
    rule = f"{flag} must have one value, or one for each of {place.num_ranks} ranks"
    require(len(values) == place.num_ranks, rule, text, "the first is rank 0's")
    return values[place.rank]


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environment.get(name, "" if otherwise is None else str(otherwise))
    require(text.isascii() and text.isdigit() and len(text) < 10, f"{name} must be a whole number", repr(text), START)
    return int(text)
