"""Ways to draft for one target, compared for a machine: each as `offload plan` predicts it.

Only machines whose rates of computing are known tell drafts apart.
"""

from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.open import ReadHeaders
from offload.checkpoint.sizes import name_of
from offload.errors import UserError
from offload.model.headers import describe
from offload.planning.cost_model import Prediction
from offload.planning.draft_kinds import carried_kind, is_auto
from offload.planning.load_options import LoadOptions
from offload.planning.quantised_drafts import BITS, OWN, copy_bits
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
        form = f" with --draft-dtype {self.draft_dtype}" if self.draft_dtype else ""
        return f"{name or 'no draft'}{form}"

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
    drafts: list[tuple[str | None, str | None]] = [(None, None)]
    carried = carried_kind(options.headers(read or describe)[0])
    drafts += [] if carried is None else [(carried, None)]
    named = str(options.draft)
    is_other = options.draft is not None and not is_auto(named) and named != carried
    if is_other and copy_bits(named) is None:
        drafts += [(str(options.draft), dtype) for dtype in (None, *BITS)]
    copies = [(f"{OWN}:{kind}", None) for kind in BITS]
    candidates = list[DraftCandidate]()
    for draft, dtype in (*drafts, *copies):
        try:
            changed = replace(options, draft=draft, tree="auto", draft_dtype=dtype)
            estimated = estimate(changed, hardware, disk_speed, read=read)
        except UserError as error:
            candidates.append(DraftCandidate(draft, dtype, 0, 0, None, str(error)))
        else:
            best = estimated.predictions[-1] if estimated.predictions else None
            sizes = (estimated.plan.draft_bytes, estimated.plan.num_resident)
            candidates.append(DraftCandidate(draft, dtype, *sizes, best))
    return sorted(candidates, key=lambda candidate: candidate.s_per_token)
