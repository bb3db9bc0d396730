"""Many ranks on this machine, each with a link of the same speed, beside one rank.

Links are emulated (`--link-limit`), far below what the disk gives, so that ranks which share it
here read as if each had its own. Each rank has the least memory that it can do with, so that nearly
all layers stream with any number of ranks. All clusters are open at once, computing in float32, and
take turns text by text. A short text may run a little faster than its link: it begins with full
slots. `stages` is a pipeline, see `latency/stages.py`. Passes over emulated networks, beside
max(link, drafting + computing + exchange), are in `LOG.md`.

Invariant: nothing is printed before all clusters wrote the same ids, and every one was proved.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Annotated, NamedTuple

import typer

from offload.bench.harness.cluster import Answer, Cluster, Order, shard_budgets
from offload.bench.harness.command import Bench, Findings, command, one_of
from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import latencies
from offload.bench.harness.picture import draw_flights, require_pictures
from offload.bench.harness.prompts import raw_ids
from offload.bench.harness.record import Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, check
from offload.bench.latency import stages
from offload.checkpoint.packaged import PAIR
from offload.errors import UserError
from offload.stats import RankFigures
from offload.trees.spec import parse_tree
from offload.units import parse_size

PARTS = ("shards", "stages")
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
    """How much is measured."""

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


class Text(NamedTuple):
    """One answer and what it was asked for; the prompt's own pass is in none of its figures."""

    num_ranks: int
    order: Order
    answer: Answer

    @property
    def pass_s(self) -> list[float]:
        """Seconds from burst to burst, drafting included."""
        return [after.time_s - before.time_s for before, after in pairwise(self.answer.bursts)]

    def moved(self, read: Callable[[RankFigures], float]) -> list[float]:
        """Return what each rank moved in one pass."""
        _, first, last = self.answer.figures
        return [
            (read(end) - read(begun)) / max(1, end.num_passes - begun.num_passes)
            for begun, end in zip(first, last, strict=True)
        ]


class Shown(NamedTuple):
    """What a part has found, unproved."""

    rows: list[Row]
    written: list[Written]
    checks: list[Row]


def row_of(texts: Sequence[Text], link_bytes_per_s: float, others: Sequence[Text] = ()) -> Row:
    """Return the row of one cluster and tree, beside the same texts of one rank (`others`)."""
    num_ranks = texts[0].num_ranks
    tree = texts[0].order.tree
    bursts = latencies([text.answer.bursts for text in texts])
    ranks = [_rank_row([text.answer.figures for text in texts], rank) for rank in range(num_ranks)]
    samples = [second for text in texts for second in text.pass_s]
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
        "compute_s": compute_s(texts),
        "exchange_s": median(max(text.moved(lambda one: one.exchange_s)) for text in texts),
        "ranks": ranks,
    }
    if others:
        pairs = zip(texts, others, strict=True)
        row["ratio_samples"] = [median(text.pass_s) / median(one.pass_s) for text, one in pairs]
        row["ratio"] = median(row["ratio_samples"])
    return row


def _rank_row(figures: Sequence[list[list[RankFigures]]], rank: int) -> Row:
    """Return bytes read and sent in each pass, done beside planned, and the peak of memory."""
    read_bytes = sent_bytes = num_passes = num_rows = 0
    for first, _, last in ((moment[rank] for moment in text) for text in figures):
        read_bytes += last.bytes_streamed - first.bytes_streamed
        sent_bytes += exchanged_bytes(last) - exchanged_bytes(first)
        num_passes += last.num_passes - first.num_passes
        num_rows += last.num_rows - first.num_rows
    if len(figures[0][0]) == 1:  # a process by itself counts no prompts
        num_passes += len(figures)
    return {
        "rank": rank,
        "pass_bytes": last.pass_bytes,
        "num_passes": num_passes,
        "num_rows": num_rows,
        "rows_per_pass": median(_per_pass(text, rank) for text in figures),
        "bytes_read": read_bytes,
        "planned_read_bytes": last.pass_bytes * num_passes,
        "exchanged_bytes": sent_bytes,
        "planned_exchanged_bytes": last.row_bytes * num_rows,
        "peak_rss_bytes": last.peak_rss_bytes,
        "ram_bytes": last.ram_bytes,
        "allowed_bytes": last.ram_bytes + last.own_bytes,
    }


