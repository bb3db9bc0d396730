"""Ways to draft for one target, compared for a machine: each as `offload plan` predicts it.

The target is as it is, packed, or packed beside the copy that drafts, before anybody packs it.

Only machines whose rates of computing are known tell drafts apart.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.open import ReadHeaders
from offload.checkpoint.sizes import name_of
from offload.errors import UserError
from offload.model.headers import describe
from offload.options import PathLike
from offload.packing.folders import BESIDE
from offload.packing.forecast import as_beside, as_packed, forecast
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
    form: str = ""  # of the target: as it is, packed, or beside the copy

    @property
    def label(self) -> str:
        is_copy = copy_bits(self.draft) is not None
        name = self.draft if self.draft is None or is_copy else name_of(self.draft)
        form = f" with --draft-dtype {self.draft_dtype}" if self.draft_dtype else ""
        return f"{name or 'no draft'}{form}{self.form and f', {self.form}'}"

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
    ways: list[tuple[str, tuple[str | None, str | None], ReadHeaders | None]]
    ways = [("", draft, read) for draft in (*drafts, *copies)]
    for form, files in _packed_forms(options, read or describe).items():
        reads_packed = partial(_read_in_form, read or describe, options.model, files.target)
        form_drafts = drafts if files.draft_kind == "none" else [(f"{OWN}:{BESIDE}", None)]
        ways += [(form, draft, reads_packed) for draft in form_drafts]
    candidates = list[DraftCandidate]()
    for form, (draft, dtype), reads in ways:
        where: Any = {"hardware": hardware, "disk_speed": disk_speed, "read": reads}
        try:
            changed = replace(options, draft=draft, tree="auto", draft_dtype=dtype)
            estimated = estimate(changed, has_packing=False, **where)
        except UserError as error:
            candidates.append(DraftCandidate(draft, dtype, 0, 0, None, str(error), form))
        else:
            best = estimated.predictions[-1] if estimated.predictions else None
            sizes = (estimated.plan.draft_bytes, estimated.plan.num_resident)
            candidates.append(DraftCandidate(draft, dtype, *sizes, best, form=form))
    return sorted(candidates, key=lambda candidate: candidate.s_per_token)


def _packed_forms(options: LoadOptions, read: ReadHeaders) -> dict[str, ModelFiles]:
    """Return the target as `offload pack` would make it, by what that is called."""
    target, *_ = options.headers(read)
    packing = forecast(target)
    if packing is None or not packing.is_worth_it:
        return {}
    beside = as_beside(target, packing)
    forms = {"packed": ModelFiles(as_packed(target, packing))}
    return forms if beside is None else {**forms, f"packed --beside {BESIDE}": beside}


def _read_in_form(
    read: ReadHeaders, model: PathLike, packed: Checkpoint, name: PathLike, *source: Any
) -> Checkpoint:
    """Return the packed target in place of the one that is there, and other models as they are."""
    return packed if str(name) == str(model) else read(name, *source)
