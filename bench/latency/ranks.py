"""Many ranks on this machine, each with a link of the same speed, beside one rank.

Links are emulated (`--link-limit`), far below what the disk gives, so that ranks which share it
here read as if each had its own. Each rank has the least memory that it can do with, so that nearly
all layers stream. All clusters are open at once, computing in float32, and take turns text by text.
A short text may run a little faster than its link: it begins with full slots. `stages` is a
pipeline, see `latency/stages.py`.

Invariant: nothing is printed before all clusters wrote the same ids, and every one was proved.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from offload.bench.harness.cluster import Answer, Order, open_clusters, shard_budgets
from offload.bench.harness.command import Bench, Findings, command, flag, one_of
from offload.bench.harness.metrics import latencies
from offload.bench.harness.picture import draw_flights
from offload.bench.harness.prompts import raw_ids
from offload.bench.harness.record import Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, check, ratios
from offload.bench.latency import stages
from offload.checkpoint.packaged import PAIR
from offload.errors import UserError
from offload.stats import RankFigures
from offload.trees.spec import parse_tree
from offload.units import parse_size

PARTS = ("shards", "stages")
_PARTS_TOLD = f"of {', '.join(PARTS)}, several; default: all, with --quick the first"
_CONTEXT = 512
_DTYPE = "float32"
_NONE = "none"
_STAGED_SIZE = "60MB"  # seven small layers, which compute in little time beside what they sleep
_HOW = {"threads": 1, "profile": "none", "lookup": False, "device": "cpu", "invariant": False}
# seconds of a pass beside one rank, by (ranks, one token a pass)
_WANTED = {(2, True): 0.55, (3, True): 0.40}
_WANTED_TREE = 0.60
# least ratio of the disk's rate to what all emulated links take together
_DISK_MARGIN = 2.0
_COUNTED = {  # what is told, what was done, what was planned
    "bytes read": ("bytes_read", "planned_read_bytes"),
    "bytes exchanged": ("exchanged_bytes", "planned_exchanged_bytes"),
}


@dataclass(frozen=True, slots=True)
class Effort:
    num_prompts: int
    # tokens of every text with a tree
    num_tokens: int
    num_plain: int
    num_staged: int
    tree: str
    sizes: tuple[int, ...] = (1, 2, 3)  # ranks

    @property
    def trees(self) -> tuple[str, str]:
        return _NONE, self.tree

    def order(self, prompt_ids: list[int], seed: int, tree: str) -> Order:
        """Return the order for a text; every other text is greedy."""
        num_tokens = self.num_plain if tree == _NONE else self.num_tokens
        return Order(prompt_ids, num_tokens, tree, temperature=0.6 * (seed % 2), seed=seed)


FULL = Effort(4, 32, 7, 48, "dynamic:32x12")
QUICK = Effort(1, 20, 5, 32, "dynamic:32x12")


def pass_s(text: Answer) -> list[float]:
    """Return seconds from burst to burst, drafting included; without the prompt's own pass."""
    return [after.time_s - before.time_s for before, after in pairwise(text.bursts)]


def moved(text: Answer, read: Callable[[RankFigures], float]) -> list[float]:
    """Return what each rank moved in one pass behind the prompt's."""
    _, first, last = text.figures
    return [
        (read(end) - read(begun)) / max(1, end.num_passes - begun.num_passes)
        for begun, end in zip(first, last, strict=True)
    ]


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
    samples = [second for text in texts for second in pass_s(text)]
    # what rank 0 does, drafting included, without waiting for link or ranks
    waits_s = [moved(text, lambda one: one.stall_s + one.exchange_s)[0] for text in texts]
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
        "compute_s": median(one - wait for one, wait in zip(whole_s, waits_s, strict=True)),
        "exchange_s": median(max(moved(text, lambda one: one.exchange_s)) for text in texts),
        "ranks": ranks,
    }
    if others:
        own, alone = ([median(pass_s(text)) for text in some] for some in (texts, others))
        row["ratio_samples"] = ratios(own, alone)
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
        "rows_per_pass": median(moved(text, lambda one: one.num_rows)[rank] for text in texts),
        "bytes_read": read_bytes,
        "planned_read_bytes": last.pass_bytes * num_passes,
        "exchanged_bytes": sent_bytes,
        "planned_exchanged_bytes": last.row_bytes * num_rows,
        "peak_rss_bytes": last.peak_rss_bytes,
        "ram_bytes": last.ram_bytes,
        "allowed_bytes": last.ram_bytes + last.own_bytes,
    }


def checks(rows: Sequence[Row]) -> list[Row]:
    found = list[Row]()
    for row in rows:
        if "ratio" in row:
            wanted = _WANTED.get((row["num_ranks"], row["tree"] == _NONE), _WANTED_TREE)
            name = f"s/pass, {row['name']} / 1 rank"
            found.append(check(name, row["ratio_samples"], wanted, "lower"))
    ranks = [rank for row in rows for rank in row["ranks"]]
    for told, (done, planned) in _COUNTED.items():
        over = ratios([rank[done] for rank in ranks], [rank[planned] for rank in ranks])
        off = max((abs(ratio - 1) for ratio in over), default=0.0)
        name = f"{told} / planned, any rank: most off"
        found.append(check(name, over, 0.0, "lower", off))
    held = [rank["peak_rss_bytes"] / rank["allowed_bytes"] for rank in ranks]
    name = "peak RSS / (budget + libraries), any rank"
    found.append(check(name, held, 1.0, "lower", max(held)))
    return found


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
    Column("peak RSS", lambda row: stages.held([one["peak_rss_bytes"] for one in row["ranks"]])),
)


