"""How fast this processor computes, tried before anything streams.

Products like those of a step give the thread mode to begin with, which real steps correct. Two curves
of seconds against rows give the costs of a step. That of a pass is the time of a typical layer,
multiplied, with all that lies around the layers; that of a draft step comes from growing trees of a
given width.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear, silu

from offload import machine
from offload.drafting.base import DraftText, Proposer
from offload.memory.sizes import num_logits_rows
from offload.model.kv_cache import KVCache
from offload.model.parts import causal
from offload.model.tree_model import TreeModel
from offload.model.wide_products import product_for
from offload.planning.cost_model import Curve
from offload.rank_roles import find_place
from offload.sampling.sampler import Sampler
from offload.streaming.device import Device
from offload.threads import Mode, StepModes, ThreadPolicy, ThreadWaiting, thread_ladder
from offload.timer import median_s, timed
from offload.trees.topology import Topology, chain, sequences

_TYPICAL_DRAFTED = 8  # rows of a draft step

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# In the order in which they are timed, since slow passes leave no time for all. A row of few costs
# next to nothing where reading weights is slower, and a row of many may cost ten times as much: only
# a wide pass tells what the next row of a large tree takes.
SWEEP_SIZES = (1, 16, 256, 64)
_LEAST_SWEEP_SIZES = 3
# one row and sixteen tell the time of a row, one and four hardly do
DRAFT_WIDTHS = (1, 16, 64, 4)
_LEAST_DRAFT_WIDTHS = 2
_DRAFT_STEPS = 4  # of which the first runs committed tokens
_TOKENS_PER_STEP = 4  # that a draft has to catch up with, as in decoding
_LEAST_S = 1e-7
# for all modes, and for the sweeps of all sizes
_MODES_S = 0.06
_SWEEPS_S = 0.5
_MAX_ROUNDS = 9
# Of a narrow pass: it is short, and a lone run that another process has cut into would count for all
# layers.
_LEAST_ROUNDS = 3
_NARROW = 16


class Fastest(NamedTuple):
    """The mode, and the seconds of each that was tried."""

    mode: Mode
    seen_s: dict[Mode, float]


def fastest_mode(
    ladder: Sequence[int],
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    multiply: Multiply = linear,
) -> Fastest:
    """Return the mode with the shortest product of `num_rows` rows and a (width, width) matrix.

    The time includes elementwise work between products. Counts are those of the rising `ladder`.
    Ties within a tenth go to fewer threads, and to sleeping ones: these leave the cores to others.
    `multiply` is how models here compute such products.
    """
    weight = torch.ones(width, width, dtype=dtype)
    rows = torch.ones(num_rows, width, dtype=dtype)
    before = torch.get_num_threads()
    best = Mode(ladder[0], is_asleep=True)
    seen_s = dict[Mode, float]()
    modes = [
        Mode(count, is_asleep)
        for count in ladder
        for is_asleep in (True, False)
        if is_asleep or count > 1
    ]
    with closing(ThreadWaiting()) as waiting:
        for mode in modes:
            torch.set_num_threads(mode.num_threads)
            waiting.let_sleep(mode.is_asleep)
            compute = partial(_compute, rows, weight, multiply)
            compute()  # the first is not like the others
            seen_s[mode] = median_s(partial(timed, compute), _MODES_S / len(modes), least_rounds=3)
            if seen_s[mode] < 0.9 * seen_s[best]:
                best = mode
    torch.set_num_threads(before)
    return Fastest(best, seen_s)


def _compute(rows: torch.Tensor, weight: torch.Tensor, multiply: Multiply) -> None:
    """Compute two products with elementwise work between: three waits of all threads."""
    multiply(silu(multiply(rows, weight)), weight)


def thread_policy(
    target: TreeModel,
    draft: TreeModel | None,
    num_rows: int,
    fixed: int | None,
    device: Device,
) -> ThreadPolicy:
    """Return the policy of a run; a named count is `fixed`, torch's own where a GPU computes.

    On a CPU it begins with the fastest modes for sweeps of `num_rows` and for drafting. Ranks on
    one host compute at the same time, and share its cores.
    """
    if fixed is not None or device.has_own_memory:
        return ThreadPolicy.fixed(fixed or torch.get_num_threads())
    place = find_place()
    num_ranks = 1 if place is None else place.num_on_host
    ladder = thread_ladder(max(1, machine.num_cores() // num_ranks))
    sweep = _fastest(ladder, target, num_rows)
    drafting = _fastest(ladder, draft, _TYPICAL_DRAFTED) if draft else sweep
    return ThreadPolicy(
        ladder, StepModes(drafting.mode, sweep.mode), (drafting.seen_s, sweep.seen_s)
    )


def _fastest(ladder: Sequence[int], model: TreeModel, num_rows: int) -> Fastest:
    width = int(getattr(model.meta_model.config, "hidden_size", 0) or 1024)
    multiply = product_for(linear, torch.empty(0, dtype=model.dtype))
    return fastest_mode(ladder, num_rows, min(width, 4096), model.dtype, multiply)


def sweep_curve(model: TreeModel, slab: np.ndarray, sizes: Sequence[int]) -> Curve:
    """Measure the compute time of a pass against its rows, by the typical layer's `slab`."""
    typical = model.typical_layer
    share = (
        sum(layout.slab_bytes for layout in model.layer_layouts)
        / model.layer_layouts[typical].slab_bytes
    )
    # Slabs do not hold experts, and what those compute depends on the rows, which bytes do not tell.
    # The few dense layers that some mixtures begin with count like others.
    if model.experts:
        share = model.num_layers
    model.bind_layer(typical, slab)
    try:
        return fill_curve(
            lambda size: _sweep_s(model, size, share), sizes, _SWEEPS_S, _LEAST_SWEEP_SIZES
        )
    finally:
        model.unbind_layer(typical)


