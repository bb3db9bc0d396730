"""From options to a run: files, data type, device, memory budget, tree, profile, link and costs.

`resolve` is the one way from what a user asks for to what will be loaded. Loading, `plan`, `tune`
and every rank go it, so what one of them says of a pair of models holds for the others. Plans of
other machines give what stands in for this one. No torch, but to open a GPU or to time a product.

Invariant: everything is decided from headers and rates; no weights are read but to measure a link.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from offload.calibration import link
from offload.checkpoint.hub import fetch, is_here, open_headers
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name, settled_dtype
from offload.checkpoint.sizes import model_shape
from offload.engine.hooks import NO_HOOKS, Hooks
from offload.engine.text import require_one_vocabulary
from offload.errors import UserError, require
from offload.machine import has_cuda_driver
from offload.memory.plan import MemoryPlan
from offload.memory.planner import MemoryBudget, ModelFiles
from offload.model.headers import describe
from offload.planning.acceptance import prior_for
from offload.planning.budget import budget_of, ram_warning, traffic_in, with_experts
from offload.planning.cost_model import Costs, costs_on
from offload.planning.hardware import Hardware, find_hardware
from offload.planning.load_options import LoadOptions
from offload.planning.profile import (
    Identity,
    Machine,
    Profile,
    find_profile,
    parse_profile,
    require_same_run,
)
from offload.planning.quantised_drafts import check_held, files_of, models_to_read
from offload.planning.selector import RunSettings, TreeSelector, routing_in
from offload.planning.shares import require_no_states
from offload.rank_roles import find_place
from offload.sampling_options import Sampling
from offload.streaming.device import HOST, Device
from offload.streaming.disk import DiskReader, OpenSource
from offload.trees.spec import TreeSpec
from offload.units import parse_rate

ReadHeaders = Callable[..., Checkpoint]

FILLED_SHARE = 0.5  # share of the context whose keys and values a pass reads on average


class Assumptions(NamedTuple):
    """What stands in for this machine and its files where nothing will be loaded."""

    hardware: Hardware | None = None  # another machine; None is this one
    disk_bytes_per_s: float | None = None  # instead of a measurement
    read: ReadHeaders = describe  # returns headers by name and config
    ranks: str | None = None  # what describes the ranks, where several share the target

    @classmethod
    def of(
        cls, hardware: str | None, disk_speed: str | int | None, read: ReadHeaders = describe
    ) -> "Assumptions":
        """Return another machine and a rate, as a user names them. Raises `UserError`."""
        disk_bytes_per_s = parse_rate(disk_speed, "`disk_speed`")
        machine = find_hardware(hardware) if hardware else None
        if machine is not None and disk_bytes_per_s is not None:
            machine = replace(machine, disk_bytes_per_s=disk_bytes_per_s)
        return cls(machine, disk_bytes_per_s, read)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What options come to with the headers of these models on this machine, or an assumed one."""

    files: ModelFiles
    options: LoadOptions
    tree: TreeSpec
    device: Device  # that computes here; of a machine elsewhere `budget` knows it
    budget: MemoryBudget
    notes: tuple[str, ...] = ()  # lines for the user
    assumed: Assumptions | None = None  # None where it will be loaded
    open_source: OpenSource = DiskReader
    hooks: Hooks = NO_HOOKS

    @property
    def dtype(self) -> str:
        """Return the type that is computed in; `options` have what was asked for."""
        return self.budget.dtype

    @property
    def hardware(self) -> Hardware | None:
        """Return the machine that was named; None is this one."""
        return self.assumed and self.assumed.hardware

    @property
    def disk_bytes_per_s(self) -> float | None:
        """Return the rate of reads that was given; None is measured."""
        return self.assumed and self.assumed.disk_bytes_per_s

    @property
    def ranks(self) -> str | None:
        """Return what the user names the ranks by; None for one process."""
        return self.options.ranks or (self.assumed and self.assumed.ranks)

    @property
    def is_elsewhere(self) -> bool:
        """Return whether no link of this machine and no profile made on it says anything."""
        is_gpu_elsewhere = self.budget.gpu is not None and not self.device.has_own_memory
        return self.hardware is not None or is_gpu_elsewhere

    @property
    def are_files_here(self) -> bool:
        """Return whether all models lie here, with their weights."""
        return all(map(is_here, filter(None, self.files)))

    @property
    def machine(self) -> Machine:
        """Return the machine that a profile of this one would be for."""
        dtype = compute_dtype_name(self.files.target, self.dtype)
        return Machine.here(dtype, self.device.name)

    def computing(self) -> AbstractContextManager[None]:
        """Let this thread compute on its device meanwhile."""
        return self.device.computing()

    def plan_for(self, num_nodes: int) -> MemoryPlan:
        """Plan memory for trees of so many nodes together. Raises `UserError` for too little."""
        return self.budget.plan(self.files, num_nodes)

    def admit(self) -> None:
        """Raise `UserError` where memory has no room for the tree, or for any if it is chosen.

        What each of several ranks has room for is settled when they have met.
        """
        if self.ranks is None:
            self.plan_for(self.least_nodes)

    @property
    def least_nodes(self) -> int:
        """Return the nodes of all texts together that there must be room for."""
        num_nodes = 1 if self.tree.is_chosen else self.tree.num_nodes
        return self.options.parallel * num_nodes

    def tree_selector(self, sampling: Sampling) -> TreeSelector:
        """Return what chooses the trees, with all that is known before anything is measured.

        Raises `UserError` for a named profile that does not hold for such runs.
        """
        find = self.profile_finder()
        profile, _ = find(*self.settings(sampling))
        is_on_cpu = self.budget.gpu is None
        rates = self.budget.rates
        return TreeSelector(
            self.tree,
            find,
            cache(partial(traffic_in, self.budget, self.files, hardware=self.hardware)),
            costs=self._costs(),
            has_own_times=self.hardware is None,
            context=self.plan_for(1).context,
            has_draft=self.files.draft is not None,
            usual=prior_for(self.files.draft),
            routing=routing_in(profile),
            parallel=self.options.parallel,
            link_bytes_per_s=rates.link_bytes_per_s if rates and is_on_cpu else None,
        )

    def settings(self, sampling: Sampling) -> RunSettings:
        """Return what a tree is chosen for."""
        return RunSettings(sampling, self.options.rule)

    @property
    def knows_link(self) -> bool:
        """Return whether the rate at which layers arrive is said, or can be measured here."""
        is_here_or_given = bool(self.disk_bytes_per_s) or is_here(self.files.target)
        return self.hardware is not None or (not self.is_elsewhere and is_here_or_given)

    def measure_link(self, most_nodes: int) -> float:
        """Return bytes per second at which layers arrive, as said or as measured here and now.

        Infinite where nothing streams to a GPU, even with the largest trees, of `most_nodes`.
        """
        assert self.knows_link, "there is a link to measure"
        given = self.disk_bytes_per_s
        target = self.files.target
        if self.hardware is not None:
            return self.hardware.feed_bytes_per_s
        limit = self.options.limit_bytes_per_s
        if self.device.has_own_memory:
            usual_nodes = self.options.parallel * self.tree.num_nodes
            streaming = filter(self._streams, (usual_nodes, most_nodes))
            plan = self.plan_for(next(streaming, 1))
            return link.device_link_bytes_per_s(
                self.device, plan, target.shards, limit_bytes_per_s=limit, disk_bytes_per_s=given
            )
        # just now, for the rows of a prompt's pass
        if self.budget.rates is not None:
            return self.budget.rates.link_bytes_per_s
        return given or link.link_bytes_per_s(target.shards, limit_bytes_per_s=limit)

    def _streams(self, num_nodes: int) -> bool:
        """Return whether a plan for so many nodes streams; False where they do not fit."""
        traffic = traffic_in(self.budget, self.files, num_nodes)
        return traffic is not None and traffic.is_streamed

    def _costs(self) -> Costs | None:
        """Return the costs of the named machine; None where nothing is known of computing."""
        if self.hardware is None or not self.hardware.flops_per_s:
            return None
        dtype = self.dtype
        alone = self.budget.plan(ModelFiles(self.files.target), 1)
        target, draft = self.files
        draft_shape = None if draft is None else model_shape(draft, dtype)
        positions = int(FILLED_SHARE * alone.context)
        return costs_on(self.hardware, model_shape(target, dtype), draft_shape, positions)

    def profile_finder(self) -> Callable[[Sampling, str], tuple[Profile | None, str]]:
        """Return what finds the profile for settings and rule, or says why there is none."""
        experts = self.budget.experts_of(self.files)
        target, draft = self.files
        named = self.options.profile

        @lru_cache(maxsize=256)  # a server is asked for any settings
        def find(sampling: Sampling, rule: str) -> tuple[Profile | None, str]:
            if draft is None or self.options.has_no_profile:
                return None, "no profile is wanted"
            if what := sampling.unprofiled:
                none = f"no profile holds for a run with {what}"
                require(named is None, none, f"`profile` {named}", "leave one of them out")
                return None, none
            if named is None and (self.is_elsewhere or not self.are_files_here):
                return None, "no profile was made there"
            if named is None:
                profile, where = find_profile(
                    Identity.of(target, draft, sampling, rule, self.machine)
                )
                return profile and profile.of_experts(experts), where
            profile = parse_profile(Path(named))
            if self.are_files_here:
                # times of another machine do not matter where those of hardware are asked for
                machine = profile.identity.machine if self.hardware else self.machine
                identity = Identity.of(target, draft, sampling, rule, machine)
                require_same_run(profile, identity, Path(named))
            return profile.of_experts(experts, is_named=True), str(named)

        return lambda sampling, rule: find(sampling.kind, rule)


