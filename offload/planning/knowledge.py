"""What is known of a pair of models and a machine: rates, acceptance, and the passes that were run.

One frozen value. Loading, `plan`, `tune` and ranks fill in what they know, and all of them ask the
same functions of it (`planning.choice`). While a decoder runs, `observe` alone makes another one.

A trial at start runs one layer again and again, whose weights then lie in the processor's cache,
for one text and with no reader beside it. Real passes tell the rest: what computing takes by rows
and number of texts, what drafting takes, how fast the link is where it is waited for, and how often
guesses are accepted. Between observed sizes, and beyond them, what is known is scaled.

No torch, no clock. Invariant: a rate says where it comes from, the basis of a choice is reported,
and only the last passes are kept, since machines drift.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from offload.checkpoint.checkpoint import ModelFiles
from offload.planning.acceptance import SMALL, AcceptancePrior, prior_for
from offload.planning.cost_model import NOTHING, Costs, Curve, Prediction, Traffic, link_alone
from offload.planning.expert_traffic import ExpertRouting
from offload.planning.profile import Profile
from offload.sampling_options import Sampling
from offload.trees.topology import Floats, Shape

_MOST_SEEN = 48  # passes kept for each number of texts
_FORGOTTEN = 512  # passes after which the older half of them is dropped, since machines drift
_MOST_OF_SIZE = 5  # last passes that count for each number of rows
_TRIED = 2  # passes after which a size is known
_WORTH_CHANGING = 1.25  # times as fast as the tree that a lone text has
_WORTH_CHANGING_LATE = 1.05  # once there were `_MANY` passes
_MANY = 24
_WORTH_TRYING = 1.02  # speedup over the best tree that makes another worth a trial
_WAITED = 0.1  # share of a sweep: with a longer stall the link limited it
_MISSES = tuple(2.0 ** (step / 4) for step in range(-8, 7))  # factors on the assumed misses
_ASSUMED_TREES = 16  # how many observed trees the assumed acceptance is worth
_ASSUMED_GUESSES = 16  # how many observed guesses of chains it is worth


class ObservedPass(NamedTuple):
    """One pass over the weights in which each text had a tree and none took in a prompt."""

    shapes: Sequence[Shape]  # of each text's tree, or its bounds
    nodes: Sequence[int]  # of each tree: of a dynamic one, those that were worth their rows
    tokens: Sequence[int]  # accepted by each text
    draft_s: float
    sweep_s: float
    stall_s: float  # part of `sweep_s`: computing waited for the link
    num_bytes: int  # moved over the link
    reading_s: float = 0.0  # the link was in use; 0 where that is not known
    draft_widths: Sequence[int] = ()  # rows of each pass of the draft; empty where not known
    verify_s: float = 0.0  # walks down the trees, and commits

    @property
    def most_rows(self) -> int:
        return sum(shape.num_nodes for shape in self.shapes)

    @property
    def counted_sizes(self) -> Sequence[tuple[int, int]]:
        """Return the nodes and the depth of each text's tree, see `counted_rows`."""
        if len(self.nodes) == 1:
            return [(self.nodes[0], self.shapes[0].depth)]
        return [(shape.num_nodes, shape.depth) for shape in self.shapes]

    @property
    def counted_rows(self) -> int:
        """Return the rows that a pass counts for: those of a lone text, else the bounds of all."""
        return self.nodes[0] if len(self.nodes) == 1 else self.most_rows

    @property
    def has_waited(self) -> bool:
        return self.stall_s > _WAITED * self.sweep_s


