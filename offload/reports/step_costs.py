"""The cost curves of a decoder, measured by real steps.

Trees of all sizes take turns, round after round, and medians are kept, so that a disk that drifts
slows all of them alike. What is timed is `Decoder.step` itself, so the figures hold what readers
and compute take from each other.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from offload.calibration.link import (
    device_link_bytes_per_s,
    link_bytes_per_s,
    locked_bytes_per_s,
)
from offload.calibration.threads import draft_curve
from offload.engine.decoder import Decoder
from offload.engine.hooks import Counted
from offload.planning.cost_model import (
    Costs,
    Curve,
    Traffic,
    fit_overlap_penalty,
    step_time,
)
from offload.sampling_options import Sampling
from offload.stats import Stats
from offload.streaming.device import Device
from offload.trees.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain

# timed too where experts come on demand: each row asks for some, so few rows may be best
SMALL_SIZES = (2, 4, 8)
TIMED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
# depth of the trees that are timed
_TIMED_DEPTH = 12
_NUM_ROUNDS = 5
# passes of one row in turn, the first of which finds slots that were filled while a tree grew
_NUM_PLAIN = 4
# the link counts as the slower side where a pass waits for it longer than this share
_STALLED_SHARE = 0.05


def measure_costs(
    decoder: Decoder,
    device: Device,
    prompt: Sequence[int],
    sampling: Sampling,
    progress: Counted,
) -> Costs:
    """Measure a decoder's cost curves up to its largest tree, each round behind `prompt`.

    `device` is where it computes.
    """
    largest = decoder.plan.num_nodes
    wanted = {*TIMED_SIZES, largest, *(SMALL_SIZES if decoder.plan.has_experts else ())}
    sizes = sorted(size for size in wanted if 1 < size <= largest)
    topologies = [best_first(DEFAULT_ACCEPTANCE, size, _TIMED_DEPTH) for size in sizes]
    plain: list[Stats] = []
    rounds: list[list[Stats]] = []
    for index in range(_NUM_ROUNDS):
        progress(index, _NUM_ROUNDS, "timing trees")
        steps = _steps(decoder, prompt, sampling, [*[chain(0)] * (_NUM_PLAIN + 1), *topologies])
        plain += steps[2 : _NUM_PLAIN + 1]
        rounds.append(steps[_NUM_PLAIN + 1 :])
    progress(_NUM_ROUNDS, _NUM_ROUNDS, "timing trees")
    by_size = [plain, *zip(*rounds, strict=True)]
    # a device's clock may tell of a longer wait than the host's of the whole pass
    computing_s = [
        max(0.0, median(step.sweep_s - step.stall_s for step in steps)) for steps in by_size
    ]
    compute_s = np.maximum.accumulate(computing_s)
    draft_s = [median(step.draft_s for step in steps) for steps in by_size[1:]]
    sequence = decoder.begin(prompt, sampling)
    torch.set_num_threads(decoder.threads.modes(largest).draft.num_threads)
    assert decoder.drafter.model is not None, "a tune has a draft model"
    drafter = decoder.drafter
    # one that reads the target's states is timed behind a text without a target
    state = sequence.caches.draft if drafter.needs is None else drafter.new_state()
    curve = draft_curve(drafter, sequence.sampler, prompt, state)
    costs = Costs(
        compute_s=Curve((1, *sizes), tuple(compute_s.tolist())),
        draft_step_s=_scaled(curve, topologies, draft_s),
        verify_s=median(step.verify_s for steps in by_size for step in steps),
        link_bytes_per_s=_link_bytes_per_s(decoder, device, plain),
    )
    sweep_s = [median(step.sweep_s for step in steps) for steps in by_size[1:]]
    penalty = _overlap_penalty(costs, Traffic.from_plan(decoder.plan), topologies, sweep_s)
    return replace(costs, overlap_penalty=penalty)


def _steps(
    decoder: Decoder, prompt: Sequence[int], sampling: Sampling, topologies: Sequence[Topology]
) -> list[Stats]:
    """Return the figures of one step per topology, on one sequence; the first reads the prompt."""
    sequence = decoder.begin(prompt, sampling)
    figures = []
    for topology in topologies:
        figures.append(sequence.set_shape(topology))
        decoder.step(sequence)
    return figures


def _overlap_penalty(
    costs: Costs, traffic: Traffic, topologies: Sequence[Topology], sweep_s: Sequence[float]
) -> float:
    """Fit what passes took beyond their slower side; 0 where nothing streams or routers wait."""
    if not traffic.streamed_bytes or traffic.experts is not None:
        return 0.0
    steps = [step_time(costs, traffic, topology) for topology in topologies]
    pairs = zip(steps, sweep_s, strict=True)
    return fit_overlap_penalty([(step.compute_s, step.link_s, took) for step, took in pairs])


def _scaled(curve: Curve, topologies: Sequence[Topology], draft_s: Sequence[float]) -> Curve:
    """Scale bare draft steps to whole trees, which rank, draw noise and catch up as well."""
    predicted = [curve.total(topology.draft_widths) for topology in topologies]
    pairs = zip(draft_s, predicted, strict=True)
    scale = median([took / wanted for took, wanted in pairs] or [1.0])
    return replace(curve, seconds=tuple(scale * second for second in curve.seconds))


def _link_bytes_per_s(decoder: Decoder, device: Device, plain: Sequence[Stats]) -> float:
    """Return the link's rate as streamed where passes of a row wait for it, else by itself."""
    plan = decoder.plan
    streamed_bytes = plan.streamed_bytes
    sweep_s = median(step.sweep_s for step in plain)
    is_slower = median(step.stall_s for step in plain) > _STALLED_SHARE * sweep_s
    if streamed_bytes and is_slower and not plan.has_experts:
        return streamed_bytes / sweep_s
    source = decoder.target.stream.carrier.source
    limit = source.rate_limit_bytes_per_s
    if not device.has_own_memory:
        return link_bytes_per_s(source.paths, limit_bytes_per_s=limit)
    if plan.is_streamed:
        return device_link_bytes_per_s(device, plan, source.paths, limit_bytes_per_s=limit)
    return locked_bytes_per_s(device)
