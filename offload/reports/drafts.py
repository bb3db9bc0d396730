"""Which draft is best for a machine: a small one as stored or in fewer bits, a copy of the target,
or none.

Each is planned and predicted as if it were asked for, with the best tree that its memory leaves
room for. Only machines whose rates of computing are known tell drafts apart. Invariant: no weights
are read.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from offload.calibration.startup import name_of
from offload.errors import UserError
from offload.model.meta import describe
from offload.planning.cost_model import Prediction
from offload.planning.near_copy import BITS, copy_bits
from offload.planning.options import LoadOptions
from offload.reports.estimate import Read, estimate


class DraftCandidate(NamedTuple):
    """One way to draft."""

    draft: str | None  # as `--draft` has it
    draft_dtype: str | None
    draft_bytes: int  # of memory where layers are computed, its cache included
    num_resident: int  # layers of the target that have room beside it
    prediction: Prediction | None  # None where it does not go
    refusal: str = ""

    @property
    def label(self) -> str:
        """In words."""
        is_copy = copy_bits(self.draft) is not None
        name = self.draft if self.draft is None or is_copy else name_of(self.draft)
        return (name or "none") + (f" at {self.draft_dtype}" if self.draft_dtype else "")

    def as_dict(self) -> dict[str, object]:
        """By the names that `--json` uses."""
        known = {"prediction": self.prediction.as_dict() if self.prediction else None}
        return {**self._asdict(), **known}


def compare_drafts(
    model: str,
    draft: str | None,
    options: LoadOptions,
    hardware: str | None,
    disk_speed: str | int | None = None,
    read: Read = describe,
) -> list[DraftCandidate]:
    """What there is to choose from, the one that is predicted to be the fastest first, and last
    what does not go.

    Nothing where no `hardware` is named: only its rates tell drafts apart.
    """
    if hardware is None:
        return []
    planned = partial(_planned, model, hardware=hardware, disk_speed=disk_speed, read=cache(read))
    found = [
        planned(one, replace(options, tree="auto", draft_dtype=dtype))
        for one, dtype in _kinds(draft)
    ]
    return sorted(
        found, key=lambda one: one.prediction.s_per_token if one.prediction else float("inf")
    )


def _kinds(draft: str | None) -> Iterator[tuple[str | None, str | None]]:
    yield None, None
    if draft is not None and copy_bits(draft) is None:
        yield draft, None
        yield from ((draft, dtype) for dtype in BITS)
    yield from ((f"self:{kind}", None) for kind in BITS)


def _planned(
    model: str,
    draft: str | None,
    options: LoadOptions,
    *,
    hardware: str,
    disk_speed: str | int | None,
    read: Read,
) -> DraftCandidate:
    try:
        found = estimate(
            model,
            draft,
            options,
            hardware=hardware,
            disk_speed=disk_speed,
            has_packing=False,
            read=read,
        )
    except UserError as error:
        return DraftCandidate(draft, options.draft_dtype, 0, 0, None, str(error))
    best = found.predictions[-1] if found.predictions else None
    return DraftCandidate(
        draft, options.draft_dtype, found.plan.draft_bytes, found.plan.num_resident, best
    )
