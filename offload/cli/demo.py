"""The packaged pairs of models: a real run on any machine, without network, GPU or a model at hand.

The target of a pair is inflated to about a gigabyte without changing what it computes, and allowed
a quarter of that in memory, so that it streams.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.checkpoint.hub import checkpoint_of_config
from offload.checkpoint.packaged import PAIR, inflated_config, inflated_target
from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.engine.hooks import Progress
from offload.engine.request import Request
from offload.engine.text import load_tokenizer
from offload.errors import UserError, require
from offload.memory.plan import MemoryPlan
from offload.memory.planner import MemoryBudget, ModelFiles, least_budget
from offload.options import CHAT_PAIR
from offload.planning.load_options import LoadOptions
from offload.trees.spec import parse_tree
from offload.units import ByteSize

_CONTEXT = 512
_CHAT_BYTES = 10**9
_CHAT_CONTEXT = 1024


def demo_options(ram: str | int, tree: str, **options: Any) -> LoadOptions:
    """Return how the demo loads: on the CPU, since any GPU would hold all of the target."""
    looks_up = True if parse_tree(tree).kind in ("best", "dynamic") else None
    return LoadOptions(
        ram=ram, tree=tree, context=_CONTEXT, device="cpu", lookup=looks_up, **options
    )


def budget(size_bytes: int, ram: str | int | None, tree: str, rule: str) -> str | int:
    """Return `ram` if it works, or else a quarter of the size if that does. Raises `UserError`."""
    plan = _planned(PAIR, size_bytes, tree, context=_CONTEXT, rule=rule)
    if ram is None:
        return max(size_bytes // 4, least_budget(plan))
    try:
        plan(ByteSize.parse(ram, "`ram`"))
    except UserError as error:  # and no --context can be lowered
        raise UserError(str(error).partition(" or lower `context`")[0]) from None
    return ram


def _planned(pair: Path, size_bytes: int, tree: str, **how: Any) -> Callable[[int], MemoryPlan]:
    """Return what plans memory, by a budget, for a pair whose target is inflated to that size."""
    config = inflated_config(pair / "target", size_bytes)
    target = checkpoint_of_config(config, pair / "target" / "config.json")
    spec = parse_tree(tree)
    num_nodes = 1 if spec.is_chosen else spec.num_nodes * how.get("parallel", 1)
    files = ModelFiles(target, open_checkpoint(pair / "draft"))
    return lambda ram: MemoryBudget(ram=ram, **how).plan(files, num_nodes)


def packaged_chat(options: LoadOptions, progress: Progress) -> tuple[str, LoadOptions]:
    """Return the packaged target that answers questions, inflated, and how it is loaded.

    It streams from a quarter of its memory, unless the user has named another. Raises `UserError`.
    """
    context = options.context or _CHAT_CONTEXT
    ram = options.ram
    if ram is None:
        how = {"context": context, "rule": options.rule, "parallel": options.parallel}
        plan = _planned(CHAT_PAIR, _CHAT_BYTES, options.tree, **how)
        ram = max(_CHAT_BYTES // 4, least_budget(plan))
    device = options.device if options.device != "auto" else "cpu"
    folder = inflated_target(_CHAT_BYTES, progress, CHAT_PAIR / "target", "chat")
    return str(folder), replace(options, ram=ram, context=context, device=device)


def check(request: Request) -> None:
    """Refuse what cannot run before a target is made for it. Raises `UserError`."""
    num_new = request.max_new_tokens
    require(num_new > 1, "two speeds need -n of 2 or more", num_new, "try -n 96")
    vocab_size = model_shape(open_checkpoint(PAIR / "target")).vocab_size
    request.ids(load_tokenizer(PAIR / "target"), vocab_size, _CONTEXT)