def _per_pass(figures: Sequence[Sequence[RankFigures]], rank: int) -> float:
    """Return the rows of a pass after the prompt's."""
    begun = figures[1][rank]
    end = figures[2][rank]
    return (end.num_rows - begun.num_rows) / max(1, end.num_passes - begun.num_passes)


def exchanged_bytes(figures: RankFigures) -> int:
    return sum(figures.bytes_sent.get(way, 0) for way in ("gather", "broadcast"))


def compute_s(texts: Sequence[Text]) -> float:
    """Return what rank 0 computes, drafting included, without waiting for link or ranks."""
    waits = [text.moved(lambda one: one.stall_s + one.exchange_s)[0] for text in texts]
    whole = [text.answer.stats["tpot_s"] * text.answer.stats["tokens_per_sweep"] for text in texts]
    return median(one - wait for one, wait in zip(whole, waits, strict=True))


def checks(rows: Sequence[Row]) -> list[Row]:
    """Return what was wanted of all of these rows."""
    found = list[Row]()
    for row in rows:
        if "ratio" in row:
            wanted = _WANTED.get((row["num_ranks"], row["tree"] == _NONE), _WANTED_TREE)
            name = f"s/pass, {row['name']} / 1 rank"
            found.append(check(name, row["ratio_samples"], wanted, "lower"))
    ranks = [rank for row in rows for rank in row["ranks"]]
    for told, (done, planned) in _COUNTED.items():
        ratios = [rank[done] / rank[planned] for rank in ranks if rank[planned]]
        off = max((abs(ratio - 1) for ratio in ratios), default=0.0)
        name = f"{told} / planned, any rank: most off"
        found.append(check(name, ratios, 0.0, "lower", off))
    held = [rank["peak_rss_bytes"] / rank["allowed_bytes"] for rank in ranks]
    name = "peak RSS / (budget + libraries), any rank"
    found.append(check(name, held, 1.0, "lower", max(held)))
    return found


def _held(row: Row) -> str:
    return "/".join(f"{rank['peak_rss_bytes'] / 2**20:.0f}" for rank in row["ranks"]) + " MiB"


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
    Column("peak RSS", _held),
)


def open_clusters(
    setting: Setting, effort: Effort, link_bytes_per_s: float, resources: ExitStack
) -> dict[int, Cluster]:
    """Open clusters of all sizes. Raises `UserError`."""
    usual = {"context": _CONTEXT, "dtype": _DTYPE}
    how = {**usual, **_HOW, "tree": effort.tree, "link_limit": int(link_bytes_per_s)}
    num_nodes = parse_tree(effort.tree).num_nodes
    found = dict[int, Cluster]()
    for size in effort.sizes:
        ranks = "shards" if size > 1 else None
        budgets = shard_budgets(setting.target, setting.draft, size, num_nodes, **usual)
        options = [{**how, "ranks": ranks, "ram": budget} for budget in budgets]
        found[size] = Cluster(setting.target, setting.draft, options)
        resources.callback(found[size].close)
    for cluster in found.values():
        cluster.opened()
    return found


def share(
    bench: Bench,
    setting: Setting,
    effort: Effort,
    link_bytes_per_s: float,
    texts: Sequence[list[int]],
) -> Shown:
    """Measure clusters of all sizes side by side, prompt by prompt and tree by tree."""
    found = list[Text]()
    with bench.screen as screen, ExitStack() as resources:
        screen.wait("starting ranks")
        clusters = open_clusters(setting, effort, link_bytes_per_s, resources)
        rounds = [(seed, ids, tree) for seed, ids in enumerate(texts) for tree in effort.trees]
        for (seed, ids, tree), size in bench.turns(rounds, effort.sizes, "decoding"):
            order = effort.order(ids, seed, tree)
            found.append(Text(size, order, clusters[size].ask(order)))
    rows = rows_of(found, link_bytes_per_s, effort)
    return Shown(rows, [one.order.written(one.answer.new_ids) for one in found], checks(rows))


def rows_of(texts: Sequence[Text], link_bytes_per_s: float, effort: Effort) -> list[Row]:
    """Return a row for each tree and number of ranks, one rank first."""

    def own(size: int, tree: str) -> list[Text]:
        return [text for text in texts if (text.num_ranks, text.order.tree) == (size, tree)]

    return [
        row_of(own(size, tree), link_bytes_per_s, own(1, tree) if size > 1 else ())
        for tree in effort.trees
        for size in effort.sizes
    ]


