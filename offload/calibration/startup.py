"""Startup calibration: what is known about a pair of models on this machine before the first sweep.

`auto` needs to know what computing, drafting and the link cost. A profile of `offload tune` tells the first two; disks
drift by the hour, so the link is measured in any case. Without a profile the quick calibration takes about a second.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from offload.calibration.link import LOCAL_BYTES_PER_S, link_bytes_per_s
from offload.calibration.quick import DEVICE_SIZES, MAX_TIMED_NODES, SWEEP_SIZES, draft_curve, sweep_curve
from offload.checkpoint.safetensors import compute_dtype_name
from offload.config import Sampling, drafting_of, require
from offload.drafting.model import ModelDrafter
from offload.kernels.registry import REFERENCES, KernelSet
from offload.memory.planner import Files
from offload.model.weights import StreamedModel
from offload.planning.cost_model import NOTHING, Costs
from offload.planning.options import LoadOptions
from offload.planning.place import find_place
from offload.planning.profile import Identity, Machine, Profile, find_profile, read_profile, unprofiled
from offload.planning.room import Room
from offload.planning.tree_policy import FindProfile, Trees, routing_in
from offload.planning.usual import usual_for
from offload.sampling.sampler import Sampler
from offload.streaming.source import ByteSource
from offload.threads import cores
from offload.threads.fastest import fastest_mode
from offload.threads.policy import Mode, Modes, ThreadPolicy, thread_ladder

_TYPICAL_NODES, _TYPICAL_DRAFTED = 64, 8  # rows of a sweep and of a draft step
_PROMPT_TOKENS = 32  # committed ones that the draft is timed behind


class RunSettings(NamedTuple):
    """What a choice is for."""

    sampling: Sampling
    rule: str


def trees_of(files: Files, options: LoadOptions, room: Room, settings: RunSettings, *, device: str = "cpu") -> Trees:
    """The trees of a decoder that is about to be loaded; `device` is the name of what computes.

    Raises `UserError` for a named profile that does not hold for such runs.
    """
    find = _profile_finder(files, options, room, device)
    profile, _ = find(*settings)
    return Trees(
        options.tree_spec(has_draft=files.draft is not None),
        find,
        cache(partial(room.traffic, files)),
        context=room.plan(files, 1).context,
        has_draft=files.draft is not None,
        usual=usual_for(files.draft),
        routing=routing_in(profile),
        parallel=room.parallel,
        link_bytes_per_s=room.rates.link_bytes_per_s if room.rates and room.gpu is None else None,
    )


def calibrate(
    trees: Trees,
    target: StreamedModel,
    draft: StreamedModel | None,
    store: ByteSource,
    settings: RunSettings,
    threads: ThreadPolicy,
    *,
    link: Callable[[], float] | None = None,
    kernels: KernelSet = REFERENCES,
) -> None:
    """Find out what an automatic choice needs to know, and tell `trees`.

    Args:
        target: embeddings and head are bound, no layer is bound yet.
        link: measures the bytes per second that layers arrive with; None measures the disk.
    """
    profile, _ = trees.find(settings.sampling, settings.rule)
    trees.num_threads, trees.link_bytes_per_s = threads.most, link() if link else _link_bytes_per_s(trees, store)
    if profile is None or profile.num_threads != threads.most:
        torch.set_num_threads(threads.start.sweep.num_threads)
        wanted = SWEEP_SIZES if target.place.type == "cpu" else DEVICE_SIZES
        sizes = [size for size in wanted if size <= MAX_TIMED_NODES or trees.traffic_of(size) is not None]
        slab, draft_step_s = store.fetch(target.layer_layouts[target.typical_layer]), NOTHING
        compute_s = sweep_curve(target, slab, sizes)
        if draft is not None:
            drafter = ModelDrafter(draft, target.vocab_size, 2 * MAX_TIMED_NODES, kernels)
            sampler = Sampler(settings.sampling, target.vocab_size, drafting_of(settings.rule), kernels)
            torch.set_num_threads(threads.start.draft.num_threads)
            prompt = [int(0 in draft.start)] * _PROMPT_TOKENS + list(draft.start)  # a start would end it
            draft_step_s = draft_curve(drafter, sampler, prompt, drafter.new_state())
        trees.costs = Costs(
            compute_s=compute_s, draft_step_s=draft_step_s, verify_s=0.0, link_bytes_per_s=trees.link_bytes_per_s
        )
    else:
        trees.costs = replace(profile.costs, link_bytes_per_s=trees.link_bytes_per_s)


def pick_threads(target: StreamedModel, draft: StreamedModel | None, num_rows: int = _TYPICAL_NODES) -> ThreadPolicy:
    """The policy for this machine, beginning with what is fastest for sweeps of so many rows and for drafting.

    Ranks on one host compute at the same time, and share its cores.
    """
    place = find_place()
    ladder = thread_ladder(max(1, cores.num_cores() // (1 if place is None else place.num_on_host)))
    sweep = _fastest(ladder, target, num_rows)
    drafting = _fastest(ladder, draft, _TYPICAL_DRAFTED) if draft else sweep
    return ThreadPolicy(ladder, Modes(drafting, sweep))


def _fastest(ladder: Sequence[int], model: StreamedModel, num_rows: int) -> Mode:
    width = int(getattr(model.meta_model.config, "hidden_size", 0) or 1024)
    return fastest_mode(ladder, num_rows, min(width, 4096), model.dtype)


def _link_bytes_per_s(trees: Trees, store: ByteSource) -> float:
    if trees.link_bytes_per_s is not None:  # just now, for the rows of a prompt's pass
        return trees.link_bytes_per_s
    traffic = trees.traffic_of(_TYPICAL_NODES) or trees.traffic_of(1)
    if traffic is None or not traffic.is_streamed:
        return LOCAL_BYTES_PER_S
    return link_bytes_per_s(store.paths, limit_bytes_per_s=store.rate_limit_bytes_per_s)


def _profile_finder(files: Files, options: LoadOptions, room: Room, device: str) -> FindProfile:
    experts = room.experts_of(files)

    @lru_cache(maxsize=256)  # a server is asked for any settings
    def find(sampling: Sampling, rule: str) -> tuple[Profile | None, str]:
        if files.draft is None or options.has_no_profile:
            return None, "no profile is wanted"
        if what := unprofiled(sampling):
            none = f"no profile holds for a run with {what}"
            require(options.profile is None, none, f"`profile` {options.profile}", "leave one of them out")
            return None, none
        machine, named = Machine.here(compute_dtype_name(files.target, options.dtype), device), options.profile
        identity = Identity.of(files.target, files.draft, sampling, rule, machine)
        if named is not None:
            return read_profile(Path(named), identity).of_experts(experts, is_named=True), str(named)
        profile, where = find_profile(identity)
        return profile and profile.of_experts(experts), where

    return lambda sampling, rule: find(replace(sampling, seed=0), rule)
