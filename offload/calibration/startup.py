"""Quick calibration: what is known of a pair of models here before the first weight pass.

`auto` needs to know what computing, drafting and the link cost. A profile of `offload tune` tells
the first two; disks drift by the hour, so the link is measured in any case. Without a profile,
computing is tried for a second: enough to tell a tree of 32 nodes from one of 512. A pass is timed
by its first layer, with everything around the layers, and multiplied; a draft step by growing trees
of a given width. Nothing streams yet while this runs, so readers that share the processor are not
in these figures: `offload tune`, the full calibration, has them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear

from offload import machine as cores
from offload.calibration.link import LOCAL_BYTES_PER_S
from offload.calibration.threads import Fastest, fastest_mode
from offload.drafting.base import DraftText
from offload.drafting.model import ModelDrafter
from offload.kernels.registry import REFERENCES, KernelSet
from offload.model.kv_cache import KVCache
from offload.model.streamed import StreamedModel
from offload.model.wide_products import product_for
from offload.planning.cost_model import NOTHING, Costs, Curve
from offload.planning.selector import RunSettings, TreeSelector
from offload.rank_roles import find_place
from offload.sampling.sampler import Sampler
from offload.streaming.disk import ByteSource
from offload.threads import StepModes, ThreadPolicy, thread_ladder
from offload.timer import median_s, timed
from offload.trees.topology import Topology, chain, sequences
from offload.units import drafting_of

MAX_TIMED_NODES = 257  # of the largest tree that is tried
SWEEP_SIZES = (1, 16, 64, 256)
DRAFT_WIDTHS = (1, 4, 16, 64)
# Where a device computes: reading weights takes as long as the products of some 200 rows, and only
# beyond does the curve rise as it goes on to the largest trees.
DEVICE_SIZES = (*SWEEP_SIZES, 1024)
_MOST_LOGITS = 128  # rows that a device scores at once, see `sampling.logits`
_DRAFT_STEPS = 4  # of which the first runs committed tokens
_TOKENS_PER_STEP = 4  # that a draft has to catch up with, as in decoding
_LEAST_S = 1e-7
_MAX_ROUNDS = 9


def sweep_curve(
    model: StreamedModel,
    slab: np.ndarray,
    sizes: Sequence[int] = SWEEP_SIZES,
    *,
    budget_s: float = 0.5,
) -> Curve:
    """Measure the compute time of a whole pass against its rows.

    `slab` is the typical layer's, which is not bound yet.
    """
    typical = model.typical_layer
    share = (
        sum(layout.slab_bytes for layout in model.layer_layouts)
        / model.layer_layouts[typical].slab_bytes
    )
    # which slabs do not hold; the few dense layers that some mixtures begin with count like others,
    if model.experts:
        # since what experts compute depends on the rows, and bytes do not tell it
        share = model.num_layers
    model.bind_layer(typical, slab)
    try:
        return fill_curve(lambda size: _sweep_s(model, size, share), sizes, budget_s)
    finally:
        model.unbind_layer(typical)


def draft_curve(
    drafter: ModelDrafter,
    sampler: Sampler,
    prompt: Sequence[int],
    cache: KVCache,
    *,
    budget_s: float = 0.4,
) -> Curve:
    """Measure the time of one draft step against its rows, behind `prompt`.

    `cache`, one of the drafter's, is left empty.
    """

    def grow_s(topology: Topology) -> float:
        cache.clear()
        drafter.grow([DraftText(chain(1), prompt, sampler, cache)])  # reads the prompt
        tokens = [*prompt, *[prompt[-1]] * _TOKENS_PER_STEP]
        return timed(lambda: drafter.grow([DraftText(topology, tokens, sampler, cache)]))

    def step_s(width: int) -> float:
        first_s = grow_s(chain(1))
        return (grow_s(sequences(width, _DRAFT_STEPS)) - first_s) / (_DRAFT_STEPS - 1)

    try:
        return fill_curve(step_s, DRAFT_WIDTHS, budget_s)
    finally:
        cache.clear()


def fill_curve(measure: Callable[[int], float], sizes: Sequence[int], budget_s: float) -> Curve:
    """Return medians of `measure` at ever larger sizes, for as long as `budget_s` lasts.

    The first run of a size is not like the others (on a GPU it may be recorded) and counts in no
    median, nor as time.
    """
    seconds: list[float] = []
    started = time.perf_counter()
    for index, size in enumerate(sizes):
        if index and time.perf_counter() > started + budget_s:
            break
        once = partial(measure, size)
        started += timed(once)
        share_s = budget_s * (index + 1) / len(sizes)
        seconds.append(
            median_s(once, started + share_s - time.perf_counter(), most_rounds=_MAX_ROUNDS)
        )
    rising = np.maximum.accumulate(np.maximum(seconds, _LEAST_S))
    return Curve(tuple(sizes[: len(seconds)]), tuple(rising.tolist()))


def _sweep_s(model: StreamedModel, num_rows: int, share: float) -> float:
    """Return seconds of `share` times the typical layer, and of embeddings, norm and head once."""
    typical = model.typical_layer
    rest_s, with_layer_s = (
        _forward_s(model, num_rows, slice(typical, end)) for end in (typical, typical + 1)
    )
    return rest_s + share * max(0.0, with_layer_s - rest_s)


def _forward_s(model: StreamedModel, num_rows: int, layers: slice) -> float:
    row_T = torch.arange(num_rows)
    sees_TT = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    with model.cut_to(layers):
        cache = model.new_cache(num_rows)
        # A number on the host is the sign that a device is done as well.
        # Rows differ, as those of a text do: a router would send the same ones to the same experts.
        num_logits = num_rows if model.place.type == "cpu" else min(num_rows, _MOST_LOGITS)
        what = row_T % model.vocab_size, row_T, sees_TT, cache
        return timed(lambda: float(model.forward(*what, num_logits=num_logits)[-1, 0]))


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
