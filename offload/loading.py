"""From a path to a decoder: read headers, plan memory, build skeletons, place weights, start the stream.

Everything that can be refused is refused before the first weight is read. What has been opened when a later part fails
is closed again.
"""

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from offload.checkpoint import Checkpoint, open_checkpoint, read_json
from offload.config import Sampling, parse_rate, parse_size
from offload.decode import Decoder
from offload.drafters import Drafter
from offload.drafters.lm import ModelDrafter
from offload.drafters.none import NoDrafter
from offload.errors import UserError
from offload.host_store import HostStore
from offload.layer_stream import LayerStream
from offload.model import BorrowedModel
from offload.plan import MemoryPlan, default_ram_bytes, plan_memory, ram_warning
from offload.rules import find_rule
from offload.survey import Situation, look_around, make_trees, pick_num_threads
from offload.target import Target
from offload.text import load_tokenizer
from offload.tree_spec import tree_to_fill
from offload.trees import Trees

Progress = Callable[[int, int], None]  # bytes landed, bytes in all


def load(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    ram: str | int | None = None,
    tree: str = "auto",
    rule: str = "match",
    *,
    device: str = "auto",
    gpu_memory: str | int | None = None,
    dtype: str = "auto",
    context: int | None = None,
    threads: int | None = None,
    sampling: Sampling | None = None,
    profile: str | os.PathLike[str] | None = None,
    link_limit: str | int | None = None,
    on_bytes: Progress = lambda done, total: None,
    on_layer: Callable[[], None] = lambda: None,
) -> Decoder:
    """Open a model that need not fit into memory.

    Args:
        model: directory or hub id of the target.
        draft: directory or hub id of a small model with the same vocabulary; without it every sweep yields one token.
        ram: budget such as `8GiB` for everything this call and later generations allocate; default: what is free.
        tree: `auto`, `none`, `NxD`, `grown:NxD`, `chain:L` or `sequences:KxL`; `auto` chooses for this machine.
        rule: of acceptance, one of `config.RULES`; generations may choose another that needs no more memory.
        device, gpu_memory: `auto` or `cpu`; the budget is reserved for devices that have memory of their own.
        dtype: to compute in; context: positions to make room for, prompt and new tokens together.
        threads: compute threads (default: the fastest); sampling: of most runs, whose automatic tree sets the memory.
        profile: file written by `offload tune`, or `none`; default: the one in the cache that holds.
        link_limit: bytes per second, such as `400MB`, that the stream is slowed down to, for studies.
        on_bytes, on_layer: hear of resident bytes as they land, and of every layer that a sweep has run.

    Raises:
        UserError: whatever the user can mend, in one line.
    """
    _check_device(device, gpu_memory)
    limit, situation = parse_rate(link_limit, "--link-limit"), Situation(sampling or Sampling(), rule, threads)
    files = _Files(open_checkpoint(model), None if draft is None else open_checkpoint(draft))
    wish, acceptance = tree_to_fill(tree, rule, has_draft=files.draft is not None), find_rule(rule)
    plan_for = _planner(files, ram=ram, dtype=dtype, context=context, rule=rule)
    plan_for(1 if wish.kind == "auto" else wish.build().num_nodes)  # refuses before a weight is read
    with ExitStack() as resources:
        pair = _open_pair(files, dtype, limit, resources)
        trees = make_trees(wish, *files, dtype, profile, plan_for)
        plan, num_threads = _plan_tree(trees, pair, situation, plan_for)
        stream = _start_stream(pair.store, pair.target, plan, on_bytes)
        decoder = Decoder(
            Target(pair.target, stream, plan, on_layer=on_layer),
            pair.drafter(plan),
            plan=plan,
            trees=trees,
            rule=acceptance,
            tokenizer=pair.tokenizer,
            end_ids=pair.end_ids,
            num_threads=num_threads,
            resources=resources.pop_all(),
        )
        decoder.notes += [warning for warning in [ram_warning(ram) if ram else None] if warning]
        return decoder


class _Files(NamedTuple):
    """Both checkpoints."""

    target: Checkpoint
    draft: Checkpoint | None


class _Pair(NamedTuple):
    """Both models without the target's layers."""

    target: BorrowedModel  # embeddings and head are bound
    draft: BorrowedModel | None  # all of it is
    store: HostStore  # of the target
    tokenizer: Any | None
    end_ids: frozenset[int]

    def drafter(self, plan: MemoryPlan) -> Drafter:
        """What grows the trees."""
        return NoDrafter() if self.draft is None else ModelDrafter(self.draft, self.target.vocab_size, plan.cache_slots)


