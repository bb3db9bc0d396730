"""A pipeline of stages in memory that are slowed down: ways to run it, and PipeInfer's ablations.

Each layer sleeps (`slow_layer_s`), so that stages take their time although this machine has fewer
cores than there are ranks. All ways are open at once, compute in float32 and take turns text by
text. Figures are those of the paper: tokens per second without the prompt, time to the first token,
time between tokens, memory of each rank.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from offload.bench.harness.cluster import Answer
from offload.bench.harness.metrics import latencies
from offload.bench.harness.record import Row
from offload.bench.harness.setting import Setting
from offload.bench.harness.tables import Better, Column, check, ratios

BASELINES = ("plain", "sync", "async")
# a fixed number of rows, and two ablations
OTHERS = ("async,rows=16", "async,no-cancel", "async,no-continuous")
NUM_STAGES = 4
_WANTED: tuple[tuple[str, str, str, float, Better], ...] = (  # way, figure, beside which
    ("async", "tokens_per_s", "sync", 1.2, "higher"),
    ("async", "ttft_s", "plain", 1.05, "lower"),
    ("async,no-cancel", "tokens_per_s", "async", 1.0, "lower"),
)


def ranks_of(
    setting: Setting, way: str, slow_layer_s: float
) -> tuple[Setting, list[dict[str, Any]]]:
    """Return the models and options of stages and of a rank that drafts; `plain` has none."""
    drafts = way != "plain"
    options = {
        "ram": "800MiB",
        "context": 512,
        "dtype": "float32",
        "threads": 1,
        "device": "cpu",
        "lookup": False,
        "ranks": f"stages:0-{NUM_STAGES - 1}" + (f",draft:{NUM_STAGES}" if drafts else ""),
        "pipeline": way,
        "slow_layer_s": slow_layer_s,
    }
    return setting if drafts else setting._replace(draft=None), [options] * (NUM_STAGES + drafts)


def row_of(way: str, texts: Sequence[Answer], peak_rss_bytes: Sequence[int]) -> Row:
    each = [latencies([text.bursts]) for text in texts]
    events = [text.stats.get("runs", []) for text in texts]
    counts = Counter(event[1] for own in events for event in own)
    row: Row = {"name": f"stages, {way}", "way": way}
    names = {"tokens_per_s": "decode_tokens_per_s", "ttft_s": "mean_ttft_s", "itl_s": "mean_itl_s"}
    for name, key in names.items():
        row[f"{name}_samples"] = [one[key] for one in each]
        row[name] = median(row[f"{name}_samples"])
    row |= {f"num_{what}": counts[what] for what in ("issued", "cancelled", "drawn", "dead")}
    return {**row, "peak_rss_bytes": [*peak_rss_bytes], "events": events[0]}


def checks(rows: Sequence[Row]) -> list[Row]:
    known = {row["way"]: row for row in rows}
    found = list[Row]()
    for way, figure, beside, wanted, better in _WANTED:
        if {way, beside} <= known.keys():
            samples = (known[one][f"{figure}_samples"] for one in (way, beside))
            found.append(check(f"{figure}, {way} / {beside}", ratios(*samples), wanted, better))
    return found


def held(peak_rss_bytes: Sequence[int]) -> str:
    return "/".join(f"{one / 2**20:.0f}" for one in peak_rss_bytes) + " MiB"


COLUMNS = (
    Column("pipeline", "name"),
    Column("tokens/s", "tokens_per_s", ".3f"),
    Column("ttft s", "ttft_s", ".3f"),
    Column("itl s", "itl_s", ".3f"),
    Column("runs", "num_issued"),
    Column("cancelled", "num_cancelled"),
    Column("dead", "num_dead"),
    Column("peak RSS", lambda row: held(row["peak_rss_bytes"])),
)