def resolve(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None,
    options: LoadOptions,
    *,
    device: Device | None = None,
    assumed: Assumptions | None = None,
    admit: Callable[[Setup], object] = Setup.admit,
    open_source: OpenSource = DiskReader,
    hooks: Hooks = NO_HOOKS,
) -> Setup:
    """Read headers, fetch what is missing, and decide all that does not need a loaded model.

    Args:
        device: one that is open; None opens the one of `options`.
        assumed: stands in for this machine; then nothing is fetched.
        admit: raises for models that there is no room for, before their weights are fetched.

    Raises `UserError` for options, models or memory that cannot serve.
    """
    options.check_tree(has_draft=draft is not None)
    check_held(draft, options.draft_dtype, options.ranks or (assumed and assumed.ranks))
    device = device or _own_device(options, assumed)
    hooks.on_phase("reading headers")
    names = models_to_read(model, draft)
    read = open_headers if assumed is None else assumed.read
    headers = list(map(read, names, [options.config, None]))
    as_files = partial(files_of, draft=draft, draft_dtype=options.draft_dtype)
    setup = resolve_files(as_files(headers), options, device, assumed)
    setup = replace(setup, open_source=open_source, hooks=hooks)
    admit(setup)
    if assumed is None:
        setup = replace(setup, files=as_files(fetch(names, headers, hooks.on_phase)))
    elif setup.files.draft is not None and not setup.files.draft.is_copy:
        require_one_vocabulary(setup.files.target, setup.files.draft)
    if setup.ranks is not None:
        require_no_states(setup.files, setup.dtype)
        return setup
    budget = setup.budget
    if setup.hardware is None:
        budget = link.with_rates(
            budget,
            setup.files,
            setup.least_nodes,
            num_threads=options.threads,
            limit_bytes_per_s=options.limit_bytes_per_s,
            disk_bytes_per_s=setup.disk_bytes_per_s,
        )
    num_nodes = None if setup.tree.is_chosen else setup.tree.num_nodes
    return replace(setup, budget=with_experts(budget, setup.files, num_nodes=num_nodes))


