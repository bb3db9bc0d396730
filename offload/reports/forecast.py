"""How fast a cluster will be with one model, shared as shards or as stages, and which is better.

Ranks with rows of every layer (shards) wait for the slowest link, or for computing and exchanging,
whichever is longer: weights are read ahead meanwhile. Ranks with layers of their own (stages) take
turns for one run; with as many runs in flight as there are stages the slowest one decides, but most
of those runs are in vain: what the first one ends in is not what they begin with. What they still
yield (`in_flight_gain`) was counted for a small pair. For any tree named, stages run batches of as
many guesses as cost next to nothing, as `--pipeline async` does. Without rates of computing,
seconds are those of links and network: a lower bound. No torch.

Invariant: nothing is measured, so any cluster can be asked for.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from offload.checkpoint.sizes import ModelFacts
from offload.distributed.layout import (
    ClusterLayout,
    ClusterRequest,
    RankPart,
    lay_out_shards,
    lay_out_stages,
)
from offload.engine.resolve import resolve
from offload.errors import UserError
from offload.planning.acceptance import prior_for
from offload.planning.cluster import Cluster, Gathers, read_cluster
from offload.planning.cost_model import VERIFY_S, Costs, Curve, Traffic
from offload.planning.load_options import LoadOptions
from offload.planning.profile import Profile
from offload.planning.selector import TreeSelector
from offload.rank_roles import TIMED_ROWS, PipelineOptions, Roles, free_rows, require_exact_rule
from offload.reports.estimate import facts_of, models_told
from offload.sampling_options import Sampling
from offload.trees.spec import AUTO_DEPTH, AUTO_NODES, MAX_TREE_NODES, TreeSpec, label_of
from offload.trees.topology import SIZES, Shape, chain

_RUNS = (1, 2, 4, 8)
# nodes of each tree -> tokens per second over those of one run at a time on the same stages
# counted for a pair of 16 and 1 million weights, greedy, an ideal draft
_GAINS = {
    4: (1.0, 1.15, 1.27, 1.39),
    8: (1.0, 1.07, 1.14, 1.23),
    16: (1.0, 1.04, 1.10, 1.18),
    64: (1.0, 1.04, 1.09, 1.16),
    128: (1.0, 1.01, 1.04, 1.10),
}


def in_flight_gain(num_runs: int, num_nodes: int) -> float:
    """Return the speed over one run at a time for equal stages, interpolated in logarithms."""
    sizes = [math.log2(size) for size in _GAINS]
    columns = zip(*_GAINS.values(), strict=True)
    gains = [float(np.interp(math.log2(num_nodes), sizes, column)) for column in columns]
    return float(np.interp(math.log2(num_runs), [math.log2(runs) for runs in _RUNS], gains))


Kind = Literal["shards", "stages"]
Limit = Literal["disk", "link", "processor", "network"]
_LAY_OUT: dict[Kind, Callable[[ClusterRequest, int], ClusterLayout]] = {
    "shards": lay_out_shards,
    "stages": lay_out_stages,
}
_CURVE_ROWS = (1, 8, 32, 64, 128, 256, 512, SIZES[-1])
# rows of the passes that are shown beside those of the tree
SHOWN_ROWS = (1, 64, 256)


class ForecastPass(NamedTuple):
    """One pass of `num_rows` rows."""

    num_rows: int
    seconds: float  # from its beginning to its end, where no other is in flight
    exchange_s: float  # the network alone
    # from one end to the next, with a pass in flight for every stage; for shards as `seconds`
    cycle_s: float
    sent_bytes: tuple[int, ...]  # by each rank


class ForecastRate(NamedTuple):
    """Decoding with one tree."""

    label: str
    shape: Shape
    tokens_range: tuple[float, float]  # least and most of a pass
    basis: str
    draft_s: float  # of one tree
    s_per_token_range: tuple[float, float]
    num_in_flight: int  # runs at a time

    @property
    def tokens_per_s_range(self) -> tuple[float, float] | None:
        """Least and most tokens per second; None where nothing that is counted takes any time."""
        low, high = self.s_per_token_range
        return (1 / high, 1 / low) if low else None

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        return {
            "tree": self.label,
            "num_nodes": self.shape.num_nodes,
            "depth": self.shape.depth,
            "tokens_per_pass_range": self.tokens_range,
            "basis": self.basis,
            "draft_s": self.draft_s,
            "s_per_token_range": self.s_per_token_range,
            "num_in_flight": self.num_in_flight,
            "tokens_per_s_range": self.tokens_per_s_range,
        }


class RankTime(NamedTuple):
    """How long one rank is busy in every pass, and what limits it."""

    seconds: float
    limit: Limit


class ClusterForecast(NamedTuple):
    """One way of sharing a model; without a layout it does not work, and `refusal` says why."""

    kind: Kind
    layout: ClusterLayout | None
    refusal: str = ""
    passes: tuple[ForecastPass, ...] = ()
    # without a tree, then with the wanted one
    rates: tuple[ForecastRate, ...] = ()

    @property
    def s_per_token(self) -> float:
        """Seconds per token of the best known way to decode, in the middle of its range."""
        low, high = self.rates[-1].s_per_token_range
        return (low * high) ** 0.5

    @property
    def num_rows(self) -> int:
        return self.rates[-1].shape.num_nodes

    @property
    def usual(self) -> ForecastPass:
        return next(row_pass for row_pass in self.passes if row_pass.num_rows == self.num_rows)

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        if self.layout is None:
            return {"works": False, "refusal": self.refusal}
        ranks = []
        for part in self.layout.parts:
            busy = self.busy(part)
            ranks.append({**part.as_dict(), "busy_s": busy.seconds, "limit": busy.limit})
        passes = [row_pass._asdict() for row_pass in self.passes]
        rates = [rate.as_dict() for rate in self.rates]
        return {"works": True, "ranks": ranks, "passes": passes, "predictions": rates}

    def busy(self, part: RankPart) -> RankTime:
        """Return a rank's work in a pass; of stages the network exchanges meanwhile."""
        is_disk = (
            not part.machine.gpu_bytes or Traffic.from_plan(part.plan, part.machine).is_disk_slower
        )
        assert self.layout is not None, "it has parts"
        is_counted = self.layout.request.knows_compute
        compute_s = part.compute_s.at(self.num_rows) if is_counted else 0.0
        exchange_s = self.usual.exchange_s if self.kind == "shards" else 0.0
        if part.link_s and part.link_s >= compute_s + exchange_s:
            return RankTime(part.link_s, "disk" if is_disk else "link")
        limit: Limit = "processor" if compute_s >= exchange_s else "network"
        return RankTime(compute_s + exchange_s, limit)


