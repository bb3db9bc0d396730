"""Quick calibration: the costs of a step, before the first pass over the weights.

`auto` needs to know what computing, drafting and the link cost. A profile of `offload tune` has the
first two; disks drift by the hour, so the link is always measured. Without a profile both are timed
for a second, which tells a tree of 32 nodes from one of 512. Nothing is read meanwhile: how much
readers slow computing down, passes show.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from offload.calibration.kernel_shapes import shapes_of
from offload.calibration.kernels import NO_KERNELS, KernelChoice, choose_kernels
from offload.calibration.threads import SWEEP_SIZES, draft_curve, sweep_curve
from offload.checkpoint.layout import SlabLayout
from offload.drafting.registry import open_drafter
from offload.kernels.jit import is_for_kernels
from offload.memory.plan import MemoryPlan
from offload.model.cuda_graphs import use_kernels
from offload.model.tree_model import TreeModel
from offload.planning.cost_model import NOTHING, Costs, Curve, Traffic, with_draft_reads
from offload.planning.knowledge import Knowledge, RunSettings
from offload.rules import drafting_of
from offload.sampling.sampler import Sampler
from offload.streaming.device import Device
from offload.threads import ThreadPolicy

MAX_TIMED_NODES = 257  # of the largest tree that is timed in any case
# A device reads weights for as long as the products of some 200 rows take: only a size beyond tells
# by how much a row lengthens the largest passes.
DEVICE_SIZES = (*SWEEP_SIZES, 1024)
_PROMPT_TOKENS = 32  # of the text that the draft is timed behind


def calibrate(
    known: Knowledge,
    target: TreeModel,
    draft: TreeModel | None,
    fetch: Callable[[SlabLayout], np.ndarray],
    settings: RunSettings,
    *,
    threads: ThreadPolicy,
    choice: KernelChoice,
    traffic_of: Callable[[int], Traffic | None],
) -> Knowledge:
    """Return `known` with the costs of a step: those of its profile, else as tried for a second.

    Args:
        known: with a profile, if there is one, and the link.
        target: embeddings and head are bound, no layer is bound yet.
        fetch: reads the slab of a layer.
        traffic_of: what a sweep moves with trees of a number of nodes; None where they do not fit.
    """
    known = replace(known, num_threads=threads.most)
    if known.profile is not None and known.profile.num_threads == threads.most:
        return known
    torch.set_num_threads(threads.start.sweep.num_threads)
    wanted = SWEEP_SIZES if target.torch_device.type == "cpu" else DEVICE_SIZES
    sizes = [size for size in wanted if size <= MAX_TIMED_NODES or traffic_of(size) is not None]
    slab = fetch(target.layer_layouts[target.typical_layer])
    compute_s = sweep_curve(target, slab, sizes)
    torch.set_num_threads(threads.start.draft.num_threads)
    draft_step_s = NOTHING
    if draft is not None:
        draft_step_s = _draft_curve(draft, target.vocab_size, settings, choice)
    rate = known.link.bytes_per_s
    assert rate is not None, "it was measured"
    tried = Costs(
        compute_s=compute_s, draft_step_s=draft_step_s, verify_s=0.0, link_bytes_per_s=rate
    )
    return replace(known, tried=with_draft_reads(tried, traffic_of(1)))


def _draft_curve(
    draft: TreeModel, vocab_size: int, settings: RunSettings, choice: KernelChoice
) -> Curve:
    """Return the seconds of a draft step against its rows, behind a prompt of one word again and again."""
    drafter = open_drafter(draft, vocab_size, 2 * MAX_TIMED_NODES, choice.kernels)
    sampler = Sampler(settings.sampling, vocab_size, drafting_of(settings.rule), choice.kernels)
    # the token that starts a text would end the prompt
    prompt = [int(0 in draft.start_ids)] * _PROMPT_TOKENS + list(draft.start_ids)
    return draft_curve(drafter, sampler, prompt, drafter.new_state())


def pick_kernels(
    target: TreeModel,
    draft: TreeModel | None,
    device: Device,
    plan: MemoryPlan,
    settings: RunSettings,
) -> KernelChoice:
    """Let a GPU use the kernels that agree, with which the draft's small passes are recorded."""
    if not is_for_kernels(device.torch_device):
        return NO_KERNELS
    choice = choose_kernels(shapes_of(target, plan, settings.sampling, draft), device)
    note = use_kernels(target, draft, choice.kernels, device.torch_device)
    return choice._replace(notes=(note,) if note else ())
