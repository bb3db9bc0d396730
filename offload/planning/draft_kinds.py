"""What `draft` may name: the kinds of drafts, one row each, and the parts that are joined by `+`.

A draft has headers of its own (a small model's folder), or headers made of the target's (a copy in
fewer bits, layers that the target's files carry). Which class runs it is the module's that the row
names, see `offload.drafting.registry`. Invariant: a name is parsed here and nowhere else.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.checkpoint.assistants import assistant_checkpoint
from offload.checkpoint.blocks import dflash_checkpoint
from offload.checkpoint.carried import has_mtp, mtp_checkpoint
from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.heads import (
    ASSISTANT,
    DFLASH,
    EAGLE3,
    eagle3_checkpoint,
    head_kind,
    refuse_other_heads,
)
from offload.checkpoint.open import require_name
from offload.errors import UserError, require
from offload.planning.quantised_drafts import OWN, copied, copy_and_scout, held_draft

PathLike = str | os.PathLike[str]
MODEL = "model"
AUTO = "auto"
_LOOKUP = "lookup"
_STORE = "store"
# what is behind the colon of these is a folder, which must be named
_NEEDS_PATH = {EAGLE3: "head", DFLASH: "head", ASSISTANT: "head", _STORE: "store"}


@dataclass(frozen=True)
class DraftKind:
    """How a kind of draft comes about.

    Args:
        opens: the module of `offload.drafting` that has its `open_proposer`.
        of_target: makes the draft's headers of the target's, and of what stands behind the colon;
            None where a folder of its own has them.
        adapt: changes headers of a folder of its own to those that are loaded beside the target's.
        lies_in: whether a target's own files have it.
        works_in_ranks: whether several processes can share the target.
        is_scout: whether it may guess below a copy.
    """

    opens: str
    of_target: Callable[[Checkpoint, str], Checkpoint] | None = None
    adapt: Callable[[Checkpoint, Checkpoint], Checkpoint] = lambda _, draft: draft
    lies_in: Callable[[Checkpoint], bool] = lambda _: False
    works_in_ranks: bool = False
    is_scout: bool = False


KINDS = {
    MODEL: DraftKind("offload.drafting.model_drafter", works_in_ranks=True, is_scout=True),
    OWN: DraftKind("offload.drafting.model_drafter", of_target=copied),
    "mtp": DraftKind(
        "offload.drafting.mtp", of_target=mtp_checkpoint, lies_in=has_mtp, is_scout=True
    ),
    EAGLE3: DraftKind("offload.drafting.eagle3", adapt=eagle3_checkpoint),
    DFLASH: DraftKind("offload.drafting.dflash", adapt=dflash_checkpoint),
    ASSISTANT: DraftKind("offload.drafting.assistant", adapt=assistant_checkpoint),
}
# what the files carry, until trials have shown what is quickest
KINDS[AUTO] = KINDS["mtp"]


class DraftSpec(NamedTuple):
    """What is named by `draft`: a draft with weights, or a copy and its scout, and sources beside it."""

    draft: str | None
    looks_up: bool
    store: str | None

    @classmethod
    def parse(cls, text: PathLike) -> "DraftSpec":
        """Return the parts of `A+B`. Raises `UserError` for two drafts, or two stores."""
        require_name(text)
        whole = os.fspath(text)
        parts = [whole] if os.path.exists(whole) else whole.split("+")
        drafts = list[str]()
        stores = list[str]()
        for part in parts:
            _require_value(part)
            kind, colon, path = part.partition(":")
            if kind == _STORE and colon:
                stores.append(path)
            elif part != _LOOKUP:
                drafts.append(part)
        lookups = [part for part in parts if part == _LOOKUP]
        requirement = (
            "`draft` joins one draft, or a copy and one below it, with lookup and one store:PATH"
        )
        kinds = [kind_of(draft)[0] for draft in drafts]
        are_tiers = kinds[:1] == [OWN] and AUTO not in kinds
        are_tiers = are_tiers and all(KINDS[kind].is_scout for kind in kinds[1:])
        for named, most in ((drafts, 2 if are_tiers else 1), (stores, 1), (lookups, 1)):
            require(
                len(named) <= most,
                requirement,
                " and ".join(named),
                "leave out those that are too many",
            )
        require("" not in drafts, requirement, repr(whole), "name each, such as mtp+lookup")
        return cls("+".join(drafts) or None, bool(lookups), next(iter(stores), None))


def _require_value(part: str) -> None:
    """Refuse a head or a store without its folder, and a value behind what takes none."""
    kind, colon, value = part.partition(":")
    if kind in _NEEDS_PATH and (colon or not os.path.isdir(part)):
        requirement = f"`draft` {kind}:PATH names a {_NEEDS_PATH[kind]}"
        require(bool(value), requirement, repr(part), "add its folder")
    if kind in (_LOOKUP, AUTO):
        require(not colon, f"`draft` {kind} has no value", repr(part), f"give {kind} alone")


def kind_of(draft: PathLike) -> tuple[str, str]:
    """Return the kind that a draft is of, and the folder or value behind its name.

    A folder of the name is a small model, whatever the name is.
    """
    name, colon, value = copy_and_scout(draft)[0].partition(":")
    if name in KINDS and name != MODEL and (colon or not os.path.isdir(str(draft))):
        return name, value
    return MODEL, str(draft)


def is_auto(draft: PathLike | None) -> bool:
    """Return True if trials shall find the draft."""
    return draft is not None and kind_of(draft)[0] == AUTO


def carried_kind(target: Checkpoint) -> str | None:
    """Return the kind of draft that lies in a target's own files; None for none."""
    if not target.extra:
        return None
    return next((name for name, kind in KINDS.items() if kind.lies_in(target)), None)


