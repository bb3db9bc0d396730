"""Many ranks on this machine: sharing layers with a link each, and in a pipeline of stages.

`shards`: links are emulated, far below what the disk gives, so that ranks which share it read as if
each had its own. Each rank has the least memory that it can do with, so that nearly all layers
stream. A short text may run a little faster than its link: it begins with full slots. `stages`:
ways to run a pipeline in memory, and PipeInfer's ablations, with that paper's figures; each layer
sleeps, so that stages take their time although this machine has fewer cores than there are ranks.

All clusters of a part are open at once, compute in float32 and take turns text by text. Invariant:
nothing is printed before all of them wrote the same ids, and every one was proved.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from offload.bench.harness.cluster import Answer, Cluster, Order, shard_budgets
from offload.bench.harness.command import Bench, Effort, Findings, command, flag, one_of
from offload.bench.harness.metrics import latencies
from offload.bench.harness.picture import draw_flights
from offload.bench.harness.prompts import raw_ids
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Better, Column, Row, check, ratios
from offload.checkpoint.packaged import PAIR
from offload.errors import UserError
from offload.trees.spec import parse_tree
from offload.units import parse_size

PARTS = ("shards", "stages")
_PARTS_TOLD = f"of {', '.join(PARTS)}, several; default: all, with --quick the first"
_NONE = "none"
_HOW = {"context": 512, "dtype": "float32", "threads": 1, "device": "cpu", "lookup": False}
# seconds of a pass beside one rank, by (ranks, one token a pass)
_WANTED = {(2, True): 0.55, (3, True): 0.40}
_WANTED_TREE = 0.60
# least ratio of the disk's rate to what all emulated links take together
_DISK_MARGIN = 2.0
_COUNTED = {  # what is told, what was done, what was planned
    "bytes read": ("bytes_read", "planned_read_bytes"),
    "bytes exchanged": ("exchanged_bytes", "planned_exchanged_bytes"),
}
BASELINES = ("plain", "sync", "async")
# a fixed number of rows, and two ablations
OTHERS = ("async,rows=16", "async,no-cancel", "async,no-continuous")
NUM_STAGES = 4
_STAGED_SIZE = "60MB"  # seven small layers, which compute in little time beside what they sleep
_STAGED_WANTED: tuple[tuple[str, str, str, float, Better], ...] = (  # way, figure, beside which
    ("async", "tokens_per_s", "sync", 1.2, "higher"),
    ("async", "ttft_s", "plain", 1.05, "lower"),
    ("async,no-cancel", "tokens_per_s", "async", 1.0, "lower"),
)
Name = TypeVar("Name", int, str)


SIZES = (1, 2, 3)  # ranks
FULL = Effort(4, 32, 7, trees=(_NONE, "dynamic:32x12"))
QUICK = replace(FULL, num_prompts=1, num_tokens=20, num_plain=5)
STAGED_TOKENS = (48, 32)


def order(seed: int, prompt_ids: list[int], num_tokens: int, tree: str = _NONE) -> Order:
    """Return the order for a text; every other text is greedy."""
    return Order(prompt_ids, num_tokens, tree, temperature=0.6 * (seed % 2), seed=seed)


def ask_all(
    bench: Bench,
    wanted: Mapping[Name, tuple[Setting, Sequence[dict[str, Any]]]],
    orders: Sequence[Order],
) -> dict[Name, tuple[list[Answer], list[int]]]:
    """Return the texts of each cluster, and the peaks of its ranks' memory.

    `wanted` has models and the options of ranks.
    """
    with bench.screen as screen, ExitStack() as resources:
        screen.wait("starting ranks")
        clusters = dict[Name, Cluster]()
        for name, job in wanted.items():
            clusters[name] = Cluster(*job)
            resources.callback(clusters[name].close)
        for cluster in clusters.values():
            cluster.wait()
        texts: dict[Name, list[Answer]] = {name: [] for name in wanted}
        for order, name in bench.turns(orders, [*wanted], "decoding"):
            texts[name].append(clusters[name].ask(order))
        return {name: (answers, clusters[name].peak_rss_bytes()) for name, answers in texts.items()}


def row_of(
    num_ranks: int,
    texts: Sequence[Answer],
    link_bytes_per_s: float,
    others: Sequence[Answer] = (),
) -> Row:
    """Return the row of one cluster and tree, beside the same texts of one rank (`others`)."""
    tree = texts[0].order.tree
    bursts = latencies([text.bursts for text in texts])
    ranks = [_rank_row(texts, rank) for rank in range(num_ranks)]
    samples = [second for text in texts for second in text.pass_s]
    # what rank 0 does, drafting included, without waiting for link or ranks
    waits_s = [text.moved(lambda rank: rank.stall_s + rank.exchange_s)[0] for text in texts]
    whole_s = [text.stats["tpot_s"] * text.stats["tokens_per_sweep"] for text in texts]
    row = {
        "name": f"{num_ranks} x shards, {tree}",
        "num_ranks": num_ranks,
        "tree": tree,
        "pass_s": median(samples),
        "pass_s_samples": samples,
        "link_s": max(rank["pass_bytes"] for rank in ranks) / link_bytes_per_s,
        "tokens_per_s": bursts["decode_tokens_per_s"],
        "ttft_s": bursts["mean_ttft_s"],
        "itl_s": bursts["mean_itl_s"],
        "compute_s": median(whole - wait for whole, wait in zip(whole_s, waits_s, strict=True)),
        "exchange_s": median(max(text.moved(lambda rank: rank.exchange_s)) for text in texts),
        "ranks": ranks,
    }
    if others:
        pass_s, alone = ([median(text.pass_s) for text in some] for some in (texts, others))
        row["ratio_samples"] = ratios(pass_s, alone)
        row["ratio"] = median(row["ratio_samples"])
    return row


def _rank_row(texts: Sequence[Answer], rank: int) -> Row:
    """Return bytes read and sent in each pass, done beside planned, and the peak of memory."""
    read_bytes = sent_bytes = num_passes = num_rows = 0
    for first, _, last in ([moment[rank] for moment in text.figures] for text in texts):
        read_bytes += last.bytes_streamed - first.bytes_streamed
        for way in ("gather", "broadcast"):
            sent_bytes += last.bytes_sent.get(way, 0) - first.bytes_sent.get(way, 0)
        num_passes += last.num_passes - first.num_passes
        num_rows += last.num_rows - first.num_rows
    if len(texts[0].figures[0]) == 1:  # a process by itself counts no prompts
        num_passes += len(texts)
    return {
        "rank": rank,
        "pass_bytes": last.pass_bytes,
        "num_passes": num_passes,
        "num_rows": num_rows,
        "rows_per_pass": median(text.moved(lambda rank: rank.num_rows)[rank] for text in texts),
        "bytes_read": read_bytes,
        "planned_read_bytes": last.pass_bytes * num_passes,
        "exchanged_bytes": sent_bytes,
        "planned_exchanged_bytes": last.row_bytes * num_rows,
        "peak_rss_bytes": last.peak_rss_bytes,
        "ram_bytes": last.ram_bytes,
        "allowed_bytes": last.ram_bytes + last.own_bytes,
    }


def checks(rows: Sequence[Row]) -> list[Row]:
    verdicts = list[Row]()
    for row in rows:
        if "ratio" in row:
            wanted = _WANTED.get((row["num_ranks"], row["tree"] == _NONE), _WANTED_TREE)
            name = f"s/pass, {row['name']} / 1 rank"
            verdicts.append(check(name, row["ratio_samples"], wanted, "lower"))
    ranks = [rank for row in rows for rank in row["ranks"]]
    for title, (done, planned) in _COUNTED.items():
        over = ratios([rank[done] for rank in ranks], [rank[planned] for rank in ranks])
        off = max((abs(ratio - 1) for ratio in over), default=0.0)
        name = f"{title} / planned, any rank: most off"
        verdicts.append(check(name, over, 0.0, "lower", off))
    held = [rank["peak_rss_bytes"] / rank["allowed_bytes"] for rank in ranks]
    name = "peak RSS / (budget + libraries), any rank"
    verdicts.append(check(name, held, 1.0, "lower", max(held)))
    return verdicts


COLUMNS = (
    Column("cluster", "name"),
    Column("s/pass", "pass_s", ".3f"),
    Column("link s", "link_s", ".3f"),
    Column("compute s", "compute_s", ".3f"),
    Column("exchange s", "exchange_s", ".3f"),
    Column("x 1 rank", "ratio", ".3f"),
    Column("tokens/s", "tokens_per_s", ".3f"),
    Column("ttft s", "ttft_s", ".3f"),
    Column("itl s", "itl_s", ".3f"),
    Column("peak RSS", lambda row: _held([rank["peak_rss_bytes"] for rank in row["ranks"]])),
)


def share(
    bench: Bench, setting: Setting, effort: Effort, rate: float, texts: Sequence[list[int]]
) -> tuple[list[Row], list[Answer]]:
    """Return a row for each tree and number of ranks, one rank first, and all texts."""
    tree = effort.trees[-1]
    options = {**_HOW, "profile": "none", "invariant": False, "tree": tree}
    wanted = {}
    for size in SIZES:
        rank_options: dict[str, Any] = {
            **options,
            "link_limit": int(rate),
            "ranks": "shards" if size > 1 else None,
        }
        usual = {name: _HOW[name] for name in ("context", "dtype")}
        budgets = shard_budgets(setting, size, parse_tree(tree).num_nodes, **usual)
        wanted[size] = (setting, [{**rank_options, "ram": budget} for budget in budgets])
    orders = [
        order(seed, ids, effort.length(tree), tree)
        for seed, ids in enumerate(texts)
        for tree in effort.trees
    ]
    answered = ask_all(bench, wanted, orders)
    rows = list[Row]()
    for tree in effort.trees:
        of_tree = {
            size: [answer for answer in answers if answer.order.tree == tree]
            for size, (answers, _) in answered.items()
        }
        for size, answers in of_tree.items():
            rows.append(row_of(size, answers, rate, of_tree.get(1, ()) if size > 1 else ()))
    return rows, [text for answers, _ in answered.values() for text in answers]


def staged_row(way: str, texts: Sequence[Answer], peak_rss_bytes: Sequence[int]) -> Row:
    each = [latencies([text.bursts]) for text in texts]
    events = [text.stats.get("runs", []) for text in texts]
    counts = Counter(event[1] for run_events in events for event in run_events)
    row: Row = {"name": f"stages, {way}", "way": way}
    names = {"tokens_per_s": "decode_tokens_per_s", "ttft_s": "mean_ttft_s", "itl_s": "mean_itl_s"}
    for name, key in names.items():
        row[f"{name}_samples"] = [text[key] for text in each]
        row[name] = median(row[f"{name}_samples"])
    row |= {f"num_{kind}": counts[kind] for kind in ("issued", "cancelled", "drawn", "dead")}
    return {**row, "peak_rss_bytes": [*peak_rss_bytes], "events": events[0]}


def staged_checks(rows: Sequence[Row]) -> list[Row]:
    known = {row["way"]: row for row in rows}
    verdicts = list[Row]()
    for way, figure, beside, wanted, better in _STAGED_WANTED:
        if {way, beside} <= known.keys():
            samples = (known[name][f"{figure}_samples"] for name in (way, beside))
            verdicts.append(check(f"{figure}, {way} / {beside}", ratios(*samples), wanted, better))
    return verdicts


def _held(peak_rss_bytes: Sequence[int]) -> str:
    return "/".join(f"{peak / 2**20:.0f}" for peak in peak_rss_bytes) + " MiB"


STAGED_COLUMNS = (
    Column("pipeline", "name"),
    Column("tokens/s", "tokens_per_s", ".3f"),
    Column("ttft s", "ttft_s", ".3f"),
    Column("itl s", "itl_s", ".3f"),
    Column("runs", "num_issued"),
    Column("cancelled", "num_cancelled"),
    Column("dead", "num_dead"),
    Column("peak RSS", lambda row: _held(row["peak_rss_bytes"])),
)


def in_stages(
    bench: Bench, slow_layer_s: float, texts: Sequence[list[int]]
) -> tuple[list[Row], list[Answer]]:
    """Return a row for each way, and all texts; another rank drafts, except for `plain`."""
    setting = bench.setting(size=_STAGED_SIZE)
    options_of_all = {**_HOW, "ram": "800MiB", "slow_layer_s": slow_layer_s}
    wanted = {}
    for way in bench.effort((*BASELINES, *OTHERS), BASELINES):
        drafts = way != "plain"
        ranks = f"stages:0-{NUM_STAGES - 1}" + (f",draft:{NUM_STAGES}" if drafts else "")
        options: dict[str, Any] = {**options_of_all, "ranks": ranks, "pipeline": way}
        models = setting if drafts else setting._replace(draft=None)
        wanted[way] = (models, [options] * (NUM_STAGES + drafts))
    orders = [order(seed, ids, bench.effort(*STAGED_TOKENS)) for seed, ids in enumerate(texts)]
    answered = ask_all(bench, wanted, orders)
    rows = [staged_row(way, *answers) for way, answers in answered.items()]
    return rows, [text for answers, _ in answered.values() for text in answers]


@command(
    *("ranks", "num_prompts picture quick compare"),
    examples=["offload bench ranks --quick --part stages --picture runs.png"],
)
def main(
    bench: Bench,
    part: Annotated[list[str] | None, flag("PART", _PARTS_TOLD, "--part")] = None,
    size: Annotated[str, flag("SIZE", "of the target that is shared")] = "300MB",
    link_limit: Annotated[
        str, flag("RATE", "of each rank's link, below the disk's share")
    ] = "100MB",
    slow_layer: Annotated[
        float, flag("S", "seconds that a layer of a stage takes longer", min=0)
    ] = 0.03,
) -> Findings:
    """How long does a pass take on several ranks with a link each, and in stages?"""
    one_of(part or (), PARTS, "--part")
    parts = part or bench.effort(PARTS, PARTS[:1])
    effort = bench.effort(FULL, QUICK)
    if bench.given.picture is not None and "stages" not in parts:
        raise UserError("--picture shows runs of stages: add --part stages")
    rate = parse_size(link_limit, "--link-limit")
    ids = raw_ids(PAIR / "target", bench.prompts(effort.num_prompts), PROMPT_TOKENS)
    setting = bench.setting(size=size)
    bench.begin(setting, link_bytes_per_s=rate, slow_layer_s=slow_layer, dtype=_HOW["dtype"])
    shared = staged = list[Row]()
    texts = list[Answer]()
    verdicts = list[Row]()
    if "shards" in parts:
        require_slower(rate, bench.ceiling["bytes_per_s"], max(SIZES))
        shared, written = share(bench, setting, effort, rate, ids)
        texts += written
        verdicts += checks(shared)
    if "stages" in parts:
        staged, written = in_stages(bench, slow_layer, ids)
        texts += written
        verdicts += staged_checks(staged)

    def draw(settings: Row, path: Path) -> None:
        model = f"the packaged target, {_STAGED_SIZE}, {slow_layer:g} s a layer longer"
        draw_flights(staged, {**settings, "target": model}, path)

    return Findings(
        rows=[*shared, *staged],
        tables=[(COLUMNS, shared), (STAGED_COLUMNS, staged)],
        checks=verdicts,
        written=[text.written for text in texts],
        ceiling={"bytes_per_s": rate, "disk_bytes_per_s": bench.ceiling["bytes_per_s"]},
        files={"picture": draw},
    )


def require_slower(link_bytes_per_s: float, disk_bytes_per_s: float, num_ranks: int) -> None:
    """Refuse links that ranks on one disk could not have. Raises `UserError`."""
    most = disk_bytes_per_s / num_ranks / _DISK_MARGIN
    if link_bytes_per_s > most:
        rule = f"--link-limit must be {most / 1e6:.0f}MB or less on this disk"
        raise UserError(f"{rule}, got {link_bytes_per_s / 1e6:.0f}MB: lower it")
