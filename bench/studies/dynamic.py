"""Dynamic trees against static ones of the same size: tokens per sweep and drafting time, on the resident pair.

Nothing streams, so what is compared is what a sweep yields and what the draft takes for it. Both are runs of `decode`,
in turn prompt by prompt, and every token is proved.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from offload.bench.harness.prompts import prompts
from offload.bench.harness.setting import resident_pair
from offload.bench.latency import decode
from offload.bench.studies.pair_text import FULL, QUICK, Figures, Pair, Scale
from offload.bench.studies.tree_walk import Steps, ratio_of

_AMOUNTS = {FULL: (16, 96, ("64x16", "128x20", "256x24"), (0.0, 0.6, 1.0)), QUICK: (6, 48, ("128x20",), (0.0, 0.6))}
_TINY = (2, 12, ("16x6",), (0.6,))


def compare(num_prompts: int, num_tokens: int, sizes: Sequence[str], temperatures: Sequence[float]) -> list[Figures]:
    """A row for every size and temperature; prompt b has seed b."""
    trees = ("none", *(tree for size in sizes for tree in (size, f"grown:{size}")))
    setting, effort = resident_pair(None), decode.Effort(num_prompts, num_tokens, 2, tuple(temperatures), trees)
    with decode.open_for(setting, effort, threads=1) as decoder:
        measured = decode.measure(setting, decoder, effort, prompts(["code"], num_prompts))
    setting.prove(measured.written)
    return [_row(measured.runs, size, temperature) for temperature in temperatures for size in sizes]


def _row(runs: Sequence[decode.Timed], size: str, temperature: float) -> Figures:
    fixed, grown = ([run.result.stats for run in runs if (run.case.tree, run.case.temperature) == (tree, temperature)]
        for tree in (size, f"grown:{size}"))  # fmt: skip
    both = [
        Steps(*np.array([(sum(s.accepted_per_sweep), s.num_sweeps) for s in own], float).T) for own in (fixed, grown)
    ]
    ratio, error = ratio_of(both[1], both[0])
    row: dict[str, Any] = {"size": size, "temperature": temperature, "ratio": ratio, "standard_error": error}
    for kind, steps, own in (("fixed", both[0], fixed), ("grown", both[1], grown)):
        draft_s = sum(s.draft_s for s in own) / max(1, sum(s.num_sweeps for s in own))
        row[kind] = {**steps.as_dict(), "draft_s": draft_s}
    return row


def measure(pair: Pair, scale: Scale) -> Figures:
    """How much more a sweep yields when the draft's scores shape each tree."""
    rows = compare(*_AMOUNTS.get(scale, _TINY))
    table = [["T", "size", "static", "draft ms", "dynamic", "draft ms", "ratio", "+-"]]
    for row in rows:
        both = (f"{figure:.2f}" for kind in ("fixed", "grown") for figure in (row[kind]["tokens_per_step"],
            1e3 * row[kind]["draft_s"]))  # fmt: skip
        table.append(
            [f"{row['temperature']}", row["size"], *both, f"{row['ratio']:.3f}", f"{row['standard_error']:.3f}"]
        )
    first, bars = [row for row in rows if row["temperature"] == rows[0]["temperature"]], []
    for kind in ("fixed", "grown"):
        figures = {key: [row[kind][name] for row in first] for key, name in (("y", "tokens_per_step"), ("error",
            "standard_error"))}  # fmt: skip
        bars.append({"label": kind, **figures})
    words = {"title": f"T = {rows[0]['temperature']}", "xlabel": "tree", "ylabel": "tokens per step"}
    return {"rows": rows, "table": table, "picture": [{"bars": bars, "names": [row["size"] for row in first], **words}]}
