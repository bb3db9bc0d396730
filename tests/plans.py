"""Memory plans in one line: a test names of a budget only what it is about."""

from collections.abc import Iterable
from typing import Any

from offload.checkpoint import sizes
from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.sizes import ModelShape
from offload.memory import planner
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.model.headers import specified
from offload.units import ByteSize


def model_shape(checkpoint: Checkpoint, dtype: str = "auto") -> ModelShape:
    """Sizes of a model whose layers are described first, as all that plan or load do."""
    return sizes.model_shape(specified(checkpoint), dtype)


def specified_files(*files: Checkpoint | None) -> ModelFiles:
    return ModelFiles(*(file and specified(file) for file in files))


def plan_memory(files: Iterable[Checkpoint | None], *, num_nodes: int, **budget: Any) -> MemoryPlan:
    """Plan for files; sizes may be written out, such as `1GiB`."""
    given = {name: budget.pop(name, None) for name in ("ram", "gpu")}
    sizes = {f"{name}_bytes": size and ByteSize.parse(size, f"`{name}`") for name, size in given.items()}
    return planner.plan_memory(specified_files(*files), MemoryBudget(**budget, **sizes), num_nodes)


def make_plan(
    target: ModelShape, draft: ModelShape | None, ram: int, gpu: int | None = None, *, num_nodes: int, **budget: Any
) -> MemoryPlan:
    """Plan for shapes, without any file."""
    return planner.make_plan(target, draft, MemoryBudget(ram_bytes=ram, gpu_bytes=gpu, **budget), num_nodes)