class Forecast(NamedTuple):
    """The forecasts of both ways to share a model."""

    cluster: Cluster
    models: tuple[ModelFacts, ...]  # the target, and the draft if there is one
    ways: tuple[ClusterForecast, ClusterForecast]
    better: Kind
    why: str
    is_link_alone: bool  # whether computing is left out, because its rates are not known

    @property
    def best(self) -> ClusterForecast:
        return next(way for way in self.ways if way.kind == self.better)

    def as_dict(self) -> dict[str, object]:
        """Return the figures by the names that `--json` uses."""
        return {
            "fits": True,
            "better": self.better,
            "why": self.why,
            "s_per_token_range": self.best.rates[-1].s_per_token_range,
            "is_link_alone": self.is_link_alone,
            "models": models_told(self.models),
            # one rank may have none
            "network": {
                name: value if math.isfinite(value) else None
                for name, value in self.cluster.network._asdict().items()
            },
            **{way.kind: way.as_dict() for way in self.ways},
        }


def forecast(options: LoadOptions, ranks: Path, tokens_per_sweep: float | None = None) -> Forecast:
    """Forecast both ways on the cluster of a file. Raises `UserError` where neither works.

    Args:
        tokens_per_sweep: of the named tree; None takes what is known of the pair.
    """
    cluster = read_cluster(ranks)
    tree = options.planned_tree(tokens_per_sweep)
    setup = resolve(options, assumed=cluster.assumed(ranks))
    profile, _ = setup.profile_finder()(*setup.settings())
    request = ClusterRequest(setup.files, cluster, setup.dtype, options.context, options.rule)
    one_way = partial(_one_way, request, tree, profile, tokens_per_sweep)
    shards = one_way("shards")
    stages = one_way("stages")
    if shards.layout is None and stages.layout is None:
        raise UserError(f"{ranks.name}: as shards, {shards.refusal}; as stages, {stages.refusal}")
    better, why = _better(shards, stages)
    ways = (shards, stages)
    return Forecast(cluster, facts_of(setup), ways, better, why, not request.knows_compute)


