"""What is known of a pair of models and a machine: rates, acceptance, and the passes that were run.

One frozen value. Loading, `plan`, `tune` and ranks fill in what they know, and all of them ask the
same functions of it (`planning.choice`). While a decoder runs, `observe` alone makes another one.

No torch, no clock. Invariant: a rate says where it comes from, and the basis of a choice is reported.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from offload.checkpoint.checkpoint import ModelFiles
from offload.planning.acceptance import SMALL, AcceptancePrior, prior_for, prior_when
from offload.planning.cost_model import NOTHING, Costs, Curve, Traffic, link_alone
from offload.planning.expert_traffic import ExpertRouting
from offload.planning.observed_passes import NO_PASSES, ObservedPass, ObservedPasses
from offload.planning.profile import Profile
from offload.sampling_options import Sampling
from offload.trees.spec import TreeSpec


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

    def assuming(self, sampling: Sampling, spec: TreeSpec) -> "Knowledge":
        """Return this with what is assumed of text that is drawn so; a named tree is always the same."""
        is_greedy = sampling.is_greedy or not spec.is_chosen
        return replace(self, prior=prior_when(self.prior, is_greedy=is_greedy))

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
