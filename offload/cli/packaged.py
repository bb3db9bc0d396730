"""The packaged pairs of models: a real run on any machine, without network, GPU or a model at hand.

The target of a pair is inflated to about a gigabyte without changing what it computes, and allowed
a quarter of that in memory, so that it streams.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.imagined import checkpoint_of_config
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.packaged import PAIR, inflated_config, inflated_target
from offload.checkpoint.small_files import read_config
from offload.engine.hooks import Progress
from offload.engine.request import Request
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.memory.plan import MemoryBudget
from offload.memory.planner import least_budget, plan_memory
from offload.options import CHAT_PAIR
from offload.planning.load_options import LoadOptions
from offload.trees.spec import parse_tree
from offload.units import ByteSize

_CONTEXT = 512
_CHAT_BYTES = 10**9
_CHAT_CONTEXT = 1024
# Nodes for which the least budget has room where the tree is chosen: without room none could pay.
_CHOSEN_NODES = 64
# A read covers whole blocks; in a file that does not exist yet, runs of tensors may begin anywhere.
_UNALIGNED_BYTES = 16 * BLOCK_BYTES


def demo_options(options: LoadOptions, size_bytes: int) -> LoadOptions:
    """Return the demo's options, with a target of that size. Raises `UserError` for too little memory."""
    looks_up = True if parse_tree(options.tree).kind in ("best", "dynamic") else None
    wanted = replace(options, context=_CONTEXT, lookup=looks_up)
    streamed, plan = _streamed(PAIR, size_bytes, wanted)
    with _without_context():
        plan(ByteSize.parse(streamed.ram or 0, "`ram`"))
    return streamed


def packaged_chat(options: LoadOptions, progress: Progress) -> LoadOptions:
    """Return the options of the packaged chat target, and make it large. Raises `UserError`."""
    wanted = replace(options, context=options.context or _CHAT_CONTEXT)
    streamed, _ = _streamed(CHAT_PAIR, _CHAT_BYTES, wanted)
    folder = inflated_target(_CHAT_BYTES, progress, CHAT_PAIR / "target", "chat")
    return replace(streamed, model=str(folder))


def _streamed(
    pair: Path, size_bytes: int, options: LoadOptions
) -> tuple[LoadOptions, Callable[[int], object]]:
    """Return the options of a pair with an enlarged target, and a function that plans its memory.

    It runs on the CPU, since any GPU would hold all of the target, and within a quarter of its size
    if that works, unless the user names other options.
    """
    config = inflated_config(pair / "target", size_bytes)
    target = checkpoint_of_config(config, pair / "target" / "config.json")
    draft = pair / "draft" / "config.json"
    files = ModelFiles(target, checkpoint_of_config(read_config(draft), draft))
    spec = parse_tree(options.tree)
    num_nodes = _CHOSEN_NODES if spec.is_chosen else spec.num_nodes
    num_nodes *= options.parallel
    limits = {"context": options.context, "rule": options.rule, "parallel": options.parallel}

    def plan(ram: int) -> object:
        return plan_memory(files, MemoryBudget(ram_bytes=ram, **limits), num_nodes)  # type: ignore[arg-type]

    ram = options.ram
    if ram is None:
        ram = max(size_bytes // 4, least_budget(plan) + _UNALIGNED_BYTES)
    device = "cpu" if options.device == "auto" else options.device
    return replace(options, ram=ram, device=device), plan


def check(request: Request) -> None:
    """Raise `UserError` for options that cannot run, before a target is made for them."""
    vocab_size = read_config(PAIR / "target" / "config.json")["vocab_size"]
    with _without_context():
        request.ids(load_tokenizer(PAIR / "target"), vocab_size, _CONTEXT)


@contextmanager
def _without_context() -> Iterator[None]:
    """Leave context out of an error's remedies: the demo's is fixed."""
    try:
        yield
    except UserError as error:
        line = str(error).partition(" or lower `context`")[0]
        raise UserError(line.replace("raise `context`, ", "")) from None