def share(
    bench: Bench, setting: Setting, effort: Effort, rate: float, texts: Sequence[list[int]]
) -> tuple[list[Row], list[Answer]]:
    """Return a row for each tree and number of ranks, one rank first, and all texts."""
    usual = {"context": _CONTEXT, "dtype": _DTYPE}
    how: dict[str, Any] = {**usual, **_HOW, "tree": effort.tree, "link_limit": int(rate)}
    num_nodes = parse_tree(effort.tree).num_nodes
    found = dict[tuple[str, int], list[Answer]]()
    with bench.screen as screen, ExitStack() as resources:
        screen.wait("starting ranks")
        wanted = {}
        for size in effort.sizes:
            ranks = "shards" if size > 1 else None
            budgets = shard_budgets(setting, size, num_nodes, **usual)
            wanted[size] = (setting, [{**how, "ranks": ranks, "ram": own} for own in budgets])
        clusters = open_clusters(wanted, resources)
        rounds = [(seed, ids, tree) for seed, ids in enumerate(texts) for tree in effort.trees]
        for (seed, ids, tree), size in bench.turns(rounds, effort.sizes, "decoding"):
            answer = clusters[size].ask(effort.order(ids, seed, tree))
            found.setdefault((tree, size), []).append(answer)
    rows = list[Row]()
    for tree in effort.trees:
        for size in effort.sizes:
            alone = found.get((tree, 1), ()) if size > 1 else ()
            rows.append(row_of(size, found[tree, size], rate, alone))
    return rows, [text for own in found.values() for text in own]


def in_stages(
    bench: Bench, effort: Effort, slow_layer_s: float, texts: Sequence[list[int]]
) -> tuple[list[Row], list[Answer]]:
    setting = bench.setting(size=_STAGED_SIZE)
    ways = bench.effort((*stages.BASELINES, *stages.OTHERS), stages.BASELINES)
    found: dict[str, list[Answer]] = {way: [] for way in ways}
    with bench.screen as screen, ExitStack() as resources:
        screen.wait("starting stages")
        wanted = {way: stages.ranks_of(setting, way, slow_layer_s) for way in ways}
        clusters = open_clusters(wanted, resources)
        for (seed, ids), way in bench.turns(enumerate(texts), ways, "decoding in stages"):
            order = Order(ids, effort.num_staged, temperature=0.6 * (seed % 2), seed=seed)
            found[way].append(clusters[way].ask(order))
        peaks = {way: cluster.peak_rss_bytes() for way, cluster in clusters.items()}
    rows = [stages.row_of(way, own, peaks[way]) for way, own in found.items()]
    return rows, [text for own in found.values() for text in own]


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
    if bench.given("picture") is not None and "stages" not in parts:
        raise UserError("--picture shows runs of stages: add --part stages")
    rate = parse_size(link_limit, "--link-limit")
    ids = raw_ids(PAIR / "target", bench.prompts(effort.num_prompts), PROMPT_TOKENS)
    setting = bench.setting(size=size)
    bench.begin(setting, link_bytes_per_s=rate, slow_layer_s=slow_layer, dtype=_DTYPE)
    require_slower(rate, bench.ceiling["bytes_per_s"], max(effort.sizes))
    shared = staged = list[Row]()
    texts = list[Answer]()
    verdicts = list[Row]()
    if "shards" in parts:
        shared, own = share(bench, setting, effort, rate, ids)
        texts += own
        verdicts += checks(shared)
    if "stages" in parts:
        staged, own = in_stages(bench, effort, slow_layer, ids)
        texts += own
        verdicts += stages.checks(staged)

    def draw(settings: Row, path: Path) -> None:
        model = f"the packaged target, {_STAGED_SIZE}, {slow_layer:g} s a layer longer"
        draw_flights(staged, {**settings, "target": model}, path)

    return Findings(
        rows=[*shared, *staged],
        tables=[(COLUMNS, shared), (stages.COLUMNS, staged)],
        checks=verdicts,
        written=[text.written for text in texts],
        ceiling={"bytes_per_s": rate, "disk_bytes_per_s": bench.ceiling["bytes_per_s"]},
        draw=draw,
    )


def require_slower(link_bytes_per_s: float, disk_bytes_per_s: float, num_ranks: int) -> None:
    """Refuse links that ranks on one disk could not have. Raises `UserError`."""
    most = disk_bytes_per_s / num_ranks / _DISK_MARGIN
    if link_bytes_per_s > most:
        rule = f"--link-limit must be {most / 1e6:.0f}MB or less on this disk"
        raise UserError(f"{rule}, got {link_bytes_per_s / 1e6:.0f}MB: lower it")