def in_stages(
    bench: Bench, effort: Effort, slow_layer_s: float, texts: Sequence[list[int]]
) -> Shown:
    """Compare the ways to run a pipeline, side by side."""
    setting = bench.setting(size=_STAGED_SIZE)
    ways = bench.effort((*stages.BASELINES, *stages.OTHERS), stages.BASELINES)
    found = list[stages.Piped]()
    with bench.screen as screen, ExitStack() as resources:
        screen.wait("starting stages")
        clusters = stages.open_ways(setting, ways, slow_layer_s, resources)
        for (seed, ids), way in bench.turns(enumerate(texts), ways, "decoding in stages"):
            order = Order(ids, effort.num_staged, temperature=0.6 * (seed % 2), seed=seed)
            found.append(stages.Piped(way, order, clusters[way].ask(order)))
        peaks = {way: cluster.peak_rss_bytes() for way, cluster in clusters.items()}
    rows = [stages.row_of([text for text in found if text.way == way], peaks[way]) for way in ways]
    written = [text.order.written(text.answer.new_ids) for text in found]
    return Shown(rows, written, stages.checks(rows))


@command(
    *("ranks", "num_prompts picture quick compare"),
    examples=["offload bench ranks --quick --part stages --picture runs.png"],
)
def main(
    bench: Bench,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            metavar="PART",
            help=f"of {', '.join(PARTS)}, several; default: all, with --quick the first",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="of the target that is shared")
    ] = "300MB",
    link_limit: Annotated[
        str, typer.Option(metavar="RATE", help="of each rank's link, below the disk's share")
    ] = "100MB",
    slow_layer: Annotated[
        float, typer.Option(metavar="S", help="seconds that a layer of a stage takes longer")
    ] = 0.03,
) -> Findings:
    """How long does a pass take on several ranks with a link each, and in stages?"""
    one_of(part or (), PARTS, "--part")
    parts = part or bench.effort(PARTS, PARTS[:1])
    effort = bench.effort(FULL, QUICK)
    effort = replace(effort, num_prompts=bench.given("num_prompts") or effort.num_prompts)
    picture = bench.given("picture")
    if picture is not None:
        require_pictures()
        if "stages" not in parts:
            raise UserError("--picture shows runs of stages: add --part stages")
    rate = parse_size(link_limit, "--link-limit")
    found, names = bench.prompts(effort.num_prompts)
    setting = bench.setting(size=size)
    same = {"prompts": names, "link_bytes_per_s": rate, "slow_layer_s": slow_layer}
    bench.check_same(setting, **same)
    disk_bytes_per_s = bench.say_link(setting)
    require_slower(rate, disk_bytes_per_s, max(effort.sizes))
    ids = raw_ids(PAIR / "target", found, PROMPT_TOKENS)
    nothing = Shown([], [], [])
    shared = share(bench, setting, effort, rate, ids) if "shards" in parts else nothing
    staged = in_stages(bench, effort, slow_layer, ids) if "stages" in parts else nothing
    settings = {**setting.as_dict(), **same, "dtype": _DTYPE}
    model = f"the packaged target, {_STAGED_SIZE}, {slow_layer:g} s a layer longer"

    def draw() -> None:
        if picture is not None:
            draw_flights(staged.rows, {**settings, "target": model}, picture)

    tables = ((COLUMNS, shared.rows), (stages.COLUMNS, staged.rows))
    return Findings(
        rows=[*shared.rows, *staged.rows],
        tables=[(columns, rows) for columns, rows in tables if rows],
        checks=[*shared.checks, *staged.checks],
        setting=setting,
        written=[*shared.written, *staged.written],
        settings=settings,
        ceiling={"bytes_per_s": rate, "disk_bytes_per_s": disk_bytes_per_s},
        draw=draw,
    )


def require_slower(link_bytes_per_s: float, disk_bytes_per_s: float, num_ranks: int) -> None:
    """Refuse links that ranks on one disk could not have. Raises `UserError`."""
    most = disk_bytes_per_s / num_ranks / _DISK_MARGIN
    if link_bytes_per_s > most:
        got = f"{link_bytes_per_s / 1e6:.0f}MB"
        raise UserError(
            f"--link-limit must be {most / 1e6:.0f}MB or less on this disk, got {got}: lower it"
        )
