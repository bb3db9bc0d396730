"""What `offload plan --ranks` prints: which way of sharing a model is better on a cluster, and what
every rank does.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from offload.cli.plan_lines import model_words, plan_picture, seconds_words, wrapped
from offload.cli.progress import plural
from offload.units import format_bytes

if TYPE_CHECKING:  # they bring numpy along
    from offload.distributed.layout import RankPart
    from offload.reports.forecast import ClusterForecast, Forecast, ForecastRate

_gb = partial(format_bytes, is_decimal=True)
_ALIKE = 1.02  # of the seconds of two ranks that are done at once
_WAYS = {"shards": "a part of every layer on each rank", "stages": "layers of its own on each rank"}


def cluster_lines(found: "Forecast", *, is_verbose: bool = False) -> str:
    """Return the better way as the headline, what it rests on, then both ways rank by rank.

    With `is_verbose`, also what takes each rank's memory in the better way.
    """
    network = found.cluster.network
    head = found.cluster.ranks[0].name
    rows = [
        ("model", model_words(found.models[0])),
        *(("draft", f"{model_words(draft)}, stays on {head}") for draft in found.models[1:]),
        (
            "network",
            f"{_gb(network.bytes_per_s)}/s each way, {1e6 * network.latency_s:.0f} us a message",
        ),
        ("why", found.why),
    ]
    if len(found.best.rates) > 1:
        rows.append(("tokens", _tokens_words(found.best.rates[-1])))
    if found.is_link_alone:
        rows.append(
            (
                "note",
                "computing is not counted: give each rank its flops and memory, or its hardware",
            )
        )
    lines = [_headline(found), "", *(wrapped(*row) for row in rows)]
    for way in found.ways:
        works = way.layout is not None
        own = (
            _way_lines(way, found.is_link_alone)
            if works
            else [wrapped(way.kind, f"do not work here: {way.refusal}")]
        )
        lines += ["", *own]
    if is_verbose and found.best.layout:
        for part in found.best.layout.parts:
            name = f"memory of {part.machine.name} as one of the {found.better}"
            lines += ["", name, plan_picture(part.plan, is_decimal=True)]
    return "\n".join(lines)


def _headline(found: "Forecast") -> str:
    best = found.best
    other = next(way for way in found.ways if way is not found.best)
    if found.is_link_alone and best.layout and not any(part.link_s for part in best.layout.parts):
        return f"As {best.kind} all of it stays in memory: computing alone decides how fast."
    low, high = map(seconds_words, best.rates[-1].s_per_token_range)
    least = "at least " if found.is_link_alone else ""
    against = f" ({seconds_words(other.s_per_token)} as {other.kind})" if other.layout else ""
    return f"As {best.kind}: {least}{low if low == high else f'{low} to {high}'} seconds per token{against}."


def _tokens_words(rate: "ForecastRate") -> str:
    low, high = (f"{tokens:.1f}" for tokens in rate.tokens_range)
    return f"{low if low == high else f'{low} to {high}'} a pass with {rate.label}: {rate.basis}"


def _way_lines(way: "ClusterForecast", is_link_alone: bool) -> Iterator[str]:
    assert way.layout is not None, "it works here"
    yield f"{way.kind}: {_WAYS[way.kind]}"
    yield f"  {'rank':<11} {'share':>5} {'has':>13} {'memory':>18} {'reads':>8} {'at':>9} {'seconds':>7}"
    for part in way.layout.parts:
        yield _rank_row(way, part)
    yield wrapped("waiting", _waiting_words(way))
    for rate in way.rates:
        at_once = f", {rate.num_in_flight} runs in flight" if rate.num_in_flight > 1 else ""
        yield wrapped(
            "decoding", f"{_speed_words(rate, is_link_alone)} {_tree_words(rate)}{at_once}"
        )
    yield f"  {'rows':<12} {'a pass s':>9} {'next after s':>13} {'network s':>10} {'on the wire':>12}"
    for one in way.passes:
        times = f"{one.seconds:>9.3g} {one.cycle_s:>13.3g} {one.exchange_s:>10.2g}"
        yield f"  {one.num_rows:<12} {times} {_gb(sum(one.sent_bytes)):>12}"


def _speed_words(rate: "ForecastRate", is_link_alone: bool) -> str:
    if rate.tokens_per_s_range is None:
        return "as fast as it computes, which is not known,"
    low, high = map(seconds_words, rate.tokens_per_s_range)
    tokens = low if low == high else f"{low} to {high}"
    return f"{'at most ' if is_link_alone else ''}{tokens} tokens per second"


def _tree_words(rate: "ForecastRate") -> str:
    return f"with {rate.label}" if rate.shape.num_nodes > 1 else "without a tree"


def _rank_row(way: "ClusterForecast", part: "RankPart") -> str:
    has = "rows"
    if way.kind == "stages":
        has = f"layers {part.layers.start}-{part.layers.stop - 1}"
    elif part.num_heads:
        has = plural(part.num_heads, "head")
    plan = part.plan
    used_bytes = plan.total_bytes
    budget_bytes = plan.ram_bytes
    if plan.gpu_bytes is not None:
        used_bytes = plan.gpu_total_bytes
        budget_bytes = plan.gpu_bytes
    share = f"{100 * part.fraction:.0f} %"
    memory = f"{_gb(used_bytes)} of {_gb(budget_bytes)}"
    reads = f"{_gb(plan.streamed_bytes):>8} {_gb(part.machine.feed_bytes_per_s) + '/s':>9}"
    seconds = seconds_words(way.busy(part).seconds)
    return f"  {part.machine.name:<11.11} {share:>5} {has:>13} {memory:>18} {reads} {seconds:>7}"


def _waiting_words(way: "ClusterForecast") -> str:
    """Return which rank the others wait for, and what that one does meanwhile."""
    assert way.layout is not None, "it works here"
    times = [way.busy(part) for part in way.layout.parts]
    slowest = max(range(len(times)), key=lambda rank: times[rank].seconds)
    what = times[slowest].limit
    whose = "the network" if what == "network" else f"its {what}"
    if not times[slowest].seconds:
        return "for no disk: computing alone decides"
    if len(times) == 1:
        return f"for {whose}"
    if times[slowest].seconds <= _ALIKE * min(one.seconds for one in times):
        return f"all ranks are done at once; each waits for {whose}"
    return f"all wait for {way.layout.parts[slowest].machine.name}, which waits for {whose}"