def files_of(
    headers: Sequence[Checkpoint],
    draft: PathLike | None,
    draft_dtype: str | None,
    ranks: str | None = None,
) -> ModelFiles:
    """Return the checkpoints of a run. Raises `UserError` for a draft that cannot be, or not pay."""
    target = headers[0]
    if is_auto(draft):
        as_stored = "`draft` auto takes drafts as they are stored"
        require(draft_dtype is None, as_stored, f"`draft_dtype` {draft_dtype}", "name the draft")
        draft = carried_kind(target)
    if draft is None:
        return ModelFiles(target)
    copy, scout = copy_and_scout(draft)
    if scout is not None:
        made = files_of(headers[:1], copy, draft_dtype, ranks).draft
        below = files_of(headers, scout, None, ranks).draft
        assert made is not None and below is not None, "both are named"
        requirement = "a model that guesses below a copy reads tokens alone, or is mtp"
        is_scout = KINDS[below.draft_kind].is_scout
        require(
            is_scout, requirement, f"{below.name}, {below.draft_kind}", f"name it alone, {scout}"
        )
        return ModelFiles(target, replace(made, scout=below))
    name, value = kind_of(draft)
    if len(headers) > 1 and name == MODEL:
        refuse_other_heads(headers[1])
        name = head_kind(headers[1].config) or MODEL
    kind = KINDS[name]
    if name != MODEL:
        _check_ranks(draft, name, ranks)
    if kind.of_target is not None:
        made = held_draft(kind.of_target(target, value), draft_dtype)
    elif len(headers) > 1 and name != MODEL:
        requirement = f"`draft_dtype` does not go with a head, which {draft} is"
        require(draft_dtype is None, requirement, f"{draft_dtype}", "leave it out")
        made = kind.adapt(target, headers[1])
    elif len(headers) > 1:
        made = kind.adapt(target, held_draft(headers[1], draft_dtype))
    else:
        return ModelFiles(target)
    return ModelFiles(target, replace(made, draft_kind=name))


def models_to_read(model: PathLike, draft: PathLike | None) -> list[PathLike]:
    """Return the models whose files are read, the target first; some drafts have its files."""
    if draft is None:
        return [model]
    name, value = kind_of(copy_and_scout(draft)[1] or draft)
    return [model] if KINDS[name].of_target else [model, value]


def check_draft(draft: PathLike | None, ranks: str | None) -> None:
    """Raise `UserError` for a draft that does not work among ranks."""
    if draft is not None:
        _check_ranks(draft, kind_of(draft)[0], ranks)


def _check_ranks(draft: PathLike, name: str, ranks: str | None) -> None:
    if ranks is not None and not KINDS[name].works_in_ranks:
        requirement = f"`draft` {draft} works in one process alone"
        raise UserError(f"{requirement}, got `ranks` {ranks}: name a small draft")