def _planner(
    files: _Files, *, ram: str | int | None, dtype: str, context: int | None, rule: str
) -> Callable[[int], MemoryPlan]:
    """Plans for trees of any size against one budget: what is free must not be asked again while loading takes some."""
    ram_bytes = default_ram_bytes() if ram is None else ram
    limits: dict[str, Any] = {"ram": ram_bytes, "dtype": dtype, "context": context, "rule": rule}
    return lambda num_nodes: plan_memory(*files, num_nodes=num_nodes, **limits)


def _open_pair(files: _Files, dtype: str, limit_bytes_per_s: int | None, resources: ExitStack) -> _Pair:
    target, end_ids = BorrowedModel(files.target, dtype), _end_ids(files.target)
    resources.callback(target.close)
    tokenizer, draft = load_tokenizer(files.target.directory), None
    if files.draft is not None:
        draft = BorrowedModel(files.draft, dtype)
        resources.callback(draft.close)
        _check_vocabulary(tokenizer, files.draft, target, draft)
        _fill(draft, files.draft)
    store = HostStore(files.target.shards, rate_limit_bytes_per_s=limit_bytes_per_s)
    resources.callback(store.close)
    target.bind_rest(store.fetch(target.rest_layout))
    return _Pair(target, draft, store, tokenizer, end_ids)


def _plan_tree(
    trees: Trees, pair: _Pair, situation: Situation, plan_for: Callable[[int], MemoryPlan]
) -> tuple[MemoryPlan, int]:
    """Settle the tree, and with it the memory plan and the number of compute threads."""
    num_threads = situation.threads
    if pair.draft is not None and trees.wish.kind == "auto":
        num_threads = look_around(trees, pair.target, pair.draft, pair.store, situation)
    plan = plan_for(trees.for_run(situation.sampling, situation.rule).shape.num_nodes)
    trees.settle(plan)
    num_threads = num_threads or pick_num_threads(pair.target, plan.num_nodes)
    torch.set_num_threads(num_threads)
    return plan, num_threads


def _check_device(device: str, gpu_memory: str | int | None) -> None:
    if device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UserError(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}: try --device auto")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device} needs a CUDA device and driver, this machine shows none: use --device cpu")
    if device.startswith("cuda"):
        raise UserError(f"--device {device}: this version streams to the CPU only: use --device cpu")
    if gpu_memory is not None:
        parse_size(gpu_memory, "--gpu-mem")
        raise UserError("--gpu-mem limits a CUDA device, and this run uses the CPU: leave it out and use --ram")


def resident_model(checkpoint: Checkpoint, dtype: str) -> BorrowedModel:
    """A small model with all its weights in memory, bound for good."""
    model = BorrowedModel(checkpoint, dtype)
    _fill(model, checkpoint)
    return model


def _fill(model: BorrowedModel, checkpoint: Checkpoint) -> None:
    store = HostStore(checkpoint.shards)
    try:
        model.bind_rest(store.fetch(model.rest_layout))
        for layer, layout in enumerate(model.layer_layouts):
            model.bind_layer(layer, store.fetch(layout))
    finally:
        store.close()


def _start_stream(store: HostStore, model: BorrowedModel, plan: MemoryPlan, on_bytes: Progress) -> LayerStream:
    """Read what stays, and let the first streamed layers follow."""
    planned = zip(model.layer_layouts, plan.layer_bytes, strict=True)
    assert all(layout.slab_bytes <= size for layout, size in planned), "a layer is larger than planned"
    total_bytes, landed = model.rest_layout.slab_bytes + plan.resident_bytes, 0

    def count(num_bytes: int) -> None:
        nonlocal landed
        landed += num_bytes
        on_bytes(landed, total_bytes)

    count(model.rest_layout.slab_bytes)
    stream = LayerStream(store, model.layer_layouts, plan.is_resident, plan.num_slots)
    stream.load_resident(count)
    return stream


def _check_vocabulary(tokenizer: Any | None, draft: Checkpoint, target: BorrowedModel, drafter: BorrowedModel) -> None:
    """Same ids, same meaning. Widths may differ where only padding does, which tokenizers can tell."""
    draft_tokenizer = load_tokenizer(draft.directory)
    if tokenizer is not None and draft_tokenizer is not None:
        same = tokenizer.get_vocab() == draft_tokenizer.get_vocab()
    else:
        same = target.vocab_size == drafter.vocab_size
    if not same:
        raise UserError(
            f"the draft must share the target's vocabulary, {draft.directory.name} has {drafter.vocab_size} entries "
            f"of its own against {target.vocab_size}: choose a smaller model of the target's family"
        )


def _end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Tokens that end a sequence, as transformers finds them: the generation config first, then the model's."""
    settings = checkpoint.config
    if (checkpoint.directory / "generation_config.json").is_file():
        settings = {**settings, **read_json(checkpoint.directory / "generation_config.json")}
    named = settings.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int for token in ids):
        raise UserError(
            f"{checkpoint.directory.name}: eos_token_id must be a token id or several, got {named!r}: fix it"
        )
    return frozenset(ids)
