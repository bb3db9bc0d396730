"""From a path to a decoder: read headers, plan memory, build skeletons, place weights, start the stream.

Everything that can be refused is refused before the first weight is read. What has been opened when a later part fails
is closed again.
"""

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from offload.checkpoint import Checkpoint, open_checkpoint, read_json
from offload.config import parse_size
from offload.decode import Decoder
from offload.drafters import Drafter
from offload.drafters.lm import ModelDrafter
from offload.drafters.none import NoDrafter
from offload.errors import UserError
from offload.host_store import HostStore, allocate
from offload.layer_stream import LayerStream
from offload.layout import SlabLayout
from offload.machine import fastest_num_threads
from offload.model import BorrowedModel
from offload.plan import MemoryPlan, plan_memory
from offload.rules import find_rule
from offload.target import Target
from offload.text import load_tokenizer
from offload.topology import Topology, tree_to_fill

Progress = Callable[[int, int], None]  # bytes landed, bytes in all


def load(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    gpu_memory: str | int | None = None,
    ram: str | int | None = None,
    dtype: str = "auto",
    context: int | None = None,
    tree: str = "auto",
    rule: str = "match",
    threads: int | None = None,
    on_bytes: Progress = lambda done, total: None,
    on_layer: Callable[[], None] = lambda: None,
) -> Decoder:
    """Open a model that need not fit into memory.

    Args:
        model: directory or hub id of the target.
        draft: directory or hub id of a small model with the same vocabulary; without it every sweep yields one token.
        device: `auto` or `cpu`.
        gpu_memory: reserved for devices that have memory of their own.
        ram: budget such as `8GiB` for everything this call and later generations allocate; default: what is free.
        dtype: to compute in; `auto` is the checkpoint's own.
        context: positions to make room for, prompt and new tokens together; default 4096 or the model's limit.
        tree: `auto`, `none`, `NxD`, `chain:L` or `sequences:KxL`.
        rule: of acceptance, one of `config.RULES`; generations may choose another that needs no more memory.
        threads: compute threads; default: the fastest in a short measurement.
        on_bytes: hears of resident bytes as they land.
        on_layer: hears of every layer that a sweep has run.

    Raises:
        UserError: whatever the user can mend, in one line.
    """
    _check_device(device, gpu_memory)
    target_files, draft_files = open_checkpoint(model), None if draft is None else open_checkpoint(draft)
    topology, acceptance = tree_to_fill(tree, has_draft=draft_files is not None).build(), find_rule(rule)
    plan = plan_memory(
        target_files, draft_files, ram=ram, dtype=dtype, context=context, num_nodes=topology.num_nodes, rule=rule
    )
    end_ids = _end_ids(target_files)
    with ExitStack() as resources:
        target_model = BorrowedModel(target_files, dtype)
        resources.callback(target_model.close)
        tokenizer = load_tokenizer(target_files.directory)
        drafter = _load_drafter(draft_files, dtype, tokenizer, target_model, plan, resources)
        stream = _start_stream(target_files, target_model, plan, resources, on_bytes)
        num_threads = threads or _choose_threads(target_files, topology, target_model.dtype)
        torch.set_num_threads(num_threads)
        return Decoder(
            Target(target_model, stream, plan, on_layer=on_layer),
            drafter,
            plan=plan,
            topology=topology,
            rule=acceptance,
            tokenizer=tokenizer,
            end_ids=end_ids,
            num_threads=num_threads,
            resources=resources.pop_all(),
        )


def _load_drafter(
    checkpoint: Checkpoint | None,
    dtype: str,
    tokenizer: Any | None,
    target: BorrowedModel,
    plan: MemoryPlan,
    resources: ExitStack,
) -> Drafter:
    if checkpoint is None:
        return NoDrafter()
    model = BorrowedModel(checkpoint, dtype)
    resources.callback(model.close)
    _check_vocabulary(tokenizer, checkpoint, target, model)
    _fill(model, checkpoint)
    return ModelDrafter(model, target.vocab_size, plan.cache_slots)


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
        model.bind_rest(_read(store, model.rest_layout))
        for layer, layout in enumerate(model.layer_layouts):
            model.bind_layer(layer, _read(store, layout))
    finally:
        store.close()


def _read(store: HostStore, layout: SlabLayout) -> np.ndarray:
    slab = allocate(layout.slab_bytes)
    for future in store.read(layout, slab):
        future.result()
    return slab


def _start_stream(
    checkpoint: Checkpoint, model: BorrowedModel, plan: MemoryPlan, resources: ExitStack, on_bytes: Progress
) -> LayerStream:
    """Read what stays, and let the first streamed layers follow."""
    store = HostStore(checkpoint.shards)
    resources.callback(store.close)
    planned = zip(model.layer_layouts, plan.layer_bytes, strict=True)
    assert all(layout.slab_bytes <= size for layout, size in planned), "a layer is larger than planned"
    total_bytes, landed = model.rest_layout.slab_bytes + plan.resident_bytes, 0

    def count(num_bytes: int) -> None:
        nonlocal landed
        landed += num_bytes
        on_bytes(landed, total_bytes)

    model.bind_rest(_read(store, model.rest_layout))
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


def _choose_threads(checkpoint: Checkpoint, topology: Topology, dtype: torch.dtype) -> int:
    width = int(checkpoint.config.get("hidden_size") or 1024)
    return fastest_num_threads(topology.num_nodes, min(width, 4096), str(dtype).removeprefix("torch."))


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
