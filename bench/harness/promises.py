"""What was promised of a GPU, and what was seen: a row per measurement, a verdict per promise.

A row is printed as soon as it is known. A promise is met when every row that counts for it is; one
without a row was not measured, which is not the same.
"""

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence

from offload.bench.harness.tables import Row
from offload.errors import UserError, reason

PROMISES = {
    "link": "one-token sweep <= 1.05 x bytes / measured copy rate",
    "hidden compute": "sweep of 768 rows <= 1.05 x the one-token sweep where the link is slower than computing",
    "step": "draft + sweep <= 1.15 x the slower of both; draft step of 64 rows <= 1.5 x reading its weights",
    "memory": "device peak <= --gpu-mem; page-locked <= 1.02 x the layers held",
    "exact": "float32: the ids of transformers, all trees; bf16: where they part, a gap below rounding",
    "same bits": "bf16, fp16: the ids of all trees are those of none, where the decoder promises it",
    "against accelerate": ">= 10 x the tokens/s of accelerate's CPU offload",
    "soak": "sweeps with poisoned slots: the same scores, no NaN, no drift in memory",
}
_SHOWN = ("s_per_token", "tokens_per_sweep", "draft_s", "stall_s", "times", "parts_at")


class WrongTokenError(UserError):
    """A token is not the reference's: nothing that was measured with it counts."""


def row(
    name: str,
    value: float,
    unit: str,
    ceiling: float | None = None,
    limit: float | None = None,
    *,
    promise: str | None = None,
) -> Row:
    """Return a figure beside its ceiling; `limit` bounds their ratio, from below for counts."""
    assert promise is None or promise in PROMISES, f"{promise} is no promise"
    ratio = value / ceiling if ceiling else None
    is_met = None if limit is None or ratio is None else ratio <= limit
    if unit in ("tokens", "sweeps"):
        is_met = ratio is None or ratio >= 1.0
    figures = {"value": value, "unit": unit, "ceiling": ceiling, "ratio": ratio}
    return {"row": name, **figures, "at_most": limit, "is_met": is_met, "promise": promise}


def attempt(name: str, promises: Iterable[str], rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows; what breaks misses all of `promises`, and a wrong token exactness, too."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        wrong = ["exact"] if isinstance(error, WrongTokenError) else []
        yield from failures(name, dict.fromkeys([*wrong, *promises]), error)


def failures(name: str, promises: Iterable[str], error: Exception) -> Iterator[Row]:
    """Yield a row for each promise that is missed, or one of none, with names of their own."""
    for promise in [*promises] or (None,):
        about = f"{name}: failed" if promise is None else f"{name}: failed ({promise})"
        failed = {"row": about, "value": 0.0, "unit": "", "is_met": False, "promise": promise}
        yield {**failed, "error": f"{type(error).__name__}: {reason(error)}"}


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Return for every promise what was wanted and seen, and whether it is met, if it was seen."""

    def seen(one: Row) -> str:
        if one.get("error"):
            return f"{one['row']} ({one['error']})"
        ratio = "" if one["ratio"] is None else f", ratio {one['ratio']:.3f}"
        return f"{one['value']:.4g} {one['unit']}{ratio}"

    found = []
    for promise, wanted in PROMISES.items():
        own = [one for one in rows if one.get("promise") == promise]
        told = {one["is_met"] for one in own} - {None}
        is_met = all(told) if told else None
        said = "; ".join(map(seen, own)) or "not measured"
        found.append({"promise": promise, "wanted": wanted, "seen": said, "is_met": is_met})
    return found


def row_line(one: Row) -> str:
    value = f"{one['value']:10.4g} {one['unit']:6}"
    beside = ""
    if one.get("ratio") is not None:
        beside = f"ceiling {one['ceiling']:9.4g}  ratio {one['ratio']:6.3f}"
    verdict = {True: "met", False: "MISSED", None: ""}[one.get("is_met")]
    more = " ".join(f"{key} {one[key]:.4g}" for key in _SHOWN if one.get(key) is not None)
    told = " ".join(str(one[key]) for key in ("error", "notes") if one.get(key))
    return f"{one['row'][:70]:70} {value} {beside:34} {verdict:6} {more} {told}".rstrip()


def verdict_lines(found: Sequence[Row]) -> list[str]:
    words = {True: "met", False: "MISSED", None: "open"}
    return [
        f"{words[one['is_met']]:6} {one['promise']}: {one['wanted']} | {one['seen']}"
        for one in found
    ]
