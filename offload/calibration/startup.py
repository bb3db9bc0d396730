"""What is known about a pair of models on this machine before the first sweep: a profile, or else a quick look.

`auto` needs to know what computing, drafting and the link cost. A profile of `offload tune` tells the first two; disks
drift by the hour, so the link is measured in any case. Without a profile about a second goes into finding out.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from offload.calibration.link import LOCAL_BYTES_PER_S, link_bytes_per_s
from offload.calibration.quick import MAX_PROBE_NODES, draft_curve, sweep_curve
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name
from offload.config import Sampling, drafting_of
from offload.drafting.model import ModelDrafter
from offload.errors import UserError
from offload.kernels.registry import REFERENCES, KernelSet
from offload.machine import fastest_num_threads
from offload.memory.plan import MemoryPlan
from offload.model.weights import StreamedModel
from offload.planning.cost_model import Costs, Traffic
from offload.planning.profile import Identity, Machine, Profile, find_profile, read_profile
from offload.planning.tree_policy import FindProfile, Trees
from offload.sampling.sampler import Sampler
from offload.streaming.source import ByteSource
from offload.tree.spec import TreeSpec

_TYPICAL_NODES = 64
_PROBE_PROMPT = 32  # committed tokens that the draft is timed behind
_LINK_S = 0.3


def make_trees(
    wish: TreeSpec,
    target: Checkpoint,
    draft: Checkpoint | None,
    dtype: str,
    named: str | os.PathLike[str] | None,
    plan_for: Callable[[int], MemoryPlan],
    *,
    device: str = "cpu",
) -> Trees:
    """The trees of a decoder that is about to be loaded.

    Args:
        dtype: to compute in, one of `DTYPES`.
        named: file of a profile that must hold, or `none`; None takes what the cache has.
        plan_for: the memory plan by nodes of the largest tree.
        device: name of what computes; a profile holds for one kind.
    """

    def traffic_of(num_nodes: int) -> Traffic | None:
        try:
            return Traffic.of(plan_for(num_nodes))
        except UserError:
            return None

    return Trees(
        wish, _profile_finder(target, draft, dtype, named, device), cache(traffic_of), context=plan_for(1).context
    )


class Situation(NamedTuple):
    """What a choice is for."""

    sampling: Sampling
    rule: str
    threads: int | None  # that the user wants; None takes the profile's number, or measures it


def look_around(
    trees: Trees,
    target: StreamedModel,
    draft: StreamedModel,
    store: ByteSource,
    situation: Situation,
    *,
    link: Callable[[], float] | None = None,
    kernels: KernelSet = REFERENCES,
) -> int:
    """Find out what an automatic choice needs to know, and tell `trees`; returns the number of compute threads.

    Args:
        target: embeddings and head are bound, no layer borrows yet.
        store: of the target.
        link: measures the bytes per second that layers arrive with; None measures the disk.
        kernels: that the run will compute with.
    """
    profile, _ = trees.find(situation.sampling, situation.rule)
    num_threads = situation.threads or (profile.num_threads if profile else pick_num_threads(target, _TYPICAL_NODES))
    torch.set_num_threads(num_threads)
    trees.num_threads, trees.link_bytes_per_s = num_threads, link() if link else _link_bytes_per_s(trees, store)
    if profile is None or profile.num_threads != num_threads:
        slab = store.fetch(target.layer_layouts[0])
        target.attend_with(kernels.tree_attention)
        drafter = ModelDrafter(draft, target.vocab_size, 2 * MAX_PROBE_NODES, kernels)
        sampler = Sampler(situation.sampling, target.vocab_size, drafting_of(situation.rule), kernels)
        trees.costs = Costs(
            compute_s=sweep_curve(target, slab),
            draft_step_s=draft_curve(drafter, sampler, [0] * _PROBE_PROMPT, drafter.new_state()),
            verify_s=0.0,
            link_bytes_per_s=trees.link_bytes_per_s,
        )
    return num_threads


def pick_num_threads(target: StreamedModel, num_rows: int) -> int:
    """The fastest number of compute threads for sweeps of so many rows."""
    width = int(getattr(target.meta_model.config, "hidden_size", 0) or 1024)
    return fastest_num_threads(num_rows, min(width, 4096), str(target.dtype).removeprefix("torch."))


def _link_bytes_per_s(trees: Trees, store: ByteSource) -> float:
    traffic = trees.traffic_of(_TYPICAL_NODES) or trees.traffic_of(1)
    if traffic is None or not traffic.streamed_bytes:
        return LOCAL_BYTES_PER_S
    shard = max(store.paths, key=lambda path: path.stat().st_size)
    return link_bytes_per_s(shard, budget_s=_LINK_S, limit_bytes_per_s=store.rate_limit_bytes_per_s)


def _profile_finder(
    target: Checkpoint, draft: Checkpoint | None, dtype: str, named: str | os.PathLike[str] | None, device: str
) -> FindProfile:
    @cache
    def find(sampling: Sampling, rule: str) -> tuple[Profile | None, str]:
        if draft is None or str(named) == "none":
            return None, "no profile is wanted"
        machine = Machine.here(compute_dtype_name(target, dtype), device)
        identity = Identity.of(target, draft, sampling, rule, machine)
        return find_profile(identity) if named is None else (read_profile(Path(named), identity), str(named))

    return lambda sampling, rule: find(replace(sampling, seed=0), rule)
