"""Many ranks on this machine, each with a link of the same speed, beside one rank.

Links are emulated (`--link-limit`), far below what the disk gives, so that ranks which share it
here read as if each had its own. Each rank has the least memory that it can do with, so that nearly
all layers stream with any number of ranks. All clusters are open at once, computing in float32, and
take turns text by text. Then two ranks talk over networks, emulated as well, and a pass stands
beside max(link, drafting + computing + exchange). A short text may run a little faster than its
link: it begins with full slots.

Invariant: nothing is printed before all clusters wrote the same ids, and every one was proved.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench.harness.cluster import Answer, Cluster, Order, shard_budgets
from offload.bench.harness.command import Bench, command, one_of, say_link, say_table
from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import latencies
from offload.bench.harness.network import NoNetworkError, network
from offload.bench.harness.picture import draw_flights, require_pictures
from offload.bench.harness.prompts import CODE, prompts
from offload.bench.harness.record import Row, writable
from offload.bench.harness.setting import PROMPT_TOKENS, Setting, find_setting
from offload.bench.harness.wanted import say_wanted, wanted_row
from offload.bench.latency import stages
from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import config_sizes
from offload.cli.demo import PAIR
from offload.distributed.layout import gathered_widths, share_layers
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.planning.cluster import Gathers, Network
from offload.stats import RankFigures
from offload.trees.spec import parse_tree
from offload.units import parse_size

_CONTEXT = 512
_DTYPE = "float32"
_NONE = "none"
_STAGED_SIZE = "60MB"  # seven small layers, which compute in little time beside what they sleep
_HOW = {"threads": 1, "profile": "none", "lookup": False, "device": "cpu", "invariant": False}
_NETWORKS = {"1 GbE, 1 ms": Network(125e6, 1e-3), "100 Mbit, 1 ms": Network(12.5e6, 1e-3)}
# seconds of a pass beside one rank, by (ranks, one token a pass)
_WANTED = {(2, True): 0.55, (3, True): 0.40}
# least ratio of the disk's rate to what all emulated links take together
_DISK_MARGIN = 2.0
_WANTED_TREE = 0.60
_WANTED_NETWORK = 1.10


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

    def order(self, prompt_ids: list[int], seed: int, tree: str) -> Order:
        """Return the order for a text; every other text is greedy."""
        num_tokens = self.num_plain if tree == _NONE else self.num_tokens
        return Order(prompt_ids, num_tokens, tree, temperature=0.6 * (seed % 2), seed=seed)


FULL = Effort(4, 32, 7, 48, "dynamic:32x12")
QUICK = Effort(1, 20, 5, 32, "dynamic:32x12")
PARTS = ("shards", "networks", "stages")


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


def write_all(
    clusters: dict[int, Cluster], texts: Sequence[list[int]], effort: Effort, tell: Any
) -> list[Text]:
    """Write texts, prompt by prompt and tree by tree; the clusters take turns."""
    found = list[Text]()
    total = len(texts) * 2 * len(clusters)
    for seed, ids in enumerate(texts):
        for tree in (_NONE, effort.tree):
            for num_ranks, cluster in clusters.items():
                order = effort.order(ids, seed, tree)
                found.append(Text(num_ranks, order, cluster.ask(order)))
                tell(len(found), total, "decoding")
    return found


def row_of(texts: Sequence[Text], link_bytes_per_s: float, others: Sequence[Text] = ()) -> Row:
    """Return the row of one cluster and tree, beside the same texts of one rank (`others`)."""
    num_ranks = texts[0].num_ranks
    tree = texts[0].order.tree
    bursts = latencies([text.answer.bursts for text in texts])
    ranks = [_rank_row([text.answer.figures for text in texts], rank) for rank in range(num_ranks)]
    samples = [second for text in texts for second in text.pass_s]
    pass_s = median(samples)
    link_s = max(rank["pass_bytes"] for rank in ranks) / link_bytes_per_s
    exchange_s = median(max(text.moved(lambda one: one.exchange_s)) for text in texts)
    row = {"name": f"{num_ranks} x shards, {tree}", "num_ranks": num_ranks, "tree": tree, "pass_s": pass_s,
           "pass_s_samples": samples, "link_s": link_s, "tokens_per_s": bursts["decode_tokens_per_s"],
           "ttft_s": bursts["mean_ttft_s"], "itl_s": bursts["mean_itl_s"], "compute_s": compute_s(texts),
           "exchange_s": exchange_s, "ranks": ranks}  # fmt: skip
    if others:
        ratios = [
            median(text.pass_s) / median(one.pass_s)
            for text, one in zip(texts, others, strict=True)
        ]
        row |= {"ratio": median(ratios), "ratio_samples": ratios}
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
    rows_per_pass = median(_per_pass(text, rank) for text in figures)
    allowed_bytes = last.ram_bytes + last.own_bytes
    return {
        "rank": rank,
        "pass_bytes": last.pass_bytes,
        "num_passes": num_passes,
        "num_rows": num_rows,
        "rows_per_pass": rows_per_pass,
        "bytes_read": read_bytes,
        "planned_read_bytes": last.pass_bytes * num_passes,
        "exchanged_bytes": sent_bytes,
        "planned_exchanged_bytes": last.row_bytes * num_rows,
        "peak_rss_bytes": last.peak_rss_bytes,
        "ram_bytes": last.ram_bytes,
        "allowed_bytes": allowed_bytes,
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


def promises(rows: Sequence[Row]) -> list[Row]:
    """Return what was wanted of all of these rows."""
    found = list[Row]()
    for row in rows:
        if "ratio" in row:
            wanted = _WANTED.get((row["num_ranks"], row["tree"] == _NONE), _WANTED_TREE)
            name = f"s/pass, {row['name']} / 1 rank"
            found.append(wanted_row(name, row["ratio"], wanted, row["ratio_samples"], "lower"))
    ranks = [rank for row in rows for rank in row["ranks"]]
    for told, done, planned in (
        ("bytes read", "bytes_read", "planned_read_bytes"),
        ("bytes exchanged", "exchanged_bytes", "planned_exchanged_bytes"),
    ):
        ratios = [rank[done] / rank[planned] for rank in ranks if rank[planned]]
        off = max((abs(ratio - 1) for ratio in ratios), default=0.0)
        found.append(wanted_row(f"{told} / planned, any rank: most off", off, 0.0, ratios, "lower"))
    held = [rank["peak_rss_bytes"] / rank["allowed_bytes"] for rank in ranks]
    found.append(
        wanted_row("peak RSS / (budget + libraries), any rank", max(held), 1.0, held, "lower")
    )
    return found


HEAD = [
    "cluster",
    "s/pass",
    "link s",
    "compute s",
    "exchange s",
    "x 1 rank",
    "tokens/s",
    "ttft s",
    "itl s",
    "peak RSS",
]


def cells(row: Row) -> list[str]:
    names = (
        "pass_s",
        "link_s",
        "compute_s",
        "exchange_s",
        "ratio",
        "tokens_per_s",
        "ttft_s",
        "itl_s",
    )
    held = "/".join(f"{rank['peak_rss_bytes'] / 2**20:.0f}" for rank in row["ranks"])
    return [
        row["name"],
        *(f"{row[name]:.3f}" if name in row else "-" for name in names),
        f"{held} MiB",
    ]


def open_clusters(
    setting: Setting, effort: Effort, link_bytes_per_s: float, resources: ExitStack, hosts: Any = ()
) -> dict[int, Cluster]:
    """Open clusters of all sizes, or one with a rank on each host. Raises `UserError`."""
    usual = {"context": _CONTEXT, "dtype": _DTYPE}
    found = dict[int, Cluster]()
    for size in (len(hosts),) if hosts else effort.sizes:
        budgets = shard_budgets(
            setting.target, setting.draft, size, parse_tree(effort.tree).num_nodes, **usual
        )
        how = {**usual, **_HOW, "tree": effort.tree, "link_limit": int(link_bytes_per_s)}
        options = [
            {**how, "ranks": "shards" if size > 1 else None, "ram": budget} for budget in budgets
        ]
        found[size] = Cluster(setting.target, setting.draft, options, hosts)
        resources.callback(found[size].close)
    for cluster in found.values():
        cluster.opened()
    return found


@dataclass(frozen=True, slots=True)
class Shown:
    """What a part has found, unproved."""

    rows: list[Row] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    figures: list[Row] = field(default_factory=list)  # beside what was wanted
    notes: list[str] = field(default_factory=list)


def share(
    bench: Bench,
    setting: Setting,
    effort: Effort,
    link_bytes_per_s: float,
    texts: Sequence[list[int]],
) -> Shown:
    """Measure clusters of all sizes side by side."""
    with bench.screen as screen, ExitStack() as resources:
        screen.wait("starting ranks")
        clusters = open_clusters(setting, effort, link_bytes_per_s, resources)
        found = write_all(clusters, texts, effort, screen.count)
    rows = rows_of(found, link_bytes_per_s, effort)
    return Shown(rows, [text.order.written(text.answer.new_ids) for text in found], promises(rows))


def over_networks(
    bench: Bench,
    setting: Setting,
    effort: Effort,
    link_bytes_per_s: float,
    ids: list[int],
    local: Sequence[Row],
) -> Shown:
    """Run two ranks on hosts of their own, one text for each network and tree.

    There is a note where no hosts can be made.

    Args:
        local: rows of two ranks without a network between them, whose computing is that of these.
    """
    shown = Shown()
    exchange = exchange_of(setting.target, 2)
    for name, between in _NETWORKS.items():
        try:
            with bench.screen as screen:
                screen.wait(f"two ranks over {name}")
                texts = _over_network(setting, effort, link_bytes_per_s, ids, between)
        except NoNetworkError as error:
            return Shown(notes=[f"networks are left out: {error}"])
        for text, sent in texts:
            row = row_of([text], link_bytes_per_s)
            alone_s = next(
                one["compute_s"]
                for one in local
                if (one["num_ranks"], one["tree"]) == (2, row["tree"])
            )
            row |= {
                **_beside(row, exchange, between, alone_s, sent),
                "name": f"{row['name']}; {name}",
            }
            shown.rows.append(row)
            shown.written.append(text.order.written(text.answer.new_ids))
            ratios = [second / row["predicted_s"] for second in text.pass_s]
            told = f"{row['name']}: s/pass / predicted"
            shown.figures.append(wanted_row(told, median(ratios), _WANTED_NETWORK, ratios, "lower"))
            told = f"predicted {row['predicted_s']:.3f} s a pass, the exchange alone {row['predicted_exchange_s']:.3f}"
            shown.notes.append(
                f"{row['name']}: {told}; bytes on the wire {row['wire_share']:.3f} of the formula's"
            )
    return shown


def _over_network(
    setting: Setting, effort: Effort, link_bytes_per_s: float, ids: list[int], between: Network
) -> list[tuple[Text, list[int]]]:
    """Write a text with and one without a tree; return what each host has sent.

    Raises `NoNetworkError`.
    """
    found = list[tuple[Text, list[int]]]()
    with ExitStack() as resources:
        hosts, switch = resources.enter_context(network(2, between))
        cluster = open_clusters(setting, effort, link_bytes_per_s, resources, hosts)[2]
        for tree in (_NONE, effort.tree):
            order = effort.order(ids, 0, tree)
            before = [*switch.sent_bytes]
            text = Text(2, order, cluster.ask(order))
            found.append(
                (text, [after - one for after, one in zip(switch.sent_bytes, before, strict=True)])
            )
    return found


def in_stages(
    bench: Bench, effort: Effort, slow_layer_s: float, texts: Sequence[list[int]]
) -> Shown:
    """Compare the ways to run a pipeline, side by side."""
    setting = find_setting(None, None, _STAGED_SIZE, None, bench.screen)
    ways = stages.BASELINES if bench.quick else (*stages.BASELINES, *stages.OTHERS)
    with bench.screen as screen, ExitStack() as resources:
        screen.wait("starting stages")
        clusters = stages.open_ways(setting, ways, slow_layer_s, resources)
        found = stages.write_all(clusters, texts, effort.num_staged, screen.count)
        peaks = {way: cluster.peak_rss_bytes() for way, cluster in clusters.items()}
    rows = [stages.row_of([text for text in found if text.way == way], peaks[way]) for way in ways]
    return Shown(
        rows, [text.order.written(text.answer.new_ids) for text in found], stages.promises(rows)
    )


def _beside(
    row: Row, exchange: Gathers, between: Network, alone_s: float, sent: Sequence[int]
) -> Row:
    """Return the expected time of a pass over a network, and both counts of its bytes."""
    num_rows = row["ranks"][0]["rows_per_pass"]
    formula_s = exchange.seconds(num_rows, between)
    planned = [rank["planned_exchanged_bytes"] for rank in row["ranks"]]
    return {
        "predicted_exchange_s": formula_s,
        "predicted_s": max(row["link_s"], alone_s + formula_s),
        "wire_bytes": [*sent],
        "wire_share": max(one / other for one, other in zip(sent, planned, strict=True)),
    }


def exchange_of(target: Path, num_ranks: int) -> Gathers:
    """Return the exchanges of even shares."""
    checkpoint = open_checkpoint(target)
    widths = gathered_widths(share_layers(checkpoint, [1 / num_ranks] * num_ranks))
    num_layers, width = (
        config_sizes(checkpoint)[name] for name in ("num_hidden_layers", "hidden_size")
    )
    return Gathers(widths, num_layers, width, 4)


Size = Annotated[str, typer.Option(metavar="SIZE", help="of the target that is shared")]
Limit = Annotated[
    str,
    typer.Option(
        "--link-limit", metavar="RATE", help="of each rank's link, below the disk's share"
    ),
]
Slow = Annotated[
    float,
    typer.Option("--slow-layer", metavar="S", help="seconds that a layer of a stage takes longer"),
]
Num = Annotated[int | None, typer.Option(metavar="N", min=1, help="texts of every part")]
_TOLD = f"of {', '.join(PARTS)}, several; default: all, with --quick the first"
Parts = Annotated[list[str] | None, typer.Option("--part", metavar="PART", help=_TOLD)]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="runs in flight over time", callback=writable)
]


@command(
    "ranks",
    "quick compare",
    examples=["offload bench ranks --quick --part stages --picture runs.png"],
)
def main(
    bench: Bench,
    part: Parts = None,
    size: Size = "300MB",
    link_limit: Limit = "100MB",
    slow_layer: Slow = 0.03,
    num_prompts: Num = None,
    picture: Picture = None,
) -> None:
    """How long does a pass take on several ranks with a link each, over networks, and in stages?"""
    one_of(part or (), PARTS, "--part")
    parts = part or (PARTS[:1] if bench.quick else PARTS)
    effort = QUICK if bench.quick else FULL
    effort = replace(effort, num_prompts=num_prompts or effort.num_prompts)
    if picture is not None:
        require_pictures()
        if "stages" not in parts:
            raise UserError("--picture shows runs of stages: add --part stages")
    rate = parse_size(link_limit, "--link-limit")
    found = prompts([CODE], effort.num_prompts)
    setting = find_setting(None, None, size, None, bench.screen)
    same = {
        "prompts": [one.name for one in found],
        "link_bytes_per_s": rate,
        "slow_layer_s": slow_layer,
    }
    bench.check_same(setting, **same)
    disk_bytes_per_s = say_link(setting)
    require_slower(rate, disk_bytes_per_s, max(effort.sizes))
    ids = [_encoded(prompt.text) for prompt in found]
    shown = list[Shown]()
    if "shards" in parts or "networks" in parts:
        shown.append(
            share(
                bench,
                setting,
                effort if "shards" in parts else replace(effort, sizes=(2,)),
                rate,
                ids,
            )
        )
    if "networks" in parts:
        shown.append(over_networks(bench, setting, effort, rate, ids[0], shown[0].rows))
    if "stages" in parts:
        shown.append(in_stages(bench, effort, slow_layer, ids))
    proof = bench.prove(setting, [one for each in shown for one in each.written])
    settings = {**setting.as_dict(), **same, "dtype": _DTYPE}
    rows = [row for each in shown for row in each.rows]
    staged = [row for row in rows if "way" in row]
    if len(staged) < len(rows):
        say_table(HEAD, [cells(row) for row in rows if "way" not in row])
    if staged:
        say_table(stages.HEAD, map(stages.cells, staged))
    if picture is not None and staged:
        model = f"the packaged target, {_STAGED_SIZE}, {slow_layer:g} s a layer longer"
        draw_flights(staged, {**settings, "target": model}, picture)
    for note in (note for each in shown for note in each.notes):
        print(note)
    guards = say_wanted([figure for each in shown for figure in each.figures])
    bench.finish(
        [*map(bench.row, rows)],
        settings=settings,
        ceiling={"bytes_per_s": rate, "disk_bytes_per_s": disk_bytes_per_s},
        guards=guards,
        proof=proof,
    )


def rows_of(texts: Sequence[Text], link_bytes_per_s: float, effort: Effort) -> list[Row]:
    """Return a row for each tree and number of ranks, one rank first."""
    rows = list[Row]()
    for tree in (_NONE, effort.tree):
        own = {
            size: [text for text in texts if (text.num_ranks, text.order.tree) == (size, tree)]
            for size in effort.sizes
        }
        rows += [
            row_of(own[size], link_bytes_per_s, own[1] if size > 1 and 1 in own else ())
            for size in effort.sizes
        ]
    return rows


def require_slower(link_bytes_per_s: float, disk_bytes_per_s: float, num_ranks: int) -> None:
    """Refuse links that ranks on one disk could not have. Raises `UserError`."""
    most = disk_bytes_per_s / num_ranks / _DISK_MARGIN
    if link_bytes_per_s > most:
        got = f"{link_bytes_per_s / 1e6:.0f}MB"
        raise UserError(
            f"--link-limit must be {most / 1e6:.0f}MB or less on this disk, got {got}: lower it"
        )


def _encoded(text: str) -> list[int]:
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the packaged pair has one"
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:PROMPT_TOKENS]