@dataclass(frozen=True)
class ObservedPasses:
    """The last passes, by how many texts shared them."""

    _passes: Mapping[int, tuple[ObservedPass, ...]] = field(default_factory=dict)
    _num_passes: int = 0  # of all that were run

    def with_pass(self, observed: ObservedPass) -> "ObservedPasses":
        """Return these and a finished pass.

        Of too many the oldest goes, except for the last few of each size: that a size was tried
        is remembered, or it would be tried again and again.
        """
        num_texts = len(observed.shapes)
        passes = [*self._passes.get(num_texts, ()), observed]
        if len(passes) > _MOST_SEEN:
            times = Counter(known.most_rows for known in passes)
            oldest = (
                index for index, known in enumerate(passes) if times[known.most_rows] > _TRIED
            )
            del passes[next(oldest, 0)]
        num_passes = self._num_passes + 1
        if num_passes % _FORGOTTEN == 0:
            passes = passes[-_MOST_SEEN // 2 :]
        return ObservedPasses({**self._passes, num_texts: tuple(passes)}, num_passes)

    @property
    def has_passes(self) -> bool:
        return bool(self._passes)

    def among(self, num_texts: int) -> Sequence[ObservedPass]:
        """Return the passes of this many texts, or of the nearest number."""
        if not self._passes:
            return ()
        return self._passes[min(self._passes, key=lambda num: abs(math.log(num / num_texts)))]

    def chain_alpha(self, alpha: float) -> float:
        """Return the share of first guesses that come true, by chains; `alpha` counts as a few more."""
        right = 0
        tried = 0
        for observed in (observed for passes in self._passes.values() for observed in passes):
            for shape, tokens in zip(observed.shapes, observed.tokens, strict=True):
                if shape.depth == shape.num_nodes - 1:
                    right += tokens - 1
                    tried += min(tokens, shape.depth)
        return (_ASSUMED_GUESSES * alpha + right) / (_ASSUMED_GUESSES + tried)

    def costs(self, known: Costs, num_texts: int, slots_bytes: int) -> Costs:
        """Return the known costs, corrected by these passes.

        Args:
            slots_bytes: what can be there before a sweep begins.
        """
        passes = self.among(num_texts)
        if not passes:
            return known
        # texts draft together
        widths = (
            [len(observed.shapes) * width for width in observed.shapes[0].draft_widths]
            for observed in passes
        )
        expected_s = sum(map(known.draft_step_s.total, widths))
        drafted = sum(observed.draft_s for observed in passes) / expected_s if expected_s else 1.0
        computed_s = _computed_s(passes)
        ratios = {rows: seconds / known.compute_s.at(rows) for rows, seconds in computed_s.items()}
        return replace(
            known,
            compute_s=_scaled(known.compute_s, ratios),
            draft_step_s=known.draft_step_s.times(drafted),
            verify_s=median(observed.verify_s for observed in passes),
            link_bytes_per_s=_link_bytes_per_s(passes, known.link_bytes_per_s, slots_bytes),
        )

    def costs_of_passes(self, known: Costs, slots_bytes: int) -> Costs:
        """Return the known costs of a lone text's step whose draft passes are known.

        `costs` is for trees whose passes are not: it has to guess how many they will be.
        """
        corrected = self.costs(known, 1, slots_bytes)
        passes = [seen for seen in self.among(1) if seen.draft_widths][-_MOST_OF_SIZE:]
        expected_s = sum(known.draft_step_s.total(seen.draft_widths) for seen in passes)
        drafted = sum(seen.draft_s for seen in passes) / expected_s if expected_s else 1.0
        return replace(corrected, draft_step_s=known.draft_step_s.times(drafted))

    def choose(
        self, ranked: Sequence[Prediction], num_texts: int, current: Shape | None
    ) -> Prediction:
        """Return the prediction to follow, of those that these passes have corrected.

        A lone text keeps its tree unless another promises far more: what it would gain by trying
        neighbours, it loses in its few passes. Later, when many have shown what they cost, less is
        enough, and neighbours are tried.
        """
        if num_texts > 1:
            return self._pick(ranked, num_texts, ranked[0], _WORTH_TRYING)
        best = ranked[0]
        bounds = current and (current.num_nodes, current.depth)
        kept = next(
            (
                prediction
                for prediction in ranked
                if (prediction.shape.num_nodes, prediction.shape.depth) == bounds
            ),
            best,
        )
        num_seen = len(self.among(1))
        worth = _WORTH_CHANGING_LATE if num_seen >= _MANY else _WORTH_CHANGING
        followed = kept if kept.s_per_token < worth * best.s_per_token else best
        return followed if num_seen < _MOST_SEEN else self._pick(ranked, 1, followed, worth)

    def _pick(
        self, ranked: Sequence[Prediction], num_texts: int, best: Prediction, worth: float
    ) -> Prediction:
        """Return the best tree, or a neighbour that might be `worth` more and is not known yet.

        More rows compute no faster, and fewer rows take no less than their share: so the best
        tree's time bounds its neighbours', and a link that was never waited for may be of any
        speed. Mistakes at sizes that were not observed therefore do not last.
        """
        passes = self._passes.get(num_texts, ())
        times = Counter(observed.most_rows for observed in passes)
        if not times or times[num_texts * best.shape.num_nodes] < _TRIED:
            return best
        of_size = {prediction.shape.num_nodes: prediction for prediction in reversed(ranked)}
        sizes = sorted(of_size)
        place = sizes.index(best.shape.num_nodes)
        # The last has half as many nodes: where passes compute in parts, the next smaller size may
        # take as long as the best, and that one half of it.
        for size in (*sizes[max(0, place - 1) : place + 2], sizes[max(0, place - 2)]):
            is_known = times[num_texts * size] >= _TRIED
            least_s = _at_best_s(
                of_size[size], best, is_link_known=any(observed.has_waited for observed in passes)
            )
            if not is_known and least_s * worth < best.s_per_token:
                return of_size[size]
        return best

    def corrected_acceptance(
        self, p_K: Floats, expected: Callable[[Floats, int, int], float]
    ) -> Floats:
        """Return the assumed acceptance, with as many misses as the gained tokens suggest.

        Args:
            expected: tokens of a tree by an acceptance vector, its nodes and its depth.
        """
        gained = Counter[tuple[int, int]]()
        times = Counter[tuple[int, int]]()
        for observed in (observed for passes in self._passes.values() for observed in passes):
            for size, tokens in zip(observed.counted_sizes, observed.tokens, strict=True):
                # a tree without a guess tells nothing of guesses
                if size[0] > 1:
                    gained[size] += tokens
                    times[size] += 1
        if not times:
            return p_K
        assumed = sum(count * expected(p_K, *size) for size, count in times.items())
        scale = _ASSUMED_TREES / times.total()
        wanted = (gained.total() + scale * assumed) / (1 + scale)
        # with more misses, rank 0 would be less likely than rank 1
        most = 1 / (1 - p_K[0] + p_K[1]) if p_K.size > 1 and p_K[0] < 1 else 1.0
        misses = [factor for factor in _MISSES if factor <= most]

        def expected_tokens(index: int) -> float:
            p_K_so = with_misses(p_K, misses[index])
            return sum(count * expected(p_K_so, *size) for size, count in times.items())

        # the more misses the fewer tokens
        first_below = bisect_left(
            range(len(misses)), -wanted, key=lambda index: -expected_tokens(index)
        )
        near = range(max(0, first_below - 1), min(first_below + 1, len(misses)))
        return with_misses(
            p_K, misses[min(near, key=lambda index: abs(math.log(expected_tokens(index) / wanted)))]
        )


NO_PASSES = ObservedPasses()


def with_misses(p_K: Floats, times: float) -> Floats:
    """Return the acceptance with the first guess wrong `times` as often."""
    return np.array([1 - times * (1 - p_K[0]), *(times * p_K[1:])])


def _at_best_s(prediction: Prediction, best: Prediction, *, is_link_known: bool) -> float:
    """Return the least seconds per token of one tree that the best one's time leaves possible."""
    share = min(1.0, prediction.shape.num_nodes / best.shape.num_nodes)
    step = prediction.step._replace(
        compute_s=min(prediction.step.compute_s, share * best.step.compute_s)
    )
    step = step if is_link_known else step._replace(link_s=0.0, asked_s=0.0)
    return step.total_s / prediction.tokens_per_sweep


def _computed_s(passes: Sequence[ObservedPass]) -> dict[int, float]:
    """Return for each number of rows the least of the last few times, and of those of more rows.

    Disturbances only make a pass late. Sizes that occurred once count only where none occurred
    twice.
    """
    times_by_rows = dict[int, list[float]]()
    for observed in passes:
        # a device's clock may tell of a longer wait than the host's of the sweep
        times_by_rows.setdefault(observed.counted_rows, []).append(
            max(0.0, observed.sweep_s - observed.stall_s)
        )
    most = min(_TRIED, max(map(len, times_by_rows.values())))
    least = {
        rows: min(times[-_MOST_OF_SIZE:])
        for rows, times in times_by_rows.items()
        if len(times) >= most
    }
    return {
        rows: min(time_s for larger, time_s in least.items() if larger >= rows) for rows in least
    }


def _scaled(curve: Curve, ratio_at: dict[int, float]) -> Curve:
    """Return the curve scaled by ratios at some sizes, in their logarithm; it never falls."""
    sizes = sorted({*curve.sizes, *ratio_at})
    known = sorted(ratio_at)
    ratios = np.interp(np.log(sizes), np.log(known), [ratio_at[size] for size in known])
    seconds = np.maximum.accumulate(
        [ratio * curve.at(size) for ratio, size in zip(ratios, sizes, strict=True)]
    )
    return Curve(tuple(sizes), tuple(seconds.tolist()))


def _link_bytes_per_s(passes: Sequence[ObservedPass], known: float, slots_bytes: int) -> float:
    """Return the rate of the link as waited for, or at least what any pass has shown."""
    waited = [_rate(observed, slots_bytes) for observed in passes if observed.has_waited]
    if len(waited) >= _TRIED:
        return max(waited[-_MOST_OF_SIZE:])
    shown = (observed.num_bytes / observed.reading_s for observed in passes if observed.reading_s)
    return max(known, *(_rate(observed, slots_bytes) for observed in passes), *shown)


def _rate(observed: ObservedPass, slots_bytes: int) -> float:
    """Return the least rate with which the bytes of a pass can have come."""
    ahead_bytes = observed.num_bytes - slots_bytes
    return max(
        observed.num_bytes / (observed.draft_s + observed.sweep_s), ahead_bytes / observed.sweep_s
    )


class RunSettings(NamedTuple):
    """What a tree is chosen for."""

    sampling: Sampling
    rule: str


class Provenance(Enum):
    """Where a rate comes from, the surest first."""

    MEASURED = "measured"  # on this machine
    GIVEN = "given"  # by a flag, or by the data sheet of a machine that was named
    ASSUMED = "assumed"  # in part: what else takes time is left out
    UNKNOWN = "unknown"

    @property
    def is_whole(self) -> bool:
        """Return True if nothing that takes time is left out."""
        return self in (Provenance.MEASURED, Provenance.GIVEN)


class LinkRate(NamedTuple):
    """How fast layers arrive; infinite where nothing streams to a GPU."""

    bytes_per_s: float | None = None
    source: Provenance = Provenance.UNKNOWN


UNKNOWN_LINK = LinkRate()


@dataclass(frozen=True, kw_only=True, eq=False)
class Knowledge:
    """What trees are chosen by.

    Args:
        prior: the acceptance that is assumed; None where no draft ranks candidates.
        profile: of `offload tune`, for the run that is asked about.
        note: where that was read, or why there is none.
        routing: of experts, as counted.
        link: as it is today; disks drift, so a profile's own may be old.
        tried: the costs without a profile: tried at start, or of a data sheet.
        times: whose clocks count. Those of a profile do where they are of this machine.
        exchange_s: what a pass of several ranks takes beside computing, against its rows.
        num_threads: the most that this run computes with.
        passes: the last ones that were run.
    """

    prior: AcceptancePrior | None = SMALL
    profile: Profile | None = None
    note: str = ""
    routing: ExpertRouting | None = None
    link: LinkRate = UNKNOWN_LINK
    tried: Costs | None = None
    times: Provenance = Provenance.MEASURED
    exchange_s: Curve | None = None
    num_threads: int | None = None
    passes: ObservedPasses = NO_PASSES

    @classmethod
    def from_files(cls, files: ModelFiles, **known: Any) -> "Knowledge":
        """Return this of a pair, with the acceptance that is assumed of its kind of draft."""
        return cls(prior=prior_for(files), **known)

    def observe(self, observed: ObservedPass) -> "Knowledge":
        """Return this after one more pass."""
        return replace(self, passes=self.passes.with_pass(observed))

    def with_profile(self, profile: Profile | None, note: str) -> "Knowledge":
        """Return this for a run that the profile is for."""
        routing = self.routing if profile is None else profile.routing or self.routing
        return replace(self, profile=profile, note=note, routing=routing)

    def by_profile_alone(self, profile: Profile) -> "Knowledge":
        """Return this as the profile has it, its link included."""
        return replace(self.with_profile(profile, ""), link=UNKNOWN_LINK)

    def with_link(self, link: LinkRate) -> "Knowledge":
        """Return this with the rate of this machine's link; without one no times of it count."""
        is_here = self.times is not Provenance.GIVEN
        times = Provenance.UNKNOWN if is_here and link.source is Provenance.UNKNOWN else self.times
        return replace(self, link=link, times=times)

    def with_least_costs(self, products_s: Curve = NOTHING, *, counts_link: bool) -> "Knowledge":
        """Return this with the least that a step takes, where nothing of computing is known.

        Args:
            products_s: of a pass's products against its rows; `NOTHING` where they were not timed.
            counts_link: trees are weighed by the link alone, since each row asks for bytes of its own.
        """
        if self.costs is not None:
            return self
        has_products = products_s is not NOTHING
        tried = None
        if self.link.bytes_per_s and (has_products or counts_link):
            tried = replace(link_alone(self.link.bytes_per_s), compute_s=products_s)
        return replace(
            self, tried=tried, times=Provenance.ASSUMED if has_products else Provenance.UNKNOWN
        )

    @property
    def is_ranked(self) -> bool:
        """Return True if a draft ranks every candidate."""
        return self.prior is not None

    @property
    def is_copy(self) -> bool:
        """Return True if that draft is a copy of the target."""
        return self.prior is not None and self.prior.is_copy

    @property
    def acceptance(self) -> Profile | AcceptancePrior:
        """Return the acceptance, measured or assumed."""
        known = self.profile or self.prior
        assert known is not None, "something ranks candidates"
        return known

    @property
    def basis(self) -> str:
        """Return in words what the acceptance rests on."""
        if isinstance(known := self.acceptance, AcceptancePrior):
            return f"{known.source}, {self.note}"
        return f"{known.num_tokens} traced tokens, profile of {known.created}"

    @cached_property
    def costs(self) -> Costs | None:
        """Return the costs of a step, on today's link; None where computing is not known."""
        profile = self.profile
        is_usable = profile is not None and self.num_threads in (None, profile.num_threads)
        is_usable = is_usable and self.times is Provenance.MEASURED
        costs = profile.costs if profile is not None and is_usable else self.tried
        link = self.link.bytes_per_s
        if costs is None or link is None:
            return costs
        compute_s = costs.compute_s
        if self.exchange_s is not None:
            compute_s = compute_s.plus(self.exchange_s)
        return replace(costs, link_bytes_per_s=link, compute_s=compute_s)

    @property
    def computing(self) -> Provenance:
        """Return where the times of computing come from; those of products alone are assumed."""
        return Provenance.UNKNOWN if self.costs is None else self.times

    def costs_of_steps(self, traffic: Traffic) -> Costs | None:
        """Return the costs, those of a copy as the last passes of a lone text have corrected them.

        A copy's passes are most of what its drafting takes. Of a small draft as much again goes by
        beside them, once a step: charged to each pass it would end trees too early.
        """
        costs = self.costs
        if costs is None or not self.is_copy:
            return costs
        return self.passes.costs_of_passes(costs, traffic.slots_bytes)
