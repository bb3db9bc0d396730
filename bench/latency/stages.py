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
from typing import Any, NamedTuple

from offload.bench.harness.cluster import Answer, Cluster, Order
from offload.bench.harness.metrics import latencies
from offload.bench.harness.record import Row
from offload.bench.harness.setting import Setting
from offload.bench.harness.wanted import wanted_row

BASELINES = ("plain", "sync", "async")
# a fixed number of rows, and two ablations
OTHERS = ("async,rows=16", "async,no-cancel", "async,no-continuous")
NUM_STAGES = 4
_RAM = "800MiB"
_CONTEXT = 512
_WANTED = (  # way, figure, beside which, at most or at least
    ("async", "tokens_per_s", "sync", 1.2, "higher"), ("async", "ttft_s", "plain", 1.05, "lower"),
    ("async,no-cancel", "tokens_per_s", "async", 1.0, "lower"),
)  # fmt: skip


class Piped(NamedTuple):
    """One text, one way."""

    way: str
    order: Order
    answer: Answer


def open_ways(
    setting: Setting, ways: Sequence[str], slow_layer_s: float, resources: ExitStack
) -> dict[str, Cluster]:
    """Open stages and a rank that drafts, once for each way. Raises `UserError`.

    `plain` has no use for the rank that drafts.
    """
    common = {
        "ram": _RAM,
        "context": _CONTEXT,
        "dtype": "float32",
        "threads": 1,
        "device": "cpu",
        "lookup": False,
    }
    found = dict[str, Cluster]()
    for way in ways:
        ranks = f"stages:0-{NUM_STAGES - 1}" + ("" if way == "plain" else f",draft:{NUM_STAGES}")
        own = {**common, "ranks": ranks, "pipeline": way, "slow_layer_s": slow_layer_s}
        draft = None if way == "plain" else setting.draft
        found[way] = Cluster(setting.target, draft, [own] * (NUM_STAGES + (way != "plain")))
        resources.callback(found[way].close)
    for cluster in found.values():
        cluster.opened()
    return found


def write_all(
    clusters: dict[str, Cluster], texts: Sequence[list[int]], num_tokens: int, tell: Any
) -> list[Piped]:
    """Write texts prompt by prompt, the ways in turns; every other text is greedy."""
    found = list[Piped]()
    for seed, ids in enumerate(texts):
        for way, cluster in clusters.items():
            order = Order(ids, num_tokens, temperature=0.6 * (seed % 2), seed=seed)
            found.append(Piped(way, order, cluster.ask(order)))
            tell(len(found), len(texts) * len(clusters), "decoding in stages")
    return found


def row_of(texts: Sequence[Piped], peak_rss_bytes: Sequence[int]) -> Row:
    """Return the paper's figures of one way, and what became of its runs."""
    each = [latencies([text.answer.bursts]) for text in texts]
    counts = Counter(event[1] for text in texts for event in text.answer.stats.get("runs", []))
    names = {"tokens_per_s": "decode_tokens_per_s", "ttft_s": "mean_ttft_s", "itl_s": "mean_itl_s"}
    figures = {name: median(one[key] for one in each) for name, key in names.items()}
    samples = {f"{name}_samples": [one[key] for one in each] for name, key in names.items()}
    runs = {f"num_{what}": counts[what] for what in ("issued", "cancelled", "drawn", "dead")}
    return {
        "name": f"stages, {texts[0].way}",
        "way": texts[0].way,
        **figures,
        **samples,
        **runs,
        "peak_rss_bytes": [*peak_rss_bytes],
        "events": texts[0].answer.stats.get("runs", []),
    }


def promises(rows: Sequence[Row]) -> list[Row]:
    """Return what was wanted, as far as it was measured; ratios text by text."""
    known = {row["way"]: row for row in rows}
    found = list[Row]()
    for way, figure, beside, wanted, better in _WANTED:
        if {way, beside} <= known.keys():
            pairs = zip(
                known[way][f"{figure}_samples"], known[beside][f"{figure}_samples"], strict=True
            )
            ratios = [one / other for one, other in pairs if other]
            found.append(
                wanted_row(f"{figure}, {way} / {beside}", median(ratios), wanted, ratios, better)
            )
    return found


HEAD = ["pipeline", "tokens/s", "ttft s", "itl s", "runs", "cancelled", "dead", "peak RSS"]


def cells(row: Row) -> list[str]:
    """Return the cells of a table."""
    figures = [f"{row[name]:.3f}" for name in ("tokens_per_s", "ttft_s", "itl_s")]
    runs = [str(row[f"num_{what}"]) for what in ("issued", "cancelled", "dead")]
    return [
        row["name"],
        *figures,
        *runs,
        "/".join(f"{one / 2**20:.0f}" for one in row["peak_rss_bytes"]) + " MiB",
    ]
