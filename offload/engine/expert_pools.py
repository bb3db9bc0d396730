"""Pools of routed experts that come on demand: the target's, and those of its MTP layers."""

from contextlib import ExitStack

import numpy as np

from offload.engine.build import ModelPair, open_draft_files
from offload.engine.decoder_config import DecoderConfig
from offload.engine.run_trees import RunTrees
from offload.memory.plan import MemoryPlan
from offload.model.carried_model import CarriedModel
from offload.streaming.experts import ExpertPool, open_pool


def open_experts(
    pair: ModelPair, config: DecoderConfig, trees: RunTrees, resources: ExitStack
) -> ExpertPool | None:
    """Open the pool of routed experts, if they come on demand, with the most used ones."""
    if not pair.target.experts:
        return None
    records = [experts.records for experts in pair.target.experts]
    largest = max(record.slab_bytes for layer_records in records for record in layer_records)
    assert largest <= config.plan.expert_slot_bytes, "an expert is larger than planned"
    profile, _ = pair.setup.find_profile(*trees.settings)
    uses = None if profile is None else profile.expert_uses
    pool = open_pool(
        pair.source,
        records,
        config.plan.num_expert_slots,
        pair.setup.device,
        resources,
        uses_B=None if uses is None else np.array(uses.uses_B),
        num_host_slots=config.plan.num_host_expert_slots,
        ahead_rows=config.trees.ahead_rows(),
    )
    if uses is not None:
        pool.warm(uses.uses_B, config.plan.num_kept_experts, pair.setup.hooks.on_bytes)
    return pool


def open_draft_experts(pair: ModelPair, plan: MemoryPlan, resources: ExitStack) -> None:
    """Open a pool for a carried draft's experts, if they come on demand."""
    if pair.draft is None or not pair.draft.experts:
        return
    assert isinstance(pair.draft, CarriedModel), "other drafts stay whole"
    source = open_draft_files(pair)
    resources.callback(source.close)
    records = [experts.records for experts in pair.draft.experts]
    num_slots = plan.num_draft_expert_slots
    pool = open_pool(source, records, num_slots, pair.setup.device, resources)
    pair.draft.draw_experts(pool)
