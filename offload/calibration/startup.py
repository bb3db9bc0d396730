"""Quick calibration: what is known of a pair of models here before the first weight pass.

`auto` needs to know what computing, drafting and the link cost. A profile of `offload tune` tells
the first two; disks drift by the hour, so the link is measured in any case. Without a profile,
computing is tried for a second: enough to tell a tree of 32 nodes from one of 512. Nothing streams
yet while this runs, so readers that share the processor are not in these figures: `offload tune`,
the full calibration, has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import linear

from offload import machine as cores
from offload.calibration.curves import SWEEP_SIZES, draft_curve, sweep_curve
from offload.calibration.link import LOCAL_BYTES_PER_S
from offload.calibration.threads import Fastest, fastest_mode
from offload.drafting.model import ModelDrafter
from offload.kernels.registry import REFERENCES, KernelSet
from offload.model.streamed import StreamedModel
from offload.model.wide_products import product_for
from offload.planning.cost_model import NOTHING, Costs
from offload.planning.selector import RunSettings, TreeSelector
from offload.rank_roles import find_place
from offload.sampling.sampler import Sampler
from offload.streaming.disk import ByteSource
from offload.threads import StepModes, ThreadPolicy, thread_ladder
from offload.units import drafting_of

MAX_TIMED_NODES = 257  # of the largest tree that is tried
# Where a device computes: reading weights takes as long as the products of some 200 rows, and only
# beyond does the curve rise as it goes on to the largest trees.
DEVICE_SIZES = (*SWEEP_SIZES, 1024)
# rows of a sweep and of a draft step
_TYPICAL_NODES = 64
_TYPICAL_DRAFTED = 8
_PROMPT_TOKENS = 32  # committed ones that the draft is timed behind


def calibrate(
    trees: TreeSelector,
    target: StreamedModel,
    draft: StreamedModel | None,
    store: ByteSource,
    settings: RunSettings,
    threads: ThreadPolicy,
    *,
    link: Callable[[], float],
    kernels: KernelSet = REFERENCES,
) -> None:
    """Find out what an automatic choice needs to know, and tell `trees`.

    Args:
        target: embeddings and head are bound, no layer is bound yet.
        link: measures the bytes per second that layers arrive with; it is asked where some do.
    """
    profile, _ = trees.find(settings.sampling, settings.rule)
    trees.num_threads = threads.most
    traffic = trees.traffic_of(_TYPICAL_NODES) or trees.traffic_of(1)
    is_streamed = traffic is not None and traffic.is_streamed
    trees.link_bytes_per_s = link() if is_streamed else LOCAL_BYTES_PER_S
    if profile is None or profile.num_threads != threads.most:
        torch.set_num_threads(threads.start.sweep.num_threads)
        wanted = SWEEP_SIZES if target.place.type == "cpu" else DEVICE_SIZES
        sizes = [
            size for size in wanted if size <= MAX_TIMED_NODES or trees.traffic_of(size) is not None
        ]
        slab = store.fetch(target.layer_layouts[target.typical_layer])
        draft_step_s = NOTHING
        compute_s = sweep_curve(target, slab, sizes)
        if draft is not None:
            drafter = ModelDrafter(draft, target.vocab_size, 2 * MAX_TIMED_NODES, kernels)
            sampler = Sampler(
                settings.sampling, target.vocab_size, drafting_of(settings.rule), kernels
            )
            torch.set_num_threads(threads.start.draft.num_threads)
            # a start would end it
            prompt = [int(0 in draft.start)] * _PROMPT_TOKENS + list(draft.start)
            draft_step_s = draft_curve(drafter, sampler, prompt, drafter.new_state())
        trees.costs = Costs(
            compute_s=compute_s,
            draft_step_s=draft_step_s,
            verify_s=0.0,
            link_bytes_per_s=trees.link_bytes_per_s,
        )
    else:
        trees.costs = replace(profile.costs, link_bytes_per_s=trees.link_bytes_per_s)


def pick_threads(
    target: StreamedModel, draft: StreamedModel | None, num_rows: int = _TYPICAL_NODES
) -> ThreadPolicy:
    """Return the thread policy for this machine, beginning with the fastest counts.

    For passes of so many rows, and for drafting. Ranks on one host compute at the same time, and
    share its cores.
    """
    place = find_place()
    ladder = thread_ladder(max(1, cores.num_cores() // (1 if place is None else place.num_on_host)))
    sweep = _fastest(ladder, target, num_rows)
    drafting = _fastest(ladder, draft, _TYPICAL_DRAFTED) if draft else sweep
    return ThreadPolicy(
        ladder, StepModes(drafting.mode, sweep.mode), (drafting.seen_s, sweep.seen_s)
    )


def _fastest(ladder: Sequence[int], model: StreamedModel, num_rows: int) -> Fastest:
    width = int(getattr(model.meta_model.config, "hidden_size", 0) or 1024)
    multiply = product_for(linear, torch.empty(0, dtype=model.dtype))
    return fastest_mode(ladder, num_rows, min(width, 4096), model.dtype, multiply=multiply)
