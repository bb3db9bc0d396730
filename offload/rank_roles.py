"""The roles of ranks (`ranks`), the place of this process, and pipelines (`pipeline`).

`ranks`: with `shards` every rank streams its output rows of every layer. With `stages:0-2,draft:3`
consecutive layers lie on ranks 0 to 2 in that order, and rank 3 only drafts. Rank 0 has the text.

`pipeline` says how runs of a pipeline of stages follow each other; docs/ranks.md has its forms.

Invariant: `pipeline` never changes what is emitted. No torch, so a command can ask at once.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from offload.errors import UserError, require
from offload.rules import check_lenience, drafting_of

START = "start it by: offload launch -n 2 -- generate ..."
Mode = Literal["plain", "sync", "async"]
MOST_ROWS = 1024  # of a run, and most runs in flight: what caches are planned for
TIMED_ROWS = (1, 4, 8, 16, 32)  # of the runs that are timed
_LEAST_DECAY = 0.001  # of a cut for each attempt: from 1 to nothing in a thousand
_PAPER_ROWS = 4
_SYNC_NODES = 64
_FREE = 1.15  # rows whose run takes at most this many times that of one row cost nothing
_FORM = (
    "plain, sync or async, then for example ,rows=8,runs=3,cut=0.3/0.4/0.01,no-cancel,no-continuous"
)
_REQUIREMENT = "`ranks` must be shards or such as stages:0-2,draft:3"
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
_CARDS = re.compile(r"cuda:(\d{1,4}(?:,\d{1,4})+)|cpu(?:,cpu)+", re.ASCII)


class Roles(NamedTuple):
    """What each of `num_ranks` ranks does."""

    num_ranks: int
    stages: tuple[int, ...] = ()  # ranks in the order of their layers; empty when sharded
    draft: int | None = None  # the rank that only drafts, if there is one

    @property
    def is_sharded(self) -> bool:
        return not self.stages


def parse_roles(text: str, num_ranks: int) -> Roles:
    """Return the roles of `num_ranks` ranks. Raises `UserError` where they do not add up."""
    require(isinstance(text, str), _REQUIREMENT, repr(text), "leave it out for one process")
    if text == "shards":
        return Roles(num_ranks)
    named = _named_ranks(text)
    stages = named.get("stages", [])
    drafts = named.get("draft", [])
    highest = max((*stages, *drafts), default=0)
    idle = sorted({*range(1, num_ranks)} - {*stages, *drafts})
    is_named = len(stages) > 0 and len(drafts) < 2
    requirement = "a rank in `ranks` must be one stage"
    require(is_named, _REQUIREMENT, text, "name the stages, and one draft rank")
    require(len({*stages}) == len(stages), requirement, text, "name each rank once")
    requirement = "rank 0 in `ranks` must be a stage, since it has the text"
    require(0 in stages, requirement, text, "name 0 among the stages")
    requirement = "the draft rank in `ranks` must be no stage"
    require(not {*drafts} & {*stages}, requirement, text, "leave draft out to have rank 0 draft")
    requirement = f"`ranks` must name ranks from 0 to {num_ranks - 1}"
    require(highest < num_ranks, requirement, text, f"start {highest + 1} ranks")
    remedy = f"name {', '.join(map(str, idle))} too, or start fewer"
    require(not idle, f"`ranks` must have a role for each of {num_ranks} ranks", text, remedy)
    return Roles(num_ranks, tuple(stages), drafts[0] if drafts else None)


def require_exact_rule(roles: Roles, rule: str, lenience: float) -> None:
    """Raise `UserError` for a rule or lenience that stages cannot verify."""
    if roles.is_sharded:
        return
    if drafting_of(rule).keeps_distributions:
        why = "compares the chances of draft and target, which stages never have in one place"
        raise UserError(f"`rule` {rule} {why}: use `rule` match, or `ranks` shards")
    if check_lenience(lenience, rule) < 1:
        why = "changes what the last of the stages has drawn already"
        raise UserError(f"`lenience` {lenience:g} {why}: leave it out, or use `ranks` shards")


def _named_ranks(text: str) -> dict[str, list[int]]:
    """Return {role: ranks}; a part without a role continues the list before it."""
    ranks_of = dict[str, list[int]]()
    name = ""
    for part in text.split(","):
        before, colon, ranks = part.rpartition(":")
        if colon:
            is_role = before in ("stages", "draft")
            require(is_role, _REQUIREMENT, text, f"{before or 'an empty name'} is no role")
            require(before not in ranks_of, _REQUIREMENT, text, "name each role once")
            name = before
            ranks_of[name] = []
        match = _RANGE.fullmatch(ranks)
        if match is None or not name:
            raise UserError(
                f"{_REQUIREMENT}, got {text!r:.80}: ranks are numbers, such as 0,1 or 0-2"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        remedy = "name ranks one by one for another order"
        require(first <= last, "a range in `ranks` must rise", text, remedy)
        ranks_of[name] += range(first, last + 1)
    return ranks_of


class RankInfo(NamedTuple):
    """One of `num_ranks` processes; rank 0 owns standard input and output."""

    rank: int
    num_ranks: int
    host_index: int  # rank 0 is on host 0
    rank_on_host: int
    num_on_host: int
    address: str  # of the rendezvous
    port: int


_PLACE = ContextVar[RankInfo | None]("place", default=None)


@contextmanager
def placed(place: RankInfo) -> Iterator[None]:
    """Let `find_place` return this meanwhile, in this thread, whatever the environment says."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def is_placed() -> bool:
    """Return True within `placed`."""
    return _PLACE.get() is not None