def _one_way(
    request: ClusterRequest,
    tree: TreeSpec,
    profile: Profile | None,
    tokens: float | None,
    kind: Kind,
) -> ClusterForecast:
    lay_out = partial(_LAY_OUT[kind], request)
    try:
        plain = _LAY_OUT[kind](request._replace(files=request.files.alone), 1)
        rates = list[ForecastRate]()
        chosen = plain
        if kind == "stages":
            num_ranks = len(request.cluster.ranks)
            require_exact_rule(Roles(num_ranks, tuple(range(num_ranks))), request.rule, 1.0)
            tree = _batches(plain, tree)
            tokens = None
        if prior_for(request.files) is not None and tree.kind != "none":
            shape, drawn, basis = _choice(request, tree, profile, lay_out)
            drawn = (tokens, tokens) if tokens else drawn
            basis = "tokens per pass as given" if tokens else basis
            chosen = lay_out(shape.num_nodes)
            rates.append(_rate(chosen, shape, drawn, basis))
    except UserError as refusal:
        return ClusterForecast(kind, None, str(refusal))
    rates.insert(0, _rate(plain, chain(0), (1.0, 1.0), "no tree"))
    rows = sorted({*SHOWN_ROWS, rates[-1].shape.num_nodes})
    passes = tuple(_pass(chosen, count) for count in rows)
    return ClusterForecast(kind, chosen, "", passes, tuple(rates))


def _batches(layout: ClusterLayout, tree: TreeSpec) -> TreeSpec:
    """Return the tree of a run of stages: the guesses that the slowest computes almost free."""
    seconds = [max(map(max, *_stage_times(layout, rows))) for rows in TIMED_ROWS]
    pipeline = PipelineOptions(mode="plain" if tree.kind == "none" else "async")
    num_rows = pipeline.num_rows(free_rows(seconds)) if seconds[0] else pipeline.num_rows()
    depth = min(num_rows - 1, AUTO_DEPTH, layout.parts[0].plan.context - 1)
    return TreeSpec("dynamic", num_rows, depth) if depth > 0 else TreeSpec("none")


def _choice(
    request: ClusterRequest,
    tree: TreeSpec,
    profile: Profile | None,
    lay_out: Callable[[int], ClusterLayout],
) -> tuple[Shape, tuple[float, float], str]:
    """Return the tree for this layout, what it yields, and what that rests on."""
    num_nodes = tree.num_nodes
    max_nodes = MAX_TREE_NODES
    if tree.is_chosen:
        for max_nodes in reversed(SIZES):
            with suppress(UserError):
                lay_out(max_nodes)
                break
        num_nodes = min(AUTO_NODES, max_nodes)
    layout = lay_out(num_nodes)
    costs = None
    if request.knows_compute:
        seconds = tuple(_pass(layout, rows).seconds for rows in _CURVE_ROWS)
        costs = Costs(
            compute_s=Curve(_CURVE_ROWS, seconds),
            draft_step_s=layout.draft_step_s,
            verify_s=VERIFY_S,
            # the curve holds the whole pass, link included
            link_bytes_per_s=1.0,
        )
    note = "no rates of computing are known"
    if costs is not None:
        note = "for this pair nothing was measured"
    trees = TreeSelector(
        tree,
        lambda *_: (profile, note),
        lambda _: Traffic(0, 0),
        costs=costs,
        has_own_times=False,
        max_nodes=max_nodes,
        context=layout.parts[0].plan.context,
        usual=prior_for(request.files),
    )
    choice = trees.for_run(Sampling(), request.rule)
    return choice.shape, *choice.tokens_range(request.files, request.dtype, profile, choice.why)


