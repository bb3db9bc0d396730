"""Quantised drafts: `self:int4`, the target itself in fewer bits, and drafts with `draft_dtype`.

A self draft has the target's files, so nothing else is fetched or described. Invariant: a draft
that would save nothing is refused before a weight is read, and the refusal names what would help.
"""

import math
import os
from dataclasses import replace

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.held import Held
from offload.checkpoint.layer_sizes import routed_name
from offload.checkpoint.sizes import copy_obstacle
from offload.checkpoint.tensors import layer_name
from offload.encoding.residuals import Residual
from offload.errors import UserError, require

BITS = {"int8": 8, "int4": 4}
OWN = "self"
_KINDS = " or ".join(f"{OWN}:{name}" for name in BITS)
_LEAST_GAIN = 1.5  # bits of the weights over those of the quantised draft


def copy_and_scout(draft: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return the name of a draft without the scout below it, and that of the scout: `self:int4+MODEL`."""
    copy, plus, scout = str(draft).partition("+")
    has_scout = plus and copy.partition(":")[0] == OWN and not os.path.exists(draft)
    return (copy, scout) if has_scout else (str(draft), None)


def copy_bits(draft: str | os.PathLike[str] | None) -> int | None:
    """Return the bits of a self draft, else None. Raises `UserError` for other forms of `self`."""
    source, colon, kind = copy_and_scout(draft or "")[0].partition(":")
    if source != OWN or (not colon and os.path.isdir(str(draft))):
        return None
    requirement = f"`draft` {OWN} is the target in fewer bits, {_KINDS}"
    require(kind in BITS, requirement, repr(str(draft)), f"try {OWN}:int4")
    return BITS[kind]


def check_held(draft: str | os.PathLike[str] | None, draft_dtype: str | None) -> None:
    """Raise `UserError` for options that no model could satisfy."""
    is_known = draft_dtype is None or (isinstance(draft_dtype, str) and draft_dtype in BITS)
    requirement = f"`draft_dtype` must be {' or '.join(BITS)}"
    require(is_known, requirement, repr(draft_dtype), "leave it out to have the draft as stored")
    is_idle = draft_dtype is not None and draft is None
    require(not is_idle, "`draft_dtype` goes with `draft`", "none", "leave it out")
    if copy_bits(draft) is not None:
        requirement = f"`draft` {draft} says its bits itself"
        require(
            draft_dtype is None,
            requirement,
            f"`draft_dtype` {draft_dtype}",
            "leave one of them out",
        )


def copied(target: Checkpoint, value: str) -> Checkpoint:
    """Return the target as its own draft, in this many bits. Raises `UserError`."""
    draft = f"{OWN}:{value}"
    bits = copy_bits(draft)
    assert bits is not None, "another form is refused"
    _check_copy(target, draft, bits)
    return replace(target, held=Held(bits, is_copy=True))


def held_draft(draft: Checkpoint, draft_dtype: str | None) -> Checkpoint:
    """Return a small draft in the bits that are asked for. Raises `UserError`."""
    if draft_dtype is None:
        return draft
    _check_draft(draft, draft_dtype)
    return replace(draft, held=Held(BITS[draft_dtype]))


def _check_copy(target: Checkpoint, draft: str, bits: int) -> None:
    where = target.name
    requirement = f"{where}: `draft` {draft} rounds matrices of layers"
    obstacle = copy_obstacle(target)
    require(obstacle is None, requirement, obstacle, "name a small draft of the family")
    is_beside = any(isinstance(coding, Residual) for coding in target.codings)
    requirement = f"{where}: the copy that it was packed beside has 4 bits"
    require(bits == 4 or not is_beside, requirement, f"`draft` {draft}", f"give {OWN}:int4")
    stored = _stored_bits(target)
    if stored < _LEAST_GAIN * bits:
        requirement = f"{where}: `draft` {draft} must take fewer bits than the target, which has {stored:.1f} a weight"
        raise UserError(
            f"{requirement}: {'try self:int4, or ' if stored >= _LEAST_GAIN * 4 else ''}name a small draft"
        )


def _check_draft(draft: Checkpoint, draft_dtype: str) -> None:
    where = draft.name
    stored = _stored_bits(draft)
    is_fewer = stored >= _LEAST_GAIN * BITS[draft_dtype]
    requirement = f"{where}: `draft_dtype` {draft_dtype} must be fewer bits than the draft has"
    require(is_fewer, requirement, f"{stored:.1f} a weight", "leave it out")
    is_plain = all(entry.coded is None for entry in draft.tensors.values())
    requirement = f"{where}: `draft_dtype` leaves fused experts as numbers"
    require(is_plain or not _has_experts(draft), requirement, "coded ones", "leave it out")


def _has_experts(checkpoint: Checkpoint) -> bool:
    return any(map(routed_name, checkpoint.tensors))


def _stored_bits(checkpoint: Checkpoint) -> float:
    """Return the mean bits of a layer's weight in the file, companions included."""
    num_bytes = 0
    num_weights = 0
    for name, entry in checkpoint.tensors.items():
        if layer_name(name) is not None:
            coding = entry.coded and entry.coded.coding
            num_bytes += entry.num_bytes + (coding.companion_bytes(entry.shape) if coding else 0)
            num_weights += math.prod(entry.shape)
    return 8 * num_bytes / max(1, num_weights)
