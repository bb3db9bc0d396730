"""Ways to draft for one target, compared for a machine: each as `offload plan` predicts it.

Only machines whose rates of computing are known tell drafts apart.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from offload.checkpoint.open import ReadHeaders
from offload.checkpoint.sizes import name_of
from offload.errors import UserError
from offload.model.headers import describe
from offload.planning.cost_model import Prediction
from offload.planning.draft_kinds import carried_kind, is_auto
from offload.planning.load_options import LoadOptions
from offload.planning.quantised_drafts import BITS, copy_bits
from offload.reports.estimate import estimate


class DraftCandidate(NamedTuple):
    """One way to draft, with the best tree that its memory leaves room for."""

    draft: str | None  # as `--draft` has it
    draft_dtype: str | None
    draft_bytes: int  # memory where layers are computed, the draft's cache included
    num_resident: int  # layers of the target that have room beside it
    prediction: Prediction | None  # None where it does not fit
    refusal: str = ""

    @property
    def label(self) -> str:
        is_copy = copy_bits(self.draft) is not None
        name = self.draft if self.draft is None or is_copy else name_of(self.draft)
        how = f" with --draft-dtype {self.draft_dtype}" if self.draft_dtype else ""
        return f"{name or 'no draft'}{how}"

    @property
    def s_per_token(self) -> float:
        return self.prediction.s_per_token if self.prediction else float("inf")

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        return {**self._asdict(), "prediction": self.prediction and self.prediction.as_dict()}


def compare_drafts(
    options: LoadOptions,
    hardware: str | None,
    disk_speed: str | int | None = None,
    read: ReadHeaders | None = None,
) -> list[DraftCandidate]:
    """Return ways to draft, the quickest first, those that do not fit last.

    Nothing where no `hardware` is named.
    """
    if hardware is None:
        return []
    kinds: list[tuple[str | None, str | None]] = [(None, None)]
    carried = carried_kind(options.headers(read or describe)[0])
    kinds += [] if carried is None else [(carried, None)]
    named = str(options.draft)
    is_other = options.draft is not None and not is_auto(named) and named != carried
    if is_other and copy_bits(named) is None:
        kinds += [(str(options.draft), dtype) for dtype in (None, *BITS)]
    kinds += [(f"self:{kind}", None) for kind in BITS]
    how: Any = {"hardware": hardware, "disk_speed": disk_speed, "read": read}
    found = list[DraftCandidate]()
    for draft, dtype in kinds:
        try:
            own = replace(options, draft=draft, tree="auto", draft_dtype=dtype)
            one = estimate(own, has_packing=False, **how)
        except UserError as error:
            found.append(DraftCandidate(draft, dtype, 0, 0, None, str(error)))
        else:
            best = one.predictions[-1] if one.predictions else None
            plan = one.plan
            found.append(DraftCandidate(draft, dtype, plan.draft_bytes, plan.num_resident, best))
    return sorted(found, key=lambda one: one.s_per_token)