def _rate(
    layout: ClusterLayout, shape: Shape, tokens: tuple[float, float], basis: str
) -> ForecastRate:
    """Return the rate of one run at a time, or of as many as stages take, where that is quicker."""
    num_rows = shape.num_nodes
    label = label_of(shape)
    draft_s = layout.draft_step_s.total(shape.draft_widths) if num_rows > 1 else 0.0
    verify_s = VERIFY_S if layout.request.knows_compute else 0.0
    seconds = draft_s + _pass(layout, num_rows).seconds + verify_s
    num_in_flight = 1
    num_stages = len(layout.parts)
    if num_rows > 1 and not isinstance(layout.exchange, Gathers):
        label = f"runs of {num_rows} rows"
        # One begins and one ends in every cycle; the draft computes where the first stage does,
        # beside its link.
        cycle_s = _pass(layout, num_rows, draft_s).cycle_s
        flying_s = cycle_s * num_stages / in_flight_gain(num_stages, num_rows)
        # those beyond one a stage wait, and keep none of them idle
        if num_stages > 1 and flying_s < seconds:
            seconds = flying_s
            num_in_flight = PipelineOptions().num_runs(num_stages)
    low, high = tokens
    return ForecastRate(
        label, shape, tokens, basis, draft_s, (seconds / high, seconds / low), num_in_flight
    )


def _pass(layout: ClusterLayout, num_rows: int, draft_s: float = 0.0) -> ForecastPass:
    """Return one pass; `draft_s` is what the first stage computes between two of them."""
    network = layout.request.cluster.network
    exchange_s = layout.exchange.seconds(num_rows, network)
    link_s, compute_s = _stage_times(layout, num_rows)
    sent_bytes = layout.exchange.sent_bytes(num_rows)
    if isinstance(layout.exchange, Gathers):
        seconds = max(*link_s, max(compute_s) + exchange_s)
        return ForecastPass(num_rows, seconds, exchange_s, seconds, sent_bytes)
    stage_s = [max(times) for times in zip(link_s, compute_s, strict=True)]
    hop_s = layout.exchange.hop_s(num_rows, network) if len(stage_s) > 1 else 0.0
    cycle_s = max(*stage_s, compute_s[0] + draft_s, hop_s)
    return ForecastPass(num_rows, sum(stage_s) + exchange_s, exchange_s, cycle_s, sent_bytes)


def _stage_times(layout: ClusterLayout, num_rows: int) -> tuple[list[float], list[float]]:
    """Return (seconds of links, seconds of processors) by rank."""
    compute_s = [0.0] * len(layout.parts)
    if layout.request.knows_compute:
        compute_s = [part.compute_s.at(num_rows) for part in layout.parts]
    return [part.link_s for part in layout.parts], compute_s


def _better(shards: ClusterForecast, stages: ClusterForecast) -> tuple[Kind, str]:
    for way, other in ((shards, stages), (stages, shards)):
        if other.layout is None:
            return way.kind, f"{other.kind} do not work here: {other.refusal}"
    assert shards.layout is not None and stages.layout is not None
    if len(shards.layout.parts) == 1:
        return "shards", "one rank has all of it either way"
    usual = shards.usual
    link_s = max(part.link_s for part in shards.layout.parts)
    if not (link_s or shards.layout.request.knows_compute):
        return "shards", "all of it stays in memory: computing decides, and nothing is known of it"
    exchanges = f"exchanges for {usual.num_rows} row{'s' if usual.num_rows > 1 else ''} take {usual.exchange_s:.2g} s"
    if shards.s_per_token <= stages.s_per_token:
        is_hidden = usual.seconds <= link_s
        tail = "which hide behind it" if is_hidden else f"of the {usual.seconds:.2g} s of a pass"
        every = "every link works in every pass" if link_s else "every rank computes in every pass"
        return "shards", f"{every}; {exchanges}, {tail}"
    fits = "links are not what is waited for"
    if not any(part.link_s for part in stages.layout.parts):
        fits = "each share stays in memory, and no link is waited for"
    return "stages", f"{fits}; as shards, {exchanges}"
