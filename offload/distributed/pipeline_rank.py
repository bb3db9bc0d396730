"""One rank of a pipeline: whether it is a stage or drafts, its layers, and their memory.

Invariant: every rank plans and checks by itself, and an error on one of them ends all, with its
message.
"""

from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.cuts import Section, checkpoint_of
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.checkpoint.small_files import has_encoder
from offload.distributed.agreement import broadcast_from_head, gather_values, try_together
from offload.distributed.section import capacity_of
from offload.distributed.shares import Load, RankCapacity, stage_layers
from offload.distributed.transport import Transport
from offload.engine.setup import Setup
from offload.engine.tokenizer import Tokenizer, Vocabulary, check_vocabulary
from offload.errors import UserError
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.sizes import PATH_SCRATCH_BYTES, RUNTIME_BYTES, draft_bytes, noise_bytes
from offload.rank_roles import MOST_ROWS, TIMED_ROWS, PipelineOptions, Roles

_LEAST_UNCOMMITTED = 64


class PipelineRank(NamedTuple):
    """A rank before layers are shared out."""

    setup: Setup
    transport: Transport
    roles: Roles
    pipeline: PipelineOptions

    @property
    def stage(self) -> int | None:
        stages = self.roles.stages
        return stages.index(self.transport.rank) if self.transport.rank in stages else None

    @property
    def drafts(self) -> bool:
        return self.pipeline.speculates and self.transport.rank == self.roles.draft

    @property
    def num_uncommitted(self) -> int:
        """Uncommitted rows that every cache has room for."""
        wanted = (
            2
            * self.pipeline.num_runs(len(self.roles.stages))
            * self.pipeline.num_rows(TIMED_ROWS[-1])
        )
        return min(max(wanted, _LEAST_UNCOMMITTED), MOST_ROWS)

    @property
    def vocab_size(self) -> int:
        return config_sizes(self.setup.files.target)["vocab_size"]

    @property
    def context(self) -> int:
        return self.plan(0, range(1), self.setup.budget.unlimited()).context

    def section(self, index: int, layers: range) -> Section:
        """Return the section of a stage with these layers."""
        return Section(layers.start, layers.stop, index == 0, index == len(self.roles.stages) - 1)

    def plan(self, index: int, layers: range, room: MemoryBudget) -> MemoryPlan:
        """Plan this rank's memory as that stage, with the draft if it has it. Raises `UserError`."""
        files = self.setup.files
        section = checkpoint_of(files.target, self.section(index, layers))
        own_files = (files if self.drafts else files.alone)._replace(target=section)
        plan = replace(self.setup, files=own_files, budget=room).plan_for(self.num_uncommitted)
        if plan.turns:
            requirement = f"`context` must be at most {plan.turning_point} in stages"
            why = "which do not read a text anew where longrope changes its factors"
            raise UserError(
                f"{requirement}, {why}, got {plan.context}: lower it, or use `ranks` shards"
            )
        return plan

    def share_layers(self, tokenizer: Tokenizer | None) -> tuple[range, ...]:
        """Measure, and return the layers of each stage, so that the slowest is as fast as possible.

        Raises `UserError` on all ranks if one of them has no room, or if the draft's words differ
        from the target's `tokenizer`.
        """
        files = self.setup.files
        room = self.setup.budget.unlimited()
        try_together(self.transport, lambda: self._try_least(tokenizer))
        # all ranks measure at the same time: they may share links
        mine = None
        shape = model_shape(files.target, self.setup.dtype)
        if self.stage is not None:
            held = self.plan(self.stage, range(len(shape.layer_bytes)), room)
            mine = capacity_of(self.setup, held, shares_kv=True)
        gathered = gather_values(self.transport, mine, RankCapacity | None)
        capacities = [
            capacity for rank in self.roles.stages if (capacity := gathered[rank]) is not None
        ]
        load = Load(
            shape.layer_bytes,
            replace(self.setup, budget=room).plan_for(self.num_uncommitted).kv_bytes,
        )
        layers = stage_layers(capacities, load)
        bounds = [(stage.start, stage.stop) for stage in layers]
        # computed with the rates of the head's processor
        told_bounds = broadcast_from_head(self.transport, bounds, list[tuple[int, int]])
        return tuple(range(*bound) for bound in told_bounds)

    def _try_least(self, tokenizer: Tokenizer | None) -> None:
        """Raise `UserError` for a draft with other words, or no room for a layer or the draft."""
        files = self.setup.files
        if self.drafts and files.draft is not None:
            target, draft = (
                Vocabulary(config_sizes(checkpoint)["vocab_size"])
                for checkpoint in (files.target, files.draft)
            )
            check_vocabulary(tokenizer, files, target, draft)
        if self.stage is not None:
            self.plan(self.stage, range(1), self.setup.budget)
            return
        if not self.drafts or files.draft is None:
            return
        # a rank that only drafts needs room for its model and cache
        budget = self.setup.budget
        shape = model_shape(files.draft, self.setup.dtype)
        is_gpu = budget.gpu_bytes is not None
        needed_bytes = draft_bytes(shape, self.context, self.num_uncommitted, is_gpu=is_gpu)
        needed_bytes += RUNTIME_BYTES + noise_bytes(shape.vocab_size) + PATH_SCRATCH_BYTES
        if needed_bytes > budget.ram_bytes:
            raise UserError(
                f"needs {budget.size(needed_bytes)} of RAM for the draft, budget is "
                f"{budget.size(budget.ram_bytes)}: raise `ram`, or take a smaller draft"
            )


def refuse_encoders(files: ModelFiles) -> None:
    """Raise `UserError` for a model that stages cannot run."""
    for model in filter(None, files):
        if has_encoder(model.config):
            raise UserError(
                f"{model.name}: it has an encoder, and stages have none: leave `ranks` out"
            )
