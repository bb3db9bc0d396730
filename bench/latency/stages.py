"""A pipeline of stages in memory that are slowed down: ways to run it, and PipeInfer's ablations.

Each layer sleeps (`slow_layer_s`), so that stages take their time although this machine has fewer
cores than there are ranks. All ways are open at once, compute in float32 and take turns text by
text. Figures are those of the paper: tokens per second without the prompt, time to the first token,
time between tokens, memory of each rank.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from offload.bench.harness.cluster import Answer, Cluster, Order
from offload.bench.harness.metrics import latencies
from offload.bench.harness.record import Row
from offload.bench.harness.setting import Setting
from offload.bench.harness.tables import Better, Column, check

BASELINES = ("plain", "sync", "async")
# a fixed number of rows, and two ablations
OTHERS = ("async,rows=16", "async,no-cancel", "async,no-continuous")
NUM_STAGES = 4
_WANTED: tuple[tuple[str, str, str, float, Better], ...] = (  # way, figure, beside which
    ("async", "tokens_per_s", "sync", 1.2, "higher"),
    ("async", "ttft_s", "plain", 1.05, "lower"),
    ("async,no-cancel", "tokens_per_s", "async", 1.0, "lower"),
)


class Piped(NamedTuple):
    """One text, one way."""

    way: str
    order: Order
    answer: Answer


def open_ways(
    setting: Setting, ways: Sequence[str], slow_layer_s: float, resources: ExitStack
) -> dict[str, Cluster]:
    """Open stages and a rank that drafts, once for each way. Raises `RunError`.

    `plain` has no use for the rank that drafts.
    """
    found = dict[str, Cluster]()
    for way in ways:
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
        draft = setting.draft if drafts else None
        found[way] = Cluster(setting.target, draft, [options] * (NUM_STAGES + drafts))
        resources.callback(found[way].close)
    for cluster in found.values():
        cluster.opened()
    return found


def row_of(texts: Sequence[Piped], peak_rss_bytes: Sequence[int]) -> Row:
    """Return the paper's figures of one way, and what became of its runs."""
    each = [latencies([text.answer.bursts]) for text in texts]
    counts = Counter(event[1] for text in texts for event in text.answer.stats.get("runs", []))
    row: Row = {"name": f"stages, {texts[0].way}", "way": texts[0].way}
    names = {"tokens_per_s": "decode_tokens_per_s", "ttft_s": "mean_ttft_s", "itl_s": "mean_itl_s"}
    for name, key in names.items():
        row[f"{name}_samples"] = [one[key] for one in each]
        row[name] = median(row[f"{name}_samples"])
    row |= {f"num_{what}": counts[what] for what in ("issued", "cancelled", "drawn", "dead")}
    events = texts[0].answer.stats.get("runs", [])
    return {**row, "peak_rss_bytes": [*peak_rss_bytes], "events": events}


def checks(rows: Sequence[Row]) -> list[Row]:
    """Return what was wanted, as far as it was measured; ratios text by text."""
    known = {row["way"]: row for row in rows}
    found = list[Row]()
    for way, figure, beside, wanted, better in _WANTED:
        if {way, beside} <= known.keys():
            samples = (known[one][f"{figure}_samples"] for one in (way, beside))
            ratios = [one / other for one, other in zip(*samples, strict=True) if other]
            found.append(check(f"{figure}, {way} / {beside}", ratios, wanted, better))
    return found


def held(row: Row) -> str:
    return "/".join(f"{one / 2**20:.0f}" for one in row["peak_rss_bytes"]) + " MiB"


COLUMNS = (
    Column("pipeline", "name"),
    Column("tokens/s", "tokens_per_s", ".3f"),
    Column("ttft s", "ttft_s", ".3f"),
    Column("itl s", "itl_s", ".3f"),
    Column("runs", "num_issued"),
    Column("cancelled", "num_cancelled"),
    Column("dead", "num_dead"),
    Column("peak RSS", held),
)