def cards_of(device: str) -> tuple[str, ...]:
    """Return the device of each rank where a name is that of several, such as `cuda:0,1`; else none.

    `cpu,cpu` rehearses two cards on the host. Raises `UserError` for a card that is named twice.
    """
    match = _CARDS.fullmatch(device)
    if match is None:
        return ()
    if match[1] is None:
        return tuple(device.split(","))
    numbers = [int(number) for number in match[1].split(",")]
    requirement = "`device` must name each card once"
    require(len({*numbers}) == len(numbers), requirement, device, "such as cuda:0,1")
    return tuple(f"cuda:{number}" for number in numbers)


def shared_by(device: str, ranks: str | None) -> str | None:
    """Return the option by which several processes share the target, as error lines name it."""
    if cards_of(device) and ranks in (None, "shards"):
        return f"`device` {device}"
    return None if ranks is None else f"`ranks` {ranks}"


def require_no_launcher(device: str, words: str | None = None) -> None:
    """Raise `UserError` where another launcher starts this, and the processes of these cards are its.

    `words` name a launcher that is about to; else the environment tells of one.
    """
    launcher = words or ("torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else None)
    requirement = f"`device` {device} starts a process for each card by itself"
    require(
        launcher is None, requirement, launcher, "leave that out, or name one card for each rank"
    )


def find_place(environment: Mapping[str, str] | None = None) -> RankInfo | None:
    """Return the place that `placed` gives, else torchrun's settings, or None.

    An environment that is named is asked alone. Raises `UserError` for impossible numbers.
    """
    if environment is None:
        if (place := _PLACE.get()) is not None:
            return place
        environment = os.environ
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    address = environment.get("MASTER_ADDR", "")
    require(address != "", "MASTER_ADDR must be set beside RANK", "nothing", START)
    rank = _number(environment, "RANK")
    num_ranks = _number(environment, "WORLD_SIZE")
    require(rank < num_ranks, f"RANK must be less than WORLD_SIZE {num_ranks}", rank, START)
    port = _number(environment, "MASTER_PORT")
    require(0 < port < 2**16, "MASTER_PORT must lie in 1 to 65535", port, START)
    return RankInfo(
        rank,
        num_ranks,
        _number(environment, "GROUP_RANK", 0),
        _number(environment, "LOCAL_RANK", rank),
        _number(environment, "LOCAL_WORLD_SIZE", num_ranks),
        address,
        port,
    )


def require_place() -> RankInfo:
    """Return torchrun's settings. Raises `UserError` where there are none."""
    if (place := find_place()) is None:
        requirement = "`ranks` needs several processes that know each other"
        raise UserError(f"{requirement}, got one by itself: {START}")
    return place


def is_worker(ranks: str | None) -> bool:
    """Return True if another rank talks to the user; never without `ranks`. Raises `UserError`."""
    place = None if ranks is None else find_place()
    return place is not None and place.rank > 0


def own_value(text: str, flag: str, place: RankInfo | None) -> str:
    """Return this rank's of one value per rank, or that for all. Raises `UserError`."""
    values = text.split(",")
    if place is None or len(values) == 1:
        return text
    requirement = f"{flag} must have one value, or one for each of {place.num_ranks} ranks"
    require(len(values) == place.num_ranks, requirement, text, "the first is rank 0's")
    return values[place.rank]


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environment.get(name, "" if otherwise is None else str(otherwise))
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    require(is_number, f"{name} must be a whole number", repr(text), START)
    return int(text)


class FixedCutoff(NamedTuple):
    """The numbers of PipeInfer's cut-off on the draft's own probability of a token."""

    start: float
    recovery: float
    decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """How runs follow each other. Raises `UserError` for options that contradict each other."""

    mode: Mode = "async"
    cancels: bool = True
    is_continuous: bool = True
    credits: int | None = None  # most runs in flight; None is one more than there are stages
    micro_batch: int | None = None  # rows of a run; None takes as many as cost next to no time
    cut: FixedCutoff | None = None  # None uses a price instead

    def __post_init__(self) -> None:
        mode = self.mode
        requirement = "`pipeline` must be plain, sync or async"
        require(mode in get_args(Mode), requirement, repr(mode), f"try {_FORM}")
        for name, count in (("rows", self.micro_batch), ("runs", self.credits)):
            requirement = f"{name} of `pipeline` must be 1 to {MOST_ROWS}"
            require(count is None or 1 <= count <= MOST_ROWS, requirement, count, "leave it out")
        for part in self.cut or ():
            requirement = "start, recovery and decay of `pipeline` must lie in [0, 1]"
            require(0 <= part <= 1, requirement, part, "try cut=0.3/0.4/0.01")
        decay = self.cut.decay if self.cut else 0.0
        requirement = f"decay of `pipeline` must be 0 or {_LEAST_DECAY} at least"
        require(decay == 0 or decay >= _LEAST_DECAY, requirement, decay, "try cut=0.3/0.4/0.01")
        for name, is_set, modes in (
            ("runs", self.credits is not None, ["async"]),
            ("no-cancel", not self.cancels, ["async"]),
            ("no-continuous", not self.is_continuous, ["async"]),
            ("rows", self.micro_batch is not None, ["sync", "async"]),
            ("cut", self.cut is not None, ["sync", "async"]),
        ):
            requirement = f"{name} of `pipeline` goes with {' or '.join(modes)}"
            require(not is_set or mode in modes, requirement, mode, f"leave {name} out")

    @property
    def speculates(self) -> bool:
        return self.mode != "plain"

    def num_runs(self, num_stages: int) -> int:
        """Return the most runs in flight: one a stage, and one that waits; more add latency."""
        return (self.credits or num_stages + 1) if self.mode == "async" else 1

    def num_rows(self, num_free: int = _PAPER_ROWS) -> int:
        """Return the most rows of a run, where `num_free` cost a stage next to no extra time."""
        if self.mode == "plain":
            return 1
        return self.micro_batch or (_SYNC_NODES if self.mode == "sync" else num_free)


def free_rows(seconds: Sequence[float]) -> int:
    """Count the rows that cost next to no time, by seconds of some or all `TIMED_ROWS`."""
    timed = zip(TIMED_ROWS, seconds, strict=False)
    return max(rows for rows, took_s in timed if took_s <= _FREE * seconds[0])


def parse_pipeline(text: str) -> PipelineOptions:
    """Parse `--pipeline`. Raises `UserError` for unknown forms and contradictions."""
    mode, *settings = str(text).strip().lower().split(",")
    fields: dict[str, object] = {}
    for setting in settings:
        name, _, value = setting.strip().partition("=")
        is_new = name in _SETTINGS and _SETTINGS[name][0] not in fields
        require(is_new, "`pipeline` must be a mode and settings, each once", text, _FORM)
        field, read = _SETTINGS[name]
        try:
            fields[field] = read(value)
        except ValueError:
            raise UserError(f"{name} of `pipeline` cannot be {value!r:.80}: {_FORM}") from None
    return PipelineOptions(mode=mode, **fields)  # type: ignore[arg-type]


def _cut(value: str) -> FixedCutoff:
    start, recovery, decay = map(float, value.split("/"))
    return FixedCutoff(start, recovery, decay)


def _switched_off(value: str) -> bool:
    if value:
        raise ValueError
    return False


_SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "rows": ("micro_batch", int),
    "runs": ("credits", int),
    "cut": ("cut", _cut),
    "no-cancel": ("cancels", _switched_off),
    "no-continuous": ("is_continuous", _switched_off),
}
