"""Who does what among many ranks, as `ranks` says it. Pure: a text and a number of ranks, no torch.

`shards`: every rank streams its output rows of every layer. `stages:0-2,draft:3`: consecutive layers lie on those ranks
in that order, and one rank only drafts. Rank 0 has the text in either case. Invariant: every rank has something to do.
"""

import re
from typing import NamedTuple

from offload.config import check_lenience, drafting_of, require
from offload.errors import UserError

_RULE = "`ranks` must be shards or such as stages:0-2,draft:3"
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


class Roles(NamedTuple):
    """What each of `num_ranks` is for."""

    num_ranks: int
    stages: tuple[int, ...] = ()  # ranks by the order of their layers; none where every layer is sharded
    draft: int | None = None  # the rank that drafts beside the stages, if one does

    @property
    def is_sharded(self) -> bool:
        """Whether all ranks have a part of every layer."""
        return not self.stages


def parse_roles(text: str, num_ranks: int) -> Roles:
    """Roles of so many ranks. Raises `UserError` where they do not add up."""
    require(isinstance(text, str), _RULE, repr(text), "leave it out for one process")
    if text == "shards":
        return Roles(num_ranks)
    named = _named_ranks(text)
    stages, drafts = named.get("stages", []), named.get("draft", [])
    require(len(stages) > 0 and len(drafts) < 2 and len(named) <= 2, _RULE, text, "name the stages, and one draft rank")
    require(len({*stages}) == len(stages), "a rank in `ranks` must be one stage", text, "name each rank once")
    require(0 in stages, "rank 0 in `ranks` must be a stage, since it has the text", text, "name 0 among the stages")
    is_apart = not {*drafts} & {*stages}
    require(is_apart, "the draft rank in `ranks` must be no stage", text, "leave draft out to have rank 0 draft")
    unknown = [rank for rank in (*stages, *drafts) if rank >= num_ranks]
    require(not unknown, f"`ranks` must name ranks from 0 to {num_ranks - 1}", text, f"start {_started(unknown)} ranks")
    idle = sorted({*range(1, num_ranks)} - {*stages, *drafts})
    remedy = f"name {', '.join(map(str, idle))} too, or start fewer"
    require(not idle, f"`ranks` must have a role for each of {num_ranks} ranks", text, remedy)
    return Roles(num_ranks, tuple(stages), drafts[0] if drafts else None)


def require_exact_rule(roles: Roles, rule: str, lenience: float) -> None:
    """Refuse what stages cannot verify. Raises `UserError`."""
    if roles.is_sharded:
        return
    if drafting_of(rule).keeps_distributions:
        raise UserError(
            f"`rule` {rule} compares the chances of draft and target, which stages never have in one place: "
            "use `rule` match, or `ranks` shards"
        )
    if check_lenience(lenience, rule) < 1:
        raise UserError(
            f"`lenience` {lenience:g} changes what the last of the stages has drawn already: leave it out, or use "
            "`ranks` shards"
        )


def _named_ranks(text: str) -> dict[str, list[int]]:
    """{name: ranks}; a part without a name goes on with the list before it."""
    found, name = dict[str, list[int]](), ""
    for part in text.split(","):
        before, colon, ranks = part.rpartition(":")
        if colon:
            require(before in ("stages", "draft"), _RULE, text, f"{before or 'an empty name'} is no role")
            require(before not in found, _RULE, text, "name each role once")
            name, found[before] = before, []
        match = _RANGE.fullmatch(ranks)
        if match is None or not name:
            raise UserError(f"{_RULE}, got {text!r:.80}: ranks are numbers, such as 0,1 or 0-2")
        first, last = int(match[1]), int(match[2] or match[1])
        require(first <= last, "a range in `ranks` must rise", text, "name ranks one by one for another order")
        found[name] += range(first, last + 1)
    return found


def _started(unknown: list[int]) -> int:
    return max(unknown, default=0) + 1
