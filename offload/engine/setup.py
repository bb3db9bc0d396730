"""What options, headers and a machine lead to before anything is loaded.

`resolve` makes a `Setup`. Loading, `plan`, `tune` and every rank ask it, so that their answers
about a pair of models agree. No torch, except to time a product.

Invariant: everything is decided from headers and rates; weights are only read to measure a link.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

from offload.calibration import link
from offload.checkpoint.checkpoint import ModelFiles, compute_dtype_name
from offload.engine.hooks import NO_HOOKS, Hooks
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.planner import plan_memory
from offload.planning.budget import machine_costs, traffic_in
from offload.planning.choice import TrafficOf, TreeRequest, TreeRoom, choose, most_nodes
from offload.planning.hardware import Assumptions, Hardware
from offload.planning.knowledge import Knowledge, LinkRate, Provenance, RunSettings
from offload.planning.load_options import LoadOptions
from offload.planning.profile import (
    NOT_WANTED,
    FindProfile,
    Machine,
    parse_profile,
    profile_finder,
)
from offload.sampling_options import Sampling
from offload.streaming.device import Device
from offload.streaming.disk import DiskReader, OpenSource
from offload.trees.spec import TreeSpec


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Two models as they will be loaded on this machine, or would be on an assumed one."""

    files: ModelFiles
    options: LoadOptions
    tree: TreeSpec
    device: Device  # the device that computes here; `budget` describes another machine's
    budget: MemoryBudget
    notes: tuple[str, ...] = ()  # lines for the user
    assumed: Assumptions | None = None  # an assumed machine; None for this one
    open_source: OpenSource = DiskReader
    hooks: Hooks = NO_HOOKS
    is_timed: bool = False  # steps are timed at start even where the tree is named

    @property
    def dtype(self) -> str:
        """Return the type to compute in, or `auto`: each model's own.

        `options` keep the requested one.
        """
        return self.budget.dtype

    @property
    def hardware(self) -> Hardware | None:
        """Return the named machine; None is this one."""
        return self.assumed and self.assumed.hardware

    @property
    def disk_bytes_per_s(self) -> float | None:
        """Return the given rate of reads; None is measured."""
        return self.assumed and self.assumed.disk_bytes_per_s

    @property
    def is_here(self) -> bool:
        """Return True if this machine will compute, not a GPU elsewhere."""
        is_gpu_elsewhere = self.budget.gpu_bytes is not None and not self.device.has_own_memory
        return self.hardware is None and not is_gpu_elsewhere

    @property
    def link_source(self) -> Provenance:
        """Return where the rate at which layers arrive comes from."""
        if self.hardware is not None:
            return Provenance.GIVEN
        if self.is_here and self.disk_bytes_per_s:
            return Provenance.GIVEN
        return (
            Provenance.MEASURED
            if self.is_here and self.files.target.is_here
            else Provenance.UNKNOWN
        )

    def plan_for(self, num_nodes: int) -> MemoryPlan:
        """Plan memory for trees of this many nodes together. Raises `UserError` for too little."""
        return plan_memory(self.files, self.budget, num_nodes)

    @property
    def minimal_plan(self) -> MemoryPlan:
        """Return the plan without a tree, whose context and way of experts all plans keep."""
        return self.plan_for(1)

    @property
    def traffic_of(self) -> TrafficOf:
        """Return a function from a number of nodes to the bytes that a sweep moves."""
        return partial(traffic_in, self.budget, self.files, hardware=self.hardware)

    def admit(self) -> None:
        """Raise `UserError` if memory has no room for the tree, or for any tree if it is chosen.

        With several ranks, room is settled when they have met.
        """
        if self.options.ranks is None:
            self.plan_for(self.least_nodes)

    @property
    def least_nodes(self) -> int:
        """Return the number of nodes, of all texts together, that must have room."""
        num_nodes = 1 if self.tree.is_chosen else self.tree.num_nodes
        return self.options.parallel * num_nodes

    @property
    def machine(self) -> Machine:
        """Return the machine that a profile made here would be for."""
        return Machine.here(compute_dtype_name(self.files.target, self.dtype), self.device.name)

    def settings(self, sampling: Sampling | None = None) -> RunSettings:
        """Return the sampling for which a tree is chosen; by default a named profile's, or greedy."""
        named = self._named_profile
        if sampling is None and named is not None:
            identity = parse_profile(named).identity
            sampling = Sampling(
                temperature=identity.temperature, top_p=identity.top_p, top_k=identity.top_k
            )
        return RunSettings(sampling or Sampling(), self.options.rule)

    @property
    def _named_profile(self) -> Path | None:
        named = self.options.profile
        return None if named is None or self.options.has_no_profile else Path(named)

    @cached_property
    def find_profile(self) -> FindProfile:
        """Return a function that finds the profile for settings and a rule, or the reason for none."""
        if self.options.has_no_profile:
            return lambda *_: NOT_WANTED
        return profile_finder(
            self.files,
            self._named_profile,
            self.machine if self.is_here else None,
            self.budget.experts_of(self.files),
        )

    @cached_property
    def room(self) -> TreeRoom:
        """Return the room for trees, before one is chosen that memory is planned for."""
        context = self.minimal_plan.context
        return TreeRoom(cache(self.traffic_of), context=context, parallel=self.options.parallel)

    def knowledge(self, settings: RunSettings) -> Knowledge:
        """Return all that is known before anything is measured.

        Raises `UserError` for a named profile that does not fit such runs.
        """
        profile, note = self.find_profile(*settings)
        link = LinkRate()
        if self.budget.rates is not None and self.budget.gpu_bytes is None:
            link = LinkRate(self.budget.rates.link_bytes_per_s, self.link_source)
        return Knowledge.from_files(
            self.files,
            note=note,
            routing=None if profile is None else profile.routing,
            link=link,
            tried=machine_costs(self.budget, self.files, self.hardware),
            times=Provenance.GIVEN if self.hardware else Provenance.MEASURED,
        )

    def link(self, most_nodes: int) -> LinkRate:
        """Return the rate at which layers arrive, as said or as measured here and now."""
        source = self.link_source
        if source is Provenance.UNKNOWN:
            return LinkRate()
        return LinkRate(self._link_bytes_per_s(most_nodes), source)

    def startup_link(self, largest: int) -> LinkRate:
        """Return that rate where layers stream with the largest trees, else an infinite one.

        A larger tree than usual may leave layers no room.
        """
        traffic = self.room.traffic_of(largest)
        is_streamed = traffic is not None and traffic.is_streamed
        return self.link(largest) if is_streamed else LinkRate(math.inf, Provenance.MEASURED)

    def link_s(self, sampling: Sampling) -> float:
        """Return the seconds per token of the link alone, with the best tree; 0 if nothing is known."""
        settings = self.settings(sampling)
        known = self.knowledge(settings)
        link = self.startup_link(most_nodes(self.tree, known, self.room))
        if link.bytes_per_s in (None, math.inf):
            return 0.0
        known = known.with_link(link).with_least_costs(counts_link=True)
        choice = choose(self.tree, known, TreeRequest(self.room, settings.rule))
        return min((tree.s_per_token for tree in choice.candidates), default=0.0)

    def _link_bytes_per_s(self, most_nodes: int) -> float:
        """Infinite where nothing streams to a GPU, even with the largest trees, of `most_nodes`."""
        given = self.disk_bytes_per_s
        target = self.files.target
        if self.hardware is not None:
            return self.hardware.feed_bytes_per_s
        limit = self.options.limit_bytes_per_s
        if self.device.has_own_memory:
            usual_nodes = self.options.parallel * self.tree.num_nodes
            moved = {num: self.traffic_of(num) for num in (usual_nodes, most_nodes)}
            streaming = (num for num, traffic in moved.items() if traffic and traffic.is_streamed)
            plan = self.plan_for(next(streaming, 1))
            return link.device_link_bytes_per_s(
                self.device,
                plan,
                target.shards,
                limit_bytes_per_s=limit,
                disk_bytes_per_s=given,
                open_source=self.open_source,
            )
        # measured now, for the rows of a prompt's pass
        if self.budget.rates is not None:
            return self.budget.rates.link_bytes_per_s
        return given or link.link_bytes_per_s(
            target.shards, limit_bytes_per_s=limit, open_source=self.open_source
        )
