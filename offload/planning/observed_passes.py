"""Passes that a decoder has run, and the costs and the acceptance that they show.

A trial at start runs one layer again and again, whose weights then lie in the processor's cache, for
one text and with no reader beside it. Real passes show what it cannot: the time of computing by rows
and number of texts, the time of drafting, the rate of the link where it is waited for, and how often
guesses are accepted. Sizes that were not run are scaled like their neighbours that were.

No torch, no clock. Invariant: only the last passes are kept, since machines drift.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from offload.planning.acceptance import with_misses
from offload.planning.cost_model import Costs, Curve
from offload.trees.topology import Floats, Shape

MOST_KEPT = 48  # passes for each number of texts
TRIED = 2  # passes after which a size is known
_FORGOTTEN = 512  # passes after which the older half of those that are kept is dropped
_MOST_OF_SIZE = 5  # the last passes of a size that count
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
        """The rows of all trees, as bounded."""
        return sum(shape.num_nodes for shape in self.shapes)

    @property
    def counted_sizes(self) -> Sequence[tuple[int, int]]:
        """Nodes and depth of each tree, by which tokens count; several trees count as bounded."""
        if len(self.nodes) == 1:
            return [(self.nodes[0], self.shapes[0].depth)]
        return [(shape.num_nodes, shape.depth) for shape in self.shapes]

    @property
    def counted_rows(self) -> int:
        """The rows by which the time of computing counts, as for `counted_sizes`."""
        return self.nodes[0] if len(self.nodes) == 1 else self.most_rows

    @property
    def computed_s(self) -> float:
        # a device's clock may tell of a longer wait than the host's of the sweep
        return max(0.0, self.sweep_s - self.stall_s)

    @property
    def has_waited(self) -> bool:
        return self.stall_s > _WAITED * self.sweep_s


@dataclass(frozen=True)
class ObservedPasses:
    """The last passes, by the number of texts that shared them."""

    _passes: Mapping[int, tuple[ObservedPass, ...]] = field(default_factory=dict)
    _num_passes: int = 0  # of all that were run

    def with_pass(self, observed: ObservedPass) -> "ObservedPasses":
        """Return these and a finished pass.

        Where there are too many the oldest goes, but not the last few of a size: otherwise a size
        that was tried would soon be unknown, and tried again.
        """
        num_texts = len(observed.shapes)
        passes = [*self._passes.get(num_texts, ()), observed]
        if len(passes) > MOST_KEPT:
            times = Counter(known.most_rows for known in passes)
            oldest = (index for index, known in enumerate(passes) if times[known.most_rows] > TRIED)
            del passes[next(oldest, 0)]
        num_passes = self._num_passes + 1
        if num_passes % _FORGOTTEN == 0:
            passes = passes[-MOST_KEPT // 2 :]
        return ObservedPasses({**self._passes, num_texts: tuple(passes)}, num_passes)

    @property
    def has_passes(self) -> bool:
        return bool(self._passes)

    @property
    def of_all(self) -> list[ObservedPass]:
        """The passes of any number of texts."""
        return [observed for passes in self._passes.values() for observed in passes]

    def of_texts(self, num_texts: int) -> Sequence[ObservedPass]:
        """Return the passes that this many texts shared."""
        return self._passes.get(num_texts, ())

    def among(self, num_texts: int) -> Sequence[ObservedPass]:
        """Return the passes that this many texts shared, or the nearest number of texts."""
        if not self._passes:
            return ()
        return self._passes[min(self._passes, key=lambda num: abs(math.log(num / num_texts)))]

    def costs(self, known: Costs, num_texts: int, slots_bytes: int) -> Costs:
        """Return the known costs, corrected by these passes.

        Args:
            slots_bytes: what can be there before a sweep begins.
        """
        passes = self.among(num_texts)
        if not passes:
            return known
        # texts draft together
        widths = [
            [len(observed.shapes) * width for width in observed.shapes[0].draft_widths]
            for observed in passes
        ]
        ratios = {
            rows: seconds / known.compute_s.at(rows) for rows, seconds in _least_s(passes).items()
        }
        return replace(
            known,
            compute_s=_scaled(known.compute_s, ratios),
            draft_step_s=known.draft_step_s.times(_drafting_ratio(passes, widths, known)),
            verify_s=median(observed.verify_s for observed in passes),
            link_bytes_per_s=_link_bytes_per_s(passes, known.link_bytes_per_s, slots_bytes),
        )

    def costs_of_passes(self, known: Costs, slots_bytes: int) -> Costs:
        """Return the known costs for a lone text's step of which each draft pass is known.

        `costs` is for trees whose draft passes are yet to be counted: it corrects their number as
        well as their time.
        """
        corrected = self.costs(known, 1, slots_bytes)
        passes = [seen for seen in self.among(1) if seen.draft_widths][-_MOST_OF_SIZE:]
        ratio = _drafting_ratio(passes, [seen.draft_widths for seen in passes], known)
        return replace(corrected, draft_step_s=known.draft_step_s.times(ratio))

    def chain_alpha(self, alpha: float) -> float:
        """Return the share of a chain's guesses that come true.

        Args:
            alpha: the assumed share, which counts as a few observed guesses.
        """
        right = 0
        tried = 0
        for observed in self.of_all:
            for shape, tokens in zip(observed.shapes, observed.tokens, strict=True):
                if shape.depth == shape.num_nodes - 1:
                    right += tokens - 1
                    tried += min(tokens, shape.depth)
        return (_ASSUMED_GUESSES * alpha + right) / (_ASSUMED_GUESSES + tried)

    def corrected_acceptance(
        self, p_K: Floats, expected: Callable[[Floats, int, int], float]
    ) -> Floats:
        """Return the assumed acceptance with misses as frequent as the observed tokens suggest.

        Args:
            p_K: the assumed acceptance, by rank.
            expected: tokens of a tree by an acceptance, its nodes and its depth.
        """
        tokens_of = Counter[tuple[int, int]]()
        times_of = Counter[tuple[int, int]]()
        for observed in self.of_all:
            for size, tokens in zip(observed.counted_sizes, observed.tokens, strict=True):
                # a tree without a guess tells nothing of guesses
                if size[0] > 1:
                    tokens_of[size] += tokens
                    times_of[size] += 1
        if not times_of:
            return p_K

        def tokens_with(misses: float) -> float:
            p_so_K = with_misses(p_K, misses)
            return sum(count * expected(p_so_K, *size) for size, count in times_of.items())

        weight = _ASSUMED_TREES / times_of.total()
        wanted = (tokens_of.total() + weight * tokens_with(1.0)) / (1 + weight)
        return with_misses(p_K, _misses_for(wanted, p_K, tokens_with))


NO_PASSES = ObservedPasses()


def _misses_for(wanted: float, p_K: Floats, tokens_with: Callable[[float], float]) -> float:
    """Return the factor on the misses whose tokens are nearest to those that are wanted."""
    # with more misses, rank 0 would be less likely than rank 1
    most = 1 / (1 - p_K[0] + p_K[1]) if p_K.size > 1 and p_K[0] < 1 else 1.0
    misses = [factor for factor in _MISSES if factor <= most]
    # the more misses the fewer tokens
    below = bisect_left(misses, -wanted, key=lambda factor: -tokens_with(factor))
    near = misses[max(0, below - 1) : below + 1]
    return min(near, key=lambda factor: abs(math.log(tokens_with(factor) / wanted)))


def _drafting_ratio(
    passes: Sequence[ObservedPass], widths: Sequence[Sequence[int]], known: Costs
) -> float:
    """Return the time that drafting took over the known one of draft passes with these rows."""
    expected_s = sum(map(known.draft_step_s.total, widths))
    return sum(observed.draft_s for observed in passes) / expected_s if expected_s else 1.0


def _least_s(passes: Sequence[ObservedPass]) -> dict[int, float]:
    """Return the seconds of computing by rows: the least of the last few passes of at least as many.

    Disturbances only make a pass late. Sizes that occurred once count only where none occurred
    twice.
    """
    times_of = dict[int, list[float]]()
    for observed in passes:
        times_of.setdefault(observed.counted_rows, []).append(observed.computed_s)
    enough = min(TRIED, max(map(len, times_of.values())))
    least = {
        rows: min(times[-_MOST_OF_SIZE:])
        for rows, times in times_of.items()
        if len(times) >= enough
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
    if len(waited) >= TRIED:
        return max(waited[-_MOST_OF_SIZE:])
    shown = (observed.num_bytes / observed.reading_s for observed in passes if observed.reading_s)
    return max(known, *(_rate(observed, slots_bytes) for observed in passes), *shown)


def _rate(observed: ObservedPass, slots_bytes: int) -> float:
    """Return the least rate with which the bytes of a pass can have come."""
    ahead_bytes = observed.num_bytes - slots_bytes
    return max(
        observed.num_bytes / (observed.draft_s + observed.sweep_s), ahead_bytes / observed.sweep_s
    )