def resolve_files(
    files: ModelFiles,
    options: LoadOptions,
    device: Device = HOST,
    assumed: Assumptions | None = None,
) -> Setup:
    """Return what headers alone decide. Raises `UserError` for misfit options."""
    hardware, disk_bytes_per_s, *_ = assumed or Assumptions()
    budget = budget_of(options, str(device.place) if device.has_own_memory else None, hardware)
    dtype, notes = settled_dtype(files.target, options.dtype, is_on_cpu=budget.gpu is None)
    is_for_here = hardware is None and disk_bytes_per_s is None
    if is_for_here and (assumed is None or is_here(files.target)):
        notes += filter(None, [ram_warning(budget.ram)])
    return Setup(
        files=files,
        options=options,
        tree=options.tree_spec(has_draft=files.draft is not None),
        device=device,
        budget=replace(budget, dtype=dtype),
        notes=tuple(notes),
        assumed=assumed,
    )


def _own_device(options: LoadOptions, assumed: Assumptions | None) -> Device:
    """Open what computes.

    Where nothing will be loaded it is the host for a named machine, and for a budget on a GPU
    elsewhere.
    """
    if assumed is not None:
        if assumed.hardware is not None:
            rule = f"`device` {options.device} is of this machine, `hardware` names another"
            if options.device != "auto":
                raise UserError(f"{rule}: give one of them")
            return HOST
        is_cpu = options.device == "cpu" and options.gpu_memory is None
        if is_cpu or (options.device == "auto" and not has_cuda_driver()):
            return HOST
    from torch import cuda

    from offload.streaming.cuda import open_device

    is_budget = options.device == "auto" and options.gpu_memory is not None
    if assumed is not None and is_budget and not cuda.is_available():
        return HOST
    place = find_place() if options.ranks is not None else None
    rank_on_host = 0 if place is None else place.rank_on_host
    return open_device(options.device, options.gpu_memory, rank_on_host=rank_on_host)
