"""Which draft is best for a machine: a small model, stored or in fewer bits, a self draft, or none.

Each is planned and predicted as if it were asked for, with the best tree that its memory leaves
room for. Only machines whose rates of computing are known tell drafts apart.

Invariant: no weights are read.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from offload.checkpoint.sizes import name_of
from offload.engine.resolve import ReadHeaders
from offload.errors import UserError
from offload.model.headers import describe
from offload.planning.cost_model import Prediction
from offload.planning.load_options import LoadOptions
from offload.planning.near_copy import BITS, copy_bits
from offload.reports.estimate import estimate


class DraftCandidate(NamedTuple):
    """One way to draft."""

    # as `--draft` has it
    draft: str | None
    draft_dtype: str | None
    # memory where layers are computed, the draft's cache included
    draft_bytes: int
    # layers of the target that have room beside it
    num_resident: int
    # None where it does not fit
    prediction: Prediction | None
    refusal: str = ""

    @property
    def label(self) -> str:
        """The draft in words."""
        is_copy = copy_bits(self.draft) is not None
        name = self.draft if self.draft is None or is_copy else name_of(self.draft)
        how = f" with --draft-dtype {self.draft_dtype}" if self.draft_dtype else ""
        return f"{name or 'no draft'}{how}"

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        known = {"prediction": self.prediction.as_dict() if self.prediction else None}
        return {**self._asdict(), **known}


def compare_drafts(
    model: str,
    draft: str | None,
    options: LoadOptions,
    hardware: str | None,
    disk_speed: str | int | None = None,
    read: ReadHeaders = describe,
) -> list[DraftCandidate]:
    """Return the candidates, the one predicted to be the fastest first, those that do not fit last.

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
    read: ReadHeaders,
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