def draft_curve(
    drafter: Proposer,
    sampler: Sampler,
    prompt: Sequence[int],
    cache: KVCache,
    *,
    budget_s: float = 0.4,
) -> Curve:
    """Measure the time of a draft step against its rows, behind `prompt`; `cache` is left empty."""

    def grow_s(topology: Topology) -> float:
        cache.clear()
        drafter.propose([DraftText(chain(1), prompt, sampler, cache)])  # reads the prompt
        tokens = [*prompt, *[prompt[-1]] * _TOKENS_PER_STEP]
        return timed(lambda: drafter.propose([DraftText(topology, tokens, sampler, cache)]))

    def step_s(width: int) -> float:
        deep = sequences(width, _DRAFT_STEPS)
        if len(drafter.cost(deep)) == len(drafter.cost(chain(1))):
            return grow_s(deep) / _DRAFT_STEPS  # one pass for all levels
        first_s = grow_s(chain(1))
        return (grow_s(deep) - first_s) / (_DRAFT_STEPS - 1)

    try:
        return fill_curve(step_s, DRAFT_WIDTHS, budget_s, _LEAST_DRAFT_WIDTHS)
    finally:
        cache.clear()


def fill_curve(
    measure: Callable[[int], float], sizes: Sequence[int], budget_s: float, num_least: int
) -> Curve:
    """Return medians of `measure` at these sizes in turn, for as long as `budget_s` lasts.

    The first run of a size (on a GPU it may be recorded) counts in no median, nor as time. The first
    `num_least` sizes are measured in any case, narrow ones three times.
    """
    seconds: list[float] = []
    started = time.perf_counter()
    for index, size in enumerate(sizes):
        is_late = time.perf_counter() > started + budget_s
        if is_late and index >= num_least:
            break
        once = partial(measure, size)
        if not is_late:
            started += timed(once)
        left_s = started + budget_s * (index + 1) / len(sizes) - time.perf_counter()
        least = _LEAST_ROUNDS if index < num_least and size <= _NARROW else 1
        seconds.append(median_s(once, left_s, least_rounds=least, most_rounds=_MAX_ROUNDS))
    known = sorted(zip(sizes, seconds, strict=False))
    rising = np.maximum.accumulate([max(median, _LEAST_S) for _, median in known])
    return Curve(tuple(size for size, _ in known), tuple(rising.tolist()))


def _sweep_s(model: TreeModel, num_rows: int, share: float) -> float:
    """Return seconds of `share` times the typical layer, and of embeddings, norm and head once."""
    typical = model.typical_layer
    rest_s, with_layer_s = (
        _forward_s(model, num_rows, slice(typical, end)) for end in (typical, typical + 1)
    )
    return rest_s + share * max(0.0, with_layer_s - rest_s)


def _forward_s(model: TreeModel, num_rows: int, layers: slice) -> float:
    row_T = torch.arange(num_rows)
    sees_TT = causal(num_rows)
    with model.cut_to(layers):
        cache = model.new_cache(num_rows)
        # A number on the host is the sign that a device is done as well.
        # Rows differ, as those of a text do: a router would send the same ones to the same experts.
        num_logits = num_logits_rows(num_rows, is_gpu=model.torch_device.type != "cpu")
        arguments = row_T % model.vocab_size, row_T, sees_TT, cache
        return timed(lambda: float(model.forward(*arguments, num_logits=num_logits)[-1, 0]))
