"""Models, budget and device of one bench, opened by every command in the same way."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from offload.bench.harness.gate import Proof, Written, prove, reference
from offload.bench.harness.synthetic import open_source
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.generation_config import start_ids_of
from offload.checkpoint.open import open_headers
from offload.checkpoint.sizes import model_shape
from offload.engine.decoder import Decoder
from offload.engine.load import load
from offload.engine.request import with_start
from offload.errors import UserError
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.planner import least_budget, plan_memory
from offload.model.headers import describe
from offload.streaming.device import HOST, Device
from offload.trees.spec import parse_tree

PROMPT_TOKENS = 128
_ROOMY_BYTES = 1 << 50


class Setting(NamedTuple):
    target: Path
    draft: Path | None
    # the model whose draws are right: the target, or the small one that it was made from
    origin: Path
    ram_bytes: int
    device: str = "cpu"
    gpu_memory: str | int | None = None
    opened: Device = HOST
    # the ranks that run the target together
    ranks: str | None = None

    @property
    def shards(self) -> Sequence[Path]:
        return open_headers(self.target).shards

    @property
    def files(self) -> ModelFiles:
        draft = None if self.draft is None else describe(self.draft)
        return ModelFiles(describe(self.target), draft)

    @property
    def is_synthetic(self) -> bool:
        """Whether the target is made in memory, where no disk is read."""
        return self.origin.parent == self.target.parent

    def open(self, tree: str, **options: Any) -> Decoder:
        """Open a decoder with room for that tree, as `load` does. Raises `UserError`."""
        if options.get("lenience", 1) != 1:
            requirement = "what is measured is proved: `lenience` must be 1, got less"
            raise UserError(f"{requirement}: leave it out")
        settings = {
            "profile": "none",
            "open_source": open_source,
            "ranks": self.ranks,
            "device": self.opened,
            "gpu_memory": self.gpu_memory,
            **options,
        }
        return load(self.target, self.draft, self.ram_bytes, tree, **settings)

    def open_streamed(self, tree: str, **options: Any) -> Decoder:
        """Open a decoder with the least budget, so that every layer streams. Raises `UserError`."""
        budget = {"context": options["context"], "dtype": options.get("dtype", "auto")}
        num_nodes = parse_tree(tree).num_nodes
        if self.opened.has_own_memory:

            def plan(gpu: int) -> MemoryPlan:
                return plan_memory(
                    self.files,
                    MemoryBudget(ram_bytes=self.ram_bytes, gpu_bytes=gpu, **budget),
                    num_nodes,
                )

            place = self._replace(gpu_memory=least_budget(plan))
        else:
            place = self._replace(ram_bytes=least_ram(self.files, num_nodes, **budget))
        return place.open(tree, **options)

    def prove(self, written: Sequence[Written]) -> Proof:
        """Prove all runs, after all measuring, with decoders closed. Raises `UserError`."""
        draft = None if self.is_synthetic else self.draft
        models = (self.origin, draft, self.ram_bytes)
        is_mixture = model_shape(describe(self.origin)).routed_weights > 0

        def score_as_computed(*ids: Sequence[int]) -> Tensor:
            with reference(*models, "auto") as score:
                return score(*ids)

        with reference(*models) as score:
            return prove(self.begun(written), score, score_as_computed if is_mixture else None)

    def begun(self, written: Sequence[Written]) -> list[Written]:
        """Return the runs as the model saw them, each behind the tokens that start a text."""
        start = start_ids_of(open_headers(self.origin))
        return [run._replace(prompt_ids=with_start(run.prompt_ids, start)) for run in written]

    def as_dict(self) -> dict[str, Any]:
        values = {
            "target": self.target.name,
            "target_bytes": sum(path.stat().st_size for path in self.shards),
            "draft": self.draft and self.draft.name,
            "ram_bytes": self.ram_bytes,
            "device": self.device,
            "gpu_memory": self.gpu_memory,
        }
        return values if self.ranks is None else {**values, "ranks": self.ranks}


def least_ram(
    files: ModelFiles,
    num_nodes: int,
    holds: Callable[[MemoryPlan], bool] = lambda plan: True,
    **budget: Any,
) -> int:
    """Return the least RAM for which a plan is made that `holds`; `budget` has further fields."""

    def plan(ram: int) -> MemoryPlan:
        planned = plan_memory(files, MemoryBudget(ram_bytes=ram, **budget), num_nodes)
        if not holds(planned):
            raise UserError("it is too little")
        return planned

    return least_budget(plan)


class Need(NamedTuple):
    """The most that a bench opens at once, which a budget that is not named must have room for."""

    tree: str = "64x16"
    context: int = 1024
    rule: str = "match"
    parallel: int = 1

    def budget_bytes(self, files: ModelFiles) -> int:
        """Return a quarter of the target, or the least that works."""
        num_nodes = parse_tree(self.tree).num_nodes
        budget: Any = {"context": self.context, "rule": self.rule, "parallel": self.parallel}
        quarter_bytes = files.target.num_bytes // 4
        try:
            plan_memory(files, MemoryBudget(ram_bytes=_ROOMY_BYTES, **budget), num_nodes)
        except UserError:  # what no memory holds is refused when it is opened
            return quarter_bytes
        return max(quarter_bytes, least_ram(files, num_nodes, **budget))
