"""A rank's own part of the target: what it can take, as it has measured, and loading its layers."""

from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from offload.calibration.expansions import choose_expansion
from offload.calibration.link import link_bytes_per_s
from offload.calibration.threads import pick_threads
from offload.checkpoint.cuts import Section
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.engine.build import send_beside_layers
from offload.engine.resolve import ResolvedRun
from offload.memory.plan import MemoryPlan
from offload.model.section import SectionModel
from offload.model.wide_products import product_for
from offload.planning.shares import RankCapacity
from offload.streaming.layers import Layers, open_layers
from offload.streaming.scan import WeightScan
from offload.timer import timed

_TYPICAL_ROWS = 64
_MOST_WIDTH = 4096
_NUM_TIMES = 9
# assumed of a GPU: 16 lanes of PCIe 4, as achieved; its disk is measured
_DEVICE_LINK_BYTES_PER_S = 25e9


def capacity_of(run: ResolvedRun, held: MemoryPlan, *, shares_kv: bool) -> RankCapacity:
    """Return what this rank can take.

    All ranks of a host measure at one time, so that what they have in common is divided.

    Args:
        held: a roomy plan, for what it holds beside layers; keys and values count with them where
            ranks share those.
    """
    shards = run.files.target.shards
    disk = link_bytes_per_s(shards, limit_bytes_per_s=run.options.limit_bytes_per_s)
    gpu_bytes = run.budget.gpu
    return RankCapacity.beside(
        held,
        0 if shares_kv else held.kv_bytes,
        ram_bytes=run.budget.ram,
        gpu_bytes=gpu_bytes,
        link_bytes_per_s=disk if gpu_bytes is None else _DEVICE_LINK_BYTES_PER_S,
        disk_bytes_per_s=disk,
        compute_s=_compute_s(run),
    )


def _compute_s(run: ResolvedRun) -> float:
    """Return the seconds that a usual tree takes in all layers, by a product that is as wide."""
    files = run.files
    dtype = run.options.dtype
    width = min(config_sizes(files.target)["hidden_size"], _MOST_WIDTH)
    how = {
        "dtype": getattr(torch, compute_dtype_name(files.target, dtype)),
        "device": None if run.device is None else run.device.place,
    }
    rows = torch.zeros(_TYPICAL_ROWS, width, **how)
    weight = torch.zeros(width, width, **how)
    # A number on the host is the sign that a device is done as well.
    multiply = product_for(functional.linear, rows)
    once_s = median(timed(lambda: float(multiply(rows, weight)[0, 0])) for _ in range(_NUM_TIMES))
    return once_s * model_shape(files.target, dtype).num_weights / width**2


def load_section(
    run: ResolvedRun,
    checkpoint: Checkpoint,
    section: Section,
    plan: MemoryPlan,
    resources: ExitStack,
    **more: Any,
) -> tuple[SectionModel, Layers]:
    """Return the model of this rank's layers and the stream that brings them, which has begun.

    `more` goes to the model. What both hold is open as long as `resources`.
    """
    device = run.device
    place = torch.device("cpu") if device is None else device.place
    model = SectionModel(checkpoint, section, run.options.dtype, place, **more)
    resources.callback(model.close)
    scan = WeightScan(checkpoint, run.hooks.on_note)
    scan.expect(model.layer_layouts, plan.tier_L)
    store = run.open_source(
        checkpoint.shards,
        stamps=checkpoint.stamps,
        rate_limit_bytes_per_s=run.options.limit_bytes_per_s,
        watcher=scan,
    )
    resources.callback(store.close)
    if plan.is_streamed:
        for note in send_beside_layers(device, resources, model):
            run.hooks.on_note(note)
    model.read_rest(store.fetch)
    model.expand_with(choose_expansion(model, store.fetch, device).expansion)
    torch.set_num_threads(run.options.threads or pick_threads(model, None).start.sweep.num_threads)
    stream = open_layers(store, model.layer_layouts, plan, device, resources)
    stream.load_resident()
    return model, stream
