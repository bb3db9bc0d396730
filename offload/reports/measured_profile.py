"""The profile of what a tune has traced, and of what its decoder has observed meanwhile."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from offload.calibration.link import link_bytes_per_s, locked_bytes_per_s
from offload.engine.decoder import Decoder
from offload.engine.setup import Setup
from offload.planning.acceptance import measured_acceptance, yields_of
from offload.planning.cost_model import Costs
from offload.planning.profile import ExpertUses, Profile
from offload.reports.tune_question import TuneQuestion
from offload.reports.windows import TracedWindow


def profile_of(
    question: TuneQuestion,
    traced: Sequence[TracedWindow],
    decoder: Decoder,
    setup: Setup,
) -> Profile:
    """Return the profile of what was traced and observed.

    Args:
        traced: one for each of the question's windows.
        setup: of the decoder.
    """
    target, draft = setup.files
    assert draft is not None, "something was ranked"
    ranks_W = [window.ranks for window in traced]
    p_K, error_K = measured_acceptance(ranks_W)
    bounds = [(tree.num_nodes, tree.depth) for tree in question.dynamic_trees]
    tokens_WB = [window.tokens_B for window in traced]
    return Profile(
        identity=question.proved(decoder),
        target_name=target.name,
        draft_name=draft.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        num_tokens=sum(map(len, ranks_W)),
        acceptance=tuple(p_K.tolist()),
        standard_error=tuple(error_K.tolist()),
        num_threads=decoder.num_threads,
        costs=observed_costs(decoder, setup),
        dynamic_yields=yields_of(bounds, tokens_WB),
        expert_uses=expert_uses(decoder),
    )


def observed_costs(decoder: Decoder, setup: Setup) -> Costs:
    """Return the costs of a step as passes have shown them, with the link's rate in any case.

    Where nothing was streamed the link is measured by itself: of a device it is that from locked
    memory.
    """
    costs = decoder.trees.observed_costs()
    if math.isfinite(costs.link_bytes_per_s):
        return costs
    limit = setup.options.limit_bytes_per_s
    rate = (
        locked_bytes_per_s(setup.device)
        if setup.device.has_own_memory
        else link_bytes_per_s(setup.files.target.shards, limit_bytes_per_s=limit)
    )
    return replace(costs, link_bytes_per_s=rate)


def expert_uses(decoder: Decoder) -> ExpertUses | None:
    """Return the counts of experts' uses; None where they come unasked, or no window was traced."""
    pool = decoder.target.experts
    if pool is None or not pool.num_rows:
        return None
    return ExpertUses(tuple(map(tuple, pool.uses_LE.tolist())), int(pool.num_rows))
